// Packed `b`: how the 4 bits of a weight become the e4m3 that WGMMA reads, between TMA and the math warpgroups.
//
// Memory holds `b` as units of 16 rows by one K block: the codes of 32 elements of a row in 16 bytes, row behind row,
// for four such columns one behind the other; then the scales of each row's groups, a byte each (fourbit.py packs). A
// tile's units of a K block are adjacent, so that one bulk copy brings them to the ring.
//
// A table has the e4m3 of a code's eight magnitudes times a group's scale. A code's three bits select a byte of it, four
// codes per PRMT; signs are ORed in. In a word of eight codes, nibble i has the magnitude of code i in its low bits; the
// top bits have the signs of codes 4, 0, 5, 1, 6, 2, 7, 3, so that a shift aligns four of them with four bytes.
#pragma once

#include "formats.cuh"
#include "scheduler.cuh"

namespace deep_tile {

// Magnitudes of e2m1, by their three bits.
__device__ __forceinline__ float magnitude(int code) {
    return code < 2 ? code * 0.5f : (1 << (code / 2 - 1)) * (1.0f + code % 2 * 0.5f);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Tables of e2m1 in groups of 32 with scales in UE8M0: a table per power of two, relative to the block's scale. Beyond
// the first all magnitudes are zero in e4m3; beyond the last only zeros have a place in the block.
struct PowerTables {
    static constexpr int first = -16, last = 15;

    static __device__ __forceinline__ float scale(int table) { return power_of_two(table + first); }

    // Table of a group, from the byte of its scale and the block's scale, which is a power of two.
    static __device__ __forceinline__ u32 of_group(u32 scale, u32 block_scale) {
        const int power = static_cast<int>(scale) - static_cast<int>(block_scale >> 23);
        return min(max(power, first), last) - first;
    }
};

// Tables of e2m1 in groups of 16 with scales in e4m3: a table per scale, an eighth of it, so that all products fit e4m3.
struct E4M3Tables {
    static __device__ __forceinline__ float scale(int table) {
        const int exponent = table / 8, fraction = table % 8;
        return exponent == 0 ? fraction * power_of_two(-12) : (8 + fraction) * power_of_two(exponent - 13);
    }

    static __device__ __forceinline__ u32 of_group(u32 scale, u32) { return scale & 127; }
};

template <GemmConfig config>
using Tables = typename Conditional<config.b_group == 32, PowerTables, E4M3Tables>::type;

// Converter warps: each takes every fourth unit of a stage. A lane has a row, and two of its four columns of 32 codes:
// eight lanes read and write eight rows of the same column, which lie in different banks on both sides.
template <GemmConfig config>
class Converter {
   public:
    __device__ __forceinline__ Converter(SharedStorage<config>& smem, int warp) : smem_(smem), warp_(warp) {
        for (int table = thread(); table < config.b_tables; table += threads) {
            const float scale = Tables<config>::scale(table);
            float products[8];
#pragma unroll
            for (int code = 0; code < 8; ++code) products[code] = magnitude(code) * scale;
            const u32 low = pack_e4m3({products[0], products[1], products[2], products[3]});
            const u32 high = pack_e4m3({products[4], products[5], products[6], products[7]});
            smem_.packed.tables[table] = static_cast<u64>(high) << 32 | low;
        }
        ptx::bar_sync(tables_barrier, threads);
    }

    // Converts a stage to a slot.
    __device__ __forceinline__ void convert(int stage, int slot) const {
        constexpr int units = config.block_n / unit_rows, all = config.scale_blocks * units;
#pragma unroll
        for (int first = 0; first < all; first += config.converter_warps) {
            const int unit = first + warp_;
            if (first + config.converter_warps > all && unit >= all) break;
            const int block = unit / units, row = unit % units * unit_rows;
            const u32 scale = __float_as_uint(smem_.b_scale[stage][block][row / config.b_scale_columns]);
            convert_unit(ptx::smem_address(&smem_.packed.units[stage][unit * config.b_unit_bytes]),
                         ptx::smem_address(&smem_.b[slot][(block * config.block_n + row) * k_block_bytes]), scale);
        }
    }

   private:
    static constexpr int threads = config.converter_warps * warp_threads;
    static constexpr int columns = 4;           // of 32 codes, in a K block
    static constexpr int column_bytes = 16;     // of a row
    static constexpr int groups = 32 / config.b_group;  // per column
    static constexpr u32 magnitudes = 0x77777777, signs = 0x80808080;

    static __device__ __forceinline__ int thread() { return threadIdx.x % warpgroup_threads; }

    __device__ __forceinline__ void convert_unit(u32 from, u32 to, u32 block_scale) const {
        const int lane = threadIdx.x % warp_threads, row = lane % unit_rows, first = lane / unit_rows * 2;
        using Bits = typename Conditional<groups == 1, u16, u32>::type;
        const u32 at = from + columns * unit_rows * column_bytes + (row * columns + first) * groups;
        u32 scales = ptx::ld_shared<Bits>(at);
        uint4 codes[2];
        uint2 tables[2][groups];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[i] = ptx::ld_shared_v4(from + ((first + i) * unit_rows + row) * column_bytes);
#pragma unroll
            for (int group = 0; group < groups; ++group) tables[i][group] = next_table(scales, block_scale);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int piece = 2 * (first + i);
            write(to, row, piece, codes[i].x, codes[i].y, tables[i][0]);
            write(to, row, piece + 1, codes[i].z, codes[i].w, tables[i][groups - 1]);
        }
    }

    // Reads the table of the group whose scale is the lowest byte, and drops that.
    __device__ __forceinline__ uint2 next_table(u32& scales, u32 block_scale) const {
        const u32 table = Tables<config>::of_group(scales & 255, block_scale);
        scales >>= 8;
        return ptx::ld_shared_v2(ptx::smem_address(smem_.packed.tables) + table * sizeof(u64));
    }

    // Writes 16 elements, which are a piece of the 128-byte swizzle.
    static __device__ __forceinline__ void write(u32 to, int row, int piece, u32 low, u32 high, uint2 table) {
        const u32 at = to + row * k_block_bytes + ((piece ^ row % 8) << 4);
        ptx::st_shared_v4(at, first_four(low, table), last_four(low, table), first_four(high, table),
                          last_four(high, table));
    }

    static __device__ __forceinline__ u32 first_four(u32 codes, uint2 table) {
        return __byte_perm(table.x, table.y, codes & magnitudes) | (codes & signs);
    }

    static __device__ __forceinline__ u32 last_four(u32 codes, uint2 table) {
        return __byte_perm(table.x, table.y, (codes & magnitudes) >> 16) | (codes << 4 & signs);
    }

    SharedStorage<config>& smem_;
    const int warp_;
};

// Runs one converter warp over every stage of this CTA's tiles.
template <GemmConfig config>
__device__ __forceinline__ void convert_stages(const GemmParams& params, SharedStorage<config>& smem, int warp) {
    const Converter<config> converter(smem, warp);
    const KRange range = k_range<config>(params);
    PipelineState<config.stages> state;
    PipelineState<config.b_slots> slots;
    for (int left = TileScheduler<config>(params).count() * (range.end - range.begin); left > 0; --left) {
        wait(smem.full[state.stage], state.phase);
        wait(smem.slots.empty[slots.stage], slots.phase ^ 1);
        converter.convert(state.stage, slots.stage);
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(ptx::smem_address(&smem.slots.full[slots.stage]));
        ptx::mbarrier_arrive(ptx::smem_address(&smem.empty[state.stage]));
        state.advance();
        slots.advance();
    }
}

}  // namespace deep_tile
