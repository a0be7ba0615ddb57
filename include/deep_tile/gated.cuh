// SwiGLU's gradient, cast to FP8 along both dimensions, and h, cast along tokens, in one read of dh [rows, columns] and
// gate_up [rows, 2 columns], in 16 bits or FP8 codes with 1x128 scales.
//
// deep_tile/cast.py launches it; deep_tile/gated.py holds the definition. A CTA makes three 128x128 tiles as in
// both.cuh: the gradients for gate and for up, and h. Two wait in shared memory, each thread's part in its own place:
// registers would only suffice for half the threads.
#pragma once

#include "both.cuh"

namespace deep_tile::ptx {

// Converts two packed e4m3 numbers to packed FP16, which is exact.
__device__ __forceinline__ u32 cvt_f16x2_e4m3x2(u16 codes) {
    u32 packed;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(packed) : "h"(codes));
    return packed;
}

}  // namespace deep_tile::ptx

namespace deep_tile {

// Eight neighbouring row elements, from 16 bits each.
struct GatedWords {
    static constexpr int bytes = 2;

    __device__ __forceinline__ void load(const void* row, u32 column, const CastParams&, u32) {
        const uint4 loaded = *reinterpret_cast<const uint4*>(static_cast<const u16*>(row) + column);
        words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
    }

    __device__ __forceinline__ float value(int j) const { return BFloat16::value(u16(words[j / 2] >> 16 * (j % 2))); }

    u32 words[4] = {};
};

// The same, from codes and their scale.
struct GatedCodes {
    static constexpr int bytes = 1;

    __device__ __forceinline__ void load(const void* row, u32 column, const CastParams& params, u32 number) {
        const uint2 loaded = *reinterpret_cast<const uint2*>(static_cast<const u8*>(row) + column);
        words[0] = loaded.x, words[1] = loaded.y;
        scale = params.x_scale[number * params.x_scale_stride_row + column / scale_block * params.x_scale_stride_column];
    }

    __device__ __forceinline__ float value(int j) const {
        const u32 halves = ptx::cvt_f16x2_e4m3x2(u16(words[j / 4] >> 16 * (j % 4 / 2)));
        return scale * ptx::cvt_f32_f16(u16(halves >> 16 * (j % 2)));
    }

    u32 words[2] = {};
    float scale = 0;
};

// The waiting tiles; a thread writes its eight elements per row with one store.
template <typename Tile>
struct Waiting {
    struct alignas(16) Eight {
        typename Tile::Part part;
    };

    __device__ __forceinline__ void take(typename Tile::Part (&parts)[Tile::tokens], int number) const {
#pragma unroll
        for (int i = 0; i < Tile::tokens; ++i) parts[i] = eights[number][i][threadIdx.x].part;
    }

