// Products with weights of 8 or 4 bits: a weight is scale * (q - zero), and q takes one byte or half a byte.
//
// A row of x is rounded to 8 bits too, with a scale for each group of inputs. A group's products are then integers, and
// their sum is exact in any order. It is multiplied by both scales once, and the resulting floats of a row are added in
// the order of the groups. So a row has the same bits in every batch, on every processor that rounds in the same way.
// nanovllm_extras/weights/quantised_linear.py is the definition.
//
// This file is a separate library. It is compiled when a model with such weights is loaded.
//
//   word    32 bits of a panel: 4 inputs of 8 bits, or 8 inputs of 4 bits. With 4 bits, byte j has input j in its lower
//           half and input 4 + j in its upper half
//   panel   16 outputs: [words][16], as for other weights
//   strip   4 interleaved panels, [words][4][16]. Few rows are multiplied by all 4 at once, so that a thread reads its
//           share of the weight from start to end, and the processor's own prefetcher works

#include "allocate.h"
#include "instructions.h"
#include "results.h"
#include "rounding.h"
#include "team.h"
#include "vnni.h"
#if defined AMX || defined AMX_EMULATED
#define HAS_BYTE_TILES
#include "tiles.h"
#endif

#define STRIP 4      // panels
#define SOME_ROWS 6  // up to 6 rows are multiplied by a whole strip at once; more rows need the registers: two panels
#ifdef __AVX512F__
#define TILE_OF_ROWS 12
#elif defined HAS_VNNI
#define TILE_OF_ROWS 6
#else
#define TILE_OF_ROWS 4
#endif
#define ROWS_IN_CACHE 240  // rows of x that stay in the L2 cache while all panels are multiplied
#ifdef HAS_BYTE_TILES
#define MANY_ROWS 8  // this many rows or more are multiplied on AMX's tiles
#else
#define MANY_ROWS LONG_MAX
#endif

// A quantised weight. It begins with the members of `struct other_weight` of cpu.c.
struct quantised {
    int (*linear)(const element *, const struct quantised *, const element *, void *, long, long, long, int);
    int (*gated_linear)(const element *, const struct quantised *, const element *, element *, long, long, long, int);
    const uint32_t *panels;  // in strips
    const float *scales;     // [strips][groups or 1][4][16]
    const uint8_t *zeros;    // as scales; NULL: all are half of the range, 128 or 8
    long bits, group_size, has_groups;  // has_groups: each group has a scale; otherwise only each output has one
};

// Panels of one strip. Panel i begins at `words + i * LANES`, and so on. The next word and the next group's scales are
// STRIP * LANES further.
struct panels {
    const uint32_t *words;
    const float *scales;
    const uint8_t *zeros;  // or NULL
};

static inline long count_groups(long k, long group_size) { return (k + group_size - 1) / group_size; }

// Find the panels from `panel` on, of a weight with k inputs.
static struct panels find_panels(const struct quantised *w, long k, long panel) {
    const long strip = panel / STRIP * STRIP, place = panel % STRIP * LANES, num_words = k * w->bits / 32;
    const long of_scales = strip * (w->has_groups ? count_groups(k, w->group_size) : 1) * LANES + place;
    return (struct panels){w->panels + strip * num_words * LANES + place, w->scales + of_scales,
                           w->zeros ? w->zeros + of_scales : NULL};
}

// The rounded x. Rows that are multiplied together are interleaved (`struct tile`): [words of four bytes][rows of the
// tile]. For AMX's tiles, which are loaded row by row, each row is contiguous.
struct rounded {
    int8_t *q;       // [m, k] bytes
    float *scales;   // [m, groups]
    int32_t *sums;   // [m, groups], sums of q
    long m, k, num_groups;
};

// Widen 16 unsigned bytes.
static inline ints widen_bytes(const uint8_t *from) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes b;
    memcpy(&b, from, sizeof b);
    return __builtin_convertvector(b, ints);
}

// Return sum + the products of the four unsigned bytes of each lane of `a` with the four signed bytes of `b`.
static inline ints dot_bytes(ints sum, words a, uint32_t b) {
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32((int)b));
#else
    for (int byte = 0; byte < 4; byte++) sum += (ints)(a >> 8 * byte & 0xff) * (int32_t)(int8_t)(b >> 8 * byte);
    return sum;
#endif
}

// ---- x in 8 bits

