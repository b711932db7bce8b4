// LoRA adapters: y += x A^T B^T, where each row of x has the A and B of its own adapter.
//
// The rows of a step are sorted by adapter, and each adapter's rows are divided into blocks. A product has two loops:
//
//   down    for each block and projection:                     t = x A^T, `rank` numbers for each row
//   up      for each block, projection and some columns of y:  y += t B^T
//
// A and B are panels as those of any weight (cpu.c), with the rank filled up to a multiple of 16 by zeros. Both loops
// read only the matrices of adapters that have rows. As in all products, the sums of a row do not depend on the batch.

#pragma once
#include "linear.h"

#define ADAPTER_AHEAD 64  // words from those that are read to those that are prefetched
#define ADAPTER_COLUMNS (32 * LANES)  // of y, for one item of `up`

// The matrices of one adapter for one projection. a: [rank / 16] panels of k / PER_WORD words; b: [ceil(n / 16)] panels of
// rank / PER_WORD words. Rank 0: the adapter does not change this projection.
struct adapter_matrices {
    const uint32_t *a, *b;
    long rank;
};

// A linear layer of one or more projections, with the matrices of the adapters in its slots.
struct adapted {
    const struct adapter_matrices *matrices;  // [num_slots + 1, num_projections]; slot 0 has none
    const int64_t *columns;                   // [num_projections + 1]: where projections begin in y
    long num_projections, num_inputs, max_rank;
};

// The rows of a step that have adapters.
struct adapted_rows {
    const int32_t *order;   // [num_rows]: rows of x, those of each adapter together
    const int32_t *blocks;  // [num_blocks, 3]: slot, first place in `order`, number of rows
    long num_rows, num_blocks, most_rows;  // most_rows: of one block
};

struct adapted_product {
    const struct adapted *layer;
    const struct adapted_rows *rows;
    const element *x;
    element *y;
    long y_stride, t_stride, chunks;  // chunks: of columns in the widest projection
    factor *t;                        // [num_rows, num_projections * max_rank]
    factor *gathered;                 // of each thread: [most_rows, num_inputs]
    float *sums;                      // of each thread: [DOWN_ROWS, 16]
};

static inline const struct adapter_matrices *find_matrices(const struct adapted_product *p, long slot, long part) {
    return p->layer->matrices + slot * p->layer->num_projections + part;
}

// Return the rows of a block one after another, in the thread's buffer if they are not so in x.
static const factors *rows_of_block(const struct adapted_product *p, const int32_t *order, long count, int thread) {
    const long k = p->layer->num_inputs;
    if (!count_factors(count, k) && order[count - 1] - order[0] == count - 1)
        return (const factors *)(p->x + order[0] * k);
    factor *to = p->gathered + thread * p->rows->most_rows * k;
    for (long i = 0; i < count; i++) copy_factors(p->x + order[i] * k, to + i * k, k);
    return (const factors *)to;
}

// Compute t: [num_rows, 16] from x: [num_rows, num_words] and one panel. `multiply` has one sum for each row and panel, and
// each addition waits for the one before it. Here four sums of each row take turns.
#if defined __AVX512F__ && !defined HAS_TILES
#define TURNS 4
#define DOWN_ROWS 6
static inline __attribute__((always_inline)) void sum_in_turns(const factors *x, const uint32_t *panel, long num_words,
                                                               float *out, const int num_rows) {
    floats sums[DOWN_ROWS][TURNS] = {0};
    long word = 0;
    for (; word + TURNS <= num_words; word += TURNS)
        for (int turn = 0; turn < TURNS; turn++) {
            const words columns = *(const words *)(panel + (word + turn) * LANES);
            __builtin_prefetch(panel + (word + turn + ADAPTER_AHEAD) * LANES, 0, 2);
            for (int row = 0; row < num_rows; row++)
                sums[row][turn] = multiply_add(sums[row][turn], columns, x[row * num_words + word + turn]);
        }
    for (; word < num_words; word++)
        for (int row = 0; row < num_rows; row++)
            sums[row][0] = multiply_add(sums[row][0], *(const words *)(panel + word * LANES), x[row * num_words + word]);
    for (int row = 0; row < num_rows; row++)
        *(floats *)(out + row * LANES) = (sums[row][0] + sums[row][1]) + (sums[row][2] + sums[row][3]);
}

static void multiply_panel(const factors *x, const uint32_t *panel, long num_words, float *out, int num_rows) {
    switch (num_rows) {
        case 1: sum_in_turns(x, panel, num_words, out, 1); break;
        case 2: sum_in_turns(x, panel, num_words, out, 2); break;
        case 3: sum_in_turns(x, panel, num_words, out, 3); break;
        case 4: sum_in_turns(x, panel, num_words, out, 4); break;
        case 5: sum_in_turns(x, panel, num_words, out, 5); break;
        case 6: sum_in_turns(x, panel, num_words, out, 6); break;
    }
}
#else
#define DOWN_ROWS ROWS
static void multiply_panel(const factors *x, const uint32_t *panel, long num_words, float *out, int num_rows) {
    const struct product one = {.x = x, .x_stride = num_words, .num_words = num_words, .panels = {panel},
                                .next = {panel + ADAPTER_AHEAD * LANES}, .out = out, .out_stride = LANES};
    multiply(&one, num_rows, 1);
}
#endif

