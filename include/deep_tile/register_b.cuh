// Packed `b` from registers: in 32-row tiles, converter warpgroups multiply what they convert.
//
// Rows of `b` are WGMMA's rows, from registers, and rows of `a` its columns: 16 or, if the tile has more, 32; in groups,
// whose scheduler takes much code, always 32. Converted weights thus do not pass shared memory, and few rows of `a` take
// little tensor time. A warpgroup has 64 rows of `b`, a warp 16 of them, a unit of each K block (packed_b.cuh). With up to 64 columns, both
// warpgroups have the same rows and half of a stage's K blocks each. They leave a tile's sums in shared memory, from
// which the math warpgroup takes them as its own accumulators.
//
// These kernels wait for HBM, and are fastest with few stages (select/defaults.py).
#pragma once

#include "finish.cuh"
#include "packed_b.cuh"
#include "warpgroup.cuh"

namespace deep_tile {

// A tile's sums in shared memory, by part of the stage's K blocks, row of `a` and row of `b`.
template <GemmConfig config>
struct TileSums {
    static constexpr int stride = config.block_n + 4;  // floats; converter lanes write to 32 banks

    static __device__ __forceinline__ u32 address(SharedStorage<config>& smem, int part, int row, int column) {
        return ptx::smem_address(smem.b[0]) + ((part * config.block_m + row) * stride + column) * sizeof(float);
    }
};

// Main loop of the math warpgroup: takes sums from the converter warpgroups. The interface is that of LoopState.
template <GemmConfig config>
class Collect {
   public:
    __device__ __forceinline__ Collect(const GemmParams& params, SharedStorage<config>& smem, int)
        : smem_(smem), range_(k_range<config>(params)) {}

    __device__ __forceinline__ int steps() const { return range_.end - range_.begin; }
    __device__ __forceinline__ void acquire() const {}
    __device__ __forceinline__ void begin_tile() const {}
    __device__ __forceinline__ void end() const {}
    template <typename Scheduler>
    __device__ __forceinline__ void turn_to_tile(const Scheduler&) const {}

    __device__ __forceinline__ void clear(Accumulators<config>& sums) const {
#pragma unroll
        for (int i = 0; i < config.mma_n / 2; ++i) sums[0][0][i] = 0;
    }

    // Adds this CTA's part of a tile to `sums`, in the warps that have rows of it.
    template <typename Meanwhile>
    __device__ __forceinline__ void multiply(Accumulators<config>& sums, int, bool, Meanwhile) {
        const int thread = threadIdx.x % warpgroup_threads, row = thread / warp_threads * 16;
        wait(smem_.slots.full[0], phase_);
        if (row < config.block_m) add(sums, row);
        ptx::mbarrier_arrive(ptx::smem_address(&smem_.slots.empty[0]));
        phase_ ^= 1;
    }

   private:
    __device__ __forceinline__ void add(Accumulators<config>& sums, int row) const {
        const int lane = threadIdx.x % warp_threads;
#pragma unroll
        for (int part = 0; part < config.k_parts; ++part) {
#pragma unroll
            for (int i = 0; i < config.block_n / 4; ++i) {  // pairs of columns
                const u32 at = TileSums<config>::address(smem_, part, row + lane / 4 + i % 2 * 8, i / 2 * 8 + lane % 4 * 2);
                const uint2 pair = ptx::ld_shared_v2(at);
                sums[0][0][2 * i] += __uint_as_float(pair.x);
                sums[0][0][2 * i + 1] += __uint_as_float(pair.y);
            }
        }
    }

    SharedStorage<config>& smem_;
    const KRange range_;
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
                multiply<16>(column, steps);
            } else {
                multiply<32>(column, steps);
            }
        }
    }

   private:
    using State = PipelineState<config.stages>;
    using Operand = u32[k_block_bytes / mma_k_bytes][4];  // of each WGMMA in a K block
    using Scales = typename Conditional<config.b_group == 16, uint2, u32>::type;

    static constexpr int row_groups = config.block_n > mma_m ? 2 : 1;
    static constexpr int blocks = config.scale_blocks / config.k_parts;  // of a stage, per warpgroup
    static constexpr bool has_tables = config.b_group < scale_block;
    static constexpr int groups = has_tables ? mma_k_bytes / config.b_group : 0;  // per WGMMA
    static_assert(config.unit_stages == config.stages, "rings of other depths than the multiplier's state");
    static_assert(blocks == 1 || blocks == 2, "K blocks of a stage without a loop for them");

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
            if constexpr (has_tables) scales = read_scales(from, lane() / 4 + row * 8);
