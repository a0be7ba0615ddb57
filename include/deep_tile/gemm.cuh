// The kernel: persistent, warp-specialised FP8 GEMM with block scales. codegen.py makes the entry, which calls gemm.
//
// out[m, n] = sum over K blocks of a_scale[m, block] * b_scale[n / 128, block] * (a[m, block] . b[n, block])
//
//   who                          does                                            per stage
//   producer warpgroup, warp 0   makes the barriers; TMA: a, b tiles -> stage    waits empty, expects bytes on full
//   producer warpgroup, warp 1   cp.async: a and b scales -> stage               waits empty, arrives on full
//   math warpgroup 0 (and 1)     WGMMA, promotion; per tile its rows' epilogue   waits full, arrives on empty
//
//   barrier      waited for by         arrivals                                      completes when
//   full[s]      math warpgroups       1 operand lane + 32 scale lanes, and the      stage s holds a, b and their
//                                      bytes of a and b (some sent by the peer)      scales
//   empty[s]     both producer warps   every math thread, and 1 per math warp of     nobody reads stage s any more,
//                                      the multicast peer                            here or in the peer
//   named 0, or  math warpgroups and   theirs, and those of the operands' producer   the barriers exist; in a cluster,
//   the cluster's  scale producer                                                    in all its blocks
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

// The operands' producer makes the barriers and then requests its first stages without waiting for another warp: caches
// are cold, instruction caches included, and every step costs some hundred clocks. With the few things that came before
// the first request, it left after 1500 to 2300 clocks; now after 450 to 750 (H200, 2026-11-21). One thread, in a loop
// that the compiler unrolls: with a thread for each barrier the warp is walked lane by lane.
template <GemmConfig config>
__device__ __forceinline__ void initialize_barriers(SharedStorage<config>& smem) {
    constexpr int math_warps = config.math_warpgroups * warpgroup_threads / warp_threads;
    constexpr int peers = config.multicast() ? 1 : 0;
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.full[stage]), 1 + warp_threads);
            ptx::mbarrier_init(ptx::smem_address(&smem.empty[stage]), math_warps * (warp_threads + peers));
        }
#pragma unroll
        for (int i = 0; config.split_k > 1 && i < config.math_warpgroups; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&smem.partial_full[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&smem.partial_empty[i]), 4 * (config.split_k - 1));
        }
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();  // TMA completes them too, and this thread asks it to at once
    }
    __syncwarp();
}

// Warps that use the barriers: those of the math warpgroups and two producers.
template <GemmConfig config>
constexpr int barrier_threads = config.math_warpgroups * warpgroup_threads + 2 * warp_threads;

// The barriers of this block, and of the whole cluster if there is one, are ready to use. By whole warps.
template <GemmConfig config>
__device__ __forceinline__ void announce_barriers() {
    if constexpr (config.cluster() == 1) {
        ptx::bar_arrive(0, barrier_threads<config>);
    } else {
        ptx::barrier_cluster_arrive_relaxed();
    }
}

template <GemmConfig config>
__device__ __forceinline__ void await_barriers() {
    if constexpr (config.cluster() == 1) {
        ptx::bar_sync(0, barrier_threads<config>);
    } else {
        announce_barriers<config>();
        ptx::barrier_cluster_wait();
    }
}

// The share of an operand tile that this block loads: all of it, or one of `parts` slices, sent to those in `mask`.
struct Slice {
    int part, parts;
    u16 mask;
};

template <GemmConfig config>
__device__ __forceinline__ Slice slice_of_a() {
    const int rank = config.multicast() ? ptx::cluster_ctarank() : 0;
    constexpr u16 first_row = config.cluster_n == 1 ? 1 : 1 | 1 << config.cluster_m;
    return {rank / config.cluster_m, config.cluster_n, static_cast<u16>(first_row << rank % config.cluster_m)};
}

template <GemmConfig config>
__device__ __forceinline__ Slice slice_of_b() {
    const int rank = config.multicast() ? ptx::cluster_ctarank() : 0;
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

// One thread announces a stage and requests its tile of `b`, or requests its tile of `a`; each scale block is a box of
// its own. `step` counts the stages of the whole K.
template <GemmConfig config>
__device__ __forceinline__ void load_b(const GemmParams& params, SharedStorage<config>& smem, int stage, int row,
                                       int step) {
    const u32 bytes = (params.a_box_rows * config.cluster_n + config.block_n) * config.block_k;
    ptx::mbarrier_arrive_expect_tx(ptx::smem_address(&smem.full[stage]), bytes);
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        load_slice(smem.b[stage] + i * config.block_n * scale_block, params.b_map,
                   step * config.block_k + i * scale_block, row, config.block_n / config.cluster_m,
                   slice_of_b<config>(), smem.full[stage]);
    }
}

