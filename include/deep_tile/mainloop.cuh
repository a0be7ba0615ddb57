// The main loops: how a math warpgroup turns the stages of a tile into sums. MainLoop, at the end, chooses one.
//
//   loop      tiles of                    K blocks
//   InTurn    one WGMMA per warpgroup     are multiplied, then promoted; the warpgroups take turns
//   InChunks  several WGMMAs              the same for each WGMMA; the stage is given back after the last
//   Ahead     two sets of temporaries     are multiplied while the one before is promoted
//   Pairs     two sets, and as many       the same, two by two, with a loop for each place of the tile's scales
//             loops as its scales need
//   Accumulate kinds without promotion    are multiplied into the tile's sums, one behind the other
//
// What stands between two WGMMAs of a warpgroup is time in which only the other one feeds the tensor cores. So, where
// registers allow, a K block is multiplied while the one before is promoted: 3 % for 128x128, more where there is one
// math warpgroup only. Wider tiles at least await the next stage and read its scales while a WGMMA of this stage runs:
// 2 % at k = 2048, 5 % at 16384 (H200, 2026-11-21).
//
// The tensor cores serve warpgroups whose WGMMAs are under way at the same time instruction by instruction. Two that
// begin together end together, and promote together: 128x192 then takes 1013 clocks per K block, where one begins when
// the other is half way 775, and chance decides. So they take turns: one begins when the other has begun. Tiles of two
// chunks do not, whose WGMMAs are no longer than what stands between them: 3 to 5 % slower (H200, 2026-11-21).
#pragma once

#include "accumulate.cuh"

namespace deep_tile {

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

// Whether a stage that has been multiplied is given back before its promotion. One math warpgroup gains 0.6 to 0.8 % with
// 256 of K per stage. Of two, 128x112 and 128x128 lose 0.3 % by it, and 128x224 1 % (H200, 2026-11-22).
// Promotion that reads scales of columns comes before that.
template <GemmConfig config>
constexpr bool releases_first = config.math_warpgroups == 1 && !config.column_scales;

// Adds a stage's products of one chunk, scaled, to its sums.
template <GemmConfig config, int shift>
__device__ __forceinline__ void promote_blocks(Constant<shift>, Accumulators<config>& sums, const Blocks<config>& blocks,
                                               const Scales<config>& scales, int chunk_m, int chunk_n) {
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        if constexpr (config.column_scales) {
            const float2* columns = scales.column + (i * config.block_n + chunk_n * config.mma_n) / 2;
            promote_columns<config>(sums[chunk_m][chunk_n], blocks[i], scales.row[i][chunk_m], columns);
        } else {
            promote<config, shift>(sums[chunk_m][chunk_n], blocks[i], scales.row[i][chunk_m], scales.column[i],
                                   chunk_n * config.mma_n);
        }
    }
}

// Where a tile's first column lies in its scale block, in column groups, if the loop has a copy for each such place.
template <GemmConfig config>
__device__ __forceinline__ int place_in_scale_block(int column) {
    return column / config.column_group % config.column_shifts;
}

// What every main loop offers, and keeps: the scales of the stage that has been acquired, the temporaries of the one that
// has been begun.
template <GemmConfig config>
class LoopState {
   public:
    __device__ __forceinline__ LoopState(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : math(params, smem, warpgroup) {}

    __device__ __forceinline__ int steps() const { return math.steps(); }

    // Waits for the next stage, and reads its scales: before the first tile.
    __device__ __forceinline__ void acquire() { math.acquire(scales); }

    // What a tile's sums begin with.
    __device__ __forceinline__ void clear(Accumulators<config>& sums) const {
#pragma unroll
        for (int i = 0; i < config.chunks_m * config.chunks_n * (config.mma_n / 2); ++i) (&sums[0][0][0])[i] = 0;
    }

    // Before multiplying.
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler& tiles) {
        math.turn_to_tile(tiles);
    }

    // To be called when the next tile's first stage has been acquired: begins its first WGMMAs, if they need not wait.
    __device__ __forceinline__ void begin_tile() {
        if constexpr (config.chunks == 1) math.begin(blocks);
    }

    // After the last tile.
    __device__ __forceinline__ void end() const { math.end(); }

   protected:
    MathWarpgroup<config> math;
    Scales<config> scales;
    Blocks<config> blocks;
};

// One stage after the other, for tiles of one chunk: a stage is begun at the end of the one before it.
template <GemmConfig config>
class InTurn : public LoopState<config> {
   public:
    using LoopState<config>::LoopState;

