// The position in a ring of shared-memory stages, and waiting on its barriers.
#pragma once

#include "watch.cuh"

namespace deep_tile {

// Which stage comes next and the parity of its current round. A consumer waits for `phase`, the producer for
// `phase ^ 1`: a barrier that was never completed counts as complete for parity 1, so the first round falls through.
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

    // By several stages, a round at most.
    __device__ __forceinline__ void advance(int count) {
        stage += count;
        if (stage >= stages) {
            stage -= stages;
            phase ^= 1;
        }
    }
};

// Progress along columns of tiles, for a resident `b`: whether the present tile begins its column, and whether it ends it.
struct ColumnState {
    u32 phase = 0;  // as above, of the column's barriers
    bool begins = true;
    bool ends = false;

    // To the next tile.
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
