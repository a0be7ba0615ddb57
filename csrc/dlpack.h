/* The part of DLPack's C exchange API that the launcher calls, declared by hand.
 *
 * Included by launcher.h. It is the standard way to read a tensor's address, sizes and strides and its library's
 * current stream from C, without knowing the library. Every layout and signature below is DLPack 1.x's;
 * tests/test_launcher.py compares them with the header in torch.
 */
#ifndef DEEP_TILE_DLPACK_H
#define DEEP_TILE_DLPACK_H

#include <stdint.h>

enum { EXCHANGE_MAJOR_VERSION = 1 }; /* minor versions only add values */

#define EXCHANGE_ATTRIBUTE "__dlpack_c_exchange_api__" /* an attribute on the tensor's type; holds a capsule */
#define EXCHANGE_CAPSULE "dlpack_exchange_api"

enum { DEVICE_CUDA = 2 };

typedef struct { /* DLDevice */
    int type;    /* an enum */
    int32_t index;
} TensorDevice;

typedef struct { /* DLDataType */
    uint8_t code, bits;
    uint16_t lanes;
} TensorDtype;

typedef struct { /* DLTensor; a view of memory that the tensor object owns */
    void *data;
    TensorDevice device;
    int32_t rank;
    TensorDtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
} TensorView;

typedef struct ExchangeHeader { /* DLPackExchangeAPIHeader */
    uint32_t major, minor;
    struct ExchangeHeader *older; /* the same library's table for an older version, or NULL */
} ExchangeHeader;

typedef struct { /* DLPackExchangeAPI. Both calls return 0, or -1 with a Python exception set; both need the GIL. */
    ExchangeHeader header;
    void (*unused[3])(void);
    int (*view)(void *tensor, TensorView *view);                  /* NULL where the library has none */
    int (*current_stream)(int type, int32_t index, void **stream); /* for device (type, index) */
} Exchange;

#endif
