// The kernel: persistent, warp-specialised FP8 GEMM with block scales. codegen.py makes the entry, which calls gemm.
//
// out[m, n] = sum over K blocks of a_scale[m, block] * b_scale[n / 128, block] * (a[m, block] . b[n, block])
//
//   who                          does                                            per stage
//   producer warpgroup, warp 0   makes full barriers; TMA: a, b tiles -> stage   waits empty, expects bytes on full
//   1 to 3 more of its warps     cp.async: a and b scales -> stage, in turn      wait empty, arrive on full
//   its other warps, if it may   TMA: output boxes -> out                        wait boxes full, arrive on empty
//   math warpgroup 0 (and 1)     WGMMA, promotion; per tile its rows' epilogue   waits full, arrives on empty
//
//   barrier      waited for by         arrivals                                      completes when
//   full[s]      math warpgroups       1 operand lane + 32 scale lanes, and TMA's    stage s holds a, b and their
//                                      bytes (some of a or b sent by the peer)       scales
//   empty[s]     the producer warps    every math thread, and 1 per math warp of     nobody reads stage s any more,
//                                      the multicast peer                            here or in the peer
//   column full  math warpgroups       1 operand lane, and TMA's bytes               a K block of a resident b is there
//   column empty the operands' warp    every math thread, in a column's last tile    nobody reads that K block any more
//   boxes full   a store warp          a math warpgroup's threads                    its output boxes are written
//   boxes empty  a math warpgroup      its store warp's threads                      their buffers have been read
//   own          a math warpgroup      its threads, where they store boxes           a box is written; is free
//                                      together themselves
//   turn         a math warpgroup      the other one's threads                       that has begun its WGMMAs
//   apart        math warpgroup 1      the threads of math warpgroup 0               that has multiplied its tile
//   all          all but the operands' every thread, once                            the barriers exist; in a cluster,
//                warp                                                                in all its blocks
//   others       the operands' warp    math warp 0                                   all but the full ones exist, where
//                                                                                    there is no cluster
//
// Scales travel with the stage, because reading them from global memory in the math loop costs 6 to 8 % (H200,
// 2026-11-21); by cp.async, 4 bytes a copy, because that takes any stride, and so every scale layout, with no alignment
// rule and no latency. In tiles of several chunks TMA copies those of `a` with the operands, if they lie side by side.
//
// Where all K blocks of a tile's `b` have room, it may stay while the block works down a column of tiles: stages then
// hold `a` and scales only (GemmConfig.resident_b). Where tiles of one width would leave SMs idle in the last wave, a
// launch may end with narrow ones (GemmConfig.narrow_n): the math warps' code is there for both, all else serves either.
#pragma once

#include "reduce.cuh"

namespace deep_tile {

// The operands' producer makes the barriers that its first requests need, and requests them at once: caches are cold,
// instruction caches included, and every step counts. The others are math warp 0's to make, meanwhile. A first request
// left after 1500 to 2300 clocks when other things came before it, after 1300 to 1450 with a division and two branches
// for the tile and its maps on the way, and now leaves after 800 to 1200 (H200, 2026-11-22; docs/performance.md, "Of a
// launch"). By one thread, in loops that the compiler unrolls: with a thread for each barrier the warp is walked lane by
// lane.
template <GemmConfig config>
__device__ __forceinline__ void initialize_full_barriers(SharedStorage<config>& smem) {
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.full[stage]), 1 + warp_threads);
        }
        if constexpr (config.resident_b()) {
#pragma unroll
            for (int slot = 0; slot < config.b_slots; ++slot) {
                ptx::mbarrier_init(ptx::smem_address(&smem.resident.full[slot]), 1);
            }
        }
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();  // TMA completes them too, and this thread asks it to at once
    }
    __syncwarp();
}

template <GemmConfig config>
__device__ __forceinline__ void initialize_other_barriers(SharedStorage<config>& smem) {
    constexpr int math_warps = config.math_warpgroups * warpgroup_threads / warp_threads;
    constexpr int peers = config.multicast() ? 1 : 0;
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.empty[stage]), math_warps * (warp_threads + peers));
        }
        if constexpr (config.resident_b()) {
#pragma unroll
            for (int slot = 0; slot < config.b_slots; ++slot) {
                ptx::mbarrier_init(ptx::smem_address(&smem.resident.empty[slot]), math_warps * warp_threads);
            }
        }
#pragma unroll
        for (int i = 0; config.split_k > 1 && i < config.math_warpgroups; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&smem.partial_full[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&smem.partial_empty[i]), 4 * (config.split_k - 1));
        }
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    if constexpr (config.cluster() == 1) ptx::bar_arrive(others_barrier, 2 * warp_threads);
}

// By the operands' producer: the barriers that it has made are ready to use.
template <GemmConfig config>
__device__ __forceinline__ void announce_full_barriers() {
    if constexpr (config.cluster() == 1) {
        ptx::bar_arrive(all_barrier, config.threads);
    } else {
        ptx::barrier_cluster_arrive_relaxed();
    }
}

// Until the barriers of this block, and of the whole cluster if there is one, are ready to use. The producer of the
// operands, which has announced its own, waits for math warp 0 alone: not for others that only want to use them.
template <GemmConfig config>
__device__ __forceinline__ void await_barriers(bool announced) {
    if constexpr (config.cluster() > 1) {
        if (!announced) ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait();
    } else if (announced) {
        ptx::bar_sync(others_barrier, 2 * warp_threads);
    } else {
        ptx::bar_sync(all_barrier, config.threads);
    }
}

