// The matrix product on processors with AVX2 and without AVX-512, with vectors of eight floats. Vectors of 16 floats
// would be kept on the stack.
//
// product.h includes this file. A panel's 16 lanes are two vectors. Sums take 12 of the 16 registers: up to three rows
// of two panels, or six rows of one panel. The order of a row's sums does not depend on the number of rows.

#pragma once
#include "vectors.h"

#define UNROLLED _Pragma("GCC unroll 16")
// GCC would keep the factors of a panel for the next one, and then a sum on the stack.
#define RELOAD(p) __asm__ volatile("" : "+r"(p))

static inline __m256i load_column(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

#ifdef BFLOAT16
// A word is a pair of bfloat16. Its low half is multiplied first, then its high half. Those of x are float32 already.
#define LOW(column) _mm256_castsi256_ps(_mm256_slli_epi32(column, 16))
#define HIGH(column) _mm256_castsi256_ps(_mm256_and_si256(column, _mm256_set1_epi32((int)0xffff0000)))
#define LOW_FACTOR(x) _mm256_broadcast_ss(&(x)->low)
#define HIGH_FACTOR(x) _mm256_broadcast_ss(&(x)->high)
#else
#define LOW(column) _mm256_castsi256_ps(column)
#define LOW_FACTOR(x) _mm256_broadcast_ss((const float *)(x))
#endif

// Multiply one half of the next word of the panels by that of each row.
#define MULTIPLY_HALF(HALF, FACTOR) \
    UNROLLED for (int i = 0; i < num_panels; i++) { \
        const __m256 left = HALF(load_column(panels[i])), right = HALF(load_column(panels[i] + LANES / 2)); \
        const factors *of_rows = x; \
        RELOAD(of_rows); \
        UNROLLED for (int row = 0; row < num_rows; row++) { \
            const __m256 of_row = FACTOR(of_rows + row * stride); \
            sums[row][i][0] = _mm256_fmadd_ps(left, of_row, sums[row][i][0]); \
            sums[row][i][1] = _mm256_fmadd_ps(right, of_row, sums[row][i][1]); \
        } \
    }

// Compute panels first … first + num_panels - 1 of the product.
static inline __attribute__((always_inline)) void multiply_panels(
    const struct product *p, const int num_rows, const int first, const int num_panels) {
    __m256 sums[ROWS][PANELS][2];
    float *const out = p->out + first * LANES;
#define EACH_SUM \
    UNROLLED for (int row = 0; row < num_rows; row++) UNROLLED for (int i = 0; i < num_panels; i++) \
        UNROLLED for (int part = 0; part < 2; part++)
#define AT (out + row * p->out_stride + i * LANES + part * LANES / 2)
    EACH_SUM sums[row][i][part] = p->adds ? _mm256_loadu_ps(AT) : _mm256_setzero_ps();
    const long per_block = words_per_block(p), num_blocks = count_blocks(p), stride = p->x_stride;
    for (long start = 0, block = 0; start < p->num_words; start += per_block, block++) {
        const uint32_t *panels[PANELS], *next[PANELS];
        const factors *x = p->x + start;
        UNROLLED for (int i = 0; i < num_panels; i++) {
            panels[i] = panel_block(p, first + i, block);
            next[i] = panel_after(p, first + i, block, num_blocks);
        }
        const long left_over = p->num_words - start;
        const factors *const end = x + (left_over < per_block ? left_over : per_block);
        const factors *const whole = p->is_odd && left_over <= per_block ? end - 1 : end;
        for (; x < end; x++) {
            MULTIPLY_HALF(LOW, LOW_FACTOR)
#ifdef BFLOAT16
            if (x < whole) {
                MULTIPLY_HALF(HIGH, HIGH_FACTOR)
            }
#else
            (void)whole;
#endif
            UNROLLED for (int i = 0; i < num_panels; i++) {
                __builtin_prefetch(next[i], 0, 2);
                panels[i] += LANES;
                next[i] += LANES;
            }
        }
    }
    EACH_SUM _mm256_storeu_ps(AT, sums[row][i][part]);
#undef EACH_SUM
#undef AT
}