#pragma unroll
            for (int column = 0; column < 4; ++column) {
                uint2 tables[2] = {};
                if constexpr (has_tables) {
                    tables[0] = table(scales, column * groups);
                    tables[1] = groups > 1 ? table(scales, column * groups + 1) : tables[0];
                }
                const uint2 eight = eight_elements<config.b_group>(words[column][row], tables[0], tables[1]);
                operand[column][row] = eight.x;
                operand[column][row + 2] = eight.y;
            }
        }
    }

    static __device__ __forceinline__ Scales read_scales(u32 unit, int row) {
        const u32 at = unit + unit_rows * k_block_bytes / 2 + row * sizeof(Scales);
        if constexpr (config.b_group == 16) {
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

    // Issues the WGMMAs of a K block.
    template <int count>
    __device__ __forceinline__ void begin(float (&products)[count], const Operand& operand, int block) const {
        const u32 a = a_ + config.block_m * (state_.stage * config.k_bytes + in_stage(block) * k_block_bytes) / 16;
        pin(products);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < k_block_bytes / mma_k_bytes; ++k) {
            wgmma(products, operand[k], matrix_descriptor(a + k * mma_k_bytes / 16, OperandLayout<0>::high), k != 0);
        }
        ptx::wgmma_commit_group();
    }

    // Awaits the WGMMAs of a K block. Until then `operand` stays in its registers.
    template <int count>
    static __device__ __forceinline__ void finish(float (&products)[count], const Operand& operand) {
        ptx::wgmma_wait_group<0>();
        pin(products);
#pragma unroll
        for (int i = 0; i < 16; ++i) asm volatile("" ::"r"(operand[i / 4][i % 4]));
    }

    // Adds the products, scaled. Registers 4j to 4j + 3 hold rows 8j and 8j + 1 (plus 2 * (lane % 4)) of `a`, for two rows
    // of `b`. a_scale_slot() keeps the scales of sixteen rows such that a lane reads its four at once.
    template <int count>
    __device__ __forceinline__ void promote(float (&sums)[count], const float (&products)[count], int block) const {
        const float* of_a = smem_.a_scale[state_.stage][in_stage(block)];
        const float* of_b = smem_.b_scale[state_.stage][in_stage(block)];
        const int row = unit_in_tile() * unit_rows + lane() / 4;
        const float first = of_b[row / config.b_scale_columns];
        const float b[2] = {first, config.column_scales ? of_b[row + 8] : first};
#pragma unroll
        for (int i = 0; i < count; i += 8) {
            const uint4 four = ptx::ld_shared_v4(ptx::smem_address(of_a + 2 * i + lane() % 4 * 4));
            const u32 a[2][2] = {{four.x, four.z}, {four.y, four.w}};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sums[i + j] += __uint_as_float(a[j / 4][j % 2]) * b[j / 2 % 2] * products[i + j];
            }
        }
    }

    // Clears a tile's sums, or lets those of the first K part begin with the bias; the tile's first column is `column`.
    template <int count>
    __device__ __forceinline__ void clear(float (&sums)[count], int column) const {
        float bias[2] = {};
        if constexpr (config.begins_with_bias()) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float value = bias_value<config>(bias_bits<config>(params_, column + unit_ * unit_rows + lane() / 4 + row * 8));
                bias[row] = part_ == 0 ? value : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < count; ++i) sums[i] = bias[i / 2 % 2];
    }

    // Multiplies a tile with up to `rows` rows, whose first column is `column`.
    template <int rows>
    __device__ __forceinline__ void multiply(int column, int steps) {
        float sums[rows / 2], products[rows / 2];
        clear(sums, column);
#pragma unroll 1
        for (; steps > 0; --steps) {
            Operand other;
            State next = state_;
            next.advance();
            wait(smem_.full[state_.stage], state_.phase);
            begin(products, operand_, 0);
            if constexpr (blocks == 2) {
                convert(other, state_.stage, 1);
                finish(products, operand_);
                promote(sums, products, 0);
                begin(products, other, 1);
                turn_to_next_units(operand_, next);
                finish(products, other);
                promote(sums, products, 1);
            } else {
                turn_to_next_units(other, next);
                finish(products, operand_);
                promote(sums, products, 0);
#pragma unroll
                for (int i = 0; i < 16; ++i) operand_[i / 4][i % 4] = other[i / 4][i % 4];
            }
            releaser_.release(state_.stage);
            state_ = next;
        }
        store(sums);
    }

    template <int count>
    __device__ __forceinline__ void store(const float (&sums)[count]) {
        wait(smem_.slots.empty[0], phase_ ^ 1);
        if (unit_ < tile_units<config>) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const int row = i / 4 * 8 + lane() % 4 * 2 + i % 2, column = unit_ * unit_rows + lane() / 4 + i / 2 % 2 * 8;
                ptx::st_shared(TileSums<config>::address(smem_, part_, row, column), sums[i]);
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
