// Thin GEMM: few columns, few rows, or a long K. BF16 a by FP32 or BF16 b, split along K.
//
// sums[part, m, n] = sum over the part's K blocks of a[m, block] . b[n, block], of all matrices one after the other
//
//   role                work                                              per stage
//   operand warp        TMA loads a and b                                 waits empty, expects bytes on landed
//   split warps         split FP32 b into BF16 terms, in place            wait empty and landed, arrive on full
//   math warpgroups     WGMMA of all terms, FP32 sums; squares of a       wait landed and full, arrive on empty
//
// An FP32 b is a sum of BF16 terms (terms.cuh), whose products with BF16 are exact. WGMMA truncates as it accumulates,
// so temporaries span one K block, smallest terms first, and are then promoted to FP32 registers, as with FP8. Narrow
// tiles split b themselves; wide tiles, whose b many CTAs share, read a split b. A CTA has one tile and one K part: its
// result depends on nothing else, and add_parts() sums the parts in a fixed order.
#pragma once

#include "memory.cuh"
#include "mma.cuh"
#include "parts.cuh"
#include "terms.cuh"

namespace deep_tile {

constexpr int thin_k = 64;           // K elements per K block
constexpr int split_rows = 4;        // b rows that a warp splits at once: eight numbers per lane

struct ThinConfig {
    int block_m, block_n;
    int terms;        // BF16 terms for b
    int stages;
    int split_warps;  // 0: b's terms are operands
    bool squares;     // also sum squares along a's rows

