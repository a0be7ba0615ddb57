// Casts to FP8 along both dimensions, or transposes FP8 codes: one read of x [rows, columns] writes codes [rows,
// columns] and their transpose [columns, rows].
//
// deep_tile/cast.py launches them; deep_tile/both.py holds the definitions, equal in every bit. A CTA holds a 128x128
// tile in registers, as in transposed.cuh. Codes along the rows are stored from registers; the transpose goes through
// shared memory and is stored by columns.
#pragma once

#include "transposed.cuh"

namespace deep_tile {

// Stores one tile row from each thread's codes.
template <bool aligned, typename Tile>
__device__ __forceinline__ void store_row(const CastParams& params, const TilePlace<Tile>& at, i64 row,
                                          const typename Tile::Part::Codes& codes) {
    u8* out = params.row_out + row * params.row_out_stride + at.first_column();
    Tile::Part::store(out, at.columns(params), threadIdx.x % Tile::lanes, aligned, codes);
}

// Casts the tile's rows, with a scale for each; rows that are not live are left alone.
template <bool aligned, typename Tile>
__device__ __forceinline__ void cast_tile_rows(const typename Tile::Part (&parts)[Tile::tokens],
                                               const CastParams& params, const TilePlace<Tile>& at) {
    const int begin = threadIdx.x / Tile::lanes * Tile::tokens;
#pragma unroll
    for (int i = 0; i < Tile::tokens; ++i) {
        const Scale scale = make_scale(largest_of_lanes<Tile::lanes>(parts[i].magnitude()), params);
        if (begin + i >= at.living) continue;
        const i64 row = at.first_token() + begin + i;
        if (threadIdx.x % Tile::lanes == 0) {
            params.row_scale[row * params.row_scale_stride_row + at.column * params.row_scale_stride_column] =
                scale.value;
        }
        auto part = parts[i];  // a tiny scale raises its elements
        store_row<aligned>(params, at, row, part.quantized(scale));
    }
}

// Stores all tile rows. A branch per row keeps fewer registers alive than one around all rows.
template <typename Tile>
__device__ __forceinline__ void store_rows(const CastParams& params, const TilePlace<Tile>& at,
                                           const typename Tile::Part::Codes (&codes)[Tile::tokens]) {
    const int begin = threadIdx.x / Tile::lanes * Tile::tokens;
#pragma unroll
    for (int i = 0; i < Tile::tokens; ++i) {
        if (begin + i >= at.living) continue;
        const i64 row = at.first_token() + begin + i;
        if (params.aligned) {
            store_row<true>(params, at, row, codes[i]);
        } else {
            store_row<false>(params, at, row, codes[i]);
        }
    }
}

// Transposes the bytes in four words: bytes `j` become word `j`.
__device__ __forceinline__ void transpose_bytes(u32 (&words)[4]) {
    const u32 low[] = {__byte_perm(words[0], words[1], 0x5140), __byte_perm(words[2], words[3], 0x5140)};
    const u32 high[] = {__byte_perm(words[0], words[1], 0x7362), __byte_perm(words[2], words[3], 0x7362)};
    words[0] = __byte_perm(low[0], low[1], 0x5410);
    words[1] = __byte_perm(low[0], low[1], 0x7632);
    words[2] = __byte_perm(high[0], high[1], 0x5410);
    words[3] = __byte_perm(high[0], high[1], 0x7632);
}

// Writes codes, one row per token, to shared memory.
template <typename Tile>
__device__ __forceinline__ void write_transposed(Tile& tile, const typename Tile::Part::Codes (&codes)[Tile::tokens]) {
    constexpr int count = Tile::tokens / 4;
    const int begin = threadIdx.x / Tile::lanes * count, lane = threadIdx.x % Tile::lanes;
#pragma unroll
    for (int four = 0; four < Tile::elements / 4; ++four) {
        u32 words[4][count];
#pragma unroll
        for (int n = 0; n < count; ++n) {
            u32 square[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) square[i] = codes[4 * n + i].words[0][four];
            transpose_bytes(square);
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j][n] = square[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) write_words(tile, lane * Tile::elements + 4 * four + j, begin, words[j]);
    }
    __syncthreads();
}

// Tile count over all matrices. Tiles are numbered along the rows first, so concurrent writes are adjacent in the
// transpose's rows.
template <typename Tile>
struct BothWalk {
    __device__ explicit BothWalk(const CastParams& params)
        : rows((params.rows + scale_block - 1) / scale_block),
          tiles((params.columns + Tile::columns - 1) / Tile::columns * rows) {}

