// WGMMA for one K block (128 bytes of K) in one warpgroup, before FP32 promotion (promotion.cuh).
//
// FP8 WGMMA keeps about 14 bits while it accumulates, so temporaries span one K block only and are then added, scaled,
// to FP32 registers. INT8 sums are exact, and become FP32 on the way. Both operands come from shared memory (A through
// registers lost 16 %; H200, 2026-11-21), and the other warpgroup keeps the tensor cores busy during promotion.
#pragma once

#include "pipeline.cuh"

namespace deep_tile {

constexpr int mma_k_bytes = 32;

// Operand layout in a stage, as matrix descriptors encode it ("Asynchronous Warpgroup Level Matrix Shared Memory
// Layout": "Strides", "Matrix Descriptor Format"): bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride
// offset / 16, 62-63 swizzle mode. An MN-major box has `span` bytes of adjacent rows for each of 64 elements of K, and
// a swizzle as wide. Its stride offset steps 8 elements of K; its leading offset steps from box to box.
template <int span>
struct OperandLayout {
    static_assert(span == 128 || span == 64 || span == 32, "a span without a swizzle");
    static constexpr u32 swizzle = span == 128 ? 1 : span == 64 ? 2 : 3;
    static constexpr u32 high = swizzle << 30 | 8 * span / 16;
    static constexpr u32 low = span_k * span / 16 << 16;
    static constexpr int mma_k = 16 * span;  // bytes from one WGMMA's K to the next one's
};

// K-major layout in the 128-byte swizzle: the stride offset steps 8 rows; there is no leading offset.
template <>
struct OperandLayout<0> {
    static constexpr u32 high = 1u << 30 | 8 * k_block_bytes / 16;
    static constexpr u32 low = 0;
    static constexpr int mma_k = mma_k_bytes;
};

__device__ __forceinline__ u64 matrix_descriptor(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }

// Low half of a descriptor: 18 address bits without the last four.
__device__ __forceinline__ u32 descriptor_address(const void* tile) { return (ptx::smem_address(tile) & 0x3FFFF) >> 4; }

// Pins `registers`, which the asynchronous WGMMA writes: the compiler moves no read or write across this point.
template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(int (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Temporary accumulators: one WGMMA chain per scale block in a stage.
template <GemmConfig config>
using Blocks = MmaSum<config>[config.scale_blocks][config.mma_n / 2];

// Descriptors for a stage's WGMMAs, computed one after the other.
template <GemmConfig config>
struct Descriptors {
    u32 a_low, b_low;  // for the stage's first WGMMA

    __device__ __forceinline__ u64 a(int block, int k) const { return at<config.a_span, config.block_m>(a_low, block, k); }
    __device__ __forceinline__ u64 b(int block, int k) const { return at<config.b_span, config.b_rows>(b_low, block, k); }

   private:
    template <int span, int rows>
    static __device__ __forceinline__ u64 at(u32 low, int block, int k) {
        using Layout = OperandLayout<span>;
        const int bytes = block * rows * k_block_bytes + k / mma_k_bytes * Layout::mma_k;
        return matrix_descriptor(low + bytes / 16, Layout::high);
    }
};

// Descriptors carried along from stage to stage, for stages with one scale block. ptxas makes all WGMMAs read the same
// four uniform registers. Values that ptxas can compute are computed in these registers between two WGMMAs, which then
// issue 12 clocks apart. Values in other registers are moved there, and the next WGMMA issues after 4 clocks. The high
// halves must therefore be unknown to ptxas, one per operand, which then stays in place.
template <GemmConfig config>
class CarriedDescriptors {
   public:
    __device__ __forceinline__ void start(Descriptors<config> first) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            a_low_[i] = first.a_low + i * mma_k_bytes / 16;
            b_low_[i] = first.b_low + i * mma_k_bytes / 16;
        }
        static_assert(config.a_span == 0 && config.b_span == 0, "operands lie along K");
        const u32 high = OperandLayout<0>::high + ptx::opaque_zero();
        a_high_ = __shfl_sync(0xffffffff, high, 0);
        b_high_ = __shfl_sync(0xffffffff, high, 1);
    }

    // Moves from `stage` to the next.
    __device__ __forceinline__ void advance(int stage) {
        const int stages = stage + 1 == config.stages ? 1 - config.stages : 1;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            a_low_[i] += stages * (config.block_m * k_block_bytes / 16);
            b_low_[i] += stages * (config.block_n * k_block_bytes / 16);
        }
    }

    __device__ __forceinline__ u64 a(int, int k) const { return matrix_descriptor(a_low_[k / mma_k_bytes], a_high_); }
    __device__ __forceinline__ u64 b(int, int k) const { return matrix_descriptor(b_low_[k / mma_k_bytes], b_high_); }

   private:
    static constexpr int count = k_block_bytes / mma_k_bytes;
    u32 a_low_[count], b_low_[count], a_high_, b_high_;
};

// Issues block[i] = a[64, 128] * b[mma_n, 128]^T for each scale block i in a stage, without waiting.
template <GemmConfig config, typename StageDescriptors>
__device__ __forceinline__ void begin_blocks(Blocks<config>& blocks, const StageDescriptors& descriptors) {
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) pin(blocks[i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
#pragma unroll
        for (int k = 0; k < k_block_bytes; k += mma_k_bytes) {
            wgmma(blocks[i], descriptors.a(i, k), descriptors.b(i, k), k != 0);
        }
    }
    ptx::wgmma_commit_group();
}

// Adds a[64, ...] * b[mma_n, ...]^T over a stage's whole K to `sum`; the `first` stage overwrites it. Without
// promotion, WGMMA's accumulators are the tile's. The caller fences and commits.
template <GemmConfig config, bool first>
__device__ __forceinline__ void add_products(MmaSum<config> (&sum)[config.mma_n / 2], const Descriptors<config>& descriptors) {
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
#pragma unroll
        for (int k = 0; k < k_block_bytes; k += mma_k_bytes) {
            wgmma(sum, descriptors.a(i, k), descriptors.b(i, k), !(first && i == 0 && k == 0));
        }
    }
}

// Waits until only the `later` stages, issued after this one, are pending.
template <GemmConfig config, int later = 0>
__device__ __forceinline__ void finish_blocks(Blocks<config>& blocks) {
    ptx::wgmma_wait_group<later>();
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) pin(blocks[i]);
}

}  // namespace deep_tile
