/* Shared declarations for deep_tile._launcher. Every file includes it first: it brings Python.h, with the limited API
 * where setup.py asks for it.
 *
 * driver.c opens the driver and explains its errors; tensors.c reads tensors; launch.c is the module.
 */
#ifndef DEEP_TILE_LAUNCHER_H
#define DEEP_TILE_LAUNCHER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "dlpack.h"
#include "driver.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Sets an exception, as PyErr_Format does; false, for the caller to return. */
#define FAIL(exception, ...) (PyErr_Format(exception, __VA_ARGS__), false)

/* ---------------------------------------------------------------------------------------------------- driver.c ---- */

#define DECLARE_CALL(name, parameters) DriverResult(*name) parameters;
typedef struct {
    DRIVER_CALLS(DECLARE_CALL)
} Driver;

extern Driver driver;

/* Opens the driver on first use; false with RuntimeError set when that cannot be done. */
bool require_driver(void);

/* The first driver call that failed, kept until the GIL is held again. */
typedef struct {
    const char *call; /* NULL: none failed */
    DriverResult result;
} Failure;

static inline bool succeeded(Failure *failure, const char *call, DriverResult result)
{
    if (result != 0 && failure->call == NULL)
        *failure = (Failure){call, result};
    return result == 0;
}

#define CALL(failure, name, ...) succeeded(failure, #name, driver.name(__VA_ARGS__))

/* Sets RuntimeError; `kernel_name` may be NULL. */
void raise_failure(const Failure *failure, PyObject *kernel_name);

/* False, with RuntimeError set, if a call failed. */
static inline bool none_failed(const Failure *failure, PyObject *kernel_name)
{
    if (failure->call != NULL)
        raise_failure(failure, kernel_name);
    return failure->call == NULL;
}

/* Makes `context` current unless it is, for driver calls that use the current context: a thread that has not used the
 * GPU yet has none, and one on another GPU has another. False, with nothing to leave, if that fails. */
bool enter_context(Failure *failure, DriverContext context, bool *pushed);
void leave_context(Failure *failure, bool pushed);

/* --------------------------------------------------------------------------------------------------- tensors.c ---- */

enum { MAX_TENSORS = 9, MAX_TENSOR_RANK = 4, MAX_TENSOR_TYPES = 4, TMA_ALIGNMENT_BYTES = 16 };

/* Facts that DLPack does not export, read from the library's own object, to which the Python object points: a bit set
 * that describes the tensor (a plain one has only bits in `plain`), and its storage's address, which holds the memory's
 * start and size. */
typedef struct {
    Py_ssize_t object_offset, keys_offset;
    uint64_t plain; /* 0: every tensor with this type is plain */
    Py_ssize_t storage_offset, begin_offset, bytes_offset; /* if the first is 0, storages are not read */
} TensorPlace;

/* Tensor properties as comparable words: the common device, then per tensor a head, sizes and strides, or a zero for
 * None. The head holds the rank, so different tensor lists have different words. */
typedef struct {
    size_t words, count; /* count: non-None tensors */
    int64_t word[1 + MAX_TENSORS * (1 + 2 * MAX_TENSOR_RANK)];
} Signature;

/* Accepts tensors with this type from now on. 1; 0 for a type that cannot be read; -1 with an exception set. */
int learn_tensor_type(PyObject *type, TensorPlace place);

/* Views a tensor. False, without an exception, if no kernel can be launched with it: not a known tensor type, not
 * plain, without memory, or with too little. Python's checks then report the fault, if any. */
bool view_tensor(PyObject *tensor, TensorView *view, uintptr_t *address);

/* Writes tensor properties into `signature` and the addresses of non-None tensors into `addresses`.
 *
 * False as view_tensor(); also if the first is None, or a tensor has a higher rank or another device. */
bool read_tensors(PyObject *const tensors[], Py_ssize_t count, Signature *signature, uintptr_t addresses[]);

PyObject *signature_bytes(const Signature *signature);

/* The current stream for `tensor`, the first in `signature`. False with an exception set if that fails. */
bool find_current_stream(PyObject *tensor, const Signature *signature, uintptr_t *stream);

#endif