// Return how many of `left` rows are multiplied together.
static inline int rows_together(long left) {
    if (left >= 6 && TILE_OF_ROWS > 4) return left >= TILE_OF_ROWS ? TILE_OF_ROWS : 6;
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// Rows that are multiplied together.
struct tile { long row; int num_rows; };

// Return the tile of a row, of m rows.
static inline struct tile tile_of(long row, long m) {
    if (m >= MANY_ROWS) return (struct tile){row, 1};
    long first = row < m / TILE_OF_ROWS * TILE_OF_ROWS ? row / TILE_OF_ROWS * TILE_OF_ROWS : m / TILE_OF_ROWS * TILE_OF_ROWS;
    while (first + rows_together(m - first) <= row) first += rows_together(m - first);
    return (struct tile){first, rows_together(m - first)};
}

// Round one row of x: [m, k] to its place in r.
static void round_row(const element *x, const struct rounded *r, long row, long group_size) {
    const struct tile t = tile_of(row, r->m);
    int8_t *to = r->q + t.row * r->k + (row - t.row) * 4;
    for (long group = 0; group < r->num_groups; group++) {
        const long first = group * group_size, left = r->k - first, count = left < group_size ? left : group_size;
        const long at = row * r->num_groups + group;
        int8_t of_group[128], *rounded = t.num_rows > 1 ? of_group : to + first;
        round_group(x + row * r->k + first, count, rounded, r->scales + at, r->sums + at);
        for (long i = 0; i < count && t.num_rows > 1; i += 4) memcpy(to + (first + i) * t.num_rows, of_group + i, 4);
    }
}

struct rounding {
    const element *x;
    const struct rounded *to;
    long group_size;
};

static void round_some_rows(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct rounding *r = arguments;
    for (long row = first; row < last; row++) round_row(r->x, r->to, row, r->group_size);
}

// Round x: [m, k]. The caller frees `q`, which is NULL if there is no memory; the other arrays are in the same allocation.
static struct rounded round_rows(const element *x, long m, long k, long group_size) {
    const long num_groups = count_groups(k, group_size), num_q = (m * k + 63) / 64 * 64;
    int8_t *q = allocate(num_q + m * num_groups * 8);
    float *scales = (float *)(q + num_q);
    const struct rounded r = {q, scales, (int32_t *)(scales + m * num_groups), m, k, num_groups};
    if (q) parallel_for(round_some_rows, &(struct rounding){x, &r, group_size}, m, items_of(k), LONG_MAX);
    return r;
}

// ---- the product

#define AHEAD 24  // distance in words of a panel from the word that is multiplied to the word that is prefetched

static inline int left_in_strip(long panel) { return STRIP - panel % STRIP; }  // panels from this one on

// The destination of sums: the 16 sums of panel i for row r of a tile are at `at + r * row_step + i * panel_step`.
struct sums {
    float *at;
    long row_step, panel_step;
};

#ifdef IN_HALVES
#include "avx2_bytes.h"
#else
// Multiply the rows of a tile by panels of one strip. While a word is multiplied, the word AHEAD of it is prefetched,
// in the next strip if this strip ends before. Every line is prefetched, because not every processor fetches a line's
// neighbour itself. The next strip's scales are prefetched too.
static inline __attribute__((always_inline)) void multiply_rounded(
    const struct quantised *w, const struct rounded *x, const struct panels *p, long row, struct sums out,
    const bool is_int4, const int num_rows, const int num_panels) {
    const int step = is_int4 ? 8 : 4, halves = is_int4 ? 2 : 1;
    const long group_words = w->group_size / step * STRIP * LANES, scale_step = w->has_groups ? STRIP * LANES : 0;
    const long strip_scales = w->has_groups ? x->num_groups * STRIP * LANES : STRIP * LANES;
    const uint32_t *at = p->words, *const end = at + x->k / step * STRIP * LANES;
    const float *scales = p->scales, *x_scales = x->scales + row * x->num_groups;
    const uint8_t *zeros = p->zeros;
    const int32_t *x_sums = x->sums + row * x->num_groups;
    const int8_t *q = x->q + row * x->k;
    floats totals[TILE_OF_ROWS][STRIP] = {0};
    while (at < end) {
        ints sums[TILE_OF_ROWS][STRIP];
        for (int r = 0; r < num_rows; r++) {
            const int32_t x_sum = x_sums[r * x->num_groups];
            for (int i = 0; i < num_panels; i++) sums[r][i] = (ints){0} - (is_int4 ? 8 : 128) * x_sum;
            for (int i = 0; zeros && i < num_panels; i++) sums[r][i] = widen_bytes(zeros + i * LANES) * -x_sum;
        }
        for (const uint32_t *stop = end - at < group_words ? end : at + group_words; at < stop; at += STRIP * LANES) {
            words column[STRIP];
            for (int i = 0; i < num_panels; i++) {
                column[i] = *(const words *)(at + i * LANES);
                __builtin_prefetch(at + (AHEAD * STRIP + i) * LANES, 0, 2);
            }
            for (int half = 0; half < halves; half++)
                for (int r = 0; r < num_rows; r++, q += 4) {
                    uint32_t four;
                    memcpy(&four, q, sizeof four);
                    for (int i = 0; i < num_panels; i++) {
                        const words bytes = is_int4 ? column[i] >> 4 * half & 0x0f0f0f0f : column[i];
                        sums[r][i] = dot_bytes(sums[r][i], bytes, four);
                    }
                }
        }
        for (int r = 0; r < num_rows; r++)
            for (int i = 0; i < num_panels; i++) {
                const floats scale = *(const floats *)(scales + i * LANES) * x_scales[r * x->num_groups];
                totals[r][i] = add_scaled(totals[r][i], sums[r][i], scale);
            }
        for (int i = 0; i < num_panels; i++) __builtin_prefetch(scales + strip_scales + i * LANES, 0, 2);
        scales += scale_step, x_scales++, x_sums++;
        if (zeros) zeros += scale_step;
    }
    for (int r = 0; r < num_rows; r++)
        for (int i = 0; i < num_panels; i++) *(floats *)(out.at + r * out.row_step + i * out.panel_step) = totals[r][i];
}

// Define a function for each combination of counts. With counts that the compiler knows, a group's sums stay in
// registers.
#define FEW(DO) DO(1, 1) DO(1, 2) DO(1, 4) DO(2, 1) DO(2, 2) DO(2, 4) DO(4, 1) DO(4, 2) DO(4, 4)
#if TILE_OF_ROWS > 4
#define EACH(DO) FEW(DO) DO(6, 1) DO(6, 2) DO(6, 4) DO(12, 1) DO(12, 2)
#else
#define EACH(DO) FEW(DO)
#endif
#define DEFINE_OF(bits, m, n) \
    static __attribute__((noinline)) void multiply_##bits##_##m##_##n( \
        const struct quantised *w, const struct rounded *x, const struct panels *p, long row, struct sums out) { \
        multiply_rounded(w, x, p, row, out, bits == 4, m, n); \
    }
