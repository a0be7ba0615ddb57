// The kernel: persistent, warp-specialised FP8 GEMM with block scales. codegen.py generates the entry, which calls gemm.
//
// out[m, n] = sum over K blocks of a_scale[m, block] * b_scale[n / 128, block] * (a[m, block] . b[n, block])
//
//   who                          does                                            per stage
//   producer warpgroup, warp 0   TMA: a and b tiles -> stage                     waits empty, expects bytes on full
//   producer warpgroup, warp 1   cp.async: a and b scales -> stage               waits empty, arrives on full
//   math warpgroup 0 (and 1)     WGMMA, promotion; per tile its rows' epilogue   waits full, arrives on empty
//
//   barrier      waited for by         arrivals                                      completes when
//   full[s]      math warpgroups       1 operand lane + 32 scale lanes, and the      stage s holds a, b and their
//                                      bytes of a and b (some sent by the peer)      scales
//   empty[s]     both producer warps   every math thread, and 1 per math warp of     nobody reads stage s any more,
//                                      the multicast peer                            here or in the peer
//   named 1, 2   one math warpgroup    its own 128 threads                           its output box is written, free
//
// Math warpgroups never wait for each other. Scales travel with the stage, because reading them from global memory in
// the math loop costs 6 to 8 % (H200, 2026-11-21); by cp.async, 4 bytes a copy, because that takes any stride, and so
// every scale layout, with no alignment rule and no latency.
#pragma once

#include "reduce.cuh"

namespace deep_tile {

// 64 K registers are shared out as 128 * 40 + 256 * 232; at launch each of 384 threads holds 168.
constexpr int producer_registers = 40;
constexpr int math_registers = 232;

template <GemmConfig config>
__device__ __forceinline__ void initialize_barriers(SharedStorage<config>& smem) {
    constexpr int math_warps = config.math_warpgroups * warpgroup_threads / warp_threads;
    constexpr int peers = config.cluster_m * config.cluster_n - 1;
    if (threadIdx.x < config.stages) {
        ptx::mbarrier_init(ptx::smem_address(&smem.full[threadIdx.x]), 1 + warp_threads);
        ptx::mbarrier_init(ptx::smem_address(&smem.empty[threadIdx.x]), math_warps * (warp_threads + peers));
    }
    if (config.split_k > 1 && threadIdx.x < config.math_warpgroups) {
        ptx::mbarrier_init(ptx::smem_address(&smem.partial_full[threadIdx.x]), 1);
        ptx::mbarrier_init(ptx::smem_address(&smem.partial_empty[threadIdx.x]), 4 * (config.split_k - 1));
    }
    ptx::fence_mbarrier_init();
    __syncthreads();
    if constexpr (config.cluster() > 1) {
        ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait();
    }
}

// The share of an operand tile that this block loads: all of it, or one of `parts` slices, sent to each block in `mask`.
struct Slice {
    int part, parts;
    u16 mask;
};

template <GemmConfig config>
__device__ __forceinline__ Slice slice_of_a() {
    const int rank = config.cluster_m * config.cluster_n == 1 ? 0 : ptx::cluster_ctarank();
    constexpr u16 first_row = config.cluster_n == 1 ? 1 : 1 | 1 << config.cluster_m;
    return {rank / config.cluster_m, config.cluster_n, static_cast<u16>(first_row << rank % config.cluster_m)};
}

template <GemmConfig config>
__device__ __forceinline__ Slice slice_of_b() {
    const int rank = config.cluster_m * config.cluster_n == 1 ? 0 : ptx::cluster_ctarank();
    constexpr u16 first_column = (1 << config.cluster_m) - 1;
    const int column = rank / config.cluster_m;
    return {rank % config.cluster_m, config.cluster_m, static_cast<u16>(first_column << column * config.cluster_m)};
}

__device__ __forceinline__ void load_slice(u8* tile, const TensorMap& map, int k, int row, int slice_rows, Slice slice,
                                           u64& full) {
    const int first = slice.part * slice_rows;
    const u32 smem = ptx::smem_address(tile) + first * 128;
    if (slice.parts == 1) {
        ptx::cp_async_bulk_tensor_load(smem, map, k, row, ptx::smem_address(&full));
    } else {
        ptx::cp_async_bulk_tensor_load_multicast(smem, map, k, row + first, ptx::smem_address(&full), slice.mask);
    }
}

// One thread requests a stage's tile of `a`, or announces the whole stage and requests its tile of `b`; each scale
// block is a box of its own.
template <GemmConfig config>
__device__ __forceinline__ void load_a(const GemmParams& params, SharedStorage<config>& smem, int stage, int row, int k,
                                       Slice slice) {
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        load_slice(smem.a[stage] + i * config.block_m * scale_block, params.a_map, k + i * scale_block, row,
                   params.a_box_rows, slice, smem.full[stage]);
    }
}

