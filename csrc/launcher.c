/* deep_tile._launcher: load a cubin, prepare a launch, launch it.
 *
 * Called by plan.py and api.py. Each step does what the next one need not repeat:
 *
 *   load(cubin, ...)     -> Kernel        once per kernel and device: may take milliseconds
 *   prepare(kernel, ...) -> Launch        once per problem: checks every number
 *   bind(prepared, ...)  -> BoundLaunch   once per weights, for a Plan
 *
 * and each call points the prepared tensor maps at its tensors and launches, leaving nothing behind:
 *
 *   launch_known(table, options, tensors) finds the Launch by the call's options and the tensors' signature
 *   launch_bound(bound, tensors)          holds the tensors against the one signature that it was bound with
 *   launch(prepared, addresses, stream)   whatever the tensors are
 *
 * Of tensors it knows what DLPack says, and by a word of their own that they are plain; it judges none of it. Which
 * signatures are right is decided in Python, once for each, and what it has not met or cannot read it leaves to Python.
 *
 * Invariant: libcuda is opened by the first load() or driver_version(), never by the import, so that importing works
 * without a driver and survives fork.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <elf.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "../include/deep_tile/params.h"
#include "dlpack.h"
#include "driver.h"

_Static_assert(sizeof(TensorMap) == 128, "the driver writes 128 bytes into a tensor map");

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ------------------------------------------------------------------------------------------------ the driver ---- */

#define DECLARE_CALL(name, parameters) DriverResult(*name) parameters;
typedef struct {
    DRIVER_CALLS(DECLARE_CALL)
} Driver;

static Driver driver;
static char driver_problem[512]; /* why `driver` cannot be used; empty when it can */
static pthread_once_t driver_opened = PTHREAD_ONCE_INIT;

#define REQUIRED_DRIVER "the NVIDIA driver: 525 or newer for CUDA 12, 580 or newer for CUDA 13"

static bool find_entry_point(GetProcAddress get_proc_address, const char *name, size_t offset)
{
    void *address = NULL;
    unsigned status;
    DriverResult result = get_proc_address(name, &address, DRIVER_API_VERSION, PROC_ADDRESS_LEGACY_STREAM, &status);
    memcpy((char *)&driver + offset, &address, sizeof address);
    return result == 0 && address != NULL;
}

static void open_driver(void)
{
#define LOCATE_CALL(name, parameters) {#name, offsetof(Driver, name)},
    static const struct {
        const char *name;
        size_t offset;
    } entry_points[] = {DRIVER_CALLS(LOCATE_CALL)};

    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        PyOS_snprintf(driver_problem, sizeof driver_problem, "the CUDA driver cannot be opened (%s); install %s",
                      dlerror(), REQUIRED_DRIVER);
        return;
    }
    GetProcAddress get_proc_address;
    void *address = dlsym(library, "cuGetProcAddress_v2");
    memcpy(&get_proc_address, &address, sizeof address);
    for (size_t i = 0; i < COUNT_OF(entry_points); i++) {
        if (address == NULL || !find_entry_point(get_proc_address, entry_points[i].name, entry_points[i].offset)) {
            PyOS_snprintf(driver_problem, sizeof driver_problem, "the CUDA driver has no %s; update %s",
                          address == NULL ? "cuGetProcAddress_v2" : entry_points[i].name, REQUIRED_DRIVER);
            return;
        }
    }
}

/* Opens the driver on first use; false with RuntimeError set when that cannot be done. */
static bool require_driver(void)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_once(&driver_opened, open_driver);
    Py_END_ALLOW_THREADS
    if (driver_problem[0] == '\0')
        return true;
    PyErr_SetString(PyExc_RuntimeError, driver_problem);
    return false;
}

/* The first driver call that failed, kept until the GIL is held again. */
typedef struct {
    const char *call; /* NULL: none failed */
    DriverResult result;
} Failure;

static bool succeeded(Failure *failure, const char *call, DriverResult result)
{
    if (result != 0 && failure->call == NULL)
        *failure = (Failure){call, result};
    return result == 0;
}

#define CALL(failure, name, ...) succeeded(failure, #name, driver.name(__VA_ARGS__))

static const char *remedy(DriverResult result)
{
    switch (result) {
    case ERROR_NOT_INITIALIZED:
        return "; CUDA cannot be used in a process forked after CUDA had started: start workers with 'spawn'";
    case ERROR_NO_DEVICE:
        return "; no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    case ERROR_INVALID_DEVICE:
        return "; there is no such GPU: check the device index and CUDA_VISIBLE_DEVICES";
    case ERROR_NO_BINARY_FOR_GPU:
        return "; the kernels are built for sm_90a and run on Hopper GPUs only";
    case ERROR_INVALID_IMAGE:
    case ERROR_INVALID_SOURCE:
        return "; the cubin is damaged or newer than the driver: clear the kernel cache, or update " REQUIRED_DRIVER;
    case ERROR_INVALID_HANDLE:
        return "; the stream must belong to the kernel's device";
    case ERROR_NOT_FOUND:
        return "; the cubin holds no kernel of that name";
    default:
        return "";
    }
}

/* Whether a kernel of this process, or the GPU under it, failed earlier. Every call reports that from then on. */
static bool is_sticky(DriverResult result)
{
    switch (result) {
    case ERROR_ECC_UNCORRECTABLE:
    case ERROR_NVLINK_UNCORRECTABLE:
    case ERROR_CONTAINED:
    case ERROR_ILLEGAL_ADDRESS:
    case ERROR_LAUNCH_TIMEOUT:
    case ERROR_ASSERT:
    case ERROR_HARDWARE_STACK_ERROR:
    case ERROR_ILLEGAL_INSTRUCTION:
    case ERROR_MISALIGNED_ADDRESS:
    case ERROR_INVALID_ADDRESS_SPACE:
    case ERROR_INVALID_PC:
    case ERROR_LAUNCH_FAILED:
    case ERROR_TENSOR_MEMORY_LEAK:
        return true;
    default:
        return false;
    }
}

/* Sets RuntimeError; `kernel_name` may be NULL. Returns NULL for the caller to return. */
static PyObject *raise_failure(const Failure *failure, PyObject *kernel_name)
{
    const char *name = NULL, *text = NULL; /* and so they stay for a code that the driver does not know */
    driver.cuGetErrorName(failure->result, &name);
    driver.cuGetErrorString(failure->result, &text);
    name = name ? name : "unknown error";
    text = text ? text : "no description";
    PyObject *subject = kernel_name ? PyUnicode_FromFormat(" for kernel %U", kernel_name) : PyUnicode_FromString("");
    if (subject != NULL && is_sticky(failure->result))
        PyErr_Format(PyExc_RuntimeError,
                     "an earlier kernel of this process failed: %s (%u), %s; %s%U only met it. CUDA is of no more use to "
                     "this process: start another, and find that kernel with compute-sanitizer or CUDA_LAUNCH_BLOCKING=1",
                     name, failure->result, text, failure->call, subject);
    else if (subject != NULL)
        PyErr_Format(PyExc_RuntimeError, "%s failed%U: %s (%u), %s%s", failure->call, subject, name, failure->result,
                     text, remedy(failure->result));
    Py_XDECREF(subject);
    return NULL;
}

/* Makes `context` current unless it is, for the calls that work in whichever context is current: a thread that has not
 * used the GPU yet has none, and one that uses another GPU another. False, with nothing to leave, if that fails. */