#define DEFINE(m, n) DEFINE_OF(8, m, n) DEFINE_OF(4, m, n)
EACH(DEFINE)

static void multiply_quantised(const struct quantised *w, const struct rounded *x, const struct panels *p, long row,
                               struct sums out, int num_rows, int num_panels) {
#define CASE_OF(bits, m, n) \
    case (bits) * 256 + (m) * 16 + (n): multiply_##bits##_##m##_##n(w, x, p, row, out); break;
#define CASE(m, n) CASE_OF(8, m, n) CASE_OF(4, m, n)
    switch (w->bits * 256 + num_rows * 16 + num_panels) { EACH(CASE) }
}

// Multiply the rows of a tile by `count` panels, of one strip or two.
static void multiply_panels(const struct quantised *w, const struct rounded *x, long panel, int count, long row,
                            struct sums out, int num_rows) {
    while (count > 0) {
        const int most = count < left_in_strip(panel) ? count : left_in_strip(panel), together = most == 3 ? 2 : most;
        const struct panels p = find_panels(w, x->k, panel);
        multiply_quantised(w, x, &p, row, out, num_rows, together);
        panel += together, count -= together, out.at += together * out.panel_step;
    }
}

// Compute rows `first` … `last - 1` of `count` panels of y, starting at panel `panel`.
static void multiply_rows_quantised(const struct quantised *w, const struct rounded *x, const struct matrix *y, long first,
                                    long last, long panel, int count, words *buffer) {
    (void)buffer;
    _Alignas(64) float sums[TILE_OF_ROWS * 2 * STRIP * LANES];
    const long num_panels = (y->num_columns + LANES - 1) / LANES;
    const int parts = y->gate ? 2 : 1;  // with a gate, the panels of up follow those of the gate
    for (long row = first; row < last;) {
        const int num_rows = tile_of(row, x->m).num_rows, most = num_rows <= SOME_ROWS ? STRIP : 2;
        for (int start = 0; start < count; start += most) {
            const int together = count - start < most ? count - start : most;
            for (int i = 0; i < parts; i++) {
                const struct sums out = {sums + i * LANES, together * parts * LANES, parts * LANES};
                multiply_panels(w, x, panel + start + i * num_panels, together, row, out, num_rows);
            }
            finish_rows(y, sums, row, (panel + start) * LANES, num_rows, together * parts);
        }
        row += num_rows;
    }
}

#endif

#ifdef HAS_BYTE_TILES
// ---- the same on AMX's tiles

