// What becomes of a tile's sums before they are stored.
//
//   finish     for kinds                       does
//   AsTheyAre  without scales, with promotion  nothing
//   ScaleRows  with scales of rows             multiplies by the scale of each row of a, and of each row of b
#pragma once

#include "output.cuh"

namespace deep_tile {

template <GemmConfig config>
struct AsTheyAre {
    __device__ __forceinline__ void begin(const GemmParams&, int, int) const {}
    __device__ __forceinline__ void apply(Accumulators<config>&) const {}
};

// Scales are requested while the tile's first WGMMAs run, and then lie in registers, of which tiles without temporaries
// have some to spare. A stride of 0 makes one scale of all. Rows and columns beyond the matrix take the last scale there
// is: they are never stored.
template <GemmConfig config>
class ScaleRows {
   public:
    // Of the sums of one warpgroup, whose first row and column these are.
    __device__ __forceinline__ void begin(const GemmParams& params, int row, int column) {
        const u32 thread = threadIdx.x % warpgroup_threads;
        row += thread / warp_threads * 16 + thread % warp_threads / 4;
        column += thread % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * config.chunks_m; ++i) {
            const u32 at = min(row + i / 2 * mma_m + i % 2 * 8, params.m - 1);
            row_[i] = ptx::ld_global(params.a_scale + at * params.a_scale_stride_m);
        }
#pragma unroll
        for (int i = 0; i < columns; ++i) {
            const u32 at = min(column + i / 2 * 8 + i % 2, params.n - 1);
            column_[i] = ptx::ld_global(params.b_scale + at * params.b_scale_stride_n);
        }
    }

    __device__ __forceinline__ void apply(Accumulators<config>& sums) const {
#pragma unroll
        for (int chunk_m = 0; chunk_m < config.chunks_m; ++chunk_m) {
#pragma unroll
            for (int i = 0; i < config.chunks_n * (config.mma_n / 2); ++i) {
                float& sum = (&sums[chunk_m][0][0])[i];
                sum *= row_[2 * chunk_m + i / 2 % 2] * column_[i / 4 * 2 + i % 2];
            }
        }
    }

   private:
    static constexpr int columns = config.block_n / 4;  // of this thread, two in each eight
    float row_[2 * config.chunks_m], column_[columns];
};

template <GemmConfig config>
using Finish = typename Conditional<config.row_scales, ScaleRows<config>, AsTheyAre<config>>::type;

}  // namespace deep_tile
