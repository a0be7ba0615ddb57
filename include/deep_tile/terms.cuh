// FP32 numbers as sums of BF16 terms: the leading 8 bits, the next 8, the last 8.
#pragma once

#include "arithmetic.cuh"
#include "streaming.cuh"

namespace deep_tile {

// Splits two numbers into terms, the first in bits 0 to 15. Three terms are truncated, each exact except for bits below
// 2^-133, BF16's smallest number; two are rounded. If the first term equals the number, also infinity, the others are
// 0.
template <int terms>
__device__ __forceinline__ void split_pair(float first, float second, u32 (&words)[terms]) {
#pragma unroll
    for (int term = 0; term < terms; ++term) {
        words[term] = terms == 2 ? ptx::cvt_rn_bf16x2(second, first)
                                 : __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
        const float low = __uint_as_float(words[term] << 16), high = __uint_as_float(words[term] & 0xffff0000);
        first = term == 0 && first == low ? 0.0f : first - low;
        second = term == 0 && second == high ? 0.0f : second - high;
    }
}

// Splits FP32 b [rows, k] into out [terms, rows, out_stride], rows zero-padded to multiples of eight. Rows in b start
// at multiples of 16 bytes.
template <int terms, typename Params>
__device__ __forceinline__ void split_terms(const Params& params) {
    take_turn();
    const u32 pieces = params.out_stride / 8;
    const i64 count = i64(params.matrices) * params.rows * pieces;
    for (i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += i64(gridDim.x) * blockDim.x) {
        const i64 row = at / pieces, matrix = row / params.rows, own_row = row % params.rows;
        const int k = int(at % pieces) * 8;
        const float* from = params.b + matrix * params.matrix_stride + own_row * params.row_stride + k;
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 four = {};
            if (k + i + 4 <= params.k) {
                four = *reinterpret_cast<const float4*>(from + i);
            } else {
                if (k + i < params.k) four.x = from[i];
                if (k + i + 1 < params.k) four.y = from[i + 1];
                if (k + i + 2 < params.k) four.z = from[i + 2];
            }
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
        u32 words[4][terms];
#pragma unroll
        for (int i = 0; i < 4; ++i) split_pair<terms>(values[2 * i], values[2 * i + 1], words[i]);
#pragma unroll
        for (int term = 0; term < terms; ++term) {
            u16* to = params.out + ((matrix * terms + term) * params.rows + own_row) * params.out_stride + k;
            *reinterpret_cast<uint4*>(to) = {words[0][term], words[1][term], words[2][term], words[3][term]};
        }
    }
}

}  // namespace deep_tile
