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

}  // namespace deep_tile
