// What a math warpgroup does with the stages of a tile: wait, multiply, release, promote.
#pragma once

#include "output.cuh"
#include "scales.cuh"

namespace deep_tile {

// Gives stages back to those who fill them: this block's producers and the block that shares operands. Every lane says
// so here, and one for all of them there: racecheck follows a barrier's arrivals but not __syncwarp, and this costs
// nothing (H200, 2026-11-21).
template <GemmConfig config>
class Releaser {
   public:
    __device__ __forceinline__ explicit Releaser(SharedStorage<config>& smem) : empty_(ptx::smem_address(smem.empty)) {
        if constexpr (config.multicast()) peer_empty_ = ptx::mapa(empty_, ptx::cluster_ctarank() ^ 1);
    }

    // The warp has read what it needs of the stage.
    __device__ __forceinline__ void release(int stage) const {
        constexpr u32 barrier_bytes = sizeof(u64);
        ptx::mbarrier_arrive(empty_ + stage * barrier_bytes);
        if constexpr (config.multicast()) {
            ptx::mbarrier_arrive_cluster(peer_empty_ + stage * barrier_bytes, threadIdx.x % warp_threads == 0);
        }
    }

   private:
    const u32 empty_;
    u32 peer_empty_;
};

// f(Constant<value>{}) for a value from `first` to first + count - 1.
template <int value>
struct Constant {};

template <int count, int first = 0, typename Function>
__device__ __forceinline__ void with_constant(int value, Function f) {
    if constexpr (count == 1) {
        f(Constant<first>{});
    } else if (value < first + count / 2) {
        with_constant<count / 2, first>(value, f);
    } else {
        with_constant<count - count / 2, first + count / 2>(value, f);
    }
}

// What stands between two WGMMAs of a warpgroup is time in which only the other one feeds the tensor cores. So, where
// registers allow, a K block is multiplied while the one before is promoted: 3 % for 128x128, more where there is one
// math warpgroup only. Wider tiles at least await the next stage and read its scales while a WGMMA of this stage runs:
// 2 % at k = 2048, 5 % at 16384. The first WGMMA is best; with multicast, whose stages complete later, the last
// (128x256, H200, 2026-11-21).
//
// The tensor cores serve warpgroups whose WGMMAs are under way at the same time instruction by instruction. Two that
// begin together end together, and promote together: 128x192 then takes 1013 clocks per K block, where one begins when
// the other is half way 775, and chance decides. So they take turns: one begins when the other has begun. Tiles of two
// chunks do not, whose WGMMAs are no longer than what stands between them: 3 to 5 % slower (H200, 2026-11-21).
template <GemmConfig config>
class Consumer {
   public:
    __device__ __forceinline__ Consumer(const GemmParams& params, SharedStorage<config>& smem, int warpgroup,
                                        PipelineState<config.stages> state)
        : smem_(smem),
          releaser_(smem),
          range_(k_range<config>(params)),
          warpgroup_(warpgroup),
          first_{descriptor_address(smem.a[0] + warpgroup * config.rows_per_warpgroup * scale_block),
                 descriptor_address(smem.b[0])},
          state_(state) {
        const int thread = threadIdx.x % warpgroup_threads;
        scale_slot_ = a_scale_slot<config>(warpgroup * config.rows_per_warpgroup + thread / warp_threads * 16 +
                                   thread % warp_threads / 4);
        if constexpr (config.carries_descriptors) carried_.start(first_);
        if (warpgroup == 1) end_turn();  // warpgroup 0 begins
    }

    // Stages of a tile.
    __device__ __forceinline__ int steps() const { return range_.end - range_.begin; }

    // Waits for the next stage, and reads its scales: before the first tile.
    __device__ __forceinline__ void acquire() { acquire(scales_); }

    // Before multiplying: whether the next tile is in another column.
    __device__ __forceinline__ void set_ends_column(bool ends) { column_.ends = ends; }

