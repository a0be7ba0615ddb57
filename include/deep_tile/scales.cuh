// Scale loads: from global memory, by scale warps, to the stage from which math threads read them (promotion.cuh).
//
// Scales travel with the stage, because reading them from global memory in the math loop costs 6 to 8 % (H200,
// 2026-11-21). There are three ways:
//
//   in runs       A lane reads several K blocks' scales for its rows into registers, and writes them stage by stage: with
//                 vector loads if a row's scales in `a` are contiguous; 64-row tiles read runs at any stride.
//   one by one    cp.async, 4 bytes per copy, takes any stride and any number of K blocks, and no time of the lane.
//   in bulk       TMA copies the scales of `a` with the operands, in tiles of several chunks, if contiguous along m.
//
// One by one, tiles from 128 rows on touch 128 cache lines per K block and take shared-memory time that WGMMAs need:
// row-major scales cost 2.4 % above m = 128, 19 % at worst, and in runs 0 and 2 % (100 shapes; H200, 2026-11-24).
#pragma once

#include "memory.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// True if TMA copies the tile's row scales: a whole tile of contiguous scales. The host states adjacency beside
// sizes that are read first anyway: the first request waits for everything read before it.
template <GemmConfig config>
__device__ __forceinline__ bool scales_in_bulk(const GemmParams& params, Tile<config> tile) {
    return config.bulk_scales && tile.a_row() + config.block_m <= params.bulk_scale_rows && has_k<config>(params, tile);
}

// True if TMA copies the tile's column scales, if each column has its own.
template <GemmConfig config>
__device__ __forceinline__ bool column_scales_in_bulk(const GemmParams& params, Tile<config> tile) {
    if constexpr (!config.bulk_scales || !config.column_scales) return false;
    return tile.b_row() + config.block_n <= params.bulk_scale_columns && has_k<config>(params, tile);
}

