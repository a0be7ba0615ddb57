// From accumulators to `out`: registers -> swizzled shared memory -> TMA store.
//
// A box is 64 rows by store_columns columns; a row is one swizzle span where that is possible. Math warps write boxes
// and store warps, where there are any, hand them to TMA: GemmConfig.store_warps says why. Every step from one box to the
// next takes 130 to 200 clocks, so as many are written at once as have a buffer each.
//
// Math warps that store themselves do so when the box is written, and wait for that when they need its buffer again:
// draining at the end of each tile costs 3 to 6 %. Where there are few boxes, each warp stores its own 16 rows and
// waits for no other: 1 % of decode; where there are four, one store of 64 rows is 1 % better (H200, 2026-11-21).
#pragma once

#include "activation.cuh"
#include "formats.cuh"
#include "mma.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// Where this tile's accumulators are: [chunks_m][chunks_n] WGMMA tiles of 64 x mma_n.
template <GemmConfig config>
using Accumulators = float[config.chunks_m][config.chunks_n][config.mma_n / 2];

// Output boxes are numbered along the rows of a tile, or of this block's part of it; the last of a row ends with it, and
// may overlap the one before.
template <GemmConfig config>
constexpr int boxes_per_row = config.boxes / config.chunks_m;

template <GemmConfig config>
__device__ __forceinline__ int box_row(int box) {
    return box / boxes_per_row<config> * mma_m;
}

template <GemmConfig config>
__device__ __forceinline__ int box_column(int box) {
    return min(box % boxes_per_row<config> * config.store_columns, config.out_columns_per_part - config.store_columns);
}

// Of `out`, that a column of the product is stored to, and how many there are.
template <GemmConfig config>
__device__ __forceinline__ int out_column(int column) {
    return column / config.columns_per_output;
}

// Where a box is among the buffers of its warpgroup.
template <GemmConfig config>
__device__ __forceinline__ u32 box_offset(int box) {
    constexpr int box_bytes = mma_m * config.store_columns * config.out_bytes;
    return box % config.store_buffers * box_bytes;
}

// The 16-byte chunk index is XORed with the row's position in its 8 * span bytes, as TMA does on the way out.
template <GemmConfig config>
__device__ __forceinline__ u32 swizzle(u32 offset) {
    if constexpr (config.store_swizzle == 0) return offset;
    return offset ^ ((offset >> 3) & (config.store_swizzle - 16));
}

// As bits, what `out` holds.
template <GemmConfig config>
using Stored = typename Conditional<config.out_bytes == 4, u32, u16>::type;

// Two sums rounded to numbers of 16 bits, `low` in bits 0 to 15.
template <Format format>
__device__ __forceinline__ u32 packed(float high, float low) {
    if constexpr (format == Format::fp16) return ptx::cvt_rn_f16x2(high, low);
    return ptx::cvt_rn_bf16x2(high, low);
}

// Where rows of `out` end that may be written: with the group whose end is given, or with the matrix.
template <GemmConfig config>
__device__ __forceinline__ int row_end(const GemmParams& params, int group_end) {
    if constexpr (config.grouped()) {
        return group_end;
    } else {
        return params.m;
    }
}

// Whether TMA would write rows that are not the group's: of store_rows rows from `row` on. Beyond a matrix it clips.
template <GemmConfig config>
__device__ __forceinline__ bool ends_within(int row, int end) {
    return config.grouped() && row < end && row + config.store_rows > end;
}

// Has TMA store a box, or the first store_rows rows of it, unless it lies beyond the rows that end at `end`, or the
// columns, or ends within; row, column and address are those of the first box.
template <GemmConfig config>
__device__ __forceinline__ void store_box(const GemmParams& params, u32 buffers, int row, int column, int box, int end) {
    row += box_row<config>(box);
    column += box_column<config>(box);
    if (row >= row_end<config>(params, end) || column >= out_column<config>(params.n)) return;
    if (ends_within<config>(row, end)) return;
    if constexpr (config.accumulate) {
        ptx::cp_reduce_async_bulk_tensor_add(params.out_map, column, row, buffers + box_offset<config>(box));
    } else {
        ptx::cp_async_bulk_tensor_store(params.out_map, column, row, buffers + box_offset<config>(box));
    }
}

