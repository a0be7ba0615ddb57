// FP8 epilogue: output boxes with 1x128 scales, for a GEMM that ends in a cast.
//
// output.cuh calls it. A box is one scale block wide, so the four lanes that share a row find its scale by themselves.
// Every bit equals that of the separate cast (quantize.cuh); formats.cuh has the arithmetic of both.
#pragma once

#include "activation.cuh"
#include "boxes.cuh"
#include "formats.cuh"

namespace deep_tile {

// Unpack the BF16 numbers in a word.
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

// Magnitude bits of a row's largest element, over the four lanes that share the row. Comparing halves directly, two at
// once, makes ptxas take the warps of 64-row tiles for divergent (NVRTC 13.0.88).
__device__ __forceinline__ u32 largest_of_row(const u32 (&pairs)[scale_block / 16][4], int half) {
    float sizes[4] = {};  // independent maxima: in a single chain each would wait for the one before
#pragma unroll
    for (int i = 0; i < scale_block / 8; ++i) {
        const u32 pair = pairs[i / 2][i % 2 * 2 + half];
        sizes[i % 4] = ptx::max_nan(sizes[i % 4], ptx::max_nan(fabsf(low_bf16(pair)), fabsf(high_bf16(pair))));
    }
    float size = ptx::max_nan(ptx::max_nan(sizes[0], sizes[1]), ptx::max_nan(sizes[2], sizes[3]));
    size = ptx::max_nan(size, __shfl_xor_sync(0xffffffff, size, 1));
    return __float_as_uint(ptx::max_nan(size, __shfl_xor_sync(0xffffffff, size, 2)));
}

// Writes this warp's rows of a box to shared memory at `codes`, and their scales to global memory. Sums are rounded to
// BF16 first, the input of a separate cast. `row` and `column` locate the box in `out`.
template <GemmConfig config>
__device__ __forceinline__ void write_quantized(const GemmParams& params, u32 codes, u32 lane,
                                                const float (&sums)[config.chunks_n][config.mma_n / 2], int box, int row,
                                                int column) {
    u32 pairs[scale_block / 16][4];  // alternating between the upper and the lower eight rows
    const int columns = out_column<config>(params.n) - column;
#pragma unroll
    for (int i = 0; i < scale_block / 16; ++i) {
        const float* d = &sums[0][0] + (box_column<config>(box) + i * 16) * config.columns_per_output / 2;
        float results[8];
        if constexpr (config.activation != Activation::none) activate<config>(results, d);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* const from = config.activation == Activation::none ? d : results;
            pairs[i][j] = packed<Format::bf16>(from[2 * j + 1], from[2 * j]);
        }
    }
    if (columns < scale_block) {  // `out` ends here, at a multiple of 16; a bias may fill columns beyond
#pragma unroll
        for (int i = 0; i < scale_block / 4; ++i) pairs[i / 4][i % 4] *= i / 4 * 16 < columns;
    }
    row += lane / 4;
    auto* const scales = params.out_scale + column / scale_block * params.out_scale_stride_n;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Scale scale = make_scale(largest_of_row(pairs, half), params);
        const int at = row + half * 8;
        const bool holds = lane % 4 == 0 && at < params.m && columns > 0;
        ptx::st_global(scales + at * params.out_scale_stride_m, scale.value, holds);
        if (scale.is_tiny()) {
            scale = scale.raised();
#pragma unroll
            for (int i = 0; i < scale_block / 8; ++i) {
                u32& pair = pairs[i / 2][i % 2 * 2 + half];
                pair = BFloat16::raised(pair);
            }
        }
#pragma unroll
        for (int i = 0; i < scale_block / 8; ++i) {
            const u32 pair = pairs[i / 2][i % 2 * 2 + half];
            const u32 first = swizzle<config>(lane / 4 * row_bytes<config> + i / 2 * 16 + lane % 4 * 2);
            const float quotients[] = {divide(low_bf16(pair), scale), divide(high_bf16(pair), scale)};
            ptx::st_shared(codes + first + (half * 8 * row_bytes<config> + i % 2 * 8),
                           ptx::cvt_rn_satfinite_e4m3x2(quotients[1], quotients[0]));
        }
    }
}

}  // namespace deep_tile
