// Key ranges per query for the indexer's logits, and work distribution over the grid (logits.cuh).
//
// A query block needs the key tiles from the least start to the greatest end in its queries' ranges. All blocks' tiles,
// concatenated, are cut into equal shares, one per CTA. So long and short contexts balance for any device-side lists,
// without a scheduling kernel.
#pragma once

#include "logits_config.cuh"
#include "streaming.cuh"
#include "tiles.cuh"

namespace deep_tile {

__device__ __forceinline__ int clamped(int value, int least, int most) { return min(max(value, least), most); }

// Key range of a query, by its row in q, clamped to the existing keys.
template <LogitsConfig config>
__device__ __forceinline__ Span keys_of(const LogitsParams& params, int row) {
    if constexpr (config.paged) {
        if (params.own_lengths) return {0, clamped(params.ends[row], 0, params.keys)};
        const int batch = row / params.batch_rows;
        const int later = (batch + 1) * params.batch_rows - 1 - row;  // later queries in the sequence
        return {0, clamped(max(params.ends[batch], 0) - later, 0, params.keys)};
    } else {
        const int begin = clamped(params.begins[row], 0, params.keys);
        const int most = params.compressed ? min(params.keys - begin, params.columns) : params.keys - begin;
        return {begin, begin + clamped(clamped(params.ends[row], 0, params.keys) - begin, 0, most)};
    }
}

// A query block, which shares key tiles: rows in q, and their sequence.
struct QueryBlock {
    int row, end, batch;
};

template <LogitsConfig config>
__device__ __forceinline__ QueryBlock query_block(const LogitsParams& params, int block) {
    const int batch = block / params.batch_blocks, part = block % params.batch_blocks;
    const int row = batch * params.batch_rows + part * config.block_queries;
    return {row, min(row + config.block_queries, (batch + 1) * params.batch_rows), batch};
}

// Tiles that hold the keys from `first` up to `end`.
__device__ __forceinline__ Span tiles_of(int first, int end) {
    return end > first ? Span{first / key_tile, ceil_div(end, key_tile)} : Span{0, 0};
}

constexpr int no_key = 0x7fffffff;

// How many tiles a block needs, for one thread.
template <LogitsConfig config>
__device__ __forceinline__ int count_tiles(const LogitsParams& params, int block) {
    const QueryBlock queries = query_block<config>(params, block);
    int first = no_key, end = 0;
#pragma unroll
    for (int i = 0; i < config.block_queries; ++i) {
        if (queries.row + i >= queries.end) continue;
        const Span keys = keys_of<config>(params, queries.row + i);
        if (keys.size() == 0) continue;
        first = min(first, keys.begin);
        end = max(end, keys.end);
    }
    return tiles_of(first, end).size();
}

// Cuts all blocks' tiles into shares, with all threads in the CTA.
template <LogitsConfig config>
__device__ __forceinline__ void find_share(const LogitsParams& params, LogitsStorage<config>& smem) {
    const int blocks_per_thread = ceil_div(params.blocks, config.threads);
    const int first = min(static_cast<int>(threadIdx.x) * blocks_per_thread, params.blocks);
    const int last = min(first + blocks_per_thread, params.blocks);
    u32 own = 0;
#pragma unroll 1
    for (int block = first; block < last; ++block) own += count_tiles<config>(params, block);
    u32 before = sum_before(own, smem.sums);
    if (threadIdx.x == config.threads - 1) smem.all_tiles = before + own;
    if (threadIdx.x == 0) smem.share = {0, 0, 0};
    __syncthreads();
    const u64 all = smem.all_tiles;
    const u32 begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    if (begin < end && before <= begin && begin < before + own) {
        int block = first;
        while (true) {
            const u32 tiles = count_tiles<config>(params, block);
            if (begin < before + tiles) break;
            before += tiles;
            ++block;
        }
        smem.share = {block, static_cast<int>(begin - before), static_cast<int>(end - begin)};
    }
    __syncthreads();
}

// A warp's walk over a share, block by block.
template <LogitsConfig config>
class ShareWalk {
   public:
    __device__ __forceinline__ ShareWalk(const LogitsParams& params, const Share& share)
        : params_(params),
          next_(__shfl_sync(~0u, share.block, 0)),
          skipped_(__shfl_sync(~0u, share.skipped, 0)),
          left_(__shfl_sync(~0u, share.tiles, 0)) {}

    // Moves to the next block that has tiles in the share; false if there is none.
    __device__ __forceinline__ bool next() {
        while (left_ > 0) {
            queries = query_block<config>(params_, next_++);
            tiles = block_tiles();
            tiles.begin += skipped_;
            skipped_ = 0;
            tiles.end = min(tiles.end, tiles.begin + left_);
            left_ -= tiles.size();
            if (tiles.size() > 0) return true;
        }
        return false;
    }

    QueryBlock queries;
    Span keys;   // key range of the lane's query
    Span tiles;  // key tiles of this block, in this share

   private:
    // Tiles that the block needs, as a warp-uniform value.
    __device__ __forceinline__ Span block_tiles() {
        static_assert(config.block_queries <= warp_threads, "a lane for each query");
        const int row = queries.row + static_cast<int>(threadIdx.x % warp_threads);
        keys = {0, 0};
        if (row < queries.end) keys = keys_of<config>(params_, row);
        const bool any = keys.size() > 0;
        return tiles_of(__reduce_min_sync(~0u, any ? keys.begin : no_key), __reduce_max_sync(~0u, any ? keys.end : 0));
    }

    const LogitsParams& params_;
    int next_, skipped_, left_;
};

}  // namespace deep_tile
