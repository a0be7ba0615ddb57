// Bounded waits: the debug build, in which a hang becomes an error that names every waiting warp and its barrier.
//
// deep_tile/watch.py allocates the records, in host memory that outlives a failed launch, and reads them. A record
// belongs to one warp of one CTA. Kernels contain this only with DEEP_TILE_WATCH, which codegen.py defines.
// Named barriers have no bounded wait; a warp that hangs at one shows by the waits of the others.
#pragma once

#include "ptx.cuh"

namespace deep_tile {

struct Watch {
    u64 records;   // the records' address; 0: no debug build
    u64 limit_ns;  // per wait
    u32 kernel;    // kernel number, from 1
};

#ifndef DEEP_TILE_WATCH
#define DEEP_TILE_WATCH {0, 0, 0}
#endif
constexpr Watch watch = DEEP_TILE_WATCH;

struct WatchRecord {
    u32 kernel;       // 0: nothing recorded
    u32 barriers;     // its first mbarrier's shared-memory address
    u32 row, column;  // the warp's latest tile's first element
    u32 waits;        // 1: waiting for longer than the limit
    u32 barrier;      // the awaited mbarrier's address
    u32 parity;       // the awaited phase's parity
    u32 unused;
};

constexpr int warps_per_block = 20;  // at most; records per CTA
constexpr int watched_blocks = 256;  // in the grid

__device__ __forceinline__ volatile WatchRecord& own_record() {
    const u32 block = blockIdx.x % watched_blocks, warp = threadIdx.x / warp_threads;
    return reinterpret_cast<volatile WatchRecord*>(watch.records)[block * warps_per_block + warp];
}

// Begins a warp's record. `barriers` is the CTA's first mbarrier, SharedStorage.full.
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

// Records the tile that a warp begins.
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

// Waits, but aborts the launch after twice the limit: by then every hanging warp has recorded its wait. Votes keep the
// warp together, as WGMMA requires.
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
