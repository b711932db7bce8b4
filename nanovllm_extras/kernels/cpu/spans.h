// Attention over the paged KV cache: which rows read which tokens.
//
// A row is one query token and one of the query heads of a K and V head. Some rows are computed together. They read
// spans of tokens. Rows of one sequence read one span. Rows of several sequences that begin with the same blocks read
// the shared span together, and then each sequence reads its own span. A row's sums run over its spans in the order of
// its tokens, so its bits do not depend on the other rows.
//
// `struct way` has the functions that multiply: attention.h for caches in the model's dtype, int8_kv.c for 8 bits.

#pragma once
#include "allocate.h"
#include "gates.h"
#include "work.h"

struct cache {
    uint32_t *k, *v;  // of one layer: [num_blocks, num_kv_heads, …] words
    long num_kv_heads, head_dim, block_size;
};

// The options of a layer's attention. `window`: maximum number of tokens, LONG_MAX for all. `softcap`: soft bound of
// the scores, 0 for none. `sinks`: [num_heads], a further score of each head, which has no value, or NULL.
struct masking {
    long window;
    float scale, softcap;
    const float *sinks;
};

// Replace the scores `first` … `last - 1` of `num_slots` by e^score, relative to the largest. The others become 0.
// Return 1 / the sum, which includes that of `sink`, a score that is scaled already, or -INFINITY.
static float exponentials(float *scores, long first, long last, long num_slots, const struct masking *m, float sink) {
    float scale = m->scale;
    if (m->softcap > 0) {
        for (long i = 0; i < num_slots; i += LANES)
            *(floats *)(scores + i) = m->softcap * tanh_lanes(*(const floats *)(scores + i) * (scale / m->softcap));
        scale = 1;
    }
    for (long i = 0; i < first; i++) scores[i] = -INFINITY;
    for (long i = last; i < num_slots; i++) scores[i] = -INFINITY;
    floats max = {0};
    max += -INFINITY;
    for (long i = 0; i < num_slots; i += LANES) max = max_of(*(const floats *)(scores + i), max);
    float largest = max[0];
    for (int i = 1; i < LANES; i++) largest = max[i] > largest ? max[i] : largest;
    largest = sink > largest * scale ? sink / scale : largest;
    floats sum = {0};
    if (sink > -INFINITY) sum[0] = exp_lanes((floats){0} + (sink - largest * scale))[0];
    for (long i = 0; i < num_slots; i += LANES) {
        floats p = exp_lanes((*(const floats *)(scores + i) - largest) * scale);
        if (i < first || i + LANES > last)
            for (int lane = 0; lane < LANES; lane++)
                if (i + lane < first || i + lane >= last) p[lane] = 0;
        *(floats *)(scores + i) = p;
        sum += p;
    }
    return 1 / sum_lanes(sum);
}

// Tokens to which some rows attend: all rows of a tile, or those of one sequence.
struct span {
    const int32_t *block_table;  // starts with the block of the first token
    int first_row, num_rows;
    long first_token, num_tokens;  // the first token is at the start of a block
};

// The rows on which a thread works, with its buffers. Tokens are counted from the first block to which some row
// attends.
struct tile {
    int num_rows, num_spans;
    struct span spans[SHARING_ROWS + 1];
    long last[SHARING_ROWS];  // the end (exclusive) of the tokens to which a row attends
    long at[SHARING_ROWS];    // token * num_heads + head within its group, for the row of q and out
    float sinks[SHARING_ROWS];  // of the row's head, or -INFINITY
    long num_slots;           // number of scores in a row
    float *scores;            // [num_rows, num_slots]
    float *out;               // [num_rows, head_dim]
    factor *weights;          // [num_rows, num_slots]
    factor *q;                // [num_rows, head_dim]
    // with a cache of 8 bits, weights and q have 16 bits and these scales
    float *weight_scales;  // [num_rows, num_slots / 16]
    float q_scales[SHARING_ROWS];
};

static inline long first_seen(const struct tile *t, int row, const struct masking *m) {
    return t->last[row] > m->window ? t->last[row] - m->window : 0;
}