// Whether TMA copies the scales of the tile's rows: if they lie side by side, those of a whole tile. The launcher says
// whether they do, beside sizes that are read first anyway: the first request waits for whatever must be read before it.
template <GemmConfig config>
__device__ __forceinline__ bool scales_in_bulk(const GemmParams& params, Tile tile) {
    return config.bulk_scales && tile.m + config.block_m <= params.bulk_scale_rows;
}

// The boxes by which TMA fetches a tile's operands, or each half of one that two blocks share. The last tile's hold the
// rows that there are, none if the tile lies beyond the matrix: what is in shared memory below them only makes rows and
// columns that are not stored. Boxes that reach beyond the matrix make a K block take up to 1.7 times as long: 128x64 took
// 94 us at 192x7168x16384, 59 at 256x7168x16384 (H200, 2026-11-22).
struct OperandBox {
    const TensorMap* map;
    int rows;
};

template <GemmConfig config>
__device__ __forceinline__ OperandBox a_box(const GemmParams& params, Tile tile) {
    const bool last = tile.m + config.block_m > params.m;
    const bool beyond = config.cluster_m > 1 && tile.m >= params.m;
    return {&params.a_maps[last], beyond ? 0 : last ? params.a_tail_rows : config.block_m / config.cluster_n};
}

template <GemmConfig config>
__device__ __forceinline__ OperandBox b_box(const GemmParams& params, Tile tile) {
    if (config.has_narrow() && tile.narrow) return {&params.narrow_b_map, config.narrow_n};
    const bool last = tile.n + config.block_n > params.n;
    const bool beyond = config.cluster_n > 1 && tile.n >= params.n;
    return {&params.b_maps[last], beyond ? 0 : last ? params.b_tail_rows : config.block_n / config.cluster_m};
}

// Requests one tile's operands, by one thread; each scale block is a box of its own. Of a tile that the two blocks of a
// cluster share, each requests half and sends it to both, or, without multicast, both halves for itself.
template <GemmConfig config, bool multicast = config.multicast()>
class OperandLoader {
   public:
    __device__ __forceinline__ OperandLoader(const GemmParams& params, SharedStorage<config>& smem, Tile tile)
        : params_(params),
          smem_(smem),
          rank_(multicast ? ptx::cluster_ctarank() : 0),
          tile_(tile),
          a_(a_box<config>(params, tile)),
          b_(b_box<config>(params, tile)) {}

    // Announces a stage and requests its tile of `b`. `step` counts the stages of the whole K; a resident `b` has a slot
    // for each.
    __device__ __forceinline__ void load_b(int stage, int step) const {
        constexpr bool shared = config.cluster_m > 1;
        if constexpr (config.resident_b()) {
            const u32 barrier = ptx::smem_address(&smem_.resident.full[step]);
            ptx::mbarrier_arrive_expect_tx(barrier, b_.rows * config.block_k);
            load<config.block_n, shared>(smem_.b[step], b_, barrier, tile_.n, step);
        } else {
            announce(stage, b_.rows * config.cluster_m);
            load<config.block_n, shared>(smem_.b[stage], b_, full(stage), tile_.n, step);
        }
    }

    // Its scales, if TMA copies them, go first: behind the operands in TMA's queue they gain nothing.
    __device__ __forceinline__ void load_a(int stage, int step) const {
        if constexpr (config.resident_b()) announce(stage, 0);
        if (scales_in_bulk<config>(params_, tile_)) {
            ptx::cp_async_bulk_load(ptx::smem_address(smem_.a_scale[stage][0]),
                                    params_.a_scale + tile_.m + step * params_.a_scale_stride_k, row_scale_bytes,
                                    full(stage));
        }
        constexpr bool shared = config.cluster_n > 1;
        load<config.block_m, shared>(smem_.a[stage], a_, full(stage), tile_.m, step);
    }

    // Requests what another tile needs of `b` into L2: nothing beyond the matrix, for which there may be no map.
    __device__ __forceinline__ void prefetch_b(Tile tile, int step) const {
        const OperandBox operand = b_box<config>(params_, tile);
        if (operand.rows > 0) ptx::cp_async_bulk_prefetch_tensor(*operand.map, step * config.block_k, tile.n);
    }

   private:
    static constexpr u32 row_scale_bytes = config.block_m * sizeof(float);

    __device__ __forceinline__ u32 full(int stage) const { return ptx::smem_address(&smem_.full[stage]); }

    // What a stage will get: rows of both operands, and the scales that TMA copies.
    __device__ __forceinline__ void announce(int stage, int b_rows) const {
        const u32 operands = (a_.rows * config.cluster_n + b_rows) * config.block_k;
        const u32 scales = scales_in_bulk<config>(params_, tile_) ? row_scale_bytes : 0;
        ptx::mbarrier_arrive_expect_tx(full(stage), operands + scales);
    }

    template <int tile_rows, bool shared>
    __device__ __forceinline__ void load(u8* tile, OperandBox operand, u32 barrier, int row, int step) const {
        if (config.multicast() && operand.rows == 0) return;
        constexpr u16 both_blocks = 0b11;
        const int first = shared ? rank_ * operand.rows : 0;
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
            const u32 smem = ptx::smem_address(tile) + (i * tile_rows + first) * scale_block;
            const int k = step * config.block_k + i * scale_block;
            if constexpr (shared && multicast) {
                ptx::cp_async_bulk_tensor_load_multicast(smem, *operand.map, k, row + first, barrier, both_blocks);
            } else {
                constexpr int boxes = shared ? 2 : 1;
#pragma unroll
                for (int box = 0; box < boxes; ++box) {
                    const int rows = box * operand.rows;
                    ptx::cp_async_bulk_tensor_load(smem + rows * scale_block, *operand.map, k, row + rows, barrier);
                }
            }
        }
    }

    const GemmParams& params_;
    SharedStorage<config>& smem_;
    const int rank_;
    const Tile tile_;
    const OperandBox a_, b_;
};