// Return the number of vectors for four runs of panels with k inputs, as words of bytes.
static inline long count_words(long k) { return 4 * (STRIP * k / 4); }

// Find `count` panels of a strip as words of bytes. With 4 bits, each half of a word becomes a word in `strip`.
static struct panels find_bytes(const struct quantised *w, const struct rounded *x, long panel, int count, words *strip) {
    struct panels p = find_panels(w, x->k, panel);
    if (w->bits == 8) return p;
    for (long at = 0; at < x->k / 8 * STRIP; at += STRIP)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < count; i++)
                strip[2 * at + half * STRIP + i] = *(const words *)(p.words + (at + i) * LANES) >> 4 * half & 0x0f0f0f0f;
    p.words = (const uint32_t *)strip;
    return p;
}

// Multiply like multiply_rounded, for up to 16 rows and panels of bytes.
static void multiply_on_tiles(const struct quantised *w, const struct rounded *x, const struct panels *p, long row,
                              struct sums out, int num_rows, int num_panels) {
    ints sums[STRIP][TILE_ROWS];
    for (long group = 0, at = 0; at < x->k / 4; group++) {
        const long left = x->k / 4 - at, num_words = left < w->group_size / 4 ? left : w->group_size / 4;
        const long own = w->has_groups ? group * STRIP * LANES : 0;
        // divides a group into equal steps, because a tile's shape must not change before its sums are stored
        const int step = num_words % TILE_WORDS == 0 ? TILE_WORDS : num_words < TILE_WORDS ? num_words : 4;
        shape_tiles(num_rows, step);
#define EACH_PANEL(DO) DO(SUMS_0, PANEL_EVEN, 0) DO(SUMS_1, PANEL_ODD, 1) DO(SUMS_2, PANEL_EVEN, 2) DO(SUMS_3, PANEL_ODD, 3)
#define CLEAR(tile, panel, i) tile_zero(tile);
#define ADD(tile, panel, i) if (i < num_panels) { \
            tile_load(panel, p->words + (at * STRIP + i) * LANES, STRIP * 64); \
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
            const long place = own + i * LANES;
            const ints zero = p->zeros ? widen_bytes(p->zeros + place) : (ints){0} + (1 << (w->bits - 1));
            const floats scale = *(const floats *)(p->scales + place);
            for (int r = 0; r < num_rows; r++) {
                floats *total = (floats *)(out.at + r * out.row_step + i * out.panel_step);
                const long of_row = (row + r) * x->num_groups + group;
                const ints sum = sums[i][r] - zero * x->sums[of_row];
                *total = add_scaled(group ? *total : (floats){0}, sum, scale * x->scales[of_row]);
            }
        }
    }
}

// Multiply like multiply_rows_quantised, on AMX's tiles. `bytes` is a buffer for `count_words(k)` vectors.
static void multiply_rows_on_tiles(const struct quantised *w, const struct rounded *x, const struct matrix *y, long first,
                                   long last, long panel, int count, words *bytes) {
    _Alignas(64) float sums[TILE_ROWS * 2 * STRIP * LANES];
    const long num_panels = (y->num_columns + LANES - 1) / LANES, strip = STRIP * x->k / 4;
    const int parts = y->gate ? 2 : 1, width = count * parts;
    struct { struct panels p; int count; float *sums; } runs[4];  // panels in one strip; a part has at most two runs
    int num_runs = 0;
    for (int part = 0; part < parts; part++)
        for (int done = 0; done < count; num_runs++) {
            const long from = panel + part * num_panels + done;
            const int left = count - done, together = left < left_in_strip(from) ? left : left_in_strip(from);
            runs[num_runs].p = find_bytes(w, x, from, together, bytes + num_runs * strip);
            runs[num_runs].count = together;
            runs[num_runs].sums = sums + (done * parts + part) * LANES;
            done += together;
        }
    FINISH_WRITES();
    for (long row = first; row < last; row += TILE_ROWS) {
        const int num_rows = last - row < TILE_ROWS ? last - row : TILE_ROWS;
        for (int i = 0; i < num_runs; i++) {
            const struct sums out = {runs[i].sums, width * LANES, parts * LANES};
            multiply_on_tiles(w, x, &runs[i].p, row, out, num_rows, runs[i].count);
        }
        finish_rows(y, sums, row, panel * LANES, num_rows, width);
    }
}
#endif

// A product of all rows and all strips of a weight, in parts of ROWS_IN_CACHE rows and one strip.
struct whole_product {
    const struct quantised *weight;
    const struct rounded *rows;
    const struct matrix *y;
    long num_panels, num_words;
    words *buffer;  // of each thread: `num_words`, or NULL
    __typeof__(multiply_rows_quantised) *multiply_rows;
};