static inline long slots_of(const struct span *span) { return (span->num_tokens + LANES - 1) / LANES * LANES; }

// A span with at most 128 KiB of K is short: its V is prefetched to the L2 cache while K is multiplied.
static inline bool is_short(const struct cache *c, const struct span *span, long number_bytes) {
    return slots_of(span) * c->head_dim * number_bytes <= 128 << 10;
}

// The functions that compute attention for a kind of cache.
struct way {
    // copies or rounds the query of a row
    void (*take_query)(struct tile *t, int row, const element *q, long head_dim);
    // computes scores = q k^T of a span
    void (*score)(const struct cache *c, const struct tile *t, const struct span *span, long kv_head);
    // computes weights = softmax(scores) of a row; `span` is the row's last span
    void (*weigh)(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, int row,
                  const struct masking *m);
    // computes out = weights v of a span and adds it to that of the spans before it. `then` is the K and V head that
    // follows, in the same blocks.
    void (*sum)(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, long then);
};

// Add the rows of one sequence, starting at `first_row`, and their span, which follows `shared` tokens that already
// have a span. Blocks to which no row attends are left out. Tokens to which only some rows attend have weight 0 for the
// others, which does not change the bits of their sums.
static void add_rows(struct tile *t, const struct cache *c, const struct batch *b, long seq, long first_row, long group,
                     long shared, const struct masking *m) {
    const long num_new = count_new(b, seq), left = num_new * group - first_row, most = shared ? SHARING_ROWS : ROWS;
    struct span span = {.first_row = t->num_rows, .num_rows = left < most ? left : most, .first_token = shared};
    const long num_before = b->seq_lens[seq] - num_new + 1, first_last = num_before + first_row / group;
    const long first_block = first_last > m->window ? (first_last - m->window) / c->block_size : 0;
    for (long row = first_row; row < first_row + span.num_rows; row++, t->num_rows++) {
        t->last[t->num_rows] = num_before + row / group - first_block * c->block_size;
        t->at[t->num_rows] = (b->cu_seqlens_q[seq] + row / group) * group * c->num_kv_heads + row % group;
    }
    span.block_table = block_table(b, seq) + first_block + shared / c->block_size;
    span.num_tokens = t->last[t->num_rows - 1] - shared;
    t->spans[t->num_spans++] = span;
    const long num_slots = shared + slots_of(&span);
    t->num_slots = num_slots > t->num_slots ? num_slots : t->num_slots;
}

static void gather_rows(struct tile *t, const struct cache *c, const struct batch *b, const struct work *w, long group,
                        const struct masking *m) {
    const long shared = w->num_shared * c->block_size;
    t->num_rows = t->num_slots = 0;
    t->num_spans = shared > 0;
    for (long seq = w->seq; seq < w->seq + w->num_seqs; seq++) add_rows(t, c, b, seq, w->first_row, group, shared, m);
    if (shared) t->spans[0] = (struct span){block_table(b, w->seq), 0, t->num_rows, 0, shared};
}

static void attend_tile(const struct way *way, const struct cache *c, const struct tile *t, long kv_head, long then,
                        const struct masking *m) {
    for (int i = 0; i < t->num_spans; i++) way->score(c, t, &t->spans[i], kv_head);
    for (int i = t->num_spans > 1; i < t->num_spans; i++) {  // the last span of each row
        const struct span *span = &t->spans[i];
        for (int row = span->first_row; row < span->first_row + span->num_rows; row++)
            way->weigh(c, t, span, kv_head, row, m);
    }
    for (int i = 0; i < t->num_spans; i++) way->sum(c, t, &t->spans[i], kv_head, then);
}

// The arguments of `attend_rows`, and its pieces of work.
struct attention {
    const struct way *way;
    const element *q;
    element *out;
    const struct cache *cache;
    const struct batch *batch;
    const struct masking *masking;
    long q_stride, num_heads;
    const struct work *work;
    long num_work, chunk, most_rows, max_slots;
    char *buffers;  // of each thread: `own_bytes`
    size_t own_bytes;
    int num_threads;
};

