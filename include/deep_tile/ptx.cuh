// One function per PTX instruction, named after its mnemonic. Inline assembly lives here, in arithmetic.cuh, in the
// generated wgmma and, for what only the casts use, in formats.cuh and quantize.cuh.
//
// Shared-memory addresses are 32-bit (`smem_address`). Sections are of the PTX ISA 9.0 manual, "Instruction Set".
#pragma once

#include "config.cuh"

namespace deep_tile::ptx {

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same value, hidden from NVRTC; no instruction.
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

// Ends the launch, and with it the context, with an error: "trap".
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// Zero, which the compiler does not know: a thread block has no more than 1024 threads.
__device__ __forceinline__ u32 opaque_zero() { return threadIdx.x / 1024; }

// The address in block `cta_rank` of the cluster that corresponds to `smem` in this one: "mapa".
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

// Without .release.cluster on purpose: that spelling compiles to MEMBAR.ALL.GPU and cost 40 % (H200, 2026-11-21).
// What it protects, a slot being refilled, was read by wgmma and ld.shared that have completed by then.
// `predicate` and not a branch, after which the compiler would take the warp for divergent.
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

// Clusters: "barrier.cluster". Relaxed: the other spellings are MEMBAR.ALL.GPU, and the fence above is enough.

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

// True in one lane of a converged warp, always the same: "elect.sync". Unlike `lane == 0` it leaves the branch uniform
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

// Barrier among the `threads` threads that name the same id: "bar, barrier".
__device__ __forceinline__ void bar_sync(u32 id, u32 threads, bool predicate = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p bar.sync %0, %1;\n"
        "}\n" ::"r"(id), "r"(threads), "r"(static_cast<u32>(predicate))
        : "memory");
}

// Counts as reaching that barrier, without waiting for it.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads, bool predicate = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p bar.arrive %0, %1;\n"
        "}\n" ::"r"(id), "r"(threads), "r"(static_cast<u32>(predicate))
        : "memory");
}

// Tensor Memory Accelerator: "cp.async.bulk.tensor", "prefetch", bulk groups.

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_load(u32 smem, const TensorMap& map, int inner, int outer,
                                                          u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(smem), "l"(&map), "r"(inner), "r"(outer), "r"(barrier)
        : "memory");
}

// Lands at the same offset, and completes on the barrier at the same offset, in every block of `cta_mask`.
__device__ __forceinline__ void cp_async_bulk_tensor_load_multicast(u32 smem, const TensorMap& map, int inner,
                                                                    int outer, u32 barrier, u16 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(smem), "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "h"(cta_mask)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(smem), "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const TensorMap& map, int inner, int outer) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(inner), "r"(outer)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, int inner, int outer, u32 smem) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(inner), "r"(outer), "r"(smem)
                 : "memory");
}

// The same, added to the FP32 numbers that are there: "cp.reduce.async.bulk.tensor".
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_add(const TensorMap& map, int inner, int outer, u32 smem) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(inner), "r"(outer), "r"(smem)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most `pending` of this thread's stores still have to read their shared memory.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Makes ordinary shared-memory writes visible to TMA. Without .shared::cta it is a MEMBAR.ALL.GPU.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Ordinary asynchronous copies: "cp.async", "cp.async.mbarrier.arrive".

// Four bytes, or zeros when not `valid`; `global` must be readable either way.
__device__ __forceinline__ void cp_async(u32 smem, const float* global, bool valid) {
    asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}

// Arrives once every copy that this thread has issued so far has landed; counts as one of the barrier's arrivals.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Sixteen bytes into another block of the cluster, counted by the barrier beside them: "st.async".
__device__ __forceinline__ void st_async(u32 remote, const float* values, u32 remote_barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        ::"r"(remote), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(remote_barrier)
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

// Registers per thread of the calling warpgroup: "setmaxnreg".

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Four 8x8 matrices of 16-bit elements from registers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 smem, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(u32 smem) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}

// Where it stands: a load that the compiler may not move to where its value is needed.
__device__ __forceinline__ float ld_global(const float* address) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 ld_global(const u32* address) {
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u16 ld_global(const u16* address) {
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void ld_global(const float* address, float (&values)[1]) {
    values[0] = ld_global(address);
}

__device__ __forceinline__ void ld_global(const float* address, float (&values)[2]) {
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(values[0]), "=f"(values[1]) : "l"(address) : "memory");
}

__device__ __forceinline__ void ld_global(const float* address, float (&values)[4]) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "l"(address)
                 : "memory");
}

// Where `wanted`, without a branch, after which ptxas would take a warp's threads for apart.
__device__ __forceinline__ void st_global(float* address, float value, bool wanted) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %2, 0;\n"
        "@wanted st.global.f32 [%0], %1;\n"
        "}" ::"l"(address),
        "f"(value), "r"(u32{wanted})
        : "memory");
}

__device__ __forceinline__ void st_shared_v2(u32 smem, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void st_shared(u32 smem, u16 bits) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(smem), "h"(bits) : "memory");
}

// Bits of 16 or 32.
template <typename Bits>
__device__ __forceinline__ Bits ld_shared(u32 smem) {
    Bits value;
    if constexpr (sizeof(Bits) == 2) {
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(smem) : "memory");
    } else {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    }
    return value;
}

// Two floats to packed BF16, round to nearest even; `low` in bits 0 to 15.
__device__ __forceinline__ u32 cvt_rn_bf16x2(float high, float low) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The same to FP16; beyond 65504 it is infinity.
__device__ __forceinline__ u32 cvt_rn_f16x2(float high, float low) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Programmatic dependent launch: "griddepcontrol". Both do nothing when the kernel was launched without it.

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace deep_tile::ptx
