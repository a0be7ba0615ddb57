// One math warpgroup: its stage, its WGMMAs, its turns. Main loops consist of its steps.
#pragma once

#include "promotion.cuh"
#include "scales.cuh"
#include "stored_b.cuh"

namespace deep_tile {

// Releases stages to their producers: this CTA's producer warps, and the CTAs that share operands. Every lane arrives
// locally, one lane per warp in each peer: racecheck follows an mbarrier's arrivals but not __syncwarp, and this costs
// nothing (H200, 2026-11-21).
template <GemmConfig config>
class Releaser {
   public:
    __device__ __forceinline__ explicit Releaser(SharedStorage<config>& smem) : empty_(ptx::smem_address(smem.empty)) {
        if constexpr (config.multicast()) {
            peer_empty_ = ptx::mapa(empty_, ClusterPlace<config>().peer(min(lane(), config.peers() - 1)));
        }
    }

    // Releases a stage that the warp has read.
    __device__ __forceinline__ void release(int stage) const {
        constexpr u32 barrier_bytes = sizeof(u64);
        ptx::mbarrier_arrive(empty_ + stage * barrier_bytes);
        if constexpr (config.multicast()) {
            ptx::mbarrier_arrive_cluster(peer_empty_ + stage * barrier_bytes, lane() < config.peers());
        }
    }

   private:
    static __device__ __forceinline__ int lane() { return threadIdx.x % warp_threads; }

    const u32 empty_;
    u32 peer_empty_;
};

// State of one math warpgroup at its current stage.
template <GemmConfig config>
class MathWarpgroup {
   public:
    __device__ __forceinline__ MathWarpgroup(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : smem_(smem),
          releaser_(smem),
          range_(k_range<config>(params)),
          warpgroup_(warpgroup),
          first_{descriptor_address(smem.a[0] + warpgroup * config.rows_per_warpgroup * k_block_bytes) |
                     OperandLayout<config.a_span>::low,
                 descriptor_address(smem.b[0]) | OperandLayout<config.b_span>::low} {
        const int thread = threadIdx.x % warpgroup_threads;
        scale_slot_ = a_scale_slot<config>(warpgroup * config.rows_per_warpgroup + thread / warp_threads * 16 +
                                           thread % warp_threads / 4);
        if constexpr (config.carries_descriptors) carried_.start(first_);
        if (warpgroup == 1) end_turn();  // warpgroup 0 begins
    }

    __device__ __forceinline__ int warpgroup() const { return warpgroup_; }

    // Stages per tile.
    __device__ __forceinline__ int steps() const { return range_.end - range_.begin; }

    // Current stage, and the slot of its `b`.
    __device__ __forceinline__ int stage() const { return state_.stage; }
    __device__ __forceinline__ int slot() const { return b_.slot(state_.stage); }

    // Takes from the scheduler, before a tile, where its column ends and, if tiles differ, how many stages it has.
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler& tiles) {
        b_.turn_to_tile(tiles);
        if constexpr (config.by_k) range_ = {0, tiles.steps()};
    }

    // Waits for the current stage.
    __device__ __forceinline__ void acquire() const {
        wait(smem_.full[state_.stage], state_.phase);
        b_.await_full(smem_);
    }

    // Waits for the current stage and reads its scales.
    __device__ __forceinline__ void acquire(Scales<config>& scales) const {
        acquire();
        scales.load(smem_, state_.stage, scale_slot_);
    }

    // Advances to the next stage.
    __device__ __forceinline__ void advance() {
        state_.advance();
        if constexpr (config.hides_addresses()) state_.stage = ptx::opaque(state_.stage);
        b_.advance(steps());
    }

    // Releases a stage after reading it.
    __device__ __forceinline__ void release(int stage, int slot) const {
        releaser_.release(stage);
        b_.release(smem_, slot);
    }

    // Issues the WGMMAs for one chunk of a stage.
    __device__ __forceinline__ void begin(Blocks<config>& blocks, int stage, int slot, int chunk_m, int chunk_n) const {
        await_turn();
        if constexpr (config.carries_descriptors) {
            begin_blocks<config>(blocks, carried_);
        } else {
            begin_blocks<config>(blocks, descriptors(stage, slot, chunk_m, chunk_n));
        }
        end_turn();
    }

    // Issues the current stage's WGMMAs for all chunks, added to the tile's sums; the `first` stage overwrites them.
    template <bool first>
    __device__ __forceinline__ void begin_sums(MmaSum<config> (&sums)[config.chunks_m][config.chunks_n][config.mma_n / 2]) const {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < config.chunks; ++i) {
            const int chunk_m = i / config.chunks_n, chunk_n = i % config.chunks_n;
            add_products<config, first>(sums[chunk_m][chunk_n], descriptors(stage(), slot(), chunk_m, chunk_n));
        }
        ptx::wgmma_commit_group();
    }

    // Issues the WGMMAs for the current stage's first chunk.
    __device__ __forceinline__ void begin(Blocks<config>& blocks) const { begin(blocks, stage(), slot(), 0, 0); }

    // Moves descriptors one stage past the issued one: after promotion, where it costs least.
    __device__ __forceinline__ void advance_descriptors() {
        if constexpr (config.carries_descriptors) carried_.advance(state_.stage);
    }

    // Takes the turn that the other warpgroup announced last; called after the last tile.
    __device__ __forceinline__ void end() const {
        if (warpgroup_ == 0) await_turn();
    }

   private:
    __device__ __forceinline__ Descriptors<config> descriptors(int stage, int slot, int chunk_m, int chunk_n) const {
        constexpr u32 a_stage = config.block_m * config.k_bytes, b_stage = config.b_rows * config.k_bytes;
        return {first_.a_low + (stage * a_stage + chunk_m * mma_m * k_block_bytes) / 16,
                first_.b_low + (slot * b_stage + chunk_n * config.mma_n * k_block_bytes) / 16};
    }

    __device__ __forceinline__ void await_turn() const {
        if constexpr (config.takes_turns) ptx::bar_sync(turn_barrier + warpgroup_, 2 * warpgroup_threads);
    }

    __device__ __forceinline__ void end_turn() const {
        if constexpr (config.takes_turns) ptx::bar_arrive(turn_barrier + 1 - warpgroup_, 2 * warpgroup_threads);
    }

    SharedStorage<config>& smem_;
    const Releaser<config> releaser_;
    KRange range_;
    const int warpgroup_;
    const Descriptors<config> first_;  // for the first stage
    CarriedDescriptors<config> carried_;
    int scale_slot_;
    StoredB<config> b_;
    PipelineState<config.stages> state_;
};

}  // namespace deep_tile
