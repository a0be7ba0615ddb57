// Stable counting sort of choices by expert, for an expert layer's row lists.
//
// deep_tile/cast.py launches it; deep_tile/experts.py holds the definition, with the same numbers. Choices are numbered
// along the tokens. A cluster counts all choices, a slice per CTA, and its CTAs exchange counts by `st.async`. Each CTA
// then knows its share's first rows and places the share; clusters have disjoint shares. So no cluster waits for
// another, and no state outlives the launch.
#pragma once

#include "streaming.cuh"

#include "memory.cuh"

namespace deep_tile {

// A CTA's shared memory. A bucket is an expert; the last two are "no expert" and lanes without a choice.
// An odd number of words between buckets spreads them over banks.
template <int threads>
struct SortStorage {
    static constexpr int warps = threads / warp_threads;
    static constexpr int buckets = threads + 2;
    static constexpr int pairs = warps / 2 + 1;

    // A warp's choice count in a bucket; later its next position, relative to the share's first.
    __device__ __forceinline__ u16& of_warp(u32 bucket, u32 warp) {
        return reinterpret_cast<u16*>(&of_pair(bucket, 0))[warp];
    }

    __device__ __forceinline__ u32& of_pair(u32 bucket, u32 pair) { return of_pairs[bucket * pairs + pair]; }

    u64 all_counted;                     // mbarrier: the counts for all slices have come
    u32 sums[warp_threads];              // for sum_before
    u32 begins[buckets];                 // choices before the share in its slice; later the share's first row
    u32 ends[buckets];                   // choices behind the share in its slice; later, row behind an expert's last
    u32 of_slice[sort_blocks][buckets];  // choices per slice
    u32 of_pairs[buckets * pairs];       // of_warp, two to a word
};

// A CTA's ranges: it counts [first, end) and places `size` choices from `own` on, a part per warp. Shares and slices
// are multiples of the thread count.
struct SortShare {
    __device__ __forceinline__ SortShare(const SortParams& params, u32 warps)
        : rank(blockIdx.x & ((1u << params.cluster_log2) - 1)), first(rank * params.slice),
          end(min(first + params.slice, params.choices)),
          own(first + ((blockIdx.x >> params.cluster_log2) * warps << params.warp_choices_log2)),
          size(own < end ? warps << params.warp_choices_log2 : 0) {}

    u32 rank, first, end, own, size;
};

// Some choices for a thread, `step` apart; all are requested before the first is used.
template <typename Choice, u32 count, u32 step>
struct Choices {
    __device__ __forceinline__ void load(const SortParams& params, u32 first, u32 end) {
        const auto* chosen = static_cast<const Choice*>(params.chosen) + first;
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            if (first + i * step < end) values[i] = chosen[i * step];
        }
    }

    __device__ __forceinline__ u32 bucket(const SortParams& params, u32 i) const {
        return u64(i64(values[i])) < params.experts ? u32(values[i]) : params.experts;
    }

    Choice values[count];
};

template <int threads>
__device__ __forceinline__ void clear(const SortParams& params, SortStorage<threads>& smem) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < (params.experts + 1) * smem.pairs; i += threads) smem.of_pairs[i] = 0;
#pragma unroll 1
    for (u32 bucket = threadIdx.x; bucket <= params.experts; bucket += threads) {
        smem.begins[bucket] = smem.ends[bucket] = 0;
    }
    if (params.cluster_log2 > 0) {  // and waits until every CTA in the cluster has its mbarrier
        if (threadIdx.x == 0) {
            const u32 barrier = ptx::smem_address(&smem.all_counted);
            ptx::mbarrier_init(barrier, 1);
            ptx::mbarrier_arrive_expect_tx(barrier, ((params.experts + 1) * sizeof(u32)) << params.cluster_log2);
            ptx::fence_mbarrier_init();
        }
        __syncwarp();
        ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait();
    }
    __syncthreads();
}

