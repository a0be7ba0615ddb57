// GemmConfig, the kernel's one template argument, and the shared memory that it implies.
//
// Python decides and derives every number (deep_tile/config.py says what each means); codegen.py writes them as
// `constexpr GemmConfig config = {...}`. Nothing is computed twice: this side only asserts.
//
// Before all headers stands the struct of the kernel's argument, such as GemmParams, which codegen.py writes from the
// table in deep_tile/params.py: sizes, strides, addresses and tensor maps (TensorMap) of one launch.
#pragma once

namespace deep_tile {

// Whether NVRTC works out addresses in shared memory in 32 bits, as it does from 13.1 on; before, it takes 64.
constexpr bool short_addresses = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ > 1300;

// Of numbers in `out` and in the bias, if there is one.
enum class Format { none, bf16, fp16, fp32, e4m3, int32 };

// What becomes of sums; swiglu makes one of two.
enum class Activation { none, relu, gelu, gelu_tanh, silu, swiglu };

struct GemmConfig {
    int block_m, block_n, block_k, k_bytes;
    int a_span, b_span;
    int stages;
    int cluster_m, cluster_n, split_k;
    int scale_blocks, scales_at_once;
    int math_warpgroups, scale_warps, store_warps, threads, math_registers, producer_registers;
    int rows_per_warpgroup, chunks_m, chunks_n, chunks, mma_n;
    int block_sets;
    bool pairs, carries_descriptors, queues_blocks, ends_apart, takes_turns, prefetches_b;
    bool bulk_scales, reads_runs, reads_any_runs;
    int b_stages, b_slots;
    int columns_per_part;
    int column_group, column_shifts, b_scale_columns, b_scale_slots;
    int store_columns, store_rows, store_swizzle, boxes, store_chunks, boxes_at_once, store_buffers;
    bool tma_store;
    bool by_offs, by_counts, by_k;
    bool integer_sums, row_scales, column_scales;
    bool accumulate, quantizes;
    Format out_format;
    int out_bytes;
    Format bias_format;
    Activation activation;
    int columns_per_output, out_columns_per_part;
    int smem_bytes;

    constexpr bool has_scales() const { return scale_warps > 0; }  // of blocks, by which promotion multiplies
    constexpr int scale_stages() const { return scale_warps > 0 ? stages : 1; }  // no array has none

    // Whether a tile's sums stay integers until those of all parts of K are added up, or are stored.
    constexpr bool keeps_integers() const {
        return integer_sums && block_sets == 0 && (split_k > 1 || out_format == Format::int32);
    }

    constexpr bool has_bias() const { return bias_format != Format::none; }

    // When the bias is read: late, where a tile's columns are another block's first, or registers hold their scales. Else
    // its sums begin with it, where they are added to, or it is requested while the first WGMMAs run.
    constexpr bool adds_bias_late() const { return has_bias() && (split_k > 1 || row_scales); }
    constexpr bool begins_with_bias() const { return has_bias() && !adds_bias_late() && block_sets > 0; }
    constexpr bool keeps_bias() const { return has_bias() && !adds_bias_late() && block_sets == 0; }

    constexpr bool row_groups() const { return by_offs || by_counts; }
    constexpr bool grouped() const { return row_groups() || by_k; }
    constexpr bool a_has_tail_map() const { return a_span == 0 && !row_groups(); }
    constexpr bool resident_b() const { return b_stages > 0; }
    constexpr bool multicast() const { return cluster_m * cluster_n > 1; }
    constexpr int cluster() const { return cluster_m * cluster_n * split_k; }

    // Whether NVRTC must not see how addresses in shared memory come about. Beside carried descriptors, which fill uniform
    // registers, ptxas puts addresses of 32 bits into ordinary ones, in five kernels of sixteen: math warps then wait at
    // barriers as warps do that can fall apart. Hidden, they stay uniform. The stage is hidden too, or NVRTC would choose
    // between addresses instead of stages, with more instructions per K block. Older ones need none of that.
    constexpr bool hides_addresses() const { return short_addresses && carries_descriptors; }
};

constexpr int mma_m = 64;              // rows of one WGMMA, and of one output box
constexpr int warp_threads = 32;
constexpr int warpgroup_threads = 128;
constexpr int scale_block = 128;       // columns of b that share a scale
constexpr int k_block_bytes = 128;     // of a row of an operand in each K block
constexpr int span_k = 64;             // elements of K in a K block of an operand that lies along its rows: of 16 bits

// Named barriers: one of all threads, one of two warps, one of both math warpgroups, the others one for each of these.
constexpr int all_barrier = 0;
constexpr int others_barrier = 9;        // math warp 0 has made its barriers, the operands' warp may use them
constexpr int apart_barrier = 10;        // math warpgroup 0 has multiplied its tile, 1 may begin its last WGMMAs
constexpr int own_barrier = 1;           // the warpgroup itself
constexpr int turn_barrier = 3;          // its turn to begin WGMMAs
constexpr int boxes_full_barrier = 5;    // its output boxes are written
constexpr int boxes_empty_barrier = 7;   // their buffers may be written again

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The type `Then` or the type `Else`.
template <bool condition, typename Then, typename Else>
struct Conditional {
    using type = Then;
};

template <typename Then, typename Else>
struct Conditional<false, Then, Else> {
    using type = Else;
};

// What WGMMA adds up in.
template <GemmConfig config>
using MmaSum = typename Conditional<config.integer_sums, int, float>::type;

// Sums that the other blocks of a split-K cluster send: one slot per sender, four registers of each thread adjacent.
template <GemmConfig config, bool split = (config.split_k > 1)>
struct Partials {};

template <GemmConfig config>
struct Partials<config, true> {
    static constexpr int vectors = config.columns_per_part / 8;
    alignas(1024) float partial[config.math_warpgroups][config.split_k - 1][vectors][warpgroup_threads][4];
};

// Those of the K blocks of a resident tile of `b`.
template <GemmConfig config, bool resident = config.resident_b()>
struct ResidentBarriers {};

template <GemmConfig config>
struct ResidentBarriers<config, true> {
    u64 full[config.b_slots];
    u64 empty[config.b_slots];
};

// Operand and output buffers begin at multiples of 1024 bytes: the period of the 128-byte swizzle.
template <GemmConfig config>
struct alignas(1024) SharedStorage : Partials<config> {
    alignas(1024) u8 a[config.stages][config.block_m * config.k_bytes];
    u8 b[config.b_slots][config.block_n * config.k_bytes];
    u8 out[config.math_warpgroups][config.store_buffers][mma_m * config.store_columns * config.out_bytes];
    alignas(16) float a_scale[config.scale_stages()][config.scale_blocks][config.has_scales() ? config.block_m : 4];
    alignas(16) float b_scale[config.scale_stages()][config.scale_blocks][(config.b_scale_slots + 3) / 4 * 4];
    u64 full[config.stages];
    u64 empty[config.stages];
    u64 partial_full[config.math_warpgroups];
    u64 partial_empty[config.math_warpgroups];
    [[no_unique_address]] ResidentBarriers<config> resident;
};

}  // namespace deep_tile
