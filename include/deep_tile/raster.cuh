// Dense tile schedulers: a raster over tiles, or column by column.
#pragma once

#include "tiles.cuh"

namespace deep_tile {

// Persistent raster: cluster c of C takes cluster tiles c, c + C, c + 2C, ...; split K starts at another one of the
// first C instead of c. The raster descends a group of cluster-tile rows before it steps along n, so that CTAs running
// together share operands in L2 (schedule.py sets the group height). A cluster tile that overhangs the matrix fetches
// only existing data, and its stores are clipped. Tile counts fit an int for any output that fits in memory.
//
// The position is a pair (row group, index within it). Division by the group height is a multiplication: a division
// takes about a hundred exposed clocks, and its code precedes the first request. The reciprocal is 2^31 over the rows,
// rounded up: exact up to 16 rows and 2^27 tiles per group.
template <GemmConfig config>
class RasterScheduler {
   public:
    using Tile = DenseTile;

    __device__ __forceinline__ explicit RasterScheduler(const GemmParams& params)
        : rows_(ceil_div(params.m, config.block_m * config.cluster_m)),
          columns_(ceil_div(params.n, config.block_n * config.cluster_n)),
          group_rows_log2_(params.raster_rows_log2 - config.cluster_m / 2),  // the logarithm of 1, 2 or 4
          last_rows_reciprocal_(params.last_rows_reciprocal),
          step_(gridDim.x / config.cluster()),
          within_(first_cluster_tile() - step_),
          rank_(config.cluster() == 1 ? 0 : uniform_cluster_rank()) {}

    // Counts this CTA's tiles, before the first. A loop that ends with a count known beforehand, rather than at an
    // invalid tile, tells the compiler that all warps leave it together. Summed while the first stage is awaited: a
    // division takes 25 to 50 more instructions, and all code behind them arrives later.
    __device__ __forceinline__ int count() const {
        int count = 0;
#pragma unroll 1
        for (int tile = within_ + step_; tile < rows_ * columns_; tile += step_) count += 1;
        return count;
    }

    // Returns the first tile, sooner than next(): every CTA has one (grid_size in schedule.py).
    __device__ __forceinline__ Tile first() {
        within_ += step_;
        return tile(enter_group());
    }

    // Returns the next tile. Tile loops call it in one place, for the first tile too: a call is some 50 instructions.
    __device__ __forceinline__ Tile next() {
        within_ += step_;
        const int group_rows = enter_group();
        if (within_ >= group_rows * columns_) return Tile{};
        return tile(group_rows);
    }

   private:
    // Moves to the row group at the current position, or to the last one; returns its number of rows.
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

    // Clusters go to the GPCs in turn, yet raster neighbours share operands, which reach SMs in one GPC faster. With so
    // few rows that each GPC would only get tiles from one, clusters are numbered by GPC instead. Split K gains up to 9
    // % at 128 < m <= 512 and would lose as much with more rows; multicast gains nothing (H200, 2026-11-22).
    __device__ __forceinline__ int first_cluster_tile() const {
        constexpr u32 gpcs = 8;
        constexpr int few_rows = 4;
        const u32 cluster = blockIdx.x / config.cluster(), clusters = step_;
        if (config.split_k == 1 || rows_ > few_rows) return cluster;
        const u32 gpc = cluster % gpcs;
        return gpc * (clusters / gpcs) + min(gpc, clusters % gpcs) + cluster / gpcs;
    }

    int rows_, columns_;  // in cluster tiles
    int group_rows_log2_;
    u32 last_rows_reciprocal_;
    int step_, within_;  // within_: index in the row group at first_row_, initially a step before the first tile
    int first_row_ = 0;
    int rank_;
};

// Column order for a resident `b`. Whole columns come first, one per CTA, while there are enough: all CTAs then read
// the same rows of `a`. The tiles in leftover columns are divided evenly.
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

    // Tiles left for this CTA.
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

    // Returns whether the next tile is in another column.
    __device__ __forceinline__ bool ends_column() const { return row_ + 1 == rows_; }

   private:
    int rows_, row_, column_;  // row_ is initially one before the first tile
    int left_;
    int whole_;  // columns left to this CTA alone, including the current one
    int share_row_, share_column_;  // start of its share in the leftover columns
};

}  // namespace deep_tile
