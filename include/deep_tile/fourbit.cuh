// Conversion of 4-bit codes to e4m3, for the converter warps (packed_b.cuh) and unpack.cuh.
//
// A table holds a code's eight magnitudes times a group's scale, as e4m3. A code's three magnitude bits select a byte,
// four codes per PRMT; signs are ORed in. In a word of eight codes, nibble i has the magnitude of code i in its low
// bits; the top bits have the signs of codes 4, 0, 5, 1, 6, 2, 7, 3, so that a shift aligns four of them with four
// bytes.
//
// A column has 32 contiguous codes of a row, in four words: word t has codes 4t to 4t + 3 of each half of the 32, those
// of the first half as its codes 0 to 3. Converted, a word is the two registers of 32 of K that a thread gives WGMMA
// for a row of an `a` in registers; the halves of a column's words are two pieces of 16 contiguous bytes.
//
// Integers need no table, since promotion applies their scales: one for each row of a K block, or FP16 numbers of its
// groups, whose products are WGMMA chains of their own (swap_ab.cuh). Up to 2^-5 the bytes of e4m3 count in steps of
// 2^-9, so 2^-8 times an integer's magnitude has the byte 2 * magnitude. A nibble holds this byte, or, for a negative
// integer, the byte minus 1: bit 0 is the sign. Byte i of a word has integers i and i + 4.
#pragma once

#include "formats.cuh"

namespace deep_tile {

// Returns the magnitude of an e2m1 code, from its three magnitude bits.
__device__ __forceinline__ float magnitude(int code) {
    return code < 2 ? code * 0.5f : (1 << (code / 2 - 1)) * (1.0f + code % 2 * 0.5f);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(u32(127 + exponent) << 23); }

// Tables for e2m1 in groups of 32. A scale byte is a power of two: a signed exponent relative to the block's scale.
// Groups with products too large for e4m3 contain zeros only; products too small become zero.
struct PowerTables {
    static __device__ __forceinline__ float scale(int byte) {
        const int exponent = static_cast<signed char>(byte);
        return power_of_two(exponent < -100 ? -100 : exponent > 100 ? 100 : exponent);
    }
};

// Tables for e2m1 in groups of 16. A scale byte is e4m3 and counts an eighth of its value, so every product fits e4m3.
struct E4M3Tables {
    static __device__ __forceinline__ float scale(int byte) {
        const int exponent = byte / 8 % 16, fraction = byte % 8;
        return exponent == 0 ? fraction * power_of_two(-12) : (8 + fraction) * power_of_two(exponent - 13);
    }
};

// Returns the table for a scale byte, by group size.
template <int group>
__device__ __forceinline__ u64 table_of(int byte) {
    const float scale = Conditional<group == 32, PowerTables, E4M3Tables>::type::scale(byte);
    float products[8];
#pragma unroll
    for (int code = 0; code < 8; ++code) products[code] = magnitude(code) * scale;
    const u32 low = pack_e4m3({products[0], products[1], products[2], products[3]});
    const u32 high = pack_e4m3({products[4], products[5], products[6], products[7]});
    return static_cast<u64>(high) << 32 | low;
}

// Masks a word's selectors of magnitudes. `opaque` makes the compiler mask those of both halves with one instruction.
__device__ __forceinline__ u32 selectors_of(u32 codes) { return ptx::opaque(static_cast<int>(codes & 0x77777777)); }

// Converts those four e2m1 codes of a word that are of one half of its column.
__device__ __forceinline__ u32 four_by_table(u32 codes, u32 selectors, uint2 table, int half) {
    return ptx::prmt(table.x, table.y, selectors >> 16 * half) | (codes << 4 * half & 0x80808080);
}

// Converts those four integers of a word that are of one half of its column. Bit 0 times 0x81 sets the sign in bit 7
// and adds the 1 that a negative integer's nibble lacks.
__device__ __forceinline__ u32 four_integers(u32 codes, int half) {
    const u32 bytes = codes >> 4 * half & 0x0f0f0f0f;
    return bytes + (bytes & 0x01010101) * 0x81;
}

// Converts a half of a word, by GemmConfig.table_group(): a K block for integers, whatever their groups.
template <int group>
__device__ __forceinline__ u32 four_elements(u32 codes, uint2 table, int half) {
    return group == scale_block ? four_integers(codes, half) : four_by_table(codes, selectors_of(codes), table, half);
}

// Converts a word, its halves by the tables of their groups. Only groups of 16 have one for each.
template <int group>
__device__ __forceinline__ uint2 eight_elements(u32 codes, uint2 first, uint2 last) {
    if constexpr (group == scale_block) return {four_integers(codes, 0), four_integers(codes, 1)};
    const u32 selectors = selectors_of(codes);
    return {four_by_table(codes, selectors, first, 0), four_by_table(codes, selectors, last, 1)};
}

}  // namespace deep_tile
