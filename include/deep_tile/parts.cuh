// Thin GEMM results (thin.cuh): output formats, and the reduction over K parts.
#pragma once

#include "arithmetic.cuh"
#include "streaming.cuh"

namespace deep_tile {

// Writes a result in its format; FP32 may accumulate.
template <typename Params>
__device__ __forceinline__ void write_result(const Params& params, i64 at, float value) {
    if (params.format == int(Format::fp32)) {
        float* to = static_cast<float*>(params.out) + at;
        *to = params.accumulate ? *to + value : value;
    } else {
        const u32 bits = params.format == int(Format::bf16) ? ptx::cvt_rn_bf16x2(0, value) : ptx::cvt_rn_f16x2(0, value);
        static_cast<u16*>(params.out)[at] = bits;
    }
}

// Reduces the K parts for each output, and for the squares after them: `lanes` threads each take every lanes-th part,
// and the first one adds their sums.
template <int threads, typename Params>
__device__ __forceinline__ void add_parts(const Params& params) {
    __shared__ float shares[threads];
    take_turn();
    const u32 width = threads / params.lanes, column = threadIdx.x % width, lane = threadIdx.x / width;
    const i64 products = i64(params.m) * params.n, count = products + (params.squares ? params.m : 0);
    for (i64 first = i64(blockIdx.x) * width; first < count; first += i64(gridDim.x) * width) {
        const i64 at = first + column;
        const bool is_square = at >= products;
        const float* from = is_square ? params.squares + (at - products) : params.sums + at;
        const i64 step = is_square ? params.m : products;
        float sum = 0;
#pragma unroll 8
        for (u32 part = lane; at < count && part < params.parts; part += params.lanes) sum += from[part * step];
        shares[threadIdx.x] = sum;
        __syncthreads();
        if (lane == 0 && at < count) {
            for (u32 i = 1; i < params.lanes; ++i) sum += shares[i * width + column];
            if (is_square) {
                params.sqr_sum[at - products] = sum;
            } else {
                write_result(params, at / params.n * params.out_stride + at % params.n, sum);
            }
        }
        __syncthreads();
    }
}

}  // namespace deep_tile
