// What stands between the products of an expert layer: casts of rows that an index names, of rows in groups of which some
// live, and of silu_mul of the halves of a row. They are cast_rows of quantize.cuh with other sources.
//
// Launched by deep_tile/cast.py; deep_tile/quantize.py and deep_tile/experts.py hold the definitions.
#pragma once

#include "quantize.cuh"

namespace deep_tile::ptx {

// NaN where either is: "min" and "max" with .NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// 1 / x, rounded: what __frcp_rn does for it, without asking whether it is below 2^-126, where this gives 0.
__device__ __forceinline__ float normal_reciprocal(float x) {
    float reciprocal;
    asm("{\n"
        ".reg .f32 near, error;\n"
        "rcp.approx.ftz.f32 near, %1;\n"
        "neg.f32 error, %1;\n"
        "fma.rn.f32 error, error, near, 0f3F800000;\n"
        "fma.rn.f32 %0, near, error, near;\n"
        "}"
        : "=f"(reciprocal)
        : "f"(x));
    return reciprocal;
}

}  // namespace deep_tile::ptx

namespace deep_tile {

// The sum of `value` over the threads of the block before this one.
__device__ __forceinline__ u32 sum_before(u32 value) {
    __shared__ u32 sums[warp_threads];  // of each warp
    const u32 warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
    u32 sum = value;
#pragma unroll
    for (u32 distance = 1; distance < warp_threads; distance *= 2) {
        const u32 other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == warp_threads - 1) sums[warp] = sum;
    __syncthreads();
    u32 before = sum - value;
#pragma unroll 1
    for (u32 i = 0; i < warp; ++i) before += sums[i];
    return before;
}

// Of rows in groups, those that live, which only the device knows. Whatever `living` holds, no row lies beyond out.
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
        u32 groups = 0;  // before the row's: by halves
#pragma unroll 1
        for (u32 step = first_step_; step > 0; step /= 2) {
            if (groups + step <= params.groups && ends_[groups + step - 1] <= number) groups += step;
        }
        return groups * params.group_rows + number - (groups > 0 ? ends_[groups - 1] : 0);
    }

    u32 count;

   private:
    static __device__ __forceinline__ u32 within(int value, u32 most) { return value < 0 ? 0 : min(u32(value), most); }

    // Each thread takes some neighbouring groups, and reads their counts once, as whatever changes them meanwhile must not
    // lead outside of the tensors.
    __device__ __forceinline__ void sum_up(const CastParams& params) {
        __shared__ u32 ends[cast_groups];
        const u32 share = (params.groups + blockDim.x - 1) / blockDim.x;
        const u32 first = min(threadIdx.x * share, params.groups), last = min(first + share, params.groups);
        u32 sum = 0;
#pragma unroll 1
        for (u32 group = first; group < last; ++group) {
            sum += ends[group] = within(params.living[group], params.group_rows);
        }
        u32 end = sum_before(sum);
#pragma unroll 1
        for (u32 group = first; group < last; ++group) ends[group] = end += ends[group];
        __syncthreads();
        ends_ = ends;
    }

    const u32* ends_ = nullptr;  // of each group, among all rows that live
    u32 first_step_ = 1;         // a power of two
};

// The rows of x that an index names; of none that x does not have, which is taken as zeros.
template <typename Format, int lanes>
struct Listed {
    using Rows = LivingRows;
    using Part = Slice<Format, lanes>;

    static __device__ __forceinline__ void load(Part& part, const CastParams& params, u32 row, u32 first, int columns,
                                                int lane) {
        const auto* x = static_cast<const typename Format::Bits*>(params.x);
        const i64 x_row = params.index == nullptr ? i64(row) : read_index(params.index, params.wide_index, row);
        const bool exists = u64(x_row) < u64(params.x_rows);
        part.load(x + (exists ? x_row : 0) * params.x_stride + first, exists ? columns : 0, lane, params.aligned);
    }
};

// 2^y by FMAs, whose bits are the same on every machine, for y from -126 to 127. Within 1.7e-7, but for y < -125.
__device__ __forceinline__ float exp2_by_fma(float y) {
    constexpr float integers = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to an integer, in its last bits
    const float shifted = y + integers;
    const float x = y - (shifted - integers);  // -0.5 to 0.5
    float power = fmaf(0x1.5bba14p-10f, x, 0x1.3cea88p-7f);
    power = fmaf(power, x, 0x1.c6b752p-5f);
    power = fmaf(power, x, 0x1.ebf9bcp-3f);
    power = fmaf(power, x, 0x1.62e42ap-1f);
    power = fmaf(power, x, 1.0f);
    return __uint_as_float(__float_as_uint(power) + (__float_as_uint(shifted) << 23));
}

// gate * sigmoid(alpha * gate) * (up + beta), each step rounded to FP32, of clamped inputs; NaN comes through.
__device__ __forceinline__ float silu_mul(float gate, float up, const CastParams& params) {
    gate = ptx::min_nan(gate, params.limit);
    up = ptx::max_nan(ptx::min_nan(up, params.limit), -params.limit);
    const float power = exp2_by_fma(fminf(fmaxf(gate * params.sigmoid_factor, -126.0f), 127.0f));
    return gate * ptx::normal_reciprocal(1.0f + power) * (up + params.beta);
}

// silu_mul of the two halves of a row of x.
template <typename Format, int lanes>
struct SiluMul {
    using Rows = LivingRows;
    using Part = Slice<Float32, lanes, 16 / sizeof(typename Format::Bits)>;

    static __device__ __forceinline__ void load(Part& part, const CastParams& params, u32 row, u32 first, int columns,
                                                int lane) {
        const auto* x = static_cast<const typename Format::Bits*>(params.x) + row * params.x_stride + first;
        Slice<Format, lanes> gate, up;
        gate.load(x, columns, lane, params.aligned);
        up.load(x + params.columns, columns, lane, params.aligned);
        part.fill([&](int i, int j) { return silu_mul(gate.value(i, j), up.value(i, j), params); });
    }
};

}  // namespace deep_tile
