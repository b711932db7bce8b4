// Products with weights: projections and logits, and two projections fused with the gate that follows them.

#pragma once
#include "allocate.h"
#include "product.h"
#include "results.h"
#include "team.h"

// Number of rows of x that stay in the L2 cache while all panels are multiplied: 1 MiB, or 256 rows if they are wide.
#define MOST_ROWS (512 / ROWS * ROWS)
#define ROW_BLOCK(num_words) ((num_words) <= 512 ? MOST_ROWS : 256 / ROWS * ROWS)
// Number of words of a pair of panels that stay in the L1 cache while these rows are multiplied, if products are faster
// than the L2 cache. Few rows wait for memory, which is read fastest from one end of a panel to the other.
#ifdef HAS_TILES
#define WORD_BLOCK(num_rows) ((num_rows) <= 2 * ROWS ? LONG_MAX : 128)
#else
#define WORD_BLOCK(num_rows) LONG_MAX
#endif
// Find the panels of a weight for `count` times 16 columns of y, starting at panel `first`. With a gate, the panels
// alternate: gate, up, gate, up.
static inline int find_panels(const uint32_t *weight, const struct matrix *y, long num_words, long first, int count,
                              const uint32_t **panels) {
    const long num_panels = (y->num_columns + LANES - 1) / LANES;  // panels of the gate; those of up follow
    const int step = y->gate ? 2 : 1;
    for (int i = 0; i < count * step; i++)
        panels[i] = weight + (first + i / step + i % step * num_panels) * num_words * LANES;
    return count * step;
}

// Return the number of floats that `multiply_rows` needs for the sums of up to `num_rows` rows: at most 128 KiB.
static inline size_t count_sums(long num_rows) { return (num_rows + ROWS - 1) / ROWS * ROWS * MOST_PANELS * LANES; }

// Return the number of floats in a buffer for `num_rows` rows of x as factors, if x has to be widened.
static inline size_t count_factors(long num_rows, long k) {
#ifdef WIDENS
    return (num_rows * k + LANES - 1) / LANES * LANES;
#else
    (void)num_rows, (void)k;
    return 0;
#endif
}

// Compute rows `first` … `last - 1` of y, from the same rows of x: [last - first, num_words], and `count` panels from
// `panel` on, `at_once` at a time. `sums` is a buffer of `count_sums(last - first)` floats.
static void multiply_rows(const factors *x, const uint32_t *weight, const struct matrix *y, long first, long last,
                          long panel, long num_words, int count, int at_once, float *sums) {
    const uint32_t *panels[MOST_PANELS];
    const int width = find_panels(weight, y, num_words, panel, count, panels);
    const long tile = rows_at_a_time(last - first), block = WORD_BLOCK(last - first);
    const long part = num_words < block ? num_words : block;
    // each tile of rows prefetches a share of the next words, because one tile would request them faster than memory
    // can deliver them
    const long num_tiles = (last - first + tile - 1) / tile, share = SHARE(part, num_tiles);
    for (int start = 0; start < width; start += at_once)
        for (long word = 0; word < num_words; word += part)
            for (long row = first; row < last; row += tile) {
                const int num_rows = last - row < tile ? last - row : tile;
                float *row_sums = sums + (row - first) * width * LANES;
                struct product p = {
                    .x = x + (row - first) * num_words + word, .x_stride = num_words, .adds = word > 0,
                    .num_words = num_words - word < part ? num_words - word : part,
                    .out = row_sums + start * LANES, .out_stride = width * LANES};
                const int end = width - start < at_once ? width - start : at_once;
                p.ask_from = (row - first) / tile * share;
                p.ask_to = p.ask_from + share;
                for (int i = 0; i < end; i++) {
                    p.panels[i] = panels[start + i] + word * LANES;
                    p.next[i] = p.panels[i] + AHEAD(last - first);
                }
                multiply(&p, num_rows, end);
                if (word + part >= num_words && start + end == width)
                    finish_rows(y, row_sums, row, panel * LANES, num_rows, width);
            }
}

// The product of some rows of x, from `first` on, and all panels of a weight, in parts of `block` rows and `most` panels.
struct whole_product {
    const uint32_t *weight;
    const struct matrix *y;
    long num_words, block, num_panels, most, parts_of_block;
    int at_once;
    float *sums;  // of each thread: `num_sums`
    size_t num_sums;
    const factors *x;
    long first, last;
};

