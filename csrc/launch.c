/* deep_tile._launcher: load a cubin, prepare a launch, launch it.
 *
 * Called by plan.py, cast.py, launches.py, operation.py and api.py. Each step does what the next one need not repeat:
 *
 *   load(cubin, ...)     -> Kernel   once per kernel and device: may take milliseconds
 *   prepare(kernel, ...) -> Launch   once per problem: checks every number, encodes the tensor maps
 *
 * and each call copies the parameters to the stack, puts its addresses into them and launches, leaving nothing behind:
 *
 *   launch_known(table, options, tensors) finds the Launch by the call's options and its tensors' signature
 *   launch(prepared, addresses, stream)   whatever the tensors are
 *
 * It knows no operation: parameters are bytes, tensors are numbers, and the caller of prepare() says where addresses go
 * in the bytes (deep_tile/params.py). deep_tile/_launcher.pyi documents arguments, results and errors.
 */
#include "launcher.h"

#include <elf.h>
#include <limits.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { MAX_PARAMS_BYTES = 4096, MAX_PATCHES = 16, MAX_MAP_RANK = 5, MAX_CHAIN = 4 };

/* --------------------------------------------------------------------------------------------------- the types ---- */

/* A kernel loaded on one device. Its library is never unloaded: kernels are a finite set, and at interpreter exit the
 * driver may be gone before its last Kernel; leaking a library then is better than a crash. */
typedef struct {
    PyObject_HEAD
    PyObject *name;
    DriverContext context; /* the device's primary context, which torch uses too */
    DriverFunction function;
    int device;
    int smem_bytes;
} Kernel;

/* Where a tensor's address plus `skip` bytes goes in the parameters. For a map `skip` may be negative; box coordinates
 * then point into the tensor. */
typedef struct {
    int64_t skip;
    uint16_t offset;
    uint8_t tensor;
    bool is_map; /* the address goes into a map there, and else is a pointer */
} Patch;

/* A launch without addresses and stream. */
typedef struct {
    PyObject_VAR_HEAD
    Kernel *kernel;
    PyObject *names; /* tensor names for messages: a tuple of str */
    LaunchConfig config;
    LaunchAttribute attributes[2];
    bool needs_alignment[MAX_TENSORS]; /* a map has the tensor's address */
    uint8_t tensor_count, patch_count;
    uint16_t params_bytes;
    Patch patches[2 * MAX_PATCHES];
    unsigned char params[]; /* with maps encoded, and all addresses yet to come */
} Launch;

/* Consecutive launches on the same tensors and stream. */
typedef struct {
    const Launch *launches[MAX_CHAIN];
    int count;
} Chain;

/* Type objects, kept for the process's lifetime. */
static PyTypeObject *kernel_type, *launch_type;

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
    Py_XDECREF(((Launch *)self)->names);
    free_object(self);
}

/* -------------------------------------------------------------------------------------------------------- load ---- */

/* Whether `size` bytes hold everything in the ELF header. The driver gets no size and would read past the end. */
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

/* Loads now: nothing is left for a later launch to do, which may be captured in a graph. The primary context is
 * retained and never released, as the library in it is never unloaded. */
static void load_on_device(Failure *failure, Kernel *kernel, const char *cubin, const char *name)
{
    int device;
    bool pushed;
    DriverLibrary library;
    DriverKernel handle;
    if (!CALL(failure, cuInit, 0) || !CALL(failure, cuDeviceGet, &device, kernel->device) ||
        !CALL(failure, cuDevicePrimaryCtxRetain, &kernel->context, device) ||
        !enter_context(failure, kernel->context, &pushed))
        return;
    /* With no options given the driver keeps its own copy of the cubin. */
    (void)(CALL(failure, cuLibraryLoadData, &library, cubin, NULL, NULL, 0, NULL, NULL, 0) &&
           CALL(failure, cuLibraryGetKernel, &handle, library, name) &&
           CALL(failure, cuKernelSetAttribute, FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->smem_bytes, handle,
                device) &&
           CALL(failure, cuKernelGetFunction, &kernel->function, handle));
    leave_context(failure, pushed);
}

