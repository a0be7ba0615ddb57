// GEMM kernel: persistent, warp-specialised, FP8 with block scales. codegen.py generates the entry, which calls gemm().
//
// out[m, n] = sum over K blocks of a_scale[m, block] * b_scale[n / 128, block] * (a[m, block] . b[n, block])
//
//   role                          work                                           per stage
//   operand warp (producer 0)     inits full mbarriers; TMA loads a, b           waits empty, expects bytes on full
//   scale warps, up to 3          cp.async copies a, b scales, a stage each      wait empty, arrive on full
//   store warps, if any are left  TMA-store output boxes                         wait boxes full, arrive boxes empty
//   math warpgroups 0 (and 1)     WGMMA, FP32 promotion; epilogue, own rows      wait full, arrive on empty
//                                 or rows of a packed b times rows of a, and     wait full, slot full; arrive on empty,
//                                 an exchange of a tile's sums (swap_ab.cuh)     slot empty
//   unit warp, if b is packed     bulk copies of 4-bit b to a ring of its own    waits units empty, expects bytes on full
//   converter warps, likewise     convert 4-bit b of that ring to 8 bits, in a   wait units full, slot empty; arrive on
//                                 slot                                           units empty, slot full
//                                 or in registers, multiply it, and leave a      wait units full, full, slot empty;
//                                 tile's sums in a slot (register_b.cuh)         arrive on units empty, empty, slot full
//
//   barrier       waited for by         arrivals                                 completes when
//   full[s]       math warpgroups       1 operand lane + 32 lanes of a scale     stage s holds a, b and their scales
//                                       warp + TMA bytes (some from peers)
//   empty[s]      producer warps        every math thread, and 1 per math warp   no reader needs stage s any more,
//                                       of each multicast peer; or every         here or in a peer
//                                       converter thread, if these multiply
//   column full   math warpgroups       1 operand lane + TMA bytes               a K block of a resident b has landed
//   column empty  operand warp          every math thread, in a column's last    no reader needs that K block any more
//                                       tile
//   units full    converter warps       1 unit lane + bytes of bulk copies       a K block of a packed b has landed
//   units empty   unit warp             every converter thread                   it has been read
//   slot full     math warpgroups       1 per converter warp; per thread, if     a K block of b has been converted, or
//                                       these multiply, or write groups' scales  a tile multiplied
//   slot empty    converter warps       1 per math warp; per thread, if          no reader needs it any more
//                                       converter warps multiply, or slots have
//                                       groups' scales
//   boxes full    a store warp          a math warpgroup's threads               its output boxes are written
//   boxes empty   a math warpgroup      its store warp's threads                 their buffers have been read
//   own           a math warpgroup      its threads, if they store boxes         a box is written; a buffer is free
//                                       together without a store warp
//   turn          a math warpgroup      the other one's threads                  the other has issued its WGMMAs
//   apart         math warpgroup 1      math warpgroup 0's threads               warpgroup 0 has multiplied its tile
//   exchange      math warpgroups       every math thread, twice per 64 rows     sums have been read; written
//   all           all but operand warp  every thread, once                       mbarriers exist, cluster-wide
//   others        operand warp          math warp 0 (only without a cluster)     all but the full mbarriers exist
//
// If all K blocks of a tile's `b` fit, they may stay resident while the CTA works down a column of tiles: stages then
// hold `a` and scales only (GemmConfig.resident_b).
#pragma once

#include "barriers.cuh"
#include "finish.cuh"
#include "mainloop.cuh"
#include "operands.cuh"
#include "packed_b.cuh"
#include "reduce.cuh"
#include "register_b.cuh"
#include "swap_ab.cuh"

