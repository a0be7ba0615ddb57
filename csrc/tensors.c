/* Tensors, read through DLPack: their properties, as a signature to compare, and their addresses.
 *
 * Called by launch.c. Reads what DLPack exports, and a word in the tensor object that tells whether it is plain. It
 * judges nothing: Python decides once per signature whether it is valid, and handles tensors that C cannot read.
 */
#include "launcher.h"

#include <string.h>

/* A type whose instances can be read through DLPack; a subclass is another type. */
typedef struct {
    PyTypeObject *type;
    const Exchange *exchange;
    TensorPlace place;
} TensorType;

/* Known types, kept for the process's lifetime. */
static TensorType types[MAX_TENSOR_TYPES];
static int type_count;

/* A tensor's first word in a signature. */
typedef struct {
    TensorDtype dtype;
    uint16_t rank;
    uint16_t is_aligned; /* to 16 bytes, so that TMA can use it */
} TensorHead;

_Static_assert(sizeof(TensorHead) == sizeof(int64_t), "one word, all of which is compared");
_Static_assert(sizeof(TensorDevice) == sizeof(int64_t), "one word, all of which is compared");

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

static const TensorType *find_type(PyObject *tensor)
{
    for (int i = 0; i < type_count; i++)
        if (types[i].type == Py_TYPE(tensor))
            return &types[i];
    return NULL;
}

int learn_tensor_type(PyObject *type, TensorPlace place)
{
    if (!PyType_Check(type)) {
        PyErr_Format(PyExc_TypeError, "read_tensors_of: got %R, want a type", type);
        return -1;
    }
    PyObject *capsule = PyObject_GetAttrString(type, EXCHANGE_ATTRIBUTE);
    if (capsule == NULL) {
        PyErr_Clear();
        return 0;
    }
    const Exchange *exchange = find_exchange(capsule);
    Py_DECREF(capsule); /* by the standard the table lives as long as the process */
    if (exchange == NULL)
        return 0;
    if (type_count == MAX_TENSOR_TYPES) {
        PyErr_Format(PyExc_ValueError, "read_tensors_of: there is room for %d types", MAX_TENSOR_TYPES);
        return -1;
    }
    Py_INCREF(type);
    types[type_count++] = (TensorType){(PyTypeObject *)type, exchange, place};
    return 1;
}

static uint64_t word_at(const void *object, Py_ssize_t offset)
{
    uint64_t word;
    memcpy(&word, (const char *)object + offset, sizeof word);
    return word;
}

static bool is_plain(const TensorPlace *place, const void *object)
{
    return place->plain == 0 || (word_at(object, place->keys_offset) & ~place->plain) == 0;
}

/* Whether a tensor ends within its storage, which may have been resized since. */
static bool fits_storage(const TensorPlace *place, const void *object, const TensorView *view, uintptr_t address)
{
    if (object == NULL || place->storage_offset == 0)
        return true;
    const void *storage = (const void *)word_at(object, place->storage_offset);
    if (storage == NULL)
        return false;
    const uint64_t begin = word_at(storage, place->begin_offset), bytes = word_at(storage, place->bytes_offset);
    uint64_t last = 0;
    for (int i = 0; i < view->rank; i++)
        last += (uint64_t)(view->shape[i] - 1) * (uint64_t)view->strides[i];
    const uint64_t end = address + (last + 1) * (view->dtype.bits * view->dtype.lanes / 8);
    return begin != 0 && address >= begin && end - begin <= bytes;
}

/* A view into freed storage has only its offset as address. GPU memory is never that low; if it were, Python, which can
 * read the storage, would launch with it. */
static bool is_in_memory(TensorDevice device, uintptr_t address)
{
    return device.type == DEVICE_CUDA ? address >= (uintptr_t)1 << 32 : address != 0;
}

bool view_tensor(PyObject *tensor, TensorView *view, uintptr_t *address)
{
    const TensorType *type = find_type(tensor);
    if (type == NULL)
        return false;
    const TensorPlace *place = &type->place;
    const void *object = place->plain == 0 ? NULL : (const void *)word_at(tensor, place->object_offset);
    if (!is_plain(place, object))
        return false;
    if (type->exchange->view(tensor, view) != 0) {
        PyErr_Clear();
        return false;
    }
    *address = (uintptr_t)view->data + view->byte_offset;
    return is_in_memory(view->device, *address) && (view->rank == 0 || view->strides != NULL) &&
           fits_storage(place, object, view, *address);
}

static void write_tensor(Signature *signature, const TensorView *view, uintptr_t address)
{
    const TensorHead head = {view->dtype, (uint16_t)view->rank, address % TMA_ALIGNMENT_BYTES == 0};
    int64_t *word = signature->word + signature->words;
    memcpy(word++, &head, sizeof head);
    for (int i = 0; i < view->rank; i++) {
        *word++ = view->shape[i];
        *word++ = view->strides[i];
    }
    signature->words = (size_t)(word - signature->word);
}

bool read_tensors(PyObject *const tensors[], Py_ssize_t count, Signature *signature, uintptr_t addresses[])
{
    signature->words = 1, signature->count = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i > 0 && tensors[i] == Py_None) {
            signature->word[signature->words++] = 0;
            continue;
        }
        TensorView view;
        if (!view_tensor(tensors[i], &view, &addresses[signature->count]) || view.rank > MAX_TENSOR_RANK)
            return false;
        if (i == 0)
            memcpy(&signature->word[0], &view.device, sizeof view.device);
        else if (memcmp(&signature->word[0], &view.device, sizeof view.device) != 0)
            return false;
        write_tensor(signature, &view, addresses[signature->count++]);
    }
    return true;
}

PyObject *signature_bytes(const Signature *signature)
{
    return PyBytes_FromStringAndSize((const char *)signature->word,
                                     (Py_ssize_t)(signature->words * sizeof signature->word[0]));
}

bool find_current_stream(PyObject *tensor, const Signature *signature, uintptr_t *stream)
{
    TensorDevice device;
    void *current;
    memcpy(&device, &signature->word[0], sizeof device);
    if (find_type(tensor)->exchange->current_stream(device.type, device.index, &current) != 0)
        return false;
    *stream = (uintptr_t)current;
    return true;
}