static PyObject *load(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
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

    Kernel *kernel = (Kernel *)PyType_GenericAlloc(kernel_type, 0);
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
    if (none_failed(&failure, name))
        return (PyObject *)kernel;
    Py_DECREF((PyObject *)kernel);
    return NULL;
}

/* ----------------------------------------------------------------------------------------------------- prepare ---- */

/* Limits for a number; it must also be a multiple of `step`. */
typedef struct {
    const char *name;
    long long low, high, step;
} Field;

/* Reads `value`; ValueError or TypeError names the field, after its entry's name, "maps[0].", or nothing. */
static bool read_number(PyObject *value, Field field, const char *entry, long long *number)
{
    int overflow = 0;
    *number = PyLong_AsLongLongAndOverflow(value, &overflow);
    const bool is_int = !PyErr_Occurred();
    if (is_int && overflow == 0 && *number >= field.low && *number <= field.high && *number % field.step == 0)
        return true;
    char step[48] = "";
    if (field.step != 1)
        PyOS_snprintf(step, sizeof step, ", a multiple of %lld", field.step);
    return FAIL(is_int ? PyExc_ValueError : PyExc_TypeError, "prepare: %s%s is %R, want an int from %lld to %lld%s",
                entry, field.name, value, field.low, field.high, step);
}

/* Reads a map's tuple with one number per dimension. */
static bool read_dimensions(PyObject *given, Py_ssize_t count, Field field, const char *entry, uint64_t numbers[])
{
    if (PyTuple_Size(given) != count)
        return FAIL(PyExc_ValueError, "prepare: %s%s is %R, want %zd ints", entry, field.name, given, count);
    long long number;
    for (Py_ssize_t i = 0; i < count; numbers[i++] = (uint64_t)number)
        if (!read_number(PyTuple_GetItem(given, i), field, entry, &number))
            return false;
    return true;
}

/* A tensor map in the driver's terms. The innermost dimension comes first and has no stride. `owner` is a tensor's
 * number, or a fixed map's address; the map starts `skip` bytes beyond. */
typedef struct {
    long long offset, owner, skip, element, swizzle, l2_promotion;
    Py_ssize_t rank;
    uint64_t sizes[MAX_MAP_RANK], strides_bytes[MAX_MAP_RANK], box[MAX_MAP_RANK];
} MapLayout;

static bool check_box(const MapLayout *map, const char *entry)
{
    static const unsigned char element_bytes[MAP_ELEMENTS] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    const int bytes = (int)map->box[0] * element_bytes[map->element];
    const int most = map->swizzle == MAP_SWIZZLE_NONE ? INT_MAX : 16 << map->swizzle;
    return (bytes % 16 == 0 && bytes <= most) ||
           FAIL(PyExc_ValueError, "prepare: %sbox has rows of %d bytes, want a multiple of 16, at most %d", entry,
                bytes, most);
}