namespace deep_tile {

template <GemmConfig config>
using UnswappedLoop = typename Conditional<config.from_registers, Collect<config>, MainLoop<config>>::type;

template <GemmConfig config>
using TileLoop = typename Conditional<config.swap_ab, SwapAB<config>, UnswappedLoop<config>>::type;

// Consumes every tile assigned to this CTA: at least one in a dense grid (grid_size in schedule.py), perhaps none with
// groups. Tile coordinates are computed after the tile's first WGMMAs are issued if these need not wait, otherwise
// before: the opposite order makes ptxas promote 128x224 1 to 7 % slower (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ void consume(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    TileLoop<config> loop(params, smem, warpgroup);
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
        if constexpr (config.begins_with_bias() && !config.from_registers && !config.swap_ab) {
            begin_with_bias<config>(params, sums, tile.out_column());
        } else {
            loop.clear(sums);
        }
        if constexpr (config.pairs) pin(sums[0][0]);  // otherwise ptxas clears them in each loop: 3 to 5 KB
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

// Split K: adds the received sums to this CTA's columns of one chunk; after the last chunk, applies the epilogue and
// stores the columns.
template <GemmConfig config, int part>
__device__ __forceinline__ void finish_part(const GemmParams& params, SplitReduction<config>& reduction, Epilogue<config>& epilogue,
                                            const ShareScaled<config>& scaled, Accumulators<config>& sums, int chunk,
                                            int row, int column, int end, bool last) {
    const bool completes = chunk + 1 == config.chunks_m;
    if (part == reduction.part()) {
        const u32 read = reduction.template receive<part>(sums[chunk]);
        if (!(completes && last)) reduction.release(read);
        if (completes) {
            constexpr int first = part * config.columns_per_part;
            scaled.apply(params, sums, row, column, {}, first);
            add_bias<config>(params, sums, column, first, config.columns_per_part);
            epilogue.template store<part * config.out_columns_per_part>(sums, row, column, end);
        }
    }
    if constexpr (part + 1 < config.split_k) {
        finish_part<config, part + 1>(params, reduction, epilogue, scaled, sums, chunk, row, column, end, last);
    }
}

// Consumes every tile assigned to this CTA under split K: a tile's accumulators are summed over the cluster.
template <GemmConfig config>
__device__ __forceinline__ void consume_split(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    TileLoop<config> loop(params, smem, warpgroup);
    SplitReduction<config> reduction(smem, warpgroup);
    Epilogue<config> epilogue(params, smem, warpgroup);
    TileScheduler<config> tiles(params);
    const int first_row = warpgroup * config.rows_per_warpgroup;
    for (int left = tiles.count(); left > 0; --left) {
        const Tile<config> tile = tiles.next();
        Accumulators<config> sums = {};
        ShareScaled<config> share;
        share.begin(params, tile.out_row() + first_row, tile.out_column() + reduction.part() * config.columns_per_part, {});
        if (loop.steps() > 0) {
            Scaled<config> scaled;
            loop.acquire();
            loop.begin_tile();
            loop.multiply(sums, tile.out_column(), false, [&](int) {
                scaled.begin(params, tile.out_row() + first_row, tile.out_column(), group_scales<config>(params, tile));
            });
            scaled.apply(params, sums, tile.out_row() + first_row, tile.out_column(), group_scales<config>(params, tile));
        }
#pragma unroll
        for (int chunk = 0; chunk < config.chunks_m; ++chunk) {
            reduction.send(sums[chunk]);
            reduction.await();
            finish_part<config, 0>(params, reduction, epilogue, share, sums, chunk, tile.out_row() + first_row,
                                   tile.out_column(), group_end<config>(tile), left == 1);
        }
    }
    loop.end();
    epilogue.drain();
}

// True if dependent launches may start as soon as this launch has waited for its predecessor; false if only after the
// tiles are stored. They never start sooner, so they find that predecessor complete. Successor CTAs take SMs in the
// order these become free, so raster neighbours run far apart and shared data arrives later: in chains, nine shapes
// with 128 <= m <= 512 take 3 % less with a late start, up to 10 %. With one row of tiles, which share no `b`, a late
// start costs 2 %; with two-chunk tiles, 1 % (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ bool starts_successor_early(const GemmParams& params) {
    const bool is_one_row = config.transposed ? params.n <= config.block_n : params.m <= config.block_m;
    return config.chunks > 1 || is_one_row;
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

// Warp index, broadcast from lane 0 so that the compiler knows it as uniform: dependent branches and WGMMA descriptors
// then live in uniform registers (946 -> 1226 TFLOPS for 128x192; H200, 2026-11-21).
__device__ __forceinline__ int own_warp() { return __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0); }

