// Packed `b` from registers: in tiles of 32 and 64 rows, converter warpgroups multiply what they convert.
//
// Rows of `b` are WGMMA's rows, from registers, and rows of `a` its columns (swap_ab.cuh): 16 or, if the tile has more,
// 32; in groups, whose scheduler takes much code, never 16. Converted weights thus do not pass shared memory, and few
// rows of `a` take little tensor time. More than 32 rows are two chunks, by which a K block is multiplied one after the
// other.
//
// A warpgroup has 64 rows of `b`, a warp 16 of them, a unit of each K block (packed_b.cuh). With up to 64 columns, both
// warpgroups have the same rows and half of a stage's K blocks each. They leave a tile's sums in shared memory, from
// which the math warpgroup takes them as its own accumulators.
//
// These kernels wait for HBM, and are fastest with few stages (select/defaults.py).
#pragma once

#include "swap_ab.cuh"

namespace deep_tile {

// Shared-memory address of the sums of a part of the stage's K blocks.
template <GemmConfig config>
__device__ __forceinline__ u32 sums_address(SharedStorage<config>& smem, int part) {
    return ptx::smem_address(smem.b[0]) + part * config.block_m * config.sums_stride() * sizeof(float);
}

// Main loop of the math warpgroup: takes sums from the converter warpgroups.
template <GemmConfig config>
class Collect : public TakesSums<config> {
   public:
    __device__ __forceinline__ Collect(const GemmParams& params, SharedStorage<config>& smem, int)
        : TakesSums<config>(params), smem_(smem) {}

    // Adds this CTA's part of a tile to `sums`, in the warps that have rows of it.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int, bool, Meanwhile) {
        const int thread = threadIdx.x % warpgroup_threads, row = thread / warp_threads * 16;
        wait(smem_.slots.full[0], phase_);
        if (row < config.block_m) {
#pragma unroll
            for (int part = 0; part < config.k_parts; ++part) {
                TileSums<config>::add(sums_address<config>(smem_, part), row, sums[0][0]);
            }
        }
        ptx::mbarrier_arrive(ptx::smem_address(&smem_.slots.empty[0]));
        phase_ ^= 1;
    }

   private:
    SharedStorage<config>& smem_;
    u32 phase_ = 0;
};

// One converter warp: converts its unit of a K block while WGMMA multiplies that of the K block before.
template <GemmConfig config>
class RegisterMultiplier {
   public:
    __device__ __forceinline__ RegisterMultiplier(const GemmParams& params, SharedStorage<config>& smem, int warp)
        : params_(params),
          smem_(smem),
          releaser_(smem),
          part_(warp / 4 / row_groups),
          unit_(warp / 4 % row_groups * 4 + warp % 4),
          a_(descriptor_address(smem.a[0])) {
        if constexpr (has_tables) write_tables<config>(smem, warp);
    }

    // Multiplies all tiles of this CTA.
    __device__ __forceinline__ void run() {
        const KRange range = k_range<config>(params_);
        const int steps = range.end - range.begin;
        if (steps == 0) return;
        if constexpr (config.begins_with_bias()) ptx::griddepcontrol_wait();  // the preceding kernel may write the bias
        await_units(operand_, state_);
        while (const int rows = __shfl_sync(0xffffffff, smem_.tiles.rows[state_.stage], 0)) {
            const int column = smem_.tiles.column[state_.stage];
            if (rows <= 16 && !config.grouped()) {
                multiply<16, 1>(column, steps);
            } else if (rows <= 32 || config.block_m == 32) {
                multiply<32, 1>(column, steps);
            } else {
                multiply<32, config.block_m / 32>(column, steps);
            }
        }
    }

   private:
    using State = PipelineState<config.stages>;
    using Scales = typename Conditional<(config.b_group == 16 || config.chains > 1), uint2, u32>::type;  // of a row

