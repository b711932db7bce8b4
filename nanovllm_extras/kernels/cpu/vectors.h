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
#if defined __AVX512F__ || defined __AVX2__
#include <immintrin.h>
#endif

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

#if defined __AVX2__ && defined __FMA__ && !defined __AVX512F__
// AVX2's registers hold half of a vector, and GCC keeps whole ones on the stack between any two operations. So the
// functions with many operations compute each half by itself.
#define IN_HALVES
typedef union { floats whole; __m256 half[2]; __m256i bits[2]; } halved;
#endif

#if defined BFLOAT16 && !defined __AVX512BF16__ && !defined AMX_EMULATED && !defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// No instruction multiplies bfloat16. A product widens its rows to float32 once, because a conversion for each
// multiplication takes more time than the multiplication.
#define WIDENS
#endif

// ---- dtypes

#ifdef BFLOAT16
typedef uint16_t element;
#define PER_WORD 2
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline floats load(const element *p) {
#ifdef __AVX512F__  // GCC 12 would convert two halves and then join them
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined IN_HALVES
    halved x;
    for (int i = 0; i < 2; i++)
        x.bits[i] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + i)), 16);
    return x.whole;
#else
    halves h;
    memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
#endif
}

#ifdef IN_HALVES
// Return the bits of x, rounded to bfloat16: to the nearest number, ties to even; NaN stays NaN.
static inline __m256i round_half(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}
#endif

static inline void store(element *p, floats x) {
#ifdef __AVX512BF16__
    halves h = (halves)_mm512_cvtneps_pbh((__m512)x);
#elif defined IN_HALVES
    const halved in = {x};
    const __m256i low = _mm256_srli_epi32(round_half(in.half[0]), 16), high = _mm256_srli_epi32(round_half(in.half[1]), 16);
    const __m256i h = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
    words bits = (words)x;  // rounds to the nearest number, ties to even; NaN stays NaN
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(x != x);
    halves h = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
#endif
    memcpy(p, &h, sizeof h);
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
#endif

// A number of the rows that a product multiplies by panels, and the numbers of one word.
#ifdef WIDENS
typedef float factor;
typedef struct { factor low, high; } factors;
#else
typedef element factor;
typedef uint32_t factors;
#endif

// Return sum + the products of the numbers of each lane of `a` with those of b.
static inline floats multiply_add(floats sum, words a, factors b) {
#if defined WIDENS
    sum += (floats)(a << 16) * b.low;
    return sum + (floats)(a & 0xffff0000) * b.high;
#elif defined BFLOAT16 && defined __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#elif defined BFLOAT16
    union { uint32_t bits; float value; } low = {b << 16}, high = {b & 0xffff0000};
    sum += (floats)(a << 16) * low.value;
    return sum + (floats)(a & 0xffff0000) * high.value;
#else
    union { uint32_t bits; float value; } one = {b};
    return sum + (floats)a * one.value;
#endif
}

// Write x: [count] as a product takes it.
static inline void copy_factors(const element *x, factor *to, long count) {
#ifdef WIDENS
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const floats wide = load(x + i);
        memcpy(to + i, &wide, sizeof wide);
    }
    for (; i < count; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
#else
    memcpy(to, x, count * sizeof *x);
#endif
}

// Return x: [count] as a product takes it, in `buffer` if it has to be widened.
static inline const factors *take_factors(const element *x, factor *buffer, long count) {
#ifdef WIDENS
    copy_factors(x, buffer, count);
    return (const factors *)buffer;
#else
    (void)buffer, (void)count;
    return (const factors *)x;
#endif
}

// Round x to the dtype, as `store` and then `load` would.
static inline floats round_lanes(floats x) {
#if defined IN_HALVES && defined BFLOAT16
    halved y = {x};
    for (int i = 0; i < 2; i++) y.bits[i] = _mm256_and_si256(round_half(y.half[i]), _mm256_set1_epi32((int)0xffff0000));
    return y.whole;
#endif
    element all[LANES];
    store(all, x);
    return load(all);
}

static inline void store_factors(factor *p, floats x) {
#ifdef WIDENS
    x = round_lanes(x);
    memcpy(p, &x, sizeof x);
#else
    store(p, x);
#endif
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
#elif defined IN_HALVES
    const halved in = {x};
    const __m256 eight = _mm256_add_ps(in.half[0], in.half[1]);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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
#elif defined IN_HALVES
    halved x = {a};
    const halved y = {b};
    for (int i = 0; i < 2; i++) x.half[i] = _mm256_max_ps(x.half[i], y.half[i]);
    return x.whole;
#else
    return pick(a > b, a, b);
#endif
}

#ifdef IN_HALVES
// Return e^x as exp_lanes does.
static inline __m256 exp_half(__m256 x) {
#define EACH(c) _mm256_set1_ps(c)
    x = _mm256_max_ps(x, EACH(-87.0f));
    __m256 n = _mm256_fmadd_ps(x, EACH(1.44269504f), EACH(12582912.0f));
    const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(n), _mm256_set1_epi32(0x4b400000));
    n = _mm256_sub_ps(n, EACH(12582912.0f));
    const __m256 r = _mm256_fmadd_ps(n, EACH(2.12194440e-4f), _mm256_fnmadd_ps(n, EACH(0.693359375f), x));
    __m256 y = _mm256_fmadd_ps(r, EACH(1.9875691500e-4f), EACH(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, r, EACH(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, r, EACH(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, r, EACH(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, r, EACH(5.0000001201e-1f));
    y = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(y, r), r, r), EACH(1.0f));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(exponent, 23)));
#undef EACH
}
#endif

// Return e^x for x <= 88, accurate to 2 units in the last place: 2^n times a polynomial of degree 6 in the remainder.
static inline floats exp_lanes(floats x) {
#ifdef IN_HALVES
    halved e = {x};
    for (int i = 0; i < 2; i++) e.half[i] = exp_half(e.half[i]);
    return e.whole;
#endif
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

