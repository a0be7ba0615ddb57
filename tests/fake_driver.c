/* A libcuda.so.1 without a GPU: it writes down what the launcher asks for.
 *
 * Built and loaded by test_launcher.py, in a process of its own. Every call prints one line to standard output, unless
 * FAKE_DRIVER_QUIET is set; FAKE_DRIVER_FAIL="cuLaunchKernelEx=719" makes that call fail, FAKE_DRIVER_LACKS="cuInit"
 * hides an entry point. Calls that work in the current context fail where there is none, as the real driver's do.
 *
 * A tensor map is its address, then what it was encoded with, in words of 8 bytes. A launch shows `fake_params_bytes`
 * bytes of the kernel's argument.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../csrc/driver.h"

#define DECLARE(name, parameters) DriverResult name parameters;
DRIVER_CALLS(DECLARE)

enum {
    INVALID_CONTEXT = 201,
    UNKNOWN_ERROR = 9999, /* for which the driver has neither name nor text */
    MOST_CONTEXTS = 8,
    MOST_PARAMS_BYTES = 4096,
};

unsigned fake_params_bytes;

/* Of this thread: the contexts pushed, above the first of them, which is none. */
static _Thread_local DriverContext contexts[MOST_CONTEXTS];
static _Thread_local int pushed;

static bool needs_context(const char *call)
{
    static const char *const calls[] = {"cuKernelGetFunction", "cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress",
                                        "cuLaunchKernelEx"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (strcmp(call, calls[i]) == 0)
            return true;
    return false;
}

static bool is_quiet(void)
{
    return getenv("FAKE_DRIVER_QUIET") != NULL;
}

/* Prints "call details" and returns what the call shall return. */
static DriverResult record(const char *call, const char *details, ...)
{
    if (!is_quiet()) {
        char line[1024 + 2 * MOST_PARAMS_BYTES];
        va_list values;
        va_start(values, details);
        vsnprintf(line, sizeof line, details, values);
        va_end(values);
        printf("%s %s\n", call, line); /* one call: threads do not mix within a line */
        fflush(stdout);
    }
    if (contexts[pushed] == NULL && needs_context(call))
        return INVALID_CONTEXT;

    const char *fail = getenv("FAKE_DRIVER_FAIL");
    size_t length = strlen(call);
    return fail && strncmp(fail, call, length) == 0 && fail[length] == '=' ? (unsigned)atoi(fail + length + 1) : 0;
}

DriverResult cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, unsigned *status)
{
    const char *lacks = getenv("FAKE_DRIVER_LACKS");
    *status = 0;
    *address = lacks && strcmp(lacks, symbol) == 0 ? NULL : dlsym(RTLD_DEFAULT, symbol);
    return version == DRIVER_API_VERSION && flags == PROC_ADDRESS_LEGACY_STREAM ? 0 : 1;
}

DriverResult cuInit(unsigned flags)
{
    return record("cuInit", "%u", flags);
}

DriverResult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return record("cuDriverGetVersion", "");
}

DriverResult cuGetErrorName(DriverResult result, const char **name)
{
    *name = result == UNKNOWN_ERROR ? NULL : "CUDA_ERROR_NAME";
    return *name == NULL;
}

DriverResult cuGetErrorString(DriverResult result, const char **text)
{
    *text = result == UNKNOWN_ERROR ? NULL : "the driver's text";
    return *text == NULL;
}

DriverResult cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return record("cuDeviceGet", "%d", ordinal);
}

DriverResult cuDevicePrimaryCtxRetain(DriverContext *context, int device)
{
    *context = (DriverContext)(uintptr_t)(0xC0 + device);
    return record("cuDevicePrimaryCtxRetain", "%d", device);
}

/* Stream 0x77 is being captured. */
DriverResult cuStreamIsCapturing(DriverStream stream, unsigned *status)
{
    *status = (uintptr_t)stream == 0x77;
    return record("cuStreamIsCapturing", "%p", (void *)stream);
}

DriverResult cuCtxGetCurrent(DriverContext *context)
{
    *context = contexts[pushed];
    return record("cuCtxGetCurrent", "");
}

DriverResult cuCtxPushCurrent(DriverContext context)
{
    if (pushed + 1 < MOST_CONTEXTS)
        contexts[++pushed] = context;
    return record("cuCtxPushCurrent", "%p", (void *)context);
}

DriverResult cuCtxPopCurrent(DriverContext *context)
{
    *context = contexts[pushed];
    pushed -= pushed > 0;
    return record("cuCtxPopCurrent", "");
}