static bool enter_context(Failure *failure, DriverContext context, bool *pushed)
{
    DriverContext current;
    *pushed = false;
    if (!CALL(failure, cuCtxGetCurrent, &current))
        return false;
    if (current == context)
        return true;
    *pushed = CALL(failure, cuCtxPushCurrent, context);
    return *pushed;
}

static void leave_context(Failure *failure, bool pushed)
{
    DriverContext popped;
    if (pushed)
        (void)CALL(failure, cuCtxPopCurrent, &popped);
}

/* -------------------------------------------------------------------------------------------- types and module ---- */

/* A kernel loaded on one device. Its library is never unloaded: kernels are a finite set, and at interpreter exit the
 * driver may be gone before its last Kernel; leaking a library then is better than a crash. */
typedef struct {
    PyObject_HEAD
    PyObject *name;
    DriverContext context; /* the device's primary context, which torch uses too */
    DriverFunction function;
    int device;
    int smem_bytes;
    int registers;
    int local_bytes;
} Kernel;

typedef struct {
    uint64_t sizes[2]; /* inner, outer */
    uint64_t outer_stride_bytes;
    uint32_t box[2];
    unsigned element_type;
    unsigned swizzle;
    unsigned l2_promotion;
} MapLayout;

/* All of a launch but the addresses. */
typedef struct {
    PyObject_HEAD
    Kernel *kernel;
    bool has_out_map;
    bool pdl;
    unsigned grid, cluster, threads;
    unsigned char params[sizeof(GemmParams)]; /* bytes, because Python aligns objects to 16 and GemmParams wants 64 */
} Launch;

enum { A, A_SCALE, B, B_SCALE, OUT, STREAM, ADDRESSES, TENSORS = STREAM };

static const char *const address_names[ADDRESSES] = {"a", "a_scale", "b", "b_scale", "out", "stream"};

enum { TMA_ALIGNMENT_BYTES = 16 };

/* All that the checks in api.py read of a call's tensors, as bytes to compare: whoever changes the one changes the
 * other. Of `out`'s address they read whether TMA can use it, of other addresses nothing that launching does not check
 * again. */
typedef struct {
    TensorDevice device; /* of every tensor */
    TensorDtype dtypes[TENSORS];
    uint32_t out_is_aligned;
    struct {
        int64_t shape[2], strides[2];
    } layouts[TENSORS];
} Signature;

_Static_assert(sizeof(Signature) == 8 + 4 * TENSORS + 4 + 32 * TENSORS, "padding would be compared, too");

/* A launch of one weight matrix: what launch_bound() need not read again. */
typedef struct {
    PyObject_HEAD
    Launch *prepared;
    Signature signature;
    uintptr_t b, b_scale;
} BoundLaunch;

/* Where a tensor says what it is besides memory: a word of bits in its library's own object, whose address the Python
 * object holds. A tensor with other bits than `plain` is more than DLPack tells of it. */
typedef struct {
    Py_ssize_t object_offset, keys_offset;
    uint64_t plain; /* 0: of this type every tensor is plain */
} KeysPlace;

/* A type whose instances can be read through DLPack; a subclass is another type. */
typedef struct {
    PyTypeObject *type;
    const Exchange *exchange;
    KeysPlace keys;
} TensorType;

enum { MAX_TENSOR_TYPES = 4 };

typedef struct {
    PyTypeObject *kernel_type;
    PyTypeObject *launch_type;
    PyTypeObject *bound_launch_type;
    TensorType tensor_types[MAX_TENSOR_TYPES];
    int tensor_type_count;
} ModuleState;

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_memory(self);
    Py_DECREF(type); /* instances of heap types own a reference to their type */
}

static void kernel_dealloc(PyObject *self)
{
    Py_XDECREF(((Kernel *)self)->name);
    free_object(self);
}

static void launch_dealloc(PyObject *self)
{
    Py_XDECREF((PyObject *)((Launch *)self)->kernel);
    free_object(self);
}

static void bound_launch_dealloc(PyObject *self)
{
    Py_XDECREF((PyObject *)((BoundLaunch *)self)->prepared);
    free_object(self);
}

/* ------------------------------------------------------------------------------------------------------- load ---- */

/* Whether `size` bytes hold all that the ELF header speaks of. The driver is told no size and would read on. */
static bool is_whole_cubin(const char *cubin, Py_ssize_t size)
{
    Elf64_Ehdr header;
    if (size < (Py_ssize_t)sizeof header || memcmp(cubin, ELFMAG, SELFMAG) != 0)
        return false;
    memcpy(&header, cubin, sizeof header);
    uint64_t available = (uint64_t)size;
    uint64_t sections_bytes = (uint64_t)header.e_shnum * header.e_shentsize;
    uint64_t segments_bytes = (uint64_t)header.e_phnum * header.e_phentsize;
    return header.e_shoff <= available && sections_bytes <= available - header.e_shoff &&
           header.e_phoff <= available && segments_bytes <= available - header.e_phoff;
}

/* Loads into the current context, now: nothing is left for a later launch to do, which may be captured in a graph. */
static bool load_here(Failure *failure, Kernel *kernel, int device, const char *cubin, const char *name)
{
    DriverLibrary library;
    DriverKernel handle;
    /* With no options given the driver keeps its own copy of the cubin. */
    return CALL(failure, cuLibraryLoadData, &library, cubin, NULL, NULL, 0, NULL, NULL, 0) &&
           CALL(failure, cuLibraryGetKernel, &handle, library, name) &&
           CALL(failure, cuKernelSetAttribute, FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->smem_bytes, handle,
                device) &&
           CALL(failure, cuKernelGetFunction, &kernel->function, handle) &&
           CALL(failure, cuFuncGetAttribute, &kernel->registers, FUNC_NUM_REGS, kernel->function) &&
           CALL(failure, cuFuncGetAttribute, &kernel->local_bytes, FUNC_LOCAL_SIZE_BYTES, kernel->function);
}

/* The primary context is retained and never released, as the library in it is never unloaded. */
static void load_on_device(Failure *failure, Kernel *kernel, const char *cubin, const char *name)
{
    int device;
    bool pushed;
    bool entered = CALL(failure, cuInit, 0) && CALL(failure, cuDeviceGet, &device, kernel->device) &&
                   CALL(failure, cuDevicePrimaryCtxRetain, &kernel->context, device) &&
                   enter_context(failure, kernel->context, &pushed);
    if (!entered)
        return;
    load_here(failure, kernel, device, cubin, name);
    leave_context(failure, pushed);
}

PyDoc_STRVAR(load_doc, "load(cubin: bytes, name: str, smem_bytes: int, device: int) -> Kernel\n"
                       "\n"
                       "Load kernel `name` on GPU `device`, with `smem_bytes` of dynamic shared memory per block.\n"
                       "\n"
                       "Raises ValueError for a torn cubin or a negative number, RuntimeError for whatever the\n"
                       "driver refuses. The GIL is released meanwhile.");