    // Adds this block's part of a tile to `sums`; its first column is `column`. If there are `more` tiles, acquires the
    // next one's first stage.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile) {
        with_constant<config.column_shifts>(place_in_scale_block<config>(column),
                                            [&](auto shift) { multiply_at(shift, sums, more); });
    }

   private:
    using LoopState<config>::math, LoopState<config>::scales, LoopState<config>::blocks;

    template <typename Shift>
    __device__ __forceinline__ void multiply_at(Shift shift, Accumulators<config>& sums, bool more) {
        for (int left = math.steps();;) {
            finish_stage(shift, sums, left > 1 || more);
            if (--left == 0) return;
            math.begin(blocks);
        }
    }

    // A stage that has been begun; `scales` are its own, then those of the next one, if there are `more`.
    template <typename Shift>
    __device__ __forceinline__ void finish_stage(Shift shift, Accumulators<config>& sums, bool more) {
        const int stage = math.stage(), slot = math.slot();
        Scales<config> next_scales;
        math.advance();
        if (more) math.acquire(next_scales);
        finish_blocks<config>(blocks);
        if (releases_first<config>) math.release(stage, slot);
        promote_blocks<config>(shift, sums, blocks, scales, 0, 0);
        if (!releases_first<config>) math.release(stage, slot);
        scales = next_scales;
    }
};

// The same for tiles of several chunks, which begin a stage when the one before it has ended: begun sooner, their
// warpgroups fall into step, which costs up to 4 % (H200, 2026-11-21).
template <GemmConfig config>
class InChunks : public LoopState<config> {
   public:
    using LoopState<config>::LoopState;

    // As InTurn. meanwhile(chunk) is called while the WGMMAs of the last stage after that chunk's run.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile meanwhile) {
        with_constant<config.column_shifts>(place_in_scale_block<config>(column),
                                            [&](auto shift) { multiply_at(shift, sums, more, meanwhile); });
    }

   private:
    using LoopState<config>::math, LoopState<config>::scales, LoopState<config>::blocks;

    // The chunk during whose WGMMAs the next stage is awaited. The first is best; with multicast, whose stages complete
    // later, the last (128x256, H200, 2026-11-21).
    static constexpr int await_in = config.multicast() ? config.chunks - 1 : 0;

    template <typename Shift, typename Meanwhile>
    __device__ __forceinline__ void multiply_at(Shift shift, Accumulators<config>& sums, bool more,
                                                Meanwhile meanwhile) {
        for (int left = math.steps(); left > 1; --left) {
            math.begin(blocks);
            finish_stage(shift, sums, true, [](int) {});
        }
        math.begin(blocks);
        finish_stage(shift, sums, more, meanwhile);
    }

    // A stage whose first chunk has been begun; `scales` are its own, then those of the next one, if there are `more`.
    template <typename Shift, typename Meanwhile>
    __device__ __forceinline__ void finish_stage(Shift shift, Accumulators<config>& sums, bool more,
                                                 Meanwhile meanwhile) {
        const int stage = math.stage(), slot = math.slot();
        Scales<config> next_scales;
#pragma unroll
        for (int i = 0; i < config.chunks; ++i) {
            const int chunk_m = i / config.chunks_n, chunk_n = i % config.chunks_n;
            if (i > 0) math.begin(blocks, stage, slot, chunk_m, chunk_n);
            if (i == await_in) {
                math.advance();
                if (more) math.acquire(next_scales);
            }
            if (i > 0) meanwhile(i - 1);
            finish_blocks<config>(blocks);
            const bool last = i == config.chunks - 1;
            if (last && releases_first<config>) math.release(stage, slot);
            promote_blocks<config>(shift, sums, blocks, scales, chunk_m, chunk_n);
            if (last && !releases_first<config>) math.release(stage, slot);
        }
        scales = next_scales;
    }
};

// What Ahead and Pairs repeat.
template <GemmConfig config>
class TwoSets : public LoopState<config> {
   public:
    using LoopState<config>::LoopState;

   protected:
    using LoopState<config>::math, LoopState<config>::scales;

    // The scales are those of `present`, then those of the stage after it, if there are `more`: read while `present` is
    // being multiplied, because WGMMA leaves other reads of shared memory little room. Read after that, they were
    // awaited before the next WGMMA: 128x64 took 407 clocks per K block, now 352 (H200, 2026-11-21).
    template <bool begin_next, typename Shift>
    __device__ __forceinline__ void step(Shift shift, Accumulators<config>& sums, Blocks<config>& present,
                                         Blocks<config>& next, bool more, bool meet) {
        const int stage = math.stage(), slot = math.slot();
        Scales<config> next_scales;
        math.advance();
        if (more) math.acquire(next_scales);
        if constexpr (!config.queues_blocks) finish_blocks<config>(present);
        if constexpr (begin_next) {
            await_other(meet);
            math.begin(next);
        }
        if constexpr (config.queues_blocks) finish_blocks<config, begin_next ? 1 : 0>(present);
        if constexpr (!begin_next) tell_other(meet);
        if (releases_first<config>) math.release(stage, slot);
        promote_blocks<config>(shift, sums, present, scales, 0, 0);
        if (!releases_first<config>) math.release(stage, slot);
        if constexpr (begin_next) math.advance_descriptors();
        scales = next_scales;
    }

