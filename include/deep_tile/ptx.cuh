// PTX for threads: identity, synchronisation, WGMMA control. One function per PTX instruction, named after its
// mnemonic.
//
// Inline assembly lives here, in memory.cuh (data movement), in arithmetic.cuh (computation), in the generated wgmma
// and, for casts only, in formats.cuh. Shared-memory addresses are 32-bit (`smem_address`). Quoted sections belong to
// the PTX ISA 9.0 manual, "Instruction Set".
#pragma once

#include "config.cuh"

namespace deep_tile::ptx {

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Returns the same value, hidden from NVRTC; no instruction.
__device__ __forceinline__ u64 opaque(u64 value) {
    asm("" : "+l"(value));
    return value;
}

__device__ __forceinline__ int opaque(int value) {
    asm("" : "+r"(value));
    return value;
}

// Nanoseconds, the same on all SMs: "Special Registers: %globaltimer".
__device__ __forceinline__ u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Aborts the launch, and with it the context, with an error: "trap".
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// Zero, unknown to the compiler: a CTA has at most 1024 threads.
__device__ __forceinline__ u32 opaque_zero() { return threadIdx.x / 1024; }

// Maps `smem` in this CTA to the same address in CTA `cta_rank` of the cluster: "mapa".
__device__ __forceinline__ u32 mapa(u32 smem, u32 cta_rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem), "r"(cta_rank));
    return remote;
}

// mbarrier: "Parallel Synchronization and Communication Instructions: mbarrier".

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier, bool predicate = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(barrier), "r"(static_cast<u32>(predicate))
        : "memory");
}

// Arrives without .release.cluster on purpose: that spelling compiles to MEMBAR.ALL.GPU and cost 40 % (H200,
// 2026-11-21). The protected slot, about to be refilled, was read by wgmma and ld.shared that have completed by then.
// `predicate` replaces a branch, after which the compiler would take the warp for divergent.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 remote_barrier, bool predicate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
        "}\n" ::"r"(remote_barrier), "r"(static_cast<u32>(predicate))
        : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Clusters: "barrier.cluster". Relaxed: other spellings are MEMBAR.ALL.GPU, and fence_mbarrier_init is enough.

__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Elects one lane in a converged warp, always the same: "elect.sync". Unlike `lane == 0` it leaves the branch uniform
// for the compiler.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(elected));
    return elected;
}

// Named barrier among the `threads` threads that use the same id: "bar, barrier".
__device__ __forceinline__ void bar_sync(u32 id, u32 threads, bool predicate = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p bar.sync %0, %1;\n"
        "}\n" ::"r"(id), "r"(threads), "r"(static_cast<u32>(predicate))
        : "memory");
}

// Arrives at a named barrier without waiting for it.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads, bool predicate = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p bar.arrive %0, %1;\n"
        "}\n" ::"r"(id), "r"(threads), "r"(static_cast<u32>(predicate))
        : "memory");
}

// Warpgroup matrix multiply: "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group".

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Registers per thread in the calling warpgroup: "setmaxnreg".

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Programmatic dependent launch: "griddepcontrol". Both do nothing in a kernel launched without it.

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace deep_tile::ptx