static PyObject *load(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"cubin", "name", "smem_bytes", "device", NULL};
    PyObject *cubin, *name;
    int smem_bytes, device;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "SUii:load", keywords, &cubin, &name, &smem_bytes, &device))
        return NULL;
    const char *code = PyBytes_AsString(cubin);
    if (!is_whole_cubin(code, PyBytes_Size(cubin)))
        return PyErr_Format(PyExc_ValueError, "load: cubin is no whole ELF file (%zd bytes); compile %U again",
                            PyBytes_Size(cubin), name);
    if (smem_bytes < 0 || device < 0)
        return PyErr_Format(PyExc_ValueError, "load: smem_bytes is %d and device is %d, want neither negative",
                            smem_bytes, device);
    const char *name_text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (name_text == NULL || !require_driver())
        return NULL;

    ModuleState *state = PyModule_GetState(module);
    Kernel *kernel = (Kernel *)PyType_GenericAlloc(state->kernel_type, 0);
    if (kernel == NULL)
        return NULL;
    Py_INCREF(name);
    kernel->name = name;
    kernel->smem_bytes = smem_bytes;
    kernel->device = device;

    Failure failure = {NULL, 0};
    Py_BEGIN_ALLOW_THREADS
    load_on_device(&failure, kernel, code, name_text);
    Py_END_ALLOW_THREADS
    if (failure.call == NULL)
        return (PyObject *)kernel;
    raise_failure(&failure, name);
    Py_DECREF((PyObject *)kernel);
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------- prepare ---- */

typedef struct {
    const char *name;
    long long low, high;
} Field;

/* Reads `value` into `*number`; ValueError or TypeError names the field, as "group.name" where there is a group. */
static bool read_number(PyObject *value, const char *group, const Field *field, long long *number)
{
    const char *dot = group[0] == '\0' ? "" : ".";
    int overflow = 0;
    *number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "prepare: %s%s%s is %R, want an int", group, dot, field->name, value);
        return false;
    }
    if (overflow == 0 && *number >= field->low && *number <= field->high)
        return true;
    PyErr_Format(PyExc_ValueError, "prepare: %s%s%s is %R, want %lld to %lld", group, dot, field->name, value,
                 field->low, field->high);
    return false;
}

enum { ELEMENT_BYTES, INNER, OUTER, OUTER_STRIDE_BYTES, BOX_INNER, BOX_OUTER, SWIZZLE_BYTES, MAP_NUMBERS };

/* TMA's own limits. */
static const Field map_fields[MAP_NUMBERS] = {
    [ELEMENT_BYTES] = {"element_bytes", 1, 2},
    [INNER] = {"inner", 1, 1LL << 32},
    [OUTER] = {"outer", 1, 1LL << 32},
    [OUTER_STRIDE_BYTES] = {"outer_stride_bytes", 16, (1LL << 40) - 16},
    [BOX_INNER] = {"box_inner", 1, 256},
    [BOX_OUTER] = {"box_outer", 1, 256},
    [SWIZZLE_BYTES] = {"swizzle_bytes", 0, 128},
};

/* What L2 fetches of an operand when a part of it is missing: a row of a K block. Twice that, the next K block's row as
 * well, makes decode 1.5 % slower in the mean, up to 6 %; at m > 128 the two are even (H200, 2026-11-22). */
enum { operand_promotion = MAP_L2_PROMOTION_128B };

static int swizzle_mode(long long swizzle_bytes)
{
    switch (swizzle_bytes) {
    case 0:
        return MAP_SWIZZLE_NONE;
    case 32:
        return MAP_SWIZZLE_32B;
    case 64:
        return MAP_SWIZZLE_64B;
    case 128:
        return MAP_SWIZZLE_128B;
    default:
        return -1;
    }
}

/* The limits of a map that tie several of its numbers together. */
static bool check_map(const char *map_name, const long long numbers[])
{
    long long stride_bytes = numbers[OUTER_STRIDE_BYTES], swizzle_bytes = numbers[SWIZZLE_BYTES];
    long long box_bytes = numbers[BOX_INNER] * numbers[ELEMENT_BYTES];
    if (stride_bytes % 16 != 0)
        PyErr_Format(PyExc_ValueError, "prepare: %s.outer_stride_bytes is %lld, want a multiple of 16", map_name,
                     stride_bytes);
    else if (swizzle_mode(swizzle_bytes) < 0)
        PyErr_Format(PyExc_ValueError, "prepare: %s.swizzle_bytes is %lld, want 0, 32, 64 or 128", map_name,
                     swizzle_bytes);
    else if (box_bytes % 16 != 0)
        PyErr_Format(PyExc_ValueError, "prepare: %s.box_inner is %lld bytes, want a multiple of 16", map_name,
                     box_bytes);
    else if (swizzle_bytes != 0 && box_bytes > swizzle_bytes)
        PyErr_Format(PyExc_ValueError, "prepare: %s.box_inner is %lld bytes, want at most swizzle_bytes, %lld",
                     map_name, box_bytes, swizzle_bytes);
    return !PyErr_Occurred();
}

static bool read_map(PyObject *given, const char *map_name, unsigned l2_promotion, MapLayout *layout)
{
    if (!PyTuple_Check(given) || PyTuple_Size(given) != MAP_NUMBERS) {
        PyErr_Format(PyExc_TypeError,
                     "prepare: %s is %R, want a tuple (element_bytes, inner, outer, outer_stride_bytes, box_inner, "
                     "box_outer, swizzle_bytes)",
                     map_name, given);
        return false;
    }
    long long numbers[MAP_NUMBERS];
    for (int i = 0; i < MAP_NUMBERS; i++)
        if (!read_number(PyTuple_GetItem(given, i), map_name, &map_fields[i], &numbers[i]))
            return false;
    if (!check_map(map_name, numbers))
        return false;
    *layout = (MapLayout){
        .sizes = {(uint64_t)numbers[INNER], (uint64_t)numbers[OUTER]},
        .outer_stride_bytes = (uint64_t)numbers[OUTER_STRIDE_BYTES],
        .box = {(uint32_t)numbers[BOX_INNER], (uint32_t)numbers[BOX_OUTER]},
        .element_type = numbers[ELEMENT_BYTES] == 1 ? MAP_UINT8 : MAP_BFLOAT16,
        .swizzle = (unsigned)swizzle_mode(numbers[SWIZZLE_BYTES]),
        .l2_promotion = l2_promotion,
    };
    return true;
}

enum {
    GRID,
    CLUSTER,
    THREADS,
    A_TAIL_ROWS,
    B_TAIL_ROWS,
    NARROW_ROWS,
    NARROW_COLUMNS,
    A_SCALE_STRIDE_M,
    A_SCALE_STRIDE_K,
    B_SCALE_STRIDE_N,
    B_SCALE_STRIDE_K,
    OUT_STRIDE_M,
    SIZE_M,
    SIZE_N,
    SIZE_K,
    RASTER_ROWS_LOG2,
    LAST_ROWS_RECIPROCAL,
    LAUNCH_NUMBERS
};

