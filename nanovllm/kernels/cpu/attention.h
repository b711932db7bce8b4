// Attention over the paged KV cache: K and V are stored, and multiplied, in panels (cpu.c has the layout).

#pragma once
#include <omp.h>
#include "gates.h"
#include "product.h"

struct cache {
    uint32_t *k, *v;    // of one layer: [num_blocks, num_kv_heads, …] words
    long num_kv_heads, head_dim, block_size;
};

static inline long head_words(const struct cache *c) { return c->block_size * c->head_dim / PER_WORD; }

// Writes k, v: [num_tokens, num_kv_heads, head_dim], tokens `stride` elements apart, to their slots.
void store_kv(const element *k, const element *v, uint32_t *k_cache, uint32_t *v_cache, const int32_t *slot_mapping,
              long num_tokens, long k_stride, long v_stride, long num_kv_heads, long head_dim, long block_size) {
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
#pragma omp parallel for schedule(static)
    for (long token = 0; token < num_tokens; token++) {
        const long block = slot_mapping[token] / block_size, offset = slot_mapping[token] % block_size;
        for (long head = 0; head < num_kv_heads; head++) {
            const long start = (block * num_kv_heads + head) * head_words(&c);
            const element *from_k = k + token * k_stride + head * head_dim;
            const element *from_v = v + token * v_stride + head * head_dim;
            // K: panel offset / 16, lane offset % 16; the words of a token are 16 apart
            uint32_t *to_k = k_cache + start + offset / LANES * LANES * head_dim / PER_WORD + offset % LANES;
            for (long word = 0; word < head_dim / PER_WORD; word++)
                memcpy(to_k + word * LANES, from_k + word * PER_WORD, sizeof(uint32_t));
            // V: in each panel of 16 channels word offset / PER_WORD, and in it one element
            element *to_v = (element *)(v_cache + start) + offset / PER_WORD * LANES * PER_WORD + offset % PER_WORD;
            for (long d = 0; d < head_dim; d++)
                to_v[d / LANES * LANES * block_size + d % LANES * PER_WORD] = from_v[d];
        }
    }
}

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

// K of a head of up to so many bytes is a short context: V waits in the L2 cache while K is multiplied.
#define SHORT (128 << 10)

// Room for one tile of rows. A row of scores has one for every slot that its sequence has.
struct scratch {
    float *scores;     // [ROWS, num_slots]
    float *out;        // [ROWS, head_dim]
    element *weights;  // [ROWS, num_slots]
    element *q;        // [ROWS, head_dim]
};

// Up to ROWS rows (query tokens times the query heads of one K and V head) against all that they see, in three strides:
// scores = q k^T, softmax, out = weights v. Row r sees the tokens up to last[r], excluded, or a window of them. `then` is
// the K and V head whose turn comes afterwards, in the same blocks.
//
// A decode waits for memory. While K is read, memory is asked for V; while V is read, for K of the head `then`: so memory
// is busy during softmax and between the heads too. Of a long context, V would fall out of the L2 cache before its turn:
// there, memory is asked for what comes next.
static void attend_rows(const struct cache *c, const struct scratch *s, const int32_t *block_table, long kv_head,
                        long then, int num_rows, const long *last, const struct masking *m) {
    const long head_dim = c->head_dim, block_size = c->block_size, q_words = head_dim / PER_WORD;
    // Whole blocks that no row sees are left out. Those that only some rows see weigh 0 for the others, which changes no
    // bit of their sums.
    const long first_block = last[0] > m->window ? (last[0] - m->window) / block_size : 0;
    const long start = first_block * block_size, num_tokens = last[num_rows - 1] - start;
    block_table += first_block;
    const long num_panels = (num_tokens + LANES - 1) / LANES, num_slots = num_panels * LANES;
    const long block_words = c->num_kv_heads * head_words(c), width = WIDTH(num_rows);
    const uint32_t *k = c->k + kv_head * head_words(c), *v = c->v + kv_head * head_words(c);  // of block 0
    const uint32_t *then_k = c->k + then * head_words(c);
    const bool is_short = num_slots * head_dim <= SHORT / (long)sizeof(element), asks = num_rows <= FEW_ROWS || ASKS_AGAIN;
    const long far = is_short ? num_panels : width;
    for (long panel = 0; panel < num_panels; panel += width) {  // of 16 tokens
        struct product p = {.x = (const uint32_t *)s->q, .x_stride = q_words, .num_words = q_words,
                            .out = s->scores + panel * LANES, .out_stride = num_slots};
        const int count = num_panels - panel < width ? num_panels - panel : width;
        for (int i = 0; i < count; i++) {
            const long slot = (panel + i) * LANES, ahead = slot + far * LANES;
            const long next_slot = ahead < num_slots ? ahead : ahead - num_slots;
            p.panels[i] = k + block_table[slot / block_size] * block_words + slot % block_size * q_words;
            if (asks) p.next[i] = (ahead < num_slots ? k : v) + block_table[next_slot / block_size] * block_words
                                  + next_slot % block_size * q_words;
        }
        multiply(&p, num_rows, count);
    }
    for (int row = 0; row < num_rows; row++) {
        const long first = last[row] - start > m->window ? last[row] - start - m->window : 0;
        softmax(s->scores + row * num_slots, s->weights + row * num_slots, first, last[row] - start, num_slots, m);
    }
    const long v_panel_words = block_size / PER_WORD * LANES;
    for (long d = 0; d < head_dim; d += width * LANES) {  // panels of 16 channels
        struct product p = {.x = (const uint32_t *)s->weights, .x_stride = num_slots / PER_WORD,
                            .num_words = (num_tokens + PER_WORD - 1) / PER_WORD, .blocks = block_table,
                            .block_words = block_words, .words_per_block = block_size / PER_WORD,
                            .is_odd = num_tokens % PER_WORD, .out = s->out + d, .out_stride = head_dim};
        p.far = is_short ? count_blocks(&p) : 2;
        const int count = head_dim - d < width * LANES ? (head_dim - d) / LANES : width;
        for (int i = 0; i < count; i++) {
            p.panels[i] = v + (d / LANES + i) * v_panel_words;
            if (asks) p.next[i] = then_k + (d / LANES + i) * v_panel_words;
        }
        multiply(&p, num_rows, count);
    }
}

