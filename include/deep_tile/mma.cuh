// One K block of one warpgroup: WGMMA over 128 bytes of K, then promotion of the result to scaled FP32
// (promotion.cuh).
//
// FP8 WGMMA keeps about 14 bits while it accumulates, so its sum runs over one K block only and is then added, scaled,
// to FP32 registers. Sums of INT8 are exact, and are turned into FP32 on the way. Both operands are read from shared memory, and the other warpgroup keeps the tensor cores busy
// during promotion (A through registers lost 16 %; H200, 2026-11-21).
#pragma once

#include "pipeline.cuh"

namespace deep_tile {

constexpr int mma_k_bytes = 32;

// How an operand lies in a stage, as its descriptors say it ("Asynchronous Warpgroup Level Matrix Shared Memory Layout":
// "Strides", "Matrix Descriptor Format"): bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16,
// 62-63 swizzle mode. Of one along its rows ("MN-major") a box has `span` bytes of adjacent rows for each of 64 elements
// of K, and its swizzle is as wide as that. Strides go from 8 of K to the next 8, leading offsets from box to box.
template <int span>
struct OperandLayout {
    static_assert(span == 128 || span == 64 || span == 32, "a span without a swizzle");
    static constexpr u32 swizzle = span == 128 ? 1 : span == 64 ? 2 : 3;
    static constexpr u32 high = swizzle << 30 | 8 * span / 16;
    static constexpr u32 low = span_k * span / 16 << 16;
    static constexpr int mma_k = 16 * span;  // bytes from one WGMMA's K to the next one's
};

// Of one along K, in the 128-byte swizzle: strides go from 8 rows to the next 8, and there are no leading offsets.
template <>
struct OperandLayout<0> {
    static constexpr u32 high = 1u << 30 | 8 * k_block_bytes / 16;
    static constexpr u32 low = 0;
    static constexpr int mma_k = mma_k_bytes;
};

__device__ __forceinline__ u64 matrix_descriptor(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }

// The low half of a descriptor: of 18 address bits all but the last four.
__device__ __forceinline__ u32 descriptor_address(const void* tile) { return (ptx::smem_address(tile) & 0x3FFFF) >> 4; }

// Keeps the compiler from moving reads or writes of `registers` across this point: the asynchronous WGMMA writes them.
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

// One WGMMA chain per scale block of a stage.
template <GemmConfig config>
using Blocks = MmaSum<config>[config.scale_blocks][config.mma_n / 2];

// Those of a stage's WGMMAs, worked out one after the other.
template <GemmConfig config>
struct Descriptors {
    u32 a_low, b_low;  // of the stage's first

    __device__ __forceinline__ u64 a(int block, int k) const { return at<config.a_span, config.block_m>(a_low, block, k); }
    __device__ __forceinline__ u64 b(int block, int k) const { return at<config.b_span, config.block_n>(b_low, block, k); }

   private:
    template <int span, int rows>
    static __device__ __forceinline__ u64 at(u32 low, int block, int k) {
        using Layout = OperandLayout<span>;
        const int bytes = block * rows * k_block_bytes + k / mma_k_bytes * Layout::mma_k;
        return matrix_descriptor(low + bytes / 16, Layout::high);
    }
};

// The same, for stages of one scale block, carried along from stage to stage. ptxas has all WGMMAs read the same four
// uniform registers. What it can work out it works out in them, between one WGMMA and the next, 12 clocks later; what it
// finds in other registers it moves there, and the next one follows after 4. That takes high halves that it does not know
// and one for each operand, which then stays in its place.
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

    // From this stage to the next.
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

// Begins block[i] = a[64, 128] * b[mma_n, 128]^T for each scale block i of a stage, without waiting for it.
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

// Adds a[64, ...] * b[mma_n, ...]^T over all of a stage's K to `sum`, or begins it with that, where it is the `first`:
// without promotion, WGMMA's own sums are the tile's. The caller fences and commits.
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

// Waits for all but the `later` stages that were begun after this one.
template <GemmConfig config, int later = 0>
__device__ __forceinline__ void finish_blocks(Blocks<config>& blocks) {
    ptx::wgmma_wait_group<later>();
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) pin(blocks[i]);
}

}  // namespace deep_tile
