// What becomes of a tile's sums as they are written, in FP32: an activation of each, or of two, which one thread holds.
#pragma once

#include "arithmetic.cuh"

namespace deep_tile {

// x times the logistic function of what 2^-exponent is the odds against.
__device__ __forceinline__ float times_logistic(float x, float exponent) {
    return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(exponent));
}

// x times the normal distribution of x: x or 0, less |x| times the tail, which is a polynomial times exp(-x^2 / 2): Abramowitz
// and Stegun, 7.1.26, good to 7.5e-8. CUDA's erff takes twice the instructions. The limit is for infinity.
__device__ __forceinline__ float gelu(float x) {
    const float size = fminf(fabsf(x), 64.0f);
    const float t = ptx::rcp_approx(fmaf(size, 0.3275911f * 0.70710678f, 1.0f));
    const float power = t * ptx::ex2_approx(size * size * (-0.5f * 1.44269504f));
    const float half = fmaf(fmaf(fmaf(fmaf(0.5307027145f, t, -0.7265760135f), t, 0.7107068705f), t, -0.142248368f), t,
                            0.127414796f);
    return fmaf(-size, power * half, ptx::max_nan(x, 0.0f));
}

// In FP32; NaN comes through.
template <Activation activation>
__device__ __forceinline__ float activated(float x) {
    constexpr float log2_e = 1.44269504f, slope = 2 * 0.79788456f * log2_e;  // of the tanh form, sqrt(2 / pi)
    if constexpr (activation == Activation::relu) {
        return ptx::max_nan(x, 0.0f);
    } else if constexpr (activation == Activation::gelu) {
        return gelu(x);
    } else if constexpr (activation == Activation::gelu_tanh) {
        return times_logistic(x, x * fmaf(x * x, -0.044715f * slope, -slope));
    } else {
        static_assert(activation == Activation::silu, "an activation without code");
        return times_logistic(x, x * -log2_e);
    }
}

// Of the sums of a thread that 16 columns of `out` are made of, in two rows, in the order in which WGMMA has them. Of swiglu
// gates and what they let through, by turns in eight columns each: four sums, and the next four.
template <GemmConfig config>
__device__ __forceinline__ void activate(float (&results)[8], const float* sums) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if constexpr (config.activation == Activation::swiglu) {
            const float* const gate = sums + i / 4 * 8 + i % 4;
            results[i] = activated<Activation::silu>(gate[0]) * gate[4];
        } else {
            results[i] = activated<config.activation>(sums[i]);
        }
    }
}

}  // namespace deep_tile