    Eight eights[2][Tile::tokens][Tile::warps * warp_threads];
};

// Tiles along h's columns, a third of the columns written.
__device__ __forceinline__ u32 gated_tiles(const CastParams& params) { return params.columns / (3 * scale_block); }

template <typename T>
__device__ __forceinline__ T& dynamic_shared() {
    extern __shared__ uint4 dynamic_vectors[];
    return *reinterpret_cast<T*>(dynamic_vectors);
}

// Computes one row: h, in `part`, and the gradients for gate and up, which wait. Dead rows become zeros. The tile's
// contribution to the row's share gradient is stored after the row's scales.
template <typename Source, typename Tile>
__device__ __forceinline__ void make_row(typename Tile::Part& part, Waiting<Tile>& waiting, const CastParams& params,
                                         const TilePlace<Tile>& at, int i) {
    constexpr float minus_log2e = -1.4426950408889634f;
    const int in_tile = threadIdx.x / Tile::lanes * Tile::tokens + i;
    const bool lives = in_tile < at.living;
    const u32 row = at.row * scale_block + in_tile;
    const u32 column = at.column * scale_block + threadIdx.x % Tile::lanes * Tile::elements;
    GatedWords of_h;
    Source gates, ups;
    float share = 0;
    if (lives) {
        const u8* x = static_cast<const u8*>(params.x) + row * params.x_stride * Source::bytes;
        gates.load(x, column, params, row);
        ups.load(x, column + gated_tiles(params) * scale_block, params, row);
        of_h.load(static_cast<const u16*>(params.dh) + row * params.dh_stride, column, params, row);
        share = params.share == nullptr ? 1.0f : params.share[row];
    }
    float sum = 0;
    typename Tile::Part of_gates, of_ups;
#pragma unroll
    for (int word = 0; word < Tile::words; ++word) {
        float of_gate[2], of_up[2], both[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float gate = gates.value(2 * word + j), up = ups.value(2 * word + j);
            const float gradient = of_h.value(2 * word + j), shared = gradient * share;
            const float sigmoid = ptx::rcp_approx(1.0f + ptx::ex2_approx(gate * minus_log2e)), silu = gate * sigmoid;
            sum += gradient * (silu * up);
            of_gate[j] = shared * up * (sigmoid + silu * (1.0f - sigmoid));
            of_up[j] = shared * silu;
            both[j] = silu * up * share;
        }
        of_gates.pack(word, of_gate);
        of_ups.pack(word, of_up);
        part.pack(word, both);
    }
    waiting.eights[0][i][threadIdx.x] = {of_gates};
    waiting.eights[1][i][threadIdx.x] = {of_ups};
    if (params.share == nullptr) return;
    sum = sum_of_lanes<Tile::lanes>(sum);
    if (lives && threadIdx.x % Tile::lanes == 0) {
        const u32 behind = 2 * gated_tiles(params) + at.column;
        params.row_scale[row * params.row_scale_stride_row + behind * params.row_scale_stride_column] = sum;
    }
}

// Casts h along tokens, with one scale per column and 128 tokens, or per 128x128 block: these are stored where the
// first columns' scales would be.
template <int threads, bool blocks, typename Tile>
__device__ __forceinline__ void cast_hidden(Tile& tile, const typename Tile::Part (&parts)[Tile::tokens],
                                            const CastParams& params, const TilePlace<Tile>& at, u32 block_column) {
    if constexpr (blocks) {
        CastParams own = params;
        own.scale += i64(2 * scale_block * gated_tiles(params)) * params.scale_stride_row;
        typename Tile::Part::Codes codes[Tile::tokens];
        cast_tile<threads, Tile>(codes, parts, own, block_column, at.row);
        write_transposed(tile, codes);
    } else {
        cast_tile_columns(tile, parts, params, at);
    }
    store_columns(tile, params, at);
}

// Casts SwiGLU's gradient, one tile per CTA: a loop over tiles would need one register too many. x, dh and row_out
// allow vector accesses.
template <typename Source, int threads, bool blocks>
__device__ __forceinline__ void cast_gated_gradient(const CastParams& params) {
    take_turn();
    using Tile = TransposedTile<BFloat16, threads, scale_block>;
    __shared__ Tile tile;
    auto& waiting = dynamic_shared<Waiting<Tile>>();
    static_assert(sizeof(waiting) == gated_bytes, "the host has more or less shared memory for it");
    const u32 rows = (params.rows + scale_block - 1) / scale_block;
    TilePlace<Tile> at = {blockIdx.x % rows, blockIdx.x / rows};
    at.living = living_tokens<threads>(params, at.first_token());
    if (at.living == 0) return;
    typename Tile::Part parts[Tile::tokens];
#pragma unroll
    for (int i = 0; i < Tile::tokens; ++i) make_row<Source>(parts[i], waiting, params, at, i);
    const u32 column = at.column;
    at.column += 2 * gated_tiles(params);
    cast_hidden<threads, blocks>(tile, parts, params, at, column);
#pragma unroll 1
    for (int which = 1; which >= 0; --which) {
        at.column -= gated_tiles(params);
        waiting.take(parts, which);
        cast_tile_columns(tile, parts, params, at);
        cast_tile_rows<true>(parts, params, at);
        store_columns(tile, params, at);
    }
}

}  // namespace deep_tile
