// LogitsConfig, the indexer kernels' template argument, and their shared memory. Python derives every number
// (deep_tile/codegen.py, LogitsKernel), as for GemmConfig.
#pragma once

#include "mma.cuh"

namespace deep_tile {

constexpr int key_tile = 64;  // keys per tile: WGMMA rows, and keys per page

struct LogitsConfig {
    int head_dim;       // bytes per row in q and keys, and their swizzle span
    int heads;          // per query in shared memory: q's heads, then zeros
    int queries;        // per math warpgroup
    int block_queries;  // queries that share key tiles
    int parts;            // of a warpgroup's queries: one is multiplied while the other is summed
    int stages;
    int warpgroups;
    bool splits_queries;  // warpgroups have their own queries; else they alternate in tiles
    bool paged;           // keys are in cache pages
    Format out_format;
    int threads, math_registers, producer_registers;
    int smem_bytes;

    constexpr int mma_n() const { return queries * heads / parts; }
    constexpr int part_queries() const { return queries / parts; }
    constexpr int query_groups() const { return splits_queries ? warpgroups : 1; }
    constexpr int query_bytes() const { return queries * heads * head_dim; }  // per warpgroup
    constexpr int tile_bytes() const { return key_tile * head_dim; }
};

// A CTA's work: `tiles` key tiles in total, from tile `skipped` of query block `block` on.
struct Share {
    int block, skipped, tiles;
};

// Keys or tiles [begin, end).
struct Span {
    int begin, end;

    __device__ __forceinline__ int size() const { return end > begin ? end - begin : 0; }
};

// The math warpgroups' next task: key tiles for a query block; none means no more tasks.
template <LogitsConfig config>
struct alignas(16) Task {
    Span tiles;
    int row;  // the block's first query in q
    int unused;
    Span keys[config.block_queries];  // none for queries beyond the block's end
    float weights[config.block_queries][config.heads];
};

constexpr int task_slots = 2;

// Shared memory. Operand tiles start at multiples of 1024 bytes, the 128-byte swizzle's period.
template <LogitsConfig config>
struct alignas(1024) LogitsStorage {
    alignas(1024) u8 queries[task_slots][config.query_groups()][config.query_bytes()];
    alignas(1024) u8 keys[config.stages][config.tile_bytes()];
    alignas(128) float scales[config.stages][key_tile];
    Task<config> tasks[task_slots];
    u64 full[config.stages];
    u64 empty[config.stages];
    u64 task_full[task_slots];
    u64 task_empty[task_slots];
    u32 sums[config.threads / warp_threads];
    u32 all_tiles;
    Share share;
};

}  // namespace deep_tile
