// What a math thread reads of a stage's scales, and how it adds a K block by them: a type for each kind of scales.
#pragma once

#include "memory.cuh"
#include "mma.cuh"

namespace deep_tile {

// sum += block * row_scale * column_scale. Registers 4j to 4j+3 are columns 8j and 8j+1 (plus 2 * (lane % 4)) of this
// thread's two rows; `column` is the block's first column in the tile, whose own lies `shift` column groups into its
// scale block, if that is known.
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

// The same with a scale for each column, of which `columns` are this thread's pairs in shared memory, four in each eight
// columns. All of a warp's rows read the same 32 bytes, for four products of each thread.
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

// Those of a thread's two rows in one WGMMA tile, of which the first is at `rows`.
template <GemmConfig config>
__device__ __forceinline__ void load_rows(float (&row)[2], const float* rows) {
    const float2 pair = config.bulk_scales ? float2{rows[0], rows[8]} : reinterpret_cast<const float2&>(*rows);
    row[0] = pair.x;
    row[1] = pair.y;
}

// What one math thread needs of a stage's scales, those of its two rows in each WGMMA tile, and of all columns; and how
// it adds a block by them.
template <GemmConfig config, bool of_blocks = config.has_scales(), bool of_columns = config.column_scales>
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

    // Those of scale block `i`; the tile's first column lies `shift` column groups into its own, if that is known.
    template <int shift>
    __device__ __forceinline__ void promote(float (&sum)[config.mma_n / 2], const MmaSum<config> (&block)[config.mma_n / 2],
                                            int i, int chunk_m, int chunk_n) const {
        promote_block<config, shift>(sum, block, row[i][chunk_m], column[i], chunk_n * config.mma_n);
    }
};

// The same where each column has a scale of its own. Those of a tile would fill a quarter as many registers as its sums:
// they stay in shared memory until a block is promoted, and only then is the stage given back.
template <GemmConfig config>
struct Scales<config, true, true> {
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

    template <int>
    __device__ __forceinline__ void promote(float (&sum)[config.mma_n / 2], const MmaSum<config> (&block)[config.mma_n / 2],
                                            int i, int chunk_m, int chunk_n) const {
        promote_columns<config>(sum, block, row[i][chunk_m], column + (i * config.block_n + chunk_n * config.mma_n) / 2);
    }
};

// The same where blocks have none, and are added as they are.
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
