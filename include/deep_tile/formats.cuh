// Number formats and scales for the casts to FP8 (quantize.cuh).
#pragma once

#include "arithmetic.cuh"
#include "streaming.cuh"

namespace deep_tile::ptx {

// Maximum over two pairs of unsigned halves: "max".
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Multiplies two pairs of BF16 numbers, rounded.
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}

// Computes 1 / x, rounded, as __frcp_rn does, without its tests for x below 2^-126 or beyond 2^126.
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

// Converts two floats to packed e4m3, round to nearest even; `low` in bits 0 to 7.
__device__ __forceinline__ u16 cvt_rn_satfinite_e4m3x2(float high, float low) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

}  // namespace deep_tile::ptx

namespace deep_tile {

// Quotients by scales below `tiny_scale` have remainders that FP32 cannot hold. Both numbers are first multiplied by
// `tiny_factor`, which changes no mantissa bit.
constexpr float tiny_scale = 0x1p-80f, tiny_factor = 0x1p64f;

// Formats of x: how a word holds one or two elements. Magnitudes are compared as integers, which orders finite values,
// infinity and NaN, in this order; so NaN comes through. `raised` multiplies a word by tiny_factor, for tiny scales.

struct Halves {
    using Bits = u16;
    static __device__ __forceinline__ u32 magnitude(u32 word) { return word & 0x7fff7fff; }
    static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return ptx::max_u16x2(a, b); }
    static __device__ __forceinline__ u16 largest(u32 word) { return max(word >> 16, word & 0xffff); }
};

struct BFloat16 : Halves {
    static __device__ __forceinline__ u32 pack(float high, float low) { return ptx::cvt_rn_bf16x2(high, low); }
    static __device__ __forceinline__ float value(u16 bits) { return __uint_as_float(u32(bits) << 16); }
    static __device__ __forceinline__ u32 raised(u32 word) {
        const u32 factor = __float_as_uint(tiny_factor) >> 16;
        return ptx::mul_bf16x2(word, factor << 16 | factor);
    }
};

struct Float16 : Halves {
    static __device__ __forceinline__ float value(u16 bits) { return ptx::cvt_f32_f16(bits); }
    static __device__ __forceinline__ u32 raised(u32 word) { return word; }  // zeros: others are 2^-24 at least
};

struct Float32 {
    using Bits = u32;
    static __device__ __forceinline__ u32 magnitude(u32 word) { return word & 0x7fffffff; }
    static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return max(a, b); }
    static __device__ __forceinline__ u32 largest(u32 word) { return word; }
    static __device__ __forceinline__ float value(u32 bits) { return __uint_as_float(bits); }
    static __device__ __forceinline__ u32 raised(u32 word) { return __float_as_uint(value(word) * tiny_factor); }
};

struct Bytes {
    using Bits = u8;
};

// Packs four codes, the first float in bits 0 to 7.
__device__ __forceinline__ u32 pack_e4m3(const float (&x)[4]) {
    return u32(ptx::cvt_rn_satfinite_e4m3x2(x[3], x[2])) << 16 | ptx::cvt_rn_satfinite_e4m3x2(x[1], x[0]);
}

// Divides x by divisor, given 1 / divisor, rounded, and the same again as `correction`. Markstein's correction rounds
// the product as IEEE requires, if nothing underflows, in a quarter of the instructions of `/`. With `correction` 0 the
// result is the plain product; as an argument this choice costs the corrected path nothing. The remainder is negated,
// so that for zero it is +0, and -0 less it is -0.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal, float correction) {
    const float quotient = x * reciprocal;
    return fmaf(-fmaf(divisor, quotient, -x), correction, quotient);
}

struct Scale {
    __device__ __forceinline__ bool is_tiny() const { return value < tiny_scale; }

    // Returns the scale for raised elements.
    __device__ __forceinline__ Scale raised() const {
        return {value * tiny_factor, reciprocal * (1 / tiny_factor), correction * (1 / tiny_factor)};
    }

    float value, reciprocal, correction;
};

__device__ __forceinline__ float divide(float x, const Scale& scale) {
    return divide(x, scale.value, scale.reciprocal, scale.correction);
}

// Computes a block's scale from its largest magnitude's bits. Infinity counts as NaN. `params` belong to a cast or a
// GEMM with a floor of at least 448 * 2^-126: no scale is below 2^-126, and the remainder amax - 448 * quotient is a
// multiple of 2^-143, so nothing is lost.
template <typename Params>
__device__ __forceinline__ Scale make_scale(u32 magnitude, const Params& params) {
    constexpr float fp8_max = 448.0f, one_448th = 1.0f / fp8_max;  // 448 is 1.75 * 2^8
    constexpr u32 infinity = 0x7f800000, nan = 0x7fffffff;
    const u32 amax = max(magnitude, __float_as_uint(params.amax_floor));
    const u32 bits = amax < infinity ? amax : nan;
    float value = divide(__uint_as_float(bits), fp8_max, one_448th, params.correction * one_448th);
    if (params.pow2_scale && bits < infinity) {
        // 2^8 less than amax without its mantissa, doubled if the mantissa exceeds that of 1.75, 0x600000.
        value = __uint_as_float(((bits + 0x1fffff) & infinity) - (8 << 23));
    }
    const float reciprocal = ptx::normal_reciprocal(value);
    return {value, reciprocal, params.correction * reciprocal};
}

}  // namespace deep_tile
