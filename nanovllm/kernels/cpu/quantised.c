// Products with weights of 8 or 4 bits: a weight is scale * (q - zero), and q takes one byte or half of one.
//
// A row of x is rounded to 8 bits too, with a scale for each group of inputs. Then a group's products are integers, exact in
// any order, and one multiplication by both scales makes a float of their sum; a row's floats are added in the order of the
// groups. So a row has the same bits in every batch, on every processor that rounds alike. extras/quantization/layers.py is
// the definition.
//
// A library of its own, which is compiled when a model with such weights is loaded.
//
//   word    32 bits of a panel: 4 inputs of 8 bits, or 8 of 4 bits; byte j has input j in its lower half, 4 + j in its upper
//   panel   16 outputs: [words][16], as of other weights

#include "instructions.h"
#include "results.h"
#include "rounding.h"
#if defined AMX || defined AMX_EMULATED
#define HAS_BYTE_TILES
#include "tiles.h"
#endif

#define SOME_ROWS 4  // up to so many, four panels at a time hide the wait for memory; more rows need the registers
#ifdef __AVX512F__
#define TILE_OF_ROWS 12
#else
#define TILE_OF_ROWS 4
#endif
#define ROWS_IN_CACHE 240  // rows of x that stay in the L2 cache while all panels pass
#ifdef HAS_BYTE_TILES
#define MANY_ROWS 8  // and more are multiplied on AMX's tiles
#else
#define MANY_ROWS LONG_MAX
#endif

// `struct other_weight` of cpu.c, and what is behind it
struct quantised {
    void (*linear)(const element *, const struct quantised *, const element *, void *, long, long, long, int);
    void (*gated_linear)(const element *, const struct quantised *, const element *, element *, long, long, long, int);
    const uint32_t *panels;
    const float *scales;   // [panels of 16 outputs][groups or 1][16]
    const uint8_t *zeros;  // the same; NULL: all are half of the range, 128 or 8
    long bits, group_size, has_groups;  // has_groups: each has a scale of its own, not only each output
};

// x, rounded. Rows that are multiplied together lie together (`struct tile`): [words of four bytes][rows of the tile]. For
// AMX's tiles, which are loaded row by row, each lies alone.
struct rounded {
    int8_t *q;       // [m, k] bytes
    float *scales;   // [m, groups]
    int32_t *sums;   // [m, groups], of q
    long m, k, num_groups;
};

// 16 bytes without signs
static inline ints widen_bytes(const uint8_t *from) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes b;
    memcpy(&b, from, sizeof b);
    return __builtin_convertvector(b, ints);
}

// sum + the products of the four bytes of each lane of `a`, without signs, and those of `b`, with signs
static inline ints dot_bytes(ints sum, words a, uint32_t b) {
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32((int)b));
#elif defined __AVX2__
    // products of 16 bits, two to a lane: bytes 0 and 2, then 1 and 3
    const __m256i bytes = _mm256_set1_epi32((int)b), odd_b = _mm256_srai_epi16(bytes, 8);
    const __m256i even_b = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), low = _mm256_set1_epi16(0xff);
    __m256i halves[2], sums[2];
    memcpy(halves, &a, sizeof a);
    memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < 2; i++) {
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_and_si256(halves[i], low), even_b));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_srli_epi16(halves[i], 8), odd_b));
    }
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    for (int byte = 0; byte < 4; byte++) sum += (ints)(a >> 8 * byte & 0xff) * (int32_t)(int8_t)(b >> 8 * byte);
    return sum;
#endif
}

// ---- x in 8 bits

