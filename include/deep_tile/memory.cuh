// PTX for data movement: TMA, asynchronous copies, loads and stores. One function per instruction, as in ptx.cuh.
#pragma once

#include "ptx.cuh"

namespace deep_tile::ptx {

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

// Load through a three-dimensional map.
__device__ __forceinline__ void cp_async_bulk_tensor_load(u32 smem, const TensorMap& map, int inner, int middle,
                                                          int outer, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(smem), "l"(&map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier)
        : "memory");
}

// Multicast load: lands, and completes on the mbarrier, at the same offset in each CTA of `cta_mask`.
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

// TMA store through a three-dimensional map.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, int inner, int middle, int outer, u32 smem) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(&map), "r"(inner), "r"(middle), "r"(outer), "r"(smem)
                 : "memory");
}

// TMA reduction: adds to the numbers in place, in the map's own format: "cp.reduce.async.bulk.tensor".
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_add(const TensorMap& map, int inner, int outer, u32 smem) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(inner), "r"(outer), "r"(smem)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_add(const TensorMap& map, int inner, int middle, int outer,
                                                                u32 smem) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(&map), "r"(inner), "r"(middle), "r"(outer), "r"(smem)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `pending` stores from this thread still have to read their shared memory.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Makes ordinary shared-memory writes visible to TMA. Without .shared::cta it is a MEMBAR.ALL.GPU.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Ordinary asynchronous copies: "cp.async", "cp.async.mbarrier.arrive".

// Copies four bytes, or zeros if not `valid`; `global` must be readable either way.
__device__ __forceinline__ void cp_async(u32 smem, const float* global, bool valid) {
    asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}

// Arrives once every copy issued so far by this thread has landed; counts as one pending arrival.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Stores sixteen bytes in another CTA in the cluster, counted by its mbarrier: "st.async".
__device__ __forceinline__ void st_async(u32 remote, const float* values, u32 remote_barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        ::"r"(remote), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(remote_barrier)
        : "memory");
}

// Stores four bytes in another CTA in the cluster, counted by its mbarrier.
__device__ __forceinline__ void st_async(u32 remote, u32 value, u32 remote_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(remote), "r"(value), "r"(remote_barrier)
                 : "memory");
}

// Ordinary loads and stores.

// Stores four 8x8 matrices with 16-bit elements, each transposed or not; lane l gives the address of row l % 8 in
// stored matrix l / 8.
template <bool transposed>
__device__ __forceinline__ void stmatrix_x4(u32 smem, u32 r0, u32 r1, u32 r2, u32 r3) {
    if constexpr (transposed) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                     : "memory");
    }
}

__device__ __forceinline__ uint4 ld_shared_v4(u32 smem) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint2 ld_shared_v2(u32 smem) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(smem) : "memory");
    return value;
}

// Loads in place: the compiler may not move the load to the use of its value.
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

// Stores if `wanted`, without a branch, after which ptxas would take the warp for divergent.
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

__device__ __forceinline__ void st_global(u16* address, u16 bits, bool wanted) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %2, 0;\n"
        "@wanted st.global.u16 [%0], %1;\n"
        "}" ::"l"(address),
        "h"(bits), "r"(u32{wanted})
        : "memory");
}

__device__ __forceinline__ void st_shared_v2(u32 smem, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void st_shared_v4(u32 smem, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

__device__ __forceinline__ void st_shared(u32 smem, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared(u32 smem, u32 bits) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(bits) : "memory");
}

__device__ __forceinline__ void st_shared(u32 smem, u16 bits) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(smem), "h"(bits) : "memory");
}

// Loads 16 or 32 bits.
template <typename Bits>
__device__ __forceinline__ Bits ld_shared(u32 smem) {
    Bits value;
    if constexpr (sizeof(Bits) == 2) {
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(smem) : "memory");
    } else {
        static_assert(sizeof(Bits) == 4, "numbers of a size without an instruction here");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    }
    return value;
}

}  // namespace deep_tile::ptx