DriverResult cuLibraryLoadData(DriverLibrary *library, const void *code, unsigned *jit_options, void **jit_values,
                               unsigned jit_count, unsigned *options, void **values, unsigned count)
{
    (void)jit_options, (void)jit_values, (void)options, (void)values;
    *library = (DriverLibrary)0x11B;
    return record("cuLibraryLoadData", "%.4s options %u", (const char *)code + 1, jit_count + count);
}

DriverResult cuLibraryGetKernel(DriverKernel *kernel, DriverLibrary library, const char *name)
{
    *kernel = (DriverKernel)0x4E1;
    return record("cuLibraryGetKernel", "%p %s", (void *)library, name);
}

DriverResult cuKernelSetAttribute(unsigned attribute, int value, DriverKernel kernel, int device)
{
    return record("cuKernelSetAttribute", "%u=%d %p device %d", attribute, value, (void *)kernel, device);
}

DriverResult cuKernelGetFunction(DriverFunction *function, DriverKernel kernel)
{
    *function = (DriverFunction)0xF;
    return record("cuKernelGetFunction", "%p", (void *)kernel);
}

DriverResult cuTensorMapEncodeTiled(struct CUtensorMap_st *map, unsigned element_type, uint32_t rank, void *address,
                                    const uint64_t *sizes, const uint64_t *strides_bytes, const uint32_t *box,
                                    const uint32_t *element_steps, unsigned interleave, unsigned swizzle,
                                    unsigned l2_promotion, unsigned oob_fill)
{
    uint64_t *words = (uint64_t *)map;
    memset(words, 0, MAP_BYTES);
    words[0] = (uintptr_t)address;
    words[1] = (uint64_t)element_type << 32 | rank << 24 | interleave << 16 | swizzle << 8 | l2_promotion << 4 | oob_fill;
    for (uint32_t i = 0; i < rank; i++) {
        words[2 + i] = sizes[i];
        words[11 + i] = (uint64_t)element_steps[i] << 32 | box[i];
        if (i + 1 < rank)
            words[7 + i] = strides_bytes[i];
    }
    return record("cuTensorMapEncodeTiled",
                  "%p type %u rank %u sizes %" PRIu64 ",%" PRIu64 " stride %" PRIu64 " box %u,%u steps %u,%u "
                  "interleave %u swizzle %u promotion %u fill %u misaligned %d",
                  address, element_type, rank, sizes[0], rank > 1 ? sizes[1] : 0, rank > 1 ? strides_bytes[0] : 0,
                  box[0], rank > 1 ? box[1] : 0, element_steps[0], rank > 1 ? element_steps[1] : 0, interleave, swizzle,
                  l2_promotion, oob_fill, (int)((uintptr_t)map % MAP_ALIGNMENT_BYTES));
}

DriverResult cuTensorMapReplaceAddress(struct CUtensorMap_st *map, void *address)
{
    *(uint64_t *)map = (uintptr_t)address;
    return record("cuTensorMapReplaceAddress", "%p misaligned %d", address,
                  (int)((uintptr_t)map % MAP_ALIGNMENT_BYTES));
}

/* The value of the attribute `id`, 0 where it is not given. */
static int attribute_value(const LaunchConfig *config, unsigned id)
{
    for (unsigned i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].id == id)
            return *(const int *)&config->attributes[i].value;
    return 0;
}

DriverResult cuLaunchKernelEx(const struct CUlaunchConfig_st *config, DriverFunction function, void **arguments,
                              void **extra)
{
    const LaunchConfig *launch = (const LaunchConfig *)config;
    const unsigned char *params = arguments[0];
    char hex[2 * MOST_PARAMS_BYTES + 1] = "";
    for (unsigned i = 0; i < fake_params_bytes && !is_quiet(); i++)
        sprintf(hex + 2 * i, "%02x", params[i]);
    return record("cuLaunchKernelEx",
                  "%p context %p grid %u,%u,%u block %u,%u,%u smem %u stream %p attributes %u cluster %d pdl %d "
                  "extra %p params %s",
                  (void *)function, (void *)contexts[pushed], launch->grid_x, launch->grid_y, launch->grid_z,
                  launch->block_x, launch->block_y, launch->block_z, launch->smem_bytes, (void *)launch->stream,
                  launch->attribute_count, attribute_value(launch, LAUNCH_CLUSTER_DIMENSION),
                  attribute_value(launch, LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION), (void *)extra, hex);
}