// The first stages, before anything else: returns how many it has requested. When the caller says that `b` does not
// depend on the preceding kernel, it is requested before that kernel has ended; that way costs a jump, the other none.
//
// Five at most: behind those of 6 to 15 the first comes later, 0.5 to 1 % at m <= 512 (H200, 2026-11-21). Two or three
// are there before the others are requested, and then the tensor cores wait.
//
// Without multicast, which would have to wait until the peer has made its barriers: clusters gain 0.3 to 1 %, 0.1 to 0.4
// us of every launch (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ int request_first_stages(const GemmParams& params, SharedStorage<config>& smem) {
    const Tile tile = TileScheduler<config>(params).first();
    const KRange range = k_range<config>(params);
    const int stages = min(min(config.stages, 5), range.end - range.begin);
    const OperandLoader<config, false> loader(params, smem, tile);
    const bool early_b = params.early_b;
    if (!early_b) ptx::griddepcontrol_wait();
    if (ptx::elect_sync()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
            loader.load_b(stage, range.begin + stage);
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

// Whether this block prefetches step `step` of the tile of `b` that it will need `next`, in a new column or not. If it is
// to keep that, all of it: 1 to 3 % at k = 512 (H200, 2026-11-21). Else steps of the first round: each of the blocks that
// share these columns takes some.
template <GemmConfig config>
__device__ __forceinline__ bool prefetches(const GemmParams& params, Tile next, int step, bool new_column) {
    if constexpr (config.resident_b()) {
        return next.valid && new_column;
    } else {
        if (!config.prefetches_b || !next.valid || step >= config.stages) return false;
        return ((next.m / config.block_m + step) & ((1 << params.raster_rows_log2) - 1)) == 0;
    }
}

// One warp; `requested` stages are under way. A block may not exit before its peer is done with what it multicasts: the
// extra round of empty waits at the end sees to that.
template <GemmConfig config>
__device__ __forceinline__ void produce_operands(const GemmParams& params, SharedStorage<config>& smem, int requested) {
    const KRange range = k_range<config>(params);
    PipelineState<config.stages> state;
    TileScheduler<config> tiles(params);
    ColumnState column;
    Tile tile = tiles.first();
    for (Tile next; tile.valid; tile = next) {
        const OperandLoader<config> loader(params, smem, tile);
        if constexpr (config.resident_b()) column.ends = tiles.ends_column();
        next = tiles.next();
        for (int step = range.begin; step < range.end; ++step, --requested, state.advance()) {
            if (prefetches<config>(params, next, step, column.ends)) {
                if (ptx::elect_sync()) loader.prefetch_b(next, step);
                __syncwarp();
            }
            if (requested > 0) continue;
            if constexpr (config.resident_b()) {
                if (column.begins) wait(smem.resident.empty[step], column.phase ^ 1);
            }
            wait(smem.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) {
                if (!config.resident_b() || column.begins) loader.load_b(state.stage, step);
                loader.load_a(state.stage, step);
            }
            __syncwarp();
        }
        column.advance();
    }
    if constexpr (!config.multicast()) return;
    for (int stage = 0; stage < config.stages; ++stage) {
        wait(smem.empty[state.stage], state.phase ^ 1);
        state.advance();
    }
}

// Where a row's scale is within a tile's: beside that of the other row of the thread that needs both, 8 rows away, or,
// where TMA may have copied them, in order.
template <GemmConfig config>
__device__ __forceinline__ int a_scale_slot(int row) {
    return config.bulk_scales ? row : row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

// Where a scale warp reads a tile's scales: each lane those of its rows of `a`, unless TMA copies them, and the first
// lanes those of the slots of columns of `b`. Rows and columns beyond the matrix take the last scale there is: their
// products are never stored.
//
// Places are counted in bytes, of 32 bits, so that nothing but additions is left for each stage. As elements, or as
// pointers with 32-bit strides, ptxas has the multiplier work them out, which FFMAs of math warps then wait for: 128-row
// tiles took up to 9 % longer. With 64-bit strides the way to the first request was longer, and products took 0.7 % more
// time up to m = 1024 (H200, 2026-11-22).
template <GemmConfig config>
class ScaleReader {
   public:
    __device__ __forceinline__ ScaleReader(const GemmParams& params, Tile tile, int step)
        : params_(params), in_bulk_(scales_in_bulk<config>(params, tile)), step_(step) {
        const int last_group = (params.n - 1) / scale_block;
        const int first_k = step * config.scale_blocks;
        const int group = min((tile.n + lane() * config.b_scale_columns) / scale_block, last_group);
        b_ = sizeof(float) * (group * params.b_scale_stride_n + first_k * params.b_scale_stride_k);
#pragma unroll
        for (int i = 0; i < rows_per_lane; ++i) {
            const int row = min(tile.m + i * warp_threads + lane(), params.m - 1);
            a_[i] = sizeof(float) * (row * params.a_scale_stride_m + first_k * params.a_scale_stride_k);
        }
    }

    // Requests this step's for a stage, and turns to the warp's next step; blocks beyond the matrix get zeros.
    __device__ __forceinline__ void copy(SharedStorage<config>& smem, int stage) {
        const int k_blocks = ceil_div(params_.k, scale_block);
        constexpr int skipped = (config.scale_warps - 1) * config.scale_blocks;
#pragma unroll
        for (int j = 0; j < config.scale_blocks; ++j) {
            const bool valid = config.scale_blocks == 1 || step_ * config.scale_blocks + j < k_blocks;
            const u32 next = sizeof(float) * (j + 1 < config.scale_blocks ? 1 : 1 + skipped);
#pragma unroll
            for (int i = 0; i < rows_per_lane && !in_bulk_; ++i) {
                const int slot = i * warp_threads + a_scale_slot<config>(lane());
                ptx::cp_async(ptx::smem_address(&smem.a_scale[stage][j][slot]), at(params_.a_scale, valid ? a_[i] : 0),
                              valid);
                a_[i] += next * params_.a_scale_stride_k;
            }
            if (lane() < config.b_scale_slots) {
                ptx::cp_async(ptx::smem_address(&smem.b_scale[stage][j][lane()]), at(params_.b_scale, valid ? b_ : 0),
                              valid);
                b_ += next * params_.b_scale_stride_k;
            }
        }
        step_ += config.scale_warps;
    }

   private:
    static constexpr int rows_per_lane = config.block_m / warp_threads;

    static __device__ __forceinline__ int lane() { return threadIdx.x % warp_threads; }

    static __device__ __forceinline__ const float* at(const float* scales, u32 bytes) {
        return reinterpret_cast<const float*>(reinterpret_cast<const u8*>(scales) + bytes);
    }

    const GemmParams& params_;
    const bool in_bulk_;
    u32 a_[rows_per_lane], b_;  // bytes from the first scale to those of this step
    int step_;
};

// A scale warp's first stage is requested early, like its operands, because scales take as long to arrive: 3 to 5 % for
// n = 7168, k = 2048 (H200, 2026-11-21). False if there is none.
template <GemmConfig config>
__device__ __forceinline__ bool request_first_scales(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    const KRange range = k_range<config>(params);
    ptx::griddepcontrol_wait();
    if (warp >= min(config.stages, range.end - range.begin)) return false;
    ScaleReader<config>(params, TileScheduler<config>(params).first(), range.begin + warp).copy(smem, warp);
    return true;
}

// One of the scale warps; its first stage's are under way if `requested`.
template <GemmConfig config>
__device__ __forceinline__ void produce_scales(const GemmParams& params, SharedStorage<config>& smem, int warp,
                                               bool requested) {
    const KRange range = k_range<config>(params);
    const int steps = range.end - range.begin;
    PipelineState<config.stages> state;
    state.advance(warp);
    int step = warp;  // of the tile, the next of this warp
    if (requested) {
        ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_address(&smem.full[state.stage]));
        step += config.scale_warps;
        state.advance(config.scale_warps);
    }
    TileScheduler<config> tiles(params);
    while (true) {
        const Tile tile = tiles.next();
        if (!tile.valid) break;
        ScaleReader<config> scales(params, tile, range.begin + step);
        for (; step < steps; step += config.scale_warps) {
            wait(smem.empty[state.stage], state.phase ^ 1);
            scales.copy(smem, state.stage);
            ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_address(&smem.full[state.stage]));
            state.advance(config.scale_warps);
        }
        step -= steps;
    }
}

