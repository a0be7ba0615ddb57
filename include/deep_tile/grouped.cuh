// Grouped tile schedulers: which tile from which group comes next.
//
//   layout   contents of group g                  begins at                                    bounds[g]
//   offs     rows of `a` and `out`                bounds[g - 1], rounded up to the alignment   end row
//   counts   rows of `a` and `out`                g times the stride of groups                 row count, params.m at
//                                                                                              most; without: params.m
//   k_offs   K columns of `a` and `b`; each       as offs; the smallest alignment is a K       end column
//            group has its own `out`              block
//
// Bounds are read on the device, by whole warps, and may hold anything: they are clamped to the tensors.
#pragma once

#include "tiles.cuh"

namespace deep_tile {

// Tile of a row group. Rows in `out` from `end` on are not the group's. Its rows of `b` begin at `b`, or, for an
// MN-major `b`, at `column`, and its K begins at `first_k`.
struct GroupTile {
    int group, a, scale, b, first_k, out, end, column;
    bool valid;

    __device__ __forceinline__ int out_row() const { return out; }
    __device__ __forceinline__ int out_column() const { return column; }
    __device__ __forceinline__ int a_row() const { return a; }
    __device__ __forceinline__ int b_row() const { return b; }
};

// Tile of a K group, with the group's K blocks.
struct KGroupTile {
    int row, column, out, end, first_step, steps;
    bool valid;

    __device__ __forceinline__ int out_row() const { return out; }
    __device__ __forceinline__ int out_column() const { return column; }
    __device__ __forceinline__ int a_row() const { return row; }
    __device__ __forceinline__ int b_row() const { return column; }
};

// Persistent walk: cluster c of C takes cluster tiles c, c + C, c + 2C, ... of all groups, one group after the other,
// in RasterScheduler's raster within a group. A warp inspects 32 groups at a time, one per lane. With more groups it
// first makes a survey, in which each lane sums up a 32nd of them, and then inspects only the groups that hold its
// tiles: 256 groups take two looks and not eight, at 0.7 us each (H100, 2026-11-25). K groups have no survey: each has
// many tiles, and its code would exceed what a launch brings along. Group-dependent values come from votes, sums and
// the first lane, so that the compiler knows them as uniform.
template <GemmConfig config>
class GroupWalk {
   public:
    __device__ __forceinline__ explicit GroupWalk(const GemmParams& params)
        : params_(params),
          position_(static_cast<int>(blockIdx.x / config.cluster()) - static_cast<int>(gridDim.x / config.cluster())) {
        if (has_survey()) {
            survey();
        } else {
            look_at(0);
        }
    }

    // Counts this CTA's tiles, before the first: 0 is possible if groups have fewer tiles than there are CTAs.
    __device__ __forceinline__ int count() const {
        const int left = all_tiles() - static_cast<int>(blockIdx.x / config.cluster());
        return left > 0 ? ceil_div(left, gridDim.x / config.cluster()) : 0;
    }

   protected:
    // Tile number `within` in a group with `length` rows, or K columns, from `begin` on.
    struct Found {
        int group, begin, length, within;
    };

    // Moves to this CTA's next tile; returns false if there is none.
    __device__ __forceinline__ bool turn(Found& found) {
        position_ += gridDim.x / config.cluster();
        while (position_ >= tiles_) {
            if (!look_ahead()) return false;
        }
        const int lane = __ffs(__ballot_sync(all_lanes, position_ < last_)) - 1;
        const int begin = uniform(begin_, lane), length = uniform(length_, lane);
        const int first = uniform(last_, lane) - tiles_of(length);
        found = {first_group_ + lane, begin, length, position_ - first};
        return true;
    }

    // Coordinates in cluster tiles.
    struct Place {
        int row, column;
    };

    // Locates tile `within` in a group with `height` cluster tile rows: the raster descends a row panel before it steps
    // along n.
    __device__ __forceinline__ Place place(int height, int within) const {
        const int panel_rows = 1 << (params_.raster_rows_log2 - config.cluster_m / 2);  // the logarithm of 1, 2 or 4
        int first_row = 0;
        while (within >= panel_rows * columns()) {
            within -= panel_rows * columns();
            first_row += panel_rows;
        }
        const int present_rows = min(panel_rows, height - first_row);
        const int column = divide(within, present_rows);
        return {first_row + within - column * present_rows, column};
    }

