// The cast to FP8 along tokens: x [tokens, columns] becomes out [columns, tokens], with one scale per column and 128 tokens.
//
// Launched by deep_tile/cast.py; deep_tile/transposed.py holds the definition that every bit agrees with. A thread block
// takes a tile of 128 tokens and 128 columns. Each thread holds 16 bytes of some neighbouring tokens in registers, meets the
// others of its columns in shared memory for the scales, and writes its codes there, from where each column goes out whole.
#pragma once

#include "quantize.cuh"

namespace deep_tile {

// How the threads of a block share a tile. A `slot` is a column in the order in which threads hold them.
template <typename Format, int threads>
struct TransposedTile {
    using Bits = typename Format::Bits;
    static constexpr int warps = threads / warp_threads;
    static constexpr int lanes = scale_block * sizeof(Bits) / 16;      // threads of a token
    static constexpr int elements = scale_block / lanes;               // slots of a thread
    static constexpr int per_word = 4 / sizeof(Bits);                  // slots in a word of x
    static constexpr int tokens = scale_block / (threads / lanes);     // of a thread, neighbours
    static constexpr int column_words = scale_block / 4;               // of codes
    static constexpr int rotation = warp_threads / lanes;              // from one thread's columns to the next one's
    using Part = Slice<Format, lanes>;
    static_assert(Part::vectors == 1 && tokens % 4 == 0, "a thread holds whole words of each column");

    // Where word `word` of a column's codes is. Rotated, so that neither threads that write nor those that read share a bank.
    static __device__ __forceinline__ int place(int slot, int word) {
        return slot * column_words + (word + slot / elements * rotation) % column_words;
    }

    u32 largest[warps][scale_block / per_word];  // magnitudes
    Scale scales[scale_block];
    u32 codes[scale_block * column_words];
};

// How many of the 128 tokens from `first` on live: all that exist, or those before the end of their group. A group's first
// token is a multiple of `alignment`. The same in all threads.
template <int threads>
__device__ __forceinline__ int living_tokens(const CastParams& params, i64 first) {
    const i64 exist = params.rows - first < scale_block ? params.rows - first : scale_block;
    if (params.ends == nullptr) return exist;
    u32 before = 0;  // groups that end at `first` or before
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

// Loads the thread's tokens of a tile, `living` in all; what does not exist is zeros, which change no largest magnitude.
template <typename Tile>
__device__ __forceinline__ void load_tokens(typename Tile::Part (&parts)[Tile::tokens], const CastParams& params,
                                            i64 first_token, i64 first_column, int living, int columns, bool aligned) {
    const auto* x = static_cast<const typename Tile::Bits*>(params.x) + first_column;
    const int begin = threadIdx.x / Tile::lanes * Tile::tokens;
#pragma unroll
    for (int i = 0; i < Tile::tokens; ++i) {
        bool exists = begin + i < living;
        i64 row = first_token + begin + i;
        if (params.index != nullptr && exists) {
            row = read_index(params.index, params.wide_index, row);
            exists = u64(row) < u64(params.x_rows);
        }
        parts[i].load(x + (exists ? row : 0) * params.x_stride, exists ? columns : 0, threadIdx.x % Tile::lanes, aligned);
    }
}

// The scale of each slot, in shared memory and, of columns that exist, in the result.
template <typename Format, typename Tile>
__device__ __forceinline__ void make_scales(Tile& tile, const typename Tile::Part (&parts)[Tile::tokens],
                                            const CastParams& params, u32 token_block, i64 first_column, int columns) {
    const int warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
#pragma unroll
    for (int word = 0; word < Tile::elements / Tile::per_word; ++word) {
        u32 largest = 0;
#pragma unroll
        for (const auto& part : parts) largest = Format::larger(largest, part.word_magnitude(word));
#pragma unroll
        for (int distance = Tile::lanes; distance < warp_threads; distance *= 2) {
            largest = Format::larger(largest, __shfl_xor_sync(~0u, largest, distance));
        }
        if (lane < Tile::lanes) tile.largest[warp][lane * (Tile::elements / Tile::per_word) + word] = largest;
    }
    __syncthreads();
    if (threadIdx.x < scale_block) {
        const int slot = threadIdx.x;
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < Tile::warps; ++i) largest = Format::larger(largest, tile.largest[i][slot / Tile::per_word]);
        const auto bits = typename Tile::Bits(largest >> (slot % Tile::per_word * 16));
        const Scale scale = make_scale(__float_as_uint(Format::value(bits)), params);
        const int column = Tile::Part::column(slot, params.aligned);
        tile.scales[slot] = scale;
        if (column < columns) write_scale(params, first_column + column, token_block, scale.value);
    }
    __syncthreads();
}

template <typename Tile>
__device__ __forceinline__ void write_codes(Tile& tile, const typename Tile::Part (&parts)[Tile::tokens]) {
    const int begin = threadIdx.x / Tile::lanes * (Tile::tokens / 4), lane = threadIdx.x % Tile::lanes;
#pragma unroll
    for (int j = 0; j < Tile::elements; ++j) {
        const int slot = lane * Tile::elements + j;
        const Scale scale = tile.scales[slot];
#pragma unroll
        for (int word = 0; word < Tile::tokens / 4; ++word) {
            float scaled[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                scaled[n] = divide(parts[4 * word + n].value(0, j), scale.value, scale.reciprocal, scale.correction);
            }
            tile.codes[Tile::place(slot, begin + word)] = pack_e4m3(scaled);
        }
    }
    __syncthreads();
}

// Of `tokens` of each column. What is left of 128 beyond the living ones is zeros, as a product multiplies all 128.
template <typename Tile>
__device__ __forceinline__ void store_columns(const Tile& tile, const CastParams& params, i64 first_token, int tokens,
                                              i64 first_column, int columns) {
    const int word = threadIdx.x % warp_threads;
    const int left = tokens - 4 * word;
#pragma unroll
    for (int slot = threadIdx.x / warp_threads; slot < scale_block; slot += Tile::warps) {
        const int column = Tile::Part::column(slot, params.aligned);
        if (column >= columns) continue;
        const u32 codes = tile.codes[Tile::place(slot, word)];
        u8* out = params.out + (first_column + column) * params.out_stride + first_token + 4 * word;
        if (params.out_words && left >= 4) {
            *reinterpret_cast<u32*>(out) = codes;
            continue;
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n < left) out[n] = codes >> (8 * n);
        }
    }
}

template <typename Format, int threads>
__device__ __forceinline__ void cast_transposed(const CastParams& params) {
    take_turn();
    using Tile = TransposedTile<Format, threads>;
    __shared__ Tile tile;
    const u32 block_columns = (params.columns + scale_block - 1) / scale_block;
    const u32 tiles = (params.rows + scale_block - 1) / scale_block * block_columns;
    for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {
        const u32 token_block = number / block_columns, block_column = number % block_columns;
        const i64 first_token = i64(token_block) * scale_block, first_column = i64(block_column) * scale_block;
        const int living = living_tokens<threads>(params, first_token), columns = columns_of(params, block_column);
        if (living == 0) continue;
        typename Tile::Part parts[Tile::tokens];
        if (params.aligned) {
            load_tokens<Tile>(parts, params, first_token, first_column, living, columns, true);
        } else {
            load_tokens<Tile>(parts, params, first_token, first_column, living, columns, false);
        }
        make_scales<Format>(tile, parts, params, token_block, first_column, columns);
        write_codes(tile, parts);
        const i64 exist = params.rows - first_token;
        store_columns(tile, params, first_token, exist < scale_block ? int(exist) : scale_block, first_column, columns);
    }
}

}  // namespace deep_tile
