// What becomes of a tile's sums before their activation (activation.cuh): scales of rows, and the bias of each column.
//
//   for kinds            scales                     bias
//   with promotion       -                          sums begin with it
//   without              -                          KeepBias: requested while the first WGMMAs run
//   with scales of rows  ScaleRows: likewise        added at the end, for want of registers
//   with both            ScaleRowsLate: at the end  likewise
//
// A block that has a part of K adds the bias to its share of the columns, when the sums are those of all parts. So it
// scales them where they are sums of integers, which stay exact until then.
#pragma once

#include "output.cuh"

namespace deep_tile {

// How far the scales of a tile's group lie from those of all groups, in elements, and its rows among them from those of
// `out`.
struct GroupScales {
    u32 a, b;
    int rows;
};

template <GemmConfig config>
__device__ __forceinline__ GroupScales group_scales(const GemmParams& params, const Tile<config>& tile) {
    if constexpr (config.row_groups()) {
        return {tile.group * params.a_scale_group_stride, tile.group * params.b_scale_group_stride, tile.scale - tile.out};
    } else {
        return {0, 0, 0};
    }
}

template <GemmConfig config>
struct AsTheyAre {
    __device__ __forceinline__ void begin(const GemmParams&, int, int, GroupScales) const {}
    __device__ __forceinline__ void apply(const GemmParams&, Accumulators<config>&, int, int, GroupScales,
                                          int = 0) const {}
};

// Scales are requested while the tile's first WGMMAs run, and then lie in registers, of which tiles without temporaries
// have some to spare. A stride of 0 makes one scale of all. Rows and columns beyond the matrix take the last scale there
// is: they are never stored.
template <GemmConfig config, int width = config.mma_n>
class ScaleRows {
   public:
    // Of the sums of one warpgroup, whose first row and column these are, in `width` columns.
    __device__ __forceinline__ void begin(const GemmParams& params, int row, int column, GroupScales group) {
        const u32 thread = threadIdx.x % warpgroup_threads;
        row += group.rows + thread / warp_threads * 16 + thread % warp_threads / 4;
        column += thread % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * config.chunks_m; ++i) {
            const u32 at = min(row + i / 2 * mma_m + i % 2 * 8, params.m - 1);
            row_[i] = ptx::ld_global(params.a_scale + (group.a + at * params.a_scale_stride_m));
        }
#pragma unroll
        for (int i = 0; i < columns; ++i) {
            const u32 at = min(column + i / 2 * 8 + i % 2, params.n - 1);
            column_[i] = ptx::ld_global(params.b_scale + (group.b + at * params.b_scale_stride_n));
        }
    }

    __device__ __forceinline__ void apply(const GemmParams&, Accumulators<config>& sums, int, int, GroupScales,
                                          int first = 0) const {
#pragma unroll
        for (int chunk_m = 0; chunk_m < config.chunks_m; ++chunk_m) {
#pragma unroll
            for (int i = 0; i < width / 2; ++i) {
                float& sum = (&sums[chunk_m][0][0])[first / 2 + i];
                sum *= row_[2 * chunk_m + i / 2 % 2] * column_[i / 4 * 2 + i % 2];
            }
        }
    }

   private:
    static constexpr int columns = width / 4;  // of this thread, two in each eight
    float row_[2 * config.chunks_m], column_[columns];
};

// The same where scales have no registers before all of K is added up, beside temporaries, and then for one WGMMA's
// columns at a time.
template <GemmConfig config>
struct ScaleRowsLate : AsTheyAre<config> {
    __device__ __forceinline__ void apply(const GemmParams& params, Accumulators<config>& sums, int row, int column,
                                          GroupScales group) const {
#pragma unroll
        for (int chunk_n = 0; chunk_n < config.chunks_n; ++chunk_n) {
            ScaleRows<config> scales;
            scales.begin(params, row, column + chunk_n * config.mma_n, group);
            scales.apply(params, sums, row, column, group, chunk_n * config.mma_n);
        }
    }
};

// A number of the bias as it lies in memory, and its value.
template <GemmConfig config>
using BiasBits = typename Conditional<config.bias_format == Format::fp32, u32, u16>::type;

