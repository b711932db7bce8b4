// Attention over the paged KV cache.
//
// Rows are query tokens times the query heads of one K and V head; some of them are computed together. They read spans
// of tokens. Rows of one sequence read one span. Rows of several sequences that begin with the same blocks read the shared
// span, once for all, and then a span of their own. A row's sums run over its spans in the order of its tokens, so its
// bits do not depend on the other rows.

#pragma once
#include "gates.h"
#include "kv_cache.h"
#include "work.h"

// How a layer attends: `window` tokens at most, LONG_MAX for all; scores bounded by `softcap`, 0 for no bound.
struct masking {
    long window;
    float scale, softcap;
};

// Softmax of the scores `first` … `last - 1` of `num_slots`; what lies before and behind them becomes 0.
static void softmax(float *scores, element *weights, long first, long last, long num_slots, const struct masking *m) {
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
    floats sum = {0};
    for (long i = 0; i < num_slots; i += LANES) {
        floats p = exp_lanes((*(const floats *)(scores + i) - largest) * scale);
        if (i < first || i + LANES > last)
            for (int lane = 0; lane < LANES; lane++)
                if (i + lane < first || i + lane >= last) p[lane] = 0;
        *(floats *)(scores + i) = p;
        sum += p;
    }
    const float one = 1 / sum_lanes(sum);
    for (long i = 0; i < num_slots; i += LANES) store(weights + i, *(const floats *)(scores + i) * one);
}

// A span with at most this many bytes of K is short: its V is prefetched to the L2 cache while K is multiplied.
#define SHORT (128 << 10)

// Tokens that some rows see: all rows, or those of one sequence.
struct span {
    const int32_t *block_table;  // from the block of its first token on
    int first_row, num_rows;
    long first_token, num_tokens;  // the first is that of a block
};

// What a thread works on, and room for it. Tokens are counted from the first block that some row sees.
struct tile {
    int num_rows, num_spans;
    struct span spans[SHARING_ROWS + 1];
    bool asks;  // memory for what comes next: rows of decodes wait for it, those of a prompt are many
    long last[SHARING_ROWS];  // of the tokens that a row sees, excluded
    long at[SHARING_ROWS];    // head and token: the row of q and out
    long num_slots;           // places for scores in a row
    float *scores;            // [num_rows, num_slots]
    float *out;               // [num_rows, head_dim]
    element *weights;         // [num_rows, num_slots]
    element *q;               // [num_rows, head_dim]
};

static inline long slots_of(const struct span *span) { return (span->num_tokens + LANES - 1) / LANES * LANES; }

// For each tile of the span's rows, which read the same panels. The first asks for what comes next.
static inline void multiply_span(struct product *p, const struct span *span, int count) {
    for (int row = 0; row < span->num_rows; row += ROWS) {
        const int left = span->num_rows - row;
        multiply(p, left < ROWS ? left : ROWS, count);
        p->x += ROWS * p->x_stride;
        p->out += ROWS * p->out_stride;
        for (int i = 0; i < count && !ASKS_AGAIN; i++) p->next[i] = NULL;
    }
}

static inline bool is_short(const struct cache *c, const struct span *span) {
    return slots_of(span) * c->head_dim <= SHORT / (long)sizeof(element);
}

// scores = q k^T of a span.
//
// A decode waits for memory. While K is read, memory is asked for V; while V is read, for K of the head whose turn comes
// afterwards: so memory is busy during softmax and between the heads too. Of a long span, V would fall out of the L2
// cache before its turn: there, memory is asked for what comes next.
static void multiply_k(const struct cache *c, const struct tile *t, const struct span *span, long kv_head) {
    const long q_words = c->head_dim / PER_WORD, block_size = c->block_size, width = WIDTH(span->num_rows);
    const long num_panels = slots_of(span) / LANES, block_words = c->num_kv_heads * head_words(c);
    const uint32_t *k = c->k + kv_head * head_words(c), *v = c->v + kv_head * head_words(c);  // of block 0
    const long far = is_short(c, span) ? num_panels : width;
    for (long panel = 0; panel < num_panels; panel += width) {  // of 16 tokens
        struct product p = {.x = (const uint32_t *)t->q + span->first_row * q_words, .x_stride = q_words,
                            .num_words = q_words, .out_stride = t->num_slots};
        p.out = t->scores + span->first_row * t->num_slots + span->first_token + panel * LANES;
        const int count = num_panels - panel < width ? num_panels - panel : width;
        for (int i = 0; i < count; i++) {
            const long slot = (panel + i) * LANES, ahead = slot + far * LANES;
            const long next = ahead < num_panels * LANES ? ahead : ahead - num_panels * LANES;
            p.panels[i] = k + span->block_table[slot / block_size] * block_words + slot % block_size * q_words;
            if (t->asks) p.next[i] = (ahead == next ? k : v) + span->block_table[next / block_size] * block_words
                                     + next % block_size * q_words;
        }
        multiply_span(&p, span, count);
    }
}