    // To be called when the next tile's first stage has been acquired: begins its first WGMMAs, if they need not wait.
    __device__ __forceinline__ void begin_tile() {
        if constexpr (config.chunks == 1) begin_stage();
    }

    // Adds this block's part of a tile to `sums`; its first column is `column`. If there are `more` tiles, acquires the
    // next one's first stage. meanwhile(chunk) is called while the WGMMAs of the last stage after that chunk's run.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile meanwhile) {
        const int place = column / config.column_group % config.column_shifts;
        if constexpr (config.pairs) {
            constexpr int spare = scale_block - config.block_n;
            constexpr int alike = spare > 0 ? spare / config.column_group : 0;  // up to there, one scale
            with_constant<config.column_shifts - alike, alike>(max(place, alike),
                                                               [&](auto shift) { multiply_pairs(shift, sums, more); });
        } else if constexpr (config.block_sets == 2) {
            multiply_ahead(sums, more);
        } else {
            with_constant<config.column_shifts>(place,
                                                [&](auto shift) { multiply_in_turn(shift, sums, more, meanwhile); });
        }
    }

    // After the last tile: the other warpgroup has announced a turn that nobody takes. Returns the next stage.
    __device__ __forceinline__ PipelineState<config.stages> end() const {
        if (warpgroup_ == 0) await_turn();
        return state_;
    }

   private:
    static constexpr int await_in = config.multicast() ? config.chunks - 1 : 0;

    // Whether a stage that has been multiplied is given back before its promotion. One math warpgroup gains 0.6 to 0.8 %
    // with 256 of K per stage. Of two, 128x112 and 128x128 lose 0.3 % by it, and 128x224 1 % (H200, 2026-11-22).
    static constexpr bool releases_first = config.math_warpgroups == 1;

    // Waits for a stage, and reads its scales.
    __device__ __forceinline__ void acquire(Scales<config>& scales) const {
        wait(smem_.full[state_.stage], state_.phase);
        if constexpr (config.resident_b()) {
            if (column_.begins) wait(smem_.resident.full[step_], column_.phase);
        }
        scales.load(smem_, state_.stage, scale_slot_);
    }

    // Where the present stage's tile of `b` is.
    __device__ __forceinline__ int slot() const { return config.resident_b() ? step_ : state_.stage; }

    // To the next stage.
    __device__ __forceinline__ void advance() {
        state_.advance();
        if constexpr (config.resident_b()) {
            step_ += 1;
            if (step_ < steps()) return;
            step_ = 0;
            column_.advance();
        }
    }

    // The stage has been read, and the slot for the last time if the column ends.
    __device__ __forceinline__ void release(int stage, int slot) const {
        releaser_.release(stage);
        if constexpr (config.resident_b()) {
            ptx::mbarrier_arrive(ptx::smem_address(&smem_.resident.empty[slot]), column_.ends);
        }
    }

    __device__ __forceinline__ void await_turn() const {
        if constexpr (config.takes_turns) ptx::bar_sync(turn_barrier + warpgroup_, 2 * warpgroup_threads);
    }

    __device__ __forceinline__ void end_turn() const {
        if constexpr (config.takes_turns) ptx::bar_arrive(turn_barrier + 1 - warpgroup_, 2 * warpgroup_threads);
    }

    // Begins the products of one chunk of a stage.
    __device__ __forceinline__ void begin(Blocks<config>& blocks, int stage, int slot, int chunk_m, int chunk_n) const {
        constexpr u32 a_stage = config.block_m * config.block_k, b_stage = config.buffer_n * config.block_k;
        await_turn();
        if constexpr (config.carries_descriptors) {
            begin_blocks<config>(blocks, carried_);
        } else {
            const u32 a_low = first_.a_low + (stage * a_stage + chunk_m * mma_m * scale_block) / 16;
            const u32 b_low = first_.b_low + (slot * b_stage + chunk_n * config.mma_n * scale_block) / 16;
            begin_blocks<config>(blocks, Descriptors<config>{a_low, b_low});
        }
        end_turn();
    }