static void multiply_down(const void *arguments, long first, long last, int thread) {
    const struct adapted_product *p = arguments;
    const long num_parts = p->layer->num_projections, num_words = p->layer->num_inputs / PER_WORD;
    float *sums = p->sums + thread * DOWN_ROWS * LANES;
    for (long item = first; item < last; item++) {
        const int32_t *block = p->rows->blocks + item / num_parts * 3;
        const long part = item % num_parts, count = block[2];
        const struct adapter_matrices *m = find_matrices(p, block[0], part);
        if (!m->rank) continue;
        const factors *x = rows_of_block(p, p->rows->order + block[1], count, thread);
        const long num_panels = m->rank / LANES;
        for (long panel = 0; panel < num_panels; panel++)
            for (long row = 0; row < count; row += DOWN_ROWS) {
                const int num_rows = count - row < DOWN_ROWS ? count - row : DOWN_ROWS;
                multiply_panel(x + row * num_words, m->a + panel * num_words * LANES, num_words, sums, num_rows);
                for (int r = 0; r < num_rows; r++)
                    store_factors(p->t + (block[1] + row + r) * p->t_stride + part * p->layer->max_rank + panel * LANES,
                                  *(const floats *)(sums + r * LANES));
            }
    }
    release_tiles();
}

// Add `sum`, rounded, to the first `count` of 16 columns of y.
static inline void add_lanes(element *y, floats sum, long count) {
    if (count >= LANES) {
        store(y, load(y) + round_lanes(sum));
        return;
    }
    element all[LANES] = {0};
    memcpy(all, y, count * sizeof *y);
    store_some(y, load(all) + round_lanes(sum), count);
}

static void multiply_up(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct adapted_product *p = arguments;
    const long num_parts = p->layer->num_projections, per_block = num_parts * p->chunks;
    for (long item = first; item < last; item++) {
        const int32_t *block = p->rows->blocks + item / per_block * 3, *order = p->rows->order + block[1];
        const long part = item % per_block / p->chunks, from = p->layer->columns[part];
        const long num_columns = p->layer->columns[part + 1] - from;
        const struct adapter_matrices *m = find_matrices(p, block[0], part);
        long column = item % p->chunks * ADAPTER_COLUMNS;
        const long end = column + ADAPTER_COLUMNS < num_columns ? column + ADAPTER_COLUMNS : num_columns;
        const long num_words = m->rank / PER_WORD;
        for (; m->rank && column < end; column += LANES) {
            const uint32_t *panel = m->b + column / LANES * num_words * LANES;
            for (long word = 0; word < num_words; word++)
                __builtin_prefetch(panel + (word + ADAPTER_AHEAD) * LANES, 0, 2);
            for (long row = 0; row < block[2]; row++) {
                const factors *t =
                    (const factors *)(p->t + (block[1] + row) * p->t_stride + part * p->layer->max_rank);
                floats even = {0}, odd = {0};
                for (long word = 0; word < num_words; word += 2) {
                    even = multiply_add(even, *(const words *)(panel + word * LANES), t[word]);
                    odd = multiply_add(odd, *(const words *)(panel + (word + 1) * LANES), t[word + 1]);
                }
                add_lanes(p->y + order[row] * p->y_stride + from + column, even + odd, num_columns - column);
            }
        }
    }
}

// Add the changes of the rows' adapters to y = x weight^T. x: [num_tokens, num_inputs], contiguous; y: rows `y_stride`
// elements apart. Return DONE or NO_MEMORY.
int add_adapters(const struct adapted *layer, const struct adapted_rows *rows, const element *x, element *y,
                 long y_stride) {
    long widest = 0;
    for (long part = 0; part < layer->num_projections; part++) {
        const long size = layer->columns[part + 1] - layer->columns[part];
        widest = size > widest ? size : widest;
    }
    struct adapted_product p = {
        .layer = layer, .rows = rows, .x = x, .y = y, .y_stride = y_stride,
        .t_stride = layer->num_projections * layer->max_rank,
        .chunks = (widest + ADAPTER_COLUMNS - 1) / ADAPTER_COLUMNS};
    if (!layer->max_rank || !rows->num_blocks) return DONE;
    const long num_threads = count_threads(), num_sums = num_threads * DOWN_ROWS * LANES;
    const size_t num_t = rows->num_rows * p.t_stride, num_gathered = num_threads * rows->most_rows * layer->num_inputs;
    p.sums = allocate(num_sums * sizeof *p.sums + (num_t + num_gathered) * sizeof *p.t);
    if (!p.sums) return NO_MEMORY;
    p.t = (factor *)(p.sums + num_sums), p.gathered = p.t + num_t;
    const long size = layer->num_inputs * layer->max_rank;
    parallel_for(multiply_down, &p, rows->num_blocks * layer->num_projections, items_of(size), LONG_MAX);
    parallel_for(multiply_up, &p, rows->num_blocks * layer->num_projections * p.chunks, 1, LONG_MAX);
    free(p.sums);
    return DONE;
}
