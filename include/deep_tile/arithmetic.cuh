// PTX for arithmetic without a C++ equivalent: one function per instruction, as in ptx.cuh. Casts and epilogues use it.
#pragma once

#include "config.cuh"

namespace deep_tile::ptx {

// Selects four bytes out of x (0 to 3) and y (4 to 7) by the selector's four low nibbles, which must be below 8:
// "prmt". __byte_perm also masks the nibbles, one instruction more.
__device__ __forceinline__ u32 prmt(u32 x, u32 y, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
    return bytes;
}

__device__ __forceinline__ float cvt_f32_f16(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// Converts two floats to packed BF16, round to nearest even; `low` in bits 0 to 15.
__device__ __forceinline__ u32 cvt_rn_bf16x2(float high, float low) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Converts two floats to packed FP16, round to nearest even; infinity beyond 65504.
__device__ __forceinline__ u32 cvt_rn_f16x2(float high, float low) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Adds two pairs of 16-bit numbers, rounded to nearest even.
__device__ __forceinline__ u32 add_rn_bf16x2(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ u32 add_rn_f16x2(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// Minimum and maximum; NaN if either is: "min" and "max" with .NaN.
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

// Computes 2^x within 2 units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float ex2_approx(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// Computes 1 / x within 1 unit in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float rcp_approx(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
}

}  // namespace deep_tile::ptx