// Gives stages back to those who fill them: this block's producers and the block that shares operands. Every lane says
// so here, and one for all of them there: racecheck follows a barrier's arrivals but not __syncwarp, and this costs
// nothing (H200, 2026-11-21).
template <GemmConfig config>
class Releaser {
   public:
    __device__ __forceinline__ explicit Releaser(SharedStorage<config>& smem) : empty_(ptx::smem_address(smem.empty)) {
        if constexpr (config.multicast()) peer_empty_ = ptx::mapa(empty_, ptx::cluster_ctarank() ^ 1);
    }

    // The warp has read what it needs of the stage.
    __device__ __forceinline__ void release(int stage) const {
        constexpr u32 barrier_bytes = sizeof(u64);
        ptx::mbarrier_arrive(empty_ + stage * barrier_bytes);
        if constexpr (config.multicast()) {
            ptx::mbarrier_arrive_cluster(peer_empty_ + stage * barrier_bytes, threadIdx.x % warp_threads == 0);
        }
    }

   private:
    const u32 empty_;
    u32 peer_empty_;
};

// What one math thread needs of a stage's scales: those of its two rows in each WGMMA tile, and of all columns.
template <GemmConfig config>
struct Scales {
    float row[config.scale_blocks][config.chunks_m][2];
    float column[config.scale_blocks][config.b_scale_slots];

    // Hides from the compiler that all threads read the same: it would keep that in a uniform register, and wait for it
    // to be read in the middle of a stage, for which 128x192 took 5 to 12 % longer (H200, 2026-11-21).
    static __device__ __forceinline__ int not_uniform_zero() { return threadIdx.x / 1024 * 4; }

    // `slot` is that of the thread's first row.
    __device__ __forceinline__ void load(const SharedStorage<config>& smem, int stage, int slot) {
#pragma unroll
        for (int block = 0; block < config.scale_blocks; ++block) {
#pragma unroll
            for (int i = 0; i < config.chunks_m; ++i) {
                const float* rows = &smem.a_scale[stage][block][slot + i * mma_m];
                const float2 pair = config.bulk_scales ? float2{rows[0], rows[8]} : reinterpret_cast<const float2&>(*rows);
                row[block][i][0] = pair.x;
                row[block][i][1] = pair.y;
            }
            const float* columns = smem.b_scale[stage][block] + (config.takes_turns ? not_uniform_zero() : 0);
#pragma unroll
            for (int i = 0; i < config.b_scale_slots; ++i) column[block][i] = columns[i];
        }
    }
};