    static __device__ __forceinline__ int tile_rows(int rows) { return ceil_div(rows, config.block_m * config.cluster_m); }

    const GemmParams& params_;

   private:
    static constexpr u32 all_lanes = 0xffffffff;

    static __device__ __forceinline__ int uniform(int value, int lane) {
        return __shfl_sync(all_lanes, __shfl_sync(all_lanes, value, lane), 0);
    }

    // Inclusive scan over lanes: the largest value, or the sum.
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

    // Tile columns.
    __device__ __forceinline__ int columns() const { return ceil_div(params_.n, config.block_n * config.cluster_n); }

    // Counts a group's tiles. K groups have all, unless K is empty and the kernel accumulates; length -1 is no group.
    __device__ __forceinline__ int tiles_of(int length) const {
        if constexpr (config.by_k) {
            const int shortest = config.accumulate ? 1 : 0;
            return length < shortest ? 0 : tile_rows(params_.m) * columns();
        } else {
            return tile_rows(length) * columns();
        }
    }

    __device__ __forceinline__ bool has_survey() const { return !config.by_k && params_.groups > warp_threads; }

    __device__ __forceinline__ int all_tiles() const {
        if (has_survey()) return __shfl_sync(all_lanes, survey_last_, warp_threads - 1);
        GroupWalk all = *this;
        if constexpr (config.by_k) {
            while (all.look_ahead()) {}
        }
        return all.tiles_;
    }

    // Groups per lane in a survey.
    __device__ __forceinline__ int groups_per_lane() const { return ceil_div(params_.groups, warp_threads); }

    // End of a group that starts at `last_end` or later. A smaller bound counts as `last_end`, so that groups do not
    // overlap.
    __device__ __forceinline__ int end_of(int group, int last_end) const {
        const int most = config.by_k ? params_.k : params_.m;
        return group < params_.groups ? max(min(params_.bounds[group], most), last_end) : last_end;
    }

    __device__ __forceinline__ int begin_behind(int last_end) const {
        return (last_end + params_.alignment - 1) & -params_.alignment;
    }

    // Length of a group between two ends; -1 for lanes past the last K group.
    __device__ __forceinline__ int length_between(int group, int last_end, int end) const {
        if (config.by_k && group >= params_.groups) return -1;
        return max(end - begin_behind(last_end), 0);
    }

    // A group's row count (layout counts).
    __device__ __forceinline__ int counted(int group) const {
        if (group >= params_.groups) return 0;
        return params_.bounds == nullptr ? params_.m : min(max(params_.bounds[group], 0), params_.m);
    }

    // Sums up each lane's groups. Offsets are read twice: a group's tiles depend on all ends before it. Two at once take
    // 4 % less, of 8 rows among 256 groups (H100, 2026-11-26); taller tiles, and a packed `b`, have no room for the code.
    __device__ __forceinline__ void survey() {
        constexpr int at_once = config.block_m == mma_m && !config.packed_b() ? 2 : 1;
        const int lane = threadIdx.x % warp_threads, own = groups_per_lane(), first = lane * own;
        int tiles = 0;
        if constexpr (config.by_offs) {
            int end = 0;
#pragma unroll at_once
            for (int i = 0; i < own; ++i) end = end_of(first + i, end);
            survey_end_ = scan<true>(end);
            const int before = __shfl_up_sync(all_lanes, survey_end_, 1);
            int last_end = lane == 0 ? 0 : before;
#pragma unroll at_once
            for (int i = 0; i < own; ++i) {
                end = end_of(first + i, last_end);
                tiles += tiles_of(length_between(first + i, last_end, end));
                last_end = end;
            }
        } else {
#pragma unroll at_once
            for (int i = 0; i < own; ++i) tiles += tiles_of(counted(first + i));
        }
        survey_last_ = scan<false>(tiles);
    }

    // Moves towards the group with this CTA's next tile; returns false if no group has it.
    __device__ __forceinline__ bool look_ahead() {
        const int next = first_group_ + warp_threads;
        if (!has_survey()) {
            if (!config.by_k || next >= params_.groups) return false;
            look_at(next);
            return true;
        }
        const u32 behind = __ballot_sync(all_lanes, position_ < survey_last_);
        if (behind == 0) return false;
        const int lane = __ffs(behind) - 1, group = lane * groups_per_lane();
        if (group > next) {
            tiles_ = uniform(survey_last_, lane - 1);
            end_ = uniform(survey_end_, lane - 1);
        }
        look_at(max(group, next));
        return true;
    }

