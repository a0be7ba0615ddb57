// A warp on a CPU: its lanes are fibers of one thread, which take turns at each vote and shuffle.
//
// All lanes must come to the same ones, as `.sync` asks of them: a lane that does not ends the process.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>

#define HOST_WARP
#include "host_cuda.h"

class HostWarp {
   public:
    static constexpr int lanes = 32;

    // Runs `lane` for each lane of a warp of block `block` of `blocks`.
    static void run(unsigned block, unsigned blocks, std::function<void()> lane) {
        HostWarp warp(std::move(lane));
        blockIdx = {block}, gridDim = {blocks}, blockDim = {lanes};
        present_ = &warp;
        swapcontext(&warp.caller_, &warp.fibers_[0]);
    }

    // Of all lanes.
    static const int* exchange(int value) { return present_->meet(value); }

   private:
    explicit HostWarp(std::function<void()> lane) : lane_(std::move(lane)) {
        for (int i = 0; i < lanes; ++i) {
            stacks_[i].resize(1 << 16);
            getcontext(&fibers_[i]);
            fibers_[i].uc_stack.ss_sp = stacks_[i].data();
            fibers_[i].uc_stack.ss_size = stacks_[i].size();
            fibers_[i].uc_link = i + 1 < lanes ? &fibers_[i + 1] : &caller_;
            makecontext(&fibers_[i], begin, 0);
        }
    }

    static void begin() {
        HostWarp& warp = *present_;
        threadIdx = {static_cast<unsigned>(warp.started_++)};
        warp.lane_();
        if (warp.meetings_[threadIdx.x] != warp.meetings_[0]) {
            std::fprintf(stderr, "lanes of a warp came to different votes\n");
            std::abort();
        }
        threadIdx = {threadIdx.x + 1};  // the fiber that follows goes on
    }

    const int* meet(int value) {
        const unsigned lane = threadIdx.x, next = (lane + 1) % lanes;
        int* values = values_[meetings_[lane]++ % 2];
        values[lane] = value;
        threadIdx = {next};
        swapcontext(&fibers_[lane], &fibers_[next]);
        threadIdx = {lane};
        return values;
    }

    static inline HostWarp* present_;
    std::function<void()> lane_;
    ucontext_t caller_, fibers_[lanes];
    std::vector<char> stacks_[lanes];
    int values_[2][lanes], meetings_[lanes] = {}, started_ = 0;
};

inline int __shfl_sync(unsigned, int value, int lane) { return HostWarp::exchange(value)[lane]; }

inline int __shfl_up_sync(unsigned, int value, int distance) {
    const int lane = threadIdx.x;
    const int* values = HostWarp::exchange(value);
    return lane >= distance ? values[lane - distance] : value;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    const int* votes = HostWarp::exchange(vote);
    unsigned ballot = 0;
    for (int lane = 0; lane < HostWarp::lanes; ++lane) ballot |= static_cast<unsigned>(votes[lane]) << lane;
    return ballot;
}

inline int __ffs(unsigned value) { return __builtin_ffs(value); }
inline int __float2int_rz(float value) { return static_cast<int>(value); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

// What only the debug build of kernels calls.
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffff; }
inline void __syncwarp() { HostWarp::exchange(0); }
inline void __threadfence_system() {}
