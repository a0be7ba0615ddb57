/* The CUDA driver: its entry points, its errors, and the current context.
 *
 * Called by launch.c. Invariant: libcuda is opened by the first require_driver(), never by the import, so that
 * importing works without a driver and survives fork.
 */
#include "launcher.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

Driver driver;
static char driver_problem[512]; /* why `driver` cannot be used; empty when it can */
static pthread_once_t driver_opened = PTHREAD_ONCE_INIT;

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

bool require_driver(void)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_once(&driver_opened, open_driver);
    Py_END_ALLOW_THREADS
    return driver_problem[0] == '\0' || FAIL(PyExc_RuntimeError, "%s", driver_problem);
}

/* The remedy for an error, "" if unknown, or STICKY. */
static const char *find_remedy(DriverResult result)
{
#define STICKY NULL
#define BAD_CUBIN "the cubin is damaged or newer than the driver: clear the kernel cache, or update " REQUIRED_DRIVER
#define RETURN_REMEDY(name, number, remedy) case number: return remedy;
    switch (result) {
        DRIVER_ERRORS(RETURN_REMEDY)
    default:
        return "";
    }
}

void raise_failure(const Failure *failure, PyObject *kernel_name)
{
    const char *name = NULL, *text = NULL; /* stay NULL for a code that the driver does not know */
    driver.cuGetErrorName(failure->result, &name);
    driver.cuGetErrorString(failure->result, &text);
    name = name ? name : "unknown error";
    text = text ? text : "no description";
    PyObject *subject = kernel_name ? PyUnicode_FromFormat(" for kernel %U", kernel_name) : PyUnicode_FromString("");
    const char *remedy = find_remedy(failure->result);
    if (subject != NULL && remedy == STICKY)
        PyErr_Format(PyExc_RuntimeError,
                     "an earlier kernel of this process failed: %s (%u), %s; %s%U only met it. CUDA is of no more use "
                     "to this process: start another, and find that kernel with compute-sanitizer or "
                     "CUDA_LAUNCH_BLOCKING=1",
                     name, failure->result, text, failure->call, subject);
    else if (subject != NULL)
        PyErr_Format(PyExc_RuntimeError, "%s failed%U: %s (%u), %s%s%s", failure->call, subject, name, failure->result,
                     text, remedy[0] ? "; " : "", remedy);
    Py_XDECREF(subject);
}

bool enter_context(Failure *failure, DriverContext context, bool *pushed)
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

void leave_context(Failure *failure, bool pushed)
{
    DriverContext popped;
    if (pushed)
        (void)CALL(failure, cuCtxPopCurrent, &popped);
}