static const Field launch_fields[LAUNCH_NUMBERS] = {
    [GRID] = {"grid", 1, INT_MAX},
    [CLUSTER] = {"cluster", 1, 8},
    [THREADS] = {"threads", 1, 1024},
    [A_TAIL_ROWS] = {"a_tail_rows", 0, 256},
    [B_TAIL_ROWS] = {"b_tail_rows", 0, 256},
    [NARROW_ROWS] = {"narrow_rows", 0, 256},
    [NARROW_COLUMNS] = {"narrow_columns", 0, INT_MAX},
    [A_SCALE_STRIDE_M] = {"a_scale_strides[0]", 0, LLONG_MAX},
    [A_SCALE_STRIDE_K] = {"a_scale_strides[1]", 0, LLONG_MAX},
    [B_SCALE_STRIDE_N] = {"b_scale_strides[0]", 0, LLONG_MAX},
    [B_SCALE_STRIDE_K] = {"b_scale_strides[1]", 0, LLONG_MAX},
    [OUT_STRIDE_M] = {"out_stride_m", 0, LLONG_MAX},
    [SIZE_M] = {"m", 1, INT_MAX},
    [SIZE_N] = {"n", 1, INT_MAX},
    [SIZE_K] = {"k", 1, INT_MAX},
    [RASTER_ROWS_LOG2] = {"raster_rows_log2", 1, 4},
    [LAST_ROWS_RECIPROCAL] = {"last_rows_reciprocal", 1, 1ll << 31},
};

static long long scale_blocks(long long size)
{
    return (size + 127) / 128;
}

/* Kernels count bytes from a scale's first element in 32 bits. In floating point, where strides cannot overflow. */
static bool check_scale(const char *name, long long outer, long long outer_stride, long long inner,
                        long long inner_stride)
{
    const long long furthest = UINT32_MAX / sizeof(float);
    const double last = (double)(outer - 1) * (double)outer_stride + (double)(inner - 1) * (double)inner_stride;
    if (last <= (double)furthest)
        return true;
    PyErr_Format(PyExc_ValueError,
                 "prepare: the last element of %s is more than %lld elements from its first, with strides (%lld, %lld); "
                 "make it contiguous",
                 name, furthest, outer_stride, inner_stride);
    return false;
}

static bool read_launch_numbers(PyObject *const given[], long long numbers[])
{
    for (int i = 0; i < LAUNCH_NUMBERS; i++)
        if (!read_number(given[i], "", &launch_fields[i], &numbers[i]))
            return false;
    if (numbers[GRID] % numbers[CLUSTER] != 0) {
        PyErr_Format(PyExc_ValueError, "prepare: grid is %lld, want a multiple of cluster, %lld", numbers[GRID],
                     numbers[CLUSTER]);
        return false;
    }
    if (numbers[NARROW_COLUMNS] > 0 && numbers[NARROW_ROWS] == 0) {
        PyErr_Format(PyExc_ValueError, "prepare: narrow_rows is 0, want box_outer of %lld narrow_columns",
                     numbers[NARROW_COLUMNS]);
        return false;
    }
    const long long k_blocks = scale_blocks(numbers[SIZE_K]);
    return check_scale("a_scale", numbers[SIZE_M], numbers[A_SCALE_STRIDE_M], k_blocks, numbers[A_SCALE_STRIDE_K]) &&
           check_scale("b_scale", scale_blocks(numbers[SIZE_N]), numbers[B_SCALE_STRIDE_N], k_blocks,
                       numbers[B_SCALE_STRIDE_K]);
}

/* A last tile of fewer rows than the others has a map of its own, which the kernel takes for granted: without one it
 * stops, and with rows that do not fit it waits for ever. Of a tile that two blocks share the box is half. */
static bool check_tail_rows(const char *name, long long rows, const char *map_name, const MapLayout *map,
                            long long narrow_outer)
{
    long long outer = (long long)map->sizes[1] - narrow_outer, box = map->box[1];
    if (outer < 0)
        PyErr_Format(PyExc_ValueError, "prepare: narrow_columns of narrow_rows are %lld rows, want at most %s.outer, %lld",
                     narrow_outer, map_name, outer + narrow_outer);
    else if (rows > box)
        PyErr_Format(PyExc_ValueError, "prepare: %s is %lld, want at most %s.box_outer, %lld", name, rows, map_name,
                     box);
    else if (rows == 0 && outer % box != 0)
        PyErr_Format(PyExc_ValueError, "prepare: %s is 0, want what is left of %s.outer, %lld, beside boxes of %lld",
                     name, map_name, outer, box);
    return !PyErr_Occurred();
}

/* For an address that launching puts in. */
static bool encode_map(Failure *failure, TensorMap *map, const MapLayout *layout)
{
    static const uint32_t element_steps[2] = {1, 1};
    void *any_aligned_address = (void *)sizeof(TensorMap);
    return CALL(failure, cuTensorMapEncodeTiled, (struct CUtensorMap_st *)map, layout->element_type, 2,
                any_aligned_address, layout->sizes, &layout->outer_stride_bytes, layout->box, element_steps,
                MAP_INTERLEAVE_NONE, layout->swizzle, layout->l2_promotion, MAP_OOB_FILL_ZEROS);
}

/* The map of tiles of an operand that have `rows` rows and not as many as the others; 0: there are none. */
static bool encode_map_of(Failure *failure, TensorMap *map, const MapLayout *operand, long long rows)
{
    MapLayout layout = *operand;
    layout.box[1] = (uint32_t)rows;
    return rows == 0 || encode_map(failure, map, &layout);
}

/* How many rows' scales TMA can copy, if they begin at a multiple of 16 bytes. */
static int bulk_scale_rows(const long long numbers[])
{
    const long long step = TMA_ALIGNMENT_BYTES / sizeof(float);
    bool adjacent = numbers[A_SCALE_STRIDE_M] == 1 && numbers[A_SCALE_STRIDE_K] % step == 0;
    return adjacent ? (int)numbers[SIZE_M] : 0;
}

/* Encodes the maps, in the kernel's context; `out_map` is NULL where the kernel has none. */
static bool fill_template(Failure *failure, Launch *launch, const long long numbers[], bool early_b,
                          const MapLayout *a_map, const MapLayout *b_map, const MapLayout *out_map)
{
    GemmParams params = {
        .a_scale_stride_m = (unsigned)numbers[A_SCALE_STRIDE_M],
        .a_scale_stride_k = (unsigned)numbers[A_SCALE_STRIDE_K],
        .b_scale_stride_n = (unsigned)numbers[B_SCALE_STRIDE_N],
        .b_scale_stride_k = (unsigned)numbers[B_SCALE_STRIDE_K],
        .out_stride_m = numbers[OUT_STRIDE_M],
        .m = (int)numbers[SIZE_M],
        .n = (int)numbers[SIZE_N],
        .k = (int)numbers[SIZE_K],
        .a_tail_rows = (int)numbers[A_TAIL_ROWS],
        .b_tail_rows = (int)numbers[B_TAIL_ROWS],
        .narrow_columns = (int)numbers[NARROW_COLUMNS],
        .early_b = early_b,
        .bulk_scale_rows = bulk_scale_rows(numbers),
        .raster_rows_log2 = (int)numbers[RASTER_ROWS_LOG2],
        .last_rows_reciprocal = (unsigned)numbers[LAST_ROWS_RECIPROCAL],
    };
    bool encoded = encode_map(failure, &params.a_maps[0], a_map) && encode_map(failure, &params.b_maps[0], b_map) &&
                   encode_map_of(failure, &params.a_maps[1], a_map, numbers[A_TAIL_ROWS]) &&
                   encode_map_of(failure, &params.b_maps[1], b_map, numbers[B_TAIL_ROWS]) &&
                   encode_map_of(failure, &params.narrow_b_map, b_map, numbers[NARROW_ROWS]) &&
                   (out_map == NULL || encode_map(failure, &params.out_map, out_map));
    memcpy(launch->params, &params, sizeof params);
    return encoded;
}