// How many of `left` rows are multiplied together.
static inline int rows_together(long left) {
    if (left >= 12 && TILE_OF_ROWS >= 12) return 12;
    if (left >= 8 && TILE_OF_ROWS >= 8) return 8;
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// The tile of a row, of m.
struct tile { long row; int num_rows; };

static inline struct tile tile_of(long row, long m) {
    if (m >= MANY_ROWS) return (struct tile){row, 1};
    long first = row < m / TILE_OF_ROWS * TILE_OF_ROWS ? row / TILE_OF_ROWS * TILE_OF_ROWS : m / TILE_OF_ROWS * TILE_OF_ROWS;
    while (first + rows_together(m - first) <= row) first += rows_together(m - first);
    return (struct tile){first, rows_together(m - first)};
}

// x: [m, k]. The caller frees `q`, behind which the other arrays lie.
static struct rounded round_rows(const element *x, long m, long k, long group_size) {
    const long num_groups = (k + group_size - 1) / group_size, num_q = (m * k + 63) / 64 * 64;
    int8_t *q = aligned_alloc(64, (num_q + m * num_groups * 8 + 63) / 64 * 64);
    float *scales = (float *)(q + num_q);
    const struct rounded r = {q, scales, (int32_t *)(scales + m * num_groups), m, k, num_groups};
#pragma omp parallel for schedule(static) if (m * k > 1 << 14)
    for (long row = 0; row < m; row++) {
        const struct tile t = tile_of(row, m);
        int8_t *to = q + t.row * k + (row - t.row) * 4;
        for (long group = 0; group < num_groups; group++) {
            const long first = group * group_size, left = k - first, count = left < group_size ? left : group_size;
            const long at = row * num_groups + group;
            int8_t of_group[128];
            round_group(x + row * k + first, count, of_group, r.scales + at, r.sums + at);
            for (long i = 0; i < count; i += 4) memcpy(to + (first + i) * t.num_rows, of_group + i, 4);
        }
    }
    return r;
}

// ---- the product

#define AHEAD 64  // words from those that are multiplied to those that memory is asked for: whole groups

// Where panels `panel[0]`, … of a weight are: words, scales, zeros of the first group.
struct quantised_panels {
    const uint32_t *words[MOST_PANELS];
    const uint32_t *next[MOST_PANELS];  // words of the panels that are multiplied after these
    const float *scales[MOST_PANELS];
    const uint8_t *zeros[MOST_PANELS];
};

// out[row][16 * i + lane] = x's row times panel i, for the rows of a tile. While a word is multiplied, memory is asked for
// that which is AHEAD of it, in the panels that come next if these end before.
static inline __attribute__((always_inline)) void multiply_rounded(
    const struct quantised *w, const struct rounded *x, const struct quantised_panels *p, long row, float *out,
    long out_stride, const bool is_int4, const int num_rows, const int num_panels) {
    const int step = is_int4 ? 8 : 4, halves = is_int4 ? 2 : 1;
    const long num_words = x->k / step, group_words = w->group_size / step;
    const int8_t *q = x->q + row * x->k;
    const float *x_scales = x->scales + row * x->num_groups;
    const int32_t *x_sums = x->sums + row * x->num_groups;
    floats totals[TILE_OF_ROWS][MOST_PANELS] = {0};
    for (long group = 0, at = 0; at < num_words; group++) {
        const long end = num_words - at < group_words ? num_words : at + group_words, own = w->has_groups ? group * LANES : 0;
        const uint32_t *panels[MOST_PANELS], *ask[MOST_PANELS];
        for (int i = 0; i < num_panels; i++) {
            panels[i] = p->words[i];
            ask[i] = at + AHEAD < num_words ? panels[i] + AHEAD * LANES : p->next[i] + (AHEAD - num_words) * LANES;
        }
        ints sums[TILE_OF_ROWS][MOST_PANELS];
        for (int r = 0; r < num_rows; r++) {
            const int32_t x_sum = x_sums[r * x->num_groups + group];
            for (int i = 0; i < num_panels; i++) sums[r][i] = (ints){0} - (is_int4 ? 8 : 128) * x_sum;
            for (int i = 0; w->zeros && i < num_panels; i++) sums[r][i] = widen_bytes(p->zeros[i] + own) * -x_sum;
        }
        for (; at < end; at++) {
            words column[MOST_PANELS];
            for (int i = 0; i < num_panels; i++) {
                column[i] = *(const words *)(panels[i] + at * LANES);
                __builtin_prefetch(ask[i] + at * LANES, 0, 2);
            }
            for (int half = 0; half < halves; half++)
                for (int r = 0; r < num_rows; r++) {
                    uint32_t four;
                    memcpy(&four, q + ((at * halves + half) * num_rows + r) * 4, sizeof four);
                    for (int i = 0; i < num_panels; i++) {
                        const words bytes = is_int4 ? column[i] >> 4 * half & 0x0f0f0f0f : column[i];
                        sums[r][i] = dot_bytes(sums[r][i], bytes, four);
                    }
                }
        }
        for (int r = 0; r < num_rows; r++)
            for (int i = 0; i < num_panels; i++) {
                const floats scale = *(const floats *)(p->scales[i] + own) * x_scales[r * x->num_groups + group];
                totals[r][i] = add_scaled(totals[r][i], sums[r][i], scale);
            }
    }
    for (int r = 0; r < num_rows; r++)
        for (int i = 0; i < num_panels; i++) *(floats *)(out + r * out_stride + i * LANES) = totals[r][i];
}

// With all counts known to the compiler, the sums of a group stay in registers.
static void multiply_quantised(const struct quantised *w, const struct rounded *x, const struct quantised_panels *p,
                               long row, float *out, long out_stride, int num_rows, int num_panels) {
#define OF(bits, rows, panels) \
    case (bits) * 256 + (rows) * 16 + (panels): \
        multiply_rounded(w, x, p, row, out, out_stride, (bits) == 4, rows, panels); break;
#define EACH(rows, panels) OF(8, rows, panels) OF(4, rows, panels)
    switch (w->bits * 256 + num_rows * 16 + num_panels) {
        EACH(1, 1) EACH(1, 2) EACH(1, 4) EACH(2, 1) EACH(2, 2) EACH(2, 4) EACH(4, 1) EACH(4, 2) EACH(4, 4)
#if TILE_OF_ROWS > 4
        EACH(8, 1) EACH(8, 2) EACH(12, 1) EACH(12, 2)
#endif
    }
}

#ifdef HAS_BYTE_TILES
// ---- the same on AMX's tiles

// Of 4 bits, each half of a word becomes a word of bytes, as 8 bits have it.
static void unpack(const uint32_t *panel, long num_words, words *to) {
    for (long i = 0; i < num_words; i++)
        for (int half = 0; half < 2; half++) to[2 * i + half] = *(const words *)(panel + i * LANES) >> 4 * half & 0x0f0f0f0f;
}

// As multiply_rounded, for up to 16 rows. p's words are bytes, of 4 bits too.
static void multiply_on_tiles(const struct quantised *w, const struct rounded *x, const struct quantised_panels *p, long row,
                              float *out, int num_rows, int num_panels) {
    ints sums[MOST_PANELS][TILE_ROWS];
    for (long group = 0, at = 0; at < x->k / 4; group++) {
        const long left = x->k / 4 - at, num_words = left < w->group_size / 4 ? left : w->group_size / 4;
        const long own = w->has_groups ? group * LANES : 0;
        // what divides a group into equal steps: a tile's shape may not change before its sums are stored
        const int step = num_words % TILE_WORDS == 0 ? TILE_WORDS : num_words < TILE_WORDS ? num_words : 4;
        shape_tiles(num_rows, step);
#define EACH_PANEL(DO) DO(SUMS_0, PANEL_EVEN, 0) DO(SUMS_1, PANEL_ODD, 1) DO(SUMS_2, PANEL_EVEN, 2) DO(SUMS_3, PANEL_ODD, 3)
#define CLEAR(tile, panel, i) tile_zero(tile);
#define ADD(tile, panel, i) if (i < num_panels) { \
            tile_load(panel, p->words[i] + at * LANES, 64); \
            tile_multiply_bytes(tile, X_UPPER, panel); \
        }
#define STORE(tile, panel, i) if (i < num_panels) tile_store(tile, sums[i], 64);
        EACH_PANEL(CLEAR)
        for (const long end = at + num_words; at < end; at += step) {
            tile_load(X_UPPER, x->q + row * x->k + at * 4, x->k);
            EACH_PANEL(ADD)
        }
        EACH_PANEL(STORE)
        for (int i = 0; i < num_panels; i++) {
            const ints zero = w->zeros ? widen_bytes(p->zeros[i] + own) : (ints){0} + (1 << (w->bits - 1));
            const floats scale = *(const floats *)(p->scales[i] + own);
            for (int r = 0; r < num_rows; r++) {
                floats *total = (floats *)(out + (r * num_panels + i) * LANES);
                const long of_row = (row + r) * x->num_groups + group;
                const ints sum = sums[i][r] - zero * x->sums[of_row];
                *total = add_scaled(group ? *total : (floats){0}, sum, scale * x->scales[of_row]);
            }
        }
    }
}

