// Swapped operands: rows of a packed `b` are WGMMA's rows, and rows of `a` its columns. A thread then has two rows of
// `b`, and their scales in registers.
//
// Converter warps multiply so from registers (register_b.cuh). Math warpgroups do so, from slots, where `b` holds
// integers in groups of 32: each group's products are a WGMMA chain of their own, to which promotion applies the
// group's scale. In the usual order a thread has 16 of 64 columns and reads 64 scales per K block from shared memory;
// swapped, it reads eight, and 4096x4096x7168 takes two thirds of the time (H100, 2026-11-27).
#pragma once

#include "finish.cuh"
#include "packed_b.cuh"
#include "warpgroup.cuh"

namespace deep_tile {

// Four FP16 numbers in FP32.
__device__ __forceinline__ float4 floats_of(uint2 halves) {
    return {ptx::cvt_f32_f16(halves.x & 0xffff), ptx::cvt_f32_f16(halves.x >> 16), ptx::cvt_f32_f16(halves.y & 0xffff),
            ptx::cvt_f32_f16(halves.y >> 16)};
}

__device__ __forceinline__ float4 operator*(float4 x, float factor) {
    return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

// Scales of a row of `b` in a K block: one, or one per group.
template <GemmConfig config>
using RowScales = typename Conditional<(config.chains > 1), float4, float>::type;

// Products of a K block: one WGMMA chain, or one per group.
template <GemmConfig config, int count>
using Chains = float[config.chains][count];

// Bytes of a chain's rows.
template <GemmConfig config>
constexpr int chain_bytes = k_block_bytes / config.chains;

template <GemmConfig config, int count>
__device__ __forceinline__ void pin_chains(Chains<config, count>& products) {
#pragma unroll
    for (int i = 0; i < config.chains; ++i) pin(products[i]);
}

// Sum of a K block's chains, each times its group's scale.
__device__ __forceinline__ float scaled_chains(float4 scale, float4 chains) {
    return fmaf(scale.w, chains.w, fmaf(scale.z, chains.z, fmaf(scale.y, chains.y, scale.x * chains.x)));
}

// Adds the products, scaled. Registers 4j to 4j + 3 hold rows 8j and 8j + 1 (plus 2 * (lane % 4)) of `a`, for two rows
// of `b`. a_scale_slot() keeps the scales of sixteen rows such that a lane reads its four at once.
template <GemmConfig config, int count>
__device__ __forceinline__ void promote_swapped(float (&sums)[count], const Chains<config, count>& products,
                                                const RowScales<config> (&b)[2], const float* of_a) {
    static_assert(!config.bulk_scales, "scales of `a` in row order");
#pragma unroll
    for (int i = 0; i < count; i += 8) {
        const uint4 four = ptx::ld_shared_v4(ptx::smem_address(of_a + 2 * i + threadIdx.x % 4 * 4));
        const u32 a[2][2] = {{four.x, four.z}, {four.y, four.w}};
#pragma unroll
        for (int j = i; j < i + 8; ++j) {
            const float of_row = __uint_as_float(a[j / 4 % 2][j % 2]);
            if constexpr (config.chains > 1) {
                const float4 chains = {products[0][j], products[1][j], products[2][j], products[3][j]};
                sums[j] = fmaf(of_row, scaled_chains(b[j / 2 % 2], chains), sums[j]);
            } else {
                sums[j] += of_row * b[j / 2 % 2] * products[0][j];
            }
        }
    }
}

// Clears sums, or lets them `begin` with the bias; `row` is that of `b`, the first of the thread's two.
template <GemmConfig config, int count>
__device__ __forceinline__ void clear_swapped(const GemmParams& params, float (&sums)[count], int row, bool begin = true) {
    float bias[2] = {};
    if constexpr (config.begins_with_bias()) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float value = bias_value<config>(bias_bits<config>(params, row + i * 8));
            bias[i] = begin ? value : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = bias[i / 2 % 2];
}

// A tile's sums in shared memory, by row of `a` and of `b`.
template <GemmConfig config>
struct TileSums {
    // Writes a thread's sums; `column` is its first row of `b` in the tile.
    template <int count>
    static __device__ __forceinline__ void write(u32 to, int column, const float (&sums)[count]) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            ptx::st_shared(to + (row * config.sums_stride() + column + i / 2 % 2 * 8) * sizeof(float), sums[i]);
        }
    }

    // Adds them to the accumulators of a math warp, whose first row is `row`.
    static __device__ __forceinline__ void add(u32 from, int row, float (&sums)[config.mma_n / 2]) {
        const int lane = threadIdx.x % warp_threads;
#pragma unroll
        for (int i = 0; i < config.block_n / 4; ++i) {  // pairs of columns
            const int column = i / 2 * 8 + lane % 4 * 2;
            const uint2 pair = ptx::ld_shared_v2(
                from + ((row + lane / 4 + i % 2 * 8) * config.sums_stride() + column) * sizeof(float));
            sums[2 * i] += __uint_as_float(pair.x);
            sums[2 * i + 1] += __uint_as_float(pair.y);
        }
    }
};

// Common part of main loops that take a tile's sums from shared memory. The interface is that of LoopState.
template <GemmConfig config>
class TakesSums {
   public:
    __device__ __forceinline__ explicit TakesSums(const GemmParams& params) : range_(k_range<config>(params)) {}

    __device__ __forceinline__ int steps() const { return range_.end - range_.begin; }
    __device__ __forceinline__ void acquire() const {}
    __device__ __forceinline__ void begin_tile() const {}
    __device__ __forceinline__ void end() const {}
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler&) const {}

    __device__ __forceinline__ void clear(Accumulators<config>& sums) const {
#pragma unroll
        for (int i = 0; i < config.chunks_m * (config.mma_n / 2); ++i) (&sums[0][0][0])[i] = 0;
    }

   private:
    const KRange range_;
};