// f(Constant<value>{}) for a value from `first` to first + count - 1.
template <int value>
struct Constant {};

template <int count, int first = 0, typename Function>
__device__ __forceinline__ void with_constant(int value, Function f) {
    if constexpr (count == 1) {
        f(Constant<first>{});
    } else if (value < first + count / 2) {
        with_constant<count / 2, first>(value, f);
    } else {
        with_constant<count - count / 2, first + count / 2>(value, f);
    }
}

// What stands between two WGMMAs of a warpgroup is time in which only the other one feeds the tensor cores. So, where
// registers allow, a K block is multiplied while the one before is promoted: 3 % for 128x128, more where there is one
// math warpgroup only. Wider tiles at least await the next stage and read its scales while a WGMMA of this stage runs:
// 2 % at k = 2048, 5 % at 16384. The first WGMMA is best; with multicast, whose stages complete later, the last
// (128x256, H200, 2026-11-21).
//
// The tensor cores serve warpgroups whose WGMMAs are under way at the same time instruction by instruction. Two that
// begin together end together, and promote together: 128x192 then takes 1013 clocks per K block, where one begins when
// the other is half way 775, and chance decides. So they take turns: one begins when the other has begun. Tiles of two
// chunks do not, whose WGMMAs are no longer than what stands between them: 3 to 5 % slower (H200, 2026-11-21).
template <GemmConfig config>
class Consumer {
   public:
    __device__ __forceinline__ Consumer(const GemmParams& params, SharedStorage<config>& smem, int warpgroup,
                                        PipelineState<config.stages> state)
        : smem_(smem),
          releaser_(smem),
          range_(k_range<config>(params)),
          warpgroup_(warpgroup),
          first_{descriptor_address(smem.a[0] + warpgroup * config.rows_per_warpgroup * scale_block),
                 descriptor_address(smem.b[0])},
          state_(state) {
        const int thread = threadIdx.x % warpgroup_threads;
        scale_slot_ = a_scale_slot<config>(warpgroup * config.rows_per_warpgroup + thread / warp_threads * 16 +
                                   thread % warp_threads / 4);
        if constexpr (config.carries_descriptors) carried_.start(first_);
        if (warpgroup == 1) end_turn();  // warpgroup 0 begins
    }

    // Stages of a tile.
    __device__ __forceinline__ int steps() const { return range_.end - range_.begin; }

    // Waits for the next stage, and reads its scales: before the first tile.
    __device__ __forceinline__ void acquire() { acquire(scales_); }

    // Before multiplying: whether the next tile is in another column.
    __device__ __forceinline__ void set_ends_column(bool ends) { column_.ends = ends; }

    // To be called when the next tile's first stage has been acquired: begins its first WGMMAs, if they need not wait.
    __device__ __forceinline__ void begin_tile() {
        if constexpr (config.chunks == 1) begin_stage();
    }