PyDoc_STRVAR(prepare_doc,
             "prepare(kernel, *, grid, cluster, threads, a_map, b_map, out_map, a_tail_rows, b_tail_rows,\n"
             "        narrow_rows, narrow_columns, a_scale_strides, b_scale_strides, out_stride_m, m, n, k, pdl,\n"
             "        early_b, raster_rows_log2, last_rows_reciprocal)\n"
             "-> Launch\n"
             "\n"
             "Everything about a launch but the addresses.\n"
             "\n"
             "grid, cluster: blocks, and blocks per cluster; threads: per block. a_map, b_map, out_map: tensor maps\n"
             "(element_bytes, inner, outer, outer_stride_bytes, box_inner, box_outer, swizzle_bytes), with elements\n"
             "of 1 byte or of 2 (BF16); out_map is None for a kernel that stores directly. a_tail_rows, b_tail_rows:\n"
             "box_outer for the last tile of a or b if it has fewer rows than the others, or 0. narrow_rows: box_outer\n"
             "for b's narrow tiles, narrow_columns of which lie before the others; 0, 0: there are none. a_scale_strides\n"
             "(m, k), b_scale_strides (n, k) and out_stride_m are in elements. pdl: programmatic dependent launch,\n"
             "under which the kernel may request b before it waits for the preceding kernel if early_b is true.\n"
             "raster_rows_log2: of the rows of tiles that the raster descends before it steps along n, at most 16;\n"
             "last_rows_reciprocal: of the rows of cluster tiles in its last group, 2^31 / rows, rounded up.\n"
             "\n"
             "Raises ValueError or TypeError naming the field, what was seen and what is wanted, RuntimeError for\n"
             "whatever the driver refuses.");

static PyObject *prepare(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"",
                               "grid",
                               "cluster",
                               "threads",
                               "a_map",
                               "b_map",
                               "out_map",
                               "a_tail_rows",
                               "b_tail_rows",
                               "narrow_rows",
                               "narrow_columns",
                               "a_scale_strides",
                               "b_scale_strides",
                               "out_stride_m",
                               "m",
                               "n",
                               "k",
                               "pdl",
                               "early_b",
                               "raster_rows_log2",
                               "last_rows_reciprocal",
                               NULL};
    PyObject *kernel, *a_map, *b_map, *out_map, *given[LAUNCH_NUMBERS];
    int pdl, early_b;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$OOOOOOOOOO(OO)(OO)OOOOppOO:prepare", keywords, &kernel,
                                     &given[GRID], &given[CLUSTER], &given[THREADS], &a_map, &b_map, &out_map,
                                     &given[A_TAIL_ROWS], &given[B_TAIL_ROWS], &given[NARROW_ROWS],
                                     &given[NARROW_COLUMNS], &given[A_SCALE_STRIDE_M],
                                     &given[A_SCALE_STRIDE_K], &given[B_SCALE_STRIDE_N], &given[B_SCALE_STRIDE_K],
                                     &given[OUT_STRIDE_M], &given[SIZE_M], &given[SIZE_N], &given[SIZE_K], &pdl,
                                     &early_b, &given[RASTER_ROWS_LOG2], &given[LAST_ROWS_RECIPROCAL]))
        return NULL;

    long long numbers[LAUNCH_NUMBERS];
    MapLayout a_layout, b_layout, out_layout;
    bool has_out_map = out_map != Py_None;
    if (!read_launch_numbers(given, numbers) || !read_map(a_map, "a_map", operand_promotion, &a_layout) ||
        !read_map(b_map, "b_map", operand_promotion, &b_layout) ||
        (has_out_map && !read_map(out_map, "out_map", MAP_L2_PROMOTION_NONE, &out_layout)) ||
        !check_tail_rows("a_tail_rows", numbers[A_TAIL_ROWS], "a_map", &a_layout, 0) ||
        !check_tail_rows("b_tail_rows", numbers[B_TAIL_ROWS], "b_map", &b_layout,
                         numbers[NARROW_ROWS] * numbers[NARROW_COLUMNS]))
        return NULL;
    ModuleState *state = PyModule_GetState(module);
    if (Py_TYPE(kernel) != state->kernel_type)
        return PyErr_Format(PyExc_TypeError, "prepare: kernel is %R, want the Kernel that load() returned", kernel);

    Launch *launch = (Launch *)PyType_GenericAlloc(state->launch_type, 0);
    if (launch == NULL)
        return NULL;
    Py_INCREF(kernel);
    launch->kernel = (Kernel *)kernel;
    launch->has_out_map = has_out_map;
    launch->pdl = pdl != 0;
    launch->grid = (unsigned)numbers[GRID];
    launch->cluster = (unsigned)numbers[CLUSTER];
    launch->threads = (unsigned)numbers[THREADS];
    Failure failure = {NULL, 0};
    bool pushed;
    if (enter_context(&failure, launch->kernel->context, &pushed)) {
        (void)fill_template(&failure, launch, numbers, early_b != 0, &a_layout, &b_layout,
                            has_out_map ? &out_layout : NULL);
        leave_context(&failure, pushed);
    }
    if (failure.call == NULL)
        return (PyObject *)launch;
    raise_failure(&failure, launch->kernel->name);
    Py_DECREF(launch);
    return NULL;
}

/* ----------------------------------------------------------------------------------------------------- launch ---- */

/* Null is the address of a tensor without memory, and a kernel that touches it kills the context. */
static bool check_memory(const uintptr_t addresses[], int which)
{
    if (addresses[which] != 0)
        return true;
    PyErr_Format(PyExc_ValueError,
                 "launch: the address of %s is 0, want that of memory: pass a tensor whose storage is allocated",
                 address_names[which]);
    return false;
}

/* For an address that a tensor map is pointed at. */
static bool check_alignment(const uintptr_t addresses[], int which)
{
    int remainder = (int)(addresses[which] % TMA_ALIGNMENT_BYTES);
    if (remainder == 0)
        return true;
    PyErr_Format(PyExc_ValueError, "launch: the address of %s is %d modulo %d, want a multiple of %d for TMA",
                 address_names[which], remainder, TMA_ALIGNMENT_BYTES, TMA_ALIGNMENT_BYTES);
    return false;
}

static bool point_map(Failure *failure, TensorMap *map, uintptr_t address)
{
    return CALL(failure, cuTensorMapReplaceAddress, (struct CUtensorMap_st *)map, (void *)address);
}

static bool fill_params(Failure *failure, GemmParams *params, const Launch *launch, const uintptr_t addresses[])
{
    memcpy(params, launch->params, sizeof *params);
    params->a_scale = (const float *)addresses[A_SCALE];
    params->b_scale = (const float *)addresses[B_SCALE];
    params->out = (void *)addresses[OUT];
    if (addresses[A_SCALE] % TMA_ALIGNMENT_BYTES != 0)
        params->bulk_scale_rows = 0;
    return point_map(failure, &params->a_maps[0], addresses[A]) &&
           point_map(failure, &params->b_maps[0], addresses[B]) &&
           (params->a_tail_rows == 0 || point_map(failure, &params->a_maps[1], addresses[A])) &&
           (params->b_tail_rows == 0 || point_map(failure, &params->b_maps[1], addresses[B])) &&
           (params->narrow_columns == 0 || point_map(failure, &params->narrow_b_map, addresses[B])) &&
           (!launch->has_out_map || point_map(failure, &params->out_map, addresses[OUT]));
}