// What `out` is to hold where it holds `before`: the sum, or both added up. Each of its numbers is one block's alone.
template <GemmConfig config>
__device__ __forceinline__ Stored<config> stored(Stored<config> before, Stored<config> sum) {
    if constexpr (!config.accumulate) return sum;
    return __float_as_uint(__uint_as_float(before) + __uint_as_float(sum));
}

// Stores `count` rows of a box by one warp, 16 bytes at a time, for what TMA would write too much of.
template <GemmConfig config>
__device__ __forceinline__ void copy_rows(const GemmParams& params, u32 rows, int row, int column, int count) {
    constexpr int vector = 16 / config.out_bytes, vectors = config.store_columns / vector;
    auto* const out = static_cast<Stored<config>*>(params.out);
#pragma unroll 1
    for (int i = threadIdx.x % warp_threads; i < count * vectors; i += warp_threads) {
        const int from = i / vectors, j = i % vectors * vector;
        if (column + j >= out_column<config>(params.n)) continue;
        uint4 values = ptx::ld_shared_v4(rows + swizzle<config>(i * vector * config.out_bytes));
        uint4& to = reinterpret_cast<uint4&>(out[(row + from) * params.out_stride_m + column + j]);
        if constexpr (config.accumulate) {
            const uint4 before = to;
            values = {stored<config>(before.x, values.x), stored<config>(before.y, values.y),
                      stored<config>(before.z, values.z), stored<config>(before.w, values.w)};
        }
        to = values;
    }
    __syncwarp();
}

// Those of a barrier between one math warpgroup and its store warp.
constexpr int store_barrier_threads = warpgroup_threads + warp_threads;