    // Adds this block's part of a tile to `sums`; its first column is `column`. If there are `more` tiles, acquires the
    // next one's first stage. meanwhile(chunk) is called while the WGMMAs of the last stage after that chunk's run.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int column, bool more, Meanwhile meanwhile) {
        const int place = column / config.column_group % config.column_shifts;
        if constexpr (config.pairs) {
            constexpr int spare = scale_block - config.block_n;
            constexpr int alike = spare > 0 ? spare / config.column_group : 0;  // up to there, one scale
            with_constant<config.column_shifts - alike, alike>(max(place, alike),
                                                               [&](auto shift) { multiply_pairs(shift, sums, more); });
        } else if constexpr (config.block_sets == 2) {
            multiply_ahead(sums, more);
        } else {
            with_constant<config.column_shifts>(place,
                                                [&](auto shift) { multiply_in_turn(shift, sums, more, meanwhile); });
        }
    }

    // After the last tile: the other warpgroup has announced a turn that nobody takes. Returns the next stage.
    __device__ __forceinline__ PipelineState<config.stages> end() const {
        if (warpgroup_ == 0) await_turn();
        return state_;
    }

   private:
    static constexpr int await_in = config.multicast() ? config.chunks - 1 : 0;

    // Whether a stage that has been multiplied is given back before its promotion. One math warpgroup gains 0.6 to 0.8 %
    // with 256 of K per stage. Of two, 128x112 and 128x128 lose 0.3 % by it, and 128x224 1 % (H200, 2026-11-22).
    static constexpr bool releases_first = config.math_warpgroups == 1;

    // Waits for a stage, and reads its scales.
    __device__ __forceinline__ void acquire(Scales<config>& scales) const {
        wait(smem_.full[state_.stage], state_.phase);
        if constexpr (config.resident_b()) {
            if (column_.begins) wait(smem_.resident.full[step_], column_.phase);
        }
        scales.load(smem_, state_.stage, scale_slot_);
    }

    // Where the present stage's tile of `b` is.
    __device__ __forceinline__ int slot() const { return config.resident_b() ? step_ : state_.stage; }

    // To the next stage.
    __device__ __forceinline__ void advance() {
        state_.advance();
        if constexpr (config.hides_addresses()) state_.stage = ptx::opaque(state_.stage);
        if constexpr (config.resident_b()) {
            step_ += 1;
            if (step_ < steps()) return;
            step_ = 0;
            column_.advance();
        }
    }

    // The stage has been read, and the slot for the last time if the column ends.
    __device__ __forceinline__ void release(int stage, int slot) const {
        releaser_.release(stage);
        if constexpr (config.resident_b()) {
            ptx::mbarrier_arrive(ptx::smem_address(&smem_.resident.empty[slot]), column_.ends);
        }
    }

    __device__ __forceinline__ void await_turn() const {
        if constexpr (config.takes_turns) ptx::bar_sync(turn_barrier + warpgroup_, 2 * warpgroup_threads);
    }

    __device__ __forceinline__ void end_turn() const {
        if constexpr (config.takes_turns) ptx::bar_arrive(turn_barrier + 1 - warpgroup_, 2 * warpgroup_threads);
    }

    // Begins the products of one chunk of a stage.
    __device__ __forceinline__ void begin(Blocks<config>& blocks, int stage, int slot, int chunk_m, int chunk_n) const {
        constexpr u32 a_stage = config.block_m * config.block_k, b_stage = config.buffer_n * config.block_k;
        await_turn();
        if constexpr (config.carries_descriptors) {
            begin_blocks<config>(blocks, carried_);
        } else {
            const u32 a_low = first_.a_low + (stage * a_stage + chunk_m * mma_m * scale_block) / 16;
            const u32 b_low = first_.b_low + (slot * b_stage + chunk_n * config.mma_n * scale_block) / 16;
            begin_blocks<config>(blocks, Descriptors<config>{a_low, b_low});
        }
        end_turn();
    }

    // To those of the stage after the one that has been begun: behind promotion, where it costs least.
    __device__ __forceinline__ void advance_descriptors() {
        if constexpr (config.carries_descriptors) carried_.advance(state_.stage);
    }

    template <int shift>
    __device__ __forceinline__ void promote_blocks(Constant<shift>, Accumulators<config>& sums,
                                                   const Blocks<config>& blocks, const Scales<config>& scales,
                                                   int chunk_m, int chunk_n) const {
#pragma unroll
        for (int i = 0; i < config.scale_blocks; ++i) {
            promote<config, shift>(sums[chunk_m][chunk_n], blocks[i], scales.row[i][chunk_m], scales.column[i],
                                   chunk_n * config.mma_n);
        }
    }

    __device__ __forceinline__ void begin_stage() { begin(blocks_, state_.stage, slot(), 0, 0); }

    // Tiles of one chunk begin a stage at the end of the one before it. That order costs those of two up to 4 %: their
    // warpgroups fall into step (H200, 2026-11-21).
    template <typename Shift, typename Meanwhile>
    __device__ __forceinline__ void multiply_in_turn(Shift shift, Accumulators<config>& sums, bool more,
                                                     Meanwhile meanwhile) {
        if constexpr (config.chunks == 1) {
            for (int left = steps();;) {
                finish_stage(shift, sums, left > 1 || more, meanwhile);
                if (--left == 0) return;
                begin_stage();
            }
        } else {
            for (int left = steps(); left > 1; --left) {
                begin_stage();
                finish_stage(shift, sums, true, [](int) {});
            }
            begin_stage();
            finish_stage(shift, sums, more, meanwhile);
        }
    }

    // A stage whose first chunk has been begun; `scales_` are its own, then those of the next one, if there are `more`.
    template <typename Shift, typename Meanwhile>
    __device__ __forceinline__ void finish_stage(Shift shift, Accumulators<config>& sums, bool more,
                                                 Meanwhile meanwhile) {
        const int stage = state_.stage, b_slot = slot();
        Scales<config> next_scales;
#pragma unroll
        for (int i = 0; i < config.chunks; ++i) {
            if (i > 0) begin(blocks_, stage, b_slot, i / config.chunks_n, i % config.chunks_n);
            if (i == await_in) {
                advance();
                if (more) acquire(next_scales);
            }
            if (i > 0) meanwhile(i - 1);
            finish_blocks<config>(blocks_);
            const bool last = i == config.chunks - 1;
            if (last && releases_first) release(stage, b_slot);
            promote_blocks(shift, sums, blocks_, scales_, i / config.chunks_n, i % config.chunks_n);
            if (last && !releases_first) release(stage, b_slot);
        }
        scales_ = next_scales;
    }

    // Two sets of temporaries take turns. ptxas wants both loop and tail without a branch around a WGMMA.
    __device__ __forceinline__ void multiply_ahead(Accumulators<config>& sums, bool more) {
        Blocks<config> odd;
        int left = steps();
        advance_descriptors();
        const int apart = blocks_apart(more);
        for (; left > 2; left -= 2) {
            step<true>(Constant<0>{}, sums, blocks_, odd, true, left == apart + 1);
            step<true>(Constant<0>{}, sums, odd, blocks_, true, left == apart + 2);
        }
        if (left == 2) {
            step<true>(Constant<0>{}, sums, blocks_, odd, true, left == apart + 1);
            step<false>(Constant<0>{}, sums, odd, blocks_, more, apart > 0);
        } else {
            step<false>(Constant<0>{}, sums, blocks_, odd, more, apart > 0);
        }
    }

    // The same for an even number of stages, in three copies of a step and not five: there are seven or eight loops for
    // different places, which leave the kernel under 64 KB that way. 128x112 takes 2 to 3.5 % less by them, and 128x144,
    // which had no second set of temporaries before, 2 % (H200, 2026-11-22 and 23).
    template <typename Shift>
    __device__ __forceinline__ void multiply_pairs(Shift shift, Accumulators<config>& sums, bool more) {
        Blocks<config> odd;
        int left = steps();
        advance_descriptors();
        while (true) {
            step<true>(shift, sums, blocks_, odd, true, false);
            if (left == 2) break;
            step<true>(shift, sums, odd, blocks_, true, false);
            left -= 2;
        }
        step<false>(shift, sums, odd, blocks_, more, false);
    }

    // How many of a tile's last K blocks warpgroup 1 begins only when warpgroup 0 has multiplied all of its own. In step
    // they end a tile together, and the tensor cores wait while both store. So one works at full rate, which takes WGMMAs
    // that are queued, and then the other, while the first stores and begins the next tile: 128x128 takes 1.5 to 2.5 %
    // less where there are several tiles per SM. Two blocks in a launch's last tile, which no other hides: 1 % with one
    // tile. None before that where all K blocks of a tile have a stage: 2 to 3 % more at k = 512, for want of the stages
    // that lie between the two (H200, 2026-11-22).
    __device__ __forceinline__ int blocks_apart(bool more) const {
        if (!config.ends_apart) return 0;
        const int blocks = !more ? 2 : steps() > config.stages ? 1 : 0;
        return steps() > blocks ? blocks : 0;
    }

    // Where they `meet`, warpgroup 1 waits to begin its last blocks until warpgroup 0 tells it.
    __device__ __forceinline__ void await_other(bool meet) const {
        if constexpr (config.ends_apart) {
            ptx::bar_sync(apart_barrier, 2 * warpgroup_threads, meet && warpgroup_ == 1);
        }
    }

    __device__ __forceinline__ void tell_other(bool meet) const {
        if constexpr (config.ends_apart) {
            ptx::bar_arrive(apart_barrier, 2 * warpgroup_threads, meet && warpgroup_ == 0);
        }
    }

    // The scales are those of `present`, then those of the stage after it, if there are `more`: read while `present` is
    // being multiplied, because WGMMA leaves other reads of shared memory little room. Read after that, they were
    // awaited before the next WGMMA: 128x64 took 407 clocks per K block, now 352 (H200, 2026-11-21).
    template <bool begin_next, typename Shift>
    __device__ __forceinline__ void step(Shift shift, Accumulators<config>& sums, Blocks<config>& present,
                                         Blocks<config>& next, bool more, bool meet) {
        const int stage = state_.stage, b_slot = slot();
        Scales<config> next_scales;
        advance();
        if (more) acquire(next_scales);
        if constexpr (!config.queues_blocks) finish_blocks<config>(present);
        if constexpr (begin_next) {
            await_other(meet);
            begin(next, state_.stage, slot(), 0, 0);
        }
        if constexpr (config.queues_blocks) finish_blocks<config, begin_next ? 1 : 0>(present);
        if constexpr (!begin_next) tell_other(meet);
        if (releases_first) release(stage, b_slot);
        promote_blocks(shift, sums, present, scales_, 0, 0);
        if (!releases_first) release(stage, b_slot);
        if constexpr (begin_next) advance_descriptors();
        scales_ = next_scales;
    }

    SharedStorage<config>& smem_;
    const Releaser<config> releaser_;
    const KRange range_;
    const int warpgroup_;
    const Descriptors<config> first_;  // of the first stage
    CarriedDescriptors<config> carried_;
    int scale_slot_;
    int step_ = 0;  // of its tile, the present stage; counted for a resident `b` only, like columns
    ColumnState column_;
    PipelineState<config.stages> state_;
    Scales<config> scales_;  // of the stage that has been acquired
    Blocks<config> blocks_;  // of the one that has been begun
};