template <GemmConfig config>
__device__ __forceinline__ void load_b(const GemmParams& params, SharedStorage<config>& smem, int stage, int row, int k,
                                       Slice slice) {
    const u32 bytes = (params.a_box_rows * config.cluster_n + config.block_n) * config.block_k;
    ptx::mbarrier_arrive_expect_tx(ptx::smem_address(&smem.full[stage]), bytes);
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        load_slice(smem.b[stage] + i * config.block_n * scale_block, params.b_map, k + i * scale_block, row,
                   config.block_n / config.cluster_m, slice, smem.full[stage]);
    }
}

// One warp. When the caller says that `b` does not depend on the preceding kernel, the first round of stages requests
// it before that kernel has ended.
//
// Blocks of the cluster write into each other's stages, so a block may not exit before its peer is done with it: the
// extra round of empty waits at the end sees to that.
template <GemmConfig config>
__device__ __forceinline__ void produce_operands(const GemmParams& params, SharedStorage<config>& smem) {
    const Slice a_slice = slice_of_a<config>();
    const Slice b_slice = slice_of_b<config>();
    const KRange range = k_range<config>(params);
    PipelineState<config.stages> state;
    TileScheduler<config> tiles(params);
    Tile tile = tiles.first();
    int early_stages = params.early_b && tile.valid ? min(config.stages, range.end - range.begin) : 0;
    for (int stage = 0; stage < early_stages; ++stage) {
        if (ptx::elect_sync()) {
            load_b(params, smem, stage, tile.n, (range.begin + stage) * config.block_k, b_slice);
        }
        __syncwarp();
    }
    ptx::griddepcontrol_wait();
    for (; tile.valid; tile = tiles.next()) {
        for (int step = range.begin; step < range.end; ++step) {
            wait(smem.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) {
                load_a(params, smem, state.stage, tile.m, step * config.block_k, a_slice);
                if (early_stages <= 0) load_b(params, smem, state.stage, tile.n, step * config.block_k, b_slice);
            }
            __syncwarp();
            early_stages -= 1;
            state.advance();
        }
    }
    if constexpr (config.cluster_m * config.cluster_n == 1) return;
    for (int stage = 0; stage < config.stages; ++stage) {
        wait(smem.empty[state.stage], state.phase ^ 1);
        state.advance();
    }
}

// One warp. Rows and columns beyond the matrix take the last scale there is: their products are never stored.
template <GemmConfig config>
__device__ __forceinline__ void produce_scales(const GemmParams& params, SharedStorage<config>& smem) {
    constexpr int rows_per_lane = config.block_m / warp_threads;
    ptx::griddepcontrol_wait();
    const int lane = threadIdx.x % warp_threads;
    const int last_group = (params.n - 1) / scale_block;
    const int k_blocks = ceil_div(params.k, scale_block);
    const KRange range = k_range<config>(params);
    const long long first_k = range.begin * config.scale_blocks;
    PipelineState<config.stages> state;
    TileScheduler<config> tiles(params);
    for (Tile tile = tiles.first(); tile.valid; tile = tiles.next()) {
        const int group = min((tile.n + lane * config.column_group) / scale_block, last_group);
        const float* b_scale = params.b_scale + group * params.b_scale_stride_n + first_k * params.b_scale_stride_k;
        const float* a_scale[rows_per_lane];
#pragma unroll
        for (int i = 0; i < rows_per_lane; ++i) {
            const int row = min(tile.m + i * warp_threads + lane, params.m - 1);
            a_scale[i] = params.a_scale + row * params.a_scale_stride_m + first_k * params.a_scale_stride_k;
        }
        for (int step = range.begin; step < range.end; ++step) {
            wait(smem.empty[state.stage], state.phase ^ 1);
#pragma unroll
            for (int j = 0; j < config.scale_blocks; ++j) {
                const bool valid = config.scale_blocks == 1 || step * config.scale_blocks + j < k_blocks;
#pragma unroll
                for (int i = 0; i < rows_per_lane; ++i) {
                    ptx::cp_async(ptx::smem_address(&smem.a_scale[state.stage][j][i * warp_threads + lane]),
                                  valid ? a_scale[i] : params.a_scale, valid);
                    a_scale[i] += params.a_scale_stride_k;
                }
                if (lane < config.b_scale_slots) {
                    ptx::cp_async(ptx::smem_address(&smem.b_scale[state.stage][j][lane]),
                                  valid ? b_scale : params.b_scale, valid);
                    b_scale += params.b_scale_stride_k;
                }
            }
            ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_address(&smem.full[state.stage]));
            state.advance();
        }
    }
}

