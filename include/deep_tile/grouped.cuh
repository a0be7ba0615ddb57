// The scheduler of grouped products: which tile of which group comes next.
//
//   layout   rows of group g of `a` and `out`                              bounds[g]
//   offs     from bounds[g - 1], rounded up to the alignment, to bounds[g] the row behind the group's last
//   counts   bounds[g] of the params.m that begin at g times their stride  how many rows the group has; without: all
//
// Bounds are read on the device, by whole warps, and may hold anything: rows are cut to those of the tensors.
#pragma once

#include "tiles.cuh"

namespace deep_tile {

// A tile of one group. Rows of `out` from `end` on are not the group's.
struct GroupTile {
    int group, a, scale, b, out, end, column;
    bool valid;

    __device__ __forceinline__ int out_row() const { return out; }
    __device__ __forceinline__ int out_column() const { return column; }
    __device__ __forceinline__ int a_row() const { return a; }
    __device__ __forceinline__ int b_row() const { return b; }
};

// Persistent: block c of C takes tiles c, c + C, c + 2C, ... of all groups, one group after the other. Within a group the
// raster is RasterScheduler's. A warp looks at 32 groups at a time, a lane at each. All that depends on a group comes from
// votes, sums and the first lane, so that the compiler knows it as uniform.
template <GemmConfig config>
class GroupScheduler {
   public:
    using Tile = GroupTile;

    __device__ __forceinline__ explicit GroupScheduler(const GemmParams& params)
        : params_(params),
          position_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {
        look_at(0);
    }

    // This block's tiles, before the first: none where groups have fewer than there are blocks.
    __device__ __forceinline__ int count() const {
        GroupScheduler all = *this;
        while (all.has_more()) all.look_at(all.first_group_ + warp_threads);
        const int left = all.tiles_ - static_cast<int>(blockIdx.x);
        return left > 0 ? ceil_div(left, gridDim.x) : 0;
    }

    __device__ __forceinline__ Tile first() { return next(); }

    __device__ __forceinline__ Tile next() {
        position_ += gridDim.x;
        while (position_ >= tiles_) {
            if (!has_more()) return Tile{};
            look_at(first_group_ + warp_threads);
        }
        const int lane = __ffs(__ballot_sync(all_lanes, position_ < last_)) - 1;
        const int begin = uniform(begin_, lane), rows = uniform(rows_, lane);
        const int first = uniform(last_, lane) - tiles_of(rows);
        return recorded(tile(first_group_ + lane, begin, rows, position_ - first));
    }

   private:
    static constexpr u32 all_lanes = 0xffffffff;

    static __device__ __forceinline__ int uniform(int value, int lane) {
        return __shfl_sync(all_lanes, __shfl_sync(all_lanes, value, lane), 0);
    }

    // The largest, or the sum, of this lane's and those before it.
    template <bool largest>
    static __device__ __forceinline__ int scan(int value) {
        const int lane = threadIdx.x % warp_threads;
#pragma unroll
        for (int distance = 1; distance < warp_threads; distance *= 2) {
            const int before = __shfl_up_sync(all_lanes, value, distance);
            if (lane >= distance) value = largest ? max(value, before) : value + before;
        }
        return value;
    }

    // Of tiles.
    __device__ __forceinline__ int columns() const { return ceil_div(params_.n, config.block_n); }

    __device__ __forceinline__ int tiles_of(int rows) const { return ceil_div(rows, config.block_m) * columns(); }

    __device__ __forceinline__ bool has_more() const { return first_group_ + warp_threads < params_.groups; }

    // Turns to the groups from `group` on, of which each lane takes one.
    __device__ __forceinline__ void look_at(int group) {
        first_group_ = group;
        group += threadIdx.x % warp_threads;
        const bool exists = group < params_.groups;
        if constexpr (config.by_offs) {
            // An end before the last one is taken for that, so that groups do not overlap.
            const int end = max(scan<true>(exists ? min(params_.bounds[group], params_.m) : 0), end_);
            const int before = __shfl_up_sync(all_lanes, end, 1);
            const int last_end = threadIdx.x % warp_threads == 0 ? end_ : before;
            begin_ = (last_end + params_.alignment - 1) & -params_.alignment;
            rows_ = max(end - begin_, 0);
            end_ = __shfl_sync(all_lanes, end, warp_threads - 1);
        } else {
            const int rows = exists && params_.bounds != nullptr ? params_.bounds[group] : params_.m;
            begin_ = 0;
            rows_ = exists ? min(max(rows, 0), params_.m) : 0;
        }
        last_ = tiles_ + scan<false>(tiles_of(rows_));
        tiles_ = __shfl_sync(all_lanes, last_, warp_threads - 1);
    }

    // Number `within` of a group's tiles: the raster descends some rows of them before it steps along n.
    __device__ __forceinline__ Tile tile(int group, int begin, int rows, int within) const {
        const int panel_rows = 1 << params_.raster_rows_log2, height = ceil_div(rows, config.block_m);
        int first_row = 0;
        while (within >= panel_rows * columns()) {
            within -= panel_rows * columns();
            first_row += panel_rows;
        }
        const int present_rows = min(panel_rows, height - first_row);
        const int column = divide(within, present_rows);
        const int row = (first_row + within - column * present_rows) * config.block_m;
        Tile tile;
        tile.group = group;
        tile.a = (config.by_offs ? begin : group * params_.a_group_rows) + row;
        tile.out = (config.by_offs ? begin : group * params_.out_group_rows) + row;
        tile.scale = begin + row;
        tile.end = tile.out + rows - row;
        tile.column = column * config.block_n;
        tile.b = group * params_.b_group_rows + tile.column;
        tile.valid = true;
        return tile;
    }

    // Exact for a divisor of at most 16 and a quotient below 2^17: a half keeps it away from integers by more than the
    // three roundings, and a division takes some hundred clocks.
    static __device__ __forceinline__ int divide(int dividend, int divisor) {
        return __float2int_rz((dividend + 0.5f) * __frcp_rn(static_cast<float>(divisor)));
    }

    const GemmParams& params_;
    int position_;       // among all tiles; a step before the first to begin with
    int first_group_;    // of those looked at
    int tiles_ = 0;      // of these and all before them
    int end_ = 0;        // of the last of them
    int begin_, rows_;   // of this lane's group
    int last_;           // of its tiles, among all: the one behind
};

}  // namespace deep_tile