// This block's tiles of the config's own width, of which there is one at least. Where a tile is, is worked out behind its
// first WGMMAs if these need not wait, and else before it: in the other order ptxas promotes the blocks of 128x224 so that
// it takes 1 to 7 % longer (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ void consume_width(const GemmParams& params, SharedStorage<config>& smem, int warpgroup,
                                              PipelineState<config.stages>& state) {
    Consumer<config> consumer(params, smem, warpgroup, state);
    Epilogue<config> epilogue(params, smem, warpgroup);
    WidthScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    int left = tiles.count();
    Tile tile;
    if constexpr (config.chunks > 1) tile = tiles.next();
    consumer.acquire();
    while (true) {
        consumer.begin_tile();
        if constexpr (config.chunks == 1) tile = tiles.next();
        if constexpr (config.resident_b()) consumer.set_ends_column(tiles.ends_column());
        Accumulators<config> sums = {};
        if constexpr (config.pairs) pin(sums[0][0]);  // else ptxas clears them in each loop: 3 to 5 KB
        if constexpr (config.store_chunks > 1) {
            consumer.multiply(sums, tile.n, left > 1, [&](int chunk) { epilogue.store_chunk(sums, chunk); });
            epilogue.store_chunk(sums, config.store_chunks - 1);
        } else {
            consumer.multiply(sums, tile.n, left > 1, [](int) {});
            epilogue.template store<0>(sums, tile.m + first_row, tile.n);
        }
        if (--left == 0) break;
        if constexpr (config.chunks > 1) tile = tiles.next();
    }
    state = consumer.end();
    epilogue.drain();
}

