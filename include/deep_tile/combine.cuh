// Weighted sum of experts' rows for each token: out[t] = sum over j of weights[t, j] * x[index[t, j]], in BF16.
//
// deep_tile/cast.py launches it; deep_tile/experts.py holds the definition, equal in every bit. A thread has some
// neighbouring columns of a token and requests them from `rows_at_once` rows before it adds the first.
#pragma once

#include "arithmetic.cuh"
#include "streaming.cuh"

namespace deep_tile {

__device__ __forceinline__ float float_of_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// Eight columns of a row, two to a word: 16 bytes.
struct Eight {
    // Loads `columns` of them, in one access if `aligned`, which means all or none; the others are zeros.
    __device__ __forceinline__ void load(const u16* row, int columns, bool aligned) {
        if (aligned) {
            uint4 loaded = {};
            if (columns > 0) loaded = *reinterpret_cast<const uint4*>(row);
            words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 bits = i < columns ? row[i] : 0;
            words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
        }
    }

    __device__ __forceinline__ void store(u16* row, int columns, bool aligned) const {
        if (aligned) {
            *reinterpret_cast<uint4*>(row) = {words[0], words[1], words[2], words[3]};
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < columns) row[i] = words[i / 2] >> (16 * (i % 2));
        }
    }

    __device__ __forceinline__ float value(int i) const { return float_of_bf16(words[i / 2] >> (16 * (i % 2)) & 0xffff); }

    u32 words[4];
};

__device__ __forceinline__ float read_weight(const CombineParams& params, i64 at) {
    if (params.narrow_weights) return float_of_bf16(static_cast<const u16*>(params.weights)[at]);
    return static_cast<const float*>(params.weights)[at];
}

// Threads take one column group after the other, counted along the columns first, in 32 bits: more would be 64 GiB of
// out. Products and sums are rounded one after the other, without FMA, as in torch.
template <int rows_at_once>
__device__ __forceinline__ void combine(const CombineParams& params) {
    take_turn();
    const auto* x = static_cast<const u16*>(params.x);
    const u32 groups = (params.columns + 7) / 8;  // per row
    const u32 items = params.tokens * groups;
    for (u32 item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
        const u32 token = item / groups;
        const i64 first = i64(item % groups) * 8;
        const int columns = params.columns - first < 8 ? int(params.columns - first) : 8;
        float sums[8] = {};
#pragma unroll 1
        for (int begin = 0; begin < params.top_k; begin += rows_at_once) {
            i64 index[rows_at_once];
            float weights[rows_at_once];
            Eight rows[rows_at_once];
#pragma unroll
            for (int i = 0; i < rows_at_once; ++i) {
                const i64 at = token * params.index_stride_row + (begin + i) * params.index_stride_column;
                index[i] = begin + i < params.top_k ? read_index(params.index, params.wide_index, at) : -1;
            }
#pragma unroll
            for (int i = 0; i < rows_at_once; ++i) {
                const bool exists = u64(index[i]) < u64(params.x_rows);  // else it adds 0 * 0, which changes no sum
                const i64 at = token * params.weights_stride_row + (begin + i) * params.weights_stride_column;
                weights[i] = exists ? read_weight(params, at) : 0.0f;
                const u16* row = x + (exists ? index[i] : 0) * params.x_stride + first;
                rows[i].load(row, exists ? columns : 0, params.aligned);
            }
#pragma unroll
            for (int i = 0; i < rows_at_once; ++i) {
#pragma unroll
                for (int n = 0; n < 8; ++n) sums[n] = __fadd_rn(sums[n], __fmul_rn(weights[i], rows[i].value(n)));
            }
        }
        Eight sum;
#pragma unroll
        for (int n = 0; n < 4; ++n) sum.words[n] = ptx::cvt_rn_bf16x2(sums[2 * n + 1], sums[2 * n]);
        sum.store(static_cast<u16*>(params.out) + token * params.out_stride + first, columns, params.aligned);
    }
}

}  // namespace deep_tile