    // To those of the stage after the one that has been begun: behind promotion, where it costs least.
    __device__ __forceinline__ void advance_descriptors() {
        if constexpr (config.carries_descriptors) carried_.advance(state_.stage);
    }

    template <int shift>
    __device__ __forceinline__ void promote_blocks(Constant<shift>, Accumulators<config>& sums,
                                                   const Blocks<config>& blocks, const Scales<config>& scales,
                                                   int chunk_m, int chunk_n) const {
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
            promote<config, shift>(sums[chunk_m][chunk_n], blocks[i], scales.row[i][chunk_m], scales.column[i],
                                   chunk_n * config.mma_n);
        }
    }

    __device__ __forceinline__ void begin_stage() { begin(blocks_, state_.stage, slot(), 0, 0); }

    // Tiles of one chunk begin a stage at the end of the one before it. That order costs those of two up to 4 %: their
    // warpgroups fall into step (H200, 2026-11-21).
    template <typename Shift, typename Meanwhile>
    __device__ __forceinline__ void multiply_in_turn(Shift shift, Accumulators<config>& sums, bool more,
                                                     Meanwhile meanwhile) {
        if constexpr (config.chunks == 1) {
            for (int left = steps();;) {
                finish_stage(shift, sums, left > 1 || more, meanwhile);
                if (--left == 0) return;
                begin_stage();
            }
        } else {
            for (int left = steps(); left > 1; --left) {
                begin_stage();
                finish_stage(shift, sums, true, [](int) {});
            }
            begin_stage();
            finish_stage(shift, sums, more, meanwhile);
        }
    }

    // A stage whose first chunk has been begun; `scales_` are its own, then those of the next one, if there are `more`.
    template <typename Shift, typename Meanwhile>
    __device__ __forceinline__ void finish_stage(Shift shift, Accumulators<config>& sums, bool more,
                                                 Meanwhile meanwhile) {
        const int stage = state_.stage, b_slot = slot();
        Scales<config> next_scales;
#pragma unroll
        for (int i = 0; i < config.chunks; ++i) {
            if (i > 0) begin(blocks_, stage, b_slot, i / config.chunks_n, i % config.chunks_n);
            if (i == await_in) {
                advance();
                if (more) acquire(next_scales);
            }
            if (i > 0) meanwhile(i - 1);
            finish_blocks<config>(blocks_);
            const bool last = i == config.chunks - 1;
            if (last && releases_first) release(stage, b_slot);
            promote_blocks(shift, sums, blocks_, scales_, i / config.chunks_n, i % config.chunks_n);
            if (last && !releases_first) release(stage, b_slot);
        }
        scales_ = next_scales;
    }

    // Two sets of temporaries take turns. ptxas wants both loop and tail without a branch around a WGMMA.
    __device__ __forceinline__ void multiply_ahead(Accumulators<config>& sums, bool more) {
        Blocks<config> odd;
        int left = steps();
        advance_descriptors();
        const int apart = blocks_apart(more);
        for (; left > 2; left -= 2) {
            step<true>(Constant<0>{}, sums, blocks_, odd, true, left == apart + 1);
            step<true>(Constant<0>{}, sums, odd, blocks_, true, left == apart + 2);
        }
        if (left == 2) {
            step<true>(Constant<0>{}, sums, blocks_, odd, true, left == apart + 1);
            step<false>(Constant<0>{}, sums, odd, blocks_, more, apart > 0);
        } else {
            step<false>(Constant<0>{}, sums, blocks_, odd, more, apart > 0);
        }
    }

    // The same for an even number of stages, in three copies of a step and not five: there are seven or eight loops for
    // different places, which leave the kernel under 64 KB that way. 128x112 takes 2 to 3.5 % less by them, and 128x144,
    // which had no second set of temporaries before, 2 % (H200, 2026-11-22 and 23).
    template <typename Shift>
    __device__ __forceinline__ void multiply_pairs(Shift shift, Accumulators<config>& sums, bool more) {
        Blocks<config> odd;
        int left = steps();
        advance_descriptors();
        while (true) {
            step<true>(shift, sums, blocks_, odd, true, false);
            if (left == 2) break;
            step<true>(shift, sums, odd, blocks_, true, false);
            left -= 2;
        }
        step<false>(shift, sums, odd, blocks_, more, false);
    }

    // How many of a tile's last K blocks warpgroup 1 begins only when warpgroup 0 has multiplied all of its own. In step
    // they end a tile together, and the tensor cores wait while both store. So one works at full rate, which takes WGMMAs
    // that are queued, and then the other, while the first stores and begins the next tile: 128x128 takes 1.5 to 2.5 %
    // less where there are several tiles per SM. Two blocks in a launch's last tile, which no other hides: 1 % with one
    // tile. None before that where all K blocks of a tile have a stage: 2 to 3 % more at k = 512, for want of the stages
    // that lie between the two (H200, 2026-11-22).
    __device__ __forceinline__ int blocks_apart(bool more) const {
        if (!config.ends_apart) return 0;
        const int blocks = !more ? 2 : steps() > config.stages ? 1 : 0;
        return steps() > blocks ? blocks : 0;
    }

    // Where they `meet`, warpgroup 1 waits to begin its last blocks until warpgroup 0 tells it.
    __device__ __forceinline__ void await_other(bool meet) const {
        if constexpr (config.ends_apart) {
            ptx::bar_sync(apart_barrier, 2 * warpgroup_threads, meet && warpgroup_ == 1);
        }
    }

    __device__ __forceinline__ void tell_other(bool meet) const {
        if constexpr (config.ends_apart) {
            ptx::bar_arrive(apart_barrier, 2 * warpgroup_threads, meet && warpgroup_ == 0);
        }
    }

    // The scales are those of `present`, then those of the stage after it, if there are `more`: read while `present` is
    // being multiplied, because WGMMA leaves other reads of shared memory little room. Read after that, they were
    // awaited before the next WGMMA: 128x64 took 407 clocks per K block, now 352 (H200, 2026-11-21).
    template <bool begin_next, typename Shift>
    __device__ __forceinline__ void step(Shift shift, Accumulators<config>& sums, Blocks<config>& present,
                                         Blocks<config>& next, bool more, bool meet) {
        const int stage = state_.stage, b_slot = slot();
        Scales<config> next_scales;
        advance();
        if (more) acquire(next_scales);
        if constexpr (!config.queues_blocks) finish_blocks<config>(present);
        if constexpr (begin_next) {
            await_other(meet);
            begin(next, state_.stage, slot(), 0, 0);
        }
        if constexpr (config.queues_blocks) finish_blocks<config, begin_next ? 1 : 0>(present);
        if constexpr (!begin_next) tell_other(meet);
        if (releases_first) release(stage, b_slot);
        promote_blocks(shift, sums, present, scales_, 0, 0);
        if (!releases_first) release(stage, b_slot);
        if constexpr (begin_next) advance_descriptors();
        scales_ = next_scales;
    }

    SharedStorage<config>& smem_;
    const Releaser<config> releaser_;
    const KRange range_;
    const int warpgroup_;
    const Descriptors<config> first_;  // of the first stage
    CarriedDescriptors<config> carried_;
    int scale_slot_;
    int step_ = 0;  // of its tile, the present stage; counted for a resident `b` only, like columns
    ColumnState column_;
    PipelineState<config.stages> state_;
    Scales<config> scales_;  // of the stage that has been acquired
    Blocks<config> blocks_;  // of the one that has been begun
};

}  // namespace deep_tile
