// Tile schedulers: which output tile comes next. Every role walks its own copy, so no tile index is ever exchanged.
//
//   scheduler        order
//   RasterScheduler  one GEMM: a raster over rows and columns
//   ColumnScheduler  one GEMM with a resident `b`: column by column
//   GroupScheduler   M-grouped GEMM: group by group
//   KGroupScheduler  K-grouped GEMM: group by group
#pragma once

#include "grouped.cuh"
#include "raster.cuh"

namespace deep_tile {

template <GemmConfig config>
using DenseScheduler = typename Conditional<config.resident_b(), ColumnScheduler<config>, RasterScheduler<config>>::type;

template <GemmConfig config>
using AnyGroupScheduler = typename Conditional<config.by_k, KGroupScheduler<config>, GroupScheduler<config>>::type;

template <GemmConfig config>
using TileScheduler = typename Conditional<config.grouped(), AnyGroupScheduler<config>, DenseScheduler<config>>::type;

template <GemmConfig config>
using Tile = typename TileScheduler<config>::Tile;

// Row in `out` at which the tile's group ends, or a tile that ends within an output box; 0 without either: such tiles end
// with the matrix.
template <GemmConfig config>
__device__ __forceinline__ int group_end(const Tile<config>& tile) {
    if constexpr (config.block_m < mma_m) {
        const int end = tile.out_row() + config.block_m;
        if constexpr (config.grouped()) return min(tile.end, end);
        return end;
    } else if constexpr (config.grouped()) {
        return tile.end;
    } else {
        return 0;
    }
}

// Returns whether a launch's first requests read the bounds of groups, and ask for `b`, while the preceding kernel still
// runs: the caller declares that it writes neither. Only with block scales: NVRTC 13.2 lets warps of a packed `b`, and of
// 64x32 tiles without block scales, fall apart otherwise.
template <GemmConfig config>
__device__ __forceinline__ bool reads_bounds_early(const GemmParams& params) {
    return config.row_groups() && config.has_scales() && !config.packed_b() && params.early_b;
}

// K range that this CTA handles in every tile, in stages.
struct KRange {
    int begin, end;
};

template <GemmConfig config>
__device__ __forceinline__ KRange k_range(const GemmParams& params) {
    const int stages = ceil_div(params.k, config.block_k);
    if constexpr (config.split_k == 1) return {0, stages};
    const int part = uniform_cluster_rank() / config.multicast_ctas();
    return {stages * part / config.split_k, stages * (part + 1) / config.split_k};
}

// K range of one K-grouped tile.
__device__ __forceinline__ KRange tile_range(const KGroupTile& tile) {
    return {tile.first_step, tile.first_step + tile.steps};
}

// Returns whether a tile's range lies within K: a group with an empty K has its range past the end.
template <GemmConfig config>
__device__ __forceinline__ bool has_k(const GemmParams& params, const Tile<config>& tile) {
    if constexpr (config.by_k) {
        return tile.first_step * config.block_k < params.k;
    } else {
        return true;
    }
}

}  // namespace deep_tile
