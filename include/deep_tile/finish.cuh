// Scales of rows and the bias: applied to accumulators before their activation (activation.cuh).
//
//   kind              scales                                            bias
//   with promotion    -                                                 added first: accumulators begin with it
//   without           -                                                 KeepBias: loaded during the first WGMMAs
//   with row scales   ScaleRows: loaded during the first WGMMAs         added at the end, for want of registers
//   with both         ScaleRowsLate: at the end                         added at the end, for want of registers
//
// Under split K, a CTA adds the bias to its share of the columns once all K parts are summed, and also scales integer
// sums there, which stay exact until then.
#pragma once

#include "output.cuh"

namespace deep_tile {

// Offsets to a tile's group: in elements to its scales, and from its rows in `out` to its rows among the scales.
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

// Row scales, loaded during the tile's first WGMMAs into registers, which tiles without temporaries can spare. A stride
// of 0 repeats one scale. Rows and columns beyond the matrix take the last scale: they are never stored.
template <GemmConfig config, int width = config.mma_n>
class ScaleRows {
   public:
    // Loads the scales for one warpgroup, whose first element is at `row` and `column`, and `width` columns.
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
    static constexpr int columns = width / 4;  // per thread, two in each eight
    float row_[2 * config.chunks_m], column_[columns];
};

// Row scales beside promotion: temporaries leave no registers until all of K is summed, so scales are loaded then, for
// one WGMMA's columns at a time.
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

// Bits of a number in the bias, and its value.
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

// Bits of the bias in a column. Columns beyond the matrix, which are never stored, take the last one's.
template <GemmConfig config>
__device__ __forceinline__ BiasBits<config> bias_bits(const GemmParams& params, int column) {
    const u32 at = min(column, params.n - 1);
    return ptx::ld_global(static_cast<const BiasBits<config>*>(params.bias) + at * params.bias_stride);
}

// Those in columns 8i and 8i + 1 from `column` on (plus 2 * (lane % 4)), by i / 2 and i % 2.
template <GemmConfig config>
__device__ __forceinline__ BiasBits<config> bias_bits(const GemmParams& params, int column, int i) {
    return bias_bits<config>(params, column + int(threadIdx.x % 4) * 2 + i / 2 * 8 + i % 2);
}

// Keeps the bias in registers, loaded as row scales are. Two 16-bit numbers share one: otherwise 128x256 tiles spill.
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

// Step that a CTA applies to the sums over its K.
template <GemmConfig config>
using Scaled =
    typename Conditional<config.row_scales && !config.keeps_integers(), RowScaled<config>, Unscaled<config>>::type;

// Step that a CTA applies to its share of the columns, once all K parts are summed.
template <GemmConfig config>
using ShareScaled = typename Conditional<config.row_scales && config.keeps_integers(),
                                         ScaleRows<config, config.columns_per_part>, AsTheyAre<config>>::type;

// Initialises accumulators with the bias; the tile's first column is `column`.
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

// Adds the bias to columns [first, first + count) of a tile that begins at `column`, unless sums began with it.
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
                sum = __fadd_rn(sum, bias);  // rounded by itself in every kernel, never fused with the scale
            }
        }
    }
}

}  // namespace deep_tile
