// Casts to FP8: one scale per 1x128 block (cast_rows) or 128x128 block (cast_tiles); each element is read once.
//
// deep_tile/cast.py launches them; deep_tile/quantize.py holds the definition, equal in every bit. A block row has 128
// columns, shared by `lanes` neighbouring threads. Each thread keeps its 16-byte vectors in registers from load to
// store and requests all before it uses the first; threads * vectors keep memory busy.
#pragma once

#include "formats.cuh"

namespace deep_tile {

// Slice: one thread's vectors, `elements` each, in a 128-column row that `lanes` threads share. An explicit
// `vectors` sets another row length.
template <typename Format, int lanes, int elements = 16 / sizeof(typename Format::Bits),
          int vectors = scale_block / (lanes * elements)>
class Slice {
   public:

    // Loads from `row`, which has `columns` elements; columns beyond become zeros, which change no largest magnitude.
    __device__ __forceinline__ void load(const typename Format::Bits* row, int columns, int lane, bool aligned) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            if (aligned) {
                load_vector(words_[i], row, columns, vector_column(i, lane));
            } else {
                load_elements(words_[i], row, columns, i, lane);
            }
        }
    }

    // Fills element j in vector i with `of(i, j)`, for FP32.
    template <typename Function>
    __device__ __forceinline__ void fill(Function of) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
#pragma unroll
            for (int j = 0; j < elements; ++j) words_[i][j] = __float_as_uint(of(i, j));
        }
    }

    // Sets word `word` in the only vector to two numbers, rounded to a 16-bit format.
    __device__ __forceinline__ void pack(int word, const float (&two)[2]) {
        words_[0][word] = Format::pack(two[1], two[0]);
    }

    __device__ __forceinline__ float value(int i, int j) const { return value(words_[i], j); }

    // Magnitudes in word `word` of the only vector.
    __device__ __forceinline__ u32 word_magnitude(int word) const { return Format::magnitude(words_[0][word]); }

    // Column for element `slot % elements` in thread `slot / elements`, if each holds one vector.
    static __device__ __forceinline__ int column(int slot, bool aligned) {
        return aligned ? slot : element_column(0, slot % elements, slot / elements);
    }

    // Largest magnitude, as float bits.
    __device__ __forceinline__ u32 magnitude() const {
        u32 larger = 0;
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
#pragma unroll
            for (int j = 0; j < words; ++j) larger = Format::larger(larger, Format::magnitude(words_[i][j]));
        }
        return __float_as_uint(Format::value(Format::largest(larger)));
    }

    struct Codes {
        u32 words[vectors][elements / 4];
    };

    // Elements that are codes already.
    __device__ __forceinline__ Codes codes() const {
        static_assert(sizeof(Bits) == 1);
        Codes codes;
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
#pragma unroll
            for (int j = 0; j < words; ++j) codes.words[i][j] = words_[i][j];
        }
        return codes;
    }

    // Quantises: quotients are rounded as `divide` rounds them if `divides`; otherwise they are products with the
    // reciprocal. Elements with a tiny scale are raised, and stay so.
    template <bool divides = true>
    __device__ __forceinline__ Codes quantized(Scale scale) {
        if (divides && scale.is_tiny()) {
            scale = scale.raised();
#pragma unroll
            for (int i = 0; i < vectors; ++i) {
#pragma unroll
                for (int j = 0; j < words; ++j) words_[i][j] = Format::raised(words_[i][j]);
            }
        }
        Codes codes;
#pragma unroll
        for (int i = 0; i < vectors; ++i) quantize<divides>(codes.words[i], words_[i], scale);
        return codes;
    }

    static __device__ __forceinline__ void store(u8* row, int columns, int lane, bool aligned, const Codes& codes) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            if (aligned) {
                store_vector(row, columns, vector_column(i, lane), codes.words[i]);
            } else {
                store_elements(row, columns, i, lane, codes.words[i]);
            }
        }
    }

   private:
    using Bits = typename Format::Bits;
    static constexpr int per_word = 4 / sizeof(Bits), bits = 8 * sizeof(Bits);
    static constexpr int words = elements / per_word;  // per vector

    // Neighbouring threads take neighbouring vectors, or, if unaligned, neighbouring elements.
    static __device__ __forceinline__ int vector_column(int i, int lane) { return (i * lanes + lane) * elements; }
    static __device__ __forceinline__ int element_column(int i, int j, int lane) {
        return (i * elements + j) * lanes + lane;
    }

    static __device__ __forceinline__ void load_vector(u32 (&vector)[words], const Bits* row, int columns, int column) {
        uint4 loaded = {};
        if (column < columns) loaded = *reinterpret_cast<const uint4*>(row + column);
        vector[0] = loaded.x, vector[1] = loaded.y, vector[2] = loaded.z, vector[3] = loaded.w;
    }

    static __device__ __forceinline__ void load_elements(u32 (&vector)[words], const Bits* row, int columns, int i,
                                                         int lane) {
#pragma unroll
        for (int word = 0; word < words; ++word) {
            vector[word] = 0;
#pragma unroll
            for (int part = 0; part < per_word; ++part) {
                const int column = element_column(i, word * per_word + part, lane);
                if (column < columns) vector[word] |= u32(row[column]) << (bits * part);
            }
        }
    }

    static __device__ __forceinline__ float value(const u32 (&vector)[words], int j) {
        return Format::value(Bits(vector[j / per_word] >> (bits * (j % per_word))));
    }

    template <bool divides>
    static __device__ __forceinline__ void quantize(u32 (&codes)[elements / 4], const u32 (&vector)[words],
                                                    const Scale& scale) {
#pragma unroll
        for (int j = 0; j < elements; j += 4) {
            float scaled[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float x = value(vector, j + n);
                scaled[n] = divides ? divide(x, scale) : x * scale.reciprocal;
            }
            codes[j / 4] = pack_e4m3(scaled);
        }
    }

    static __device__ __forceinline__ void store_vector(u8* row, int columns, int column,
                                                        const u32 (&codes)[elements / 4]) {
        if (column >= columns) return;
        if constexpr (elements == 8) {
            *reinterpret_cast<uint2*>(row + column) = {codes[0], codes[1]};
        } else {
            static_assert(elements == 4, "a vector of a length without code that stores it");
            *reinterpret_cast<u32*>(row + column) = codes[0];
        }
    }

    static __device__ __forceinline__ void store_elements(u8* row, int columns, int i, int lane,
                                                          const u32 (&codes)[elements / 4]) {
#pragma unroll
        for (int j = 0; j < elements; ++j) {
            const int column = element_column(i, j, lane);
            if (column < columns) row[column] = codes[j / 4] >> (8 * (j % 4));
        }
    }

    u32 words_[vectors][words];
};

