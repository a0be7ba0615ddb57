// How the barriers of a block come to be, and how all warps learn that they are there: what a launch begins with.
#pragma once

#include "memory.cuh"
#include "pipeline.cuh"

namespace deep_tile {

// The operands' producer makes the barriers that its first requests need, and requests them at once: caches are cold,
// instruction caches included, and every step counts. The others are math warp 0's to make, meanwhile. A first request
// left after 1500 to 2300 clocks when other things came before it, after 1300 to 1450 with a division and two branches
// for the tile and its maps on the way, and now leaves after 800 to 1200 (H200, 2026-11-22; docs/performance.md, "Of a
// launch"). By one thread, in loops that the compiler unrolls: with a thread for each barrier the warp is walked lane by
// lane.
template <GemmConfig config>
__device__ __forceinline__ void initialize_full_barriers(SharedStorage<config>& smem) {
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.full[stage]), 1 + (config.has_scales() ? warp_threads : 0));
        }
        if constexpr (config.resident_b()) {
#pragma unroll
            for (int slot = 0; slot < config.b_slots; ++slot) {
                ptx::mbarrier_init(ptx::smem_address(&smem.resident.full[slot]), 1);
            }
        }
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();  // TMA completes them too, and this thread asks it to at once
    }
    __syncwarp();
}

template <GemmConfig config>
__device__ __forceinline__ void initialize_other_barriers(SharedStorage<config>& smem) {
    constexpr int math_warps = config.math_warpgroups * warpgroup_threads / warp_threads;
    constexpr int peers = config.multicast() ? 1 : 0;
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.empty[stage]), math_warps * (warp_threads + peers));
        }
        if constexpr (config.resident_b()) {
#pragma unroll
            for (int slot = 0; slot < config.b_slots; ++slot) {
                ptx::mbarrier_init(ptx::smem_address(&smem.resident.empty[slot]), math_warps * warp_threads);
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

// By the operands' producer: the barriers that it has made are ready to use.
template <GemmConfig config>
__device__ __forceinline__ void announce_full_barriers() {
    if constexpr (config.cluster() == 1) {
        ptx::bar_arrive(all_barrier, config.threads);
    } else {
        ptx::barrier_cluster_arrive_relaxed();
    }
}

// Until the barriers of this block, and of the whole cluster if there is one, are ready to use. The producer of the
// operands, which has announced its own, waits for math warp 0 alone: not for others that only want to use them.
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