static void multiply_strips(const void *arguments, long first, long last, int thread) {
    const struct whole_product *p = arguments;
    const long num_strips = (p->num_panels + STRIP - 1) / STRIP, m = p->rows->m;
    words *buffer = p->buffer ? p->buffer + thread * p->num_words : NULL;
    for (long part = first; part < last; part++) {
        const long row = part / num_strips * ROWS_IN_CACHE, panel = part % num_strips * STRIP;
        p->multiply_rows(p->weight, p->rows, p->y, row, m - row < ROWS_IN_CACHE ? m : row + ROWS_IN_CACHE, panel,
                         p->num_panels - panel < STRIP ? p->num_panels - panel : STRIP, buffer);
    }
    finish_streams();
#ifdef HAS_BYTE_TILES
    release_tiles();
#endif
}

static int multiply_all_quantised(const element *x, const struct quantised *w, const struct matrix *y, long m, long k) {
    const struct rounded rows = round_rows(x, m, k, w->group_size);
    if (!rows.q) return NO_MEMORY;
    const long num_panels = (y->num_columns + LANES - 1) / LANES;
    long num_words = 0;  // vectors that a thread needs
    __typeof__(multiply_rows_quantised) *multiply_rows = multiply_rows_quantised;
#ifdef HAS_BYTE_TILES
    if (m >= MANY_ROWS) multiply_rows = multiply_rows_on_tiles, num_words = count_words(k);
#elif defined IN_HALVES
    num_words = count_totals(m < ROWS_IN_CACHE ? m : ROWS_IN_CACHE);
#endif
    words *buffer = num_words ? allocate(count_threads() * num_words * sizeof *buffer) : NULL;
    if (num_words && !buffer) {
        free(rows.q);
        return NO_MEMORY;
    }
    const long num_strips = (num_panels + STRIP - 1) / STRIP;
    const struct whole_product p = {w, &rows, y, num_panels, num_words, buffer, multiply_rows};
    parallel_for(multiply_strips, &p, (m + ROWS_IN_CACHE - 1) / ROWS_IN_CACHE * num_strips, 1, LONG_MAX);
    free(buffer);
    free(rows.q);
    return DONE;
}

// Compute `linear` with a quantised weight. k is a multiple of 16. Return DONE or NO_MEMORY.
int quantised_linear(const element *x, const struct quantised *weight, const element *bias, void *y, long m, long n,
                     long k, int wants_floats) {
    const long row_bytes = n * (wants_floats ? sizeof(float) : sizeof(element));
    const struct matrix out = {y, n, bias, wants_floats, streams(y, m, row_bytes), NO_GATE, NULL};
    return multiply_all_quantised(x, weight, &out, m, k);
}

// Compute `gated_linear` with a quantised weight.
int quantised_gated_linear(const element *x, const struct quantised *weight, const element *bias, element *y, long m,
                           long n, long k, int gate) {
    const struct matrix out = {y, n, bias, false, streams(y, m, n * sizeof(element)), gate, NULL};
    return multiply_all_quantised(x, weight, &out, m, k);
}

struct dequantised {
    const int64_t *ids;
    const struct quantised *weight;
    element *y;
    long k;
};

static void dequantise_rows(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct dequantised *d = arguments;
    const struct quantised *w = d->weight;
    const int per_word = 32 / w->bits, half = 1 << (w->bits - 1);
    for (long row = first; row < last; row++) {
        const struct panels p = find_panels(w, d->k, d->ids[row] / LANES);
        const long lane = d->ids[row] % LANES;
        for (long i = 0; i < d->k; i += LANES) {
            ints q = {0};
            for (int input = 0; input < LANES; input++) {
                const uint32_t word = p.words[(i + input) / per_word * STRIP * LANES + lane];
                q[input] = w->bits == 8 ? word >> input % 4 * 8 & 0xff : word >> (input % 4 * 8 + input / 4 % 2 * 4) & 15;
            }
            const float scale = p.scales[(w->has_groups ? i / w->group_size * STRIP * LANES : 0) + lane];
            store(d->y + row * d->k + i, __builtin_convertvector(q - half, floats) * scale);
        }
    }
}

// Dequantise the weight's rows `ids`: [num_rows] -> y: [num_rows, k]. The weight must not have `zeros`.
void quantised_rows(const int64_t *ids, const struct quantised *w, element *y, long num_rows, long k) {
    parallel_for(dequantise_rows, &(struct dequantised){ids, w, y, k}, num_rows, items_of(k), LONG_MAX);
}