   private:
    // Where they `meet`, warpgroup 1 waits to begin its last blocks until warpgroup 0 tells it.
    __device__ __forceinline__ void await_other(bool meet) const {
        if constexpr (config.ends_apart) {
            ptx::bar_sync(apart_barrier, 2 * warpgroup_threads, meet && math.warpgroup() == 1);
        }
    }

    __device__ __forceinline__ void tell_other(bool meet) const {
        if constexpr (config.ends_apart) {
            ptx::bar_arrive(apart_barrier, 2 * warpgroup_threads, meet && math.warpgroup() == 0);
        }
    }
};

// Two sets of temporaries take turns. ptxas wants both loop and tail without a branch around a WGMMA.
template <GemmConfig config>
class Ahead : public TwoSets<config> {
   public:
    using TwoSets<config>::TwoSets;

    // As InTurn.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int, bool more, Meanwhile) {
        constexpr Constant<0> shift;
        Blocks<config> odd;
        int left = math.steps();
        math.advance_descriptors();
        const int apart = blocks_apart(more);
        for (; left > 2; left -= 2) {
            this->template step<true>(shift, sums, blocks, odd, true, left == apart + 1);
            this->template step<true>(shift, sums, odd, blocks, true, left == apart + 2);
        }
        if (left == 2) {
            this->template step<true>(shift, sums, blocks, odd, true, left == apart + 1);
            this->template step<false>(shift, sums, odd, blocks, more, apart > 0);
        } else {
            this->template step<false>(shift, sums, blocks, odd, more, apart > 0);
        }
    }

   private:
    using TwoSets<config>::math, TwoSets<config>::blocks;

    // How many of a tile's last K blocks warpgroup 1 begins only when warpgroup 0 has multiplied all of its own. In step
    // they end a tile together, and the tensor cores wait while both store. So one works at full rate, which takes WGMMAs
    // that are queued, and then the other, while the first stores and begins the next tile: 128x128 takes 1.5 to 2.5 %
    // less where there are several tiles per SM. Two blocks in a launch's last tile, which no other hides: 1 % with one
    // tile. None before that where all K blocks of a tile have a stage: 2 to 3 % more at k = 512, for want of the stages
    // that lie between the two (H200, 2026-11-22).
    __device__ __forceinline__ int blocks_apart(bool more) const {
        if (!config.ends_apart) return 0;
        const int blocks = !more ? 2 : math.steps() > config.stages ? 1 : 0;
        return math.steps() > blocks ? blocks : 0;
    }
};

// The same for an even number of stages, in three copies of a step and not five: there are seven or eight loops for
// different places of a tile's scales, which leave the kernel under 64 KB that way. 128x112 takes 2 to 3.5 % less by
// them, and 128x144, which has no second set of temporaries otherwise, 2 % (H200, 2026-11-22 and 23).
template <GemmConfig config>
class Pairs : public TwoSets<config> {
   public:
    using TwoSets<config>::TwoSets;

    // As InTurn.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile) {
        constexpr int spare = scale_block - config.block_n;
        constexpr int alike = spare > 0 ? spare / config.column_group : 0;  // up to there, one scale
        const int place = max(place_in_scale_block<config>(column), alike);
        with_constant<config.column_shifts - alike, alike>(place, [&](auto shift) { multiply_at(shift, sums, more); });
    }

   private:
    using TwoSets<config>::math, TwoSets<config>::blocks;

    template <typename Shift>
    __device__ __forceinline__ void multiply_at(Shift shift, Accumulators<config>& sums, bool more) {
        Blocks<config> odd;
        int left = math.steps();
        math.advance_descriptors();
        while (true) {
            this->template step<true>(shift, sums, blocks, odd, true, false);
            if (left == 2) break;
            this->template step<true>(shift, sums, odd, blocks, true, false);
            left -= 2;
        }
        this->template step<false>(shift, sums, odd, blocks, more, false);
    }
};

template <GemmConfig config>
using LoopOfOneSet = typename Conditional<config.chunks == 1, InTurn<config>, InChunks<config>>::type;

template <GemmConfig config>
using LoopOfTwoSets = typename Conditional<config.pairs, Pairs<config>, Ahead<config>>::type;

template <GemmConfig config>
using LoopWithPromotion =
    typename Conditional<config.block_sets == 2, LoopOfTwoSets<config>, LoopOfOneSet<config>>::type;

template <GemmConfig config>
using MainLoop = typename Conditional<config.block_sets == 0, Accumulate<config>, LoopWithPromotion<config>>::type;

}  // namespace deep_tile
