// A cast of rows by an index that names most rows of x several times: each is read and cast once, and written wherever
// the index wants it.
//
// Launched by deep_tile/cast.py in place of Listed (experts.cuh), whose bits it writes. There each row of out reads its
// row of x: twice as many bytes through L2 as are written, and a conversion for each element of out. Here a thread block
// takes every so-many-th row of x, or a stripe of their columns, and scans the index for them: out is written at the
// speed of a copy. All it needs lies in shared memory, so there is no workspace and no second launch.
//
// Rows that an index names much more often than others, as where it is padded with one number, would keep one block busy
// long after all others. Every block finds the same ones, as all count the same sample of the index, and takes its share
// of what they are written to, like that of numbers that name no row.
#pragma once

#include "experts.cuh"

namespace deep_tile {

// Shared memory is 42 KB, of the 48 that a kernel has without asking.
constexpr u32 spread_bins = 2048;   // in which rows of x are counted
constexpr u32 spread_slots = 3072;  // for rows of out that a block has found, and not yet written
constexpr u32 sampled = 8;          // of so many numbers of the index, one is counted
constexpr u32 no_slot = 0xffff, no_row = ~0u;

template <int threads>
class Spread {
   public:
    // Rows of x are in classes by their number modulo so many, columns in 1 to 4 stripes. Where a class has few rows, more
    // stripes make fewer classes, which are more alike in how often their rows are named; otherwise fewer stripes make
    // more classes, of which each finds less in the index.
    __device__ explicit Spread(const CastParams& params) {
        __shared__ Memory memory;
        memory_ = &memory;
        if (threadIdx.x == 0) {
            memory.living = params.rows;
            if (params.living != nullptr) memory.living = within(params.living[params.groups - 1], params.rows);
        }
        const u32 block_columns = (params.columns + scale_block - 1) / scale_block;
        u32 stripes = 4;
        while (stripes > 1 && (block_columns % stripes != 0 || is_crowded(params, gridDim.x / stripes))) stripes /= 2;
        classes = gridDim.x / stripes;
        inverse_ = ~0u / classes + 1;
        own_columns = block_columns / stripes;
        first_column = blockIdx.x % stripes * own_columns;
        own_class = blockIdx.x / stripes;
    }

    // Counts how often each row is named, of all rows that share a bin, in a sample of the index.
    __device__ __forceinline__ void count(const CastParams& params) {
        for (u32 i = threadIdx.x; i < spread_bins; i += threads) memory_->bins[i] = 0;
        __syncthreads();
        living = memory_->living;
        usual_ = 8 + living / sampled / min(u32(params.x_rows), spread_bins) * 4;
        constexpr u32 step = threads * sampled;
        for (u32 first = threadIdx.x * sampled; first < living; first += batch * step) {
            Number numbers[batch];
            request<step>(numbers, params, first, living);
#pragma unroll
            for (u32 j = 0; j < batch; ++j) {
                const u32 row = row_of(params, numbers[j]);
                if (first + j * step >= living || row == no_row) continue;
                u32* bin = &memory_->bins[row % spread_bins];
                if (*bin <= usual_) atomicAdd(bin, 1u);  // what is beyond does not matter, and would be slow
            }
        }
    }

    // Finds this block's among the rows of out from `begin` to `end`; false if there is no place for so many.
    __device__ __forceinline__ bool find(const CastParams& params, u32 begin, u32 end) {
        __syncthreads();  // what was found before has been written
        for (u32 i = threadIdx.x; i < spread_heads; i += threads) memory_->heads[i] = no_slot;
        if (threadIdx.x == 0) memory_->listed = memory_->alone = 0;
        __syncthreads();
        // Numbers of rows that are alone are of a class by warps, for which each of these lines holds or does not.
        u32 warp_class = (begin + threadIdx.x) / warp_threads % classes;
        const u32 next_class = threads / warp_threads % classes;
        for (u32 first = begin + threadIdx.x; first < end; first += batch * threads) {
            Number numbers[batch];
            request<threads>(numbers, params, first, end);
#pragma unroll
            for (u32 j = 0; j < batch; ++j) {
                const u32 i = first + j * threads;
                const u32 row_class = numbers[j].low - quotient(numbers[j].low) * classes;  // or any, of no row
                if ((row_class == own_class || warp_class == own_class) && i < end) {
                    take(i, row_of(params, numbers[j]), row_class == own_class, warp_class == own_class);
                }
                warp_class += next_class;
                if (warp_class >= classes) warp_class -= classes;
            }
        }
        __syncthreads();
        alone = memory_->alone;
        found_ = memory_->listed + alone;
        return found_ <= spread_slots;
    }

    // So few rows of out, instead of `rows`, that there should be a place for this block's.
    __device__ __forceinline__ u32 fewer(u32 rows) const {
        return max(spread_slots, u32(u64(rows) * spread_slots / (found_ + found_ / 4)));
    }

    // The last of the rows of out that were found for the row of x of this number in the block's class.
    __device__ __forceinline__ u32 head(u32 number) const { return memory_->heads[number]; }
    // That of a row of out which was found by itself.
    static __device__ __forceinline__ u32 slot_alone(u32 number) { return spread_slots - 1 - number; }
    __device__ __forceinline__ u32 next(u32 slot) const { return memory_->next[slot]; }
    __device__ __forceinline__ u32 out_row(u32 slot) const { return memory_->outs[slot]; }

