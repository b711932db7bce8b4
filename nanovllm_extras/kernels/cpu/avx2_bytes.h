// The product of rounded rows and quantised panels on AVX2, with vectors of eight numbers. Vectors of 16 numbers would be
// kept on the stack.
//
// quantised.c includes this file. All rows are multiplied by one group of a strip before the next group is read, so that
// memory is read from one end to the other and the group's words (8 KiB of 128 inputs with 8 bits) stay in the L1 cache.
// A group's sums are integers, so they are exact in any order, and the bits are those of any other processor. Between
// groups, a row's totals are kept in memory, and the groups' sums are added in their order.

#pragma once
#include "vnni.h"

#define UNROLLED _Pragma("GCC unroll 16")
#define NOT_UNROLLED _Pragma("GCC unroll 1")  // otherwise GCC 12 keeps sums on the stack
#define STAY(sum) __asm__("" : "+x"(sum))     // as above, for products that GCC would compute ahead

// A panel's word is two vectors of eight lanes.
#define HALF (LANES / 2)
#define VECTORS 2

// Sums that a tile needs: those of 1 row of 4 panels, of 2 rows of 2 panels, or of all its rows and 1 panel.
#define PANELS_OF(num_rows) ((num_rows) == 1 ? 4 : (num_rows) == 2 ? 2 : 1)
#define MOST_SUMS (TILE_OF_ROWS * VECTORS > 8 ? TILE_OF_ROWS * VECTORS : 8)

// The bytes from the words that are multiplied to those that are prefetched.
#define AHEAD_BYTES 6144

// One group of inputs, for some rows and panels of a strip.
struct group {
    const uint32_t *words;
    long num_words, num_groups;  // words of a panel; groups of a row
    const int8_t *x;             // interleaved rows of a tile
    const int32_t *x_sums;       // of row r: r * num_groups further, as x_scales
    const float *x_scales, *scales;
    const uint8_t *zeros;  // or NULL
    float *totals;         // of row r and panel i: r * row_step + i * panel_step further
    long row_step, panel_step;
    bool is_first;
    const char *next;  // what to prefetch meanwhile, or NULL
};

// Prefetch the next lines, as many as `num_panels` panels of a word have. They are in the order of addresses although
// panels are read with a stride, and all of them, because not every processor prefetches a line's neighbour.
static inline __attribute__((always_inline)) const char *prefetch_lines(const char *next, const int num_panels) {
    if (!next) return NULL;
    UNROLLED for (int i = 0; i < num_panels; i++) __builtin_prefetch(next + i * 64, 0, 3);
    return next + num_panels * 64;
}

