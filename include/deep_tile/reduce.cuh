// Split K: the K parts' CTAs hold partial sums for the same tile; each reduces its share of the columns.
//
// A CTA pushes the other CTAs' shares from registers into their shared memory (distributed shared memory, no
// workspace), then adds the received sums to its own in the order of the K parts, so that the result does not depend on
// timing. Each math warpgroup exchanges with its counterparts only, one chunk of 64 rows at a time: with buffers for two
// chunks 256x128 would have two stages, not three, beside a packed `b`. Integer sums are added as integers.
//
//   barrier            waited for by            arrivals                              completes when
//   partial_full[w]    warpgroup w, receiving   its own thread + senders' bytes       all other CTAs' sums have landed
//   partial_empty[w]   warpgroup w, sending     1 per warp of w in each other CTA     they have read the previous sums
#pragma once

#include "output.cuh"

namespace deep_tile {

template <GemmConfig config>
class SplitReduction {
   public:
    __device__ __forceinline__ SplitReduction(SharedStorage<config>& smem, int warpgroup)
        : smem_(smem),
          warpgroup_(warpgroup),
          thread_(threadIdx.x % warpgroup_threads),
          part_(uniform_cluster_rank() / config.multicast_ctas()) {}

    // Pushes the other CTAs' columns of one chunk's rows.
    __device__ __forceinline__ void send(const ChunkSums<config>& sums) {
        constexpr int received_bytes = (config.split_k - 1) * mma_m * config.columns_per_part * 4;
        wait(smem_.partial_empty[warpgroup_], phase_ ^ 1);
        if (thread_ == 0) {
            ptx::mbarrier_arrive_expect_tx(ptx::smem_address(&smem_.partial_full[warpgroup_]), received_bytes);
        }
#pragma unroll
        for (int part = 0; part < config.split_k; ++part) {
            if (part != part_) push(sums, part);
        }
    }

    // Waits for the other CTAs' sums. Not part of receive(), which is called in one of several branches: the
    // compiler would no longer know the phase as uniform, nor any loop here. It then lets warps diverge, and they hung
    // at a WGMMA, which wants all of them; tests/test_codegen.py looks for it.
    __device__ __forceinline__ void await() {
        wait(smem_.partial_full[warpgroup_], phase_);
        phase_ ^= 1;
    }

    // Completes `part`, this CTA's columns, in one chunk's rows. Returns bits from every vector that it has read.
    template <int part>
    __device__ __forceinline__ u32 receive(ChunkSums<config>& sums) {
        u32 read = 0;
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            float* own = &sums[0][0] + vector(part, i);
            float total[4] = {};
#pragma unroll
            for (int sender = 0; sender < config.split_k; ++sender) {
                const float* values = sender == part ? own : slot(sender, part, i);
                if (sender != part) read |= __float_as_uint(values[0]);
#pragma unroll
                for (int j = 0; j < 4; ++j) total[j] = added<config>(total[j], values[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) own[j] = added_up<config>(total[j]);
        }
        return read;
    }

    // Allows the slots to be overwritten; `read` is receive()'s result in this lane. Not called after the last chunk of
    // the last tile: the senders may have exited.
    //
    // The arrival's address depends on the values read by all lanes. Otherwise the arrival overtakes the reads, which
    // it orders within the CTA only, and the next sums land in slots still being read (beside kernels in other
    // streams 13 of 80 products were wrong; H200, 2026-11-23). An arrival with cluster-wide ordering is a
    // MEMBAR.ALL.GPU.
    __device__ __forceinline__ void release(u32 read) const {
        const int lane = thread_ % warp_threads;
        const u32 zero = __reduce_or_sync(0xffffffff, read) & ptx::opaque_zero();
        const u32 barrier = ptx::mapa(ptx::smem_address(&smem_.partial_empty[warpgroup_]), cta(lane % config.split_k));
        ptx::mbarrier_arrive_cluster(barrier + zero, lane < config.split_k && lane != part_);
    }

    __device__ __forceinline__ int part() const { return part_; }

   private:
    static constexpr int vectors = Partials<config>::vectors;

    // Index of four of a chunk's accumulators: columns 8i and 8i + 1 (plus 2 * (lane % 4)) of this thread's two rows in
    // the part.
    static __device__ __forceinline__ int vector(int part, int i) { return part * config.columns_per_part / 2 + i * 4; }

    __device__ __forceinline__ float* slot(int sender, int receiver, int i) const {
        return smem_.partial[warpgroup_][sender < receiver ? sender : sender - 1][i][thread_];
    }

    // Rank of the CTA that multiplies a K part of this CTA's tile.
    static __device__ __forceinline__ u32 cta(int part) {
        return part * config.multicast_ctas() + ptx::cluster_ctarank() % config.multicast_ctas();
    }

    __device__ __forceinline__ void push(const ChunkSums<config>& sums, int part) const {
        const u32 barrier = ptx::mapa(ptx::smem_address(&smem_.partial_full[warpgroup_]), cta(part));
        const u32 first = ptx::mapa(ptx::smem_address(slot(part_, part, 0)), cta(part));
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            ptx::st_async(first + i * warpgroup_threads * 16, &sums[0][0] + vector(part, i), barrier);
        }
    }

    SharedStorage<config>& smem_;
    const int warpgroup_, thread_, part_;
    u32 phase_ = 0;
};

}  // namespace deep_tile
