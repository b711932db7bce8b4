// Round numbers to few bits with a scale, so that sums of products are exact in any order.

#pragma once
#include "vectors.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

// Return the nearest integers, ties to even.
static inline ints nearest(floats x) {
#ifdef __AVX512F__
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined IN_HALVES
    halved n = {x};
    for (int i = 0; i < 2; i++) n.bits[i] = _mm256_cvtps_epi32(n.half[i]);
    return (ints)n.whole;
#else
    ints n;
    for (int lane = 0; lane < LANES; lane++) n[lane] = (int32_t)rintf(x[lane]);
    return n;
#endif
}

// Return the largest lane. All lanes must be at least 0.
static inline int32_t largest_lane(ints x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
#endif
}

// Return the larger magnitudes as bits. Compared as integers, magnitudes have the order of the floats, with NaN above
// all.
static inline ints larger_magnitudes(ints bits, floats x) {
    const ints magnitude = (ints)x & INT_MAX, is_larger = magnitude > bits;
    return (magnitude & is_larger) | (bits & ~is_larger);
}

static inline float largest_magnitude(ints bits) {
    union { int32_t bits; float value; } largest = {largest_lane(bits)};
    return largest.value;
}

// Return the factor that scales the largest magnitude to `most`, or 0 if it could be infinite.
static inline float inverse_of(float largest, float most) { return largest >= 1e-30f ? most / largest : 0; }

// Round x: [count] -> q: [count] with a largest magnitude of 127; return the scale and the sum of q. If x contains a
// NaN, the scale is NaN.
static inline void round_group(const element *x, long count, int8_t *q, float *scale, int32_t *sum) {
    ints bits = {0}, total = {0};
    for (long i = 0; i < count; i += LANES) bits = larger_magnitudes(bits, load(x + i));
    const float largest = largest_magnitude(bits), inverse = inverse_of(largest, 127);
    for (long i = 0; i < count; i += LANES) {
        const ints n = nearest(load(x + i) * inverse);
        typedef int8_t bytes __attribute__((vector_size(LANES)));
        const bytes b = __builtin_convertvector(n, bytes);
        memcpy(q + i, &b, sizeof b);
        total += n;
    }
    *scale = largest / 127;
    *sum = 0;
    for (int lane = 0; lane < LANES; lane++) *sum += total[lane];
}

// Return sum + n * scale, with a fused instruction if the processor has one. If the compiler decided this for each use,
// a row's bits could depend on how many rows are multiplied with it.
static inline floats add_scaled(floats sum, ints n, floats scale) {
    const floats x = __builtin_convertvector(n, floats);
#ifdef __AVX512F__
    return (floats)_mm512_fmadd_ps((__m512)x, (__m512)scale, (__m512)sum);
#elif defined IN_HALVES
    halved total = {sum};
    const halved factor = {x}, by = {scale};
    for (int i = 0; i < 2; i++) total.half[i] = _mm256_fmadd_ps(factor.half[i], by.half[i], total.half[i]);
    return total.whole;
#elif defined __FMA__ || defined __aarch64__
    for (int lane = 0; lane < LANES; lane++) sum[lane] = __builtin_fmaf(x[lane], scale[lane], sum[lane]);
    return sum;
#else
    return sum + x * scale;
#endif
}
