// Packed `b`: converts 4-bit weights to e4m3 for WGMMA, between TMA and the math warpgroups.
//
// Memory holds `b` in units, 16 rows by one K block: four columns, each with 16 bytes per row (32 codes, in the order
// of fourbit.cuh); then the scales of groups, row by row: a byte each; or of integers FP16, and then an unused byte per
// row (packed.py packs). A tile's units for one K block are contiguous, so one bulk copy fetches them.
//
// Scales in bytes select tables. Those in FP16 are promotion's, and slots have them beside the elements.
#pragma once

#include "boxes.cuh"
#include "fourbit.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// Units per tile and K block.
template <GemmConfig config>
constexpr int tile_units = config.block_n / unit_rows;

// Loads a stage's units, in one thread, after announcing their bytes: fewer at the matrix's end. Past K, where `a` is
// zero, the last K block is loaded again.
template <GemmConfig config>
__device__ __forceinline__ void load_units(const GemmParams& params, SharedStorage<config>& smem, Tile<config> tile,
                                           int stage, int step) {
    const u32 bytes = min(config.block_n, params.n - tile.out_column()) / unit_rows * config.b_unit_bytes;
    const u32 barrier = ptx::smem_address(&smem.units.full[stage]);
    const int last = ceil_div(params.k, scale_block) - 1;
    if constexpr (config.from_registers) {
        smem.tiles.rows[stage] = row_end<config>(params, group_end<config>(tile)) - tile.out_row();
        smem.tiles.column[stage] = tile.out_column();
    }
    ptx::mbarrier_arrive_expect_tx(barrier, config.scale_blocks * bytes);
#pragma unroll
    for (int i = 0; i < config.scale_blocks; ++i) {
        const u32 row = tile.b_row() + min(step * config.scale_blocks + i, last) * params.n;
        ptx::cp_async_bulk_load(
            ptx::smem_address(smem.packed.units[stage]) + i * tile_units<config> * config.b_unit_bytes,
            static_cast<const u8*>(params.units) + u64{row / unit_rows} * config.b_unit_bytes, bytes, barrier);
    }
}

// Tells converter warps that multiply, after the last tile, that there is none.
template <GemmConfig config>
__device__ __forceinline__ void end_units(SharedStorage<config>& smem, PipelineState<config.unit_stages> state) {
    wait(smem.units.empty[state.stage], state.phase ^ 1);
    if (ptx::elect_sync()) {
        smem.tiles.rows[state.stage] = 0;
        ptx::mbarrier_arrive(ptx::smem_address(&smem.units.full[state.stage]));
    }
}

// Starts the unit warp: initialises its full mbarriers and issues the first loads. Returns how many.
template <GemmConfig config>
__device__ __forceinline__ int request_first_units(const GemmParams& params, SharedStorage<config>& smem) {
    if (ptx::elect_sync()) {
#pragma unroll
        for (int stage = 0; stage < config.unit_stages; ++stage) {
            ptx::mbarrier_init(ptx::smem_address(&smem.units.full[stage]), 1);
        }
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
    __syncwarp();
    if (config.grouped() || !params.early_b) ptx::griddepcontrol_wait();
    const Tile<config> tile = TileScheduler<config>(params).first();
    if (config.grouped() && !tile.valid) return 0;
    const KRange range = k_range<config>(params);
    const int stages = min(config.unit_stages, range.end - range.begin);
    if (ptx::elect_sync()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) load_units<config>(params, smem, tile, stage, range.begin + stage);
    }
    __syncwarp();
    return stages;
}

// Runs the unit warp; `requested` stages are in flight.
template <GemmConfig config>
__device__ __forceinline__ void produce_units(const GemmParams& params, SharedStorage<config>& smem, int requested) {
    const KRange range = k_range<config>(params);
    PipelineState<config.unit_stages> state;
    TileScheduler<config> tiles(params);
    for (Tile<config> tile = tiles.first(); tile.valid; tile = tiles.next()) {
        for (int step = range.begin; step < range.end; ++step, --requested, state.advance()) {
            if (requested > 0) continue;
            wait(smem.units.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) load_units<config>(params, smem, tile, state.stage, step);
            __syncwarp();
        }
    }
    if constexpr (config.from_registers) end_units<config>(smem, state);
}

