/* What the three files of deep_tile._launcher share. Included first by each: it brings Python.h, of which setup.py asks
 * for the limited API where that is there.
 *
 * driver.c opens the driver and says what its errors mean; tensors.c reads tensors; launch.c is the module.
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

/* Makes `context` current unless it is, for the calls that work in whichever context is current: a thread that has not
 * used the GPU yet has none, and one that uses another GPU another. False, with nothing to leave, if that fails. */
bool enter_context(Failure *failure, DriverContext context, bool *pushed);
void leave_context(Failure *failure, bool pushed);

/* --------------------------------------------------------------------------------------------------- tensors.c ---- */

enum { MAX_TENSORS = 9, MAX_TENSOR_RANK = 3, MAX_TENSOR_TYPES = 4, TMA_ALIGNMENT_BYTES = 16 };

/* What a tensor's library knows of it and DLPack does not tell, in the library's own object, whose address the Python
 * object holds: a word of bits that say what it is besides memory, of which a plain tensor has no others than `plain`;
 * and the address of its storage, which holds where its memory begins and how many bytes there are. */
typedef struct {
    Py_ssize_t object_offset, keys_offset;
    uint64_t plain; /* 0: of this type every tensor is plain */
    Py_ssize_t storage_offset, begin_offset, bytes_offset; /* the first 0: storages are not looked at */
} TensorPlace;

/* Properties of some tensors, as words to compare: the device of all, then of each its head, sizes and strides. The
 * head holds the rank, so that no two lists of tensors are written alike. */
typedef struct {
    size_t words;
    int64_t word[1 + MAX_TENSORS * (1 + 2 * MAX_TENSOR_RANK)];
} Signature;

/* Reads tensors of the type from now on. 1, or 0 for a type that cannot be read, or -1 with an exception set. */
int learn_tensor_type(PyObject *type, TensorPlace place);

/* Looks at a tensor. False, without an exception, for what no kernel can be launched with: no tensor of a known type,
 * one that is not plain, and one without memory, or with too little. Python's checks then say what is wrong, or that
 * nothing is. */
bool view_tensor(PyObject *tensor, TensorView *view, uintptr_t *address);

/* Writes the tensors' properties into `signature` and their addresses into `addresses`.
 *
 * False as view_tensor(), and for a tensor of a higher rank or on another device than the first. */
bool read_tensors(PyObject *const tensors[], Py_ssize_t count, Signature *signature, uintptr_t addresses[]);

PyObject *signature_bytes(const Signature *signature);

/* The stream that is current for `tensor`, the first one of `signature`. False with an exception set if that fails. */
bool find_current_stream(PyObject *tensor, const Signature *signature, uintptr_t *stream);

#endif
