// From accumulators to `out`: registers -> swizzled shared memory -> TMA store, box by box.
//
// Each math warpgroup has its own buffers, barrier and bulk groups and never waits for the other. A box is 64 rows by
// store_columns BF16 columns; a row is one swizzle span, or of a length at which stmatrix finds few bank conflicts
// without one: narrower boxes made the last tile of 128x144 wait 1 us longer (H200, 2026-11-21). The buffer
// index runs on across tiles; a store is only waited for when its buffer comes round again (draining at the end of
// each tile costs 3 to 6 %; H200, 2026-11-21).
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
          buffers_(ptx::smem_address(smem.out[warpgroup])),
          barrier_(1 + warpgroup),
          thread_(threadIdx.x % warpgroup_threads) {}

    // Columns [first, first + columns_per_part) of the tile; `row` and `column` are of the warpgroup's first element.
    template <int first>
    __device__ __forceinline__ void store(const Accumulators<config>& sums, int row, int column) {
#pragma unroll
        for (int chunk = 0; chunk < config.chunks_m; ++chunk) {
#pragma unroll
            for (int box = first; box < first + config.columns_per_part; box += config.store_columns) {
                acquire_buffer();
                write_box(sums[chunk], box);
                publish_box(row + chunk * mma_m, column + box);
                buffer_ = (buffer_ + 1) % config.store_buffers;
            }
        }
    }

    // Shared memory must outlive the stores that read it.
    __device__ __forceinline__ void drain() {
        if (config.tma_store && thread_ == 0) ptx::cp_async_bulk_wait_group_read<0>();
    }

   private:
    static constexpr int row_bytes = config.store_columns * 2;
    static constexpr int box_bytes = mma_m * row_bytes;

    __device__ __forceinline__ u32 buffer() const { return buffers_ + buffer_ * box_bytes; }

    // The 16-byte chunk index is XORed with the row's position in its 8 * span bytes, as TMA does on the way out.
    static __device__ __forceinline__ u32 swizzle(u32 offset) {
        if constexpr (config.store_swizzle == 0) return offset;
        return offset ^ ((offset >> 3) & (config.store_swizzle - 16));
    }

    __device__ __forceinline__ void synchronize() const { ptx::bar_sync(barrier_, warpgroup_threads); }

    __device__ __forceinline__ void acquire_buffer() const {
        if (config.tma_store && thread_ == 0) ptx::cp_async_bulk_wait_group_read<config.store_buffers - 1>();
        synchronize();
    }

    __device__ __forceinline__ void write_box(const float (&sums)[config.chunks_n][config.mma_n / 2], int box) const {
        const int lane = thread_ % warp_threads;
        const u32 row = thread_ / warp_threads * 16 + lane % 16;
#pragma unroll
        for (int unit = 0; unit < config.store_columns; unit += 16) {
            const int column = box + unit;
            const float* d = &sums[0][0] + column / 2;  // a unit of 16 columns may span two WGMMA tiles
            ptx::stmatrix_x4(buffer() + swizzle(row * row_bytes + unit * 2 + lane / 16 * 16),
                             ptx::cvt_rn_bf16x2(d[1], d[0]), ptx::cvt_rn_bf16x2(d[3], d[2]),
                             ptx::cvt_rn_bf16x2(d[5], d[4]), ptx::cvt_rn_bf16x2(d[7], d[6]));
        }
    }

    __device__ __forceinline__ void publish_box(int row, int column) const {
        if constexpr (config.tma_store) {
            ptx::fence_proxy_async();
            synchronize();
            if (thread_ != 0) return;
            ptx::cp_async_bulk_tensor_store(params_.out_map, column, row, buffer());
            ptx::cp_async_bulk_commit_group();
        } else {
            synchronize();
            copy_box(row, column);
        }
    }

    // For an `out` that TMA cannot address: each warp writes whole rows, clipped at the edges of the matrix.
    __device__ __forceinline__ void copy_box(int row, int column) const {
        u16* out = static_cast<u16*>(params_.out);
        const u32 first = thread_ / warp_threads;
        for (u32 i = first; i < mma_m && row + i < params_.m; i += warpgroup_threads / warp_threads) {
            for (u32 j = thread_ % warp_threads; j < config.store_columns && column + j < params_.n;
                 j += warp_threads) {
                out[(row + i) * params_.out_stride_m + column + j] =
                    ptx::ld_shared_u16(buffer() + swizzle(i * row_bytes + j * 2));
            }
        }
    }

    const GemmParams& params_;
    const u32 buffers_, barrier_;
    const int thread_;
    int buffer_ = 0;
};

}  // namespace deep_tile
