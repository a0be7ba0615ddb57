// Thin GEMM: few columns, few rows, or a long K. BF16 a by FP32 or BF16 b, split along K.
//
// sums[part, m, n] = sum over the part's K blocks of a[m, block] . b[n, block], of all matrices one after the other
//
//   role                work                                              per stage
//   operand warp        TMA loads a and b                                 waits empty, expects bytes on landed
//   math warpgroups     split FP32 b into BF16 terms; WGMMA of all        wait landed, arrive on empty; meet each other
//                       terms, FP32 sums; squares of a                    once a K block where they split
//
// An FP32 b is a sum of BF16 terms (terms.cuh), whose products with BF16 are exact; but WGMMA truncates as it
// accumulates, so temporaries span one K block, smallest terms first, and are then added to FP32 registers, as FP8 is
// promoted. Narrow tiles split b in the kernel: the next K block while WGMMA multiplies this one. Wide tiles, whose b
// many CTAs share, read it already split. A unit is one tile and one part of K; its sums depend on nothing else, and
// add_parts() adds the parts in a fixed order.
#pragma once

#include "memory.cuh"
#include "mma.cuh"
#include "parts.cuh"
#include "terms.cuh"

namespace deep_tile {

constexpr int thin_k = 64;       // elements of K in a K block
constexpr int most_columns = 192;  // per WGMMA, limited by registers
constexpr int split_rows = 2;    // rows of b that a warp splits at once, four numbers per lane
constexpr int split_slots = 2;   // buffers for terms: one K block is multiplied, the next is split
constexpr u32 split_barrier = 1; // math warps meet here

struct ThinConfig {
    int block_m, block_n;
    int terms;     // of b
    int stages;
    bool splits;   // b is FP32; otherwise its terms are operands
    bool squares;  // also sum the squares of each row of a

    // True if terms lie side by side in one WGMMA's columns, where registers suffice: a is read once, and each term has
    // its own sums.
    constexpr bool side_by_side() const { return block_m <= 128 && terms * block_n <= most_columns; }
    constexpr int columns_at_once() const { return side_by_side() ? terms * block_n : block_n; }
    constexpr int chains() const { return terms * block_n / columns_at_once(); }
    constexpr int math_threads() const { return block_m / mma_m * warpgroup_threads; }
    constexpr int threads() const { return math_threads() + warp_threads; }
    constexpr int boxes() const { return splits ? 2 : terms; }  // of b in a stage, each 128 bytes of its rows
    constexpr int box_bytes() const { return block_n * k_block_bytes; }
    constexpr int split_boxes() const { return splits ? split_slots * terms : 0; }
};

template <ThinConfig config>
struct alignas(1024) ThinStorage {
    u8 a[config.stages][config.block_m * k_block_bytes];
    u8 b[config.stages * config.boxes() + config.split_boxes()][config.box_bytes()];  // of stages, then terms of slots
    u64 landed[config.stages];
    u64 empty[config.stages];
};

// A unit: a tile and its K blocks, counted through all matrices.
struct ThinWork {
    int row, column, part;
    int begin, end;
};

// Units count parts of K first, then columns, then rows, so that few rows are read at once. A CTA has every gridDim.x-th.
template <ThinConfig config>
__device__ __forceinline__ ThinWork thin_work(const ThinParams& params, u32 unit) {
    const u32 columns = (params.n + config.block_n - 1) / config.block_n;
    const u32 tile = unit / params.parts, part = unit % params.parts;
    const u32 begin = part * params.part_steps + min(part, params.longer_parts);
    const u32 end = begin + params.part_steps + (part < params.longer_parts);
    return {int(tile / columns) * config.block_m, int(tile % columns) * config.block_n, int(part), int(begin), int(end)};
}

// Position of a K block: which matrix, and where in its K.
struct ThinStep {
    int matrix, k;

    __device__ __forceinline__ ThinStep(const ThinParams& params, int step)
        : matrix(u32(step) / u32(params.matrix_steps)), k(u32(step) % u32(params.matrix_steps) * thin_k) {}