// Maximum over `lanes` neighbouring threads; the whole warp calls it.
template <int lanes>
__device__ __forceinline__ u32 largest_of_lanes(u32 value) {
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        value = max(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
}

// Sum over `lanes` neighbouring threads, in a fixed order; the whole warp calls it.
template <int lanes>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        value += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(value), distance));
    }
    return value;
}

__device__ __forceinline__ void write_scale(const CastParams& params, u32 row, u32 column, float value) {
    params.scale[row * params.scale_stride_row + column * params.scale_stride_column] = value;
}

// Row set: all rows.
struct AllRows {
    __device__ explicit AllRows(const CastParams& params) : count(params.rows) {}

    // Returns row `number`, from 0 to `count`, in order.
    __device__ __forceinline__ u32 find(const CastParams&, u32 number) const { return number; }

    i64 count;
};

// Sources: the input of a cast, how a thread gets its slice of 128 columns, and the row set. A `Place` holds the data
// read before the first column can be read.

// Source: x's rows.
template <typename Format, int lanes>
struct Plain {
    using Rows = AllRows;
    using Part = Slice<Format, lanes>;
    static constexpr bool divides = true;

    struct Place {
        u32 row;  // in out
    };

    static __device__ __forceinline__ Place find(const CastParams&, u32 row) { return {row}; }

    static __device__ __forceinline__ void load(Part& part, const CastParams& params, const Place& place, u32 first,
                                                int columns, int lane, bool aligned) {
        const auto* x = static_cast<const typename Format::Bits*>(params.x);
        part.load(x + place.row * params.x_stride + first, columns, lane, aligned);
    }
};

