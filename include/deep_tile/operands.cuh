// Operand loads: one producer warp has TMA copy boxes into stages.
#pragma once

#include "scales.cuh"
#include "stored_b.cuh"

namespace deep_tile {

// TMA boxes for a tile's operands, or for each part of one that CTAs share. The last tile's boxes hold existing
// rows only, none beyond the matrix: stale shared memory below them yields only rows and columns that are not stored.
// Boxes that overhang the matrix make a K block take up to 1.7 times as long: 128x64 took 94 us at 192x7168x16384, 59
// at 256x7168x16384 (H200, 2026-11-22).
struct OperandBox {
    const TensorMap* map;
    int rows;
};

// TMA boxes for an MN-major operand, as many as there are rows for. A box covers 128 bytes of rows, or a narrower span,
// by 64 elements of K. The matrix's last box of `a` has its rows only, a multiple of 8: full boxes with 8 rows inside
// take up to 1.8 times as long (8x27392x4096, 64x32, H100, 2026-11-26). The last box of `b`, which is rarely cut, is
// full: out-of-bounds rows become zeros. CTAs that share the operand load a part of a box's K each: `rows` is then the
// boxes' rows over the number of sharers.
template <int tile_rows, int unit, int sharers>
__device__ __forceinline__ OperandBox span_boxes(const TensorMap& map, int left) {
    return {&map, min(ceil_div(max(left, 0), unit) * unit, tile_rows) / sharers};
}

// TMA boxes for `a` in a row group, one below the other: as many quarters as hold the group's rows, or one full box.
template <GemmConfig config>
struct QuarterBoxes {
    static constexpr int quarter = config.block_m / 4;
    int all_rows;

    __device__ __forceinline__ bool is_whole() const { return all_rows == config.block_m; }
    __device__ __forceinline__ int rows() const { return is_whole() ? config.block_m : quarter; }
};

// First row that a tile loads of an operand. In a cluster with several rows and columns of CTAs, a tile beyond the matrix
// loads the last tile's rows: a CTA that awaits nothing from a peer could be a round of stages ahead of it, and its
// release would count for another CTA that still reads the stage. In other clusters such a tile loads nothing.
template <GemmConfig config, int tile_rows>
__device__ __forceinline__ int loaded_row(int row, int rows) {
    if constexpr (!config.is_grid()) return row;
    return min(row, static_cast<int>(static_cast<u32>(rows - 1) / tile_rows * tile_rows));
}

template <GemmConfig config>
__device__ __forceinline__ int loaded_a_row(const GemmParams& params, Tile<config> tile) {
    return loaded_row<config, config.block_m>(tile.a_row(), params.m);
}

template <GemmConfig config>
__device__ __forceinline__ int loaded_b_row(const GemmParams& params, Tile<config> tile) {
    return loaded_row<config, config.block_n>(tile.b_row(), params.n);
}

template <GemmConfig config>
using ABoxes = typename Conditional<config.row_groups(), QuarterBoxes<config>, OperandBox>::type;

template <GemmConfig config>
__device__ __forceinline__ ABoxes<config> a_box(const GemmParams& params, Tile<config> tile) {
    if constexpr (config.row_groups()) {
        constexpr int quarter = QuarterBoxes<config>::quarter;
        return {min(ceil_div(tile.end - tile.out, quarter) * quarter, config.block_m)};
    } else if constexpr (config.a_span > 0) {
        const int left = params.m - loaded_a_row<config>(params, tile);
        return span_boxes<config.block_m, 8, config.cluster_n>(params.a_maps[0], left);
    } else {
        const int row = loaded_a_row<config>(params, tile);
        const bool last = row + config.block_m > params.m;
        const bool beyond = config.cluster_m > 1 && row >= params.m;
        return {&params.a_maps[last], beyond ? 0 : last ? params.a_tail_rows : config.block_m / config.cluster_n};
    }
}

template <GemmConfig config>
__device__ __forceinline__ OperandBox b_box(const GemmParams& params, Tile<config> tile) {
    if constexpr (config.b_span > 0) {
        constexpr int unit = config.cuts_b() ? 8 : config.b_span / sizeof(u16);
        const int left = params.n - loaded_b_row<config>(params, tile);
        return span_boxes<config.b_rows, unit, config.cluster_m>(params.b_maps[0], left);
    } else {
        const int column = config.is_grid() ? loaded_b_row<config>(params, tile) : tile.out_column();
        const bool last = column + config.block_n > params.n;
        const bool beyond = config.cluster_n > 1 && column >= params.n;
        return {&params.b_maps[last], beyond ? 0 : last ? params.b_tail_rows : config.block_n / config.cluster_m};
    }
}

// Loads one tile's operands, in one thread; each scale block has its own box. CTAs that share an operand load a part
// each and multicast it to all, or, without multicast, load every part for themselves.
template <GemmConfig config, bool multicast = config.multicast()>
class OperandLoader {
   public:
    __device__ __forceinline__ OperandLoader(const GemmParams& params, SharedStorage<config>& smem, Tile<config> tile)
        : params_(params),
          smem_(smem),
          tile_(tile),
          a_(a_box<config>(params, tile)),
          b_(b_box<config>(params, tile)) {}