/* Reads a map and where it goes, within TMA's own limits. */
static bool read_map(PyObject *given, const Launch *launch, Field owner, const char *list, int index, MapLayout *map)
{
    const Field offsets = {"offset", 0, launch->params_bytes - MAP_BYTES, MAP_ALIGNMENT_BYTES};
    const Field skips = {"skip", -(1LL << 48), UINT32_MAX - TMA_ALIGNMENT_BYTES + 1LL, TMA_ALIGNMENT_BYTES};
    const Field strides_bytes = {"strides_bytes", 16, (1LL << 40) - 16, 16};
    PyObject *offset, *whose, *skip, *element, *sizes, *strides, *box, *swizzle, *l2;
    if (!PyArg_Parse(given,
                     "(OOOO!O!O!OOO);prepare: want maps that are tuples (offset, tensor or address, element, sizes, "
                     "strides_bytes, box, swizzle, l2_promotion, skip), of which sizes, strides_bytes and box are "
                     "tuples",
                     &offset, &whose, &element, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &PyTuple_Type, &box,
                     &swizzle, &l2, &skip))
        return false;
    const Py_ssize_t rank = PyTuple_Size(sizes);
    map->rank = rank < 1 ? 1 : rank > MAX_MAP_RANK ? MAX_MAP_RANK : rank;
    char entry[32];
    PyOS_snprintf(entry, sizeof entry, "%s[%d].", list, index);
    return read_number(offset, offsets, entry, &map->offset) && read_number(whose, owner, entry, &map->owner) &&
           read_number(element, (Field){"element", 0, MAP_ELEMENTS - 1, 1}, entry, &map->element) &&
           read_dimensions(sizes, map->rank, (Field){"sizes", 1, 1LL << 32, 1}, entry, map->sizes) &&
           read_dimensions(strides, map->rank - 1, strides_bytes, entry, map->strides_bytes) &&
           read_dimensions(box, map->rank, (Field){"box", 1, 256, 1}, entry, map->box) &&
           read_number(swizzle, (Field){"swizzle", 0, MAP_SWIZZLE_128B, 1}, entry, &map->swizzle) &&
           read_number(l2, (Field){"l2_promotion", 0, MAP_L2_PROMOTION_256B, 1}, entry, &map->l2_promotion) &&
           read_number(skip, skips, entry, &map->skip) && check_box(map, entry);
}

/* Encodes in the current context; launching puts another address in, unless the map is a fixed one. */
static bool encode_map(Failure *failure, const MapLayout *map, uintptr_t address, unsigned char *params)
{
    static const uint32_t element_steps[MAX_MAP_RANK] = {1, 1, 1, 1, 1};
    _Alignas(MAP_ALIGNMENT_BYTES) unsigned char encoded[MAP_BYTES];
    uint32_t box[MAX_MAP_RANK];
    for (Py_ssize_t i = 0; i < map->rank; i++)
        box[i] = (uint32_t)map->box[i];
    if (!CALL(failure, cuTensorMapEncodeTiled, (struct CUtensorMap_st *)encoded, (unsigned)map->element,
              (uint32_t)map->rank, (void *)address, map->sizes, map->strides_bytes, box, element_steps,
              MAP_INTERLEAVE_NONE, (unsigned)map->swizzle, (unsigned)map->l2_promotion, MAP_OOB_FILL_ZEROS))
        return false;
    memcpy(params + map->offset, encoded, sizeof encoded);
    return true;
}

static void add_patch(Launch *launch, long long offset, long long tensor, long long skip, bool is_map)
{
    launch->patches[launch->patch_count++] = (Patch){skip, (uint16_t)offset, (uint8_t)tensor, is_map};
    launch->needs_alignment[tensor] |= is_map;
}

static bool add_pointers(Launch *launch, PyObject *pointers)
{
    const Field offsets = {"offset", 0, launch->params_bytes - (int)sizeof(void *), sizeof(void *)};
    const Field tensors = {"tensor", 0, launch->tensor_count - 1, 1}, skips = {"skip", 0, UINT32_MAX, 1};
    for (int i = 0; i < (int)PyTuple_Size(pointers); i++) {
        PyObject *offset, *tensor, *skip;
        long long at, number, bytes;
        char entry[32];
        PyOS_snprintf(entry, sizeof entry, "pointers[%d].", i);
        if (!PyArg_Parse(PyTuple_GetItem(pointers, i),
                         "(OOO);prepare: want pointers that are tuples (offset, tensor, skip)", &offset, &tensor,
                         &skip) ||
            !read_number(offset, offsets, entry, &at) || !read_number(tensor, tensors, entry, &number) ||
            !read_number(skip, skips, entry, &bytes))
            return false;
        add_patch(launch, at, number, bytes, false);
    }
    return true;
}