    // Loads the groups from `group` on, one per lane.
    __device__ __forceinline__ void look_at(int group) {
        first_group_ = group;
        group += threadIdx.x % warp_threads;
        if constexpr (config.by_offs || config.by_k) {
            const int end = scan<true>(end_of(group, end_));
            const int before = __shfl_up_sync(all_lanes, end, 1);
            const int last_end = threadIdx.x % warp_threads == 0 ? end_ : before;
            begin_ = begin_behind(last_end);
            length_ = length_between(group, last_end, end);
            end_ = __shfl_sync(all_lanes, end, warp_threads - 1);
        } else {
            begin_ = 0;
            length_ = counted(group);
        }
        last_ = tiles_ + scan<false>(tiles_of(length_));
        tiles_ = __shfl_sync(all_lanes, last_, warp_threads - 1);
    }

    // Divides exactly, for divisors up to 16 and as many columns as plan.py admits: the half keeps the quotient away
    // from integers by more than the three roundings. A division takes about a hundred clocks.
    static __device__ __forceinline__ int divide(int dividend, int divisor) {
        return __float2int_rz((dividend + 0.5f) * __frcp_rn(static_cast<float>(divisor)));
    }

    int position_;                     // among all cluster tiles; initially a step before the first
    int first_group_ = -warp_threads;  // first group inspected
    int tiles_ = 0;                    // tiles in these groups and all before
    int end_ = 0;                      // end of the last inspected group
    int begin_, length_;               // this lane's group
    int last_;                         // one past this lane's last tile, among all
    int survey_end_ = 0;               // survey: this lane's groups end here
    int survey_last_;                  // survey: one past their last tile, among all
};

// M-grouped scheduler.
template <GemmConfig config>
class GroupScheduler : public GroupWalk<config> {
   public:
    using Tile = GroupTile;
    using GroupWalk<config>::GroupWalk;

    __device__ __forceinline__ Tile first() { return next(); }

    __device__ __forceinline__ Tile next() {
        typename GroupWalk<config>::Found found;
        if (!this->turn(found)) return Tile{};
        const GemmParams& params = this->params_;
        const auto place = this->place(this->tile_rows(found.length), found.within);
        const int row = place.row * config.block_m;
        Tile tile;
        tile.group = found.group;
        tile.a = (config.by_offs ? found.begin : found.group * params.a_group_rows) + row;
        tile.out = (config.by_offs ? found.begin : found.group * params.out_group_rows) + row;
        tile.scale = found.begin + row;
        tile.end = tile.out + found.length - row;
        tile.column = place.column * config.block_n;
        const int group_b = found.group * params.b_group_rows;
        tile.b = config.b_span > 0 ? tile.column : group_b + tile.column;
        tile.first_k = config.b_span > 0 ? group_b : 0;
        tile.valid = true;
        return recorded(tile);
    }
};

// K-grouped scheduler. A group with empty K, whose tiles become zeros, gets one K block past the end: TMA zero-fills.
template <GemmConfig config>
class KGroupScheduler : public GroupWalk<config> {
   public:
    using Tile = KGroupTile;
    using GroupWalk<config>::GroupWalk;

    __device__ __forceinline__ Tile first() { return next(); }

    __device__ __forceinline__ Tile next() {
        typename GroupWalk<config>::Found found;
        if (!this->turn(found)) return Tile{};
        const GemmParams& params = this->params_;
        const auto place = this->place(this->tile_rows(params.m), found.within);
        const int rank = config.cluster() == 1 ? 0 : uniform_cluster_rank();
        Tile tile;
        tile.row = (place.row * config.cluster_m + rank % config.cluster_m) * config.block_m;
        tile.column = (place.column * config.cluster_n + rank / config.cluster_m) * config.block_n;
        tile.end = found.group * params.out_group_rows + params.m;
        tile.out = tile.end - params.m + tile.row;
        tile.first_step = ceil_div(found.length > 0 ? found.begin : params.k, config.block_k);
        tile.steps = max(ceil_div(found.length, config.block_k), 1);
        tile.valid = true;
        steps_ = tile.steps;
        return recorded(tile);
    }

    // K blocks in the latest tile.
    __device__ __forceinline__ int steps() const { return steps_; }

   private:
    int steps_;
};

}  // namespace deep_tile