// The warp has read what it needs of the stage. Every lane says so here, and one for all of them to the block that
// shares the operands: racecheck follows a barrier's arrivals but not __syncwarp, and this costs nothing (H200, 2026-11-21).
template <GemmConfig config>
__device__ __forceinline__ void release(u64& empty) {
    const u32 barrier = ptx::smem_address(&empty);
    ptx::mbarrier_arrive(barrier);
    if constexpr (config.cluster_m * config.cluster_n > 1) {
        if (threadIdx.x % warp_threads == 0) ptx::mbarrier_arrive_cluster(barrier, ptx::cluster_ctarank() ^ 1);
    }
}

// What one math thread needs of a stage's scales: those of its two rows in each WGMMA tile, and of all columns.
template <GemmConfig config>
struct Scales {
    float row[config.scale_blocks][config.chunks_m][2];
    float column[config.scale_blocks][config.b_scale_slots];

    // `thread_row` is the thread's first row in the block's tile.
    __device__ __forceinline__ void load(const SharedStorage<config>& smem, int stage, int thread_row) {
#pragma unroll
        for (int block = 0; block < config.scale_blocks; ++block) {
#pragma unroll
            for (int i = 0; i < config.chunks_m * 2; ++i) {
                row[block][i / 2][i % 2] = smem.a_scale[stage][block][thread_row + i / 2 * mma_m + i % 2 * 8];
            }
#pragma unroll
            for (int i = 0; i < config.b_scale_slots; ++i) column[block][i] = smem.b_scale[stage][block][i];
        }
    }
};

// What stands between two WGMMAs of a warpgroup is time in which only the other one feeds the tensor cores. So the next
// stage is awaited and its scales are read while a WGMMA of this stage runs: 2 % at k = 2048, 5 % at 16384. The first
// WGMMA is best; with multicast, whose stages complete later, the last (128x256, H200, 2026-11-21).
template <GemmConfig config>
class Consumer {
   public:
    __device__ __forceinline__ Consumer(const GemmParams& params, SharedStorage<config>& smem, int warpgroup)
        : smem_(smem), range_(k_range<config>(params)), first_row_(warpgroup * config.rows_per_warpgroup) {
        const int thread = threadIdx.x % warpgroup_threads;
        thread_row_ = first_row_ + thread / warp_threads * 16 + thread % warp_threads / 4;
    }

    // sums = this block's part of one tile.
    __device__ __forceinline__ void accumulate(Accumulators<config>& sums) {
        Scales<config> scales;
        if (range_.begin < range_.end) acquire(scales);
        for (int step = range_.begin; step < range_.end; ++step) {
            const u64 a = matrix_descriptor(smem_.a[state_.stage] + first_row_ * scale_block);
            const u64 b = matrix_descriptor(smem_.b[state_.stage]);
            u64& empty = smem_.empty[state_.stage];
            Scales<config> next_scales;
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
                const int chunk_m = i / config.chunks_n, chunk_n = i % config.chunks_n;
                Blocks<config> blocks;
                begin_blocks<config>(blocks, a + chunk_m * (mma_m * scale_block / 16),
                                     b + chunk_n * (config.mma_n * scale_block / 16));
                if (i == await_in) {
                    state_.advance();
                    if (step + 1 < range_.end) acquire(next_scales);
                }
                finish_blocks<config>(blocks);
                if (i == chunks - 1) release<config>(empty);
#pragma unroll
                for (int block = 0; block < config.scale_blocks; ++block) {
                    promote<config>(sums[chunk_m][chunk_n], blocks[block], scales.row[block][chunk_m],
                                    scales.column[block], chunk_n * config.mma_n);
                }
            }
            scales = next_scales;
        }
    }

   private:
    static constexpr int chunks = config.chunks_m * config.chunks_n;
    static constexpr int await_in = config.cluster_m * config.cluster_n == 1 ? 0 : chunks - 1;

    __device__ __forceinline__ void acquire(Scales<config>& scales) const {
        wait(smem_.full[state_.stage], state_.phase);
        scales.load(smem_, state_.stage, thread_row_);
    }

    SharedStorage<config>& smem_;
    const KRange range_;
    const int first_row_;
    int thread_row_;
    PipelineState<config.stages> state_;
};