/* Reads the maps and encodes them, in the kernel's context. */
static bool add_maps(Launch *launch, PyObject *maps, PyObject *fixed_maps)
{
    const Field tensor = {"tensor", 0, launch->tensor_count - 1, 1};
    const Field address = {"address", TMA_ALIGNMENT_BYTES, LLONG_MAX, TMA_ALIGNMENT_BYTES};
    const uintptr_t any_aligned_address = MAP_BYTES;
    const int count = (int)PyTuple_Size(maps), fixed_count = (int)PyTuple_Size(fixed_maps);
    MapLayout layouts[2 * MAX_PATCHES], *const fixed = layouts + count;
    for (int i = 0; i < count; i++) {
        if (!read_map(PyTuple_GetItem(maps, i), launch, tensor, "maps", i, &layouts[i]))
            return false;
        add_patch(launch, layouts[i].offset, layouts[i].owner, layouts[i].skip, true);
    }
    for (int i = 0; i < fixed_count; i++)
        if (!read_map(PyTuple_GetItem(fixed_maps, i), launch, address, "fixed_maps", i, &fixed[i]))
            return false;
    Failure failure = {NULL, 0};
    bool pushed, done = enter_context(&failure, launch->kernel->context, &pushed);
    for (int i = 0; i < count && done; i++)
        done = encode_map(&failure, &layouts[i], any_aligned_address, launch->params);
    for (int i = 0; i < fixed_count && done; i++)
        done = encode_map(&failure, &fixed[i], (uintptr_t)(fixed[i].owner + fixed[i].skip), launch->params);
    leave_context(&failure, pushed);
    return none_failed(&failure, launch->kernel->name);
}

/* A launch without its grid and the places where addresses go. NULL with an exception set. */
static Launch *new_launch(PyObject *kernel, PyObject *names, PyObject *params)
{
    const Py_ssize_t tensors = PyTuple_Size(names), bytes = PyBytes_Size(params);
    bool right_names = tensors >= 1 && tensors <= MAX_TENSORS;
    for (Py_ssize_t i = 0; i < tensors && right_names; i++)
        right_names = PyUnicode_Check(PyTuple_GetItem(names, i));
    if (Py_TYPE(kernel) != kernel_type)
        PyErr_Format(PyExc_TypeError, "prepare: kernel is %R, want the Kernel that load() returned", kernel);
    else if (!right_names)
        PyErr_Format(PyExc_ValueError, "prepare: names is %R, want 1 to %d str, one per tensor", names, MAX_TENSORS);
    else if (bytes < 1 || bytes > MAX_PARAMS_BYTES)
        PyErr_Format(PyExc_ValueError, "prepare: params has %zd bytes, want 1 to %d", bytes, MAX_PARAMS_BYTES);
    Launch *launch = PyErr_Occurred() ? NULL : (Launch *)PyType_GenericAlloc(launch_type, bytes);
    if (launch == NULL)
        return NULL;
    Py_INCREF(kernel);
    Py_INCREF(names);
    launch->kernel = (Kernel *)kernel;
    launch->names = names;
    launch->tensor_count = (uint8_t)tensors;
    launch->params_bytes = (uint16_t)bytes;
    memcpy(launch->params, PyBytes_AsString(params), (size_t)bytes);
    return launch;
}

static void configure(Launch *launch, unsigned grid, unsigned cluster, unsigned threads, bool pdl)
{
    launch->config = (LaunchConfig){
        .grid_x = grid, .grid_y = 1, .grid_z = 1,
        .block_x = threads, .block_y = 1, .block_z = 1,
        .smem_bytes = (unsigned)launch->kernel->smem_bytes, .attributes = launch->attributes,
    };
    unsigned *const count = &launch->config.attribute_count;
    if (cluster > 1)
        launch->attributes[(*count)++] =
            (LaunchAttribute){.id = LAUNCH_CLUSTER_DIMENSION, .value.cluster_dim = {cluster, 1, 1}};
    if (pdl)
        launch->attributes[(*count)++] = (LaunchAttribute){.id = LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                           .value.programmatic_stream_serialization = 1};
}

