// Main loops: how a math warpgroup turns a tile's stages into accumulators. MainLoop, at the end, selects one.
//
//   loop        tiles                        K blocks
//   InTurn      one WGMMA per warpgroup      multiplied, then promoted; the warpgroups take turns
//   InChunks    several WGMMAs (chunks)      multiplied, then promoted, by chunk; the last one releases the stage
//   Ahead       two sets of temporaries      multiplied while the previous one is promoted
//   Pairs       two sets, a copy per         multiplied while the previous one is promoted, two per iteration
//               alignment of the scales
//   Accumulate  kinds without promotion      accumulated by WGMMA, one behind the other
//
// Between two WGMMAs in one warpgroup, only the other warpgroup feeds the tensor cores. If registers allow, a K block
// is therefore multiplied while the previous one is promoted: 3 % for 128x128, more with only one math warpgroup. Wider
// tiles lack the registers, but await the next stage and read its scales during a WGMMA of this one: 2 % at k = 2048, 5
// % at 16384 (H200, 2026-11-21).
//
// Tensor cores interleave concurrent WGMMAs from two warpgroups, instruction by instruction. Warpgroups that issue
// together end and promote together: 128x192 then takes 1013 clocks per K block, but 775 if one issues halfway through
// the other, and chance decides. So they take turns: one issues after the other has issued. Two-chunk tiles take no
// turns, which would be 3 to 5 % slower, because their WGMMAs are no longer than the gaps between them (H200,
// 2026-11-21).
#pragma once

#include "accumulate.cuh"

namespace deep_tile {

// Calls f(Constant<value>{}) for a value from `first` to first + count - 1.
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

// True if a multiplied stage is released before its promotion. One math warpgroup gains 0.6 to 0.8 % with 256 of K per
// stage. With two, 128x112 and 128x128 lose 0.3 %, and 128x224 1 % (H200, 2026-11-22). Column scales are read from the
// stage during promotion, so the release must follow.
template <GemmConfig config>
constexpr bool releases_first = config.math_warpgroups == 1 && !config.column_scales;

// Promotes one chunk: adds a stage's products, scaled if it has scales, to the accumulators.
template <GemmConfig config, int shift>
__device__ __forceinline__ void promote_blocks(Constant<shift>, Accumulators<config>& sums, const Blocks<config>& blocks,
                                               const Scales<config>& scales, int chunk_m, int chunk_n) {
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        scales.template promote<shift>(sums[chunk_m][chunk_n], blocks[i], i, chunk_m, chunk_n);
    }
}

// Position of a tile's first column in its scale block, in column groups; 0 unless the loop has a copy per position.
template <GemmConfig config>
__device__ __forceinline__ int place_in_scale_block(int column) {
    return column / config.column_group % config.column_shifts;
}

// Common part of the main loops: the scales of the acquired stage, and the temporaries of the issued one.
template <GemmConfig config>
class LoopState {
   public:
    __device__ __forceinline__ LoopState(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : math(params, smem, warpgroup) {}

    __device__ __forceinline__ int steps() const { return math.steps(); }

    // Waits for the next stage and reads its scales; called before the first tile.
    __device__ __forceinline__ void acquire() { math.acquire(scales); }

    // Zeroes a tile's accumulators.
    __device__ __forceinline__ void clear(Accumulators<config>& sums) const {
#pragma unroll
        for (int i = 0; i < config.chunks_m * config.chunks_n * (config.mma_n / 2); ++i) (&sums[0][0][0])[i] = 0;
    }

    // Takes per-tile state from the scheduler; called before multiplying.
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler& tiles) {
        math.turn_to_tile(tiles);
    }

    // Issues the next tile's first WGMMAs if they need not wait; the tile's first stage has been acquired.
    __device__ __forceinline__ void begin_tile() {
        if constexpr (config.chunks == 1) math.begin(blocks);
    }

    // Completes the turns; called after the last tile.
    __device__ __forceinline__ void end() const { math.end(); }

