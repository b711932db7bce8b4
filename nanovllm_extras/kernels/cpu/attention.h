// Attention over K and V in the model's dtype, which products read directly from the cache.

#pragma once
#include "kv_cache.h"
#include "product.h"

// Compute the softmax of the scores `first` … `last - 1` of `num_slots`, and of `sink`, or -INFINITY. The other weights
// become 0.
static void softmax(float *scores, factor *weights, long first, long last, long num_slots, const struct masking *m,
                    float sink) {
    const float one = exponentials(scores, first, last, num_slots, m, sink);
    for (long i = 0; i < num_slots; i += LANES) store_factors(weights + i, *(const floats *)(scores + i) * one);
}

// Multiply each tile of the span's rows by the same panels. The first tile prefetches the next panels.
static inline void multiply_span(struct product *p, const struct span *span, int count) {
    for (int row = 0; row < span->num_rows; row += ROWS) {
        const int left = span->num_rows - row;
        multiply(p, left < ROWS ? left : ROWS, count);
        p->x += ROWS * p->x_stride;
        p->out += ROWS * p->out_stride;
        for (int i = 0; i < count && !ASKS_AGAIN; i++) p->next[i] = NULL;
    }
}

// Return whether to prefetch the next panels. Decodes wait for memory; the many rows of a prompt do not.
static inline bool asks(const struct tile *t) { return t->num_spans > 1 || t->num_rows <= FEW_ROWS || ASKS_AGAIN; }

// Compute scores = q k^T of a span.
//
// A decode waits for memory. So V is prefetched while K is read, and K of the following head is prefetched while V is
// read. This keeps the memory busy during softmax and between heads. The V of a long span would be evicted from the L2
// cache before it is used, so a long span prefetches the next panels of K instead.
static void multiply_k(const struct cache *c, const struct tile *t, const struct span *span, long kv_head) {
    const long q_words = c->head_dim / PER_WORD, block_size = c->block_size, width = WIDTH(span->num_rows);
    const long num_panels = slots_of(span) / LANES, block_words = c->num_kv_heads * head_words(c);
    const uint32_t *k = c->k + kv_head * head_words(c), *v = c->v + kv_head * head_words(c);  // of block 0
    const long far = is_short(c, span, sizeof(element)) ? num_panels : width;
    for (long panel = 0; panel < num_panels; panel += width) {  // panels of 16 tokens
        struct product p = {.x = (const factors *)t->q + span->first_row * q_words, .x_stride = q_words,
                            .num_words = q_words, .out_stride = t->num_slots};
        p.out = t->scores + span->first_row * t->num_slots + span->first_token + panel * LANES;
        const int count = num_panels - panel < width ? num_panels - panel : width;
        for (int i = 0; i < count; i++) {
            const long slot = (panel + i) * LANES, ahead = slot + far * LANES;
            const long next = ahead < num_panels * LANES ? ahead : ahead - num_panels * LANES;
            p.panels[i] = k + span->block_table[slot / block_size] * block_words + slot % block_size * q_words;
            if (asks(t)) p.next[i] = (ahead == next ? k : v) + span->block_table[next / block_size] * block_words
                                     + next % block_size * q_words;
        }
        multiply_span(&p, span, count);
    }
}

// Compute out = weights v of a span, and add it to that of the spans before it. `then` is the K and V head that
// follows, in the same blocks.
static void multiply_v(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, long then) {
    const long head_dim = c->head_dim, width = WIDTH(span->num_rows);
    const long v_panel_words = c->block_size / PER_WORD * LANES;
    const uint32_t *v = c->v + kv_head * head_words(c), *then_k = c->k + then * head_words(c);
    const factor *weights = t->weights + span->first_row * t->num_slots + span->first_token;
    for (long d = 0; d < head_dim; d += width * LANES) {  // panels of 16 channels
        struct product p = {.x = (const factors *)weights, .x_stride = t->num_slots / PER_WORD,
                            .num_words = (span->num_tokens + PER_WORD - 1) / PER_WORD, .blocks = span->block_table,
                            .block_words = c->num_kv_heads * head_words(c), .words_per_block = c->block_size / PER_WORD,
                            .is_odd = span->num_tokens % PER_WORD, .adds = span->first_token > 0,
                            .out = t->out + span->first_row * head_dim + d, .out_stride = head_dim};
        p.far = is_short(c, span, sizeof(element)) ? count_blocks(&p) : 2;
        const int count = head_dim - d < width * LANES ? (head_dim - d) / LANES : width;
        for (int i = 0; i < count; i++) {
            p.panels[i] = v + (d / LANES + i) * v_panel_words;
            if (asks(t)) p.next[i] = then_k + (d / LANES + i) * v_panel_words;
        }
        multiply_span(&p, span, count);
    }
}

static void copy_query(struct tile *t, int row, const element *q, long head_dim) {
    copy_factors(q, t->q + row * head_dim, head_dim);
}

static void weigh_row(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, int row,
                      const struct masking *m) {
    (void)c, (void)kv_head;
    const long start = row * t->num_slots, num_slots = span->first_token + slots_of(span);
    softmax(t->scores + start, t->weights + start, first_seen(t, row, m), t->last[row], num_slots, m,
            t->sinks[row]);
}

// Attend. q, out: [num_tokens, num_heads, head_dim]. Each new token attends to its sequence's tokens up to its own
// position, or to the last `window` of them. Return DONE or NO_MEMORY.
int attend(const element *q, element *out, uint32_t *k_cache, uint32_t *v_cache, const int32_t *block_tables,
           const int32_t *seq_lens, const int32_t *cu_seqlens_q, const float *sinks, long num_seqs, long max_num_blocks,
           long q_stride, long num_heads, long num_kv_heads, long head_dim, long block_size, long window, float scale,
           float softcap) {
    static const struct way way = {copy_query, multiply_k, weigh_row, multiply_v};
    const struct masking m = {window, scale, softcap, sinks};
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
    const struct batch b = {block_tables, seq_lens, cu_seqlens_q, num_seqs, max_num_blocks};
    return attend_rows(&way, q, out, &c, &b, &m, q_stride, num_heads);
}
