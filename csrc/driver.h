/* The part of the CUDA driver API that the launcher calls, declared by hand.
 *
 * Included by launcher.h, so that the launcher builds without a CUDA toolkit. Where cuda.h exists,
 * tests/test_launcher.py holds every value, layout and signature below against it: handles keep cuda.h's struct tags,
 * and an `unsigned` stands for each of its enums, so that the types agree. The interface is CUDA 12.0's, the first with
 * cuLibrary and tensor maps.
 */
#ifndef DEEP_TILE_DRIVER_H
#define DEEP_TILE_DRIVER_H

#include <stdint.h>

typedef unsigned DriverResult; /* CUresult; 0 is success */
typedef struct CUctx_st *DriverContext;
typedef struct CUlib_st *DriverLibrary;
typedef struct CUkern_st *DriverKernel;
typedef struct CUfunc_st *DriverFunction;
typedef struct CUstream_st *DriverStream;
struct CUtensorMap_st;    /* MAP_BYTES, aligned to MAP_ALIGNMENT_BYTES */
struct CUlaunchConfig_st; /* LaunchConfig below */

enum {
    DRIVER_API_VERSION = 12000,
    STREAM_CAPTURE_NONE = 0,
    PROC_ADDRESS_LEGACY_STREAM = 1, /* stream 0 is the legacy default stream, as it is for torch */

    FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,

    LAUNCH_CLUSTER_DIMENSION = 4,
    LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6,

    MAP_BYTES = 128,
    MAP_ALIGNMENT_BYTES = 64,
    MAP_ELEMENTS = 13, /* types of elements, from 0 */
    MAP_INTERLEAVE_NONE = 0,
    MAP_SWIZZLE_NONE = 0,
    MAP_SWIZZLE_128B = 3,
    MAP_L2_PROMOTION_256B = 3,
    MAP_OOB_FILL_ZEROS = 0,
};

#define REQUIRED_DRIVER "the NVIDIA driver: 525 or newer for CUDA 12, 580 or newer for CUDA 13"

/* ERROR(name, CUresult, remedy) for every error with more to say than the driver does. STICKY errors are reported by
 * every call after a kernel in this process, or the GPU, has failed. */
#define DRIVER_ERRORS(ERROR)                                                                                          \
    ERROR(NOT_INITIALIZED, 3,                                                                                         \
          "CUDA cannot be used in a process forked after CUDA had started: start workers with 'spawn'")               \
    ERROR(NO_DEVICE, 100, "no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES")                      \
    ERROR(INVALID_DEVICE, 101, "there is no such GPU: check the device index and CUDA_VISIBLE_DEVICES")               \
    ERROR(INVALID_IMAGE, 200, BAD_CUBIN)                                                                              \
    ERROR(NO_BINARY_FOR_GPU, 209, "the kernels are built for sm_90a and run on Hopper GPUs only")                     \
    ERROR(ECC_UNCORRECTABLE, 214, STICKY)                                                                             \
    ERROR(NVLINK_UNCORRECTABLE, 220, STICKY)                                                                          \
    ERROR(CONTAINED, 226, STICKY)                                                                                     \
    ERROR(INVALID_SOURCE, 300, BAD_CUBIN)                                                                             \
    ERROR(INVALID_HANDLE, 400, "the stream must belong to the kernel's device")                                       \
    ERROR(NOT_FOUND, 500, "the cubin holds no kernel of that name")                                                   \
    ERROR(ILLEGAL_ADDRESS, 700, STICKY)                                                                               \
    ERROR(LAUNCH_TIMEOUT, 702, STICKY)                                                                                \
    ERROR(ASSERT, 710, STICKY)                                                                                        \
    ERROR(HARDWARE_STACK_ERROR, 714, STICKY)                                                                          \
    ERROR(ILLEGAL_INSTRUCTION, 715, STICKY)                                                                           \
    ERROR(MISALIGNED_ADDRESS, 716, STICKY)                                                                            \
    ERROR(INVALID_ADDRESS_SPACE, 717, STICKY)                                                                         \
    ERROR(INVALID_PC, 718, STICKY)                                                                                    \
    ERROR(LAUNCH_FAILED, 719, STICKY)                                                                                 \
    ERROR(TENSOR_MEMORY_LEAK, 721, STICKY)

#define DECLARE_ERROR(name, result, remedy) ERROR_##name = result,
enum { DRIVER_ERRORS(DECLARE_ERROR) };

typedef struct { /* CUlaunchAttribute */
    unsigned id;
    union {
        struct {
            unsigned x, y, z;
        } cluster_dim;
        int programmatic_stream_serialization;
        uint64_t opaque[8];
    } value;
} LaunchAttribute;

typedef struct { /* CUlaunchConfig */
    unsigned grid_x, grid_y, grid_z;
    unsigned block_x, block_y, block_z;
    unsigned smem_bytes;
    DriverStream stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfig;

typedef DriverResult (*GetProcAddress)(const char *symbol, void **address, int version, uint64_t flags,
                                       unsigned *status);

/* CALL(name, parameter list) for every entry point. */
#define DRIVER_CALLS(CALL)                                                                                            \
    CALL(cuInit, (unsigned flags))                                                                                    \
    CALL(cuDriverGetVersion, (int *version))                                                                          \
    CALL(cuGetErrorName, (DriverResult result, const char **name))                                                    \
    CALL(cuGetErrorString, (DriverResult result, const char **text))                                                  \
    CALL(cuDeviceGet, (int *device, int ordinal))                                                                     \
    CALL(cuDevicePrimaryCtxRetain, (DriverContext *context, int device))                                              \
    CALL(cuCtxGetCurrent, (DriverContext *context))                                                                   \
    CALL(cuCtxPushCurrent, (DriverContext context))                                                                   \
    CALL(cuCtxPopCurrent, (DriverContext *context))                                                                   \
    CALL(cuStreamIsCapturing, (DriverStream stream, unsigned *status))                                                \
    CALL(cuLibraryLoadData, (DriverLibrary *library, const void *code, unsigned *jit_options, void **jit_values,      \
                             unsigned jit_count, unsigned *options, void **values, unsigned count))                   \
    CALL(cuLibraryGetKernel, (DriverKernel *kernel, DriverLibrary library, const char *name))                         \
    CALL(cuKernelSetAttribute, (unsigned attribute, int value, DriverKernel kernel, int device))                      \
    CALL(cuKernelGetFunction, (DriverFunction *function, DriverKernel kernel))                                        \
    CALL(cuTensorMapEncodeTiled, (struct CUtensorMap_st *map, unsigned element_type, uint32_t rank, void *address,    \
                                  const uint64_t *sizes, const uint64_t *strides_bytes, const uint32_t *box,          \
                                  const uint32_t *element_steps, unsigned interleave, unsigned swizzle,               \
                                  unsigned l2_promotion, unsigned oob_fill))                                          \
    CALL(cuTensorMapReplaceAddress, (struct CUtensorMap_st *map, void *address))                                      \
    CALL(cuLaunchKernelEx, (const struct CUlaunchConfig_st *config, DriverFunction function, void **arguments,        \
                            void **extra))

#endif