static void attend_pieces(const void *arguments, long first, long last, int thread) {
    const struct attention *a = arguments;
    const struct cache *c = a->cache;
    const long head_dim = c->head_dim, num_heads = a->num_heads, group = num_heads / c->num_kv_heads;
    struct tile t = {.scores = (float *)(a->buffers + thread * a->own_bytes)};
    t.out = t.scores + a->most_rows * a->max_slots;
    t.weights = (factor *)(t.out + a->most_rows * head_dim);
    t.q = t.weights + a->most_rows * a->max_slots;
    t.weight_scales = (float *)(t.q + a->most_rows * head_dim);
    for (long i = first; i < last; i++) {
        const struct work *w = &a->work[i];
        // what this thread takes next: the chunk after those of the other threads, if all take equally long
        const long next = i + 1 < last ? i + 1 : i + 1 + a->chunk * (a->num_threads - 1);
        const bool is_last = next >= a->num_work || a->work[next].seq != w->seq;
        gather_rows(&t, c, a->batch, w, group, a->masking);
        for (int row = 0; row < t.num_rows; row++) {
            const long token = t.at[row] / num_heads, head = t.at[row] % num_heads + w->kv_head * group;
            t.sinks[row] = a->masking->sinks ? a->masking->sinks[head] : -INFINITY;
            a->way->take_query(&t, row, a->q + token * a->q_stride + head * head_dim, head_dim);
        }
        attend_tile(a->way, c, &t, w->kv_head, a->work[is_last ? i : next].kv_head, a->masking);
        for (int row = 0; row < t.num_rows; row++)
            for (long d = 0; d < head_dim; d += LANES)
                store(a->out + (t.at[row] + w->kv_head * group) * head_dim + d,
                      *(const floats *)(t.out + row * head_dim + d));
    }
#ifdef HAS_TILES
    release_tiles();
#endif
}

// Attend. q, out: [num_tokens, num_heads, head_dim]. Each new token attends to its sequence's tokens up to its own
// position, or to the last `window` of them. Return DONE or NO_MEMORY.
static int attend_rows(const struct way *way, const element *q, element *out, const struct cache *c, const struct batch *b,
                       const struct masking *m, long q_stride, long num_heads) {
    const long head_dim = c->head_dim, num_kv_heads = c->num_kv_heads, group = num_heads / num_kv_heads;
    long most_work = 0, max_len = 0;
    for (long seq = 0; seq < b->num_seqs; seq++) {
        most_work += (count_new(b, seq) * group + ROWS - 1) / ROWS * num_kv_heads;
        max_len = b->seq_lens[seq] > max_len ? b->seq_lens[seq] : max_len;
    }
    struct work *work = allocate(most_work * sizeof *work);
    if (!work) return NO_MEMORY;
    const long num_work = divide(b, work, num_kv_heads, group, c->block_size, max_len <= m->window);
    const int num_threads = count_threads();
    // A thread takes several heads of the same rows one after the other, if there is enough work for all threads.
    const long most = num_work / (2 * num_threads);
    const long chunk = most < 1 ? 1 : most < num_kv_heads ? most : num_kv_heads;
    const long max_slots = (max_len + LANES - 1) / LANES * LANES;
    const long most_rows = num_work < most_work ? SHARING_ROWS : ROWS;
    const size_t num_floats = most_rows * (max_slots + head_dim + max_slots / LANES);
    const size_t num_bytes = num_floats * sizeof(float) + most_rows * (max_slots + head_dim) * sizeof(factor);
    const size_t own_bytes = (num_bytes + 63) / 64 * 64;  // of a thread
    char *buffers = allocate(num_threads * own_bytes);
    if (!buffers) {
        free(work);
        return NO_MEMORY;
    }
    const struct attention a = {way, q, out, c, b, m, q_stride, num_heads, work, num_work, chunk, most_rows, max_slots,
                                buffers, own_bytes, num_threads};
    parallel_for(attend_pieces, &a, num_work, chunk, chunk);
    free(buffers);
    free(work);
    return DONE;
}