struct work {
    int32_t seq, kv_head, first_row;
};

// q, out: [num_tokens, num_heads, head_dim]. Each new token attends to its sequence's tokens up to itself, or to `window`
// of them.
void attend(const element *q, element *out, uint32_t *k_cache, uint32_t *v_cache, const int32_t *block_tables,
            const int32_t *seq_lens, const int32_t *cu_seqlens_q, long num_seqs, long max_num_blocks, long q_stride,
            long num_heads, long num_kv_heads, long head_dim, long block_size, long window, float scale, float softcap) {
    const struct masking m = {window, scale, softcap};
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
    const long group = num_heads / num_kv_heads;
    // rows of a sequence: its new tokens, and for each of them the heads of the group
    long num_work = 0, max_len = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        num_work += ((cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]) * group + ROWS - 1) / ROWS * num_kv_heads;
        max_len = seq_lens[seq] > max_len ? seq_lens[seq] : max_len;
    }
    struct work *work = malloc(num_work * sizeof *work);
    num_work = 0;
    for (int32_t seq = 0; seq < num_seqs; seq++)
        for (int32_t kv_head = 0; kv_head < num_kv_heads; kv_head++)
            for (int32_t row = 0; row < (cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]) * group; row += ROWS)
                work[num_work++] = (struct work){seq, kv_head, row};
    // A thread takes several heads of a sequence one after the other, if there is enough for all threads.
    const long most = num_work / (2 * omp_get_max_threads());
    const long chunk = most < 1 ? 1 : most < num_kv_heads ? most : num_kv_heads;
    const long max_slots = (max_len + LANES - 1) / LANES * LANES;
    const size_t num_bytes = ROWS * (max_slots + head_dim) * (sizeof(float) + sizeof(element));
#pragma omp parallel
    {
        struct scratch s = {.scores = aligned_alloc(64, (num_bytes + 63) / 64 * 64)};
        s.out = s.scores + ROWS * max_slots;
        s.weights = (element *)(s.out + ROWS * head_dim);
        s.q = s.weights + ROWS * max_slots;
#pragma omp for schedule(dynamic, chunk)
        for (long i = 0; i < num_work; i++) {
            const struct work w = work[i];
            const bool is_last = (i + 1) % chunk == 0 || i + 1 == num_work || work[i + 1].seq != w.seq;
            const long first_token = cu_seqlens_q[w.seq], num_new = cu_seqlens_q[w.seq + 1] - first_token;
            const long left = num_new * group - w.first_row;
            const int num_rows = left < ROWS ? left : ROWS;
            long last[ROWS], at[ROWS];
            for (int row = 0; row < num_rows; row++) {
                const long token = (w.first_row + row) / group;
                last[row] = seq_lens[w.seq] - num_new + token + 1;
                at[row] = (first_token + token) * num_heads + w.kv_head * group + (w.first_row + row) % group;
                const element *from = q + (first_token + token) * q_stride + at[row] % num_heads * head_dim;
                memcpy(s.q + row * head_dim, from, head_dim * sizeof(element));
            }
            attend_rows(&c, &s, block_tables + w.seq * max_num_blocks, w.kv_head, work[is_last ? i : i + 1].kv_head,
                        num_rows, last, &m);
            for (int row = 0; row < num_rows; row++)
                for (long d = 0; d < head_dim; d += LANES)
                    store(out + at[row] * head_dim + d, *(const floats *)(s.out + row * head_dim + d));
        }
        free(s.scores);
        release_tiles();
    }
    free(work);
}
