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

// A CTA's place in its cluster. The CTAs of a K part form a grid of cluster_m rows and cluster_n columns, both powers of
// two: those in a column share their `b` tile, those in a row their `a` tile. Ranks count down the columns.
template <GemmConfig config>
class ClusterPlace {
   public:
    __device__ __forceinline__ ClusterPlace() : rank_(ptx::cluster_ctarank()) { __builtin_assume(rank_ < config.cluster()); }

    __device__ __forceinline__ int row() const { return rank_ % rows; }
    __device__ __forceinline__ int column() const { return rank_ / rows % columns; }

    // Multicast masks of its column and its row.
    __device__ __forceinline__ u16 column_mask() const { return ((1 << rows) - 1) << (rank_ - row()); }
    __device__ __forceinline__ u16 row_mask() const {
        constexpr u32 every_column = ((1 << rows * columns) - 1) / ((1 << rows) - 1);
        return every_column << (rank_ - column() * rows);
    }

    // Rank of one of the CTAs that share an operand with it: `index` counts those in its column, then those in its row.
    __device__ __forceinline__ u32 peer(u32 index) const {
        return rank_ ^ (index + 1 < rows ? index + 1 : (index + 2 - rows) * rows);
    }

   private:
    static constexpr u32 rows = config.cluster_m, columns = config.cluster_n;

    const u32 rank_;
};

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
