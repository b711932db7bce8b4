// Finish a product's sums: add a bias, apply a gate, round, and write to memory.

#pragma once
#include "gates.h"

#define MOST_PANELS 4  // number of panels whose sums are finished together

struct matrix {
    void *values;
    long num_columns;
    const element *bias;  // one number for each column of the panels, or NULL
    bool is_float, streams;
    enum gate gate;
    const element *added;  // [num_rows, 2 * num_columns]: added to the rounded results before a gate, or NULL
};

static inline floats add_bias(const struct matrix *y, const float *sums, long row, long column) {
    floats x = *(const floats *)sums;
    if (y->bias) x += load(y->bias + column);
    return y->added ? round_lanes(x) + load(y->added + row * 2 * y->num_columns + column) : x;
}

// Return 16 columns of a row of y, starting at `column`. A gate's sums are followed by those of up. The bias of up follows that
// of the gate.
static inline floats finish_sums(const struct matrix *y, const float *sums, long row, long column) {
    const floats x = add_bias(y, sums, row, column);
    return y->gate ? gate_lanes(y->gate, x, add_bias(y, sums + LANES, row, y->num_columns + column)) : x;
}

// Write y's rows from `row` on and columns from `column` on, from sums: [num_rows, width * 16].
static void finish_rows(const struct matrix *y, const float *sums, long row, long column, int num_rows, int width) {
    const int step = y->gate ? 2 : 1, num_results = width / step;
    const bool has_lines = y->streams && num_results == 2 && y->num_columns - column >= 2 * LANES;
    for (int r = 0; r < num_rows; r++, sums += width * LANES)
        for (int i = 0; i < num_results; i++) {
            const long from = column + i * LANES, left = y->num_columns - from, count = left < LANES ? left : LANES;
            const long to = (row + r) * y->num_columns + from;
            const float *at = sums + i * step * LANES;
            const floats x = finish_sums(y, at, row + r, from);
            if (has_lines && y->is_float) stream_floats((float *)y->values + to, x);
            else if (has_lines) {
                stream_two((element *)y->values + to, x, finish_sums(y, at + step * LANES, row + r, from + LANES));
                i++;
            } else if (y->is_float) store_some_floats((float *)y->values + to, x, count);
            else store_some((element *)y->values + to, x, count);
        }
}

// Return whether to bypass the caches when writing y: [m, row_bytes]. Large results do not fit. If many rows are
// written, their lines of 64 bytes map to the same sets of a cache and would evict one another before they are
// complete.
static bool streams(const void *y, long m, long row_bytes) {
    return m * row_bytes > 1 << 20 && row_bytes >= 1 << 12 && row_bytes % 64 == 0 && (uintptr_t)y % 64 == 0;
}
