// Epilogue: registers -> swizzled shared memory -> TMA store to `out`.
//
// An output box has 64 rows and store_columns columns; a row is one swizzle span if possible. Math warps write boxes;
// store warps, if there are any, issue the TMA stores (GemmConfig.store_warps says why). Every step from one box to the
// next takes 130 to 200 clocks, so boxes are written together if each has a buffer.
//
// Math warps without a store warp issue the store once a box is written, and await it when they need the buffer again:
// draining after each tile costs 3 to 6 %. With few boxes, each warp stores its own 16 rows and waits for no other: 1 %
// of decode; with four, one store of 64 rows is 1 % better (H200, 2026-11-21).
#pragma once

#include "activation.cuh"
#include "boxes.cuh"
#include "quantized_output.cuh"

namespace deep_tile {

// Threads in a named barrier between a math warpgroup and its store warp.
constexpr int store_barrier_threads = warpgroup_threads + warp_threads;

template <GemmConfig config>
class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : params_(params),
          warpgroup_(warpgroup),
          lane_(threadIdx.x % warp_threads),
          first_row_(__shfl_sync(0xffffffff, threadIdx.x % warpgroup_threads / warp_threads, 0) * warp_rows),
          rows_(ptx::smem_address(smem.out[warpgroup]) + (config.transposed ? 0 : first_row_ * row_bytes<config>)) {}

    // Stores output columns [first, first + out_columns_per_part) of the tile; `row` and `column` locate the
    // warpgroup's first element in the product. Rows from `end` on are not written.
    template <int first>
    __device__ __forceinline__ void store(const Accumulators<config>& sums, int row, int column, int end) const {
        store_boxes<first>(sums, row, out_column<config>(column) + first, end, 0, config.boxes);
    }

    // Stores chunk `chunk` out of store_chunks. The store warp locates it in `out`; only quantised scales need it here.
    template <typename Tile>
    __device__ __forceinline__ void store_chunk(const Accumulators<config>& sums, int chunk, const Tile& tile) const {
        constexpr int boxes = config.boxes / config.store_chunks;
        if constexpr (config.quantizes) {
            const int column = out_column<config>(tile.out_column());
            const int row = tile.out_row() + warpgroup_ * config.rows_per_warpgroup;
            store_boxes<0>(sums, row, column, 0, chunk * boxes, boxes);
        } else {
            store_boxes<0>(sums, 0, 0, 0, chunk * boxes, boxes);
        }
    }

    // Waits for stores to read shared memory, which must outlive them.
    __device__ __forceinline__ void drain() const {
        if constexpr (config.store_warps == 0) await_stores<0>();
    }

   private:
    static constexpr int warp_rows = mma_m / (warpgroup_threads / warp_threads);
    // True if stores may still read while the next box is written to another buffer: the buffers must divide the boxes.
    static constexpr bool round = config.boxes_at_once == 1 && config.boxes % config.store_buffers == 0;
    static constexpr int pending = round ? config.store_buffers - 1 : 0;

    template <int first>
    __device__ __forceinline__ void store_boxes(const Accumulators<config>& sums, int row, int column, int end, int begin,
                                                int count) const {
#pragma unroll
        for (int i = begin; i < begin + count; i += config.boxes_at_once) {
            await_buffers();
#pragma unroll
            for (int box = i; box < i + config.boxes_at_once; ++box) {
                if constexpr (config.quantizes) {
                    const int first_row = row + first_row_ + box_row<config>(box);
                    write_quantized<config>(params_, rows_ + box_offset<config>(box), lane_, sums[box / boxes_per_row<config>], box,
                                            first_row, column + box_column<config>(box));
                } else {
                    write_box(sums[box / boxes_per_row<config>], first + box_column<config>(box), box);
                }
            }
            if constexpr (config.tma_store) ptx::fence_proxy_async();
            if constexpr (config.store_warps > 0) {
                ptx::bar_arrive(boxes_full_barrier + warpgroup_, store_barrier_threads);
            } else {
                publish_boxes(row, column, end, i);
            }
        }
    }

    __device__ __forceinline__ void await_buffers() const {
        if constexpr (config.store_warps > 0) {
            ptx::bar_sync(boxes_empty_barrier + warpgroup_, store_barrier_threads);
        } else {
            await_stores<pending>();
            synchronize();
        }
    }

    __device__ __forceinline__ void publish_boxes(int row, int column, int end, int first_box) const {
        synchronize();
        row += first_row_;
#pragma unroll
        for (int box = first_box; box < first_box + config.boxes_at_once; ++box) {
            if constexpr (config.tma_store) {
                if (stores()) store_box<config>(params_, rows_, row, column, box, end);
            } else {
                copy_box(row + box_row<config>(box), column + box_column<config>(box), end, box);
            }
        }
        if (stores()) ptx::cp_async_bulk_commit_group();
    }

    // True in one thread per store of store_rows rows.
    __device__ __forceinline__ bool stores() const {
        return config.tma_store && first_row_ % config.store_rows == 0 && ptx::elect_sync();
    }

    template <int pending_stores>
    __device__ __forceinline__ void await_stores() const {
        if (stores()) ptx::cp_async_bulk_wait_group_read<pending_stores>();
    }

    // Synchronises the warps whose rows are stored together.
    __device__ __forceinline__ void synchronize() const {
        if constexpr (config.tma_store && config.store_rows > warp_rows) {
            ptx::bar_sync(own_barrier + warpgroup_, warpgroup_threads);
        } else {
            __syncwarp();
        }
    }