    // A K block's elements, for each WGMMA, and, of integers in groups, the scales of both rows.
    struct Operand {
        u32 elements[k_block_bytes / mma_k_bytes][4];
        Scales scales[config.chains > 1 ? 2 : 1];
    };

    static constexpr int row_groups = config.block_n > mma_m ? 2 : 1;
    static constexpr int blocks = config.scale_blocks / config.k_parts;  // of a stage, per warpgroup
    static constexpr bool has_tables = config.has_tables();
    static constexpr int groups = has_tables ? mma_k_bytes / config.b_group : 0;  // per WGMMA
    static_assert(config.unit_stages == config.stages, "rings of other depths than the multiplier's state");
    static_assert(blocks == 1 || blocks % 2 == 0, "the last K block of a stage has the operand of the first");

    static __device__ __forceinline__ int lane() { return threadIdx.x % warp_threads; }

    // K block `block` of this warp's, among those of its stage.
    __device__ __forceinline__ int in_stage(int block) const { return part_ * blocks + block; }

    // Unit of the tile. Warps beyond the tile multiply its last one, and store no sums.
    __device__ __forceinline__ int unit_in_tile() const { return min(unit_, tile_units<config> - 1); }

    // Converts a K block of this warp's unit. Word t of a row's column, in lane t of the row's four, becomes two of the
    // registers that WGMMA takes.
    __device__ __forceinline__ void convert(Operand& operand, int stage, int block) const {
        const int unit = in_stage(block) * tile_units<config> + unit_in_tile();
        const u32 from = ptx::smem_address(smem_.packed.units[stage]) + unit * config.b_unit_bytes;
        u32 words[4][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i / 2][i % 2] = ptx::ld_shared<u32>(from + lane() * sizeof(u32) + i * 128);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            Scales scales;
            if constexpr (config.b_group < scale_block) scales = read_scales(from, lane() / 4 + row * 8);
            if constexpr (config.chains > 1) operand.scales[row] = scales;
#pragma unroll
            for (int column = 0; column < 4; ++column) {
                uint2 tables[2] = {};
                if constexpr (has_tables) {
                    tables[0] = table(scales, column * groups);
                    tables[1] = groups > 1 ? table(scales, column * groups + 1) : tables[0];
                }
                const uint2 eight = eight_elements<config.table_group()>(words[column][row], tables[0], tables[1]);
                operand.elements[column][row] = eight.x;
                operand.elements[column][row + 2] = eight.y;
            }
        }
    }

    static __device__ __forceinline__ Scales read_scales(u32 unit, int row) {
        const u32 at = unit + unit_rows * k_block_bytes / 2 + row * sizeof(Scales);
        if constexpr (sizeof(Scales) == sizeof(uint2)) {
            return ptx::ld_shared_v2(at);
        } else {
            return ptx::ld_shared<u32>(at);
        }
    }

    __device__ __forceinline__ uint2 table(Scales scales, int group) const {
        u32 four;
        if constexpr (config.b_group == 16) {
            four = group < 4 ? scales.x : scales.y;
        } else {
            four = scales;
        }
        return reinterpret_cast<const uint2*>(smem_.packed.tables)[four >> group % 4 * 8 & 255];
    }

    // Awaits a stage's units and converts the first K block. After the last tile it has old units: what they become is not
    // used.
    __device__ __forceinline__ void await_units(Operand& operand, State state) {
        wait(smem_.units.full[state.stage], state.phase);
        convert(operand, state.stage, 0);
    }

    // Gives this stage's units back, which have been read, and turns to the `next` stage's.
    __device__ __forceinline__ void turn_to_next_units(Operand& operand, State next) {
        ptx::mbarrier_arrive(ptx::smem_address(&smem_.units.empty[state_.stage]));
        await_units(operand, next);
    }

    // Issues the WGMMAs of a K block with the rows of `a` from `row` on.
    template <int count>
    __device__ __forceinline__ void begin(Chains<config, count>& products, const Operand& operand, int block, int row) const {
        const int first = config.block_m * (state_.stage * config.scale_blocks + in_stage(block)) + row;
        const u32 a = a_ + first * (k_block_bytes / 16);
        pin_chains<config>(products);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < k_block_bytes; k += mma_k_bytes) {
            wgmma(products[k / chain_bytes<config>], operand.elements[k / mma_k_bytes],
                  matrix_descriptor(a + k / 16, OperandLayout<0>::high), k % chain_bytes<config> != 0);
        }
        ptx::wgmma_commit_group();
    }

    // Awaits the WGMMAs of a K block, until then with `operand` in its registers, and adds the products.
    template <int count>
    __device__ __forceinline__ void finish(float (&sums)[count], Chains<config, count>& products, const Operand& operand,
                                           int block, int first_row) const {
        ptx::wgmma_wait_group<0>();
        pin_chains<config>(products);
#pragma unroll
        for (int i = 0; i < 16; ++i) asm volatile("" ::"r"(operand.elements[i / 4][i % 4]));
        const float* of_a = smem_.a_scale[state_.stage][in_stage(block)] + first_row;
        const float* of_b = smem_.b_scale[state_.stage][in_stage(block)];
        const int row = unit_in_tile() * unit_rows + lane() / 4;
        const float first = of_b[row / config.b_scale_columns];
        if constexpr (config.chains > 1) {
            const float4 scales[2] = {floats_of(operand.scales[0]) * first, floats_of(operand.scales[1]) * first};
            promote_swapped<config>(sums, products, scales, of_a);
        } else {
            const float scales[2] = {first, config.column_scales ? of_b[row + 8] : first};
            promote_swapped<config>(sums, products, scales, of_a);
        }
    }

    // Multiplies a tile, whose first column is `column`, by up to `chunks` x `rows` rows.
    template <int rows, int chunks>
    __device__ __forceinline__ void multiply(int column, int steps) {
        float sums[chunks][rows / 2];
        Chains<config, rows / 2> products;
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
            clear_swapped<config>(params_, sums[i], column + unit_ * unit_rows + lane() / 4, part_ == 0);
        }
