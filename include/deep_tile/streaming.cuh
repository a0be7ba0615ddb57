// What the kernels share that are bound by memory: the casts (quantize.cuh) and the sum of experts' rows (combine.cuh).
#pragma once

struct TensorMap;  // of which their arguments have none

#include "ptx.cuh"

namespace deep_tile {

using i64 = long long;

// Before all reads and writes of global memory. Where launches overlap, the kernel before may still write x, or read what
// this one overwrites. Only then does the next one start: a product that starts may request its weights at once, though
// an earlier kernel has written them, and that is safe since everything before the cast has ended.
__device__ __forceinline__ void take_turn() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
}

// Number `at` of an index of int64, or of int32.
__device__ __forceinline__ i64 read_index(const void* index, bool wide, i64 at) {
    return wide ? static_cast<const i64*>(index)[at] : i64(static_cast<const int*>(index)[at]);
}

// The sum of `value` over the threads of the block before this one, by `sums`, a number of shared memory for each warp.
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
    u32 before = sum - value;
#pragma unroll 1
    for (u32 i = 0; i < warp; ++i) before += sums[i];
    return before;
}

}  // namespace deep_tile
