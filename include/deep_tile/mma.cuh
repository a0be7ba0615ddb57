// One K block of one warpgroup: WGMMA over 128 bytes of K, then promotion of the result to scaled FP32.
//
// FP8 WGMMA keeps about 14 bits while it accumulates, so its sum runs over one K block only and is then added, scaled,
// to FP32 registers. Both operands are read from shared memory, and the other warpgroup keeps the tensor cores busy
// during promotion (A through registers lost 16 %; H200, 2026-11-21).
#pragma once

#include "pipeline.cuh"

namespace deep_tile {

// Shared-memory matrix descriptor of a K-major operand in the 128-byte swizzle ("Asynchronous Warpgroup Level Matrix
// Shared Memory Layout"): bits 0-13 address / 16, 32-45 stride between groups of 8 rows / 16, 62-63 swizzle mode.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    constexpr u64 eight_rows = 8 * 128 / 16;
    constexpr u64 swizzle_128b = 1;
    return swizzle_128b << 62 | eight_rows << 32 | address;
}

// The low half of a descriptor: of 18 address bits all but the last four.
__device__ __forceinline__ u32 descriptor_address(const void* tile) { return (ptx::smem_address(tile) & 0x3FFFF) >> 4; }

// Keeps the compiler from moving reads or writes of `registers` across this point: the asynchronous WGMMA writes them.
template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// One WGMMA chain per scale block of a stage.
template <GemmConfig config>
using Blocks = float[config.scale_blocks][config.mma_n / 2];

// Begins block[i] = a[64, 128] * b[mma_n, 128]^T for each scale block i of a stage, without waiting for it.
template <GemmConfig config>
__device__ __forceinline__ void begin_blocks(Blocks<config>& blocks, u32 a, u32 b) {
    constexpr int mma_k_bytes = 32;
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) pin(blocks[i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
#pragma unroll
        for (int k = 0; k < scale_block; k += mma_k_bytes) {
            wgmma(blocks[i], matrix_descriptor(a + (i * config.block_m * scale_block + k) / 16),
                  matrix_descriptor(b + (i * config.block_n * scale_block + k) / 16), k != 0);
        }
    }
    ptx::wgmma_commit_group();
}

// Waits for all but the `later` stages that were begun after this one.
template <GemmConfig config, int later = 0>
__device__ __forceinline__ void finish_blocks(Blocks<config>& blocks) {
    ptx::wgmma_wait_group<later>();
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) pin(blocks[i]);
}

// sum += block * row_scale * column_scale. Registers 4j to 4j+3 are columns 8j and 8j+1 (plus 2 * (lane % 4)) of this
// thread's two rows; `column` is the block's first column in the tile, whose own lies `shift` column groups into its
// scale block, if that is known.
template <GemmConfig config, int shift>
__device__ __forceinline__ void promote(float (&sum)[config.mma_n / 2], const float (&block)[config.mma_n / 2],
                                        const float (&row_scale)[2], const float (&column_scale)[config.b_scale_slots],
                                        int column) {
#pragma unroll
    for (int i = 0; i < config.mma_n / 2; ++i) {
        const int row = i / 2 % 2;
        const int slot = (shift * config.column_group + column + i / 4 * 8) / config.b_scale_columns;
        sum[i] += row_scale[row] * column_scale[slot] * block[i];
    }
}

}  // namespace deep_tile
