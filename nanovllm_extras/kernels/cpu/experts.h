// A mixture of experts (nanovllm_extras/models/moe.py): each token is processed by a few of many feed-forward networks.
//
// Tokens are grouped by expert, so that an expert's weights are read once for all of its tokens. The products are those
// of `linear`, and the experts' outputs for a token are added in the order of the experts' numbers. So a token has the
// same bits in every batch.

#pragma once
#include "linear.h"

struct experts {
    const uint32_t *const *gate_up, *const *down;           // as `linear` takes them, one for each expert
    const element *const *gate_up_bias, *const *down_bias;  // as `linear` takes them
    long num_experts, hidden_size, intermediate_size, gate;
};

// Sort the pairs token * top_k + rank by expert. The pairs of expert e are in `order`, from starts[e] on.
static void group_by_expert(const int64_t *expert_ids, long num_pairs, long num_experts, long *starts, long *order) {
    memset(starts, 0, (num_experts + 1) * sizeof *starts);
    for (long pair = 0; pair < num_pairs; pair++) starts[expert_ids[pair] + 1]++;
    for (long e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
    for (long pair = 0; pair < num_pairs; pair++) order[starts[expert_ids[pair]]++] = pair;
    for (long e = num_experts; e > 0; e--) starts[e] = starts[e - 1];  // the loop above moved each start to the next
    starts[0] = 0;
}

// The tokens of one expert. Row i is that of pairs[i].
struct expert_rows {
    const long *pairs;
    long top_k, size;
    const element *x;  // [num_tokens, size]
    element *rows;     // [number of pairs, size]
    const float *y, *weights;
    float *sums;
};

static void copy_rows(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct expert_rows *e = arguments;
    for (long row = first; row < last; row++)
        memcpy(e->rows + row * e->size, e->x + e->pairs[row] / e->top_k * e->size, e->size * sizeof(element));
}

// Add each row to its token: sums[token] += weight * y[row].
static void add_weighted(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct expert_rows *e = arguments;
    for (long row = first; row < last; row++) {
        float *sums = e->sums + e->pairs[row] / e->top_k * e->size;
        for (long i = 0; i < e->size; i++) sums[i] += e->weights[e->pairs[row]] * e->y[row * e->size + i];
    }
}

// Compute the mixture. x, y: [num_tokens, hidden_size]; expert_ids, weights: [num_tokens, top_k]. Return
// DONE or NO_MEMORY.
int mixture(const struct experts *e, const element *x, const int64_t *expert_ids, const float *weights, element *y,
            long num_tokens, long top_k) {
    const long size = e->hidden_size, inner = e->intermediate_size, num_pairs = num_tokens * top_k;
    // an expert processes a token at most once, so it has at most num_tokens rows
    const long num_floats = 2 * num_tokens * size, num_elements = num_tokens * (size + inner);
    long *starts = allocate((e->num_experts + 1 + num_pairs) * sizeof *starts);
    float *sums = allocate(num_floats * sizeof(float) + num_elements * sizeof(element));
    if (!starts || !sums) {
        free(starts);
        free(sums);
        return NO_MEMORY;
    }
    long *order = starts + e->num_experts + 1;
    group_by_expert(expert_ids, num_pairs, e->num_experts, starts, order);
    float *out = sums + num_tokens * size;
    element *rows = (element *)(out + num_tokens * size), *activated = rows + num_tokens * size;
    memset(sums, 0, num_tokens * size * sizeof *sums);
    int status = DONE;
    for (long expert = 0; expert < e->num_experts && status == DONE; expert++) {
        const long count = starts[expert + 1] - starts[expert];
        if (!count) continue;
        const struct expert_rows own = {order + starts[expert], top_k, size, x, rows, out, weights, sums};
        parallel_for(copy_rows, &own, count, items_of(size), LONG_MAX);
        const element *gate_up_bias = e->gate_up_bias[expert], *down_bias = e->down_bias[expert];
        status = gated_linear(rows, e->gate_up[expert], gate_up_bias, activated, count, inner, size, e->gate);
        if (status == DONE) status = linear(activated, e->down[expert], down_bias, out, count, size, inner, true);
        if (status == DONE) parallel_for(add_weighted, &own, count, items_of(size), LONG_MAX);
    }
    for (long i = 0; i < num_tokens * size && status == DONE; i += LANES) store(y + i, *(const floats *)(sums + i));
    free(sums);
    free(starts);
    return status;
}

// Compute x = 1 / (1 + e^-x) in place, for any count. The last few numbers are computed in a whole vector too, so that
// the result does not depend on a number's position.
void sigmoid(float *x, long count) {
    for (long i = 0; i < count; i += LANES) {
        float lanes[LANES] = {0};
        const long left = count - i < LANES ? count - i : LANES;
        memcpy(lanes, x + i, left * sizeof *x);
        floats v;
        memcpy(&v, lanes, sizeof v);
        const floats e = exp_lanes(pick(v < 0, v, -v));  // e^-|v|: never overflows
        store_some_floats(x + i, pick(v < 0, e, (floats){0} + 1) / (1 + e), left);
    }
}