template <GemmConfig config>
__device__ __forceinline__ void load_a(const GemmParams& params, SharedStorage<config>& smem, int stage, int row,
                                       int step) {
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        load_slice(smem.a[stage] + i * config.block_m * scale_block, params.a_map,
                   step * config.block_k + i * scale_block, row, params.a_box_rows, slice_of_a<config>(),
                   smem.full[stage]);
    }
}

// The first round of stages, before anything else: returns how many it has requested. When the caller says that `b`
// does not depend on the preceding kernel, it is requested before that kernel has ended. With multicast, blocks of the
// cluster write into each other's stages, so each waits for the other's barriers; with split K that can wait until the
// requests are under way.
template <GemmConfig config>
__device__ __forceinline__ int request_first_stages(const GemmParams& params, SharedStorage<config>& smem) {
    initialize_barriers<config>(smem);
    announce_barriers<config>();
    const Tile tile = TileScheduler<config>(params).first();
    const KRange range = k_range<config>(params);
    const int stages = min(config.stages, range.end - range.begin);
    const bool early_b = params.early_b;
    if constexpr (config.multicast()) ptx::barrier_cluster_wait();
    if (early_b && ptx::elect_sync()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) load_b(params, smem, stage, tile.n, range.begin + stage);
    }
    __syncwarp();
    ptx::griddepcontrol_wait();
    if (ptx::elect_sync()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
            if (!early_b) load_b(params, smem, stage, tile.n, range.begin + stage);
            load_a(params, smem, stage, tile.m, range.begin + stage);
        }
    }
    __syncwarp();
    if constexpr (config.split_k > 1) ptx::barrier_cluster_wait();
    return stages;
}

// One warp; `requested` stages are under way. A block may not exit before its peer is done with what it multicasts: the
// extra round of empty waits at the end sees to that.
template <GemmConfig config>
__device__ __forceinline__ void produce_operands(const GemmParams& params, SharedStorage<config>& smem, int requested) {
    const KRange range = k_range<config>(params);
    PipelineState<config.stages> state;
    TileScheduler<config> tiles(params);
    for (Tile tile = tiles.first(); tile.valid; tile = tiles.next()) {
        for (int step = range.begin; step < range.end; ++step, --requested, state.advance()) {
            if (requested > 0) continue;
            wait(smem.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) {
                load_b(params, smem, state.stage, tile.n, step);
                load_a(params, smem, state.stage, tile.m, step);
            }
            __syncwarp();
        }
    }
    if constexpr (!config.multicast()) return;
    for (int stage = 0; stage < config.stages; ++stage) {
        wait(smem.empty[state.stage], state.phase ^ 1);
        state.advance();
    }
}