static inline __m256i load_half(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

static inline __m256i repeat_bytes(const int8_t *four) {
    int32_t bytes;
    memcpy(&bytes, four, sizeof bytes);
    return _mm256_set1_epi32(bytes);
}

#define EACH_VECTOR UNROLLED for (int v = 0; v < num_panels * VECTORS; v++)
#define EACH_ROW UNROLLED for (int r = 0; r < num_rows; r++)
#define ONES _mm256_set1_epi16(1)

#ifdef HAS_VNNI
// What the bytes that are multiplied are larger than the weights by, unless the group has zeros.
#define OFFSET(is_int4) ((is_int4) ? 8 : 128)
#define OFFSET_OF_ZEROS(is_int4) 0  // and what they are larger by than q

static inline __attribute__((always_inline)) void add_products(
    __m256i sums[TILE_OF_ROWS][MOST_SUMS], const struct group *g, const bool is_int4, const int num_rows,
    const int num_panels) {
    const uint32_t *words = g->words;
    const int8_t *x = g->x;
    const char *next = g->next;
    NOT_UNROLLED for (long word = 0; word < g->num_words; word++, words += STRIP * LANES) {
        next = prefetch_lines(next, num_panels);
        for (int part = 0; part < (is_int4 ? 2 : 1); part++, x += 4 * num_rows) {
            __m256i q[MOST_SUMS];
            EACH_VECTOR {
                q[v] = load_half(words + v * HALF);
                if (is_int4) q[v] = _mm256_and_si256(part ? _mm256_srli_epi16(q[v], 4) : q[v], _mm256_set1_epi8(15));
            }
            EACH_ROW {
                const __m256i four = repeat_bytes(x + 4 * r);
                EACH_VECTOR sums[r][v] = add_products_of_bytes(sums[r][v], q[v], four);
            }
        }
    }
}
#else
#define OFFSET(is_int4) ((is_int4) ? 8 : 0)
#define OFFSET_OF_ZEROS(is_int4) ((is_int4) ? 0 : 128)

// With 4 bits, 16 bits hold the sum of eight products of pairs, at most 8 * 2 * 15 * 127 = 30480. With 8 bits, the
// weight q - 128 is multiplied as its magnitude, an unsigned byte of at most 128, by x with the weight's sign: at most
// 2 * 128 * 127 = 32512 for a pair, because round_group never gives -128.
static inline __attribute__((always_inline)) void add_products(
    __m256i sums[TILE_OF_ROWS][MOST_SUMS], const struct group *g, const bool is_int4, const int num_rows,
    const int num_panels) {
    const uint32_t *words = g->words, *const end = words + g->num_words * STRIP * LANES;
    const int8_t *x = g->x;
    const char *next = g->next;
    if (is_int4) {
        while (words < end) {
            const uint32_t *const stop = end - words < 4 * STRIP * LANES ? end : words + 4 * STRIP * LANES;
            __m256i pairs[TILE_OF_ROWS][MOST_SUMS];
            EACH_ROW EACH_VECTOR pairs[r][v] = _mm256_setzero_si256();
            NOT_UNROLLED for (; words < stop; words += STRIP * LANES) {
                next = prefetch_lines(next, num_panels);
                UNROLLED for (int part = 0; part < 2; part++, x += 4 * num_rows) {
                    __m256i q[MOST_SUMS];
                    EACH_VECTOR {
                        const __m256i both = load_half(words + v * HALF);
                        q[v] = _mm256_and_si256(part ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
                    }
                    EACH_ROW {
                        const __m256i four = repeat_bytes(x + 4 * r);
                        EACH_VECTOR {
                            pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(q[v], four));
                            STAY(pairs[r][v]);
                        }
                    }
                }
            }
            EACH_ROW EACH_VECTOR sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs[r][v], ONES));
        }
        return;
    }
    NOT_UNROLLED for (; words < end; words += STRIP * LANES, x += 4 * num_rows) {
        next = prefetch_lines(next, num_panels);
        __m256i weights[MOST_SUMS], magnitudes[MOST_SUMS];
        EACH_VECTOR {
            weights[v] = _mm256_xor_si256(load_half(words + v * HALF), _mm256_set1_epi8(-128));
            magnitudes[v] = _mm256_abs_epi8(weights[v]);
        }
        EACH_ROW {
            const __m256i four = repeat_bytes(x + 4 * r);
            EACH_VECTOR {
                const __m256i pairs = _mm256_maddubs_epi16(magnitudes[v], _mm256_sign_epi8(four, weights[v]));
                sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ONES));
                STAY(sums[r][v]);
            }
        }
    }
}
#endif

// Add the sums of one group to the totals of `num_rows` rows and `num_panels` panels.
static inline __attribute__((always_inline)) void multiply_group(
    const struct group *g, const bool is_int4, const int num_rows, const int num_panels) {
    __m256i sums[TILE_OF_ROWS][MOST_SUMS];
    EACH_ROW {
        const int32_t x_sum = g->x_sums[r * g->num_groups];
        EACH_VECTOR {
            if (g->zeros) {
                const __m256i zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(g->zeros + v * HALF)));
                const __m256i offset = _mm256_sub_epi32(zero, _mm256_set1_epi32(OFFSET_OF_ZEROS(is_int4)));
                sums[r][v] = _mm256_mullo_epi32(offset, _mm256_set1_epi32(-x_sum));
            } else sums[r][v] = _mm256_set1_epi32(-OFFSET(is_int4) * x_sum);
        }
    }
    add_products(sums, g, is_int4, num_rows, num_panels);
    EACH_ROW EACH_VECTOR {
        float *total = g->totals + r * g->row_step + v / VECTORS * g->panel_step + v % VECTORS * HALF;
        const __m256 by = _mm256_set1_ps(g->x_scales[r * g->num_groups]);
        const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(g->scales + v * HALF), by);
        const __m256 before = g->is_first ? _mm256_setzero_ps() : _mm256_loadu_ps(total);
        _mm256_storeu_ps(total, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), scale, before));
    }
}