/* Everything lies on the stack: threads may launch at the same time. */
static void launch_here(Failure *failure, const Launch *launch, const uintptr_t addresses[])
{
    GemmParams params;
    if (!fill_params(failure, &params, launch, addresses))
        return;

    LaunchAttribute attributes[2];
    unsigned attribute_count = 0;
    if (launch->cluster > 1)
        attributes[attribute_count++] =
            (LaunchAttribute){.id = LAUNCH_CLUSTER_DIMENSION, .value.cluster_dim = {launch->cluster, 1, 1}};
    if (launch->pdl)
        attributes[attribute_count++] = (LaunchAttribute){.id = LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                          .value.programmatic_stream_serialization = 1};
    const LaunchConfig config = {
        .grid_x = launch->grid,
        .grid_y = 1,
        .grid_z = 1,
        .block_x = launch->threads,
        .block_y = 1,
        .block_z = 1,
        .smem_bytes = (unsigned)launch->kernel->smem_bytes,
        .stream = (DriverStream)addresses[STREAM],
        .attributes = attributes,
        .attribute_count = attribute_count,
    };
    void *arguments[] = {&params};
    (void)CALL(failure, cuLaunchKernelEx, (const struct CUlaunchConfig_st *)&config, launch->kernel->function,
               arguments, NULL);
}

static void launch_on_device(Failure *failure, const Launch *launch, const uintptr_t addresses[])
{
    bool pushed;
    if (!enter_context(failure, launch->kernel->context, &pushed))
        return;
    launch_here(failure, launch, addresses);
    leave_context(failure, pushed);
}

/* What every way to launch ends in. The caller owns `launch` meanwhile. False with an exception set if it fails. */
static bool launch_at(const Launch *launch, const uintptr_t addresses[])
{
    for (int which = A; which < TENSORS; which++)
        if (!check_memory(addresses, which))
            return false;
    if (!check_alignment(addresses, A) || !check_alignment(addresses, B) ||
        (launch->has_out_map && !check_alignment(addresses, OUT)))
        return false;
    Failure failure = {NULL, 0};
    /* A launch blocks while the stream's queue is full, and what the GPU waits for may be a callback that needs the
     * GIL; so it is released, as torch does. */
    Py_BEGIN_ALLOW_THREADS
    launch_on_device(&failure, launch, addresses);
    Py_END_ALLOW_THREADS
    if (failure.call == NULL)
        return true;
    raise_failure(&failure, launch->kernel->name);
    return false;
}

static bool read_addresses(PyObject *const given[], uintptr_t addresses[])
{
    for (int i = 0; i < ADDRESSES; i++) {
        addresses[i] = (uintptr_t)PyLong_AsUnsignedLongLong(given[i]);
        if (addresses[i] == UINTPTR_MAX && PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "launch: %s is %R, want an address (an int of 64 bits, not negative)",
                         address_names[i], given[i]);
            return false;
        }
    }
    return true;
}

/* `prepared` as a Launch; NULL with TypeError set when it is none. Borrowed. */
static Launch *as_launch(const ModuleState *state, PyObject *prepared, const char *call)
{
    if (Py_TYPE(prepared) == state->launch_type)
        return (Launch *)prepared;
    PyErr_Format(PyExc_TypeError, "%s: prepared is %R, want the Launch that prepare() returned", call, prepared);
    return NULL;
}

PyDoc_STRVAR(launch_doc, "launch(prepared, a, a_scale, b, b_scale, out, stream) -> None\n"
                         "\n"
                         "Launch on `stream`; all but `prepared` are addresses as ints.\n"
                         "\n"
                         "Raises TypeError for what is no address, ValueError for 0 and for one that TMA cannot use\n"
                         "(a, b, and out where it has a map: multiples of 16), RuntimeError for whatever the driver\n"
                         "refuses.");

static PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 1 + ADDRESSES)
        return PyErr_Format(PyExc_TypeError,
                            "launch: got %zd arguments, want 7: prepared, a, a_scale, b, b_scale, out, stream", count);
    uintptr_t addresses[ADDRESSES];
    if (!read_addresses(args + 1, addresses))
        return NULL;
    const Launch *prepared = as_launch(PyModule_GetState(module), args[0], "launch");
    if (prepared == NULL || !launch_at(prepared, addresses))
        return NULL;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------------------------- tensors ---- */

/* The table of `capsule` for the DLPack that we know; NULL, without an exception, when it has none. */
static const Exchange *find_exchange(PyObject *capsule)
{
    const ExchangeHeader *header = PyCapsule_GetPointer(capsule, EXCHANGE_CAPSULE);
    if (header == NULL)
        PyErr_Clear();
    while (header != NULL && header->major != EXCHANGE_MAJOR_VERSION)
        header = header->older;
    const Exchange *exchange = (const Exchange *)header;
    return exchange != NULL && exchange->view != NULL && exchange->current_stream != NULL ? exchange : NULL;
}

PyDoc_STRVAR(read_tensors_of_doc,
             "read_tensors_of(type, object_offset=0, keys_offset=0, plain=0) -> bool\n"
             "\n"
             "Read tensors of exactly this type from now on. False, and they are left to Python, where the type lacks\n"
             "DLPack's C exchange API. Raises ValueError for more types than there is room for.\n"
             "\n"
             "plain: bits of a plain tensor's keys, a word of 64 bits; a tensor with others is left to Python, too. The\n"
             "address of the object that holds them stands object_offset bytes into the Python object, and they stand\n"
             "keys_offset bytes into that: the caller vouches for it. 0: tensors of this type have no keys.");

static PyObject *read_tensors_of(PyObject *module, PyObject *args)
{
    ModuleState *state = PyModule_GetState(module);
    PyObject *type;
    KeysPlace keys = {0, 0, 0};
    unsigned long long plain = 0;
    if (!PyArg_ParseTuple(args, "O|nnK:read_tensors_of", &type, &keys.object_offset, &keys.keys_offset, &plain))
        return NULL;
    keys.plain = plain;
    if (!PyType_Check(type))
        return PyErr_Format(PyExc_TypeError, "read_tensors_of: got %R, want a type", type);
    PyObject *capsule = PyObject_GetAttrString(type, EXCHANGE_ATTRIBUTE);
    if (capsule == NULL) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    const Exchange *exchange = find_exchange(capsule);
    Py_DECREF(capsule); /* by the standard the table lives as long as the process */
    if (exchange == NULL)
        Py_RETURN_FALSE;
    if (state->tensor_type_count == MAX_TENSOR_TYPES)
        return PyErr_Format(PyExc_ValueError, "read_tensors_of: there is room for %d types", MAX_TENSOR_TYPES);
    Py_INCREF(type);
    state->tensor_types[state->tensor_type_count++] = (TensorType){(PyTypeObject *)type, exchange, keys};
    Py_RETURN_TRUE;
}

static const TensorType *find_type(const ModuleState *state, PyObject *tensor)
{
    const PyTypeObject *type = Py_TYPE(tensor);
    for (int i = 0; i < state->tensor_type_count; i++)
        if (state->tensor_types[i].type == type)
            return &state->tensor_types[i];
    return NULL;
}