// Slot of a row's scale in its tile: beside that of the row 8 rows away, which the same thread needs, or, if TMA may
// have copied them, in row order.
template <GemmConfig config>
__device__ __forceinline__ int a_scale_slot(int row) {
    return config.bulk_scales ? row : row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

// Reader for a tile's scales in a scale warp: each lane handles its `a` rows, unless TMA copies them, and the first
// lanes b's column slots. Rows and columns beyond the matrix take the last scale: their products are never stored.
//
// Offsets are 32-bit byte counts, so each stage needs additions only. With element offsets, or pointers with 32-bit
// strides, ptxas uses the multiplier, and FFMAs in math warps wait for it: 128-row tiles took up to 9 % longer. 64-bit
// strides made the path to the first request longer: 0.7 % more time up to m = 1024 (H200, 2026-11-22).
template <GemmConfig config>
class ScaleReader {
   public:
    __device__ __forceinline__ ScaleReader(const GemmParams& params, Tile<config> tile, int step)
        : params_(params),
          in_bulk_(scales_in_bulk<config>(params, tile)),
          columns_in_bulk_(column_scales_in_bulk<config>(params, tile)),
          step_(step) {
        const int last_group = (params.n - 1) / b_scale_rows;
        const int first_k = step * config.scale_blocks;
#pragma unroll
        for (int i = 0; i < slots_per_lane; ++i) {
            const int column = tile.out_column() + (i * warp_threads + lane()) * config.b_scale_columns;
            const int group = min(column / b_scale_rows, last_group);
            b_[i] = sizeof(float) * (group * params.b_scale_stride_n + first_k * params.b_scale_stride_k);
        }
        int first_row = tile.a_row();
        if constexpr (config.row_groups()) first_row = tile.scale;
#pragma unroll
        for (int i = 0; i < rows_per_lane; ++i) {
            const int row = min(first_row + i * warp_threads + lane(), params.m - 1);
            a_[i] = sizeof(float) * (row * params.a_scale_stride_m + first_k * params.a_scale_stride_k);
            if constexpr (config.row_groups()) a_[i] += sizeof(float) * tile.group * params.a_scale_group_stride;
        }
        if constexpr (config.row_groups()) {
#pragma unroll
            for (int i = 0; i < slots_per_lane; ++i) b_[i] += sizeof(float) * tile.group * params.b_scale_group_stride;
        }
    }

    // Copies this step's scales to a stage and moves to the warp's next step; blocks beyond the matrix get zeros.
    __device__ __forceinline__ void copy(SharedStorage<config>& smem, int stage) {
        const int k_blocks = ceil_div(params_.k, scale_block);
        constexpr int skipped = (config.scale_warps - 1) * config.scale_blocks;
#pragma unroll
        for (int j = 0; j < config.scale_blocks; ++j) {
            const bool valid = (config.scale_blocks == 1 && !config.by_k) || step_ * config.scale_blocks + j < k_blocks;
            const u32 next = sizeof(float) * (j + 1 < config.scale_blocks ? 1 : 1 + skipped);
#pragma unroll
            for (int i = 0; i < rows_per_lane && !in_bulk_; ++i) {
                const int slot = i * warp_threads + a_scale_slot<config>(lane());
                ptx::cp_async(ptx::smem_address(&smem.a_scale[stage][j][slot]), at(params_.a_scale, valid ? a_[i] : 0),
                              valid);
                a_[i] += next * params_.a_scale_stride_k;
            }
#pragma unroll
            for (int i = 0; i < slots_per_lane && !columns_in_bulk_; ++i) {
                const int slot = i * warp_threads + lane();
                if (slot < config.b_scale_slots) {
                    ptx::cp_async(ptx::smem_address(&smem.b_scale[stage][j][slot]),
                                  at(params_.b_scale, valid ? b_[i] : 0), valid);
                    b_[i] += next * params_.b_scale_stride_k;
                }
            }
        }
        step_ += config.scale_warps;
    }

   protected:
    static constexpr int rows_per_lane = config.block_m / warp_threads;
    static constexpr int slots_per_lane = (config.b_scale_slots + warp_threads - 1) / warp_threads;
    static constexpr int b_scale_rows = config.column_scales ? 1 : scale_block;  // rows of b per scale

    static __device__ __forceinline__ int lane() { return threadIdx.x % warp_threads; }

    static __device__ __forceinline__ const float* at(const float* scales, u32 bytes) {
        return reinterpret_cast<const float*>(reinterpret_cast<const u8*>(scales) + bytes);
    }

    const GemmParams& params_;
    const bool in_bulk_, columns_in_bulk_;
    u32 a_[rows_per_lane], b_[slots_per_lane];  // byte offsets to this step's scales
    int step_;
};

// Value of GemmParams.scale_runs if a row's scales in `a` can be read as vectors.
constexpr int vector_runs = 2;

// Reader for a tile's scales in runs; each warp takes every `warps`-th run.
template <GemmConfig config>
class RunReader : public ScaleReader<config> {
   public:
    static constexpr int steps = config.scales_at_once / config.scale_blocks;  // per run

    // Warps that take runs in turn: few enough that a warp never skips more than one round of stages.
    // After two rounds an mbarrier's parity repeats, and the warp would not wait for the second.
    static constexpr int turns = 1 + (config.stages - 1) / steps;
    static constexpr int warps = config.scale_warps < turns ? config.scale_warps : turns;

    // Constructs the reader at `step`, the first in the warp's first run.
    __device__ __forceinline__ RunReader(const GemmParams& params, Tile<config> tile, int step)
        : ScaleReader<config>(params, tile, step) {}

    // Reads the current run and moves to the warp's next one.
    __device__ __forceinline__ void load() {
        if (params_.scale_runs == vector_runs) {
            load_vectors();
        } else if constexpr (config.reads_any_runs) {
            load_rows();
        }
        const bool has_column = lane() < config.b_scale_slots;
#pragma unroll
        for (int j = 0; j < config.scales_at_once * warps; ++j) {
            if (j < config.scales_at_once && has_column) columns_[j] = ptx::ld_global(at(params_.b_scale, b_[0]));
            b_[0] += sizeof(float) * params_.b_scale_stride_k;
        }
    }

    // Writes the run's scales for `step` to a stage.
    __device__ __forceinline__ void store(SharedStorage<config>& smem, int stage, int step) const {
#pragma unroll
        for (int j = 0; j < config.scale_blocks; ++j) {
            const int block = step * config.scale_blocks + j;
#pragma unroll
            for (int i = 0; i < rows_per_lane; ++i) {
                smem.a_scale[stage][j][i * warp_threads + a_scale_slot<config>(lane())] = rows_[i][block];
            }
            if (lane() < config.b_scale_slots) smem.b_scale[stage][j][lane()] = columns_[block];
        }
    }

   private:
    using Base = ScaleReader<config>;
    using Base::a_, Base::at, Base::b_, Base::lane, Base::params_, Base::rows_per_lane;

    __device__ __forceinline__ void load_vectors() {
#pragma unroll
        for (int i = 0; i < rows_per_lane; ++i) {
            ptx::ld_global(at(params_.a_scale, a_[i]), rows_[i]);
            a_[i] += warps * sizeof rows_[i];
        }
    }

    __device__ __forceinline__ void load_rows() {
#pragma unroll
        for (int j = 0; j < config.scales_at_once * warps; ++j) {
#pragma unroll
            for (int i = 0; i < rows_per_lane; ++i) {
                if (j < config.scales_at_once) rows_[i][j] = ptx::ld_global(at(params_.a_scale, a_[i]));
                a_[i] += sizeof(float) * params_.a_scale_stride_k;
            }
        }
    }

    float rows_[rows_per_lane][config.scales_at_once], columns_[config.scales_at_once];
};

// Requests a scale warp's first stage early, like the operands, because scales take as long to arrive: 3 to 5 % for n =
// 7168, k = 2048 (H200, 2026-11-21). Returns false if there is none.
template <GemmConfig config>
__device__ __forceinline__ bool request_first_scales(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    KRange range = k_range<config>(params);
    if (!reads_bounds_early<config>(params)) ptx::griddepcontrol_wait();
    if (!config.by_k && warp >= min(config.stages, range.end - range.begin)) return false;
    const Tile<config> tile = TileScheduler<config>(params).first();
    if (config.grouped() && !tile.valid) return false;
    if constexpr (config.by_k) {
        range = tile_range(tile);
        if (warp >= min(config.stages, range.end - range.begin)) return false;
    }
    if (reads_bounds_early<config>(params)) ptx::griddepcontrol_wait();
    ScaleReader<config>(params, tile, range.begin + warp).copy(smem, warp);
    return true;
}

// Writes a run of scales, from `step` on, and skips the other warps' runs. Early steps are requested already.
template <GemmConfig config>
__device__ __forceinline__ void produce_run(SharedStorage<config>& smem, RunReader<config>& scales,
                                            PipelineState<config.stages>& state, int step, int requested_steps) {
    using Runs = RunReader<config>;
    scales.load();
#pragma unroll
    for (int i = 0; i < Runs::steps; ++i) {
        if (step + i >= requested_steps) {
            wait(smem.empty[state.stage], state.phase ^ 1);
            scales.store(smem, state.stage, i);
            ptx::mbarrier_arrive(ptx::smem_address(&smem.full[state.stage]));
        }
        state.advance();
    }
    state.advance((Runs::warps - 1) * Runs::steps);
}

// Runs one scale warp. Scale warps take stages, or runs, in turn; the first stage is in flight if `requested`.
template <GemmConfig config>
__device__ __forceinline__ void produce_scales(const GemmParams& params, SharedStorage<config>& smem, int warp,
                                               bool requested) {
    using Runs = RunReader<config>;
    if (reads_bounds_early<config>(params)) ptx::griddepcontrol_wait();  // where no first stage was requested
    if (requested) ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_address(&smem.full[warp]));
    const bool in_runs = config.reads_runs && params.scale_runs != 0;
    if (in_runs && warp >= Runs::warps) return;
    KRange range = k_range<config>(params);
    int steps = range.end - range.begin;
    int step = in_runs ? warp * Runs::steps : warp;  // this warp's next step in the tile
    int requested_steps = config.scale_warps;        // steps in the first tile, one per warp
    PipelineState<config.stages> state;
    state.advance(step);
    if (!in_runs && requested) {
        step += config.scale_warps;
        state.advance(config.scale_warps);
    }
    TileScheduler<config> tiles(params);
    while (true) {
        const Tile<config> tile = tiles.next();
        if (!tile.valid) break;
        if constexpr (config.by_k) {
            range = tile_range(tile);
            steps = range.end - range.begin;
        }
        Runs scales(params, tile, range.begin + step);
        while (step < steps) {
            if (in_runs) {
                produce_run<config>(smem, scales, state, step, requested_steps);
                step += Runs::warps * Runs::steps;
            } else {
                wait(smem.empty[state.stage], state.phase ^ 1);
                scales.copy(smem, state.stage);
                ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_address(&smem.full[state.stage]));
                state.advance(config.scale_warps);
                step += config.scale_warps;
            }
        }
        step -= steps;
        requested_steps = 0;
    }
}

}  // namespace deep_tile
