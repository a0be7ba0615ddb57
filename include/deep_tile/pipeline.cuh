// Pipeline state for the ring of shared-memory stages, and mbarrier waits.
#pragma once

#include "watch.cuh"

namespace deep_tile {

// Stage index and phase, the parity of its current round. A consumer waits for `phase`, the producer for `phase ^ 1`: a
// fresh mbarrier counts as complete for parity 1, so the first round falls through.
template <int stages>
struct PipelineState {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // Advances by several stages, a round at most.
    __device__ __forceinline__ void advance(int count) {
        stage += count;
        if (stage >= stages) {
            stage -= stages;
            phase ^= 1;
        }
    }
};

// Progress along tile columns, for a resident `b`: whether the current tile begins its column, and whether it ends it.
struct ColumnState {
    u32 phase = 0;  // parity for the column's mbarriers
    bool begins = true;
    bool ends = false;

    // Advances to the next tile.
    __device__ __forceinline__ void advance() {
        phase ^= ends;
        begins = ends;
    }
};

__device__ __forceinline__ void wait(const u64& barrier, u32 parity) {
    const u32 address = ptx::smem_address(&barrier);
    if constexpr (watch.records != 0) {
        bounded_wait(address, parity);
    } else {
        while (!ptx::mbarrier_try_wait_parity(address, parity)) {
        }
    }
}

}  // namespace deep_tile