static PyObject *prepare(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"",         "grid", "cluster",    "threads", "params", "names",
                               "pointers", "maps", "fixed_maps", "pdl",     NULL};
    PyObject *kernel, *grid, *cluster, *threads, *params, *names, *pointers, *maps, *fixed;
    int pdl;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$OOOSO!O!O!O!p:prepare", keywords, &kernel, &grid, &cluster,
                                     &threads, &params, &PyTuple_Type, &names, &PyTuple_Type, &pointers,
                                     &PyTuple_Type, &maps, &PyTuple_Type, &fixed, &pdl))
        return NULL;
    if (PyTuple_Size(pointers) > MAX_PATCHES || PyTuple_Size(maps) > MAX_PATCHES || PyTuple_Size(fixed) > MAX_PATCHES)
        return PyErr_Format(PyExc_ValueError, "prepare: got %zd pointers, %zd maps and %zd fixed_maps, want at most %d",
                            PyTuple_Size(pointers), PyTuple_Size(maps), PyTuple_Size(fixed), MAX_PATCHES);
    long long blocks, cluster_blocks, block_threads;
    if (!read_number(cluster, (Field){"cluster", 1, 8, 1}, "", &cluster_blocks) ||
        !read_number(grid, (Field){"grid", 1, INT_MAX, cluster_blocks}, "", &blocks) ||
        !read_number(threads, (Field){"threads", 1, 1024, 1}, "", &block_threads))
        return NULL;
    Launch *launch = new_launch(kernel, names, params);
    if (launch == NULL)
        return NULL;
    configure(launch, (unsigned)blocks, (unsigned)cluster_blocks, (unsigned)block_threads, pdl);
    if (add_pointers(launch, pointers) && add_maps(launch, maps, fixed))
        return (PyObject *)launch;
    Py_DECREF((PyObject *)launch);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ launch ---- */

/* Whether a kernel can use tensor number `tensor`'s address; ValueError if not. A tensor without memory has the address
 * null: a kernel that touches it kills the context. */
static bool check_address(const Launch *launch, int tensor, uintptr_t address)
{
    const int remainder = (int)(address % TMA_ALIGNMENT_BYTES);
    if (address != 0 && (remainder == 0 || !launch->needs_alignment[tensor]))
        return true;
    PyObject *name = PyTuple_GetItem(launch->names, tensor);
    if (address == 0)
        return FAIL(PyExc_ValueError,
                    "launch: the address of %U is 0, want that of memory: pass a tensor whose storage is allocated",
                    name);
    return FAIL(PyExc_ValueError, "launch: the address of %U is %d modulo %d, want a multiple of %d for TMA", name,
                remainder, TMA_ALIGNMENT_BYTES, TMA_ALIGNMENT_BYTES);
}

static bool fill_params(Failure *failure, unsigned char *params, const Launch *launch, const uintptr_t addresses[])
{
    memcpy(params, launch->params, launch->params_bytes);
    for (int i = 0; i < launch->patch_count; i++) {
        const Patch *patch = &launch->patches[i];
        const uintptr_t address = addresses[patch->tensor] + patch->skip;
        unsigned char *const place = params + patch->offset;
        if (!patch->is_map)
            memcpy(place, &address, sizeof address);
        else if (!CALL(failure, cuTensorMapReplaceAddress, (struct CUtensorMap_st *)place, (void *)address))
            return false;
    }
    return true;
}

/* Launches in the current context. Everything lies on the stack: threads may launch at the same time. */
static bool launch_here(Failure *failure, const Launch *launch, const uintptr_t addresses[], uintptr_t stream)
{
    _Alignas(MAP_ALIGNMENT_BYTES) unsigned char params[MAX_PARAMS_BYTES];
    if (!fill_params(failure, params, launch, addresses))
        return false;
    LaunchConfig config = launch->config;
    config.stream = (DriverStream)stream;
    void *arguments[] = {params};
    return CALL(failure, cuLaunchKernelEx, (const struct CUlaunchConfig_st *)&config, launch->kernel->function,
                arguments, NULL);
}

/* The common end of all launch functions. The caller keeps the launches alive; they are on their tensors' device. False
 * with an exception set if it fails: before the first launch, unless the driver rejects one. */