// As multiply_rounded_rows, of `width` panels.
static void multiply_rows_on_tiles(const struct quantised *w, const struct rounded *x, const struct matrix *y,
                                   struct quantised_panels p, long first, long last, long panel, int width) {
    _Alignas(64) float sums[TILE_ROWS * MOST_PANELS * LANES];
    const long num_words = x->k / 4;  // of bytes
    words *unpacked = w->bits == 4 ? aligned_alloc(64, width * num_words * sizeof *unpacked) : NULL;
    for (int i = 0; i < width && unpacked; i++) {
        unpack(p.words[i], num_words / 2, unpacked + i * num_words);
        p.words[i] = (const uint32_t *)(unpacked + i * num_words);
    }
    FINISH_WRITES();
    for (long row = first; row < last; row += TILE_ROWS) {
        const int num_rows = last - row < TILE_ROWS ? last - row : TILE_ROWS;
        multiply_on_tiles(w, x, &p, row, sums, num_rows, width);
        finish_rows(y, sums, row, panel * LANES, num_rows, width);
    }
    free(unpacked);
}
#endif

// Rows `first` … `last - 1` of x times `count` times 16 columns of y from panel `panel`.
static void multiply_rounded_rows(const struct quantised *w, const struct rounded *x, const struct matrix *y, long first,
                                  long last, long panel, int count) {
    _Alignas(64) float sums[TILE_OF_ROWS * MOST_PANELS * LANES];
    const long num_panels = (y->num_columns + LANES - 1) / LANES, num_words = x->k * w->bits / 32;
    const long scales = LANES * (w->has_groups ? x->num_groups : 1);
    const int step = y->gate ? 2 : 1, width = count * step;
    struct quantised_panels all;
    for (int i = 0; i < width; i++) {
        const long at = panel + i / step + i % step * num_panels;  // of a gate, panels of up follow all of its own
        all.words[i] = w->panels + at * num_words * LANES;
        all.scales[i] = w->scales + at * scales;
        all.zeros[i] = w->zeros ? w->zeros + at * scales : NULL;
    }
#ifdef HAS_BYTE_TILES
    if (x->m >= MANY_ROWS) return multiply_rows_on_tiles(w, x, y, all, first, last, panel, width);
#endif
    for (long row = first; row < last;) {
        const int num_rows = tile_of(row, x->m).num_rows;
        const int most = num_rows <= SOME_ROWS ? 4 : 2;
        for (int start = 0; start < width;) {
            const int left = width - start, together = left >= most ? most : left >= 2 ? 2 : 1;
            struct quantised_panels some;
            for (int i = 0; i < together; i++) {
                const int after = start + together + i;  // beyond these, the same of the next `count` panels
                some.words[i] = all.words[start + i];
                some.next[i] = after < width ? all.words[after] : all.words[after - width] + count * num_words * LANES;
                some.scales[i] = all.scales[start + i];
                some.zeros[i] = all.zeros[start + i];
            }
            multiply_quantised(w, x, &some, row, sums + start * LANES, width * LANES, num_rows, together);
            start += together;
        }
        finish_rows(y, sums, row, panel * LANES, num_rows, width);
        row += num_rows;
    }
}