template <GemmConfig config>
__device__ __forceinline__ float bias_value(BiasBits<config> bits) {
    if constexpr (config.bias_format == Format::fp16) {
        return ptx::cvt_f32_f16(bits);
    } else if constexpr (config.bias_format == Format::bf16) {
        return __uint_as_float(u32{bits} << 16);
    } else {
        static_assert(config.bias_format == Format::fp32, "a format of the bias without code");
        return __uint_as_float(bits);
    }
}

// Of the columns 8i and 8i + 1 from `column` on (plus 2 * (lane % 4)), by i / 2 and i % 2. Beyond the matrix it is the last
// one's, which is never stored.
template <GemmConfig config>
__device__ __forceinline__ BiasBits<config> bias_bits(const GemmParams& params, int column, int i) {
    const u32 at = min(column + int(threadIdx.x % 4) * 2 + i / 2 * 8 + i % 2, params.n - 1);
    return ptx::ld_global(static_cast<const BiasBits<config>*>(params.bias) + at * params.bias_stride);
}

// Adds the bias, requested as scales of rows are. Two numbers of 16 bits share a register: else tiles of 128x256 spill.
template <GemmConfig config>
class KeepBias {
   public:
    __device__ __forceinline__ void begin(const GemmParams& params, int, int column, GroupScales) {
#pragma unroll
        for (int i = 0; i < words; ++i) {
            word_[i] = bias_bits<config>(params, column, i * per_word);
            if (per_word == 2) word_[i] |= u32{bias_bits<config>(params, column, i * 2 + 1)} << 16;
        }
    }

    __device__ __forceinline__ void apply(const GemmParams&, Accumulators<config>& sums, int, int, GroupScales) const {
#pragma unroll
        for (int i = 0; i < config.chunks_m * config.block_n / 2; ++i) {
            const int at = i % (config.block_n / 2) / 4 * 2 + i % 2;
            const u32 bits = word_[at / per_word] >> at % per_word * 16;
            (&sums[0][0][0])[i] += bias_value<config>(static_cast<BiasBits<config>>(bits));
        }
    }

   private:
    static constexpr int per_word = 4 / sizeof(BiasBits<config>), words = config.block_n / 4 / per_word;
    u32 word_[words];
};

template <GemmConfig config>
using Unscaled = typename Conditional<config.keeps_bias(), KeepBias<config>, AsTheyAre<config>>::type;

template <GemmConfig config>
using RowScaled = typename Conditional<config.block_sets == 0, ScaleRows<config>, ScaleRowsLate<config>>::type;

// What a block does to the sums of its K.
template <GemmConfig config>
using Scaled =
    typename Conditional<config.row_scales && !config.keeps_integers(), RowScaled<config>, Unscaled<config>>::type;

// What it does to its share of the columns, when the sums are those of all parts of K.
template <GemmConfig config>
using ShareScaled = typename Conditional<config.row_scales && config.keeps_integers(),
                                         ScaleRows<config, config.columns_per_part>, AsTheyAre<config>>::type;

// Makes the bias what is added to; the tile's first column is `column`.
template <GemmConfig config>
__device__ __forceinline__ void begin_with_bias(const GemmParams& params, Accumulators<config>& sums, int column) {
#pragma unroll
    for (int i = 0; i < config.block_n / 4; ++i) {
        const float bias = bias_value<config>(bias_bits<config>(params, column, i));
#pragma unroll
        for (int row = 0; row < 2 * config.chunks_m; ++row) {
            (&sums[row / 2][0][0])[i / 2 * 4 + row % 2 * 2 + i % 2] = bias;
        }
    }
}

// To columns [first, first + count) of a tile whose first is `column`, where it was not there from the beginning.
template <GemmConfig config>
__device__ __forceinline__ void add_bias(const GemmParams& params, Accumulators<config>& sums, int column, int first,
                                         int count) {
    if constexpr (config.adds_bias_late()) {
#pragma unroll
        for (int i = first / 4; i < (first + count) / 4; ++i) {
            const float bias = bias_value<config>(bias_bits<config>(params, column, i));
#pragma unroll
            for (int row = 0; row < 2 * config.chunks_m; ++row) {
                float& sum = (&sums[row / 2][0][0])[i / 2 * 4 + row % 2 * 2 + i % 2];
                sum = __fadd_rn(sum, bias);  // rounded by itself in every kernel, not with the scale in some
            }
        }
    }
}

}  // namespace deep_tile