// Casts 1x128 blocks: `lanes` threads take one after the other. Blocks are counted along the columns first, in 32 bits:
// more would be 512 GiB of out. A warp continues while any of its threads has a block; the others get zeros, so that
// all 32 meet. A block's place is found while the previous one is cast.
template <typename Source, int lanes>
__device__ __forceinline__ void cast_blocks(const CastParams& params, const typename Source::Rows& rows, bool aligned) {
    const u32 block_columns = (params.columns + scale_block - 1) / scale_block;
    const int last_columns = params.columns - i64(block_columns - 1) * scale_block;
    const u32 blocks = rows.count * block_columns;
    const u32 teams = gridDim.x * (blockDim.x / lanes);
    const u32 step_rows = teams / block_columns, step_columns = teams % block_columns;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x % lanes;
    u32 number = thread / lanes / block_columns, block_column = thread / lanes % block_columns;
    const auto find = [&] {
        typename Source::Place place = {};
        if (number < rows.count) place = Source::find(params, rows.find(params, number));
        return place;
    };
    typename Source::Place next = find();
    // `block` belongs to the warp's first thread.
    for (u32 block = thread / warp_threads * (warp_threads / lanes); block < blocks; block += teams) {
        const typename Source::Place at = next;
        const u32 column = block_column;
        const int width = column + 1 < block_columns ? scale_block : last_columns;
        const int columns = number < rows.count ? width : 0;
        const u32 first = column * scale_block;
        typename Source::Part slice;
        Source::load(slice, params, at, first, columns, lane, aligned);
        number += step_rows;
        block_column += step_columns;
        if (block_column >= block_columns) {
            block_column -= block_columns;
            ++number;
        }
        next = find();
        const Scale scale = make_scale(largest_of_lanes<lanes>(slice.magnitude()), params);
        if (lane == 0 && columns > 0) write_scale(params, at.row, column, scale.value);
        u8* out = params.out + at.row * params.out_stride + first;
        slice.store(out, columns, lane, aligned, slice.template quantized<Source::divides>(scale));
    }
}

template <template <typename, int> typename SourceOf, typename Format, int lanes>
__device__ __forceinline__ void cast_rows(const CastParams& params) {
    take_turn();
    using Source = SourceOf<Format, lanes>;
    const typename Source::Rows rows(params);
    if (params.aligned) {
        cast_blocks<Source, lanes>(params, rows, true);
    } else {
        cast_blocks<Source, lanes>(params, rows, false);
    }
}

__device__ __forceinline__ int columns_of(const CastParams& params, u32 block_column) {
    const i64 left = params.columns - i64(block_column) * scale_block;
    return left < scale_block ? int(left) : scale_block;
}

// Maximum over the CTA's threads, returned to every thread.
template <int threads>
__device__ __forceinline__ u32 largest_of_block(u32 value) {
    constexpr int warps = threads / warp_threads;
    __shared__ u32 largest[warps];
    const u32 of_warp = __reduce_max_sync(~0u, value);
    __syncthreads();  // the previous round's values have been read
    if (threadIdx.x % warp_threads == 0) largest[threadIdx.x / warp_threads] = of_warp;
    __syncthreads();
    return __reduce_max_sync(~0u, largest[threadIdx.x % warps]);
}

// Casts 128x128 blocks: a CTA takes one after the other; each thread has a slice in every `threads / lanes`-th row.
template <typename Format, int threads>
__device__ __forceinline__ void cast_tiles(const CastParams& params) {
    take_turn();
    using Bits = typename Format::Bits;
    constexpr int lanes = scale_block * sizeof(Bits) / 16;
    constexpr int step = threads / lanes, slices = scale_block / step;
    const auto* x = static_cast<const Bits*>(params.x);
    const u32 block_columns = (params.columns + scale_block - 1) / scale_block;
    const u32 blocks = (params.rows + scale_block - 1) / scale_block * block_columns;
    const int lane = threadIdx.x % lanes;
    for (u32 block = blockIdx.x; block < blocks; block += gridDim.x) {
        const u32 block_row = block / block_columns, block_column = block % block_columns;
        const i64 first_row = i64(block_row) * scale_block + threadIdx.x / lanes;
        const u32 first = block_column * scale_block;
        const int columns = columns_of(params, block_column);
        Slice<Format, lanes> slice[slices];
        u32 magnitude = 0;
#pragma unroll
        for (int i = 0; i < slices; ++i) {
            const i64 row = first_row + i * step;
            slice[i].load(x + row * params.x_stride + first, row < params.rows ? columns : 0, lane, params.aligned);
        }
#pragma unroll
        for (int i = 0; i < slices; ++i) magnitude = max(magnitude, slice[i].magnitude());
        const Scale scale = make_scale(largest_of_block<threads>(magnitude), params);
        if (threadIdx.x == 0) write_scale(params, block_row, block_column, scale.value);
#pragma unroll
        for (int i = 0; i < slices; ++i) {
            const i64 row = first_row + i * step;
            u8* out = params.out + row * params.out_stride + first;
            slice[i].store(out, row < params.rows ? columns : 0, lane, params.aligned, slice[i].quantized(scale));
        }
    }
}

}  // namespace deep_tile
