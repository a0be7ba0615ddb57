// Unpacks a 4-bit weight to FP8 in memory, for large GEMMs, which would wait for the converter warps (packed_b.cuh).
//
// deep_tile/cast.py launches it; packed.elements is the definition, equal in every bit. A warp takes a unit: eight lanes
// have 16 codes of a row each, and write one cache line. Two lanes read the same column, of which each has a half.
#pragma once

#include "fourbit.cuh"

namespace deep_tile {

// Unpacks a unit at `from` to the rows at `to`, with its groups' tables. All reads precede the first write.
template <int group>
__device__ __forceinline__ void unpack_unit(const u8* from, u8* to, i64 row_bytes, const uint2* tables) {
    constexpr int rows_at_once = warp_threads / 8, passes = unit_rows / rows_at_once;
    constexpr int columns = 4, column_bytes = 16, scales_at = columns * unit_rows * column_bytes;
    const int lane = threadIdx.x % warp_threads, piece = lane % 8, column = piece / 2, half = piece % 2;
    uint4 codes[passes];
    uint2 table[passes] = {};
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const int row = i * rows_at_once + lane / 8;
        codes[i] = reinterpret_cast<const uint4*>(from)[column * unit_rows + row];
        if constexpr (group < scale_block) {
            constexpr int groups = scale_block / group;
            table[i] = tables[from[scales_at + row * groups + piece * groups / 8]];
        }
    }
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const int row = i * rows_at_once + lane / 8;
        const auto converted = [&](u32 word) { return four_elements<group>(word, table[i], half); };
        reinterpret_cast<uint4*>(to + row * row_bytes)[piece] = {converted(codes[i].x), converted(codes[i].y),
                                                                 converted(codes[i].z), converted(codes[i].w)};
    }
}

// The next launch reads this one's result. It is not a programmatic dependent launch, so it starts after this one ends.
template <int group>
__device__ __forceinline__ void unpack(const UnpackParams& params) {
    constexpr int unit_bytes = unit_rows * (scale_block / 2 + (group < scale_block ? scale_block / group : 0));
    take_turn();
    __shared__ u64 tables[group < scale_block ? packed_tables : 1];
    if constexpr (group < scale_block) {
        for (int table = threadIdx.x; table < packed_tables; table += blockDim.x) tables[table] = table_of<group>(table);
        __syncthreads();
    }
    const u32 warps = blockDim.x / warp_threads;
    const i64 row_bytes = i64{params.k_blocks} * scale_block;
    for (u32 unit = blockIdx.x * warps + threadIdx.x / warp_threads; unit < params.units; unit += gridDim.x * warps) {
        const u32 block = unit / params.row_units, row_unit = unit % params.row_units;
        const u32 matrix = block / params.k_blocks, k_block = block % params.k_blocks;
        const i64 first_row = (i64{matrix} * params.row_units + row_unit) * unit_rows;
        unpack_unit<group>(static_cast<const u8*>(params.weight) + i64{unit} * unit_bytes,
                           static_cast<u8*>(params.out) + first_row * row_bytes + k_block * scale_block, row_bytes,
                           reinterpret_cast<const uint2*>(tables));
    }
}

}  // namespace deep_tile