template <GemmConfig config>
__device__ __forceinline__ void prefetch_maps(const GemmParams& params) {
    ptx::prefetch_tensormap(params.a_maps[config.a_has_tail_map() && params.m < config.block_m]);
    if constexpr (!config.packed_b()) ptx::prefetch_tensormap(params.b_maps[0]);
}

// Runs a math warpgroup over its tiles, or, under split K, over its part of each tile.
template <GemmConfig config>
__device__ __forceinline__ void consume_parts(const GemmParams& params, SharedStorage<config>& smem, int warpgroup) {
    if constexpr (config.split_k == 1) {
        consume<config>(params, smem, warpgroup);
    } else {
        consume_split<config>(params, smem, warpgroup);
    }
}

// Gives registers to the warps that multiply, in all others.
template <GemmConfig config>
__device__ __forceinline__ void give_registers(bool multiplies) {
    if (config.moves_registers() && !multiplies) ptx::setmaxnreg_dec<config.producer_registers>();
}

// Runs a converter warp.
template <GemmConfig config>
__device__ __forceinline__ void convert(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    if constexpr (config.from_registers) {
        ptx::setmaxnreg_inc<config.converter_registers>();
        RegisterMultiplier<config>(params, smem, warp).run();
    } else {
        convert_stages<config>(params, smem, warp);
    }
}

// Gives every warp its role. Producers execute setmaxnreg.dec before they wait for math warps, which wait for these
// registers. First requests stay outside the producer loops, so the path from the entry to them is one straight line.
// Producers stand in the `else` branch, because ptxas places it first: code arrives in that order as a launch begins,
// 20 ns per KB, and the producer loops are needed before the math loops, which wait for them: m <= 128 takes 0.35 %
// less, 128x144 0.6 to 1 %, 128x256 0.4 % (H200, 2026-11-22).
template <GemmConfig config>
__device__ __forceinline__ void gemm(const GemmParams& params) {
    auto& smem = shared_storage<config>();
    record_launch(smem.full[0]);

    const int warp = own_warp();
    constexpr int first_producer = config.math_warpgroups * warpgroup_threads / warp_threads;
    constexpr int first_converter = first_producer + warpgroup_threads / warp_threads;
    const bool converts = config.packed_b() && warp >= first_converter;
    give_registers<config>(warp < first_producer || (config.from_registers && converts));
    if (threadIdx.x == 0) prefetch_maps<config>(params);
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
    const bool loads_units = config.packed_b() && scale_warp == config.scale_warps + config.store_warps;
    if constexpr (config.packed_b()) {
        if (loads_units) requested = request_first_units<config>(params, smem);
    }
    await_barriers<config>(requests_operands);
    if (warp < first_producer) {
        if constexpr (config.moves_registers()) ptx::setmaxnreg_inc<config.math_registers>();
        ptx::griddepcontrol_wait();  // the preceding kernel may still read `out`
        const bool lets_start_early = starts_successor_early<config>(params);
        if (lets_start_early) ptx::griddepcontrol_launch_dependents();
        consume_parts<config>(params, smem, warp / (warpgroup_threads / warp_threads));
        if (!lets_start_early) ptx::griddepcontrol_launch_dependents();
    } else if (!converts) {
        if (requests_operands) produce_operands<config>(params, smem, requested);
        if constexpr (config.has_scales()) {
            if (copies_scales) produce_scales<config>(params, smem, scale_warp, scales_requested);
        }
        if constexpr (config.packed_b()) {
            if (loads_units) produce_units<config>(params, smem, requested);
        }
        const int store_warp = scale_warp - config.scale_warps;
        if (store_warp >= 0 && store_warp < config.store_warps) store_tiles<config>(params, smem, store_warp);
    } else if constexpr (config.packed_b()) {
        convert<config>(params, smem, warp - first_converter);
    }
}

}  // namespace deep_tile