    __device__ __forceinline__ void advance(const ThinParams& params) {
        k += thin_k;
        if (k >= params.k) {
            k = 0;
            matrix += 1;
        }
    }
};

// TMA loads into the stages, by one lane: out-of-bounds rows and K become zeros, so every box is whole.
template <ThinConfig config>
__device__ __forceinline__ void load_thin(const ThinParams& params, ThinStorage<config>& smem) {
    PipelineState<config.stages> state;
    constexpr u32 bytes = config.block_m * k_block_bytes + config.boxes() * config.box_bytes();
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < params.units; unit += gridDim.x) {
        const ThinWork work = thin_work<config>(params, unit);
        ThinStep at(params, work.begin);
#pragma unroll 1
        for (int left = work.end - work.begin; left > 0; --left) {
            wait(smem.empty[state.stage], state.phase ^ 1);
            if (ptx::elect_sync()) {
                const u32 landed = ptx::smem_address(&smem.landed[state.stage]);
                const u32 a = ptx::smem_address(smem.a[state.stage]), b = ptx::smem_address(smem.b[state.stage * config.boxes()]);
                ptx::mbarrier_arrive_expect_tx(landed, bytes);
                ptx::cp_async_bulk_tensor_load(a, params.a_map, at.k * int(sizeof(u16)), work.row, at.matrix, landed);
#pragma unroll
                for (int i = 0; i < config.boxes(); ++i) {
                    const int inner = config.splits ? at.k * int(sizeof(float)) + i * k_block_bytes : at.k * int(sizeof(u16));
                    const int matrix = config.splits ? at.matrix : at.matrix * config.terms + i;
                    ptx::cp_async_bulk_tensor_load(b + i * config.box_bytes(), params.b_map, inner, work.column, matrix, landed);
                }
            }
            __syncwarp();
            state.advance();
            at.advance(params);
        }
    }
}

// Splits the numbers in a stage's two boxes into the boxes of terms; all math warps share the rows. Numbers 0 to 31 of a
// row lie in the first box, the others in the second one: a lane has four of a row, and half a warp reads and writes whole
// rows of 128 bytes.
template <ThinConfig config>
__device__ __forceinline__ void split_stage(const u8* numbers, const u8* terms, int warp) {
    constexpr int rows_at_once = config.math_threads() / warp_threads * split_rows;
    const int lane = threadIdx.x % warp_threads, four = lane % 16;
    const u32 from = ptx::smem_address(numbers + four / 8 * config.box_bytes()), to = ptx::smem_address(terms);
#pragma unroll
    for (int first = 0; first < config.block_n; first += rows_at_once) {
        const int row = first + warp * split_rows + lane / 16;
        if (config.block_n % rows_at_once != 0 && row >= config.block_n) break;
        const uint4 bits = ptx::ld_shared_v4(from + row * k_block_bytes + (four % 8 ^ row % 8) * 16);
        u32 low[config.terms], high[config.terms];
        split_pair<config.terms>(__uint_as_float(bits.x), __uint_as_float(bits.y), low);
        split_pair<config.terms>(__uint_as_float(bits.z), __uint_as_float(bits.w), high);
        const u32 at = to + row * k_block_bytes + (four / 2 ^ row % 8) * 16 + four % 2 * 8;
#pragma unroll
        for (int term = 0; term < config.terms; ++term) {
            ptx::st_shared_v2(at + term * config.box_bytes(), __uint_as_float(low[term]), __uint_as_float(high[term]));
        }
    }
    ptx::fence_proxy_async();
}

// Square sums for a warp's 16 rows, four at a time: eight lanes share a row, 16 bytes each.
struct Squares {
    float sums[4] = {};

    __device__ __forceinline__ void add(const u8* warp_rows) {
        const int lane = threadIdx.x % warp_threads, chunk = lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i * 4 + lane / 8;
            const uint4 words = ptx::ld_shared_v4(ptx::smem_address(warp_rows + row * k_block_bytes + (chunk ^ row % 8) * 16));
            const u32 pairs[4] = {words.x, words.y, words.z, words.w};
            float sum = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = __uint_as_float(pairs[j] << 16), high = __uint_as_float(pairs[j] & 0xffff0000);
                sum = fmaf(high, high, fmaf(low, low, sum));
            }
            sums[i] += sum;
        }
    }

    // Stores the rows' sums, of which `rows` exist.
    __device__ __forceinline__ void store(float* to, int rows) const {
        const int lane = threadIdx.x % warp_threads;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = sums[i];
#pragma unroll
            for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
            const int row = i * 4 + lane / 8;
            if (lane % 8 == 0 && row < rows) to[row] = sum;
        }
    }
};

template <ThinConfig config>
__device__ __forceinline__ void store_thin(const ThinParams& params, const float (&sums)[config.block_n / 2], const ThinWork& work,
                                           int warp_row) {
    const int lane = threadIdx.x % warp_threads;
#pragma unroll
    for (int i = 0; i < config.block_n / 2; ++i) {
        const int row = warp_row + lane / 4 + i / 2 % 2 * 8, column = work.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < params.m && column < params.n) {
            write_result(params, work.part * params.part_stride + row * params.out_stride + column, sums[i]);
        }
    }
}