template <GemmConfig config>
class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : params_(params),
          warpgroup_(warpgroup),
          lane_(threadIdx.x % warp_threads),
          first_row_(__shfl_sync(0xffffffff, threadIdx.x % warpgroup_threads / warp_threads, 0) * warp_rows),
          rows_(ptx::smem_address(smem.out[warpgroup]) + first_row_ * row_bytes) {}

    // Columns [first, first + out_columns_per_part) of what is stored of the tile; `row` and `column` are of the
    // warpgroup's first element in the product. No row from `end` on is written.
    template <int first>
    __device__ __forceinline__ void store(const Accumulators<config>& sums, int row, int column, int end) const {
        store_boxes<first>(sums, row, out_column<config>(column) + first, end, 0, config.boxes);
    }

    // Part `chunk` of store_chunks. Where it belongs is its store warp's business, but for scales.
    template <typename Tile>
    __device__ __forceinline__ void store_chunk(const Accumulators<config>& sums, int chunk, const Tile& tile) const {
        constexpr int boxes = config.boxes / config.store_chunks;
        if constexpr (config.quantizes) {
            const int column = out_column<config>(tile.out_column());
            const int row = tile.out_row() + warpgroup_ * config.rows_per_warpgroup;
            store_boxes<0>(sums, row, column, 0, chunk * boxes, boxes);
        } else {
            store_boxes<0>(sums, 0, 0, 0, chunk * boxes, boxes);
        }
    }

    // Shared memory must outlive the stores that read it.
    __device__ __forceinline__ void drain() const {
        if constexpr (config.store_warps == 0) await_stores<0>();
    }

   private:
    static constexpr int row_bytes = config.store_columns * config.out_bytes;
    static constexpr int warp_rows = mma_m / (warpgroup_threads / warp_threads);
    // Stores that may still read while the next box is written: of other buffers, if these come round evenly.
    static constexpr bool round = config.boxes_at_once == 1 && config.boxes % config.store_buffers == 0;
    static constexpr int pending = round ? config.store_buffers - 1 : 0;

    template <int first>
    __device__ __forceinline__ void store_boxes(const Accumulators<config>& sums, int row, int column, int end, int begin,
                                                int count) const {
#pragma unroll
        for (int i = begin; i < begin + count; i += config.boxes_at_once) {
            await_buffers();
#pragma unroll
            for (int box = i; box < i + config.boxes_at_once; ++box) {
                if constexpr (config.quantizes) {
                    const int first_row = row + first_row_ + box_row<config>(box);
                    write_quantized(sums[box / boxes_per_row<config>], box, first_row, column + box_column<config>(box));
                } else {
                    write_box(sums[box / boxes_per_row<config>], first + box_column<config>(box), box);
                }
            }
            if constexpr (config.tma_store) ptx::fence_proxy_async();
            if constexpr (config.store_warps > 0) {
                ptx::bar_arrive(boxes_full_barrier + warpgroup_, store_barrier_threads);
            } else {
                publish_boxes(row, column, end, i);
            }
        }
    }

    __device__ __forceinline__ void await_buffers() const {
        if constexpr (config.store_warps > 0) {
            ptx::bar_sync(boxes_empty_barrier + warpgroup_, store_barrier_threads);
        } else {
            await_stores<pending>();
            synchronize();
        }
    }

    __device__ __forceinline__ void publish_boxes(int row, int column, int end, int first_box) const {
        synchronize();
        row += first_row_;
#pragma unroll
        for (int box = first_box; box < first_box + config.boxes_at_once; ++box) {
            if constexpr (config.tma_store) {
                if (stores()) store_box<config>(params_, rows_, row, column, box, end);
                if constexpr (config.grouped()) store_own_rows(row + box_row<config>(box), column, end, box);
            } else {
                copy_box(row + box_row<config>(box), column + box_column<config>(box), end, box);
            }
        }
        if (stores()) ptx::cp_async_bulk_commit_group();
    }

    // This warp's rows of a box that ends within the tile's.
    __device__ __forceinline__ void store_own_rows(int row, int column, int end, int box) const {
        if (!ends_within<config>(row - first_row_ % config.store_rows, end)) return;
        const u32 rows = rows_ + box_offset<config>(box);
        copy_rows<config>(params_, rows, row, column + box_column<config>(box), min(warp_rows, end - row));
    }

    // One thread for each store of store_rows rows.
    __device__ __forceinline__ bool stores() const {
        return config.tma_store && first_row_ % config.store_rows == 0 && ptx::elect_sync();
    }

    template <int pending_stores>
    __device__ __forceinline__ void await_stores() const {
        if (stores()) ptx::cp_async_bulk_wait_group_read<pending_stores>();
    }

    // Among those whose rows are stored together.
    __device__ __forceinline__ void synchronize() const {
        if constexpr (config.tma_store && config.store_rows > warp_rows) {
            ptx::bar_sync(own_barrier + warpgroup_, warpgroup_threads);
        } else {
            __syncwarp();
        }
    }

    // This warp's rows of a box that begins at `column` of what is stored of `sums`.
    __device__ __forceinline__ void write_box(const float (&sums)[config.chunks_n][config.mma_n / 2], int column,
                                              int box) const {
        const u32 rows = rows_ + box_offset<config>(box);
#pragma unroll
        for (int unit = 0; unit < config.store_columns; unit += 16) {
            // 16 columns may span two WGMMA tiles.
            const float* d = &sums[0][0] + (column + unit) * config.columns_per_output / 2;
            if constexpr (config.activation == Activation::none) {
                write_columns(rows, unit, d);
            } else {
                float results[8];
                activate<config>(results, d);
                write_columns(rows, unit, results);
            }
        }
    }

    // The same in FP8: 128 columns, rounded to BF16 first, as those are that a cast by itself is given. Each row gets a scale;
    // `row` and `column` are where this warp's begin in `out`.
    __device__ __forceinline__ void write_quantized(const float (&sums)[config.chunks_n][config.mma_n / 2], int box, int row,
                                                    int column) const {
        u32 pairs[scale_block / 16][4];  // of the upper and the lower eight rows by turns
        const int columns = out_column<config>(params_.n) - column;
#pragma unroll
        for (int i = 0; i < scale_block / 16; ++i) {
            const float* d = &sums[0][0] + (box_column<config>(box) + i * 16) * config.columns_per_output / 2;
            float results[8];
            if constexpr (config.activation != Activation::none) activate<config>(results, d);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const from = config.activation == Activation::none ? d : results;
                pairs[i][j] = packed<Format::bf16>(from[2 * j + 1], from[2 * j]);
            }
        }
        if (columns < scale_block) {  // `out` ends here, with a multiple of 16; a bias may have more
#pragma unroll
            for (int i = 0; i < scale_block / 4; ++i) pairs[i / 4][i % 4] *= i / 4 * 16 < columns;
        }
        row += lane_ / 4;
        const u32 codes = rows_ + box_offset<config>(box);
        auto* const scales = params_.out_scale + column / scale_block * params_.out_scale_stride_n;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Scale scale = make_scale(largest(pairs, half), params_);
            const int at = row + half * 8;
            const bool holds = lane_ % 4 == 0 && at < params_.m && columns > 0;
            ptx::st_global(scales + at * params_.out_scale_stride_m, scale.value, holds);
