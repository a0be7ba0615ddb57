// A logits kernel's sums over heads in a math thread, and its output formats.
#pragma once

#include "arithmetic.cuh"
#include "memory.cuh"
#include "ranges.cuh"

namespace deep_tile {

template <Format>
struct Logit;

template <>
struct Logit<Format::fp32> {
    using Bits = float;
    static constexpr u32 minus_infinity = 0xff800000;  // repeated to fill 32 bits
    static __device__ __forceinline__ Bits of(float value) { return value; }
    static __device__ __forceinline__ Bits least() { return __uint_as_float(minus_infinity); }
};

template <>
struct Logit<Format::bf16> {
    using Bits = u16;
    static constexpr u32 minus_infinity = 0xff80ff80;
    static __device__ __forceinline__ Bits of(float value) { return static_cast<u16>(ptx::cvt_rn_bf16x2(0.0f, value)); }
    static __device__ __forceinline__ Bits least() { return 0xff80; }
};

template <LogitsConfig config>
__device__ __forceinline__ typename Logit<config.out_format>::Bits* out_row(const LogitsParams& params, int row) {
    return static_cast<typename Logit<config.out_format>::Bits*>(params.out) + row * params.out_stride;
}

// Sums over heads in FP32, by FMA: a thread sums its heads per query, [query][row and row + 8], then reduces with the
// three threads that share its rows, halving the values in each step.
template <LogitsConfig config>
class HeadSums {
    static constexpr int in = config.part_queries();
    static constexpr int slots = in > 4 ? 8 : in > 2 ? 4 : in;  // powers of two
    static constexpr int count = 2 * slots;
    static constexpr int kept = count > 4 ? count / 4 : 1;  // sums that each of the four threads keeps

   public:
    static constexpr int queries = kept > 1 ? kept / 2 : 1;
    static constexpr int rows = kept > 1 ? 2 : 1;

    // Offset from a thread's row to the first row whose sums it keeps; and the `i`-th query that it keeps, or -1.
    static __device__ __forceinline__ int row(int lane) { return rows == 1 ? 8 * (first(lane) % 2) : 0; }
    static __device__ __forceinline__ int query(int lane, int i) {
        const int found = first(lane) / 2 + i;
        return found < in && (count > 2 || lane % 2 == 0) ? found : -1;
    }

    __device__ __forceinline__ void read_weights(const float* weights, int lane) {
#pragma unroll
        for (int i = 0; i < config.mma_n() / 4; ++i) weights_[i] = weights[i / 2 * 8 + lane % 4 * 2 + i % 2];
    }

    // Sums that the thread keeps, [query][row].
    __device__ __forceinline__ void add_up(const float (&products)[config.mma_n() / 2], int lane,
                                           float (&kept_sums)[queries * rows]) const {
        float sums[count] = {};
        add_heads(products, sums);
        exchange<count / 2>(sums, lane, 2);
        if constexpr (count > 2) {
            exchange<count / 4>(sums, lane, 1);
        } else {
            sums[0] += __shfl_xor_sync(~0u, sums[0], 1);
        }
#pragma unroll
        for (int i = 0; i < queries * rows; ++i) kept_sums[i] = sums[i];
    }

   private:
    // Index of the first sum that a thread keeps.
    static __device__ __forceinline__ int first(int lane) {
        return (lane & 2 ? count / 2 : 0) + (count > 2 && lane & 1 ? count / 4 : 0);
    }

    __device__ __forceinline__ void add_heads(const float (&products)[config.mma_n() / 2], float (&sums)[count]) const {
        constexpr int eights = config.heads / 8;
#pragma unroll
        for (int i = 0; i < eights; ++i) {
#pragma unroll
            for (int query = 0; query < in; ++query) {
                const int group = query * eights + i;
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    float& sum = sums[2 * query + n / 2];
                    sum = fmaf(weights_[2 * group + n % 2], ptx::max_nan(products[4 * group + n], 0.0f), sum);
                }
            }
        }
    }

    template <int half>
    static __device__ __forceinline__ void exchange(float (&sums)[count], int lane, int mask) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float own = upper ? sums[half + i] : sums[i], other = upper ? sums[i] : sums[half + i];
            sums[i] = own + __shfl_xor_sync(~0u, other, mask);
        }
    }

    float weights_[config.mma_n() / 4];
};

}  // namespace deep_tile
