// Runs the grid of a logits kernel as far as who works on what: test_logits.py writes ranges.cuh's text after
// host_cuda.h and the intrinsics below, and `share_out` behind it.
#pragma once

#include "host_cuda.h"

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

inline int host_vote(int value, bool least) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const int other = static_cast<int>(__shfl_xor_sync(~0u, static_cast<unsigned>(value), distance));
        value = least ? min(value, other) : max(value, other);
    }
    return value;
}
inline int __reduce_min_sync(unsigned, int value) { return host_vote(value, true); }
inline int __reduce_max_sync(unsigned, int value) { return host_vote(value, false); }

inline int __shfl_sync(unsigned mask, int value, int lane) {
    Meeting& meeting = meeting_of(mask);
    meeting.values[threadIdx.x % 32] = static_cast<unsigned>(value);
    meeting.wait();
    const int found = static_cast<int>(meeting.values[lane]);
    meeting.wait();
    return found;
}

// What only the debug build of kernels calls.
inline bool __all_sync(unsigned, bool vote) { return vote; }
inline void __threadfence_system() {}
