// The indexer's logits: out[i, j] = scale[j] * sum over heads of weights[i, h] * relu(q[i, h] . key[j]).
//
// Keys are WGMMA rows, (query, head) pairs its columns: a thread has some heads of every query, sums them in registers
// with resident weights, and reduces with three others once per tile. This costs two instructions per dot product of
// 128 numbers, max and FMA, half the tensor cores' time for it.
//
//   role                      work                                               per tile of 64 keys
//   2 or 3 math warpgroups    WGMMA, sum over heads, stores                      wait full, arrive on empty
//   loader, a warp            walks over the CTA's share; TMA loads keys and     wait empty, expect bytes on full
//                             their scales; writes tasks, one ahead
//   3 other warps             write -infinity outside of the queries' ranges     never meet the others
//
//   barrier       waited for by         arrivals                                 completes when
//   full[s]       math warpgroups       1 loader lane + TMA bytes                stage s holds a tile and its scales
//   empty[s]      loader                each thread of those that read it        no reader needs stage s any more
//   task full     math warpgroups       1 loader lane + TMA bytes, 32 lanes      a block's queries, weights and ranges
//                                       twice: written, and weights copied       are there, or that there is no more
//   task empty    loader                every math thread                        no reader needs the task any more
//
// Warpgroups with their own queries each take every tile; otherwise they alternate in tiles. While one waits for its
// WGMMAs the others sum; with many queries it multiplies in two parts and sums one during the other. Beside WGMMA,
// which uses the register ports, a warp issues an FMA in 3 to 4 clocks. Sums by MMA after rounding to BF16, and other
// ptxas hints, were not faster (H100, 2026-11-26).
#pragma once

#include "head_sums.cuh"
#include "keys.cuh"

