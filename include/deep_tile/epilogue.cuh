// From accumulators to `out`: registers -> swizzled shared memory -> TMA store.
//
// A box is 64 rows by store_columns BF16 columns; a row is one swizzle span, or of a length at which stmatrix finds few
// bank conflicts without one: narrower boxes made the last tile of 128x144 wait 1 us longer. Every step from one box to
// the next takes 130 to 200 clocks, so a tile whose boxes have a buffer each is written whole. Where there are few,
// each warp stores its own 16 rows and waits for no other: 1 % of decode, 1.5 % of 128x224; where there are four, one
// store of 64 rows is 1 % better (H200, 2026-11-21). A store is waited for when its buffer is needed again: draining
// at the end of each tile costs 3 to 6 %.
#pragma once

#include "mma.cuh"

namespace deep_tile {

// Where this tile's accumulators are: [chunks_m][chunks_n] WGMMA tiles of 64 x mma_n.
template <GemmConfig config>
using Accumulators = float[config.chunks_m][config.chunks_n][config.mma_n / 2];

template <GemmConfig config>
class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : params_(params),
          barrier_(1 + warpgroup),
          lane_(threadIdx.x % warp_threads),
          first_row_(__shfl_sync(0xffffffff, threadIdx.x % warpgroup_threads / warp_threads, 0) * warp_rows),
          rows_(ptx::smem_address(smem.out[warpgroup]) + first_row_ * row_bytes) {}

    // Columns [first, first + columns_per_part) of the tile; `row` and `column` are of the warpgroup's first element.
    template <int first>
    __device__ __forceinline__ void store(const Accumulators<config>& sums, int row, int column) const {
        column += first;
#pragma unroll
        for (int i = 0; i < config.boxes; i += boxes_at_once) {
            await_stores<pending>();
            synchronize();
#pragma unroll
            for (int box = i; box < i + boxes_at_once; ++box) {
                write_box(sums[box / boxes_per_row], first + column_of(box), box % config.store_buffers);
            }
            if constexpr (config.tma_store) ptx::fence_proxy_async();
            synchronize();
#pragma unroll
            for (int box = i; box < i + boxes_at_once; ++box) {
                publish_box(row + box / boxes_per_row * mma_m, column + column_of(box), box % config.store_buffers);
            }
            if (config.tma_store && stores()) ptx::cp_async_bulk_commit_group();
        }
    }

    // Shared memory must outlive the stores that read it.
    __device__ __forceinline__ void drain() const { await_stores<0>(); }

   private:
    static constexpr int row_bytes = config.store_columns * 2;
    static constexpr int box_bytes = mma_m * row_bytes;
    static constexpr int warp_rows = mma_m / (warpgroup_threads / warp_threads);
    static constexpr int boxes_per_row = config.columns_per_part / config.store_columns;
    static constexpr int boxes_at_once = config.boxes <= config.store_buffers ? config.boxes : 1;
    // Stores that may still read while the next box is written: of other buffers, if these take turns evenly.
    static constexpr bool take_turns = boxes_at_once == 1 && config.boxes % config.store_buffers == 0;
    static constexpr int pending = take_turns ? config.store_buffers - 1 : 0;

    static __device__ __forceinline__ int column_of(int box) { return box % boxes_per_row * config.store_columns; }

    // The 16-byte chunk index is XORed with the row's position in its 8 * span bytes, as TMA does on the way out.
    static __device__ __forceinline__ u32 swizzle(u32 offset) {
        if constexpr (config.store_swizzle == 0) return offset;
        return offset ^ ((offset >> 3) & (config.store_swizzle - 16));
    }

    // This warp's rows of a buffer.
    __device__ __forceinline__ u32 rows_of(int buffer) const { return rows_ + buffer * box_bytes; }

    // One thread for each store of store_rows rows.
    __device__ __forceinline__ bool stores() const { return first_row_ % config.store_rows == 0 && ptx::elect_sync(); }

    template <int pending_stores>
    __device__ __forceinline__ void await_stores() const {
        if (config.tma_store && stores()) ptx::cp_async_bulk_wait_group_read<pending_stores>();
    }

    // Among those whose rows are stored together.
    __device__ __forceinline__ void synchronize() const {
        if constexpr (config.tma_store && config.store_rows > warp_rows) {
            ptx::bar_sync(barrier_, warpgroup_threads);
        } else {
            __syncwarp();
        }
    }

    __device__ __forceinline__ void write_box(const float (&sums)[config.chunks_n][config.mma_n / 2], int box_column,
                                              int buffer) const {
#pragma unroll
        for (int unit = 0; unit < config.store_columns; unit += 16) {
            const float* d = &sums[0][0] + (box_column + unit) / 2;  // 16 columns may span two WGMMA tiles
            ptx::stmatrix_x4(rows_of(buffer) + swizzle(lane_ % 16 * row_bytes + unit * 2 + lane_ / 16 * 16),
                             ptx::cvt_rn_bf16x2(d[1], d[0]), ptx::cvt_rn_bf16x2(d[3], d[2]),
                             ptx::cvt_rn_bf16x2(d[5], d[4]), ptx::cvt_rn_bf16x2(d[7], d[6]));
        }
    }

    // `row` is the box's first.
    __device__ __forceinline__ void publish_box(int row, int column, int buffer) const {
        row += first_row_;
        if constexpr (config.tma_store) {
            if (stores()) ptx::cp_async_bulk_tensor_store(params_.out_map, column, row, rows_of(buffer));
        } else {
            copy_rows(row, column, buffer);
        }
    }

    // For an `out` that TMA cannot address: whole rows, clipped at the edges of the matrix.
    __device__ __forceinline__ void copy_rows(int row, int column, int buffer) const {
        u16* out = static_cast<u16*>(params_.out);
        for (u32 i = 0; i < warp_rows && row + i < params_.m; ++i) {
            for (u32 j = lane_; j < config.store_columns && column + j < params_.n; j += warp_threads) {
                out[(row + i) * params_.out_stride_m + column + j] =
                    ptx::ld_shared_u16(rows_of(buffer) + swizzle(i * row_bytes + j * 2));
            }
        }
    }

    const GemmParams& params_;
    const u32 barrier_, lane_;
    const int first_row_;  // this warp's in a box; from lane 0, so that the compiler knows it as uniform
    const u32 rows_;
};

}  // namespace deep_tile