// Define a function for each combination of counts. With counts that the compiler knows, sums stay in registers.
#define FEW(DO) DO(1, 1) DO(1, 2) DO(1, 4) DO(2, 1) DO(2, 2) DO(4, 1)
#if TILE_OF_ROWS == 6
#define EACH(DO) FEW(DO) DO(6, 1)
#else
#define EACH(DO) FEW(DO)
#endif
#define DEFINE_OF(bits, m, n) \
    static __attribute__((noinline)) void multiply_##bits##_##m##_##n(const struct group *g) { \
        multiply_group(g, bits == 4, m, n); \
    }
#define DEFINE(m, n) DEFINE_OF(8, m, n) DEFINE_OF(4, m, n)
EACH(DEFINE)

static void multiply_group_of(long bits, const struct group *g, int num_rows, int num_panels) {
#define CASE_OF(bits, m, n) case (bits) * 256 + (m) * 16 + (n): multiply_##bits##_##m##_##n(g); break;
#define CASE(m, n) CASE_OF(8, m, n) CASE_OF(4, m, n)
    switch (bits * 256 + num_rows * 16 + num_panels) { EACH(CASE) }
}

// Compute the totals of rows `first` … `last - 1` for `count` panels of one strip: panel i of row r is at
// `totals + (r - first) * row_step + i * panel_step`.
static void multiply_strip(const struct quantised *w, const struct rounded *x, const struct panels *p, int count,
                           long first, long last, float *totals, long row_step, long panel_step) {
    const long per_word = w->bits == 4 ? 8 : 4, num_words = x->k / per_word, of_group = w->group_size / per_word;
    for (long group = 0, word = 0; group < x->num_groups; group++, word += of_group) {
        const long own = w->has_groups ? group * STRIP * LANES : 0;
        struct group g = {.num_words = num_words - word < of_group ? num_words - word : of_group,
                          .num_groups = x->num_groups, .row_step = row_step, .panel_step = panel_step,
                          .is_first = group == 0};
        const char *next = (const char *)(p->words + word * STRIP * LANES) + AHEAD_BYTES;
        for (long row = first; row < last;) {
            const int num_rows = tile_of(row, x->m).num_rows;
            g.x = x->q + row * x->k + word * per_word * num_rows;
            g.x_sums = x->sums + row * x->num_groups + group;
            g.x_scales = x->scales + row * x->num_groups + group;
            for (int i = 0, together; i < count; i += together) {
                const int left = count - i, most = PANELS_OF(num_rows);
                together = left >= most ? most : left >= 2 && most >= 2 ? 2 : 1;
                g.words = p->words + (word * STRIP + i) * LANES;
                g.scales = p->scales + own + i * LANES;
                g.zeros = p->zeros ? p->zeros + own + i * LANES : NULL;
                g.totals = totals + (row - first) * row_step + i * panel_step;
                g.next = row == first ? next + i * g.num_words * LANES * 4 : NULL;
                multiply_group_of(w->bits, &g, num_rows, together);
            }
            row += num_rows;
        }
    }
}

// Compute rows `first` … `last - 1` of `count` panels of y, starting at panel `panel`. `buffer` holds the totals.
static void multiply_rows_quantised(const struct quantised *w, const struct rounded *x, const struct matrix *y, long first,
                                    long last, long panel, int count, words *buffer) {
    const long num_panels = (y->num_columns + LANES - 1) / LANES;
    const int parts = y->gate ? 2 : 1, width = count * parts;  // with a gate, the panels of up follow those of the gate
    float *totals = (float *)buffer;
    for (int part = 0; part < parts; part++)
        for (int done = 0; done < count;) {  // in one strip or two
            const long from = panel + part * num_panels + done;
            const int left = count - done, together = left < left_in_strip(from) ? left : left_in_strip(from);
            const struct panels p = find_panels(w, x->k, from);
            multiply_strip(w, x, &p, together, first, last, totals + (done * parts + part) * LANES, width * LANES,
                           parts * LANES);
            done += together;
        }
    finish_rows(y, totals, first, panel * LANES, last - first, width);
}

// Return the number of vectors in the buffer for `num_rows` rows.
static inline long count_totals(long num_rows) { return num_rows * 2 * STRIP; }
