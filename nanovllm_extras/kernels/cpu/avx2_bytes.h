// The product of rounded rows and quantised panels on AVX2, with vectors of eight numbers. Vectors of 16 numbers would be
// kept on the stack.
//
// quantised.c includes this file. A group's sums take 8 of the 16 registers: one row of four panels, two rows of two, or
// four rows of one. They are integers, so they are exact in any order, and the bits are those of any other processor.

#pragma once

// The 16 lanes of a panel's word: two vectors of eight.
#define HALF (LANES / 2)

// Return sum + the products of the four bytes of each lane of `weights` with the four bytes of x. The weights are
// unsigned. Those of 8 bits are multiplied as even and odd bytes, since a sum of two products takes more than 16 bits.
static inline __attribute__((always_inline)) __m256i add_products(
    __m256i sum, __m256i weights, __m256i x, __m256i odd_x, const bool is_int4) {
    if (is_int4) {
        const __m256i pairs = _mm256_maddubs_epi16(weights, x);  // at most 2 * 15 * 127
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    const __m256i even = _mm256_and_si256(weights, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(weights, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, odd_x));
}

// Return what a group's sum begins with: minus the zero of each output times the sum of the row's numbers.
static inline __m256i first_sums(const uint8_t *zeros, int32_t x_sum, const bool is_int4) {
    if (!zeros) return _mm256_set1_epi32(-(is_int4 ? 8 : 128) * x_sum);
    return _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)zeros)), _mm256_set1_epi32(-x_sum));
}

// Multiply the rows of a tile by panels first … first + num_panels - 1 of those in `p`.
static inline __attribute__((always_inline)) void multiply_some(
    const struct quantised *w, const struct rounded *x, const struct panels *p, long row, struct sums out,
    const bool is_int4, const int num_rows, const int first, const int num_panels) {
    const int step = is_int4 ? 8 : 4;
    const long group_words = w->group_size / step * STRIP * LANES, scale_step = w->has_groups ? STRIP * LANES : 0;
    const uint32_t *at = p->words + first * LANES, *const end = at + x->k / step * STRIP * LANES;
    const float *scales = p->scales + first * LANES, *x_scales = x->scales + row * x->num_groups;
    const uint8_t *zeros = p->zeros ? p->zeros + first * LANES : NULL;
    const int32_t *x_sums = x->sums + row * x->num_groups;
    const int8_t *q = x->q + row * x->k;
    __m256 totals[TILE_OF_ROWS][STRIP][2];
#define EACH_SUM for (int r = 0; r < num_rows; r++) for (int i = 0; i < num_panels; i++) for (int half = 0; half < 2; half++)
    EACH_SUM totals[r][i][half] = _mm256_setzero_ps();
    while (at < end) {
        __m256i sums[TILE_OF_ROWS][STRIP][2];
        EACH_SUM sums[r][i][half] = first_sums(zeros ? zeros + i * LANES + half * HALF : NULL,
                                               x_sums[r * x->num_groups], is_int4);
        for (const uint32_t *stop = end - at < group_words ? end : at + group_words; at < stop; at += STRIP * LANES) {
            for (int i = 0; i < num_panels; i += 2) __builtin_prefetch(at + (AHEAD * STRIP + i) * LANES, 0, 2);
            for (int part = 0; part < (is_int4 ? 2 : 1); part++)
                for (int r = 0; r < num_rows; r++, q += 4) {
                    int32_t four;
                    memcpy(&four, q, sizeof four);
                    const __m256i bytes = _mm256_set1_epi32(four), odd_x = _mm256_srai_epi16(bytes, 8);
                    const __m256i own_x = is_int4 ? bytes : _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
                    for (int i = 0; i < num_panels; i++)
                        for (int half = 0; half < 2; half++) {
                            __m256i weights = _mm256_loadu_si256((const __m256i *)(at + i * LANES + half * HALF));
                            if (is_int4) {
                                weights = part ? _mm256_srli_epi16(weights, 4) : weights;
                                weights = _mm256_and_si256(weights, _mm256_set1_epi8(0x0f));
                            }
                            sums[r][i][half] = add_products(sums[r][i][half], weights, own_x, odd_x, is_int4);
                        }
                }
        }
        EACH_SUM {
            const __m256 scale = _mm256_loadu_ps(scales + i * LANES + half * HALF);
            const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x_scales[r * x->num_groups]));
            totals[r][i][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][i][half]), both, totals[r][i][half]);
        }
        scales += scale_step, x_scales++, x_sums++;
        if (zeros) zeros += scale_step;
    }
    EACH_SUM _mm256_storeu_ps(out.at + r * out.row_step + (first + i) * out.panel_step + half * HALF, totals[r][i][half]);
#undef EACH_SUM
}

static inline __attribute__((always_inline)) void multiply_rounded(
    const struct quantised *w, const struct rounded *x, const struct panels *p, long row, struct sums out,
    const bool is_int4, const int num_rows, const int num_panels) {
    const int at_once = num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1;
    for (int first = 0; first < num_panels; first += at_once)
        multiply_some(w, x, p, row, out, is_int4, num_rows, first, num_panels < at_once ? num_panels : at_once);
}