// All of this block's tiles, the narrow ones last: one at least, select.grid_size sees to it.
template <GemmConfig config>
__device__ __forceinline__ void consume(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    PipelineState<config.stages> state;
    if (!config.has_narrow() || WidthScheduler<config>(params).count() > 0) {
        consume_width<config>(params, smem, warpgroup, state);
    }
    if constexpr (config.has_narrow()) {
        constexpr GemmConfig narrow = narrow_tiles<config>;
        // Read anew: what is kept meanwhile is missing in the wide tiles' main loop, of 4 to 6 instructions more then.
        warpgroup = __shfl_sync(0xffffffff, ptx::tid_x() / warpgroup_threads, 0);
        if (WidthScheduler<narrow>(params).count() > 0) {
            consume_width<narrow>(params, narrow_storage<config>(smem), warpgroup, state);
        }
    }
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
    Consumer<config> consumer(params, smem, warpgroup, {});
    SplitReduction<config> reduction(smem, warpgroup);
    Epilogue<config> epilogue(params, smem, warpgroup);
    TileScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    for (int left = tiles.count(); left > 0; --left) {
        const Tile tile = tiles.next();
        Accumulators<config> sums = {};
        if (consumer.steps() > 0) {
            consumer.acquire();
            consumer.begin_tile();
            consumer.multiply(sums, tile.n, false, [](int) {});
        }
        reduction.send(sums);
        reduction.await();
        finish_part<config, 0>(reduction, epilogue, sums, tile.m + first_row, tile.n, left == 1);
    }
    consumer.end();
    epilogue.drain();
}

// One of the store warps.
template <GemmConfig config>
__device__ __forceinline__ void store_tiles(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    const StoreWarp<config> boxes(params, smem, warp);
    TileScheduler<config> tiles(params);
    ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
    while (true) {
        const Tile tile = tiles.next();
        if (!tile.valid) break;
        if constexpr (config.has_narrow()) {
            if (tile.narrow) {
                StoreWarp<narrow_tiles<config>>(params, narrow_storage<config>(smem), warp).store(tile.m, tile.n);
                continue;
            }
        }
        boxes.store(tile.m, tile.n);
    }
    boxes.drain();
}

// Whether the successor's blocks may start when this launch has waited for its predecessor (not before that, so that
// whoever starts finds the predecessor done, as after a launch that waited itself), and not when the tiles are stored.
// They take SMs in the order in which these become free, so that neighbours in the raster run far from each other, and
// what they share comes later: in chains nine shapes of 128 <= m <= 512 take 3 % less if they start late, up to 10 %.
// Where there is one row of tiles, which share no `b`, it costs 2 %; tiles of two chunks lose 1 % (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ bool starts_successor_early(const GemmParams& params) {
    return config.chunks > 1 || params.m <= config.block_m;
}

template <GemmConfig config>
__device__ __forceinline__ SharedStorage<config>& shared_storage() {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    static_assert(sizeof(SharedStorage<config>) == config.smem_bytes, "config.py and config.cuh disagree");
    void* smem = dynamic_smem;
    if constexpr (config.hides_addresses()) {
        smem = __cvta_shared_to_generic(ptx::opaque(u64{__cvta_generic_to_shared(smem)}));
    }
    return *static_cast<SharedStorage<config>*>(smem);
}

template <GemmConfig config>
__device__ __forceinline__ void gemm(const GemmParams& params) {
    auto& smem = shared_storage<config>();

    // From lane 0, so that the compiler knows it as uniform: branches and WGMMA descriptors that depend on it then
    // live in uniform registers (946 -> 1226 TFLOPS for 128x192; H200, 2026-11-21).
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0);
    constexpr int first_producer = config.math_warpgroups * warpgroup_threads / warp_threads;
    // Before anything that waits for math warps, which wait for these registers.
    if (config.math_warpgroups == 2 && warp >= first_producer) ptx::setmaxnreg_dec<config.producer_registers>();
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(params.a_maps[params.m < config.block_m]);
        ptx::prefetch_tensormap(params.b_maps[0]);
    }
    // Here and not among the producers' loops: the way to the first request is one straight line from the entry.
    int requested = 0;
    const bool requests_operands = warp == first_producer;
    if (requests_operands) {
        initialize_full_barriers<config>(smem);
        announce_full_barriers<config>();
        requested = request_first_stages<config>(params, smem);
    }
    if (warp == 0) initialize_other_barriers<config>(smem);
    const int scale_warp = warp - first_producer - 1;
    const bool copies_scales = scale_warp >= 0 && scale_warp < config.scale_warps;
    bool scales_requested = false;
    if (copies_scales) scales_requested = request_first_scales<config>(params, smem, scale_warp);
    await_barriers<config>(requests_operands);
    // ptxas puts what comes after `else` first. Code arrives in that order while a launch begins, 20 ns for each KB, and
    // the producers' loops are wanted before the math warps', which wait for them: m <= 128 takes 0.35 % less, 128x144
    // 0.6 to 1 %, 128x256 0.4 % (H200, 2026-11-22).
    if (warp < first_producer) {
        if constexpr (config.math_warpgroups == 2) ptx::setmaxnreg_inc<config.math_registers>();
        ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
        const bool lets_start_early = starts_successor_early<config>(params);
        if (lets_start_early) ptx::griddepcontrol_launch_dependents();
        const int warpgroup = warp / (warpgroup_threads / warp_threads);
        if constexpr (config.split_k == 1) {
            consume<config>(params, smem, warpgroup);
        } else {
            consume_split<config>(params, smem, warpgroup);
        }
        if (!lets_start_early) ptx::griddepcontrol_launch_dependents();
    } else {
        if (requests_operands) produce_operands<config>(params, smem, requested);
        if (copies_scales) produce_scales<config>(params, smem, scale_warp, scales_requested);
        const int store_warp = scale_warp - config.scale_warps;
        if (store_warp >= 0 && store_warp < config.store_warps) store_tiles<config>(params, smem, store_warp);
    }
}

}  // namespace deep_tile
