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

/* Sizes first: what the first request waits for is read from one line of constant memory. */
typedef struct {
    int m, n, k;
    int raster_rows_log2;          /* of the rows of tiles that the raster descends before it steps along n */
    unsigned last_rows_reciprocal; /* of the rows of cluster tiles in its last group: 2^31 / rows, rounded up */
    int a_tail_rows, b_tail_rows;  /* rows in the box of the last tile; 0 where all tiles are full */
    int early_b;                   /* b is constant: it may be requested before the wait for the preceding kernel */
    int bulk_scale_rows;           /* rows of a whose scales lie side by side where TMA can copy them: all or none */
    int narrow_columns;            /* of narrow tiles, which lie before the others; 0 where all are of one width */
    const float *a_scale;
    const float *b_scale;
    void *out;
    unsigned a_scale_stride_m, a_scale_stride_k; /* the last element is within 4 GB of the first */
    unsigned b_scale_stride_n, b_scale_stride_k;
    long long out_stride_m;
    TensorMap a_maps[2]; /* a   [m, k], box [block_m / cluster_n, 128]; for a last tile with fewer [a_tail_rows, 128] */
    TensorMap b_maps[2]; /* b   [n, k], box [block_n / cluster_m, 128]; for a last tile with fewer [b_tail_rows, 128] */
    TensorMap out_map;   /* out [m, n], box [store_rows, store_columns]; unused by kernels that store directly */
    TensorMap narrow_b_map; /* b, box [narrow_n, 128]; unused where there are no narrow tiles */
} GemmParams;

#endif