template <GemmConfig config>
__device__ __forceinline__ void consume(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    Consumer<config> consumer(params, smem, warpgroup);
    Epilogue<config> epilogue(params, smem, warpgroup);
    TileScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    for (Tile tile = tiles.first(); tile.valid; tile = tiles.next()) {
        Accumulators<config> sums = {};
        consumer.accumulate(sums);
        epilogue.template store<0>(sums, tile.m + first_row, tile.n);
    }
    epilogue.drain();
}

template <GemmConfig config, int part>
__device__ __forceinline__ void finish_part(SplitReduction<config>& reduction, Epilogue<config>& epilogue,
                                            Accumulators<config>& sums, int row, int column, bool last) {
    if (part == reduction.rank()) {
        reduction.template receive<part>(sums);
        if (!last) reduction.release();
        epilogue.template store<part * config.columns_per_part>(sums, row, column);
    }
    if constexpr (part + 1 < config.split_k) {
        finish_part<config, part + 1>(reduction, epilogue, sums, row, column, last);
    }
}

// As consume(), each tile's sums being those of the whole cluster.
template <GemmConfig config>
__device__ __forceinline__ void consume_split(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    Consumer<config> consumer(params, smem, warpgroup);
    SplitReduction<config> reduction(smem, warpgroup);
    Epilogue<config> epilogue(params, smem, warpgroup);
    TileScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    for (Tile tile = tiles.first(); tile.valid;) {
        const Tile next = tiles.next();
        Accumulators<config> sums = {};
        consumer.accumulate(sums);
        reduction.send(sums);
        finish_part<config, 0>(reduction, epilogue, sums, tile.m + first_row, tile.n, !next.valid);
        tile = next;
    }
    epilogue.drain();
}

template <GemmConfig config>
__device__ __forceinline__ void produce(const GemmParams& params, SharedStorage<config>& smem) {
    const int warp = __shfl_sync(0xffffffff, threadIdx.x % warpgroup_threads / warp_threads, 0);
    if (warp == 0) produce_operands<config>(params, smem);
    if (warp == 1) produce_scales<config>(params, smem);
}

template <GemmConfig config>
__device__ __forceinline__ void gemm(const GemmParams& params) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    static_assert(sizeof(SharedStorage<config>) == config.smem_bytes, "config.py and config.cuh disagree");
    auto& smem = *reinterpret_cast<SharedStorage<config>*>(dynamic_smem);

    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(params.a_map);
        ptx::prefetch_tensormap(params.b_map);
    }
    initialize_barriers<config>(smem);
    ptx::griddepcontrol_launch_dependents();

    // From lane 0, so that the compiler knows it as uniform: branches and WGMMA descriptors that depend on it then
    // live in uniform registers (946 -> 1226 TFLOPS for 128x192; H200, 2026-11-21).
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / warpgroup_threads, 0);
    if (warpgroup == config.math_warpgroups) {
        if constexpr (config.math_warpgroups == 2) ptx::setmaxnreg_dec<producer_registers>();
        produce<config>(params, smem);
    } else {
        ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
        if constexpr (config.math_warpgroups == 2) ptx::setmaxnreg_inc<math_registers>();
        if constexpr (config.split_k == 1) {
            consume<config>(params, smem, warpgroup);
        } else {
            consume_split<config>(params, smem, warpgroup);
        }
    }
}

}  // namespace deep_tile
