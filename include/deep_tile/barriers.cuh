// Mbarrier setup, which begins a launch: how mbarriers are made, and how all warps learn that they are ready.
#pragma once

#include "memory.cuh"
#include "pipeline.cuh"

namespace deep_tile {

// Arrivals that fill a slot: TMA's, or those of the converter warps.
template <GemmConfig config>
constexpr int slot_writers = config.packed_b() ? config.converter_warps * config.slot_lanes() : 1;

// Makes the full mbarriers. The operand warp does so, because its first requests need them and follow at once: caches
// are cold, instruction caches included, and every step counts. Math warp 0 makes the others meanwhile. A first request
// left after 1500 to 2300 clocks behind other work, after 1300 to 1450 with a division and two branches for the tile
// and its maps on the way, and leaves after 800 to 1200 in this order (H200, 2026-11-22; docs/performance.md, "Of a
// launch"). One thread runs unrolled loops: with a thread per barrier the warp is walked lane by lane.
template <GemmConfig config>
__device__ __forceinline__ void initialize_full_barriers(SharedStorage<config>& smem) {
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.full[stage]), 1 + (config.has_scales() ? warp_threads : 0));
        }
        if constexpr (config.has_slots()) {
#pragma unroll
            for (int slot = 0; slot < config.b_slots; ++slot) {
                ptx::mbarrier_init(ptx::smem_address(&smem.slots.full[slot]), slot_writers<config>);
            }
        }
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();  // TMA completes them too, and this thread issues TMA at once
    }
    __syncwarp();
}

template <GemmConfig config>
__device__ __forceinline__ void initialize_other_barriers(SharedStorage<config>& smem) {
    constexpr int math_warps = config.math_warpgroups * warpgroup_threads / warp_threads;
    constexpr int readers = config.from_registers ? config.converter_warps : math_warps;  // of stages
    constexpr int peers = config.peers();
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.empty[stage]), readers * (warp_threads + peers));
        }
        if constexpr (config.packed_b()) {
#pragma unroll
            for (int stage = 0; stage < config.unit_stages; ++stage) {
                ptx::mbarrier_init(ptx::smem_address(&smem.units.empty[stage]), config.converter_warps * warp_threads);
            }
        }
        if constexpr (config.has_slots()) {
#pragma unroll
            for (int slot = 0; slot < config.b_slots; ++slot) {
                ptx::mbarrier_init(ptx::smem_address(&smem.slots.empty[slot]),
                                   math_warps * config.slot_lanes());
            }
        }
#pragma unroll
        for (int i = 0; config.split_k > 1 && i < config.math_warpgroups; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&smem.partial_full[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&smem.partial_empty[i]), 4 * (config.split_k - 1));
        }
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    if constexpr (config.cluster() == 1) ptx::bar_arrive(others_barrier, 2 * warp_threads);
}

// Announces, from the operand warp, that the full mbarriers are ready to use.
template <GemmConfig config>
__device__ __forceinline__ void announce_full_barriers() {
    if constexpr (config.cluster() == 1) {
        ptx::bar_arrive(all_barrier, config.threads);
    } else {
        ptx::barrier_cluster_arrive_relaxed();
    }
}

// Waits until the mbarriers in this CTA, and in its cluster if any, are ready. The operand warp, which
// has announced its own, waits for math warp 0 alone, not for warps that only use mbarriers.
template <GemmConfig config>
__device__ __forceinline__ void await_barriers(bool announced) {
    if constexpr (config.cluster() > 1) {
        if (!announced) ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait();
    } else if (announced) {
        ptx::bar_sync(others_barrier, 2 * warp_threads);
    } else {
        ptx::bar_sync(all_barrier, config.threads);
    }
}

}  // namespace deep_tile