static bool is_plain(const KeysPlace *place, PyObject *tensor)
{
    const char *object;
    uint64_t keys;
    if (place->plain == 0)
        return true;
    memcpy(&object, (const char *)tensor + place->object_offset, sizeof object);
    memcpy(&keys, object + place->keys_offset, sizeof keys);
    return (keys & ~place->plain) == 0;
}

/* The address of a view into freed storage is its offset alone. A GPU's memory does not lie as low as that; where some
 * did, Python, which can look at the storage, would launch with it. */
static bool is_in_memory(TensorDevice device, uintptr_t address)
{
    return device.type == DEVICE_CUDA ? address >= (uintptr_t)1 << 32 : address != 0;
}

/* Looks at a tensor. False, without an exception, for what no kernel can be launched with: no tensor of a known type,
 * one that is not plain, and one without memory. Python's checks then say what is wrong, or that nothing is. */
static bool view_tensor(const ModuleState *state, PyObject *tensor, TensorView *view, uintptr_t *address)
{
    const TensorType *type = find_type(state, tensor);
    if (type == NULL || !is_plain(&type->keys, tensor))
        return false;
    if (type->exchange->view(tensor, view) != 0) {
        PyErr_Clear();
        return false;
    }
    *address = (uintptr_t)view->data + view->byte_offset;
    return is_in_memory(view->device, *address);
}

/* Writes tensor number `which` into `signature`, its device too when it is `a`, and its address into `addresses`. False
 * as view_tensor(), and for a tensor that is not 2-D or lies on another device than `a`. */
static bool read_tensor(const ModuleState *state, PyObject *tensor, int which, Signature *signature,
                        uintptr_t addresses[])
{
    TensorView view;
    if (!view_tensor(state, tensor, &view, &addresses[which]) || view.rank != 2)
        return false;
    if (which == A)
        signature->device = view.device;
    else if (view.device.type != signature->device.type || view.device.index != signature->device.index)
        return false;
    signature->dtypes[which] = view.dtype;
    for (int i = 0; i < 2; i++) {
        signature->layouts[which].shape[i] = view.shape[i];
        signature->layouts[which].strides[i] = view.strides[i];
    }
    if (which == OUT)
        signature->out_is_aligned = addresses[OUT] % TMA_ALIGNMENT_BYTES == 0;
    return true;
}

static bool read_tensors(const ModuleState *state, PyObject *const tensors[], Signature *signature,
                         uintptr_t addresses[])
{
    for (int which = A; which < TENSORS; which++)
        if (!read_tensor(state, tensors[which], which, signature, addresses))
            return false;
    return true;
}

/* Launches on the stream that is current for `a`. False with an exception set if it fails. */
static bool launch_on_current_stream(const ModuleState *state, PyObject *a, const Signature *signature,
                                     Launch *prepared, uintptr_t addresses[])
{
    void *stream;
    const Exchange *exchange = find_type(state, a)->exchange;
    if (exchange->current_stream(signature->device.type, signature->device.index, &stream) != 0)
        return false;
    addresses[STREAM] = (uintptr_t)stream;
    Py_INCREF((PyObject *)prepared); /* another thread may drop it while the GIL is released */
    bool launched = launch_at(prepared, addresses);
    Py_DECREF((PyObject *)prepared);
    return launched;
}

static PyObject *signature_bytes(const Signature *signature)
{
    return PyBytes_FromStringAndSize((const char *)signature, sizeof *signature);
}

PyDoc_STRVAR(reads_doc, "reads(*tensors) -> bool\n"
                        "\n"
                        "Whether every tensor can be read here: it is of a known type, plain, and has memory.");

static PyObject *reads(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const ModuleState *state = PyModule_GetState(module);
    TensorView view;
    uintptr_t address;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!view_tensor(state, args[i], &view, &address))
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(signature_doc, "signature(a, a_scale, b, b_scale, out) -> bytes | None\n"
                            "\n"
                            "Device, dtypes, shapes, strides, and whether out is aligned for TMA: equal bytes, equal\n"
                            "properties. None where a tensor cannot be read here, which Python then has to look at.");

static PyObject *signature(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != TENSORS)
        return PyErr_Format(PyExc_TypeError, "signature: got %zd arguments, want 5: a, a_scale, b, b_scale, out",
                            count);
    Signature seen;
    uintptr_t addresses[ADDRESSES];
    if (!read_tensors(PyModule_GetState(module), args, &seen, addresses))
        Py_RETURN_NONE;
    return signature_bytes(&seen);
}

/* Of equal tuples. */
static bool same_types(PyObject *items, PyObject *others)
{
    const Py_ssize_t count = PyTuple_Size(items);
    for (Py_ssize_t i = 0; i < count; i++)
        if (Py_TYPE(PyTuple_GetItem(items, i)) != Py_TYPE(PyTuple_GetItem(others, i)))
            return false;
    return true;
}

/* The launches that `table` holds for `options`: NULL where it holds none, and then perhaps with an exception set.
 * Options that are equal and of other types, like True for 1, have not been checked. Borrowed. */
static PyObject *find_launches(PyObject *table, PyObject *options)
{
    PyObject *entry = PyDict_GetItemWithError(table, options);
    if (entry == NULL)
        return NULL;
    bool is_pair = PyTuple_Check(entry) && PyTuple_Size(entry) == 2;
    PyObject *known = is_pair ? PyTuple_GetItem(entry, 0) : NULL;
    PyObject *launches = is_pair ? PyTuple_GetItem(entry, 1) : NULL;
    if (!is_pair || !PyTuple_Check(known) || PyTuple_Size(known) != PyTuple_Size(options) || !PyDict_Check(launches))
        return PyErr_Format(PyExc_TypeError, "launch_known: the table holds %R, want a tuple (options, launches)", entry);
    return same_types(known, options) ? launches : NULL;
}

PyDoc_STRVAR(launch_known_doc,
             "launch_known(table, options, a, a_scale, b, b_scale, out) -> bool\n"
             "\n"
             "Launch what is known for a call of these options and tensors, on the current stream of a's device. The\n"
             "dict `table` holds for every tuple of options (options, launches), and the dict `launches` a Launch for\n"
             "every signature. False, and nothing has happened, where they hold none, where the options met are equal\n"
             "but of other types, or where a tensor cannot be read here.\n"
             "\n"
             "Raises as launch() does.");

static PyObject *launch_known(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 + TENSORS || !PyDict_Check(args[0]) || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError,
                            "launch_known: want 7 arguments: a dict, a tuple, a, a_scale, b, b_scale, out; got %zd",
                            count);
    const ModuleState *state = PyModule_GetState(module);
    PyObject *const *tensors = args + 2;
    Signature seen;
    uintptr_t addresses[ADDRESSES];
    if (!read_tensors(state, tensors, &seen, addresses))
        Py_RETURN_FALSE;
    PyObject *key = signature_bytes(&seen);
    if (key == NULL)
        return NULL;
    PyObject *launches = find_launches(args[0], args[1]);
    PyObject *found = launches == NULL ? NULL : PyDict_GetItemWithError(launches, key);
    Py_DECREF(key);
    if (found == NULL && !PyErr_Occurred())
        Py_RETURN_FALSE;
    Launch *prepared = found == NULL ? NULL : as_launch(state, found, "launch_known");
    if (prepared == NULL || !launch_on_current_stream(state, tensors[A], &seen, prepared, addresses))
        return NULL;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(bind_doc, "bind(prepared, a, a_scale, b, b_scale, out) -> BoundLaunch | None\n"
                       "\n"
                       "`prepared` for this b and b_scale, which the caller keeps in place, and for any other tensors\n"
                       "like these. None where a tensor cannot be read here.\n"
                       "\n"
                       "Raises ValueError where b is not aligned to 16 bytes.");