// out = weights v of a span, added to the out of the spans before it. `then` is the K and V head whose turn comes
// afterwards, in the same blocks.
static void multiply_v(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, long then) {
    const long head_dim = c->head_dim, width = WIDTH(span->num_rows);
    const long v_panel_words = c->block_size / PER_WORD * LANES;
    const uint32_t *v = c->v + kv_head * head_words(c), *then_k = c->k + then * head_words(c);
    const element *weights = t->weights + span->first_row * t->num_slots + span->first_token;
    for (long d = 0; d < head_dim; d += width * LANES) {  // panels of 16 channels
        struct product p = {.x = (const uint32_t *)weights, .x_stride = t->num_slots / PER_WORD,
                            .num_words = (span->num_tokens + PER_WORD - 1) / PER_WORD, .blocks = span->block_table,
                            .block_words = c->num_kv_heads * head_words(c), .words_per_block = c->block_size / PER_WORD,
                            .is_odd = span->num_tokens % PER_WORD, .adds = span->first_token > 0,
                            .out = t->out + span->first_row * head_dim + d, .out_stride = head_dim};
        p.far = is_short(c, span) ? count_blocks(&p) : 2;
        const int count = head_dim - d < width * LANES ? (head_dim - d) / LANES : width;
        for (int i = 0; i < count; i++) {
            p.panels[i] = v + (d / LANES + i) * v_panel_words;
            if (t->asks) p.next[i] = then_k + (d / LANES + i) * v_panel_words;
        }
        multiply_span(&p, span, count);
    }
}

// In three strides: scores = q k^T, softmax, out = weights v.
static void attend_tile(const struct cache *c, const struct tile *t, long kv_head, long then, const struct masking *m) {
    for (int i = 0; i < t->num_spans; i++) multiply_k(c, t, &t->spans[i], kv_head);
    for (int i = t->num_spans > 1; i < t->num_spans; i++) {  // a row's last span
        const struct span *span = &t->spans[i];
        for (int row = span->first_row; row < span->first_row + span->num_rows; row++) {
            const long first = t->last[row] > m->window ? t->last[row] - m->window : 0, start = row * t->num_slots;
            softmax(t->scores + start, t->weights + start, first, t->last[row], span->first_token + slots_of(span), m);
        }
    }
    for (int i = 0; i < t->num_spans; i++) multiply_v(c, t, &t->spans[i], kv_head, then);
}

// The rows of one sequence, from `first_row` on, and their span, behind `shared` tokens that have a span already. Whole
// blocks that no row sees are left out. Those that only some rows see weigh 0 for the others, which changes no bit of
// their sums.
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
    t->asks = shared || t->num_rows <= FEW_ROWS || ASKS_AGAIN;
}

// q, out: [num_tokens, num_heads, head_dim]. Each new token attends to its sequence's tokens up to itself, or to `window`
// of them.
void attend(const element *q, element *out, uint32_t *k_cache, uint32_t *v_cache, const int32_t *block_tables,
            const int32_t *seq_lens, const int32_t *cu_seqlens_q, long num_seqs, long max_num_blocks, long q_stride,
            long num_heads, long num_kv_heads, long head_dim, long block_size, long window, float scale, float softcap) {
    const struct masking m = {window, scale, softcap};
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
    const struct batch b = {block_tables, seq_lens, cu_seqlens_q, num_seqs, max_num_blocks};
    const long group = num_heads / num_kv_heads;
    long most_work = 0, max_len = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        most_work += (count_new(&b, seq) * group + ROWS - 1) / ROWS * num_kv_heads;
        max_len = seq_lens[seq] > max_len ? seq_lens[seq] : max_len;
    }
    struct work *work = malloc(most_work * sizeof *work);
    const long num_work = divide(&b, work, num_kv_heads, group, block_size, max_len <= window);
    // A thread takes several heads of the same rows one after the other, if there is enough for all threads.
    const long most = num_work / (2 * omp_get_max_threads());
    const long chunk = most < 1 ? 1 : most < num_kv_heads ? most : num_kv_heads;
    const long max_slots = (max_len + LANES - 1) / LANES * LANES;
    const long most_rows = num_work < most_work ? SHARING_ROWS : ROWS;
    const size_t num_bytes = most_rows * (max_slots + head_dim) * (sizeof(float) + sizeof(element));
#pragma omp parallel
    {
        struct tile t = {.scores = aligned_alloc(64, (num_bytes + 63) / 64 * 64)};
        t.out = t.scores + most_rows * max_slots;
        t.weights = (element *)(t.out + most_rows * head_dim);
        t.q = t.weights + most_rows * max_slots;
#pragma omp for schedule(dynamic, chunk)
        for (long i = 0; i < num_work; i++) {
            const struct work *w = &work[i];
            // what this thread takes next: the chunk behind those of the others, if all are equally long
            const long next = (i + 1) % chunk ? i + 1 : i + 1 + chunk * (omp_get_num_threads() - 1);
            const bool is_last = next >= num_work || work[next].seq != w->seq;
            gather_rows(&t, &c, &b, w, group, &m);
            for (int row = 0; row < t.num_rows; row++) {
                const long token = t.at[row] / num_heads, head = t.at[row] % num_heads + w->kv_head * group;
                memcpy(t.q + row * head_dim, q + token * q_stride + head * head_dim, head_dim * sizeof(element));
            }
            attend_tile(&c, &t, w->kv_head, work[is_last ? i : next].kv_head, &m);
            for (int row = 0; row < t.num_rows; row++)
                for (long d = 0; d < head_dim; d += LANES)
                    store(out + (t.at[row] + w->kv_head * group) * head_dim + d,
                          *(const floats *)(t.out + row * head_dim + d));
        }
        free(t.scores);
        release_tiles();
    }
    free(work);
}