// Counts the slice by bucket: before the share, within it by warp, and behind it.
template <typename Choice, int threads>
__device__ __forceinline__ void count_slice(const SortParams& params, const SortShare& share,
                                            SortStorage<threads>& smem) {
    constexpr u32 at_once = 16;
    Choices<Choice, at_once, threads> choices;
    u32 first = share.first;  // first for the CTA's threads
    choices.load(params, first + threadIdx.x, share.end);
    clear(params, smem);
#pragma unroll 1
    while (first < share.end) {
#pragma unroll
        for (u32 i = 0; i < at_once; ++i, first += threads) {
            if (first >= share.end) break;
            if (first + threadIdx.x >= share.end) continue;
            const u32 bucket = choices.bucket(params, i), in_share = first - share.own;
            if (in_share < share.size) {
                const u32 warp = (in_share + threadIdx.x) >> params.warp_choices_log2;
                atomicAdd(&smem.of_pair(bucket, warp / 2), 1u << 16 * (warp % 2));
            } else {
                atomicAdd((first < share.own ? smem.begins : smem.ends) + bucket, 1u);
            }
        }
        if (first < share.end) choices.load(params, first + threadIdx.x, share.end);
    }
    __syncthreads();
}

// Replaces a bucket's counts per warp by their exclusive prefix sums; returns the total.
template <int threads>
__device__ __forceinline__ u32 sum_up_warps(SortStorage<threads>& smem, u32 bucket) {
    u32 sum = 0;
#pragma unroll
    for (int pair = 0; pair < smem.warps / 2; ++pair) {
        const u32 counts = smem.of_pair(bucket, pair), first = counts & 0xffff;
        smem.of_pair(bucket, pair) = sum | (sum + first) << 16;
        sum += first + (counts >> 16);
    }
    return sum;
}

// Sends counts to `of_slice` in every CTA in the cluster; a single CTA keeps its own.
template <int threads>
__device__ __forceinline__ void share_counts(const SortParams& params, u32 rank, SortStorage<threads>& smem) {
    const u32 barrier = ptx::smem_address(&smem.all_counted);
#pragma unroll 1
    for (u32 bucket = threadIdx.x; bucket <= params.experts; bucket += threads) {
        const u32 count = smem.begins[bucket] + sum_up_warps(smem, bucket) + smem.ends[bucket];
        if (params.cluster_log2 == 0) {
            smem.of_slice[0][bucket] = count;
            continue;
        }
        const u32 place = ptx::smem_address(&smem.of_slice[rank][bucket]);
#pragma unroll 1
        for (u32 block = 0; block >> params.cluster_log2 == 0; ++block) {
            ptx::st_async(ptx::mapa(place, block), count, ptx::mapa(barrier, block));
        }
    }
    if (params.cluster_log2 > 0) {
        while (!ptx::mbarrier_try_wait_parity(barrier, 0)) {
        }
    }
}

__device__ __forceinline__ u32 aligned_up(const SortParams& params, u32 row) {
    return (row + params.alignment - 1) & ~(params.alignment - 1);
}

// Returns a bucket's total; adds the preceding slices' counts to `begins`.
template <int threads>
__device__ __forceinline__ u32 sum_up_slices(const SortParams& params, u32 rank, SortStorage<threads>& smem,
                                             u32 bucket) {
    u32 all = 0, before = smem.begins[bucket];
#pragma unroll
    for (u32 slice = 0; slice < sort_blocks; ++slice) {
        const u32 count = slice >> params.cluster_log2 == 0 ? smem.of_slice[slice][bucket] : 0;
        all += count;
        before += slice < rank ? count : 0;
    }
    smem.begins[bucket] = before;
    return all;
}