// Writes the tables, by all converter warps.
template <GemmConfig config>
__device__ __forceinline__ void write_tables(SharedStorage<config>& smem, int warp) {
    constexpr int threads = config.converter_warps * warp_threads;
    for (int table = warp * warp_threads + threadIdx.x % warp_threads; table < packed_tables; table += threads) {
        smem.packed.tables[table] = table_of<config.table_group()>(table);
    }
    ptx::bar_sync(tables_barrier, threads);
}

// Converter warps: each takes its share of a stage's units, one after the other. A lane has one unit row and two of its
// four 32-code columns: eight lanes read and write eight rows of one column, in different banks on both sides. A lane
// reads a unit before it converts the previous one, and looks up the unit's tables after that conversion, so no lane
// waits for shared memory. Math warps execute the fence between these writes and WGMMA (stored_b.cuh).
template <GemmConfig config>
class Converter {
   public:
    // A lane's part of a unit, before conversion.
    struct Unit {
        uint4 codes[2];
        u32 scales;
        uint2 tables[config.has_tables() ? 2 * 32 / config.b_group : 1];
    };

    static constexpr int all_units = config.scale_blocks * tile_units<config>;  // per stage
    static constexpr int units = (all_units + config.converter_warps - 1) / config.converter_warps;  // per warp, at most

    // False for NVFP4, which has the most tables, beside two math warpgroups: a unit is then read after the previous
    // one is converted. Otherwise NVRTC 13.2 and 13.5 lack registers and make the scale warps of 128x128 wait at
    // barriers as if divergent.
    static constexpr bool reads_ahead = config.math_warpgroups == 1 || config.b_group >= 32;

    __device__ __forceinline__ Converter(SharedStorage<config>& smem, int warp)
        : smem_(smem), warp_(warp), to_(ptx::smem_address(&smem.b[0][warp * unit_rows * k_block_bytes]) + piece_offset()) {
        if constexpr (has_tables) write_tables<config>(smem, warp);
    }

    // True if a stage has this warp's unit `i`: some warps lack the last one if the units do not divide evenly.
    __device__ __forceinline__ bool has(int i) const {
        return all_units % config.converter_warps == 0 || i * config.converter_warps + warp_ < all_units;
    }

    // Reads this warp's unit `i` of a stage.
    __device__ __forceinline__ Unit read(int stage, int i) const {
        using Bits = typename Conditional<scale_bytes == 1, u16, u32>::type;
        Unit unit;
        const int own = i * config.converter_warps + warp_;
        const u32 from = ptx::smem_address(&smem_.packed.units[stage][own * config.b_unit_bytes]);
        if constexpr (scale_bytes > 0) unit.scales = ptx::ld_shared<Bits>(from + scales_offset());
#pragma unroll
        for (int j = 0; j < 2; ++j) unit.codes[j] = ptx::ld_shared_v4(from + codes_offset() + j * unit_rows * column_bytes);
        return unit;
    }

    // Looks up the tables of a unit's groups.
    __device__ __forceinline__ void look_up(Unit& unit) const {
#pragma unroll
        for (int j = 0; j < 2 * groups; ++j) {
            const u32 table = unit.scales >> 8 * j & 255;
            unit.tables[j] = ptx::ld_shared_v2(ptx::smem_address(smem_.packed.tables) + table * sizeof(u64));
        }
    }

