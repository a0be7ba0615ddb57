// The kernel: persistent, warp-specialised FP8 GEMM with block scales. codegen.py makes the entry, which calls gemm.
//
// out[m, n] = sum over K blocks of a_scale[m, block] * b_scale[n / 128, block] * (a[m, block] . b[n, block])
//
//   who                          does                                            per stage
//   producer warpgroup, warp 0   makes full barriers; TMA: a, b tiles -> stage   waits empty, expects bytes on full
//   up to 3 more of its warps    cp.async: a and b scales -> stage, in turn      wait empty, arrive on full
//   its other warps, if it may   TMA: output boxes -> out                        wait boxes full, arrive on empty
//   math warpgroup 0 (and 1)     WGMMA, promotion; per tile its rows' epilogue   waits full, arrives on empty
//
//   barrier      waited for by         arrivals                                      completes when
//   full[s]      math warpgroups       1 operand lane + any 32 scale lanes, and      stage s holds a, b and their
//                                      TMA's bytes (some of a, b sent by the peer)   scales
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
// Where all K blocks of a tile's `b` have room, it may stay while the block works down a column of tiles: stages then
// hold `a` and scales only (GemmConfig.resident_b).
#pragma once

#include "barriers.cuh"
#include "finish.cuh"
#include "mainloop.cuh"
#include "operands.cuh"
#include "reduce.cuh"

namespace deep_tile {

// All of this block's tiles: one at least, grid_size of schedule.py sees to it, unless they are groups'. Where a tile is,
// is worked out behind its first WGMMAs if these need not wait, and else before it: in the other order ptxas promotes the
// blocks of 128x224 so that it takes 1 to 7 % longer (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ void consume(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    MainLoop<config> loop(params, smem, warpgroup);
    Epilogue<config> epilogue(params, smem, warpgroup);
    TileScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    int left = tiles.count();
    if (config.grouped() && left == 0) {
        loop.end();
        return;
    }
    Tile<config> tile;
    if constexpr (config.chunks > 1) tile = tiles.next();
    loop.acquire();
    while (true) {
        loop.begin_tile();
        if constexpr (config.chunks == 1) tile = tiles.next();
        loop.turn_to_tile(tiles);
        Accumulators<config> sums;
        if constexpr (config.begins_with_bias()) {
            begin_with_bias<config>(params, sums, tile.out_column());
        } else {
            loop.clear(sums);
        }
        if constexpr (config.pairs) pin(sums[0][0]);  // else ptxas clears them in each loop: 3 to 5 KB
        if constexpr (config.store_chunks > 1) {
            loop.multiply(sums, tile.out_column(), left > 1, [&](int chunk) { epilogue.store_chunk(sums, chunk, tile); });
            epilogue.store_chunk(sums, config.store_chunks - 1, tile);
        } else {
            const int row = tile.out_row() + first_row, column = tile.out_column();
            Scaled<config> scaled;
            loop.multiply(sums, column, left > 1,
                          [&](int) { scaled.begin(params, row, column, group_scales<config>(params, tile)); });
            scaled.apply(params, sums, row, column, group_scales<config>(params, tile));
            add_bias<config>(params, sums, column, 0, config.block_n);
            epilogue.template store<0>(sums, row, column, group_end<config>(tile));
        }
        if (--left == 0) break;
        if constexpr (config.chunks > 1) tile = tiles.next();
    }
    loop.end();
    epilogue.drain();
}

template <GemmConfig config, int part>
__device__ __forceinline__ void finish_part(const GemmParams& params, SplitReduction<config>& reduction, Epilogue<config>& epilogue,
                                            const ShareScaled<config>& scaled, Accumulators<config>& sums, int row,
                                            int column, int end, bool last) {
    if (part == reduction.rank()) {
        const u32 read = reduction.template receive<part>(sums);
        if (!last) reduction.release(read);
        constexpr int first = part * config.columns_per_part;
        scaled.apply(params, sums, row, column, {}, first);
        add_bias<config>(params, sums, column, first, config.columns_per_part);
        epilogue.template store<part * config.out_columns_per_part>(sums, row, column, end);
    }
    if constexpr (part + 1 < config.split_k) {
        finish_part<config, part + 1>(params, reduction, epilogue, scaled, sums, row, column, end, last);
    }
}

// As consume(), each tile's sums being those of the whole cluster.
template <GemmConfig config>
__device__ __forceinline__ void consume_split(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    MainLoop<config> loop(params, smem, warpgroup);
    SplitReduction<config> reduction(smem, warpgroup);
    Epilogue<config> epilogue(params, smem, warpgroup);
    TileScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    for (int left = tiles.count(); left > 0; --left) {
        const Tile<config> tile = tiles.next();
        Accumulators<config> sums = {};
        ShareScaled<config> share;
        share.begin(params, tile.out_row() + first_row, tile.out_column() + reduction.rank() * config.columns_per_part, {});
        if (loop.steps() > 0) {
            Scaled<config> scaled;
            loop.acquire();
            loop.begin_tile();
            loop.multiply(sums, tile.out_column(), false, [&](int) {
                scaled.begin(params, tile.out_row() + first_row, tile.out_column(), group_scales<config>(params, tile));
            });
            scaled.apply(params, sums, tile.out_row() + first_row, tile.out_column(), group_scales<config>(params, tile));
        }
        reduction.send(sums);
        reduction.await();
        finish_part<config, 0>(params, reduction, epilogue, share, sums, tile.out_row() + first_row, tile.out_column(),
                               group_end<config>(tile), left == 1);
    }
    loop.end();
    epilogue.drain();
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

// This thread's, from lane 0, so that the compiler knows it as uniform: branches and WGMMA descriptors that depend on it
// then live in uniform registers (946 -> 1226 TFLOPS for 128x192; H200, 2026-11-21).
__device__ __forceinline__ int own_warp() { return __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0); }

template <GemmConfig config>
__device__ __forceinline__ void prefetch_maps(const GemmParams& params) {
    ptx::prefetch_tensormap(params.a_maps[config.a_has_tail_map() && params.m < config.block_m]);
    ptx::prefetch_tensormap(params.b_maps[0]);
}

template <GemmConfig config>
__device__ __forceinline__ void gemm(const GemmParams& params) {
    auto& smem = shared_storage<config>();
    record_launch(smem.full[0]);

    const int warp = own_warp();
    constexpr int first_producer = config.math_warpgroups * warpgroup_threads / warp_threads;
    // Before anything that waits for math warps, which wait for these registers.
    if (config.math_warpgroups == 2 && warp >= first_producer) ptx::setmaxnreg_dec<config.producer_registers>();
    if (threadIdx.x == 0) prefetch_maps<config>(params);
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
    if constexpr (config.has_scales()) {
        if (copies_scales) scales_requested = request_first_scales<config>(params, smem, scale_warp);
    }
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
        if constexpr (config.has_scales()) {
            if (copies_scales) produce_scales<config>(params, smem, scale_warp, scales_requested);
        }
        const int store_warp = scale_warp - config.scale_warps;
        if (store_warp >= 0 && store_warp < config.store_warps) store_tiles<config>(params, smem, store_warp);
    }
}

}  // namespace deep_tile