static PyObject *bind_launch(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 1 + TENSORS)
        return PyErr_Format(PyExc_TypeError,
                            "bind: got %zd arguments, want 6: prepared, a, a_scale, b, b_scale, out", count);
    const ModuleState *state = PyModule_GetState(module);
    Launch *prepared = as_launch(state, args[0], "bind");
    if (prepared == NULL)
        return NULL;
    Signature seen;
    uintptr_t addresses[ADDRESSES];
    if (!read_tensors(state, args + 1, &seen, addresses))
        Py_RETURN_NONE;
    if (!check_alignment(addresses, B))
        return NULL;

    BoundLaunch *bound = (BoundLaunch *)PyType_GenericAlloc(state->bound_launch_type, 0);
    if (bound == NULL)
        return NULL;
    Py_INCREF((PyObject *)prepared);
    bound->prepared = prepared;
    bound->signature = seen;
    bound->b = addresses[B];
    bound->b_scale = addresses[B_SCALE];
    return (PyObject *)bound;
}

PyDoc_STRVAR(launch_bound_doc, "launch_bound(bound, a, a_scale, out) -> bool\n"
                               "\n"
                               "Launch with the weights bound, on the current stream of a's device. False, and\n"
                               "nothing has happened, where a tensor differs in more than its address.\n"
                               "\n"
                               "Raises as launch() does.");

static PyObject *launch_bound(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const ModuleState *state = PyModule_GetState(module);
    if (count != 4 || Py_TYPE(args[0]) != state->bound_launch_type)
        return PyErr_Format(PyExc_TypeError,
                            "launch_bound: want 4 arguments: what bind() returned, a, a_scale, out; got %zd", count);
    const BoundLaunch *bound = (const BoundLaunch *)args[0];
    Signature seen = bound->signature;
    uintptr_t addresses[ADDRESSES] = {[B] = bound->b, [B_SCALE] = bound->b_scale};
    bool alike = read_tensor(state, args[1], A, &seen, addresses) &&
                 read_tensor(state, args[2], A_SCALE, &seen, addresses) &&
                 read_tensor(state, args[3], OUT, &seen, addresses) &&
                 memcmp(&seen, &bound->signature, sizeof seen) == 0;
    if (!alike)
        Py_RETURN_FALSE;
    if (!launch_on_current_stream(state, args[1], &seen, bound->prepared, addresses))
        return NULL;
    Py_RETURN_TRUE;
}

/* ----------------------------------------------------------------------------------------------------- module ---- */

PyDoc_STRVAR(driver_version_doc, "driver_version() -> int\n"
                                 "\n"
                                 "The CUDA version the driver supports, 1000 * major + 10 * minor.\n"
                                 "\n"
                                 "Raises RuntimeError when there is no driver.");

static PyObject *driver_version(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (!require_driver())
        return NULL;
    Failure failure = {NULL, 0};
    int version;
    if (!CALL(&failure, cuDriverGetVersion, &version))
        return raise_failure(&failure, NULL);
    return PyLong_FromLong(version);
}

static PyMemberDef kernel_members[] = {
    {"name", T_OBJECT_EX, offsetof(Kernel, name), READONLY, "the kernel's name"},
    {"device", T_INT, offsetof(Kernel, device), READONLY, "index of the GPU it is loaded on"},
    {"registers", T_INT, offsetof(Kernel, registers), READONLY, "registers per thread at the launch"},
    {"local_bytes", T_INT, offsetof(Kernel, local_bytes), READONLY, "local memory per thread: not 0 when it spills"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc, "A kernel loaded on one GPU; made by load()."},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_members, kernel_members},
    {0, NULL},
};

static PyType_Spec kernel_spec = {
    .name = "deep_tile._launcher.Kernel",
    .basicsize = sizeof(Kernel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = kernel_slots,
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "All of a launch but the addresses; made by prepare()."},
    {Py_tp_dealloc, launch_dealloc},
    {0, NULL},
};

static PyType_Spec launch_spec = {
    .name = "deep_tile._launcher.Launch",
    .basicsize = sizeof(Launch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = launch_slots,
};

static PyType_Slot bound_launch_slots[] = {
    {Py_tp_doc, "A launch with its weights; made by bind()."},
    {Py_tp_dealloc, bound_launch_dealloc},
    {0, NULL},
};

static PyType_Spec bound_launch_spec = {
    .name = "deep_tile._launcher.BoundLaunch",
    .basicsize = sizeof(BoundLaunch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = bound_launch_slots,
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int module_exec(PyObject *module)
{
    ModuleState *state = PyModule_GetState(module);
    state->kernel_type = add_type(module, &kernel_spec);
    state->launch_type = add_type(module, &launch_spec);
    state->bound_launch_type = add_type(module, &bound_launch_spec);
    if (state->kernel_type == NULL || state->launch_type == NULL || state->bound_launch_type == NULL)
        return -1;
    return PyModule_AddIntConstant(module, "GEMM_PARAMS_BYTES", sizeof(GemmParams));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ModuleState *state = PyModule_GetState(module);
    Py_VISIT((PyObject *)state->kernel_type);
    Py_VISIT((PyObject *)state->launch_type);
    Py_VISIT((PyObject *)state->bound_launch_type);
    for (int i = 0; i < state->tensor_type_count; i++)
        Py_VISIT((PyObject *)state->tensor_types[i].type);
    return 0;
}

static int module_clear(PyObject *module)
{
    ModuleState *state = PyModule_GetState(module);
    Py_CLEAR(state->kernel_type);
    Py_CLEAR(state->launch_type);
    Py_CLEAR(state->bound_launch_type);
    while (state->tensor_type_count > 0)
        Py_CLEAR(state->tensor_types[--state->tensor_type_count].type);
    return 0;
}

static PyMethodDef module_methods[] = {
    {"load", (PyCFunction)(void (*)(void))load, METH_VARARGS | METH_KEYWORDS, load_doc},
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_VARARGS | METH_KEYWORDS, prepare_doc},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, launch_doc},
    {"read_tensors_of", read_tensors_of, METH_VARARGS, read_tensors_of_doc},
    {"reads", (PyCFunction)(void (*)(void))reads, METH_FASTCALL, reads_doc},
    {"signature", (PyCFunction)(void (*)(void))signature, METH_FASTCALL, signature_doc},
    {"launch_known", (PyCFunction)(void (*)(void))launch_known, METH_FASTCALL, launch_known_doc},
    {"bind", (PyCFunction)(void (*)(void))bind_launch, METH_FASTCALL, bind_doc},
    {"launch_bound", (PyCFunction)(void (*)(void))launch_bound, METH_FASTCALL, launch_bound_doc},
    {"driver_version", driver_version, METH_NOARGS, driver_version_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "deep_tile._launcher",
    .m_doc = "Loads cubins and launches them through the CUDA driver.",
    .m_size = sizeof(ModuleState),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__launcher(void)
{
    return PyModuleDef_Init(&module_definition);
}
