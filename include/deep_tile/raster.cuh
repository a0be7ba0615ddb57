// Schedulers of one product: its tiles in a raster, or by columns.
#pragma once

#include "tiles.cuh"

namespace deep_tile {

// Persistent: cluster c of C takes cluster tiles c, c + C, c + 2C, ... of a raster that descends a group of rows of
// cluster tiles before it steps along n, so that blocks running together share operands in L2 (schedule.py says how many
// rows); in split K another of the first C tiles instead of c. Where the last cluster tile overhangs the matrix, no more
// is fetched than there is, and stores are clipped. Tile counts fit an int for any output that fits in memory.
//
// The position is kept as (group of rows, index within it), and divided by the group's rows by multiplying: a division
// takes some hundred clocks that nothing hides, and its code comes before the first request. The reciprocal is 2^31 over
// the rows, rounded up: exact for at most 16 rows and 2^27 tiles of a group.
template <GemmConfig config>
class RasterScheduler {
   public:
    using Tile = DenseTile;

    __device__ __forceinline__ explicit RasterScheduler(const GemmParams& params)
        : rows_(ceil_div(params.m, config.block_m * config.cluster_m)),
          columns_(ceil_div(params.n, config.block_n * config.cluster_n)),
          group_rows_log2_(params.raster_rows_log2 - config.cluster_m / 2),
          last_rows_reciprocal_(params.last_rows_reciprocal),
          step_(gridDim.x / config.cluster()),
          within_(first_cluster_tile() - step_),
          rank_(config.cluster() == 1 ? 0 : uniform_cluster_rank()) {}

    // This block's tiles, before the first. Not the same as counting valid ones: that a loop ends with a count, which it
    // got before it began, leaves the compiler in no doubt that all warps of the block leave it together. Added up, while
    // the first stage is awaited: a division is 25 to 50 instructions more, and all code behind them arrives later.
    __device__ __forceinline__ int count() const {
        int count = 0;
#pragma unroll 1
        for (int tile = within_ + step_; tile < rows_ * columns_; tile += step_) count += 1;
        return count;
    }

    // Like next(), sooner: every block has a first tile, grid_size of schedule.py sees to it.
    __device__ __forceinline__ Tile first() {
        within_ += step_;
        return tile(enter_group());
    }

    // Loops over tiles call it in one place, for the first one as well: every call is some 50 instructions.
    __device__ __forceinline__ Tile next() {
        within_ += step_;
        const int group_rows = enter_group();
        if (within_ >= group_rows * columns_) return Tile{};
        return tile(group_rows);
    }

   private:
    // Turns to the group of rows that the position is in, or to the last one; how many rows it has.
    __device__ __forceinline__ int enter_group() {
        while (within_ >= columns_ << group_rows_log2_) {
            within_ -= columns_ << group_rows_log2_;
            first_row_ += 1 << group_rows_log2_;
        }
        return min(1 << group_rows_log2_, rows_ - first_row_);
    }

    __device__ __forceinline__ Tile tile(int group_rows) const {
        const bool whole = group_rows == 1 << group_rows_log2_;
        const int column = __umulhi(within_ * 2, whole ? 1u << (31 - group_rows_log2_) : last_rows_reciprocal_);
        const int row = first_row_ + within_ - column * group_rows;
        Tile tile;
        tile.m = (row * config.cluster_m + rank_ % config.cluster_m) * config.block_m;
        tile.n = (column * config.cluster_n + rank_ / config.cluster_m % config.cluster_n) * config.block_n;
        tile.valid = true;
        return recorded(tile);
    }

    // Clusters are handed to the GPCs in turn. Yet neighbours in the raster share operands, which reach SMs of one GPC
    // faster: where there are few rows, so that a GPC would get tiles of one of them only, they are numbered by GPC. Split
    // K gains up to 9 % at 128 < m <= 512 and would lose as much with more rows; multicast gains nothing (H200,
    // 2026-11-22).
    __device__ __forceinline__ int first_cluster_tile() const {
        constexpr u32 gpcs = 8;
        constexpr int few_rows = 4;
        const u32 cluster = blockIdx.x / config.cluster(), clusters = step_;
        if (config.split_k == 1 || rows_ > few_rows) return cluster;
        const u32 gpc = cluster % gpcs;
        return gpc * (clusters / gpcs) + min(gpc, clusters % gpcs) + cluster / gpcs;
    }

    int rows_, columns_;  // of cluster tiles
    int group_rows_log2_;
    u32 last_rows_reciprocal_;
    int step_, within_;  // in the group of rows that begins at first_row_; a step before the first tile to begin with
    int first_row_ = 0;
    int rank_;
};

// For a resident `b`. Whole columns first, one for each block, as far as they go: all blocks then are at the same rows of
// `a`. Then each block takes its share of the tiles of the other columns.
template <GemmConfig config>
class ColumnScheduler {
   public:
    using Tile = DenseTile;

    __device__ __forceinline__ explicit ColumnScheduler(const GemmParams& params)
        : rows_(ceil_div(params.m, config.block_m)) {
        const u32 columns = ceil_div(params.n, config.block_n);
        whole_ = columns / gridDim.x;
        const u32 shared_from = whole_ * gridDim.x;
        const u32 shared = rows_ * (columns - shared_from);
        const u32 first = shared / gridDim.x * blockIdx.x + min(blockIdx.x, shared % gridDim.x);
        left_ = whole_ * rows_ + shared / gridDim.x + (blockIdx.x < shared % gridDim.x ? 1 : 0);
        share_column_ = shared_from + first / rows_;
        share_row_ = first % rows_;
        column_ = whole_ > 0 ? blockIdx.x : share_column_;
        row_ = (whole_ > 0 ? 0 : share_row_) - 1;
    }

    // This block's tiles that are left.
    __device__ __forceinline__ int count() const { return left_; }

    __device__ __forceinline__ Tile first() { return next(); }

    __device__ __forceinline__ Tile next() {
        if (!ends_column()) {
            row_ += 1;
        } else if (whole_ > 1) {
            whole_ -= 1;
            row_ = 0;
            column_ += gridDim.x;
        } else if (whole_ == 1) {
            whole_ = 0;
            row_ = share_row_;
            column_ = share_column_;
        } else {
            row_ = 0;
            column_ += 1;
        }
        left_ -= 1;
        return recorded(Tile{row_ * config.block_m, column_ * config.block_n, left_ >= 0});
    }

    // Whether the next tile is in another column.
    __device__ __forceinline__ bool ends_column() const { return row_ + 1 == rows_; }

   private:
    int rows_, row_, column_;  // row_ is one before the first tile's to begin with
    int left_;
    int whole_;  // columns that are this block's alone, the present one included
    int share_row_, share_column_;  // where its share of the others begins
};

}  // namespace deep_tile