    // Writes this warp's unit `i`, if it has one, to the current slot.
    __device__ __forceinline__ void write(const Unit& unit, int i) const {
        if (!has(i)) return;
        const u32 to = to_ + i * config.converter_warps * unit_rows * k_block_bytes;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint2 first = unit.tables[j * groups], last = unit.tables[j * groups + (has_tables ? groups - 1 : 0)];
            write_column(to ^ 2 * j << 4, unit.codes[j], first, last);
        }
        if constexpr (config.swap_ab) write_group_scales(to, unit.scales);
    }

    // Advances to the next slot.
    __device__ __forceinline__ void advance() {
        to_ += slot_bytes;
        if (to_ >= ptx::smem_address(smem_.b[0]) + config.b_slots * slot_bytes) to_ -= config.b_slots * slot_bytes;
    }

   private:
    static constexpr int slot_bytes = config.block_n * config.k_bytes;
    static constexpr int columns = 4;                   // with 32 codes each, per K block
    static constexpr int column_bytes = 16;             // per row
    static constexpr bool has_tables = config.has_tables();
    static constexpr int groups = has_tables ? 32 / config.b_group : 0;                 // with tables, per column
    static constexpr int scale_bytes = has_tables ? groups : config.chains > 1 ? 2 : 0;  // per row and column

    static __device__ __forceinline__ int row() { return threadIdx.x % unit_rows; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x % warp_threads / unit_rows * 2; }

    // Offsets for this lane: codes and scales in a unit, and its first 16-byte piece in a swizzled tile.
    static __device__ __forceinline__ u32 codes_offset() { return (first_column() * unit_rows + row()) * column_bytes; }
    static __device__ __forceinline__ u32 scales_offset() {
        return columns * unit_rows * column_bytes + (row() * columns + first_column()) * scale_bytes;
    }
    static __device__ __forceinline__ u32 piece_offset() {
        return row() * k_block_bytes + ((2 * first_column() ^ row() % 8) << 4);
    }

    // Writes a row's 32 elements of a column, two pieces of the 128-byte swizzle, by the tables of its halves.
    static __device__ __forceinline__ void write_column(u32 to, uint4 codes, uint2 first, uint2 last) {
        constexpr auto converted = eight_elements<config.table_group()>;
        const uint2 x = converted(codes.x, first, last), y = converted(codes.y, first, last);
        const uint2 z = converted(codes.z, first, last), w = converted(codes.w, first, last);
        ptx::st_shared_v4(to, x.x, y.x, z.x, w.x);
        ptx::st_shared_v4(to ^ 1 << 4, x.y, y.y, z.y, w.y);
    }

    // Writes the scales of two columns, one group each, for the row whose elements are at `to`.
    __device__ __forceinline__ void write_group_scales(u32 to, u32 scales) const {
        const u32 row = (to - ptx::smem_address(smem_.b[0])) / k_block_bytes;
        const u32 at = ptx::smem_address(smem_.groups.group_scale[0][0][0]) + (row * columns + first_column()) * scale_bytes;
        ptx::st_shared(at, scales);
    }

    SharedStorage<config>& smem_;
    const int warp_;
    u32 to_;  // this lane's first piece in the current slot
};

// Runs one converter warp over all stages of this CTA's tiles.
template <GemmConfig config>
__device__ __forceinline__ void convert_stages(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    using Unit = typename Converter<config>::Unit;
    Converter<config> converter(smem, warp);
    const KRange range = k_range<config>(params);
    PipelineState<config.unit_stages> state;
    PipelineState<config.b_slots> slots;
    int left = __shfl_sync(0xffffffff, TileScheduler<config>(params).count() * (range.end - range.begin), 0);
    if (left == 0) return;
    wait(smem.units.full[0], 0);
    Unit present = converter.read(0, 0);
    converter.look_up(present);
    const bool arrives = threadIdx.x % warp_threads < config.slot_lanes();
    // Slots advance at the end of a step. Otherwise ptxas keeps a copy of the earlier slot number in a register of each
    // lane, and lets the warp diverge at the wait.
#pragma unroll 1
    for (; left > 0; --left) {
        const int stage = state.stage;
        state.advance();
        wait(smem.slots.empty[slots.stage], slots.phase ^ 1);
#pragma unroll
        for (int i = 0; i < converter.units; ++i) {
            if constexpr (!Converter<config>::reads_ahead) converter.write(present, i);
            Unit next = present;
            if (i + 1 < converter.units) {
                if (converter.has(i + 1)) next = converter.read(stage, i + 1);
            } else {
                ptx::mbarrier_arrive(ptx::smem_address(&smem.units.empty[stage]));
                if (left > 1) {
                    wait(smem.units.full[state.stage], state.phase);
                    next = converter.read(state.stage, 0);
                }
            }
            if constexpr (Converter<config>::reads_ahead) converter.write(present, i);
            converter.look_up(next);
            present = next;
        }
        __syncwarp();
        ptx::mbarrier_arrive(ptx::smem_address(&smem.slots.full[slots.stage]), arrives);
        slots.advance();
        converter.advance();
    }
}

}  // namespace deep_tile