#pragma unroll
            for (int i = 0; i < scale_block / 8; ++i) {
                const u32 pair = pairs[i / 2][i % 2 * 2 + half];
                const u32 offset = (lane_ / 4 + half * 8) * row_bytes + i * 8 + lane_ % 4 * 2;
                const float quotients[] = {divide(low(pair), scale.value, scale.reciprocal, scale.correction),
                                           divide(high(pair), scale.value, scale.reciprocal, scale.correction)};
                ptx::st_shared(codes + swizzle<config>(offset), ptx::cvt_rn_satfinite_e4m3x2(quotients[1], quotients[0]));
            }
        }
    }

    static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

    // The magnitude, as bits, of the largest element of a row, which four lanes have. Of halves as such, two at once, ptxas
    // would take the warps of tiles of 64 rows for apart (NVRTC 13.0.88).
    static __device__ __forceinline__ u32 largest(const u32 (&pairs)[scale_block / 16][4], int half) {
        float sizes[4] = {};  // one after the other they are awaited
#pragma unroll
        for (int i = 0; i < scale_block / 8; ++i) {
            const u32 pair = pairs[i / 2][i % 2 * 2 + half];
            sizes[i % 4] = ptx::max_nan(sizes[i % 4], ptx::max_nan(fabsf(low(pair)), fabsf(high(pair))));
        }
        float size = ptx::max_nan(ptx::max_nan(sizes[0], sizes[1]), ptx::max_nan(sizes[2], sizes[3]));
        size = ptx::max_nan(size, __shfl_xor_sync(0xffffffff, size, 1));
        return __float_as_uint(ptx::max_nan(size, __shfl_xor_sync(0xffffffff, size, 2)));
    }

    // Sixteen columns of this warp's rows, `unit` the first of them in the box. Numbers of 16 bits are turned into rows
    // on the way; of 32 bits each thread writes its pairs, two and two of which meet in the banks.
    __device__ __forceinline__ void write_columns(u32 rows, int unit, const float* d) const {
        if constexpr (config.out_bytes == 2) {
            constexpr Format format = config.out_format;
            ptx::stmatrix_x4(rows + swizzle<config>(lane_ % 16 * row_bytes + unit * 2 + lane_ / 16 * 16),
                             packed<format>(d[1], d[0]), packed<format>(d[3], d[2]), packed<format>(d[5], d[4]),
                             packed<format>(d[7], d[6]));
        } else {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const int row = lane_ / 4 + pair % 2 * 8, column = unit + pair / 2 * 8 + lane_ % 4 * 2;
                ptx::st_shared_v2(rows + swizzle<config>(row * row_bytes + column * 4), d[2 * pair], d[2 * pair + 1]);
            }
        }
    }

    // For an `out` that TMA cannot address: this warp's rows, clipped at the edges of the matrix.
    __device__ __forceinline__ void copy_box(int row, int column, int end, int box) const {
        const u32 rows = rows_ + box_offset<config>(box);
        auto* out = static_cast<Stored<config>*>(params_.out);
        for (u32 i = 0; i < warp_rows && row + i < row_end<config>(params_, end); ++i) {
            for (u32 j = lane_; j < config.store_columns && column + j < out_column<config>(params_.n);
                 j += warp_threads) {
                auto& to = out[(row + i) * params_.out_stride_m + column + j];
                to = stored<config>(to, ptx::ld_shared<Stored<config>>(
                                            rows + swizzle<config>(i * row_bytes + j * config.out_bytes)));
            }
        }
    }

    const GemmParams& params_;
    const u32 warpgroup_, lane_;
    const int first_row_;  // this warp's in a box; from lane 0, so that the compiler knows it as uniform
    const u32 rows_;  // this warp's in the first buffer
};

