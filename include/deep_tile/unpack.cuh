// A packed weight as FP8: what large products multiply with, which would wait for the converter warps (packed_b.cuh).
//
// deep_tile/cast.py launches it; packed.as_fp8 is the definition, equal in every bit. A warp takes a unit: a lane has a row
// of it, and two of its four columns of 32 codes, of which it writes 64 adjacent bytes.
#pragma once

#include "fourbit.cuh"

namespace deep_tile {

// Unpacks a unit at `from` to the rows at `to`, with tables of its groups.
template <int group>
__device__ __forceinline__ void unpack_unit(const u8* from, u8* to, const uint2* tables) {
    constexpr int columns = 4, per_column = group < scale_block ? 32 / group : 1;
    const int row = threadIdx.x % unit_rows, first = threadIdx.x % warp_threads / unit_rows * 2;
    const u8* scales = from + columns * unit_rows * 16 + (row * columns + first) * per_column;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint4 codes = reinterpret_cast<const uint4*>(from)[(first + j) * unit_rows + row];
        uint2 low = {}, high = {};
        if constexpr (group < scale_block) {
            low = tables[scales[j * per_column]];
            high = tables[scales[j * per_column + per_column - 1]];
        }
        const uint2 a = eight_elements<group>(codes.x, low), b = eight_elements<group>(codes.y, low);
        const uint2 c = eight_elements<group>(codes.z, high), d = eight_elements<group>(codes.w, high);
        auto* elements = reinterpret_cast<uint4*>(to + (first + j) * 32);
        elements[0] = {a.x, a.y, b.x, b.y};
        elements[1] = {c.x, c.y, d.x, d.y};
    }
}

// The next launch reads what this one writes, and does not start before its end.
template <int group>
__device__ __forceinline__ void unpack(const UnpackParams& params) {
    constexpr int unit_bytes = unit_rows * (scale_block / 2 + (group < scale_block ? scale_block / group : 0));
    __shared__ u64 tables[group < scale_block ? packed_tables : 1];
    if constexpr (group < scale_block) {
        for (int table = threadIdx.x; table < packed_tables; table += blockDim.x) tables[table] = table_of<group>(table);
        __syncthreads();
    }
    ptx::griddepcontrol_wait();
    const u32 warps = blockDim.x / warp_threads, row = threadIdx.x % unit_rows;
    for (u32 unit = blockIdx.x * warps + threadIdx.x / warp_threads; unit < params.units; unit += gridDim.x * warps) {
        const u32 block = unit / params.row_units, row_unit = unit % params.row_units;
        const u32 matrix = block / params.k_blocks, k_block = block % params.k_blocks;
        const i64 out_row = (i64{matrix} * params.row_units + row_unit) * unit_rows + row;
        unpack_unit<group>(static_cast<const u8*>(params.weight) + i64{unit} * unit_bytes,
                           static_cast<u8*>(params.out) + (out_row * params.k_blocks + k_block) * scale_block,
                           reinterpret_cast<const uint2*>(tables));
    }
}

}  // namespace deep_tile