static void multiply_parts(const void *arguments, long first, long last, int thread) {
    const struct whole_product *p = arguments;
    for (long part = first; part < last; part++) {
        const long row = p->first + part / p->parts_of_block * p->block, panel = part % p->parts_of_block * p->most;
        multiply_rows(p->x + (row - p->first) * p->num_words, p->weight, p->y, row,
                      p->last - row < p->block ? p->last : row + p->block, panel, p->num_words,
                      p->num_panels - panel < p->most ? p->num_panels - panel : p->most, p->at_once,
                      p->sums + thread * p->num_sums);
    }
    finish_streams();
    release_tiles();
}

struct rows_of_x {
    const element *x;
    factor *to;
    long k;
};

static void take_some_rows(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct rows_of_x *r = arguments;
    take_factors(r->x + first * r->k, r->to + first * r->k, (last - first) * r->k);
}

// Return rows of x: [num_rows, k] as factors, in `buffer` if they have to be widened.
static const factors *take_rows(const element *x, factor *buffer, long num_rows, long k) {
    if (!count_factors(num_rows, k)) return (const factors *)x;
    parallel_for(take_some_rows, &(struct rows_of_x){x, buffer, k}, num_rows, items_of(k), LONG_MAX);
    return (const factors *)buffer;
}

// Compute y: [m, num_columns] = x: [m, k] times all panels. Return DONE or NO_MEMORY, as all functions below.
static int multiply_all(const element *x, const uint32_t *weight, const struct matrix *y, long m, long k) {
    const long num_panels = (y->num_columns + LANES - 1) / LANES, num_words = k / PER_WORD, block = ROW_BLOCK(num_words);
    // few rows wait for memory, so they read four panels at once; many rows need the registers for their sums
    const int at_once = m <= FEW_ROWS && PANELS >= 4 ? 4 : 2;
    const long most = y->gate ? MOST_PANELS / 2 : at_once;  // two panels of a gate's columns are whole lines
    const size_t num_sums = count_sums(m < block ? m : block), all_sums = count_threads() * num_sums;
    float *sums = allocate((all_sums + count_factors(m < block ? m : block, k)) * sizeof *sums);
    if (!sums) return NO_MEMORY;
    struct whole_product p = {
        weight, y, num_words, block, num_panels, most, .at_once = at_once, .sums = sums, .num_sums = num_sums,
        .parts_of_block = (num_panels + most - 1) / most};
    // Rows that have to be widened are multiplied block by block, while the wide ones are in the caches.
    const long rows_at_once = count_factors(m, k) ? block : m;
    for (; p.first < m; p.first = p.last) {
        p.last = m - p.first < rows_at_once ? m : p.first + rows_at_once;
        p.x = take_rows(x + p.first * k, (factor *)(sums + all_sums), p.last - p.first, k);
        parallel_for(multiply_parts, &p, (p.last - p.first + block - 1) / block * p.parts_of_block, 1, LONG_MAX);
    }
    free(sums);
    return DONE;
}

// Compute y: [m, n] = x weight^T + bias, with x: [m, k]. weight: [ceil(n / 16)] panels of k / PER_WORD words. bias: one
// number for each column of the panels, or NULL. If `wants_floats`, y is float32, for logits, which are not rounded.
int linear(const element *x, const uint32_t *weight, const element *bias, void *y, long m, long n, long k,
           int wants_floats) {
    const long row_bytes = n * (wants_floats ? sizeof(float) : sizeof(element));
    const struct matrix out = {y, n, bias, wants_floats, streams(y, m, row_bytes), NO_GATE, NULL};
    return multiply_all(x, weight, &out, m, k);
}

// Compute y: [m, n] = act(x gate^T) * (x up^T), with x: [m, k]. weight, bias: as in `linear` for 2 n columns, gate and
// then up; n is a multiple of 16. The result has the same bits as with `linear` and `gate_and_mul`, but the
// intermediate result is never written to memory.
int gated_linear(const element *x, const uint32_t *weight, const element *bias, element *y, long m, long n, long k,
                 int gate) {
    const struct matrix out = {y, n, bias, false, streams(y, m, n * sizeof(element)), gate, NULL};
    return multiply_all(x, weight, &out, m, k);
}

// Compute y as `gated_linear`, with `added`: [m, 2 n] added to the two projections.
static int gated_linear_and(const element *x, const uint32_t *weight, const element *bias, const element *added,
                            element *y, long m, long n, long k, int gate) {
    const struct matrix out = {y, n, bias, false, streams(y, m, n * sizeof(element)), gate, added};
    return multiply_all(x, weight, &out, m, k);
}
