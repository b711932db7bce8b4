// Multi-head latent attention (nanovllm_extras/models/latent_attention.py): all heads read one latent for each token. Its first
// `rank` channels are also the values.
//
// A block of the cache consists of panels of 16 tokens, summed over the latent's channels, like K in cpu.c. The product
// with values needs panels of 16 channels, summed over tokens. So values are transposed to that layout when they are
// used, once for ITEM_ROWS rows.

#pragma once
#include "attention.h"
#include "linear.h"

// Number of rows that share the transposed values. A row is one query token and head of one sequence.
#define ITEM_ROWS (4 * ROWS)

struct new_latents {
    const element *latents;
    uint32_t *cache;
    const int32_t *slot_mapping;
    long head_dim;
};

static void store_some_latents(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct new_latents *n = arguments;
    const long num_words = n->head_dim / PER_WORD;
    for (long token = first; token < last; token++) {
        const long slot = n->slot_mapping[token];  // panel slot / 16, lane slot % 16
        uint32_t *to = n->cache + slot / LANES * LANES * num_words + slot % LANES;
        for (long word = 0; word < num_words; word++)
            memcpy(to + word * LANES, n->latents + token * n->head_dim + word * PER_WORD, sizeof(uint32_t));
    }
}

// Write latents: [num_tokens, head_dim] to their slots.
void store_latents(const element *latents, uint32_t *cache, const int32_t *slot_mapping, long num_tokens, long head_dim) {
    const struct new_latents n = {latents, cache, slot_mapping, head_dim};
    parallel_for(store_some_latents, &n, num_tokens, items_of(head_dim), LONG_MAX);
}

// Transpose 16 channels of `count` tokens: [words of channels][16 tokens] -> [words of tokens][16 channels]. Other
// tokens become 0.
static void turn_panel(const uint32_t *from, uint32_t *to, long count) {
#if PER_WORD == 2
    for (int token = 0; token < LANES; token += 2)
        for (int channel = 0; channel < LANES; channel += 2) {
            const uint32_t *word = from + channel / 2 * LANES + token;
            const uint32_t first = token < count ? word[0] : 0, second = token + 1 < count ? word[1] : 0;
            to[token / 2 * LANES + channel] = (first & 0xffff) | second << 16;
            to[token / 2 * LANES + channel + 1] = first >> 16 | (second & 0xffff0000);
        }
#else
    for (int token = 0; token < LANES; token++)
        for (int channel = 0; channel < LANES; channel++)
            to[token * LANES + channel] = token < count ? from[channel * LANES + token] : 0;
#endif
}

struct latents {
    const uint32_t *cache;
    const int32_t *block_table;  // of one sequence
    long head_dim, rank, block_size;
};

// Return the panel of 16 tokens that begins with `token`.
static inline const uint32_t *latent_panel(const struct latents *l, long token) {
    const long slot = l->block_table[token / l->block_size] * l->block_size + token % l->block_size;
    return l->cache + slot * (l->head_dim / PER_WORD);
}