// One warp. Rows and columns beyond the matrix take the last scale there is: their products are never stored.
template <GemmConfig config>
__device__ __forceinline__ void produce_scales(const GemmParams& params, SharedStorage<config>& smem) {
    constexpr int rows_per_lane = config.block_m / warp_threads;
    const int lane = threadIdx.x % warp_threads;
    const int last_group = (params.n - 1) / scale_block;
    const int k_blocks = ceil_div(params.k, scale_block);
    const KRange range = k_range<config>(params);
    const long long first_k = range.begin * config.scale_blocks;
    PipelineState<config.stages> state;
    TileScheduler<config> tiles(params);
    await_barriers<config>();
    ptx::griddepcontrol_wait();
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
// shares the operands: racecheck follows a barrier's arrivals but not __syncwarp, and this costs nothing (H200,
// 2026-11-21).
template <GemmConfig config>
__device__ __forceinline__ void release(u64& empty) {
    const u32 barrier = ptx::smem_address(&empty);
    ptx::mbarrier_arrive(barrier);
    if constexpr (config.multicast()) {
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

// What stands between two WGMMAs of a warpgroup is time in which only the other one feeds the tensor cores. So, where
// registers allow, a K block is multiplied while the one before is promoted: 3 % for 128x128, more where there is one
// math warpgroup only. Wider tiles at least await the next stage and read its scales while a WGMMA of this stage runs:
// 2 % at k = 2048, 5 % at 16384. The first WGMMA is best; with multicast, whose stages complete later, the last
// (128x256, H200, 2026-11-21).
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
        const int steps = range_.end - range_.begin;
        if (steps <= 0) return;
        await_stage();
        if constexpr (config.block_sets == 2) {
            accumulate_ahead(sums, steps);
        } else {
            accumulate_in_turn(sums, steps);
        }
    }

   private:
    static constexpr int chunks = config.chunks_m * config.chunks_n;
    static constexpr int await_in = config.multicast() ? chunks - 1 : 0;

    __device__ __forceinline__ void await_stage() const { wait(smem_.full[state_.stage], state_.phase); }

    // Begins the products of one chunk of a stage.
    __device__ __forceinline__ void begin(Blocks<config>& blocks, int stage, int chunk_m, int chunk_n) const {
        const u64 a = matrix_descriptor(smem_.a[stage] + first_row_ * scale_block);
        const u64 b = matrix_descriptor(smem_.b[stage]);
        begin_blocks<config>(blocks, a + chunk_m * (mma_m * scale_block / 16),
                             b + chunk_n * (config.mma_n * scale_block / 16));
    }

    __device__ __forceinline__ void promote_blocks(Accumulators<config>& sums, const Blocks<config>& blocks,
                                                   const Scales<config>& scales, int chunk_m, int chunk_n) const {
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
            promote<config>(sums[chunk_m][chunk_n], blocks[i], scales.row[i][chunk_m], scales.column[i],
                            chunk_n * config.mma_n);
        }
    }

    __device__ __forceinline__ void accumulate_in_turn(Accumulators<config>& sums, int steps) {
        Scales<config> scales;
        scales.load(smem_, state_.stage, thread_row_);
        for (; steps > 0; --steps) {
            const int stage = state_.stage;
            Scales<config> next_scales;
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
                Blocks<config> blocks;
                begin(blocks, stage, i / config.chunks_n, i % config.chunks_n);
                if (i == await_in) {
                    state_.advance();
                    if (steps > 1) {
                        await_stage();
                        next_scales.load(smem_, state_.stage, thread_row_);
                    }
                }
                finish_blocks<config>(blocks);
                if (i == chunks - 1) release<config>(smem_.empty[stage]);
                promote_blocks(sums, blocks, scales, i / config.chunks_n, i % config.chunks_n);
            }
            scales = next_scales;
        }
    }

    // Two sets of temporaries take turns. ptxas wants both loop and tail without a branch around a WGMMA, and the first
    // wait after a jump to be for all of them.
    __device__ __forceinline__ void accumulate_ahead(Accumulators<config>& sums, int steps) {
        Blocks<config> even, odd;
        begin(even, state_.stage, 0, 0);
        for (; steps > 2; steps -= 2) {
            step<true>(sums, even, odd);
            step<true>(sums, odd, even);
        }
        if (steps == 2) {
            step<true>(sums, even, odd);
            step<false>(sums, odd, even);
        } else {
            step<false>(sums, even, odd);
        }
    }

    template <bool more>
    __device__ __forceinline__ void step(Accumulators<config>& sums, Blocks<config>& present, Blocks<config>& next) {
        const int stage = state_.stage;
        Scales<config> scales;
        scales.load(smem_, stage, thread_row_);
        state_.advance();
        if constexpr (more) await_stage();
        finish_blocks<config>(present);
        if constexpr (more) begin(next, state_.stage, 0, 0);
        promote_blocks(sums, present, scales, 0, 0);
        release<config>(smem_.empty[stage]);
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
        reduction.await();
        finish_part<config, 0>(reduction, epilogue, sums, tile.m + first_row, tile.n, !next.valid);
        tile = next;
    }
    epilogue.drain();
}

template <GemmConfig config>
__device__ __forceinline__ void gemm(const GemmParams& params) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    static_assert(sizeof(SharedStorage<config>) == config.smem_bytes, "config.py and config.cuh disagree");
    auto& smem = *reinterpret_cast<SharedStorage<config>*>(dynamic_smem);

    // From lane 0, so that the compiler knows it as uniform: branches and WGMMA descriptors that depend on it then
    // live in uniform registers (946 -> 1226 TFLOPS for 128x192; H200, 2026-11-21).
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0);
    constexpr int first_producer = config.math_warpgroups * warpgroup_threads / warp_threads;
    // Before anything that waits for math warps, which wait for these registers.
    if (config.math_warpgroups == 2 && warp >= first_producer) ptx::setmaxnreg_dec<producer_registers>();
    // Here and not among the producers' code, which ptxas puts last: the way to the first request is one straight line.
    int requested = 0;
    if (warp == first_producer) requested = request_first_stages<config>(params, smem);
    ptx::griddepcontrol_launch_dependents();
    if (warp >= first_producer) {
        if (warp == first_producer) produce_operands<config>(params, smem, requested);
        if (warp == first_producer + 1) produce_scales<config>(params, smem);
        return;
    }
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(params.a_map);
        ptx::prefetch_tensormap(params.b_map);
    }
    if constexpr (config.math_warpgroups == 2) ptx::setmaxnreg_inc<math_registers>();
    await_barriers<config>();
    ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
    const int warpgroup = warp / (warpgroup_threads / warp_threads);
    if constexpr (config.split_k == 1) {
        consume<config>(params, smem, warpgroup);
    } else {
        consume_split<config>(params, smem, warpgroup);
    }
}

}  // namespace deep_tile