   protected:
    MathWarpgroup<config> math;
    Scales<config> scales;
    Blocks<config> blocks;
};

// In-order loop for one-chunk tiles: a stage is issued at the end of the previous one.
template <GemmConfig config>
class InTurn : public LoopState<config> {
   public:
    using LoopState<config>::LoopState;

    // Adds this CTA's part of a tile, whose first column is `column`, to `sums`. If there are `more` tiles, acquires
    // the next one's first stage.
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

    // Finishes an issued stage. `scales` holds its scales, afterwards the next stage's, if there are `more`.
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

// In-order loop for tiles with several chunks: a stage is issued after the previous one has ended. Issued sooner, the
// warpgroups fall into step, which costs up to 4 % (H200, 2026-11-21).
template <GemmConfig config>
class InChunks : public LoopState<config> {
   public:
    using LoopState<config>::LoopState;

    // Adds a tile as InTurn does. In its last stage, meanwhile(chunk) runs during the WGMMAs of the chunk after it.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile meanwhile) {
        with_constant<config.column_shifts>(place_in_scale_block<config>(column),
                                            [&](auto shift) { multiply_at(shift, sums, more, meanwhile); });
    }

   private:
    using LoopState<config>::math, LoopState<config>::scales, LoopState<config>::blocks;

    // Chunk during whose WGMMAs the next stage is awaited. The first is best; with multicast, whose stages complete
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

    // Finishes a stage whose first chunk is issued. `scales` holds its scales, afterwards the next stage's, if any.
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

// Double-buffered step that Ahead and Pairs share.
template <GemmConfig config>
class TwoSets : public LoopState<config> {
   public:
    using LoopState<config>::LoopState;

   protected:
    using LoopState<config>::math, LoopState<config>::scales;

    // Finishes `present`, first issuing the next stage. `scales` holds the scales of `present`, afterwards the next
    // stage's, if there are `more`. They are read during the multiplication, since WGMMA leaves other reads little
    // room; read after it, they delay the next WGMMA: 128x64 took 407 clocks per K block, not 352 (H200, 2026-11-21).
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
    // Holds warpgroup 1 back from its last blocks until warpgroup 0 signals, if they `meet`.
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

// Double-buffered loop. ptxas wants both loop and tail without a branch around a WGMMA.
template <GemmConfig config>
class Ahead : public TwoSets<config> {
   public:
    using TwoSets<config>::TwoSets;

    // Adds a tile as InTurn does.
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

    // Number of a tile's last K blocks that warpgroup 1 issues only after warpgroup 0 has multiplied its whole tile. If
    // the warpgroups end a tile together, tensor cores idle while both store. Held apart, one multiplies at full rate
    // (with queued WGMMAs) while the other stores and begins its next tile: 128x128 takes 1.5 to 2.5 % less with
    // several tiles per SM. The number is 2 in a launch's last tile, whose store no other tile hides: 1 % with one
    // tile. It is 0 in earlier tiles if each K block of a tile has its own stage: holding apart then takes 2 to 3 %
    // more at k = 512, for want of stages (H200, 2026-11-22).
    __device__ __forceinline__ int blocks_apart(bool more) const {
        if (!config.ends_apart) return 0;
        const int blocks = !more ? 2 : math.steps() > config.stages ? 1 : 0;
        return math.steps() > blocks ? blocks : 0;
    }
};

// Double-buffered loop for even stage counts, with three copies of a step instead of five. It exists seven or eight
// times, once per position of a tile's scales, and stays below 64 KB of code that way. 128x112 takes 2 to 3.5 % less,
// and 128x144, which otherwise has no second set of temporaries, 2 % (H200, 2026-11-22 and 23).
template <GemmConfig config>
class Pairs : public TwoSets<config> {
   public:
    using TwoSets<config>::TwoSets;

    // Adds a tile as InTurn does.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile) {
        constexpr int spare = scale_block - config.block_n;
        constexpr int alike = spare > 0 ? spare / config.column_group : 0;  // positions up to here see one scale
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
