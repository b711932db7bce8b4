// Vectors of 16 floats, and the dtype of weights and activations: bfloat16 with -DBFLOAT16, float32 without.
//
// The code uses vector extensions of GCC and clang, so it runs on any processor. It calls some instructions of AVX-512
// by name, because the compiler does not generate them: above all `dpbf16ps`, which multiplies 32 pairs of bfloat16 and
// adds two products to each of 16 sums.

#pragma once
#if defined __aarch64__ && !defined __clang__
// With SVE, GCC 12 computes vectors of 64 bytes number by number. GCC's scheduler also moves loads so far ahead that no
// registers are left for sums.
#pragma GCC target("+nosve")
#pragma GCC optimize("no-schedule-insns")
#endif
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

// ---- dtypes

#ifdef BFLOAT16
typedef uint16_t element;
#define PER_WORD 2
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline floats load(const element *p) {
#ifdef __AVX512F__  // GCC 12 would convert two halves and then join them
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    halves h;
    memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
#endif
}

static inline void store(element *p, floats x) {
#ifdef __AVX512BF16__
    halves h = (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x;  // rounds to the nearest number, ties to even; NaN stays NaN
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(x != x);
    halves h = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
#endif
    memcpy(p, &h, sizeof h);
}

static inline floats multiply_add(floats sum, words a, uint32_t b) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#else
    union { uint32_t bits; float value; } low = {b << 16}, high = {b & 0xffff0000};
    sum += (floats)(a << 16) * low.value;
    return sum + (floats)(a & 0xffff0000) * high.value;
#endif
}
#else
typedef float element;
#define PER_WORD 1

static inline floats load(const element *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void store(element *p, floats x) { memcpy(p, &x, sizeof x); }

static inline floats multiply_add(floats sum, words a, uint32_t b) {
    union { uint32_t bits; float value; } one = {b};
    return sum + (floats)a * one.value;
}
#endif

// Round x to the dtype, as `store` and then `load` would.
static inline floats round_lanes(floats x) {
    element all[LANES];
    store(all, x);
    return load(all);
}

// Store the first `count` lanes, for the last columns of a matrix.
static inline void store_some(element *p, floats x, long count) {
    if (count == LANES) {
        store(p, x);
        return;
    }
    element all[LANES];
    store(all, x);
    memcpy(p, all, count * sizeof(element));
}

static inline void store_some_floats(float *p, floats x, long count) {
    if (count == LANES) memcpy(p, &x, sizeof x);
    else memcpy(p, &x, count * sizeof(float));
}

// Store two vectors, bypassing the caches if the processor can: whole lines of 64 bytes, aligned to 64 bytes.
static inline void stream_two(element *p, floats low, floats high) {
#if defined __AVX512BF16__ && defined BFLOAT16
    _mm512_stream_si512((__m512i *)p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store(p, low);
    store(p + LANES, high);
#endif
}

static inline void stream_floats(float *p, floats x) {
#ifdef __AVX512F__
    _mm512_stream_ps(p, (__m512)x);
#else
    memcpy(p, &x, sizeof x);
#endif
}

// Make streamed stores visible to other threads.
static inline void finish_streams(void) {
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

// Sum the lanes pairwise, because in a chain of 16 additions each would wait for the one before it.
static inline float sum_lanes(floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sums[LANES];
    memcpy(sums, &x, sizeof sums);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[half + i];
    return sums[0];
#endif
}

static inline floats pick(ints is_first, floats first, floats second) {
    return (floats)(((ints)first & is_first) | ((ints)second & ~is_first));
}

// Return the larger of a and b, or b if either is NaN.
static inline floats max_of(floats a, floats b) {
#ifdef __AVX512F__
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

// Return e^x for x <= 88, accurate to 2 units in the last place: 2^n times a polynomial of degree 6 in the remainder.
static inline floats exp_lanes(floats x) {
    x = max_of(x, (floats){0} - 87.0f);
    floats n = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the rounded integer
    ints exponent = (ints)n - 0x4b400000;
    n -= 12582912.0f;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (floats)((ints)y + (exponent << 23));
}

