// Output tiles: coordinates, and helpers that all schedulers share.
#pragma once

#include "watch.cuh"

namespace deep_tile {

// Rounds up. Sizes are not negative: unsigned arithmetic takes fewer instructions.
__device__ __forceinline__ int ceil_div(int value, u32 divisor) {
    return static_cast<int>((static_cast<u32>(value) + divisor - 1) / divisor);
}

// This CTA's rank in its cluster, for whole warps. Broadcast from lane 0, so that the compiler knows it as uniform, and
// with it the loop over this CTA's K part.
__device__ __forceinline__ int uniform_cluster_rank() {
    return __shfl_sync(0xffffffff, ptx::cluster_ctarank(), 0);
}

// Dense output tile: first row and column. Roles read coordinates through the accessors, because other schedulers'
// tiles may have different rows in `a`, `b` and `out`.
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