// Attend with up to ITEM_ROWS rows, q: [num_rows, head_dim] -> out: [num_rows, rank]. The buffer `values` holds WIDTH
// panels of 16 channels of every slot; `scores` and `weights` hold every slot of every row.
static void attend_item(const struct latents *l, const element *q, element *out, int num_rows, const long *last,
                        const struct masking *m, float *scores, factor *weights, uint32_t *values, factor *wide_q) {
    const factors *x = take_factors(q, wide_q, num_rows * l->head_dim);
    const long num_words = l->head_dim / PER_WORD, num_tokens = last[num_rows - 1];  // the most of all rows
    const long num_slots = (num_tokens + LANES - 1) / LANES * LANES, panel_words = num_slots / PER_WORD * LANES;
    const long tile = rows_at_a_time(num_rows), width = WIDTH(num_rows), num_groups = (l->rank + LANES - 1) / LANES;
    _Alignas(64) float sums[ROWS * PANELS * LANES];
    for (long slot = 0; slot < num_slots; slot += width * LANES) {
        const long left = (num_slots - slot) / LANES, count = left < width ? left : width;
        for (long row = 0; row < num_rows; row += tile) {
            struct product p = {.x = x + row * num_words, .x_stride = num_words,
                                .num_words = num_words, .out = scores + row * num_slots + slot, .out_stride = num_slots};
            for (int i = 0; i < count; i++) {
                const long next = slot + (width + i) * LANES;
                p.panels[i] = latent_panel(l, slot + i * LANES);
                p.next[i] = next < num_slots ? latent_panel(l, next) : p.panels[i];
            }
            multiply(&p, num_rows - row < tile ? num_rows - row : tile, count);
        }
    }
    for (int row = 0; row < num_rows; row++) {
        const long first = last[row] > m->window ? last[row] - m->window : 0;
        softmax(scores + row * num_slots, weights + row * num_slots, first, last[row], num_slots, m, -INFINITY);
    }
    for (long group = 0; group < num_groups; group += width) {  // groups of 16 channels
        const long count = num_groups - group < width ? num_groups - group : width;
        for (int i = 0; i < count; i++)
            for (long slot = 0; slot < num_slots; slot += LANES)
                turn_panel(latent_panel(l, slot) + (group + i) * LANES / PER_WORD * LANES,
                           values + i * panel_words + slot / PER_WORD * LANES, num_tokens - slot);
        for (long row = 0; row < num_rows; row += tile) {
            struct product p = {.x = (const factors *)weights + row * num_slots / PER_WORD, .x_stride = num_slots / PER_WORD,
                                .num_words = num_slots / PER_WORD, .out = sums, .out_stride = count * LANES};
            for (int i = 0; i < count; i++) p.next[i] = p.panels[i] = values + i * panel_words;
            const int some = num_rows - row < tile ? num_rows - row : tile;
            multiply(&p, some, count);
            for (int r = 0; r < some; r++)
                for (long i = 0; i < count; i++) {
                    const long channel = (group + i) * LANES, some_channels = l->rank - channel;
                    store_some(out + (row + r) * l->rank + channel, *(const floats *)(sums + (r * count + i) * LANES),
                               some_channels < LANES ? some_channels : LANES);
                }
        }
    }
}

// The arguments of `attend_latents`, and its pieces of work.
struct latent_attention {
    const element *q;
    element *out;
    const uint32_t *cache;
    const struct batch *batch;
    long num_heads, head_dim, rank, block_size;
    const struct masking *masking;
    const struct work *work;
    char *buffers;  // of each thread: `own_bytes`
    size_t max_slots, own_bytes;
};

static void attend_some_latents(const void *arguments, long first_item, long last_item, int thread) {
    const struct latent_attention *a = arguments;
    const struct batch *b = a->batch;
    float *scores = (float *)(a->buffers + thread * a->own_bytes);
    factor *weights = (factor *)(scores + ITEM_ROWS * a->max_slots);
    uint32_t *values = (uint32_t *)(weights + ITEM_ROWS * a->max_slots);
    factor *wide_q = (factor *)(values + PANELS * LANES / PER_WORD * a->max_slots);
    for (long i = first_item; i < last_item; i++) {
        const struct work w = a->work[i];
        const long num_new = count_new(b, w.seq), first = b->cu_seqlens_q[w.seq] * a->num_heads + w.first_row;
        const long left = num_new * a->num_heads - w.first_row;
        const int num_rows = left < ITEM_ROWS ? left : ITEM_ROWS;
        long last[ITEM_ROWS];  // a row attends to the tokens before this position
        for (int row = 0; row < num_rows; row++)
            last[row] = b->seq_lens[w.seq] - num_new + (w.first_row + row) / a->num_heads + 1;
        const struct latents l = {a->cache, block_table(b, w.seq), a->head_dim, a->rank, a->block_size};
        attend_item(&l, a->q + first * a->head_dim, a->out + first * a->rank, num_rows, last, a->masking, scores,
                    weights, values, wide_q);
    }
    release_tiles();
}

