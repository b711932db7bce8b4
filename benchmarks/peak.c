// The arithmetic of a core that waits for no memory: chains of multiply-adds that do not depend on one another. peak.py
// compiles this file with the flags of the kernels, so that the instructions are those of their products. -DBYTES: those
// of products with quantised weights.

#include "vectors.h"
#include "vnni.h"
#if defined BFLOAT16 && (defined AMX || defined AMX_EMULATED)
#define HAS_TILES
#include "tiles.h"
#elif defined __aarch64__
#include <arm_neon.h>
#endif

#define CHAINS 12  // a multiply-add has a latency of 4 to 6 cycles, and two begin in each cycle
#define EACH_CHAIN _Pragma("GCC unroll 16") for (int i = 0; i < CHAINS; i++)

#ifdef HAS_TILES
#ifdef BYTES
#define MULTIPLY_TILES tile_multiply_bytes
#define OPERATIONS (4 * 2 * TILE_ROWS * LANES * TILE_WORDS * 4)
#else
#define MULTIPLY_TILES tile_multiply
#define OPERATIONS (4 * 2 * TILE_ROWS * LANES * TILE_WORDS * PER_WORD)
#endif
#else
#if defined BYTES && defined __AVX512VNNI__
typedef __m512i chain;
#define MULTIPLY(sum, x) _mm512_dpbusd_epi32(sum, x, x)
#define PAIRS 4
#elif defined BYTES && defined HAS_VNNI
typedef __m256i chain;
#define MULTIPLY(sum, x) add_products_of_bytes(sum, x, x)
#define PAIRS 4
#elif defined BYTES && defined IN_HALVES
typedef __m256i chain;
#define MULTIPLY(sum, x) _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, x))
#define PAIRS 4
#elif defined BFLOAT16 && defined __AVX512BF16__
typedef __m512 chain;
#define MULTIPLY(sum, x) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(x))
#define PAIRS 2
#elif defined __AVX512F__
typedef __m512 chain;
#define MULTIPLY(sum, x) _mm512_fmadd_ps(sum, x, x)
#define PAIRS 1
#elif defined IN_HALVES
typedef __m256 chain;
#define MULTIPLY(sum, x) _mm256_fmadd_ps(sum, x, x)
#define PAIRS 1
#elif defined __aarch64__ && defined BFLOAT16 && !defined WIDENS
typedef float32x4_t chain;
#define MULTIPLY(sum, x) vbfdotq_f32(sum, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(x))
#define PAIRS 2
#elif defined __aarch64__
typedef float32x4_t chain;
#define MULTIPLY(sum, x) vfmaq_f32(x, sum, x)
#define PAIRS 1
#else
typedef float chain __attribute__((vector_size(16)));
#define MULTIPLY(sum, x) ((sum) * (x) + (x))
#define PAIRS 1
#endif
#define OPERATIONS (CHAINS * 2 * PAIRS * (long)(sizeof(chain) / sizeof(float)))
#endif

// Multiply `rounds` times in each chain. Return the number of operations, two for each multiply-add.
long multiply_often(long rounds) {
#ifdef HAS_TILES
    shape_tiles(2 * TILE_ROWS, TILE_WORDS);
    for (long round = 0; round < rounds; round++) {
        MULTIPLY_TILES(SUMS_0, X_UPPER, PANEL_EVEN);
        MULTIPLY_TILES(SUMS_1, X_UPPER, PANEL_ODD);
        MULTIPLY_TILES(SUMS_2, X_LOWER, PANEL_EVEN);
        MULTIPLY_TILES(SUMS_3, X_LOWER, PANEL_ODD);
    }
    release_tiles();
#else
    chain x, sums[CHAINS];
    memset(&x, 0, sizeof x);
    EACH_CHAIN sums[i] = x;
    for (long round = 0; round < rounds; round++) {
        EACH_CHAIN {
            sums[i] = MULTIPLY(sums[i], x);
#if defined __aarch64__
            __asm__ volatile("" : "+w"(sums[i]));
#elif defined __x86_64__
            __asm__ volatile("" : "+v"(sums[i]), "+v"(x));  // computed although no one reads it, and x may have changed
#endif
        }
    }
#endif
    return rounds * OPERATIONS;
}