static bool launch_at(const Chain *chain, const uintptr_t addresses[], uintptr_t stream)
{
    const Launch *first = chain->launches[0];
    for (int i = 0; i < chain->count; i++)
        for (int j = 0; j < first->tensor_count; j++)
            if (!check_address(chain->launches[i], j, addresses[j]))
                return false;
    Failure failure = {NULL, 0};
    bool pushed;
    int launched = 0;
    /* A launch blocks while the stream's queue is full, and what the GPU waits for may be a callback that needs the
     * GIL; so it is released, as torch does. */
    Py_BEGIN_ALLOW_THREADS
    if (enter_context(&failure, first->kernel->context, &pushed)) {
        while (launched < chain->count && launch_here(&failure, chain->launches[launched], addresses, stream))
            launched++;
        leave_context(&failure, pushed);
    }
    Py_END_ALLOW_THREADS
    return none_failed(&failure, chain->launches[launched < chain->count ? launched : 0]->kernel->name);
}

/* Reads a 64-bit address: a tensor's, or the stream's if `name` is NULL. */
static bool read_address(PyObject *given, PyObject *name, uintptr_t *address)
{
    *address = (uintptr_t)PyLong_AsUnsignedLongLong(given);
    return *address != UINTPTR_MAX || !PyErr_Occurred() ||
           FAIL(PyExc_TypeError, "launch: %V is %R, want an address (an int of 64 bits, not negative)", name, "stream",
                given);
}

/* Reads a Launch with `count` tensors, or a tuple of these. False with TypeError set otherwise. Borrowed. */
static bool as_chain(PyObject *prepared, Py_ssize_t count, const char *call, Chain *chain)
{
    const Py_ssize_t size = PyTuple_Check(prepared) ? PyTuple_Size(prepared) : 0;
    const bool are_several = size >= 1 && size <= MAX_CHAIN;
    chain->count = are_several ? (int)size : 1;
    for (int i = 0; i < chain->count; i++) {
        PyObject *one = are_several ? PyTuple_GetItem(prepared, i) : prepared;
        if (Py_TYPE(one) != launch_type)
            return FAIL(PyExc_TypeError, "%s: prepared is %R, want the Launch that prepare() returned, or a tuple of 1 "
                        "to %d of them", call, one, MAX_CHAIN);
        const Launch *launch = chain->launches[i] = (const Launch *)one;
        if (launch->tensor_count != count)
            return FAIL(PyExc_TypeError, "%s: got %zd tensors, want %d: %R", call, count, launch->tensor_count,
                        launch->names);
    }
    return true;
}

static PyObject *launch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "launch: want prepared, a tuple of addresses, stream; got %zd arguments",
                            count);
    Chain chain;
    if (!as_chain(args[0], PyTuple_Size(args[1]), "launch", &chain))
        return NULL;
    const Launch *first = chain.launches[0];
    uintptr_t addresses[MAX_TENSORS], stream;
    for (int i = 0; i < first->tensor_count; i++)
        if (!read_address(PyTuple_GetItem(args[1], i), PyTuple_GetItem(first->names, i), &addresses[i]))
            return NULL;
    if (!read_address(args[2], NULL, &stream) || !launch_at(&chain, addresses, stream))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *read_tensors_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *type;
    TensorPlace place = {0};
    unsigned long long plain = 0;
    if (!PyArg_ParseTuple(args, "O|nnKnnn:read_tensors_of", &type, &place.object_offset, &place.keys_offset, &plain,
                          &place.storage_offset, &place.begin_offset, &place.bytes_offset))
        return NULL;
    place.plain = plain;
    const int learnt = learn_tensor_type(type, place);
    return learnt < 0 ? NULL : PyBool_FromLong(learnt);
}

static PyObject *reads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    TensorView view;
    uintptr_t address;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!view_tensor(args[i], &view, &address))
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

