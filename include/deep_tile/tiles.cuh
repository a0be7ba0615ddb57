// Output tiles: where one lies, and what all schedulers share.
#pragma once

#include "watch.cuh"

namespace deep_tile {

// Of sizes, which are not negative: unsigned arithmetic takes fewer instructions.
__device__ __forceinline__ int ceil_div(int value, u32 divisor) {
    return static_cast<int>((static_cast<u32>(value) + divisor - 1) / divisor);
}

// This block's rank in its cluster, for whole warps. From lane 0, so that the compiler knows it as uniform, and with it
// the loop over this block's part of K.
__device__ __forceinline__ int uniform_cluster_rank() {
    return __shfl_sync(0xffffffff, ptx::cluster_ctarank(), 0);
}

// An output block at its coordinates: first row and column. What a role wants to know of a tile it asks by name, since
// other schedulers' tiles may have their rows of `a` or `b` elsewhere than those of `out`.
struct DenseTile {
    int m, n;
    bool valid;

    __device__ __forceinline__ int out_row() const { return m; }
    __device__ __forceinline__ int out_column() const { return n; }
    __device__ __forceinline__ int a_row() const { return m; }
    __device__ __forceinline__ int b_row() const { return n; }
};

template <typename Tile>
__device__ __forceinline__ Tile recorded(Tile tile) {
    record_tile(tile.out_row(), tile.out_column());
    return tile;
}

}  // namespace deep_tile
