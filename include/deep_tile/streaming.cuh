// Helpers for memory-bound kernels, e.g. casts (quantize.cuh) and combine (combine.cuh).
#pragma once

struct TensorMap;  // unused in their parameters

#include "ptx.cuh"

namespace deep_tile {

using i64 = long long;

// Precedes every access to global memory: with overlapping launches, the previous kernel may still write x, or read the
// memory that this one overwrites. Only then does the next launch start: a GEMM may request its weights at once, even
// if an earlier kernel wrote them, which is safe because everything before the cast has ended.
__device__ __forceinline__ void take_turn() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
}

// Reads entry `at` of an int64 or int32 index.
__device__ __forceinline__ i64 read_index(const void* index, bool wide, i64 at) {
    return wide ? static_cast<const i64*>(index)[at] : i64(static_cast<const int*>(index)[at]);
}

// Sums `value` over the CTA's threads before this one, by `sums`, a number in shared memory per warp.
__device__ __forceinline__ u32 sum_before(u32 value, u32* sums) {
    const u32 warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
    u32 sum = value;
#pragma unroll
    for (u32 distance = 1; distance < warp_threads; distance *= 2) {
        const u32 other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == warp_threads - 1) sums[warp] = sum;
    __syncthreads();
    return sum - value + __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0);
}

}  // namespace deep_tile