    // Loads the tile's K block of `b`, after announcing its bytes: the whole stage's if `b` travels with `a`. `step`
    // counts K blocks over the whole K.
    __device__ __forceinline__ void load_b(int stage, int step) const {
        const u32 barrier = StoredB<config>::full(smem_, stage, step);
        if constexpr (StoredB<config>::travels_with_a) {
            announce(stage, b_.rows * config.cluster_m);
        } else {
            ptx::mbarrier_arrive_expect_tx(barrier, b_.rows * config.k_bytes);
        }
        const Share share{place_.row(), place_.column_mask()};
        u8* const slot = smem_.b[StoredB<config>::slot(stage, step)];
        load<config.b_rows, config.b_span, config.cluster_m, config.cuts_b()>(slot, b_, share, barrier,
                                                                              loaded_b_row<config>(params_, tile_), step);
    }

    // Loads the K block of `a`. Scales that TMA copies go first: behind the operands in TMA's queue they gain nothing.
    __device__ __forceinline__ void load_a(int stage, int step) const {
        if constexpr (!StoredB<config>::travels_with_a) announce(stage, 0);
        if (scales_in_bulk<config>(params_, tile_)) {
            ptx::cp_async_bulk_load(ptx::smem_address(smem_.a_scale[stage][0]),
                                    params_.a_scale + tile_.a_row() + step * params_.a_scale_stride_k, row_scale_bytes,
                                    full(stage));
        }
        if (column_scales_in_bulk<config>(params_, tile_)) {
            ptx::cp_async_bulk_load(ptx::smem_address(smem_.b_scale[stage][0]),
                                    params_.b_scale + tile_.b_row() + step * params_.b_scale_stride_k,
                                    column_scale_bytes, full(stage));
        }
        if constexpr (config.row_groups()) {
            load_quarters(smem_.a[stage], full(stage), step);
        } else {
            const Share share{place_.column(), place_.row_mask()};
            load<config.block_m, config.a_span, config.cluster_n, true>(smem_.a[stage], a_, share, full(stage),
                                                                        loaded_a_row<config>(params_, tile_), step);
        }
    }

    // Prefetches another tile's `b` into L2: nothing beyond the matrix, for which there may be no map.
    __device__ __forceinline__ void prefetch_b(Tile<config> tile, int step) const {
        static_assert(!config.prefetches_b || config.b_span == 0, "b lies along K");
        const OperandBox operand = b_box<config>(params_, tile);
        const int row = loaded_b_row<config>(params_, tile);
        if (operand.rows > 0) ptx::cp_async_bulk_prefetch_tensor(*operand.map, step * config.k_bytes, row);
    }

   private:
    // Which part of a shared operand this CTA loads, and the CTAs that receive it.
    struct Share {
        int part;
        u16 receivers;
    };

    static constexpr u32 row_scale_bytes = config.block_m * sizeof(float);
    static constexpr u32 column_scale_bytes = config.block_n * sizeof(float);