static void multiply_all_quantised(const element *x, const struct quantised *w, const struct matrix *y, long m, long k) {
    const struct rounded rows = round_rows(x, m, k, w->group_size);
    const long num_panels = (y->num_columns + LANES - 1) / LANES;
    const long most = y->gate ? 2 : m <= SOME_ROWS || m >= MANY_ROWS ? 4 : 2;
#pragma omp parallel
    {
        for (long first = 0; first < m; first += ROWS_IN_CACHE) {
            const long last = m - first < ROWS_IN_CACHE ? m : first + ROWS_IN_CACHE;
#pragma omp for schedule(static) nowait
            for (long panel = 0; panel < num_panels; panel += most)
                multiply_rounded_rows(w, &rows, y, first, last, panel,
                                      num_panels - panel < most ? num_panels - panel : most);
        }
        finish_streams();
#ifdef HAS_BYTE_TILES
        release_tiles();
#endif
    }
    free(rows.q);
}

// As `linear`, with a quantised weight. k is a multiple of 16.
void quantised_linear(const element *x, const struct quantised *weight, const element *bias, void *y, long m, long n,
                      long k, int wants_floats) {
    const long row_bytes = n * (wants_floats ? sizeof(float) : sizeof(element));
    const struct matrix out = {y, n, bias, wants_floats, streams(y, m, row_bytes), NO_GATE};
    multiply_all_quantised(x, weight, &out, m, k);
}

// As `gated_linear`, with a quantised weight.
void quantised_gated_linear(const element *x, const struct quantised *weight, const element *bias, element *y, long m,
                            long n, long k, int gate) {
    const struct matrix out = {y, n, bias, false, streams(y, m, n * sizeof(element)), gate};
    multiply_all_quantised(x, weight, &out, m, k);
}
