// What a cast's kernel needs of CUDA, on a CPU: its threads are fibers, one thread block or cluster after the other.
//
// test_cast_kernels.py writes a kernel's text after this. PTX that a cast uses is here as `host_*`; the text's own
// inline assembly is replaced by calls of these.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __builtin_assume(condition)
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct Index {
    unsigned x;
};

// What code compiled with -fsanitize=alignment calls, in place of the compiler's library.
inline bool host_misaligned;
extern "C" __attribute__((used)) inline void __ubsan_handle_type_mismatch_v1(void*, void*) { host_misaligned = true; }

inline Index threadIdx, blockIdx, blockDim, gridDim;
inline unsigned cluster_blocks, block_rank;  // of the cluster that runs, and of the thread's block in it

inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// Shared memory of a cluster's blocks, for kernels that read and write each other's; others have theirs as statics.
enum { HOST_SHARED_BYTES = 1 << 16 };
alignas(16) inline char host_shared_memory[8 * HOST_SHARED_BYTES];

template <typename T>
T& host_shared() {
    static_assert(sizeof(T) <= HOST_SHARED_BYTES);
    return *reinterpret_cast<T*>(host_shared_memory + block_rank * HOST_SHARED_BYTES);
}

inline unsigned long long __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const char*>(pointer) - host_shared_memory;
}
inline unsigned host_mapa(unsigned smem, unsigned rank) {
    return smem % HOST_SHARED_BYTES + rank * HOST_SHARED_BYTES;
}

// Threads of which one runs until it waits; then the next one does, or in every second launch the one before it: where
// a kernel does not wait though it should, one of the two orders shows it.
class Fibers {
   public:
    unsigned first_block = 0;  // of the cluster that runs
    bool backwards = false;

    // Runs `thread` in all of them. They must all wait for each other before they end.
    void run(unsigned threads, std::function<void()> thread) {
        thread_ = std::move(thread);
        left_ = threads;
        step_ = backwards ? threads - 1 : 1;
        contexts_.resize(threads);
        stacks_.resize(threads, std::vector<char>(1 << 16));
        for (unsigned i = 0; i < threads; ++i) {
            getcontext(&contexts_[i]);
            contexts_[i].uc_stack.ss_sp = stacks_[i].data();
            contexts_[i].uc_stack.ss_size = stacks_[i].size();
            makecontext(&contexts_[i], begin, 0);
        }
        swapcontext(&caller_, enter(0));
    }

    // Goes on when it is this thread's turn again.
    void yield() {
        const unsigned self = self_;
        swapcontext(&contexts_[self], next());
        enter(self);
    }

   private:
    static void begin();

    ucontext_t* next() { return enter((self_ + step_) % static_cast<unsigned>(contexts_.size())); }

    ucontext_t* enter(unsigned fiber) {
        self_ = fiber;
        threadIdx = {fiber % blockDim.x};
        block_rank = fiber / blockDim.x;
        blockIdx = {first_block + block_rank};
        return &contexts_[fiber];
    }

    std::function<void()> thread_;
    unsigned left_, step_ = 0, self_ = 0;
    ucontext_t caller_;
    std::vector<ucontext_t> contexts_;
    std::vector<std::vector<char>> stacks_;
};

inline Fibers fibers;

inline void Fibers::begin() {
    fibers.thread_();
    setcontext(--fibers.left_ == 0 ? &fibers.caller_ : fibers.next());
}

// Threads that meet: a thread block, or the lanes of a mask in one of its warps.
class Meeting {
   public:
    explicit Meeting(unsigned threads) : threads_(threads) {}

    void wait() {
        const unsigned phase = phase_;
        if (++arrived_ == threads_) {
            arrived_ = 0;
            ++phase_;
        }
        while (phase_ == phase) fibers.yield();
    }

    unsigned values[32];

   private:
    unsigned threads_, arrived_ = 0, phase_ = 0;
};

inline std::vector<Meeting> block_meetings;
inline std::map<std::pair<unsigned, unsigned>, std::unique_ptr<Meeting>> warp_meetings;

inline Meeting& meeting_of(unsigned mask) {
    auto& meeting = warp_meetings[{(block_rank * blockDim.x + threadIdx.x) / 32, mask}];
    if (!meeting) meeting = std::make_unique<Meeting>(__builtin_popcount(mask));
    return *meeting;
}

inline void __syncthreads() { block_meetings[block_rank].wait(); }

inline int __syncthreads_count(bool counts) {
    static int count = 0;
    count += counts;
    __syncthreads();
    const int all = count;
    __syncthreads();
    count = 0;
    __syncthreads();
    return all;
}

inline int __syncthreads_or(bool any) { return __syncthreads_count(any) > 0; }

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int distance) {
    Meeting& meeting = meeting_of(mask);
    meeting.values[threadIdx.x % 32] = value;
    meeting.wait();
    const unsigned other = meeting.values[threadIdx.x % 32 ^ distance];
    meeting.wait();
    return other;
}

inline unsigned __shfl_up_sync(unsigned mask, unsigned value, unsigned distance) {
    Meeting& meeting = meeting_of(mask);
    const unsigned lane = threadIdx.x % 32;
    meeting.values[lane] = value;
    meeting.wait();
    const unsigned other = meeting.values[lane < distance ? lane : lane - distance];
    meeting.wait();
    return other;
}

