// Activations in FP32, applied as accumulators are written: to each, or to a pair within a thread.
#pragma once

#include "arithmetic.cuh"

namespace deep_tile {

// Multiplies x by the logistic function: x / (1 + 2^exponent).
__device__ __forceinline__ float times_logistic(float x, float exponent) {
    return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(exponent));
}

// GELU by erf: x or 0, less |x| times the normal distribution's tail, a polynomial times exp(-x^2 / 2): Abramowitz and
// Stegun, 7.1.26, good to 7.5e-8. CUDA's erff takes twice the instructions. The limit is for infinity.
__device__ __forceinline__ float gelu(float x) {
    const float size = fminf(fabsf(x), 64.0f);
    const float t = ptx::rcp_approx(fmaf(size, 0.3275911f * 0.70710678f, 1.0f));
    const float power = t * ptx::ex2_approx(size * size * (-0.5f * 1.44269504f));
    const float half = fmaf(fmaf(fmaf(fmaf(0.5307027145f, t, -0.7265760135f), t, 0.7107068705f), t, -0.142248368f), t,
                            0.127414796f);
    return fmaf(-size, power * half, ptx::max_nan(x, 0.0f));
}

// Computes an activation in FP32; NaN comes through.
template <Activation activation>
__device__ __forceinline__ float activated(float x) {
    constexpr float log2_e = 1.44269504f, slope = 2 * 0.79788456f * log2_e;  // for the tanh form, sqrt(2 / pi)
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

// Activates a thread's sums for 16 columns of `out`, in two rows, in WGMMA's order. For swiglu, gate and up columns
// alternate by eight: four sums for gates, the next four for up.
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
