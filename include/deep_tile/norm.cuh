// RMSNorm of a sum, cast to FP8 with one scale per 1x128 block: what stands before most of a decoder's linear layers.
//
// deep_tile/cast.py launches it; deep_tile/norms.py holds the definition. A CTA has one row, a thread eight neighbouring
// columns, which stay in registers: each element is read once.
#pragma once

#include "quantize.cuh"

namespace deep_tile {

// Sum over the CTA's threads, in a fixed order, returned to every thread.
template <int threads>
__device__ __forceinline__ float sum_of_block(float value) {
    constexpr int warps = threads / warp_threads;
    __shared__ float sums[warps];
    const int lane = threadIdx.x % warp_threads;
    value = sum_of_lanes<warp_threads>(value);
    if (lane == 0) sums[threadIdx.x / warp_threads] = value;
    __syncthreads();
    return sum_of_lanes<warp_threads>(lane < warps ? sums[lane] : 0.0f);
}

// Casts the normalised sum of x's and residual's row `blockIdx.x`, and stores the sum. All rows allow vector accesses.
template <int threads>
__device__ __forceinline__ void cast_norm(const CastParams& params) {
    take_turn();
    constexpr int elements = 8;
    using Words = Slice<BFloat16, threads, elements, 1>;
    const i64 row = blockIdx.x;
    const int columns = params.columns, lane = threadIdx.x, column = lane * elements;
    Words x, residual, weight;
    x.load(static_cast<const u16*>(params.x) + row * params.x_stride, columns, lane, true);
    residual.load(static_cast<const u16*>(params.residual) + row * params.residual_stride, columns, lane, true);
    weight.load(static_cast<const u16*>(params.weight), columns, lane, true);
    Slice<Float32, threads, elements, 1> part;
    part.fill([&](int i, int j) { return x.value(i, j) + residual.value(i, j); });
    if (column < columns) {
        const auto pair = [&](int word) { return BFloat16::pack(part.value(0, 2 * word + 1), part.value(0, 2 * word)); };
        u16* sum = static_cast<u16*>(params.sum) + row * params.sum_stride + column;
        *reinterpret_cast<uint4*>(sum) = {pair(0), pair(1), pair(2), pair(3)};
    }
    float squares = 0;
#pragma unroll
    for (int j = 0; j < elements; ++j) squares = fmaf(part.value(0, j), part.value(0, j), squares);
    const float factor = rsqrtf(sum_of_block<threads>(squares) * params.mean_factor + params.epsilon);
    part.fill([&](int i, int j) { return part.value(i, j) * factor * weight.value(i, j); });
    const Scale scale = make_scale(largest_of_lanes<scale_block / elements>(part.magnitude()), params);
    if (column % scale_block == 0 && column < columns) write_scale(params, row, column / scale_block, scale.value);
    part.store(params.out + row * params.out_stride, columns, lane, true, part.template quantized<false>(scale));
}

}  // namespace deep_tile