#ifndef HOST_WARP  // which has its own
inline void __syncwarp() { meeting_of(~0u).wait(); }

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    Meeting& meeting = meeting_of(mask);
    meeting.values[threadIdx.x % 32] = vote;
    meeting.wait();
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) votes |= (mask >> lane & 1 ? meeting.values[lane] : 0) << lane;
    meeting.wait();
    return votes;
}

inline unsigned __match_any_sync(unsigned mask, unsigned value) {
    Meeting& meeting = meeting_of(mask);
    meeting.values[threadIdx.x % 32] = value;
    meeting.wait();
    unsigned alike = 0;
    for (unsigned lane = 0; lane < 32; ++lane) alike |= (mask >> lane & 1 && meeting.values[lane] == value) << lane;
    meeting.wait();
    return alike;
}
#endif

inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(mask, value, distance);
    return value;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    for (int distance = 16; distance > 0; distance /= 2) value = max(value, __shfl_xor_sync(mask, value, distance));
    return value;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

inline unsigned atomicAdd(unsigned* value, unsigned more) { return std::exchange(*value, *value + more); }
inline unsigned atomicExch(unsigned* value, unsigned other) { return std::exchange(*value, other); }

// Bytes of y and x, those of x first, by the numbers in `selector`.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

inline unsigned host_max_u16x2(unsigned a, unsigned b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }

inline float host_min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }
inline float host_max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
inline float host_flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float host_normal_reciprocal(float x) { return host_flushed(1.0f / x); }
inline float host_ex2(float x) { return host_flushed(std::exp2(x)); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }

inline unsigned host_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned host_bf16x2(float high, float low) { return host_bf16(high) << 16 | host_bf16(low); }

inline unsigned host_mul_bf16x2(unsigned a, unsigned b) {
    const auto product = [=](int shift) { return __uint_as_float(a >> shift << 16) * __uint_as_float(b >> shift << 16); };
    return host_bf16x2(product(16), product(0));
}

inline float host_f32_of_f16(unsigned short bits) { return __builtin_bit_cast(_Float16, bits); }

inline unsigned char host_e4m3(float x) {
    const unsigned char sign = std::signbit(x) << 7;
    if (std::isnan(x)) return 0x7f;
    if (std::fabs(x) >= 448.0f) return sign | 0x7e;
    const int exponent = std::fabs(x) < 0x1p-6f ? -6 : std::ilogb(x);
    const int eighths = std::nearbyint(std::ldexp(std::fabs(x), 3 - exponent));  // 16 of them carry into the exponent
    return sign | (((exponent + 6) << 3) + eighths);
}

/* Two codes as FP16: their exponent is moved, of denormals and zeros by a product. */
inline unsigned host_f16x2_of_e4m3x2(unsigned short codes) {
    const auto half = [](unsigned code) {
        if ((code & 0x7f) == 0x7f) return 0x7fffu;
        const _Float16 shifted = __builtin_bit_cast(_Float16, (unsigned short)((code & 0x7f) << 7)) * (_Float16)256;
        return unsigned(__builtin_bit_cast(unsigned short, shifted)) | (code & 0x80) << 8;
    };
    return half(codes >> 8) << 16 | half(codes & 0xff);
}

inline unsigned short host_e4m3x2(float high, float low) { return host_e4m3(high) << 8 | host_e4m3(low); }

// An mbarrier that completes once.
struct HostBarrier {
    int arrivals, bytes;
};
inline HostBarrier& host_barrier(unsigned smem) { return *reinterpret_cast<HostBarrier*>(host_shared_memory + smem); }
inline void host_mbarrier_arrive_expect_tx(unsigned smem, unsigned bytes) {
    HostBarrier& barrier = host_barrier(smem);
    --barrier.arrivals;
    barrier.bytes += bytes;
}
inline bool host_mbarrier_try_wait(unsigned smem) {
    const HostBarrier& barrier = host_barrier(smem);
    if (barrier.arrivals == 0 && barrier.bytes == 0) return true;
    fibers.yield();
    return false;
}
inline void host_st_async(unsigned remote, unsigned value, unsigned remote_barrier) {
    std::memcpy(host_shared_memory + remote, &value, sizeof value);
    host_barrier(remote_barrier).bytes -= sizeof value;
}

inline unsigned cluster_arrived;  // threads at the cluster's barrier, which a kernel has once
inline void host_barrier_cluster_wait() {
    while (cluster_arrived < cluster_blocks * blockDim.x) fibers.yield();
}

template <typename Params>
void host_launch(void (*kernel)(Params), const Params& params, unsigned grid, unsigned threads, unsigned cluster) {
    block_meetings.assign(cluster, Meeting(threads));
    warp_meetings.clear();
    blockDim = {threads}, gridDim = {grid};
    cluster_blocks = cluster;
    fibers.backwards = !fibers.backwards;
    for (fibers.first_block = 0; fibers.first_block < grid; fibers.first_block += cluster) {
        std::memset(host_shared_memory, 0x5a, sizeof host_shared_memory);
        cluster_arrived = 0;
        Meeting all(cluster * threads);
        fibers.run(cluster * threads, [=, &all] {
            kernel(params);
            all.wait();
        });
    }
}