// Attend: q: [num_tokens, num_heads, head_dim] -> out: [num_tokens, num_heads, rank]. Each new token attends to its
// sequence's tokens up to its own position, or to the last `window` of them. Return DONE or NO_MEMORY.
int attend_latents(const element *q, element *out, const uint32_t *cache, const int32_t *block_tables,
                   const int32_t *seq_lens, const int32_t *cu_seqlens_q, long num_seqs, long max_num_blocks,
                   long num_heads, long head_dim, long rank, long block_size, long window, float scale,
                   float softcap) {
    const struct masking m = {window, scale, softcap, NULL};
    const struct batch b = {block_tables, seq_lens, cu_seqlens_q, num_seqs, max_num_blocks};
    long num_work = 0, max_len = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        num_work += (count_new(&b, seq) * num_heads + ITEM_ROWS - 1) / ITEM_ROWS;
        max_len = seq_lens[seq] > max_len ? seq_lens[seq] : max_len;
    }
    const size_t max_slots = (max_len + LANES - 1) / LANES * LANES;
    const size_t slot_bytes = ITEM_ROWS * (sizeof(float) + sizeof(factor)) + PANELS * LANES * sizeof(element);
    const size_t own_bytes = (max_slots * slot_bytes + ITEM_ROWS * head_dim * sizeof(factor) + 63) / 64 * 64;
    struct work *work = allocate(num_work * sizeof *work);
    char *buffers = allocate(count_threads() * own_bytes);
    if (!work || !buffers) {
        free(work);
        free(buffers);
        return NO_MEMORY;
    }
    num_work = 0;
    for (int32_t seq = 0; seq < num_seqs; seq++)
        for (int32_t row = 0; row < count_new(&b, seq) * num_heads; row += ITEM_ROWS)
            work[num_work++] = (struct work){.seq = seq, .first_row = row};
    const struct latent_attention a = {q, out, cache, &b, num_heads, head_dim, rank, block_size, &m, work, buffers,
                                       max_slots, own_bytes};
    parallel_for(attend_some_latents, &a, num_work, 1, 1);
    free(buffers);
    free(work);
    return DONE;
}

// The product of each head, as one item.
struct head_products {
    const element *x;
    const uint32_t *weight;
    element *y;
    long m, n, k, block;
    float *buffers;  // of each thread: `num_sums`, and then `num_factors` of the rows
    size_t num_sums, num_factors;
};

static void multiply_heads(const void *arguments, long first_head, long last_head, int thread) {
    const struct head_products *p = arguments;
    float *sums = p->buffers + thread * (p->num_sums + p->num_factors);
    const long num_panels = (p->n + LANES - 1) / LANES, num_words = p->k / PER_WORD;
    for (long head = first_head; head < last_head; head++) {
        const struct matrix out = {.values = p->y + head * p->m * p->n, .num_columns = p->n};
        const uint32_t *weight = p->weight + head * num_panels * num_words * LANES;
        for (long first = 0; first < p->m; first += p->block) {
            const long last = p->m - first < p->block ? p->m : first + p->block;
            const element *from = p->x + (head * p->m + first) * p->k;
            const factors *x = take_factors(from, (factor *)(sums + p->num_sums), (last - first) * p->k);
            for (long panel = 0; panel < num_panels; panel += 2)
                multiply_rows(x, weight, &out, first, last, panel, num_words, num_panels - panel < 2 ? 1 : 2, 2, sums);
        }
    }
    release_tiles();
}

// Compute a product for each head: x: [num_heads, m, k] -> y: [num_heads, m, n]. weight: one weight as for `linear` for
// each head, one after another. Return DONE or NO_MEMORY.
int head_linear(const element *x, const uint32_t *weight, element *y, long num_heads, long m, long n, long k) {
    const long block = ROW_BLOCK(k / PER_WORD);
    const size_t num_sums = count_sums(m < block ? m : block), num_factors = count_factors(m < block ? m : block, k);
    float *buffers = allocate(count_threads() * (num_sums + num_factors) * sizeof *buffers);
    if (!buffers) return NO_MEMORY;
    const struct head_products p = {x, weight, y, m, n, k, block, buffers, num_sums, num_factors};
    parallel_for(multiply_heads, &p, num_heads, 1, LONG_MAX);
    free(buffers);
    return DONE;
}
