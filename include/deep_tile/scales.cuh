// The way of the scales: from global memory by scale warps, with a stage, to the registers of math threads.
//
// Scales travel with the stage, because reading them from global memory in the math loop costs 6 to 8 % (H200,
// 2026-11-21). They go one of three ways:
//
//   in runs       A lane reads several K blocks' scales of its rows into registers, and writes them to one stage after
//                 the other: with vectors where those of a row of `a` lie side by side, and in 64-row tiles always.
//   one by one    cp.async, 4 bytes a copy, takes any stride and any number of K blocks, and no time of the lane.
//   in bulk       TMA copies those of `a` with the operands, in tiles of several chunks, if a column's lie side by side.
//
// One by one from 128 rows, 128 lines of cache for each K block, they take the time of shared memory that WGMMAs need:
// row-major scales cost 2.4 % above m = 128, 19 % at worst, and in runs 0 and 2 % (100 shapes; H200, 2026-11-24).
#pragma once

#include "memory.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// Whether TMA copies the scales of the tile's rows: if they lie side by side, those of a whole tile. The host says
// whether they do, beside sizes that are read first anyway: the first request waits for whatever must be read before it.
template <GemmConfig config>
__device__ __forceinline__ bool scales_in_bulk(const GemmParams& params, Tile<config> tile) {
    return config.bulk_scales && tile.a_row() + config.block_m <= params.bulk_scale_rows && has_k<config>(params, tile);
}

// The same of the scales of the tile's columns, where each has its own.
template <GemmConfig config>
__device__ __forceinline__ bool column_scales_in_bulk(const GemmParams& params, Tile<config> tile) {
    if constexpr (!config.bulk_scales || !config.column_scales) return false;
    return tile.b_row() + config.block_n <= params.bulk_scale_columns && has_k<config>(params, tile);
}

// Where a row's scale is within a tile's: beside that of the other row of the thread that needs both, 8 rows away, or,
// where TMA may have copied them, in order.
template <GemmConfig config>
__device__ __forceinline__ int a_scale_slot(int row) {
    return config.bulk_scales ? row : row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

// Where a scale warp reads a tile's scales: each lane those of its rows of `a`, unless TMA copies them, and the first
// lanes those of the slots of columns of `b`. Rows and columns beyond the matrix take the last scale there is: their
// products are never stored.
//
// Places are counted in bytes, of 32 bits, so that nothing but additions is left for each stage. As elements, or as
// pointers with 32-bit strides, ptxas has the multiplier work them out, which FFMAs of math warps then wait for: 128-row
// tiles took up to 9 % longer. With 64-bit strides the way to the first request was longer, and products took 0.7 % more
// time up to m = 1024 (H200, 2026-11-22).
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
        if constexpr (config.row_groups()) b_[0] += sizeof(float) * tile.group * params.b_scale_group_stride;
    }

    // Requests this step's for a stage, and turns to the warp's next step; blocks beyond the matrix get zeros.
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
    static constexpr int b_scale_rows = config.column_scales ? 1 : scale_block;  // of b, that share a scale

    static __device__ __forceinline__ int lane() { return threadIdx.x % warp_threads; }

    static __device__ __forceinline__ const float* at(const float* scales, u32 bytes) {
        return reinterpret_cast<const float*>(reinterpret_cast<const u8*>(scales) + bytes);
    }

    const GemmParams& params_;
    const bool in_bulk_, columns_in_bulk_;
    u32 a_[rows_per_lane], b_[slots_per_lane];  // bytes from the first scale to those of this step
    int step_;
};

// GemmParams.scale_runs, where those of a row of `a` can be read as vectors.
constexpr int vector_runs = 2;

// Where a scale warp reads a tile's scales in runs, of which it takes every `warps`-th.
template <GemmConfig config>
class RunReader : public ScaleReader<config> {
   public:
    static constexpr int steps = config.scales_at_once / config.scale_blocks;  // of a run

    // Warps that take runs in turn: so few that from one of its steps to its next a warp passes no more than a round of
    // stages. After two rounds a barrier's parity is the same again, and the warp would not wait for the second.
    static constexpr int turns = 1 + (config.stages - 1) / steps;
    static constexpr int warps = config.scale_warps < turns ? config.scale_warps : turns;

    // `step` is the first of the warp's first run.
    __device__ __forceinline__ RunReader(const GemmParams& params, Tile<config> tile, int step)
        : ScaleReader<config>(params, tile, step) {}

