// Storage of `b` in shared memory: in the ring with `a`, or in its own slots, resident or converted. The operand warp
// (operands.cuh) and the math warpgroups (warpgroup.cuh) each follow it with their own copy.
#pragma once

#include "pipeline.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// Ring storage: `b` lies in the stage, beside its K block of `a`.
template <GemmConfig config>
struct RingB {
    static constexpr bool travels_with_a = true;

    // Slot for a tile's K block `step`, and the mbarrier that completes when it has landed.
    static __device__ __forceinline__ int slot(int stage, int) { return stage; }
    static __device__ __forceinline__ u32 full(SharedStorage<config>& smem, int stage, int) {
        return ptx::smem_address(&smem.full[stage]);
    }

    // Moves to the tile that the scheduler returns next.
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler&) {}

    // For the operand warp: whether it loads the tile's `b`, and whether it prefetches K block `step` of the `next`
    // tile's `b` into L2. The CTAs that share these columns divide the first round of stages among themselves.
    __device__ __forceinline__ bool is_requested() const { return true; }
    __device__ __forceinline__ bool prefetches(const GemmParams& params, Tile<config> next, int step) const {
        if (!config.prefetches_b || !next.valid || step >= config.stages) return false;
        return ((next.out_row() / config.block_m + step) & ((1 << params.raster_rows_log2) - 1)) == 0;
    }
    __device__ __forceinline__ void await_empty(SharedStorage<config>&, int) const {}
    __device__ __forceinline__ void end_tile() {}

    // For a math warpgroup, stage by stage.
    __device__ __forceinline__ int slot(int stage) const { return stage; }
    __device__ __forceinline__ void await_full(SharedStorage<config>&) const {}
    __device__ __forceinline__ void advance(int) {}
    __device__ __forceinline__ void release(SharedStorage<config>&, int) const {}
};

// Resident storage: a slot per `b` K block, kept while the CTA works down a column of tiles.
template <GemmConfig config>
class ResidentB {
   public:
    static constexpr bool travels_with_a = false;

    static __device__ __forceinline__ int slot(int, int step) { return step; }
    static __device__ __forceinline__ u32 full(SharedStorage<config>& smem, int, int step) {
        return ptx::smem_address(&smem.slots.full[step]);
    }

    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler& tiles) {
        column_.ends = tiles.ends_column();
    }

    // Prefetches the whole next column: 1 to 3 % at k = 512 (H200, 2026-11-21).
    __device__ __forceinline__ bool is_requested() const { return column_.begins; }
    __device__ __forceinline__ bool prefetches(const GemmParams&, Tile<config> next, int) const {
        return next.valid && column_.ends;
    }
    __device__ __forceinline__ void await_empty(SharedStorage<config>& smem, int step) const {
        if (column_.begins) wait(smem.slots.empty[step], column_.phase ^ 1);
    }
    __device__ __forceinline__ void end_tile() { column_.advance(); }

    __device__ __forceinline__ int slot(int) const { return step_; }
    __device__ __forceinline__ void await_full(SharedStorage<config>& smem) const {
        if (column_.begins) wait(smem.slots.full[step_], column_.phase);
    }
    __device__ __forceinline__ void advance(int steps) {
        step_ += 1;
        if (step_ < steps) return;
        step_ = 0;
        column_.advance();
    }
    __device__ __forceinline__ void release(SharedStorage<config>& smem, int slot) const {
        ptx::mbarrier_arrive(ptx::smem_address(&smem.slots.empty[slot]), column_.ends);
    }

   private:
    int step_ = 0;  // a math warpgroup's current K block
    ColumnState column_;
};

// Converted storage: converter warps (packed_b.cuh) write 8-bit K blocks to a ring of slots, for which math warpgroups
// wait; the operand warp loads `a` alone.
template <GemmConfig config>
class ConvertedB : public RingB<config> {
   public:
    using RingB<config>::slot;
    static constexpr bool travels_with_a = false;

    __device__ __forceinline__ bool is_requested() const { return false; }

    __device__ __forceinline__ int slot(int) const { return state_.stage; }

    // Orders the converter warps' writes before WGMMA's reads. Math warps fence, because a fence in the converter warps
    // would wait for the writes and delay the next K block: 64x128 takes 7 % less, 128x128 4 %, 256x128 the same (H100,
    // 2026-11-26).
    __device__ __forceinline__ void await_full(SharedStorage<config>& smem) const {
        wait(smem.slots.full[state_.stage], state_.phase);
        ptx::fence_proxy_async();
    }
    __device__ __forceinline__ void advance(int) { state_.advance(); }
    __device__ __forceinline__ void release(SharedStorage<config>& smem, int slot) const {
        ptx::mbarrier_arrive(ptx::smem_address(&smem.slots.empty[slot]), threadIdx.x % warp_threads < config.slot_lanes());
    }

   private:
    PipelineState<config.b_slots> state_;
};

template <GemmConfig config>
using SlottedB = typename Conditional<config.packed_b(), ConvertedB<config>, ResidentB<config>>::type;

template <GemmConfig config>
using StoredB = typename Conditional<config.has_slots(), SlottedB<config>, RingB<config>>::type;

}  // namespace deep_tile
