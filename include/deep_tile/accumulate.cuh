// Main loop for kinds without promotion.
#pragma once

#include "output.cuh"
#include "warpgroup.cuh"

namespace deep_tile {

// WGMMA accumulates over all of K. The next stage is issued before this one is awaited, so the tensor cores find it
// queued. Stages have no scales, and warpgroups take no turns. The interface is that of LoopState.
template <GemmConfig config>
class Accumulate {
   public:
    __device__ __forceinline__ Accumulate(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : math_(params, smem, warpgroup) {}

    __device__ __forceinline__ int steps() const { return math_.steps(); }
    __device__ __forceinline__ void acquire() const { math_.acquire(); }
    __device__ __forceinline__ void begin_tile() const {}
    __device__ __forceinline__ void clear(Accumulators<config>&) const {}  // the first WGMMAs overwrite
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler& tiles) {
        math_.turn_to_tile(tiles);
    }
    __device__ __forceinline__ void end() const { math_.end(); }

    // Computes this CTA's part of a tile, whose first stage is acquired, into `sums`. If there are `more` tiles,
    // acquires the next one's first stage. meanwhile(0) runs during the first WGMMAs.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int, bool more, Meanwhile meanwhile) {
        if constexpr (config.integer_sums) {
            MmaSums integers;
            add_up(integers, more, meanwhile);
#pragma unroll
            for (int i = 0; i < config.chunks * (config.mma_n / 2); ++i) {
                (&sums[0][0][0])[i] = as_sum<config>((&integers[0][0][0])[i]);
            }
        } else {
            add_up(sums, more, meanwhile);
        }
    }

   private:
    using MmaSums = MmaSum<config>[config.chunks_m][config.chunks_n][config.mma_n / 2];

    template <typename Meanwhile>
    __device__ __forceinline__ void add_up(MmaSums& sums, bool more, Meanwhile meanwhile) {
        pin_all(sums);
        math_.template begin_sums<true>(sums);
        meanwhile(0);
        for (int left = math_.steps(); left > 1; --left) {
            const int stage = math_.stage(), slot = math_.slot();
            math_.advance();
            math_.acquire();
            math_.template begin_sums<false>(sums);
            ptx::wgmma_wait_group<1>();
            math_.release(stage, slot);
        }
        const int stage = math_.stage(), slot = math_.slot();
        math_.advance();
        if (more) math_.acquire();
        ptx::wgmma_wait_group<0>();
        pin_all(sums);
        math_.release(stage, slot);
    }

    static __device__ __forceinline__ void pin_all(MmaSums& sums) {
#pragma unroll
        for (int i = 0; i < config.chunks; ++i) pin(sums[i / config.chunks_n][i % config.chunks_n]);
    }

    MathWarpgroup<config> math_;
};

}  // namespace deep_tile