    // Reads this run's, and turns to the warp's next one.
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

    // Writes those of the run's `step` to a stage.
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

// A scale warp's first stage is requested early, like its operands, because scales take as long to arrive: 3 to 5 % for
// n = 7168, k = 2048 (H200, 2026-11-21). False if there is none.
template <GemmConfig config>
__device__ __forceinline__ bool request_first_scales(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    KRange range = k_range<config>(params);
    ptx::griddepcontrol_wait();
    if (!config.by_k && warp >= min(config.stages, range.end - range.begin)) return false;
    const Tile<config> tile = TileScheduler<config>(params).first();
    if (config.grouped() && !tile.valid) return false;
    if constexpr (config.by_k) {
        range = tile_range(tile);
        if (warp >= min(config.stages, range.end - range.begin)) return false;
    }
    ScaleReader<config>(params, tile, range.begin + warp).copy(smem, warp);
    return true;
}

// Writes a run of a tile's scales, from `step` on, and passes the other warps' runs. Early steps are requested already.
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

// One of the scale warps, which take stages in turn, or runs of them; its first stage's are under way if `requested`.
template <GemmConfig config>
__device__ __forceinline__ void produce_scales(const GemmParams& params, SharedStorage<config>& smem, int warp,
                                               bool requested) {
    using Runs = RunReader<config>;
    if (requested) ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_address(&smem.full[warp]));
    const bool in_runs = config.reads_runs && params.scale_runs != 0;
    if (in_runs && warp >= Runs::warps) return;
    KRange range = k_range<config>(params);
    int steps = range.end - range.begin;
    int step = in_runs ? warp * Runs::steps : warp;  // of the tile, the next of this warp
    int requested_steps = config.scale_warps;        // of the first tile, each by its own warp
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

// Those of a thread's two rows in one WGMMA tile, of which the first is at `rows`.
template <GemmConfig config>
__device__ __forceinline__ void load_rows(float (&row)[2], const float* rows) {
    const float2 pair = config.bulk_scales ? float2{rows[0], rows[8]} : reinterpret_cast<const float2&>(*rows);
    row[0] = pair.x;
    row[1] = pair.y;
}

// What one math thread needs of a stage's scales: those of its two rows in each WGMMA tile, and of all columns.
template <GemmConfig config, bool of_columns = config.column_scales>
struct Scales {
    float row[config.scale_blocks][config.chunks_m][2];
    float column[config.scale_blocks][config.b_scale_slots];

    // Hides from the compiler that all threads read the same: it would keep that in a uniform register, and wait for it
    // to be read in the middle of a stage, for which 128x192 took 5 to 12 % longer (H200, 2026-11-21).
    static __device__ __forceinline__ int not_uniform_zero() { return ptx::opaque_zero() * 4; }

    // `slot` is that of the thread's first row.
    __device__ __forceinline__ void load(const SharedStorage<config>& smem, int stage, int slot) {
#pragma unroll
        for (int block = 0; block < config.scale_blocks; ++block) {
#pragma unroll
            for (int i = 0; i < config.chunks_m; ++i) {
                load_rows<config>(row[block][i], &smem.a_scale[stage][block][slot + i * mma_m]);
            }
            const float* columns = smem.b_scale[stage][block] + (config.takes_turns ? not_uniform_zero() : 0);
#pragma unroll
            for (int i = 0; i < config.b_scale_slots; ++i) column[block][i] = columns[i];
        }
    }
};

// The same where each column has a scale of its own. Those of a tile would fill a quarter as many registers as its sums:
// they stay in shared memory until a block is promoted, and only then is the stage given back.
template <GemmConfig config>
struct Scales<config, true> {
    float row[config.scale_blocks][config.chunks_m][2];
    const float2* column;  // the scales of this thread's columns in the first eight of the stage's first block

    __device__ __forceinline__ void load(const SharedStorage<config>& smem, int stage, int slot) {
#pragma unroll
        for (int block = 0; block < config.scale_blocks; ++block) {
#pragma unroll
            for (int i = 0; i < config.chunks_m; ++i) {
                load_rows<config>(row[block][i], &smem.a_scale[stage][block][slot + i * mma_m]);
            }
        }
        column = reinterpret_cast<const float2*>(smem.b_scale[stage][0]) + threadIdx.x % 4;
    }
};

}  // namespace deep_tile
