// FP32 promotion: how a math thread reads a stage's scales and adds a scaled K block. Each kind of scales has a type.
#pragma once

#include "memory.cuh"
#include "mma.cuh"

namespace deep_tile {

// Adds block * row_scale * column_scale to sum. Registers 4j to 4j+3 hold columns 8j and 8j+1 (plus 2 * (lane % 4)) of
// this thread's two rows. `column` is the block's first column in the tile, whose own first column lies `shift` column
// groups into its scale block, if known.
template <GemmConfig config, int shift>
__device__ __forceinline__ void promote_block(float (&sum)[config.mma_n / 2],
                                              const MmaSum<config> (&block)[config.mma_n / 2],
                                              const float (&row_scale)[2],
                                              const float (&column_scale)[config.b_scale_slots], int column) {
#pragma unroll
    for (int i = 0; i < config.mma_n / 2; ++i) {
        const int row = i / 2 % 2;
        const int slot = (shift * config.column_group + column + i / 4 * 8) / config.b_scale_columns;
        sum[i] += row_scale[row] * column_scale[slot] * static_cast<float>(block[i]);
    }
}

// Promotes with a scale per column. `columns` points to this thread's pairs in shared memory, four per eight columns.
// All rows in a warp read the same 32 bytes, for four products per thread.
template <GemmConfig config>
__device__ __forceinline__ void promote_columns(float (&sum)[config.mma_n / 2],
                                                const MmaSum<config> (&block)[config.mma_n / 2],
                                                const float (&row_scale)[2], const float2* columns) {
#pragma unroll
    for (int i = 0; i < config.mma_n / 2; i += 4) {
        const float2 column_scale = columns[i];
        sum[i] += row_scale[0] * column_scale.x * static_cast<float>(block[i]);
        sum[i + 1] += row_scale[0] * column_scale.y * static_cast<float>(block[i + 1]);
        sum[i + 2] += row_scale[1] * column_scale.x * static_cast<float>(block[i + 2]);
        sum[i + 3] += row_scale[1] * column_scale.y * static_cast<float>(block[i + 3]);
    }
}

// Loads the scales of a thread's two rows in one WGMMA tile, the first at `rows`.
template <GemmConfig config>
__device__ __forceinline__ void load_rows(float (&row)[2], const float* rows) {
    const float2 pair = config.bulk_scales ? float2{rows[0], rows[8]} : reinterpret_cast<const float2&>(*rows);
    row[0] = pair.x;
    row[1] = pair.y;
}

// Block scales: one math thread's part of a stage's scales, for its two rows in each WGMMA tile and for all columns,
// and promotion with them.
template <GemmConfig config, bool of_blocks = config.has_scales(), bool of_columns = config.column_scales>
struct Scales {
    float row[config.scale_blocks][config.chunks_m][2];
    float column[config.scale_blocks][config.b_scale_slots];

    // Hides from the compiler that all threads read the same value: it would keep it in a uniform register and await
    // the read mid-stage, which made 128x192 5 to 12 % slower (H200, 2026-11-21).
    static __device__ __forceinline__ int not_uniform_zero() { return ptx::opaque_zero() * 4; }

    // Loads a stage's scales; `slot` belongs to the thread's first row.
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

    // Promotes scale block `i`; the tile's first column lies `shift` column groups into its scale block, if known.
    template <int shift>
    __device__ __forceinline__ void promote(float (&sum)[config.mma_n / 2], const MmaSum<config> (&block)[config.mma_n / 2],
                                            int i, int chunk_m, int chunk_n) const {
        promote_block<config, shift>(sum, block, row[i][chunk_m], column[i], chunk_n * config.mma_n);
    }
};

// Row and column scales. A tile's column scales would fill a quarter as many registers as its accumulators: they stay
// in shared memory until a block is promoted, and only then is the stage released.
template <GemmConfig config>
struct Scales<config, true, true> {
    float row[config.scale_blocks][config.chunks_m][2];
    const float2* column;  // this thread's column scales, for the first eight columns of the stage's first block

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

    template <int>
    __device__ __forceinline__ void promote(float (&sum)[config.mma_n / 2], const MmaSum<config> (&block)[config.mma_n / 2],
                                            int i, int chunk_m, int chunk_n) const {
        promote_columns<config>(sum, block, row[i][chunk_m], column + (i * config.block_n + chunk_n * config.mma_n) / 2);
    }
};

// No scales: blocks are added as they are.
template <GemmConfig config>
struct Scales<config, false, false> {
    __device__ __forceinline__ void load(const SharedStorage<config>&, int, int) const {}

    template <int>
    __device__ __forceinline__ void promote(float (&sum)[config.mma_n / 2], const MmaSum<config> (&block)[config.mma_n / 2],
                                            int, int, int) const {
#pragma unroll
        for (int j = 0; j < config.mma_n / 2; ++j) sum[j] += block[j];
    }
};

}  // namespace deep_tile