    __device__ __forceinline__ u32 full(int stage) const { return ptx::smem_address(&smem_.full[stage]); }

    // Announces a stage's bytes: rows of both operands, and the scales that TMA copies.
    __device__ __forceinline__ void announce(int stage, int b_rows) const {
        int a_rows;
        if constexpr (config.row_groups()) {
            a_rows = a_.all_rows;
        } else {
            a_rows = a_.rows * config.cluster_n;
        }
        const u32 operands = (a_rows + b_rows) * config.k_bytes;
        const u32 scales = scales_in_bulk<config>(params_, tile_) ? row_scale_bytes : 0;
        const u32 column_scales = column_scales_in_bulk<config>(params_, tile_) ? column_scale_bytes : 0;
        ptx::mbarrier_arrive_expect_tx(full(stage), operands + scales + column_scales);
    }

    __device__ __forceinline__ void load_quarters(u8* tile, u32 barrier, int step) const {
        const TensorMap& map = params_.a_maps[!a_.is_whole()];
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
#pragma unroll 1
            for (int first = 0; first < a_.all_rows; first += a_.rows()) {
                const u32 smem = ptx::smem_address(tile) + (i * config.block_m + first) * k_block_bytes;
                ptx::cp_async_bulk_tensor_load(smem, map, step * config.k_bytes + i * k_block_bytes,
                                               tile_.a_row() + first, barrier);
            }
        }
    }

    template <int tile_rows, int span, int sharers, bool cut>
    __device__ __forceinline__ void load(u8* tile, OperandBox operand, Share share, u32 barrier, int row,
                                         int step) const {
        if constexpr (span > 0) {
            load_spans<tile_rows, span, sharers, cut>(tile, operand, share, barrier, row, step);
        } else {
            load_rows<tile_rows, sharers>(tile, operand, share, barrier, row, step);
        }
    }

    // Loads box by box. Parts of a box are contiguous, since each has its own K. With `cut`, the last box uses the
    // tail map; its K rows have a full box's pitch in shared memory.
    template <int tile_rows, int span, int sharers, bool cut>
    __device__ __forceinline__ void load_spans(u8* tile, OperandBox operand, Share share, u32 barrier, int row,
                                               int step) const {
        constexpr bool multicasts = sharers > 1 && multicast;
        constexpr int box_k = span_k / sharers, box_rows = span / sizeof(u16);
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
#pragma unroll 1
            for (int first = 0; first < operand.rows * sharers; first += box_rows) {
                const TensorMap& map = operand.map[cut && first + box_rows > operand.rows * sharers];
#pragma unroll
                for (int part = 0; part < (multicasts ? 1 : sharers); ++part) {
                    const int k = (multicasts ? share.part : part) * box_k;  // within the K block
                    const u32 smem = ptx::smem_address(tile) + (i * tile_rows + first) * k_block_bytes + k * span;
                    const int at = (row + first) * sizeof(u16);  // maps count rows in bytes
                    const int from = map_k(step * config.block_k + i * span_k + k);
                    request<multicasts>(smem, map, at, from, barrier, share.receivers);
                }
            }
        }
    }

    // K coordinate of a box in an MN-major operand's map: all groups' K is concatenated. A box past its own group's K
    // gets a negative coordinate, for which TMA fills in zeros.
    __device__ __forceinline__ int map_k(int k) const {
        if constexpr (config.row_groups()) return k < params_.k ? tile_.first_k + k : -span_k;
        return k;
    }

    template <bool multicasts>
    static __device__ __forceinline__ void request(u32 smem, const TensorMap& map, int inner, int outer, u32 barrier,
                                                   u16 receivers) {
        if constexpr (multicasts) {
            ptx::cp_async_bulk_tensor_load_multicast(smem, map, inner, outer, barrier, receivers);
        } else {
            ptx::cp_async_bulk_tensor_load(smem, map, inner, outer, barrier);
        }
    }

    template <int tile_rows, int sharers>
    __device__ __forceinline__ void load_rows(u8* tile, OperandBox operand, Share share, u32 barrier, int row,
                                              int step) const {
        constexpr bool multicasts = sharers > 1 && multicast;
        if (config.multicast() && operand.rows == 0) return;
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
            const u32 smem = ptx::smem_address(tile) + i * tile_rows * k_block_bytes;
            const int k = step * config.k_bytes + i * k_block_bytes;  // maps count K in bytes
#pragma unroll
            for (int part = 0; part < (multicasts ? 1 : sharers); ++part) {
                const int first = (multicasts ? share.part : part) * operand.rows;
                request<multicasts>(smem + first * k_block_bytes, *operand.map, k, row + first, barrier, share.receivers);
            }
        }
    }

    const GemmParams& params_;
    SharedStorage<config>& smem_;
    const ClusterPlace<config> place_;
    const Tile<config> tile_;
    const ABoxes<config> a_;
    const OperandBox b_;
};