namespace deep_tile {

// Makes the mbarriers, by one thread.
template <LogitsConfig config>
__device__ __forceinline__ void initialize_barriers(LogitsStorage<config>& smem) {
    constexpr int readers = config.warpgroups * warpgroup_threads;
#pragma unroll
    for (int stage = 0; stage < config.stages; ++stage) {
        ptx::mbarrier_init(ptx::smem_address(&smem.full[stage]), 1);
        ptx::mbarrier_init(ptx::smem_address(&smem.empty[stage]), config.splits_queries ? readers : warpgroup_threads);
    }
#pragma unroll
    for (int slot = 0; slot < task_slots; ++slot) {
        ptx::mbarrier_init(ptx::smem_address(&smem.task_full[slot]), 1 + 2 * warp_threads);
        ptx::mbarrier_init(ptx::smem_address(&smem.task_empty[slot]), readers);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
}

// A math warpgroup's part of a query block: weights, and each thread's output positions.
template <LogitsConfig config>
class Part {
    using Sums = HeadSums<config>;
    using Out = Logit<config.out_format>;

   public:
    using Products = float[config.mma_n() / 2];

    // Takes over a task's queries from number `first` on.
    __device__ __forceinline__ void begin(const LogitsParams& params, const Task<config>& task, int first, int lane) {
        sums_.read_weights(task.weights[first], lane);
#pragma unroll
        for (int i = 0; i < Sums::queries; ++i) {
            const int query = Sums::query(lane, i), row = first + max(query, 0);
            keys_[i] = query >= 0 ? task.keys[row] : Span{0, 0};
            out_[i] = out_row<config>(params, task.row + row) - (params.compressed ? keys_[i].begin : 0);
        }
    }

    // Stores a tile's logits; `key` is the thread's first key, `scales` its keys' scales.
    __device__ __forceinline__ void store(const Products& products, const float (&scales)[2], int key, int lane) const {
        float sums[Sums::queries * Sums::rows];
        sums_.add_up(products, lane, sums);
#pragma unroll
        for (int i = 0; i < Sums::queries; ++i) {
#pragma unroll
            for (int n = 0; n < Sums::rows; ++n) {
                const int at = key + 8 * n;
                const float logit = sums[Sums::rows * i + n] * scales[n];
                ptx::st_global(out_[i] + at, Out::of(logit), keys_[i].begin <= at && at < keys_[i].end);
            }
        }
    }

   private:
    Sums sums_;
    Span keys_[Sums::queries];
    typename Out::Bits* out_[Sums::queries];
};

// Issues WGMMAs for a key tile and part of the queries; returns before they complete.
template <LogitsConfig config>
__device__ __forceinline__ void multiply(typename Part<config>::Products& products, u32 keys, u32 queries) {
    constexpr u32 high = OperandLayout<config.head_dim>::high;
    pin(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < config.head_dim; k += mma_k_bytes) {
        wgmma(products, matrix_descriptor(keys + k / 16, high), matrix_descriptor(queries + k / 16, high), k != 0);
    }
    ptx::wgmma_commit_group();
}

// A math warpgroup.
template <LogitsConfig config>
class Scorer {
    using Sums = HeadSums<config>;

   public:
    __device__ __forceinline__ Scorer(LogitsStorage<config>& smem, int warpgroup)
        : smem_(smem),
          lane_(threadIdx.x % warp_threads),
          group_(config.splits_queries ? warpgroup : 0),
          keys_(descriptor_address(smem.keys[0])),
          next_(config.splits_queries ? 0 : warpgroup) {
        const int warp = threadIdx.x % warpgroup_threads / warp_threads;
        row_ = 16 * warp + lane_ / 4 + Sums::row(lane_);
        state_.advance(next_);
    }

    // Works on the task in `slot`.
    __device__ __forceinline__ void score(const LogitsParams& params, int slot, Span tiles) {
        const auto& task = smem_.tasks[slot];
#pragma unroll
        for (int i = 0; i < config.parts; ++i) {
            parts_[i].begin(params, task, group_ * config.queries + i * config.part_queries(), lane_);
        }
        queries_ = descriptor_address(smem_.queries[slot][group_]);
        if (next_ < tiles.size()) score_tiles(tiles);
        next_ -= tiles.size();
    }

   private:
    using Products = typename Part<config>::Products[config.parts];
    static constexpr int step = config.splits_queries ? 1 : config.warpgroups;  // this warpgroup's step between tiles
    static_assert(config.stages % step == 0, "a warpgroup would miss a phase of a stage's barriers");

    // Works on one tile at least.
    __device__ __forceinline__ void score_tiles(Span tiles) {
        Products products;
        int key = (tiles.begin + next_) * key_tile + row_;
        if constexpr (config.parts == 2) begin(products[0], 0);
#pragma unroll 1
        for (; next_ + step < tiles.size(); next_ += step, key += step * key_tile) add_up<true>(products, key);
        add_up<false>(products, key);
        next_ += step;
    }

    // Issues WGMMAs for a part and the current stage; the first part waits for the stage.
    __device__ __forceinline__ void begin(typename Part<config>::Products& products, int part) const {
        constexpr int part_bytes = config.query_bytes() / config.parts;
        if (part == 0) wait(smem_.full[state_.stage], state_.phase);
        multiply<config>(products, keys_ + state_.stage * (config.tile_bytes() / 16), queries_ + part * (part_bytes / 16));
    }

    __device__ __forceinline__ void read_scales(float (&scales)[2]) const {
        scales[0] = smem_.scales[state_.stage][row_];
        scales[1] = smem_.scales[state_.stage][Sums::rows == 1 ? row_ : row_ + 8];
    }

    // Multiplies the current stage, whose first key for this thread is `key`, and stores its logits. With two parts,
    // the first is already issued, and the next stage's is issued if there are `more`.
    template <bool more>
    __device__ __forceinline__ void add_up(Products& products, int key) {
        constexpr int last = config.parts - 1;
        float scales[2];
        const int stage = state_.stage;
        if constexpr (last > 0) finish(products[0]);
        begin(products[last], last);
        read_scales(scales);
        state_.advance(step);
        if constexpr (last > 0) parts_[0].store(products[0], scales, key, lane_);
        finish(products[last]);
        ptx::mbarrier_arrive(ptx::smem_address(&smem_.empty[stage]));
        if constexpr (last > 0 && more) begin(products[0], 0);
        parts_[last].store(products[last], scales, key, lane_);
    }

    static __device__ __forceinline__ void finish(typename Part<config>::Products& products) {
        ptx::wgmma_wait_group<0>();
        pin(products);
    }

    LogitsStorage<config>& smem_;
    const int lane_, group_;
    const u32 keys_;
    u32 queries_;
    int row_, next_;  // the thread's first row in a tile; the warpgroup's next tile in the task
    PipelineState<config.stages> state_;
    Part<config> parts_[config.parts];
};

template <LogitsConfig config>
__device__ __forceinline__ void score(const LogitsParams& params, LogitsStorage<config>& smem, int warpgroup) {
    Scorer<config> scorer(smem, warpgroup);
    PipelineState<task_slots> slot;
    while (true) {
        wait(smem.task_full[slot.stage], slot.phase);
        const Span& tiles = smem.tasks[slot.stage].tiles;
        const Span own = {__shfl_sync(~0u, tiles.begin, 0), __shfl_sync(~0u, tiles.end, 0)};
        if (own.size() == 0) return;
        scorer.score(params, slot.stage, own);
        ptx::mbarrier_arrive(ptx::smem_address(&smem.task_empty[slot.stage]));
        slot.advance();
    }
}

template <LogitsConfig config>
__device__ __forceinline__ void logits(const LogitsParams& params) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    auto& smem = *reinterpret_cast<LogitsStorage<config>*>(dynamic_smem);
    static_assert(sizeof(LogitsStorage<config>) == config.smem_bytes, "codegen.py and logits_config.cuh disagree");
    record_launch(smem.full[0]);
    constexpr int math_warps = config.warpgroups * warpgroup_threads / warp_threads;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0);  // uniform for the compiler, as in gemm.cuh
    take_turn();
    if (threadIdx.x == 0) initialize_barriers(smem);
    find_share<config>(params, smem);
    if (warp < math_warps) {
        ptx::setmaxnreg_inc<config.math_registers>();
        score<config>(params, smem, warp / (warpgroup_threads / warp_threads));
        return;
    }
    ptx::setmaxnreg_dec<config.producer_registers>();
    if (warp == math_warps) {
        load<config>(params, smem);
    } else if (params.fills) {
        fill_outside<config>(params, warp - math_warps - 1);
    }
}

}  // namespace deep_tile