// Main loop of the math warpgroups: each multiplies 64 rows of the tile's `b` by all rows of `a`, or, if `b` has no
// more, by its own, in chunks of 64. At a tile's end the sums go through shared memory, from which each warpgroup takes
// its own rows of `a`, with all columns.
//
// Chunks are multiplied one after the other. Of 32 rows, each multiplied while the one before it is promoted, they take
// 9 % longer, because WGMMA then reads rows of `b` twice as often (4096x4096x7168; H100, 2026-11-27).
template <GemmConfig config>
class SwapAB : public TakesSums<config> {
   public:
    __device__ __forceinline__ SwapAB(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : TakesSums<config>(params),
          params_(params),
          smem_(smem),
          releaser_(smem),
          warpgroup_(warpgroup),
          row_(warpgroup % column_groups * mma_m + first_row() + threadIdx.x % warp_threads / 4),
          a_(descriptor_address(smem.a[0] + warpgroup / column_groups * chunks * mma_m * k_block_bytes)),
          weights_(descriptor_address(smem.b[0] + warpgroup % column_groups * mma_m * k_block_bytes)) {}

    // Adds this CTA's part of a tile, whose first column is `column`, to `sums`.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool, Meanwhile) {
        float swapped[chunks][count];
#pragma unroll
        for (int i = 0; i < chunks; ++i) clear_swapped<config>(params_, swapped[i], column + row_);
#pragma unroll 1
        for (int left = this->steps(); left > 0; --left) {
            wait(smem_.full[state_.stage], state_.phase);
            b_.await_full(smem_);
            multiply_stage(swapped);
            releaser_.release(state_.stage);
            b_.release(smem_, b_.slot(state_.stage));
            state_.advance();
            b_.advance(0);
        }
        exchange(swapped, sums);
    }

   private:
    static constexpr int count = mma_m / 2;                        // sums per thread and chunk
    static constexpr int column_groups = config.block_n / mma_m;   // of warpgroups with the same rows of `a`
    static constexpr int chunks = config.block_m / mma_m * column_groups / config.math_warpgroups;
    static constexpr int threads = config.math_warpgroups * warpgroup_threads;
    static_assert(config.scale_blocks == 1 && column_groups <= config.math_warpgroups, "a tile without a loop for it");

    // This warp's first row in a WGMMA.
    static __device__ __forceinline__ int first_row() { return threadIdx.x % warpgroup_threads / warp_threads * 16; }

    // This warpgroup's first chunk among the tile's.
    __device__ __forceinline__ int first_chunk() const { return warpgroup_ / column_groups * chunks; }

    __device__ __forceinline__ void multiply_stage(float (&sums)[chunks][count]) const {
        const int slot = b_.slot(state_.stage);
        const float* of_a = smem_.a_scale[state_.stage][0] + first_chunk() * mma_m;
        RowScales<config> scales[2];
#pragma unroll
        for (int chunk = 0; chunk < chunks; ++chunk) {
            Chains<config, count> products;
            begin(products, slot, chunk);
            if (chunk == 0) {
                scales[0] = scales_of(slot, row_);
                scales[1] = scales_of(slot, row_ + 8);
            }
            ptx::wgmma_wait_group<0>();
            pin_chains<config>(products);
            promote_swapped<config>(sums[chunk], products, scales, of_a + chunk * mma_m);
        }
    }

    // Scales of a row's groups, times that of the block.
    __device__ __forceinline__ float4 scales_of(int slot, int row) const {
        const uint2 halves = ptx::ld_shared_v2(ptx::smem_address(smem_.groups.group_scale[slot][0][row]));
        return floats_of(halves) * smem_.b_scale[state_.stage][0][0];
    }

    // Issues the WGMMAs of a chunk.
    __device__ __forceinline__ void begin(Chains<config, count>& products, int slot, int chunk) const {
        const u32 weights = weights_ + slot * (config.block_n * k_block_bytes / 16);
        const u32 a = a_ + (state_.stage * config.block_m + chunk * mma_m) * (k_block_bytes / 16);
        pin_chains<config>(products);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < k_block_bytes; k += mma_k_bytes) {
            constexpr u32 high = OperandLayout<0>::high;
            wgmma(products[k / chain_bytes<config>], matrix_descriptor(weights + k / 16, high),
                  matrix_descriptor(a + k / 16, high), k % chain_bytes<config> != 0);
        }
        ptx::wgmma_commit_group();
    }

    // Adds the tile's sums to those of this warpgroup's rows of `a`, 64 rows after the other.
    __device__ __forceinline__ void exchange(const float (&swapped)[chunks][count], Accumulators<config>& sums) const {
        const u32 at = ptx::smem_address(smem_.exchange.sums);
#pragma unroll
        for (int chunk = 0; chunk < config.block_m / mma_m; ++chunk) {
            ptx::bar_sync(exchange_barrier, threads);  // the chunk before has been read
            if (chunk / chunks * chunks == first_chunk()) TileSums<config>::write(at, row_, swapped[chunk % chunks]);
            ptx::bar_sync(exchange_barrier, threads);
            if (chunk / config.chunks_m == warpgroup_) {
                TileSums<config>::add(at, first_row(), sums[chunk % config.chunks_m][0]);
            }
        }
    }

    const GemmParams& params_;
    SharedStorage<config>& smem_;
    const Releaser<config> releaser_;
    const int warpgroup_, row_;  // the first of this thread's rows of `b` in the tile
    const u32 a_, weights_;      // descriptor addresses of the first stage and slot
    StoredB<config> b_;
    PipelineState<config.stages> state_;
};

}  // namespace deep_tile