static PyObject *signature(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || count > MAX_TENSORS)
        return PyErr_Format(PyExc_TypeError, "signature: got %zd arguments, want 1 to %d tensors", count, MAX_TENSORS);
    Signature seen;
    uintptr_t addresses[MAX_TENSORS];
    if (!read_tensors(args, count, &seen, addresses))
        Py_RETURN_NONE;
    return signature_bytes(&seen);
}

/* Whether equal tuples also have equal types. */
static bool same_types(PyObject *items, PyObject *others)
{
    const Py_ssize_t count = PyTuple_Size(items);
    for (Py_ssize_t i = 0; i < count; i++)
        if (Py_TYPE(PyTuple_GetItem(items, i)) != Py_TYPE(PyTuple_GetItem(others, i)))
            return false;
    return true;
}

/* The launches in `table` for `options`; NULL, perhaps with an exception set, if there are none. Options that are equal
 * but have other types, like True for 1, have not been checked. Borrowed. */
static PyObject *find_launches(PyObject *table, PyObject *options)
{
    PyObject *entry = PyDict_GetItemWithError(table, options);
    if (entry == NULL)
        return NULL;
    bool is_pair = PyTuple_Check(entry) && PyTuple_Size(entry) == 2;
    PyObject *known = is_pair ? PyTuple_GetItem(entry, 0) : NULL;
    PyObject *launches = is_pair ? PyTuple_GetItem(entry, 1) : NULL;
    if (!is_pair || !PyTuple_Check(known) || PyTuple_Size(known) != PyTuple_Size(options) || !PyDict_Check(launches))
        return PyErr_Format(PyExc_TypeError, "launch_known: the table holds %R, want a tuple (options, launches)",
                            entry);
    return same_types(known, options) ? launches : NULL;
}

/* Also false if the driver's query fails: the launch then reports the error. Stream 0 cannot be captured. */
static bool is_captured(uintptr_t stream)
{
    unsigned status = STREAM_CAPTURE_NONE;
    return stream != 0 && driver.cuStreamIsCapturing((DriverStream)stream, &status) == 0 &&
           status != STREAM_CAPTURE_NONE;
}

static PyObject *launch_known(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    PyObject *tensors[MAX_TENSORS];
    const bool is_tuple = count == 3 && PyTuple_Check(args[2]);
    const Py_ssize_t tensor_count = is_tuple ? PyTuple_Size(args[2]) : count - 2;
    if (tensor_count < 1 || tensor_count > MAX_TENSORS || !PyDict_Check(args[0]) || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError,
                            "launch_known: want a dict, a tuple and 1 to %d tensors; got %zd arguments", MAX_TENSORS,
                            count);
    for (Py_ssize_t i = 0; i < tensor_count; i++)
        tensors[i] = is_tuple ? PyTuple_GetItem(args[2], i) : args[2 + i];
    Signature seen;
    uintptr_t addresses[MAX_TENSORS], stream;
    if (!read_tensors(tensors, tensor_count, &seen, addresses))
        Py_RETURN_FALSE;
    PyObject *key = signature_bytes(&seen);
    if (key == NULL)
        return NULL;
    PyObject *launches = find_launches(args[0], args[1]);
    PyObject *found = launches == NULL ? NULL : PyDict_GetItemWithError(launches, key);
    Py_DECREF(key);
    if (found == NULL && !PyErr_Occurred())
        Py_RETURN_FALSE;
    Chain chain;
    if (found == NULL || !as_chain(found, (Py_ssize_t)seen.count, "launch_known", &chain))
        return NULL;
    if (!find_current_stream(tensors[0], &seen, &stream))
        return NULL;
    if (chain.count > 1 && is_captured(stream))
        Py_RETURN_FALSE;
    Py_INCREF(found); /* another thread may drop it while the GIL is released */
    const bool launched = launch_at(&chain, addresses, stream);
    Py_DECREF(found);
    if (!launched)
        return NULL;
    Py_RETURN_TRUE;
}

/* torch's query whether this thread's calls pass a dispatch key, and the keys to query. */
static bool (*passes_key)(uint16_t key);
static uint16_t watched_keys[3];

