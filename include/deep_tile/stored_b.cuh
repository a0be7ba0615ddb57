// Where `b` lies in shared memory: in the ring with `a`, or in slots of its own. The operands' warp (operands.cuh) and the
// math warpgroups (warpgroup.cuh) each follow it by a copy of their own.
#pragma once

#include "pipeline.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// `b` in the ring, beside its K block of `a`.
template <GemmConfig config>
struct RingB {
    static constexpr bool travels_with_a = true;

    // Where the K block `step` of a tile goes, and the barrier that completes when it is there.
    static __device__ __forceinline__ int slot(int stage, int) { return stage; }
    static __device__ __forceinline__ u32 full(SharedStorage<config>& smem, int stage, int) {
        return ptx::smem_address(&smem.full[stage]);
    }

    // To the tile that the scheduler gives next.
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler&) {}

    // The operands' warp: whether it requests the tile's `b`, and whether that of the `next` tile into L2: steps of the
    // first round, of which each of the blocks that share these columns takes some.
    __device__ __forceinline__ bool is_requested() const { return true; }
    __device__ __forceinline__ bool prefetches(const GemmParams& params, Tile<config> next, int step) const {
        if (!config.prefetches_b || !next.valid || step >= config.stages) return false;
        return ((next.out_row() / config.block_m + step) & ((1 << params.raster_rows_log2) - 1)) == 0;
    }
    __device__ __forceinline__ void await_empty(SharedStorage<config>&, int) const {}
    __device__ __forceinline__ void end_tile() {}

    // A math warpgroup, stage by stage.
    __device__ __forceinline__ int slot(int stage) const { return stage; }
    __device__ __forceinline__ void await_full(SharedStorage<config>&) const {}
    __device__ __forceinline__ void advance(int) {}
    __device__ __forceinline__ void release(SharedStorage<config>&, int) const {}
};

// `b` in slots of its own, one for each K block, where it stays while the block works down a column of tiles.
template <GemmConfig config>
class ResidentB {
   public:
    static constexpr bool travels_with_a = false;

    static __device__ __forceinline__ int slot(int, int step) { return step; }
    static __device__ __forceinline__ u32 full(SharedStorage<config>& smem, int, int step) {
        return ptx::smem_address(&smem.resident.full[step]);
    }

    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler& tiles) {
        column_.ends = tiles.ends_column();
    }

    // All of the next column's: 1 to 3 % at k = 512 (H200, 2026-11-21).
    __device__ __forceinline__ bool is_requested() const { return column_.begins; }
    __device__ __forceinline__ bool prefetches(const GemmParams&, Tile<config> next, int) const {
        return next.valid && column_.ends;
    }
    __device__ __forceinline__ void await_empty(SharedStorage<config>& smem, int step) const {
        if (column_.begins) wait(smem.resident.empty[step], column_.phase ^ 1);
    }
    __device__ __forceinline__ void end_tile() { column_.advance(); }

    __device__ __forceinline__ int slot(int) const { return step_; }
    __device__ __forceinline__ void await_full(SharedStorage<config>& smem) const {
        if (column_.begins) wait(smem.resident.full[step_], column_.phase);
    }
    __device__ __forceinline__ void advance(int steps) {
        step_ += 1;
        if (step_ < steps) return;
        step_ = 0;
        column_.advance();
    }
    __device__ __forceinline__ void release(SharedStorage<config>& smem, int slot) const {
        ptx::mbarrier_arrive(ptx::smem_address(&smem.resident.empty[slot]), column_.ends);
    }

   private:
    int step_ = 0;  // of the tile, a math warpgroup's present one
    ColumnState column_;
};

template <GemmConfig config>
using StoredB = typename Conditional<config.resident_b(), ResidentB<config>, RingB<config>>::type;

}  // namespace deep_tile
