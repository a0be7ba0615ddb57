// A logits kernel's loader, which fetches tasks and keys, and the warps that write -infinity elsewhere.
#pragma once

#include "head_sums.cuh"

namespace deep_tile {

constexpr int fill_warps = 3;
constexpr int fill_columns = 4096;  // columns that a warp fills at once

// Writes a task (without tiles: the last one) and requests its data.
template <LogitsConfig config>
__device__ __forceinline__ void write_task(const LogitsParams& params, LogitsStorage<config>& smem, int slot,
                                           const ShareWalk<config>& walk, bool is_last) {
    const u32 full = ptx::smem_address(&smem.task_full[slot]);
    auto& task = smem.tasks[slot];
    const int lane = threadIdx.x % warp_threads;
    if (lane < config.block_queries) task.keys[lane] = walk.keys;
    if (ptx::elect_sync()) task.tiles = is_last ? Span{0, 0} : walk.tiles, task.row = walk.queries.row;
    ptx::mbarrier_arrive(full);
#pragma unroll 4
    for (int first = 0; first < config.block_queries * config.heads; first += warp_threads) {  // no branch, as in ptx.cuh
        const int i = first + lane, row = walk.queries.row + i / config.heads, head = i % config.heads;
        const bool exists = !is_last && row < walk.queries.end && head < params.heads;
        ptx::cp_async(ptx::smem_address(&task.weights[0][i]), params.weights + (exists ? row * params.weights_stride + head : 0),
                      exists);
    }
    ptx::cp_async_mbarrier_arrive_noinc(full);
    if (ptx::elect_sync()) {
        ptx::mbarrier_arrive_expect_tx(full, is_last ? 0 : config.query_groups() * config.query_bytes());
#pragma unroll
        for (int group = 0; group < (is_last ? 0 : config.query_groups()); ++group) {
            ptx::cp_async_bulk_tensor_load(ptx::smem_address(smem.queries[slot][group]), params.q_map, 0, 0,
                                           walk.queries.row + group * config.queries, full);
        }
    }
    __syncwarp();
}

// Page numbers of a sequence's tiles: each lane holds one of 32, and one of the next 32, in flight.
template <LogitsConfig config>
class Pages {
   public:
    __device__ __forceinline__ Pages(const LogitsParams& params, const QueryBlock& queries, int first)
        : params_(params), row_(params.table + queries.batch * params.table_stride), first_(first) {
        next_ = read(first);
    }

    // Returns a tile's page. Callers ask for consecutive tiles, from the first one on.
    __device__ __forceinline__ int page(int tile) {
        const int lane = (tile - first_) % warp_threads;
        if (lane == 0) {
            pages_ = next_;
            next_ = read(tile + warp_threads);
        }
        return __shfl_sync(~0u, pages_, lane);
    }

   private:
    __device__ __forceinline__ int read(int tile) const {
        return row_[min(tile + static_cast<int>(threadIdx.x % warp_threads), params_.table_columns - 1)];
    }

    const LogitsParams& params_;
    const int* row_;
    const int first_;
    int pages_ = 0, next_;
};

// Contiguous keys.
template <LogitsConfig config>
struct NoPages {
    __device__ __forceinline__ NoPages(const LogitsParams&, const QueryBlock&, int) {}
    __device__ __forceinline__ int page(int) const { return 0; }
};

template <LogitsConfig config>
__device__ __forceinline__ void load(const LogitsParams& params, LogitsStorage<config>& smem) {
    using PagesOf = typename Conditional<config.paged, Pages<config>, NoPages<config>>::type;
    ShareWalk<config> walk(params, smem.share);
    PipelineState<config.stages> state;
    PipelineState<task_slots> slot;
    while (true) {
        const bool more = walk.next();
        wait(smem.task_empty[slot.stage], slot.phase ^ 1);
        write_task<config>(params, smem, slot.stage, walk, !more);
        if (!more) return;
        slot.advance();
        PagesOf pages(params, walk.queries, walk.tiles.begin);
#pragma unroll 1
        for (int tile = walk.tiles.begin; tile < walk.tiles.end; ++tile, state.advance()) {
            const int page = pages.page(tile);  // TMA loads zeros for a page outside the cache
            const int key = config.paged ? 0 : tile * key_tile;
            wait(smem.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) {
                const u32 full = ptx::smem_address(&smem.full[state.stage]);
                ptx::mbarrier_arrive_expect_tx(full, config.tile_bytes() + sizeof smem.scales[0]);
                ptx::cp_async_bulk_tensor_load(ptx::smem_address(smem.keys[state.stage]), params.keys_map, 0, key, page, full);
                ptx::cp_async_bulk_tensor_load(ptx::smem_address(smem.scales[state.stage]), params.scales_map, key, page, full);
            }
            __syncwarp();
        }
    }
}

// Fills columns [begin, end) in a row, by a warp, in 16-byte vectors where possible.
template <typename Out>
__device__ __forceinline__ void fill(typename Out::Bits* row, int begin, int end) {
    constexpr int per_vector = 16 / sizeof(typename Out::Bits);
    const int lane = threadIdx.x % warp_threads;
    const int misplaced = static_cast<int>(reinterpret_cast<u64>(row + begin) % 16 / sizeof(typename Out::Bits));
    const int first = min(end, begin + (per_vector - misplaced) % per_vector);
    const int last = first + max(end - first, 0) / per_vector * per_vector;
    if (begin + lane < first) row[begin + lane] = Out::least();
    constexpr u32 bits = Out::minus_infinity;
#pragma unroll 1
    for (int at = first + lane * per_vector; at < last; at += warp_threads * per_vector) {
        *reinterpret_cast<uint4*>(row + at) = {bits, bits, bits, bits};
    }
    if (last + lane < end) row[last + lane] = Out::least();
}

// Writes -infinity wherever no logit is stored, by warps that do nothing else.
template <LogitsConfig config>
__device__ __forceinline__ void fill_outside(const LogitsParams& params, int warp) {
    const int pieces = ceil_div(params.columns, fill_columns);
    const i64 all = i64(params.rows) * pieces;
#pragma unroll 1
    for (i64 piece = blockIdx.x * fill_warps + warp; piece < all; piece += gridDim.x * fill_warps) {
        const int row = static_cast<int>(piece / pieces), begin = static_cast<int>(piece % pieces) * fill_columns;
        const int end = min(begin + fill_columns, params.columns);
        Span keys = keys_of<config>(params, row);
        if (params.compressed) keys = {0, keys.size()};
        auto* out = out_row<config>(params, row);
        fill<Logit<config.out_format>>(out, begin, min(end, keys.begin));
        fill<Logit<config.out_format>>(out, max(begin, keys.end), end);
    }
}

}  // namespace deep_tile