// Adds a K block's products to the sums, the smallest terms first where each has its own.
template <ThinConfig config>
__device__ __forceinline__ void add_terms(float (&sums)[config.block_n / 2], const float (&products)[config.columns_at_once() / 2]) {
    constexpr int count = config.block_n / 2, terms = config.columns_at_once() / config.block_n;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float sum = products[(terms - 1) * count + i];
#pragma unroll
        for (int term = terms - 2; term >= 0; --term) sum += products[term * count + i];
        sums[i] += sum;
    }
}

// A math warp: its warpgroup multiplies 64 rows of each unit.
template <ThinConfig config>
class ThinMath {
   public:
    __device__ __forceinline__ ThinMath(ThinStorage<config>& smem, int warp)
        : smem_(smem),
          warp_(warp),
          a_(__shfl_sync(0xffffffff, descriptor_address(smem.a[0] + warp / 4 * mma_m * k_block_bytes), 0)),
          b_(__shfl_sync(0xffffffff, descriptor_address(smem.b[0]), 0)) {}

    // Multiplies every K block of a unit. Math warps that split meet after each one: then all terms of the next K block
    // are there, and WGMMA has read those of this one.
    __device__ __forceinline__ void multiply(const ThinParams& params, const ThinWork& work) {
        float sums[config.block_n / 2] = {}, products[config.columns_at_once() / 2];
        Squares squares;
        int left = work.end - work.begin;
        if constexpr (config.splits) {
            if (left > 0) split();
            meet();
        }
#pragma unroll 1
        for (; left > 0; --left) {
            if constexpr (!config.splits) wait(smem_.landed[state_.stage], state_.phase);
            const int stage = state_.stage;
            begin(products, stage);
            if constexpr (config.squares) squares.add(smem_.a[stage] + warp_ * 16 * k_block_bytes);
            state_.advance();
            if constexpr (config.splits) {
                slot_ ^= 1;
                if (left > 1) split();
            }
            ptx::wgmma_wait_group<0>();
            pin(products);
            ptx::mbarrier_arrive(ptx::smem_address(&smem_.empty[stage]));
            add_terms<config>(sums, products);
            if constexpr (config.splits) meet();
        }
        const int warp_row = work.row + warp_ * 16;
        store_thin<config>(params, sums, work, warp_row);
        if constexpr (config.squares) {
            if (work.column == 0) squares.store(params.squares + i64(work.part) * params.m + warp_row, params.m - warp_row);
        }
    }

   private:
    // Issues the products of a K block's terms.
    __device__ __forceinline__ void begin(float (&products)[config.columns_at_once() / 2], int stage) const {
        constexpr u32 a_stage = config.block_m * k_block_bytes / 16, box = config.box_bytes() / 16;
        const u32 a = a_ + stage * a_stage, b = b_ + (config.splits ? first_box(slot_) : stage * config.boxes()) * box;
        pin(products);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < config.chains() * (k_block_bytes / mma_k_bytes); ++i) {
            const u32 term = config.chains() - 1 - i / 4, k = i % 4 * mma_k_bytes / 16;
            wgmma(products, matrix_descriptor(a + k, OperandLayout<0>::high),
                  matrix_descriptor(b + term * box + k, OperandLayout<0>::high), i != 0);
        }
        ptx::wgmma_commit_group();
    }

    // Splits the next stage.
    __device__ __forceinline__ void split() const {
        wait(smem_.landed[state_.stage], state_.phase);
        split_stage<config>(smem_.b[state_.stage * config.boxes()], smem_.b[first_box(slot_)], warp_);
    }

    static __device__ __forceinline__ int first_box(int slot) { return config.stages * config.boxes() + slot * config.terms; }
    static __device__ __forceinline__ void meet() { ptx::bar_sync(split_barrier, config.math_threads()); }

    ThinStorage<config>& smem_;
    const int warp_;
    const u32 a_, b_;
    PipelineState<config.stages> state_;
    int slot_ = 0;
};

template <ThinConfig config>
__device__ __forceinline__ void thin(const ThinParams& params) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    auto& smem = *reinterpret_cast<ThinStorage<config>*>(dynamic_smem);
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(params.a_map);
        ptx::prefetch_tensormap(params.b_map);
#pragma unroll 1
        for (int i = 0; i < config.stages; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&smem.landed[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&smem.empty[i]), config.math_threads());
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    take_turn();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0);
    constexpr int operand_warp = config.math_threads() / warp_threads;
    if (warp < operand_warp) {
        ThinMath<config> math(smem, warp);
#pragma unroll 1
        for (u32 unit = blockIdx.x; unit < params.units; unit += gridDim.x) math.multiply(params, thin_work<config>(params, unit));
    } else {
        load_thin<config>(params, smem);
    }
}

}  // namespace deep_tile
