// Expert-layer casts between GEMMs: rows selected by an index, live rows in groups, and silu_mul over the halves of a
// row. They are quantize.cuh's cast_rows with other sources.
//
// deep_tile/cast.py launches them; deep_tile/quantize.py and deep_tile/experts.py hold the definitions.
#pragma once

#include "quantize.cuh"

namespace deep_tile {

// Clamps a count read from memory to [0, most].
__device__ __forceinline__ u32 within(int value, u32 most) { return value < 0 ? 0 : min(u32(value), most); }

// Live rows in groups, which only the device knows. Whatever `living` holds, no row lies beyond out.
class LivingRows {
   public:
    __device__ explicit LivingRows(const CastParams& params) : count(params.rows) {
        if (params.living == nullptr) return;
        if (params.group_rows == 0) {
            count = within(params.living[params.groups - 1], count);
            return;
        }
        sum_up(params);
        count = ends_[params.groups - 1];
#pragma unroll 1
        while (2 * first_step_ <= params.groups) first_step_ *= 2;
    }

    __device__ __forceinline__ u32 find(const CastParams& params, u32 number) const {
        if (ends_ == nullptr) return number;
        u32 groups = 0;  // groups before the row's, by bisection
#pragma unroll 1
        for (u32 step = first_step_; step > 0; step /= 2) {
            if (groups + step <= params.groups && ends_[groups + step - 1] <= number) groups += step;
        }
        return groups * params.group_rows + number - (groups > 0 ? ends_[groups - 1] : 0);
    }

    u32 count;

   private:
    // Each thread sums up some neighbouring groups, and reads their counts once: a concurrent change must not lead
    // outside the tensors.
    __device__ __forceinline__ void sum_up(const CastParams& params) {
        __shared__ u32 ends[cast_groups], sums[warp_threads];
        const u32 share = (params.groups + blockDim.x - 1) / blockDim.x;
        const u32 first = min(threadIdx.x * share, params.groups), last = min(first + share, params.groups);
        u32 sum = 0;
#pragma unroll 1
        for (u32 group = first; group < last; ++group) {
            sum += ends[group] = within(params.living[group], params.group_rows);
        }
        u32 end = sum_before(sum, sums);
#pragma unroll 1
        for (u32 group = first; group < last; ++group) ends[group] = end += ends[group];
        __syncthreads();
        ends_ = ends;
    }

    const u32* ends_ = nullptr;  // end of each group, among all live rows
    u32 first_step_ = 1;         // a power of two
};

// Index entry, as the words that were read: interpreting them waits for the load, and happens later.
struct Number {
    static __device__ __forceinline__ Number at(const CastParams& params, u32 row) {
        const u32* words = static_cast<const u32*>(params.index) + (i64(row) << params.wide_index);
        Number number = {words[0], 0};
        if (params.wide_index) number.high = words[1];
        return number;
    }

    // Returns the entry; a negative one becomes a row beyond all others.
    __device__ __forceinline__ u64 value(const CastParams& params) const {
        return params.index == nullptr || params.wide_index ? u64(high) << 32 | low : u64(i64(int(low)));
    }

    u32 low, high;
};

// Source: rows of x that an index names. A row that x does not have counts as zeros.
template <typename Format, int lanes>
struct Listed {
    using Rows = LivingRows;
    using Part = Slice<Format, lanes>;
    static constexpr bool divides = true;

    struct Place {
        u32 row;  // in out
        Number number;
    };

    static __device__ __forceinline__ Place find(const CastParams& params, u32 row) {
        if (params.index == nullptr) return {row, {row, 0}};
        return {row, Number::at(params, row)};
    }

    static __device__ __forceinline__ void load(Part& part, const CastParams& params, const Place& place, u32 first,
                                                int columns, int lane, bool aligned) {
        const auto* x = static_cast<const typename Format::Bits*>(params.x);
        const u64 x_row = place.number.value(params);
        const bool exists = x_row < u64(params.x_rows);
        part.load(x + (exists ? x_row : 0) * params.x_stride + first, exists ? columns : 0, lane, aligned);
    }
};

// Computes gate * sigmoid(alpha * gate) * (up + beta) in FP32; NaN comes through. Infinite powers make the sigmoid 0.
__device__ __forceinline__ float silu_mul(float gate, float up, const CastParams& params) {
    const float sigmoid = ptx::rcp_approx(1.0f + ptx::ex2_approx(gate * params.sigmoid_factor));
    return gate * sigmoid * (up + params.beta);
}

// Computes silu_mul with clamped inputs.
__device__ __forceinline__ float limited_silu_mul(float gate, float up, const CastParams& params) {
    gate = ptx::min_nan(gate, params.limit);
    return silu_mul(gate, ptx::max_nan(ptx::min_nan(up, params.limit), -params.limit), params);
}

// Source: silu_mul over the two halves of a row of x. It is approximate, so quotients need no exact rounding.
template <typename Format, int lanes>
struct SiluMul {
    using Rows = LivingRows;
    using Part = Slice<Float32, lanes, 16 / sizeof(typename Format::Bits)>;
    static constexpr bool divides = false;

    struct Place {
        u32 row;  // in x and in out
    };

    static __device__ __forceinline__ Place find(const CastParams&, u32 row) { return {row}; }

    static __device__ __forceinline__ void load(Part& part, const CastParams& params, const Place& place, u32 first,
                                                int columns, int lane, bool aligned) {
        const auto* x = static_cast<const typename Format::Bits*>(params.x) + place.row * params.x_stride + first;
        Slice<Format, lanes> gate, up;
        gate.load(x, columns, lane, aligned);
        up.load(x + params.columns, columns, lane, aligned);
        if (__float_as_uint(params.limit) < 0x7f800000) {
            part.fill([&](int i, int j) { return limited_silu_mul(gate.value(i, j), up.value(i, j), params); });
        } else {
            part.fill([&](int i, int j) { return silu_mul(gate.value(i, j), up.value(i, j), params); });
        }
    }
};

}  // namespace deep_tile
