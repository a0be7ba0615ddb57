// GemmConfig, the kernel's only template argument, and the shared-memory layout it implies.
//
// Python decides and derives every number (deep_tile/config.py documents each); codegen.py writes them as `constexpr
// GemmConfig config = {...}`. This side recomputes nothing: it only asserts.
//
// The kernel's parameter struct, such as GemmParams, precedes all headers. codegen.py generates it from the table in
// deep_tile/params.py: sizes, strides, addresses and tensor maps (TensorMap) for one launch.
#pragma once

namespace deep_tile {

// True for NVRTC 13.1 and later, which computes shared-memory addresses in 32 bits; earlier versions use 64.
constexpr bool short_addresses = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ > 1300;

// Number format in `out` and in the bias, if there is one.
enum class Format { none, bf16, fp16, fp32, e4m3, int32 };

// Activation applied to accumulators; swiglu makes one output column from two.
enum class Activation { none, relu, gelu, gelu_tanh, silu, swiglu };

struct GemmConfig {
    int block_m, block_n, block_k, k_bytes;
    int a_span, b_span, b_rows;
    int stages;
    int cluster_m, cluster_n, split_k;
    int scale_blocks, scales_at_once;
    int math_warpgroups, scale_warps, store_warps, unit_warps, converter_warps, threads;
    int math_registers, producer_registers, converter_registers;
    int rows_per_warpgroup, chunks_m, chunks_n, chunks, mma_n;
    int block_sets;
    bool pairs, carries_descriptors, queues_blocks, ends_apart, takes_turns, prefetches_b;
    bool bulk_scales, reads_runs, reads_any_runs;
    int b_stages, b_slots, b_slot_bytes, b_group;
    bool b_integers;
    int chains, b_unit_bytes, unit_stages;
    int k_parts;
    bool from_registers, swap_ab;
    int columns_per_part;
    int column_group, column_shifts, b_scale_columns, b_scale_slots;
    int store_columns, store_rows, store_swizzle, boxes, store_chunks, boxes_at_once, store_buffers;
    bool tma_store, transposed;
    bool by_offs, by_counts, by_k;
    bool integer_sums, row_scales, column_scales;
    bool accumulate, quantizes;
    Format out_format;
    int out_bytes;
    Format bias_format;
    Activation activation;
    int columns_per_output, out_columns_per_part;
    int smem_bytes;

    constexpr bool has_scales() const { return scale_warps > 0; }  // block scales, applied by promotion
    constexpr int scale_stages() const { return scale_warps > 0 ? stages : 1; }  // at least 1: no C++ array is empty

    // True if accumulators stay integers until all K parts are added up, or until they are stored.
    constexpr bool keeps_integers() const {
        return integer_sums && block_sets == 0 && (split_k > 1 || out_format == Format::int32);
    }

    constexpr bool has_bias() const { return bias_format != Format::none; }

    // Bias timing: late in split K, where a CTA finishes only its share of the columns, and with row scales, which take
    // the registers. Otherwise promoted sums begin with it; without promotion it is loaded during the first WGMMAs.
    constexpr bool adds_bias_late() const { return has_bias() && (split_k > 1 || row_scales); }
    constexpr bool begins_with_bias() const { return has_bias() && !adds_bias_late() && block_sets > 0; }
    constexpr bool keeps_bias() const { return has_bias() && !adds_bias_late() && block_sets == 0; }

    constexpr bool row_groups() const { return by_offs || by_counts; }
    constexpr bool grouped() const { return row_groups() || by_k; }
    constexpr bool a_has_tail_map() const { return a_span == 0 && !row_groups(); }
    constexpr bool cuts_b() const { return transposed && b_span > 0 && b_rows == block_n; }  // the matrix's last box
    constexpr bool packed_b() const { return b_group > 0; }  // `b` has 4 bits in memory, and 8 where WGMMA reads it
    constexpr bool has_tables() const { return packed_b() && !b_integers; }  // of what its codes become
    constexpr int table_group() const { return b_integers ? 128 : b_group; }  // codes per table; a K block if none

    // Lanes of a warp that arrive at a slot's mbarriers. One suffices for a `b` that WGMMA alone reads: racecheck
    // follows an mbarrier's arrivals but not __syncwarp.
    constexpr int slot_lanes() const { return b_stages > 0 && packed_b() && chains == 1 ? 1 : 32; }
    constexpr bool has_slots() const { return b_stages > 0 || from_registers; }
    constexpr bool resident_b() const { return b_stages > 0 && !packed_b(); }
    constexpr bool moves_registers() const { return math_warpgroups == 2 || packed_b(); }  // by setmaxnreg
    constexpr int sums_stride() const { return block_n + 4; }  // floats from row to row; a warp's lanes write to 32 banks
    constexpr int multicast_ctas() const { return cluster_m * cluster_n; }  // a cluster's CTAs of one K part
    constexpr int cluster() const { return multicast_ctas() * split_k; }
    constexpr bool multicast() const { return multicast_ctas() > 1; }
    constexpr bool is_grid() const { return cluster_m > 1 && cluster_n > 1; }
    constexpr int peers() const { return cluster_m + cluster_n - 2; }  // CTAs that share one of a CTA's operands

