/* GemmParams: the one argument of every kernel.
 *
 * Shared by csrc/launcher.c (C11), which fills it, and by the kernels (C++20, NVRTC), which read it; neither may
 * include a system header here. Sizes and strides are in elements unless the name says otherwise.
 */
#ifndef DEEP_TILE_PARAMS_H
#define DEEP_TILE_PARAMS_H

#ifdef __cplusplus
#define DEEP_TILE_ALIGNAS(bytes) alignas(bytes)
#else
#define DEEP_TILE_ALIGNAS(bytes) _Alignas(bytes)
#endif

/* The driver's CUtensorMap, opaque: 128 bytes, 64-byte aligned. */
typedef struct {
    DEEP_TILE_ALIGNAS(64) unsigned long long opaque[16];
} TensorMap;

typedef struct {
    TensorMap a_map;   /* a   [m, k], box [a_box_rows, block_k] */
    TensorMap b_map;   /* b   [n, k], box [block_n / cluster_m, block_k] */
    TensorMap out_map; /* out [m, n], box [store_rows, store_columns]; unused by kernels that store directly */
    const float *a_scale;
    const float *b_scale;
    void *out;
    long long a_scale_stride_m, a_scale_stride_k;
    long long b_scale_stride_n, b_scale_stride_k;
    long long out_stride_m;
    int m, n, k;
    int a_box_rows;      /* rows of a that one TMA load writes: fewer than block_m / cluster_n when m is small */
    int early_b;         /* b is constant: it may be requested before the wait for the preceding kernel */
    int bulk_scale_rows; /* rows of a whose scales lie side by side where TMA can copy them: all or none */
    int raster_rows_log2; /* of the rows of tiles that the raster descends before it steps along n */
} GemmParams;

#endif