#pragma unroll 1
        for (; steps > 0; --steps) {
            Operand other;
            State next = state_;
            next.advance();
            wait(smem_.full[state_.stage], state_.phase);
#pragma unroll
            for (int block = 0; block < blocks; ++block) {
                Operand &present = block % 2 == 0 ? operand_ : other, &following = block % 2 == 0 ? other : operand_;
#pragma unroll
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    begin(products, present, block, chunk * rows);
                    if (chunk == 0 && block + 1 < blocks) convert(following, state_.stage, block + 1);
                    if (chunk == 0 && block + 1 == blocks) turn_to_next_units(following, next);
                    finish(sums[chunk], products, present, block, chunk * rows);
                }
            }
            if constexpr (blocks == 1) operand_ = other;
            releaser_.release(state_.stage);
            state_ = next;
        }
        store(sums);
    }

    template <int chunks, int count>
    __device__ __forceinline__ void store(const float (&sums)[chunks][count]) {
        wait(smem_.slots.empty[0], phase_ ^ 1);
        if (unit_ < tile_units<config>) {
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
                const u32 to = sums_address<config>(smem_, part_) + i * 2 * count * config.sums_stride() * sizeof(float);
                TileSums<config>::write(to, unit_ * unit_rows + lane() / 4, sums[i]);
            }
        }
        ptx::mbarrier_arrive(ptx::smem_address(&smem_.slots.full[0]));
        phase_ ^= 1;
    }

    const GemmParams& params_;
    SharedStorage<config>& smem_;
    const Releaser<config> releaser_;
    const int part_, unit_;
    const u32 a_;  // descriptor address of the first stage
    Operand operand_;
    State state_;  // of both rings; with a state each, NVRTC 13.2 and 13.5 make warps of INT4 divergent
    u32 phase_ = 0;  // of the sums
};

}  // namespace deep_tile