// Computes each bucket's rows. A thread has the same buckets as before, and at most one expert.
template <int threads>
__device__ __forceinline__ void lay_out(const SortParams& params, u32 rank, SortStorage<threads>& smem) {
    const u32 expert = threadIdx.x;
    u32 count = 0;
#pragma unroll 1
    for (u32 bucket = expert; bucket <= params.experts; bucket += threads) {
        const u32 all = sum_up_slices(params, rank, smem, bucket);
        if (bucket < params.experts) count = all;
    }
    const u32 begin = sum_before(aligned_up(params, count), smem.sums), end = begin + count;
    if (expert < params.experts) {
        smem.begins[expert] += begin;
        smem.ends[expert] = end;
        if (blockIdx.x == 0) params.offs[expert] = end;
    }
    if (expert == params.experts - 1) smem.begins[params.experts] += end;  // rows without an expert are not aligned
    __syncthreads();
}

// Writes one choice. Rows without an expert go to the end, or nowhere if experts are aligned.
__device__ __forceinline__ void write_choice(const SortParams& params, u32 number, u32 bucket, u32 row) {
    const bool lives = bucket < params.experts;
    const bool is_inside = row < params.rows_size;  // choices may change meanwhile
    const i64 token = u64(number) * params.top_k_reciprocal >> params.top_k_shift;
    if (is_inside && (lives || params.alignment == 1)) params.rows[row] = token;
    params.index[number] = lives ? i64(row) : -1;
}

// Places the share, a part per warp, in order. Choices are read again, from L1.
template <typename Choice, int threads>
__device__ __forceinline__ void place_share(const SortParams& params, const SortShare& share,
                                            SortStorage<threads>& smem) {
    constexpr u32 at_once = 2;
    const u32 warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
    const u32 part = 1u << params.warp_choices_log2, begin = share.own + warp * part;
    const u32 end = min(begin + part, share.end);
#pragma unroll 1
    for (u32 done = 0; done < part; done += at_once * warp_threads) {
        const u32 first = begin + done + lane;
        Choices<Choice, at_once, warp_threads> choices;
        choices.load(params, first, end);
        u32 buckets[at_once], alike[at_once];
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            buckets[i] = first + i * warp_threads < end ? choices.bucket(params, i) : params.experts + 1;
            alike[i] = __match_any_sync(~0u, buckets[i]);
        }
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            const u32 number = first + i * warp_threads, rank = __popc(alike[i] & ((1u << lane) - 1));
            u16& next = smem.of_warp(buckets[i], warp);
            const u32 before = next;
            __syncwarp();
            if (rank == 0) next = before + __popc(alike[i]);
            __syncwarp();
            if (number < end) write_choice(params, number, buckets[i], smem.begins[buckets[i]] + before + rank);
        }
    }
}

// Fills rows between an expert's last and the next one's first with -1, by all CTAs' warps, and behind the last expert.
template <int threads>
__device__ __forceinline__ void fill_gaps(const SortParams& params, SortStorage<threads>& smem) {
    const u32 thread = blockIdx.x * threads + threadIdx.x, all = gridDim.x * threads;
#pragma unroll 1
    for (u32 expert = thread / warp_threads; expert < params.experts; expert += all / warp_threads) {
        const u32 end = smem.ends[expert], next = aligned_up(params, end);
#pragma unroll 1
        for (u32 row = end + thread % warp_threads; row < next; row += warp_threads) params.rows[row] = -1;
    }
    const u32 last = aligned_up(params, smem.ends[params.experts - 1]);
#pragma unroll 4
    for (u32 row = last + thread; row < params.rows_size; row += all) params.rows[row] = -1;
}

template <typename Choice, int threads>
__device__ __forceinline__ void sort_by_expert(const SortParams& params) {
    __shared__ SortStorage<threads> smem;
    take_turn();
    const SortShare share(params, smem.warps);
    count_slice<Choice>(params, share, smem);
    share_counts(params, share.rank, smem);
    lay_out(params, share.rank, smem);
    if (share.size > 0) place_share<Choice>(params, share, smem);
    if (params.alignment > 1) fill_gaps(params, smem);
}

}  // namespace deep_tile