    // The row of x that a number of the index names, or `no_row`.
    static __device__ __forceinline__ u32 row_of(const CastParams& params, const Number& number) {
        return number.high == 0 && number.low < u32(params.x_rows) ? number.low : no_row;  // also of a negative one
    }

    u32 classes, own_class, own_columns, first_column;
    u32 living = 0;  // rows of out
    u32 alone = 0;   // of them, found by themselves

   private:
    struct Memory {
        u32 living, listed, alone;
        u32 bins[spread_bins], heads[spread_heads], outs[spread_slots];
        u16 next[spread_slots];
    };

    static constexpr u32 batch = 8;

    // Numbers of the index that are `step` from each other, before the first is used; those of the end for what is beyond.
    template <u32 step>
    static __device__ __forceinline__ void request(Number (&numbers)[batch], const CastParams& params, u32 first, u32 end) {
#pragma unroll
        for (u32 j = 0; j < batch; ++j) numbers[j] = Number::at(params, min(first + j * step, end - 1));
    }

    // Whether a class would have more rows of x than heads, or its fair share take more than two thirds of the slots; or
    // twice as many classes would still have 12 rows each.
    static __device__ __forceinline__ bool is_crowded(const CastParams& params, u32 classes) {
        return classes < 2 || params.x_rows > i64(classes) * spread_heads || params.rows > i64(classes) * (spread_slots * 2 / 3) ||
               params.x_rows >= i64(classes) * 24;
    }

    // row / classes, exact for rows below 2^32 / classes.
    __device__ __forceinline__ u32 quotient(u32 row) const { return __umulhi(row, inverse_); }

    // Keeps row `i` of out, if it is this block's.
    __device__ __forceinline__ void take(u32 i, u32 row, bool has_row, bool has_warp) {
        const bool is_alone = row == no_row || memory_->bins[row % spread_bins] > usual_;
        if (!(is_alone ? has_warp : has_row)) return;
        const u32 number = atomicAdd(is_alone ? &memory_->alone : &memory_->listed, 1u);
        if (number >= spread_slots) return;
        const u32 slot = is_alone ? slot_alone(number) : number;
        memory_->outs[slot] = i;
        memory_->next[slot] = is_alone ? no_slot : atomicExch(&memory_->heads[quotient(row)], slot);
    }

    Memory* memory_;
    u32 inverse_, usual_ = 0, found_ = 0;
};

// Casts what was found: `lanes` threads take one block of 128 columns after the other, of a row of x, and write it to
// all rows of out that want it.
template <typename Format, int lanes, int threads>
__device__ __forceinline__ void cast_found(const CastParams& params, const Spread<threads>& spread) {
    using Part = Slice<Format, lanes>;
    const auto* x = static_cast<const typename Format::Bits*>(params.x);
    const u32 x_rows = params.x_rows;
    const u32 rows = spread.own_class < x_rows ? (x_rows - spread.own_class - 1) / spread.classes + 1 : 0;
    const u32 blocks = (rows + spread.alone) * spread.own_columns;
    const u32 lane = threadIdx.x % lanes, team_of_warp = threadIdx.x % warp_threads / lanes;
    // All teams of a warp meet, with a block or without.
    for (u32 first = threadIdx.x / warp_threads * (warp_threads / lanes); first < blocks; first += threads / lanes) {
        const u32 block = first + team_of_warp, number = block / spread.own_columns;
        const u32 column = spread.first_column + block % spread.own_columns;
        u32 slot = no_slot, row = no_row;
        if (number < rows) {
            slot = spread.head(number);
            row = number * spread.classes + spread.own_class;
        } else if (number < rows + spread.alone) {
            slot = spread.slot_alone(number - rows);
            row = spread.row_of(params, Number::at(params, spread.out_row(slot)));
        }
        const i64 first_column = i64(column) * scale_block;
        const i64 left = params.columns - first_column;
        const int columns = left < scale_block ? int(left) : scale_block;
        const bool exists = slot != no_slot && row != no_row;
        Part part;
        part.load(x + (exists ? row : 0) * params.x_stride + first_column, exists ? columns : 0, lane, true);
        const Scale scale = make_scale(largest_of_lanes<lanes>(part.magnitude()), params);
        const typename Part::Codes codes = part.quantized(scale);
#pragma unroll 1
        for (; slot != no_slot; slot = spread.next(slot)) {
            const u32 out_row = spread.out_row(slot);
            if (lane == 0) write_scale(params, out_row, column, scale.value);
            Part::store(params.out + out_row * params.out_stride + first_column, columns, lane, true, codes);
        }
    }
}

// Of at least two thread blocks.
template <typename Format, int lanes, int threads>
__device__ __forceinline__ void cast_spread(const CastParams& params) {
    take_turn();
    Spread<threads> spread(params);
    if (spread.own_class >= spread.classes) return;
    spread.count(params);
    u32 window = spread.living;
    for (u32 begin = 0; begin < spread.living;) {
        const u32 end = spread.living - begin < window ? spread.living : begin + window;
        if (!spread.find(params, begin, end)) {
            window = spread.fewer(end - begin);
            continue;
        }
        cast_found<Format, lanes>(params, spread);
        begin = end;
    }
}

}  // namespace deep_tile
