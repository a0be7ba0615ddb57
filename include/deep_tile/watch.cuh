// Waits that end: the debug build, in which a hang becomes an error that says who waits for what.
//
// deep_tile/watch.py makes the records, in host memory that outlives a failed launch, and reads them. A record belongs to
// one warp of one thread block. Without DEEP_TILE_WATCH, which codegen.py defines, nothing of this is in a kernel.
// Named barriers cannot be waited for with an end; a warp that hangs at one shows by what the others wait for.
#pragma once

#include "ptx.cuh"

namespace deep_tile {

struct Watch {
    u64 records;   // where they are; 0: no debug build
    u64 limit_ns;  // of one wait
    u32 kernel;    // the kernel's number, from 1
};

#ifndef DEEP_TILE_WATCH
#define DEEP_TILE_WATCH {0, 0, 0}
#endif
constexpr Watch watch = DEEP_TILE_WATCH;

struct WatchRecord {
    u32 kernel;       // 0: nothing recorded
    u32 barriers;     // address of its first barrier in shared memory
    u32 row, column;  // first element of the tile that the warp turned to last
    u32 waits;        // 1: for longer than the limit
    u32 barrier;      // address of what it waits for
    u32 parity;       // of the phase that is awaited
    u32 unused;
};

constexpr int warps_per_block = 16;  // at most, and the records of a block
constexpr int watched_blocks = 256;  // of the grid

__device__ __forceinline__ volatile WatchRecord& own_record() {
    const u32 block = blockIdx.x % watched_blocks, warp = threadIdx.x / warp_threads;
    return reinterpret_cast<volatile WatchRecord*>(watch.records)[block * warps_per_block + warp];
}

// Begins a warp's record. `barriers` is the first of its block, SharedStorage.full.
__device__ __forceinline__ void record_launch(const u64& barriers) {
    if constexpr (watch.records != 0) {
        if (ptx::elect_sync()) {
            volatile WatchRecord& record = own_record();
            record.kernel = watch.kernel;
            record.barriers = ptx::smem_address(&barriers);
            record.waits = 0;
        }
        __syncwarp();
    }
}

// Writes down the tile that a warp turns to.
__device__ __forceinline__ void record_tile(int row, int column) {
    if constexpr (watch.records != 0) {
        if (ptx::elect_sync()) {
            own_record().row = row;
            own_record().column = column;
        }
        __syncwarp();
    }
}

__device__ __forceinline__ void record_wait(u32 barrier, u32 parity) {
    if (ptx::elect_sync()) {
        volatile WatchRecord& record = own_record();
        record.barrier = barrier;
        record.parity = parity;
        record.waits = 1;
        __threadfence_system();
    }
    __syncwarp();
}

// Ends the launch after twice the limit: by then every warp that hangs has written down what it waits for. Votes keep the
// warp together, as WGMMA wants it.
__device__ __forceinline__ void bounded_wait(u32 barrier, u32 parity) {
    constexpr u32 all_lanes = 0xffffffff;
    const u64 begin = ptx::globaltimer();
    bool recorded = false;
    while (!__all_sync(all_lanes, ptx::mbarrier_try_wait_parity(barrier, parity))) {
        const u64 waited = ptx::globaltimer() - begin;
        if (!recorded && __all_sync(all_lanes, waited > watch.limit_ns)) {
            record_wait(barrier, parity);
            recorded = true;
        }
        if (__all_sync(all_lanes, waited > 2 * watch.limit_ns)) ptx::trap();
    }
}

}  // namespace deep_tile