// Requests the first stages, before anything else; returns how many. If the caller declares `b` independent of the
// preceding kernel, it is requested before that kernel has ended; this path costs a jump, the other none.
//
// Five stages at most: with 6 to 15 the first one arrives later, 0.5 to 1 % at m <= 512 (H200, 2026-11-21). Two or
// three would arrive before the others are requested, and the tensor cores would wait.
//
// Multicast would have to wait for the peers' mbarriers: clusters gain 0.3 to 1 % without it here, 0.1 to 0.4 us per
// launch (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ int request_first_stages(const GemmParams& params, SharedStorage<config>& smem) {
    // The preceding kernel may have written the bounds.
    if (config.grouped() && !reads_bounds_early<config>(params)) ptx::griddepcontrol_wait();
    const Tile<config> tile = TileScheduler<config>(params).first();
    if (config.grouped() && !tile.valid) return 0;
    KRange range = k_range<config>(params);
    if constexpr (config.by_k) range = tile_range(tile);
    const int stages = min(min(config.stages, 5), range.end - range.begin);
    const OperandLoader<config, false> loader(params, smem, tile);
    const bool early_b = config.grouped() ? reads_bounds_early<config>(params) : params.early_b;
    if (!early_b) ptx::griddepcontrol_wait();
    if (ptx::elect_sync()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
            if constexpr (!config.packed_b()) loader.load_b(stage, range.begin + stage);
            if (!early_b) loader.load_a(stage, range.begin + stage);
        }
    }
    __syncwarp();
    if (!early_b) return stages;
    ptx::griddepcontrol_wait();
    if (ptx::elect_sync()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) loader.load_a(stage, range.begin + stage);
    }
    __syncwarp();
    return stages;
}

// Runs the operand warp; `requested` stages are in flight. A CTA may not exit before its peers are done with its
// multicasts: the extra round of empty waits at the end ensures that.
template <GemmConfig config>
__device__ __forceinline__ void produce_operands(const GemmParams& params, SharedStorage<config>& smem, int requested) {
    KRange range = k_range<config>(params);
    PipelineState<config.stages> state;
    TileScheduler<config> tiles(params);
    StoredB<config> b;
    Tile<config> tile = tiles.first();
    for (Tile<config> next; tile.valid; tile = next) {
        const OperandLoader<config> loader(params, smem, tile);
        if constexpr (config.by_k) range = tile_range(tile);
        b.turn_to_tile(tiles);
        next = tiles.next();
        for (int step = range.begin; step < range.end; ++step, --requested, state.advance()) {
            if (b.prefetches(params, next, step)) {
                if (ptx::elect_sync()) loader.prefetch_b(next, step);
                __syncwarp();
            }
            if (requested > 0) continue;
            b.await_empty(smem, step);
            wait(smem.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) {
                if (b.is_requested()) loader.load_b(state.stage, step);
                loader.load_a(state.stage, step);
            }
            __syncwarp();
        }
        b.end_tile();
    }
    if constexpr (!config.multicast()) return;
    for (int stage = 0; stage < config.stages; ++stage) {
        wait(smem.empty[state.stage], state.phase ^ 1);
        state.advance();
    }
}

}  // namespace deep_tile