// One of the store warps: hands TMA the boxes of one math warpgroup, or of both.
template <GemmConfig config>
class StoreWarp {
   public:
    __device__ __forceinline__ StoreWarp(const GemmParams& params, SharedStorage<config>& smem, int warp)
        : params_(params), smem_(smem), warp_(warp) {}

    // Boxes come as Epilogue writes them; `row` and `column` are of the tile's first element in `out`, and no row from `end` on is
    // written.
    __device__ __forceinline__ void store(int row, int column, int end) const {
#pragma unroll 1
        for (int box = 0; box < config.boxes; box += config.boxes_at_once) {
            drain();
            for (int i = warp_; i < config.math_warpgroups; i += config.store_warps) {
                ptx::bar_arrive(boxes_empty_barrier + i, store_barrier_threads);
            }
            for (int i = warp_; i < config.math_warpgroups; i += config.store_warps) {
                ptx::bar_sync(boxes_full_barrier + i, store_barrier_threads);
                if constexpr (config.grouped()) store_ends(row + i * config.rows_per_warpgroup, column, end, i, box);
                if (ptx::elect_sync()) publish_boxes(row + i * config.rows_per_warpgroup, column, end, i, box);
                __syncwarp();
            }
        }
    }

    // Until all stores have read their buffers.
    __device__ __forceinline__ void drain() const {
        if (ptx::elect_sync()) ptx::cp_async_bulk_wait_group_read<0>();
        __syncwarp();
    }

   private:
    __device__ __forceinline__ void publish_boxes(int row, int column, int end, int warpgroup, int first_box) const {
#pragma unroll
        for (int i = 0; i < config.boxes_at_once; ++i) {
            store_box<config>(params_, ptx::smem_address(smem_.out[warpgroup]), row, column, first_box + i, end);
        }
        ptx::cp_async_bulk_commit_group();
    }

    // Boxes that end within a tile.
    __device__ __forceinline__ void store_ends(int row, int column, int end, int warpgroup, int first_box) const {
#pragma unroll 1
        for (int box = first_box; box < first_box + config.boxes_at_once; ++box) {
            const int first = row + box_row<config>(box);
            if (!ends_within<config>(first, end)) continue;
            const u32 rows = ptx::smem_address(smem_.out[warpgroup]) + box_offset<config>(box);
            copy_rows<config>(params_, rows, first, column + box_column<config>(box), end - first);
        }
    }

    const GemmParams& params_;
    SharedStorage<config>& smem_;
    const int warp_;
};

// One of the store warps.
template <GemmConfig config>
__device__ __forceinline__ void store_tiles(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    const StoreWarp<config> boxes(params, smem, warp);
    if constexpr (config.grouped()) ptx::griddepcontrol_wait();  // who may have written the bounds
    TileScheduler<config> tiles(params);
    ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
    while (true) {
        const Tile<config> tile = tiles.next();
        if (!tile.valid) break;
        boxes.store(tile.out_row(), out_column<config>(tile.out_column()), group_end<config>(tile));
    }
    boxes.drain();
}

}  // namespace deep_tile