    __device__ __forceinline__ u32 count(const CastParams& params) const { return tiles * params.matrices; }

    // Locates tile `number`, and moves the pointers in `params` to its matrix.
    __device__ __forceinline__ TilePlace<Tile> find(CastParams& params, u32 number) const {
        const u32 matrix = number / tiles, tile = number % tiles;
        params.x = static_cast<const typename Tile::Bits*>(params.x) + matrix * params.x_step;
        params.out += matrix * params.out_step;
        params.scale += matrix * params.scale_step;
        params.row_out += matrix * params.row_out_step;
        const i64 left = params.rows - i64(tile % rows) * scale_block;
        return {tile % rows, tile / rows, int(left < scale_block ? left : scale_block)};
    }

    u32 rows, tiles;
};

// Computes the 128x128 block's scale and quantises with it. `row` and `column` locate the scale.
template <int threads, typename Tile>
__device__ __forceinline__ void cast_tile(typename Tile::Part::Codes (&codes)[Tile::tokens],
                                          const typename Tile::Part (&parts)[Tile::tokens], const CastParams& params, u32 row,
                                          u32 column) {
    u32 magnitude = 0;
#pragma unroll
    for (const auto& part : parts) magnitude = max(magnitude, part.magnitude());
    const Scale scale = make_scale(largest_of_block<threads>(magnitude), params);
    if (threadIdx.x == 0) write_scale(params, row, column, scale.value);
#pragma unroll
    for (int i = 0; i < Tile::tokens; ++i) {
        auto part = parts[i];  // a tiny scale raises its elements
        codes[i] = part.quantized(scale);
    }
}

// Casts with one scale for 1x128 along the rows, and along the columns another for 128x1, or for 128x128.
template <typename Format, int threads, bool blocks>
__device__ __forceinline__ void cast_both(const CastParams& params) {
    take_turn();
    using Tile = TransposedTile<Format, threads, scale_block>;
    __shared__ Tile tile;
    const u32 rows = (params.rows + scale_block - 1) / scale_block;
    const u32 tiles = (params.columns + scale_block - 1) / scale_block * rows;
    for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {
        TilePlace<Tile> at = {number % rows, number / rows};
        at.living = living_tokens<threads>(params, at.first_token());
        if (at.living == 0) continue;
        typename Tile::Part parts[Tile::tokens];
        load_tile(parts, params, at);
        if constexpr (blocks) {
            typename Tile::Part::Codes codes[Tile::tokens];
            cast_tile<threads, Tile>(codes, parts, params, at.column, at.row);
            write_transposed(tile, codes);
        } else {
            cast_tile_columns(tile, parts, params, at);
        }
        if (params.aligned) {
            cast_tile_rows<true>(parts, params, at);
        } else {
            cast_tile_rows<false>(parts, params, at);
        }
        store_columns(tile, params, at);
    }
}

// Casts with 128x128 scales, which serve the codes and their transpose.
template <typename Format, int threads>
__device__ __forceinline__ void cast_weight(const CastParams& params) {
    take_turn();
    using Tile = TransposedTile<Format, threads, scale_block>;
    __shared__ Tile tile;
    const BothWalk<Tile> walk(params);
    for (u32 number = blockIdx.x; number < walk.count(params); number += gridDim.x) {
        CastParams matrix = params;
        const TilePlace<Tile> at = walk.find(matrix, number);
        typename Tile::Part parts[Tile::tokens];
        load_tile(parts, matrix, at);
        typename Tile::Part::Codes codes[Tile::tokens];
        cast_tile<threads, Tile>(codes, parts, matrix, at.row, at.column);
        store_rows(matrix, at, codes);
        write_transposed(tile, codes);
        store_columns(tile, matrix, at);
    }
}

// Transposes codes.
template <int threads>
__device__ __forceinline__ void transpose_codes(const CastParams& params) {
    take_turn();
    using Tile = TransposedTile<Bytes, threads, scale_block>;
    __shared__ Tile tile;
    const BothWalk<Tile> walk(params);
    for (u32 number = blockIdx.x; number < walk.count(params); number += gridDim.x) {
        CastParams matrix = params;
        const TilePlace<Tile> at = walk.find(matrix, number);
        typename Tile::Part parts[Tile::tokens];
        load_tile(parts, matrix, at);
        typename Tile::Part::Codes codes[Tile::tokens];
#pragma unroll
        for (int i = 0; i < Tile::tokens; ++i) codes[i] = parts[i].codes();
        write_transposed(tile, codes);
        store_columns(tile, matrix, at);
        __syncthreads();
    }
}

}  // namespace deep_tile