    constexpr bool splits() const { return split_warps > 0; }
    // Narrow tiles: terms are adjacent columns of one WGMMA, which reads a once; each term has its own sums.
    constexpr int columns_at_once() const { return splits() ? terms * block_n : block_n; }
    constexpr int chains() const { return terms * block_n / columns_at_once(); }
    constexpr int math_threads() const { return block_m / mma_m * warpgroup_threads; }
    constexpr int threads() const { return math_threads() + (1 + split_warps) * warp_threads; }
};

template <ThinConfig config>
struct alignas(1024) ThinStorage {
    u8 a[config.stages][config.block_m * k_block_bytes];
    u8 b[config.stages][config.terms][config.block_n * k_block_bytes];
    u64 landed[config.stages];
    u64 full[config.stages];  // used where b is split
    u64 empty[config.stages];
};

// A CTA's tile and its K blocks, counted through all matrices.
struct ThinWork {
    int row, column, part;
    int begin, end;
};

// CTAs are numbered by columns first, then rows, then K parts.
template <ThinConfig config>
__device__ __forceinline__ ThinWork thin_work(const ThinParams& params) {
    const u32 columns = (params.n + config.block_n - 1) / config.block_n;
    const u32 rows = (params.m + config.block_m - 1) / config.block_m;
    const u32 tile = blockIdx.x % (columns * rows), part = blockIdx.x / (columns * rows);
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
__device__ __forceinline__ void load_thin(const ThinParams& params, ThinStorage<config>& smem, const ThinWork& work) {
    PipelineState<config.stages> state;
    constexpr int boxes = config.splits() ? 2 : config.terms;  // b boxes, each 128 bytes wide
    constexpr u32 box_bytes = config.block_n * k_block_bytes, bytes = config.block_m * k_block_bytes + boxes * box_bytes;
    ThinStep at(params, work.begin);
#pragma unroll 1
    for (int left = work.end - work.begin; left > 0; --left) {
        wait(smem.empty[state.stage], state.phase ^ 1);
        if (ptx::elect_sync()) {
            const u32 landed = ptx::smem_address(&smem.landed[state.stage]), b = ptx::smem_address(smem.b[state.stage]);
            ptx::mbarrier_arrive_expect_tx(landed, bytes);
            ptx::cp_async_bulk_tensor_load(ptx::smem_address(smem.a[state.stage]), params.a_map, at.k * int(sizeof(u16)), work.row,
                                           at.matrix, landed);
#pragma unroll
            for (int i = 0; i < boxes; ++i) {
                const int inner = config.splits() ? at.k * int(sizeof(float)) + i * k_block_bytes : at.k * int(sizeof(u16));
                const int matrix = config.splits() ? at.matrix : at.matrix * config.terms + i;
                ptx::cp_async_bulk_tensor_load(b + i * box_bytes, params.b_map, inner, work.column, matrix, landed);
            }
        }
        __syncwarp();
        state.advance();
        at.advance(params);
    }
}

// A split warp takes `split_rows` rows of a K block, eight numbers per lane. A row's numbers 0 to 31 are in b's first
// box, the others in the second; terms overwrite the boxes row by row. Lanes on the second box read their two 16-byte
// halves in reverse order, so that no two lanes on a row hit one bank.
template <ThinConfig config>
struct SplitRows {
    static constexpr u32 box_bytes = config.block_n * k_block_bytes;

    __device__ __forceinline__ void load(u32 boxes, int first_row) {
        const int lane = threadIdx.x % warp_threads, row = first_row + lane / 8, box = lane % 8 / 4, even = lane % 4 * 2;
        const u32 row_bytes = boxes + row * k_block_bytes + box * box_bytes;
        const uint4 one = ptx::ld_shared_v4(row_bytes + ((even + box) ^ row % 8) * 16);
        const uint4 other = ptx::ld_shared_v4(row_bytes + ((even + 1 - box) ^ row % 8) * 16);
        low = box == 0 ? one : other;
        high = box == 0 ? other : one;
    }

    __device__ __forceinline__ void store(u32 boxes, int first_row) const {
        const int lane = threadIdx.x % warp_threads, row = first_row + lane / 8;
        const u32 to = boxes + row * k_block_bytes + (lane % 8 ^ row % 8) * 16;
        const u32 bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        u32 words[4][config.terms];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            split_pair<config.terms>(__uint_as_float(bits[2 * i]), __uint_as_float(bits[2 * i + 1]), words[i]);
        }
#pragma unroll
        for (int term = 0; term < config.terms; ++term) {
            ptx::st_shared_v4(to + term * box_bytes, words[0][term], words[1][term], words[2][term], words[3][term]);
        }
    }

    uint4 low, high;
};

// Splits b in its stages; warps alternate in stages. A warp sees a stage about every third round, so it also waits for
// "empty": otherwise a phase two rounds old would look like the awaited one. A stage's loads precede its stores. The
// stage index is hidden from ptxas in b's addresses: otherwise the barrier wait uses an ordinary register, as in a
// divergent warp.
template <ThinConfig config>
__device__ __forceinline__ void split_thin(ThinStorage<config>& smem, const ThinWork& work, int warp) {
    constexpr int groups = config.block_n / split_rows;
    static_assert(config.split_warps <= config.stages, "a turn is within a round");
    PipelineState<config.stages> state;
    state.advance(warp);
#pragma unroll 1
    for (int left = work.end - work.begin - warp; left > 0; left -= config.split_warps) {
        wait(smem.empty[state.stage], state.phase ^ 1);
        wait(smem.landed[state.stage], state.phase);
        const u32 boxes = ptx::smem_address(smem.b[ptx::opaque(state.stage)]);
        SplitRows<config> rows[groups];
#pragma unroll
        for (int i = 0; i < groups; ++i) rows[i].load(boxes, i * split_rows);
        __syncwarp();  // all rows have been read
#pragma unroll
        for (int i = 0; i < groups; ++i) rows[i].store(boxes, i * split_rows);
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(ptx::smem_address(&smem.full[state.stage]));
        state.advance(config.split_warps);
    }
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

// Multiplies a warpgroup's 64 tile rows with every K block in the part.
template <ThinConfig config>
__device__ __forceinline__ void multiply_thin(const ThinParams& params, ThinStorage<config>& smem, const ThinWork& work, int warp) {
    constexpr u32 a_stage = config.block_m * k_block_bytes / 16, b_term = config.block_n * k_block_bytes / 16;
    const int warpgroup = warp / 4;
    const u32 a_first = __shfl_sync(0xffffffff, descriptor_address(smem.a[0] + warpgroup * mma_m * k_block_bytes), 0);
    const u32 b_first = __shfl_sync(0xffffffff, descriptor_address(smem.b[0][0]), 0);
    PipelineState<config.stages> state;
    float sums[config.block_n / 2] = {}, products[config.columns_at_once() / 2];
    Squares squares;
#pragma unroll 1
    for (int left = work.end - work.begin; left > 0; --left) {
        wait(smem.landed[state.stage], state.phase);
        if constexpr (config.splits()) wait(smem.full[state.stage], state.phase);
        const u32 a = a_first + state.stage * a_stage, b = b_first + state.stage * config.terms * b_term;
        pin(products);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < config.chains() * (k_block_bytes / mma_k_bytes); ++i) {
            const u32 term = config.chains() - 1 - i / 4, k = i % 4 * mma_k_bytes / 16;
            wgmma(products, matrix_descriptor(a + k, OperandLayout<0>::high),
                  matrix_descriptor(b + term * b_term + k, OperandLayout<0>::high), i != 0);
        }
        ptx::wgmma_commit_group();
        if constexpr (config.squares) squares.add(smem.a[state.stage] + warp * 16 * k_block_bytes);
        ptx::wgmma_wait_group<0>();
        pin(products);
        ptx::mbarrier_arrive(ptx::smem_address(&smem.empty[state.stage]));
        add_terms<config>(sums, products);
        state.advance();
    }
    const int warp_row = work.row + warp * 16;
    store_thin<config>(params, sums, work, warp_row);
    if constexpr (config.squares) {
        if (work.column == 0) squares.store(params.squares + i64(work.part) * params.m + warp_row, params.m - warp_row);
    }
}

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
            ptx::mbarrier_init(ptx::smem_address(&smem.full[i]), warp_threads);
            ptx::mbarrier_init(ptx::smem_address(&smem.empty[i]), config.math_threads());
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    take_turn();
    const ThinWork work = thin_work<config>(params);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / warp_threads, 0);
    constexpr int operand_warp = config.math_threads() / warp_threads;
    if (warp < operand_warp) {
        multiply_thin<config>(params, smem, work, warp);
    } else if (warp == operand_warp) {
        load_thin<config>(params, smem, work);
    } else if constexpr (config.splits()) {
        split_thin<config>(smem, work, warp - operand_warp - 1);
    }
}

}  // namespace deep_tile