    // Writes this warp's rows of a box, which begins at output column `column` of `sums`.
    __device__ __forceinline__ void write_box(const float (&sums)[config.chunks_n][config.mma_n / 2], int column,
                                              int box) const {
        const u32 rows = rows_ + box_offset<config>(box);
#pragma unroll
        for (int unit = 0; unit < config.store_columns; unit += 16) {
            // 16 columns may span two WGMMA tiles.
            const float* d = &sums[0][0] + (column + unit) * config.columns_per_output / 2;
            if constexpr (config.activation == Activation::none) {
                write_columns(rows, unit, d);
            } else {
                float results[8];
                activate<config>(results, d);
                write_columns(rows, unit, results);
            }
        }
    }

    // Offset, before swizzling, of this lane's matrix row of 16 columns from `unit` on.
    __device__ __forceinline__ u32 matrix_row(int unit) const {
        if constexpr (config.transposed) {
            return (unit + lane_ / 16 * 8 + lane_ % 8) * row_bytes<config> + (first_row_ + lane_ / 8 % 2 * 8) * 2;
        } else {
            return lane_ % 16 * row_bytes<config> + unit * 2 + lane_ / 16 * 16;
        }
    }

    // Writes sixteen columns of this warp's rows, from column `unit` of the box on. 16-bit numbers are transposed into
    // rows on the way; 32-bit numbers are written as each thread's pairs, with two-way bank conflicts.
    __device__ __forceinline__ void write_columns(u32 rows, int unit, const float* d) const {
        if constexpr (config.out_bytes == 2) {
            constexpr Format format = config.out_format;
            ptx::stmatrix_x4<config.transposed>(rows + swizzle<config>(matrix_row(unit)), packed<format>(d[1], d[0]),
                                                packed<format>(d[3], d[2]), packed<format>(d[5], d[4]),
                                                packed<format>(d[7], d[6]));
        } else {
            static_assert(config.out_bytes == 4, "numbers of a size without code that writes them");
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const int row = lane_ / 4 + pair % 2 * 8, column = unit + pair / 2 * 8 + lane_ % 4 * 2;
                ptx::st_shared_v2(rows + swizzle<config>(row * row_bytes<config> + column * 4), d[2 * pair], d[2 * pair + 1]);
            }
        }
    }

    // Copies this warp's rows to an `out` that TMA cannot address, clipped at the edges of the matrix.
    __device__ __forceinline__ void copy_box(int row, int column, int end, int box) const {
        const u32 rows = rows_ + box_offset<config>(box);
        auto* out = static_cast<Stored<config>*>(params_.out);
        for (u32 i = 0; i < warp_rows && row + i < row_end<config>(params_, end); ++i) {
            for (u32 j = lane_; j < config.store_columns && column + j < out_column<config>(params_.n);
                 j += warp_threads) {
                auto& to = out[(row + i) * params_.out_stride_m + column + j];
                to = stored<config>(to, ptx::ld_shared<Stored<config>>(
                                            rows + swizzle<config>(i * row_bytes<config> + j * config.out_bytes)));
            }
        }
    }

    const GemmParams& params_;
    const u32 warpgroup_, lane_;
    const int first_row_;  // this warp's first row in a box; from lane 0, so that the compiler knows it as uniform
    const u32 rows_;  // this warp's rows in the first buffer
};

// Store warp: issues the TMA stores for one math warpgroup, or for both.
template <GemmConfig config>
class StoreWarp {
   public:
    __device__ __forceinline__ StoreWarp(const GemmParams& params, SharedStorage<config>& smem, int warp)
        : params_(params), smem_(smem), warp_(warp) {}

    // Stores boxes in the order in which Epilogue writes them. `row` and `column` locate the tile's first element in
    // `out`; rows from `end` on are not written.
    __device__ __forceinline__ void store(int row, int column, int end) const {
#pragma unroll 1
        for (int box = 0; box < config.boxes; box += config.boxes_at_once) {
            drain();
            for (int i = warp_; i < config.math_warpgroups; i += config.store_warps) {
                ptx::bar_arrive(boxes_empty_barrier + i, store_barrier_threads);
            }
            for (int i = warp_; i < config.math_warpgroups; i += config.store_warps) {
                ptx::bar_sync(boxes_full_barrier + i, store_barrier_threads);
                if (ptx::elect_sync()) publish_boxes(row + i * config.rows_per_warpgroup, column, end, i, box);
                __syncwarp();
            }
        }
    }

    // Waits until all stores have read their buffers.
    __device__ __forceinline__ void drain() const {
        if (ptx::elect_sync()) ptx::cp_async_bulk_wait_group_read<0>();
        __syncwarp();
    }

   private:
    __device__ __forceinline__ void publish_boxes(int row, int column, int end, int warpgroup, int first_box) const {
#pragma unroll
        for (int i = 0; i < config.boxes_at_once; ++i) {
            store_box<config>(params_, ptx::smem_address(smem_.out[warpgroup]), row, column, first_box + i, end);
        }
        ptx::cp_async_bulk_commit_group();
    }

    const GemmParams& params_;
    SharedStorage<config>& smem_;
    const int warp_;
};

// Runs one store warp over all tiles.
template <GemmConfig config>
__device__ __forceinline__ void store_tiles(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    const StoreWarp<config> boxes(params, smem, warp);
    if constexpr (config.grouped()) ptx::griddepcontrol_wait();  // the preceding kernel may have written the bounds
    TileScheduler<config> tiles(params);
    ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
    while (true) {
        const Tile<config> tile = tiles.next();
        if (!tile.valid) break;
        boxes.store(tile.out_row(), out_column<config>(tile.out_column()), group_end<config>(tile));
    }
    boxes.drain();
}

}  // namespace deep_tile