static PyObject *watch_keys(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "KHHH:watch_keys", &address, &watched_keys[0], &watched_keys[1], &watched_keys[2]))
        return NULL;
    passes_key = (bool (*)(uint16_t))(uintptr_t)address;
    Py_RETURN_NONE;
}

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    bool is_passed = false;
    for (size_t i = 0; passes_key != NULL && i < COUNT_OF(watched_keys) && !is_passed; i++)
        is_passed = passes_key(watched_keys[i]);
    return PyBool_FromLong(is_passed);
}

/* ------------------------------------------------------------------------------------------------------ module ---- */

static PyObject *driver_version(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    if (!require_driver())
        return NULL;
    Failure failure = {NULL, 0};
    int version;
    (void)CALL(&failure, cuDriverGetVersion, &version);
    return none_failed(&failure, NULL) ? PyLong_FromLong(version) : NULL;
}

static PyMemberDef kernel_members[] = {
    {"name", T_OBJECT_EX, offsetof(Kernel, name), READONLY, "the kernel's name"},
    {"device", T_INT, offsetof(Kernel, device), READONLY, "index of the GPU it is loaded on"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc, "A kernel loaded on one GPU; made by load()."},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_members, kernel_members},
    {0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "All of a launch but the addresses; made by prepare()."},
    {Py_tp_dealloc, launch_dealloc},
    {0, NULL},
};

#define HANDLE(name, bytes, item_bytes, slots)                                                                         \
    {"deep_tile._launcher." name, bytes, item_bytes,                                                                   \
     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, slots}

static PyType_Spec kernel_spec = HANDLE("Kernel", sizeof(Kernel), 0, kernel_slots);
static PyType_Spec launch_spec = HANDLE("Launch", offsetof(Launch, params), 1, launch_slots);

/* Creates the type unless an import under another name has. */
static bool add_type(PyObject *module, PyTypeObject **type, PyType_Spec *spec)
{
    if (*type == NULL)
        *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type != NULL && PyModule_AddType(module, *type) == 0;
}

#define DOC(signature) signature "\n--\n\ndeep_tile/_launcher.pyi says what it takes, returns and raises."
#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef module_methods[] = {
    {"load", WITH_KEYWORDS(load), DOC("load($module, cubin, name, smem_bytes, device)")},
    {"prepare", WITH_KEYWORDS(prepare), DOC("prepare($module, kernel, /, *, grid, cluster, threads, params, names, "
                                            "pointers, maps, fixed_maps, pdl)")},
    {"launch", FAST(launch), DOC("launch($module, prepared, addresses, stream, /)")},
    {"read_tensors_of", read_tensors_of, METH_VARARGS,
     DOC("read_tensors_of($module, type, object_offset=0, keys_offset=0, plain=0, storage_offset=0, begin_offset=0, "
         "bytes_offset=0, /)")},
    {"reads", FAST(reads), DOC("reads($module, /, *tensors)")},
    {"signature", FAST(signature), DOC("signature($module, /, *tensors)")},
    {"launch_known", FAST(launch_known), DOC("launch_known($module, table, options, /, *tensors)")},
    {"watch_keys", watch_keys, METH_VARARGS, DOC("watch_keys($module, address, first, second, third, /)")},
    {"is_watched", is_watched, METH_NOARGS, DOC("is_watched($module)")},
    {"driver_version", driver_version, METH_NOARGS, DOC("driver_version($module)")},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "deep_tile._launcher",
    .m_doc = "Loads cubins and launches them through the CUDA driver.",
    .m_size = -1, /* one per process, as with the driver, not per interpreter */
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__launcher(void)
{
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL &&
        !(add_type(module, &kernel_type, &kernel_spec) && add_type(module, &launch_type, &launch_spec)))
        Py_CLEAR(module);
#ifdef Py_GIL_DISABLED /* references are borrowed from tables that other threads change: Python turns the GIL on */
    if (module != NULL && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_USED) != 0)
        Py_CLEAR(module);
#endif
    return module;
}
