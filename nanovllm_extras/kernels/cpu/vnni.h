// AVX-VNNI, which most processors with AVX2 have had since 2021: products of bytes or of 16-bit numbers with their sums
// in one instruction, on vectors of eight sums.

#pragma once
#include "vectors.h"

#if defined IN_HALVES && (defined __AVXVNNI__ || defined VNNI_OF_AVX512)
#define HAS_VNNI

// VNNI_OF_AVX512 is for tests on processors without AVX-VNNI: the same instructions in the encoding of AVX-512.
#ifdef __AVXVNNI__
#define DEFINE_VNNI(name, instruction) \
    static inline __m256i name(__m256i sum, __m256i a, __m256i b) { return _mm256_##instruction##_avx_epi32(sum, a, b); }
#else
#define DEFINE_VNNI(name, instruction) \
    static inline __m256i name(__m256i sum, __m256i a, __m256i b) { \
        __asm__("%{evex%} vp" #instruction " %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); \
        return sum; \
    }
#endif

DEFINE_VNNI(add_products_of_bytes, dpbusd)  // each sum + four unsigned bytes of a times four signed bytes of b
DEFINE_VNNI(add_products_of_pairs, dpwssd)  // each sum + two signed 16-bit numbers of a times two of b
#endif
