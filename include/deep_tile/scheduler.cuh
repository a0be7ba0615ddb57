// Which output tile comes next. Every role of a thread block walks its own copy, so no tile index is ever exchanged.
//
//   scheduler        tiles of
//   RasterScheduler  one product, rows and columns together
//   ColumnScheduler  one product whose `b` stays, column by column
//   GroupScheduler   one product for each group of rows, group by group
//   KGroupScheduler  one product for each group along K, group by group
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

// Where the rows of `out` of a group's tile end; of other tiles, which end with the matrix, nothing.
template <GemmConfig config>
__device__ __forceinline__ int group_end(const Tile<config>& tile) {
    if constexpr (config.grouped()) {
        return tile.end;
    } else {
        return 0;
    }
}

// This block's part of every tile's K, in stages.
struct KRange {
    int begin, end;
};

template <GemmConfig config>
__device__ __forceinline__ KRange k_range(const GemmParams& params) {
    const int stages = ceil_div(params.k, config.block_k);
    if constexpr (config.split_k == 1) return {0, stages};
    const int part = uniform_cluster_rank();
    return {stages * part / config.split_k, stages * (part + 1) / config.split_k};
}

// The same of one tile of a group along K.
__device__ __forceinline__ KRange tile_range(const KGroupTile& tile) {
    return {tile.first_step, tile.first_step + tile.steps};
}

// Whether a tile's range lies in K: that of a group without K lies behind it.
template <GemmConfig config>
__device__ __forceinline__ bool has_k(const GemmParams& params, const Tile<config>& tile) {
    if constexpr (config.by_k) {
        return tile.first_step * config.block_k < params.k;
    } else {
        return true;
    }
}

}  // namespace deep_tile