    // True if NVRTC must not see how shared-memory addresses are computed. Carried descriptors fill the uniform
    // registers; in five kernels out of sixteen ptxas then puts 32-bit addresses into ordinary ones, and math warps
    // wait at barriers as if divergent. Hidden addresses stay uniform. The stage is hidden too: otherwise NVRTC selects
    // between addresses, not stages, with more instructions per K block. Older versions need none of this.
    constexpr bool hides_addresses() const { return short_addresses && carries_descriptors; }
};

constexpr int mma_m = 64;              // rows per WGMMA, and per output box
constexpr int warp_threads = 32;
constexpr int warpgroup_threads = 128;
constexpr int scale_block = 128;       // columns of b per scale
constexpr int k_block_bytes = 128;     // bytes per operand row in a K block
constexpr int span_k = 64;             // MN-major operands, always 16-bit: K elements per K block
constexpr int unit_rows = 16;          // rows per unit of a packed `b`
constexpr int packed_tables = 256;     // one per scale byte

// Named barriers: "all" joins all threads, "others" two warps, "apart" both math warpgroups; the rest, per warpgroup.
constexpr int all_barrier = 0;
constexpr int others_barrier = 9;        // math warp 0 has made its mbarriers; the operand warp may use them
constexpr int apart_barrier = 10;        // math warpgroup 0 has multiplied its tile; 1 may issue its last WGMMAs
constexpr int tables_barrier = 11;       // the converter warps have written the tables
constexpr int exchange_barrier = 12;     // the math warpgroups have written, or read, the sums that they exchange
constexpr int own_barrier = 1;           // the warpgroup by itself
constexpr int turn_barrier = 3;          // its turn to issue WGMMAs
constexpr int boxes_full_barrier = 5;    // its output boxes are written
constexpr int boxes_empty_barrier = 7;   // its box buffers may be overwritten

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Conditional selects `Then` or `Else`, as std::conditional does.
template <bool condition, typename Then, typename Else>
struct Conditional {
    using type = Then;
};

template <typename Then, typename Else>
struct Conditional<false, Then, Else> {
    using type = Else;
};

// Accumulator type in WGMMA.
template <GemmConfig config>
using MmaSum = typename Conditional<config.integer_sums, int, float>::type;

// Split-K receive buffers: sums from the cluster's other CTAs, one slot per sender, four registers per thread adjacent.
template <GemmConfig config, bool split = (config.split_k > 1)>
struct Partials {};

template <GemmConfig config>
struct Partials<config, true> {
    static constexpr int vectors = config.columns_per_part / 8;
    alignas(1024) float partial[config.math_warpgroups][config.split_k - 1][vectors][warpgroup_threads][4];
};

// Mbarriers for a `b` outside the ring, resident or converted, or for a tile's sums: a pair per slot.
template <GemmConfig config, bool apart = config.has_slots()>
struct SlotBarriers {};

template <GemmConfig config>
struct SlotBarriers<config, true> {
    u64 full[config.b_slots];
    u64 empty[config.b_slots];
};

// A packed `b`: its ring, and per group scale the e4m3 values for eight magnitudes (packed_b.cuh).
template <GemmConfig config, bool packed = config.packed_b()>
struct PackedOperand {};

template <GemmConfig config>
struct PackedOperand<config, true> {
    alignas(16) u8 units[config.unit_stages][config.scale_blocks * (config.block_n / unit_rows) * config.b_unit_bytes];
    u64 tables[packed_tables];
};

// Mbarriers of a packed `b`: a pair per ring stage.
template <GemmConfig config, bool packed = config.packed_b()>
struct UnitBarriers {};

template <GemmConfig config>
struct UnitBarriers<config, true> {
    u64 full[config.unit_stages];
    u64 empty[config.unit_stages];
};

// Scales of a packed `b`'s groups, which the converter warps write for the math warps: four per row and K block.
template <GemmConfig config, bool exist = config.swap_ab>
struct SlotScales {};

template <GemmConfig config>
struct SlotScales<config, true> {
    static_assert(config.chains == 4, "a uint2 holds the scales of a row");
    alignas(16) u16 group_scale[config.b_slots][config.scale_blocks][config.block_n][4];
};

// Sums of 64 rows that math warpgroups exchange if they multiply with swapped operands.
template <GemmConfig config, bool exist = config.swap_ab>
struct Exchange {};

template <GemmConfig config>
struct Exchange<config, true> {
    alignas(16) float sums[mma_m][config.sums_stride()];
};

// Tiles to which the stages of units belong, for converter warps that multiply and have no scheduler.
template <GemmConfig config, bool exist = config.from_registers>
struct UnitTiles {};

template <GemmConfig config>
struct UnitTiles<config, true> {
    int rows[config.unit_stages];  // 0 after the last tile
    int column[config.unit_stages];
};

// Shared memory. Operand and output buffers start at multiples of 1024 bytes, the 128-byte swizzle's period.
template <GemmConfig config>
struct alignas(1024) SharedStorage : Partials<config> {
    alignas(1024) u8 a[config.stages][config.block_m * config.k_bytes];
    u8 b[config.b_slots][config.b_slot_bytes];  // or a tile's sums, where `b` comes from registers
    u8 out[config.math_warpgroups][config.store_buffers][mma_m * config.store_columns * config.out_bytes];
    [[no_unique_address]] PackedOperand<config> packed;
    alignas(16) float a_scale[config.scale_stages()][config.scale_blocks][config.has_scales() ? config.block_m : 4];
    alignas(16) float b_scale[config.scale_stages()][config.scale_blocks][(config.b_scale_slots + 3) / 4 * 4];
    [[no_unique_address]] SlotScales<config> groups;
    [[no_unique_address]] Exchange<config> exchange;
    u64 full[config.stages];
    u64 empty[config.stages];
    u64 partial_full[config.math_warpgroups];
    u64 partial_empty[config.math_warpgroups];
    [[no_unique_address]] SlotBarriers<config> slots;
    [[no_unique_address]] UnitBarriers<config> units;
    [[no_unique_address]] UnitTiles<config> tiles;
};

}  // namespace deep_tile
