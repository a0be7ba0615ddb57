// Output boxes: their part of a tile, their place in shared memory, and the store to `out`.
//
// Math warps and store warps (output.cuh) use them, and so does the FP8 epilogue (quantized_output.cuh).
#pragma once

#include "arithmetic.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// A thread's accumulators for a tile: [chunks_m][chunks_n] WGMMA tiles of 64 x mma_n.
template <GemmConfig config>
using Accumulators = float[config.chunks_m][config.chunks_n][config.mma_n / 2];

// The same for 64 rows.
template <GemmConfig config>
using ChunkSums = float[config.chunks_n][config.mma_n / 2];

// Converts an integer sum to float: by its bits if sums stay integers, otherwise by its value.
template <GemmConfig config>
__device__ __forceinline__ float as_sum(int integer) {
    if constexpr (config.keeps_integers()) return __int_as_float(integer);
    return static_cast<float>(integer);
}

template <GemmConfig config>
__device__ __forceinline__ float added(float x, float y) {
    if constexpr (config.keeps_integers()) return __int_as_float(__float_as_int(x) + __float_as_int(y));
    return x + y;
}

// Converts a sum over all K parts to the number that is scaled and stored.
template <GemmConfig config>
__device__ __forceinline__ float added_up(float sum) {
    if constexpr (config.keeps_integers() && config.out_format != Format::int32) return __float_as_int(sum);
    return sum;
}

// Boxes are numbered along the rows of a tile, or of this CTA's part of it; the last box in a row ends with the row,
// and may overlap the one before.
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

// Maps a product column to its column in `out`; also maps their counts.
template <GemmConfig config>
__device__ __forceinline__ int out_column(int column) {
    return column / config.columns_per_output;
}

// Bytes per row in a box. A transposed box has a row for each product column, with mma_m of the product's rows.
template <GemmConfig config>
constexpr int row_bytes = (config.transposed ? mma_m : config.store_columns) * config.out_bytes;

// Offset of a box among its warpgroup's buffers.
template <GemmConfig config>
__device__ __forceinline__ u32 box_offset(int box) {
    constexpr int box_bytes = mma_m * config.store_columns * config.out_bytes;
    return box % config.store_buffers * box_bytes;
}

// Swizzles as TMA does in the store: XORs the 16-byte chunk index with the row's position in its 8 * span bytes.
template <GemmConfig config>
__device__ __forceinline__ u32 swizzle(u32 offset) {
    if constexpr (config.store_swizzle == 0) return offset;
    return offset ^ ((offset >> 3) & (config.store_swizzle - 16));
}

// Bits of a number in `out`.
template <GemmConfig config>
using Stored = typename Conditional<config.out_bytes == 4, u32, u16>::type;

// Rounds two sums to 16-bit numbers, `low` in bits 0 to 15.
template <Format format>
__device__ __forceinline__ u32 packed(float high, float low) {
    if constexpr (format == Format::fp16) {
        return ptx::cvt_rn_f16x2(high, low);
    } else {
        static_assert(format == Format::bf16, "a format without code that rounds to it");
        return ptx::cvt_rn_bf16x2(high, low);
    }
}

// First row of `out` that may not be written: the given end of the group or tile, or the end of the matrix.
template <GemmConfig config>
__device__ __forceinline__ int row_end(const GemmParams& params, int group_end) {
    if constexpr (config.grouped()) {
        return group_end;
    } else if constexpr (config.block_m < mma_m) {
        return min(params.m, group_end);
    } else {
        return params.m;
    }
}

// Selects the tensor map for a box, and the coordinates in it: `out`, or, if a group ends within the box, the map from
// `plan.out_tail_map`.
template <GemmConfig config, typename Store>
__device__ __forceinline__ void store_rows_at(const Store& store, int row, int column, int end, u32 box) {
    if constexpr (config.grouped()) {
        const int rows = end - row;
        if (rows < config.store_rows) return store(1, column, config.store_rows - rows, end, box);
    }
    if constexpr (config.transposed) {
        store(0, row, column, box);
    } else {
        store(0, column, row, box);
    }
}

// Stores a box by TMA, or its first store_rows rows, up to the row `end` and the last column; row, column and address
// belong to the first box.
template <GemmConfig config>
__device__ __forceinline__ void store_box(const GemmParams& params, u32 buffers, int row, int column, int box, int end) {
    row += box_row<config>(box);
    column += box_column<config>(box);
    if (row >= row_end<config>(params, end) || column >= out_column<config>(params.n)) return;
    store_rows_at<config>(
        [&](int map, auto... place) {
            if constexpr (config.accumulate) {
                ptx::cp_reduce_async_bulk_tensor_add(params.out_maps[map], place...);
            } else {
                ptx::cp_async_bulk_tensor_store(params.out_maps[map], place...);
            }
        },
        row, column, end, buffers + box_offset<config>(box));
}

// Returns the new word of `out`: the sum, or, when accumulating, its sum with `before`, added as TMA adds, in `out`'s
// own format. A word has one number or two, each written by one CTA alone.
template <GemmConfig config, typename Word>
__device__ __forceinline__ Word stored(Word before, Word sum) {
    if constexpr (!config.accumulate) {
        return sum;
    } else if constexpr (config.out_format == Format::bf16) {
        return ptx::add_rn_bf16x2(before, sum);
    } else if constexpr (config.out_format == Format::fp16) {
        return ptx::add_rn_f16x2(before, sum);
    } else if constexpr (config.out_format == Format::int32) {
        return before + sum;
    } else {
        static_assert(config.out_format == Format::fp32, "a format without code that adds in it");
        return __float_as_uint(__uint_as_float(before) + __uint_as_float(sum));
    }
}

}  // namespace deep_tile
