// Cast to FP8 along tokens: x [tokens, columns] becomes out [columns, tokens], one scale per column and 128 tokens.
//
// deep_tile/cast.py launches it; deep_tile/transposed.py holds the definition, equal in every bit. A CTA takes a tile
// of 128 tokens and some columns. Each thread holds 16 bytes from some neighbouring tokens in registers. Threads
// combine scales for their columns in shared memory; codes go through it too, and leave by columns. 16-byte stores
// matter most: with 4 bytes the cast takes a quarter longer (4096x7168 in BF16, H200, 2026-11-24).
#pragma once

#include "quantize.cuh"

namespace deep_tile {

// A tile with 128 tokens and `columns` columns, as a CTA's threads share it. A `slot` is a column, in the threads'
// order.
template <typename Format_, int threads, int columns_>
struct TransposedTile {
    using Format = Format_;
    using Bits = typename Format::Bits;
    static constexpr int columns = columns_;
    static constexpr int warps = threads / warp_threads;
    static constexpr int elements = 16 / sizeof(Bits);              // slots per thread
    static constexpr int lanes = columns / elements;                // threads per token
    static constexpr int per_word = 4 / sizeof(Bits);               // slots per x word
    static constexpr int words = elements / per_word;               // x words per thread and token
    static constexpr int tokens = scale_block / (threads / lanes);  // neighbours, per thread
    static constexpr int column_words = scale_block / 4;            // code words
    static constexpr int rotation = 4;                              // from one thread's columns to the next one's
    using Part = Slice<Format, lanes, elements, 1>;
    static_assert(tokens % 4 == 0, "a thread holds whole words of each column");

    // Position of word `word` in a column's codes, rotated by whole vectors: writing threads share few banks, reading
    // threads none.
    static __device__ __forceinline__ int place(int slot, int word) {
        return slot * column_words + (word + slot / elements * rotation) % column_words;
    }

    // Position of a slot's scale: scales that threads read at once are neighbours.
    static __device__ __forceinline__ int scale_place(int slot) { return slot % elements * lanes + slot / elements; }

    struct alignas(16) PaddedScale : Scale {};  // read in one access

    u32 largest[warps][columns / per_word];  // magnitudes
    PaddedScale scales[columns];
    alignas(16) u32 codes[columns * column_words];
};

// Tile coordinates in x, and its number of live tokens; the others count as zeros.
template <typename Tile>
struct TilePlace {
    __device__ __forceinline__ i64 first_token() const { return i64(row) * scale_block; }
    __device__ __forceinline__ i64 first_column() const { return i64(column) * Tile::columns; }
    __device__ __forceinline__ int columns(const CastParams& params) const {
        const i64 left = params.columns - first_column();
        return left < Tile::columns ? int(left) : Tile::columns;
    }

    u32 row, column;
    int living;
};

// Live tokens among the 128 from `first` on: all existing ones, or those before their group's end. A group's
// first token is a multiple of `alignment`. All threads get the same result.
template <int threads>
__device__ __forceinline__ int living_tokens(const CastParams& params, i64 first) {
    const i64 exist = params.rows - first < scale_block ? params.rows - first : scale_block;
    if (params.ends == nullptr) return exist;
    u32 before = 0;  // groups that end at or before `first`
#pragma unroll 1
    for (u32 group = threadIdx.x; group - threadIdx.x < params.groups; group += threads) {
        before += __syncthreads_count(group < params.groups && params.ends[group] <= first);
    }
    if (before == params.groups) return 0;
    const i64 step = params.alignment;
    const i64 begin = before == 0 ? 0 : (params.ends[before - 1] + step - 1) / step * step;
    const i64 living = params.ends[before] - first;
    if (begin > first || living < 0) return 0;
    return living < exist ? living : exist;
}

template <typename Tile>
__device__ __forceinline__ void load_tokens(typename Tile::Part (&parts)[Tile::tokens], const CastParams& params,
                                            const TilePlace<Tile>& at, bool aligned) {
    const auto* x = static_cast<const typename Tile::Bits*>(params.x) + at.first_column();
    const int begin = threadIdx.x / Tile::lanes * Tile::tokens;
    const int left = at.columns(params);
#pragma unroll
    for (int i = 0; i < Tile::tokens; ++i) {
        bool exists = begin + i < at.living;
        i64 row = at.first_token() + begin + i;
        if (params.index != nullptr && exists) {
            row = read_index(params.index, params.wide_index, row);
            exists = u64(row) < u64(params.x_rows);
        }
        const int columns = exists ? left : 0;
        parts[i].load(x + (exists ? row : 0) * params.x_stride, columns, threadIdx.x % Tile::lanes, aligned);
    }
}

// Writes each slot's largest magnitude in the warp's tokens to shared memory.
template <typename Tile>
__device__ __forceinline__ void write_largest(Tile& tile, const typename Tile::Part (&parts)[Tile::tokens]) {
    using Format = typename Tile::Format;
    const int warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
#pragma unroll
    for (int word = 0; word < Tile::words; ++word) {
        u32 largest = 0;
#pragma unroll
        for (const auto& part : parts) largest = Format::larger(largest, part.word_magnitude(word));
#pragma unroll
        for (int distance = Tile::lanes; distance < warp_threads; distance *= 2) {
            largest = Format::larger(largest, __shfl_xor_sync(~0u, largest, distance));
        }
        if (lane < Tile::lanes) tile.largest[warp][lane * Tile::words + word] = largest;
    }
    __syncthreads();
}

// Writes each slot's scale to shared memory and, for existing columns, to the result. Returns whether any is tiny.
template <typename Tile>
__device__ __forceinline__ bool write_scales(Tile& tile, const CastParams& params, const TilePlace<Tile>& at) {
    using Format = typename Tile::Format;
    const int slot = threadIdx.x;
    bool is_tiny = false;
    if (slot < Tile::columns) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < Tile::warps; ++i) largest = Format::larger(largest, tile.largest[i][slot / Tile::per_word]);
        const auto bits = typename Tile::Bits(largest >> (slot % Tile::per_word * 16));
        const Scale scale = make_scale(__float_as_uint(Format::value(bits)), params);
        const int column = Tile::Part::column(slot, params.aligned);
        tile.scales[Tile::scale_place(slot)] = {scale};
        if (column < at.columns(params)) {
            write_scale(params, at.first_column() + column, at.row, scale.value);
            is_tiny = scale.is_tiny();
        }
    }
    return __syncthreads_or(is_tiny);
}

// Writes a thread's codes for one slot to shared memory, from word `begin` on. Eight tokens leave by one store, which
// keeps 16 lanes apart from each other's banks.
template <typename Tile, int count>
__device__ __forceinline__ void write_words(Tile& tile, int slot, int begin, const u32 (&words)[count]) {
    u32* place = &tile.codes[Tile::place(slot, begin)];
    if constexpr (count == 2) {
        *reinterpret_cast<uint2*>(place) = {words[0], words[1]};
    } else {
        static_assert(count == 1, "a number of tokens without code that stores them");
        place[0] = words[0];
    }
}

// Writes codes to shared memory. `any_tiny` is the result of `write_scales`.
template <bool any_tiny, typename Tile>
__device__ __forceinline__ void write_codes(Tile& tile, const typename Tile::Part (&parts)[Tile::tokens]) {
    const int begin = threadIdx.x / Tile::lanes * (Tile::tokens / 4), lane = threadIdx.x % Tile::lanes;
#pragma unroll
    for (int j = 0; j < Tile::elements; ++j) {
        const int slot = lane * Tile::elements + j;
        auto scale = tile.scales[Tile::scale_place(slot)];
        const bool raises = any_tiny && scale.is_tiny();
        const float factor = raises ? tiny_factor : 1.0f;
        if (raises) scale = {scale.raised()};
        u32 words[Tile::tokens / 4];
#pragma unroll
        for (int word = 0; word < Tile::tokens / 4; ++word) {
            float scaled[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                scaled[n] = divide(parts[4 * word + n].value(0, j) * factor, scale);
            }
            words[word] = pack_e4m3(scaled);
        }
        write_words(tile, slot, begin, words);
    }
    __syncthreads();
}

// Stores sixteen codes, or the `left` that remain.
__device__ __forceinline__ void store_codes(u8* out, const uint4& codes, i64 left, bool aligned) {
    if (aligned && left >= 16) {
        *reinterpret_cast<uint4*>(out) = codes;
        return;
    }
    const u32 words[] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        if (n < left) out[n] = words[n / 4] >> (8 * (n % 4));
    }
}

// Stores all existing tokens of the tile: a GEMM multiplies 128 at a time, in which tokens that are not live are zeros.
// Each thread stores 16 tokens of a column.
template <typename Tile>
__device__ __forceinline__ void store_columns(const Tile& tile, const CastParams& params, const TilePlace<Tile>& at) {
    constexpr int vectors = scale_block / 16, at_once = Tile::warps * warp_threads / vectors;
    const int vector = threadIdx.x % vectors;
    const i64 left = params.rows - at.first_token() - 16 * vector;
    const int columns = at.columns(params);
    u8* out = params.out + at.first_column() * params.out_stride + at.first_token() + 16 * vector;
#pragma unroll
    for (int i = 0; i < Tile::columns / at_once; ++i) {
        const int slot = threadIdx.x / vectors + i * at_once;
        const int column = Tile::Part::column(slot, params.aligned);
        if (column >= columns) continue;
        const uint4 codes = *reinterpret_cast<const uint4*>(&tile.codes[Tile::place(slot, 4 * vector)]);
        store_codes(out + column * params.out_stride, codes, left, params.out_vectors);
    }
}

template <typename Tile>
__device__ __forceinline__ void load_tile(typename Tile::Part (&parts)[Tile::tokens], const CastParams& params,
                                          const TilePlace<Tile>& at) {
    if (params.aligned) {
        load_tokens<Tile>(parts, params, at, true);
    } else {
        load_tokens<Tile>(parts, params, at, false);
    }
}

// Casts the tile's columns, with a scale for each.
template <typename Tile>
__device__ __forceinline__ void cast_tile_columns(Tile& tile, const typename Tile::Part (&parts)[Tile::tokens],
                                                  const CastParams& params, const TilePlace<Tile>& at) {
    write_largest(tile, parts);
    if (write_scales(tile, params, at)) {
        write_codes<true>(tile, parts);
    } else {
        write_codes<false>(tile, parts);
    }
}

// Tiles are counted along the tokens first: writes at one time are then adjacent in rows of out.
template <typename Format, int threads, int columns>
__device__ __forceinline__ void cast_transposed(const CastParams& params) {
    take_turn();
    using Tile = TransposedTile<Format, threads, columns>;
    __shared__ Tile tile;
    const u32 rows = (params.rows + scale_block - 1) / scale_block;
    const u32 tiles = (params.columns + columns - 1) / columns * rows;
    for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {
        TilePlace<Tile> at = {number % rows, number / rows};
        at.living = living_tokens<threads>(params, at.first_token());
        if (at.living == 0) continue;
        typename Tile::Part parts[Tile::tokens];
        load_tile(parts, params, at);
        cast_tile_columns(tile, parts, params, at);
        store_columns(tile, params, at);
    }
}

}  // namespace deep_tile
