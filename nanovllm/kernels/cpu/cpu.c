// The layers of a decoder on CPU: what layers/*.py define in PyTorch, for a step's few to few thousand tokens.
//
// Compiled on first use by cpu.py, once for each dtype: -DBFLOAT16, or float32 without it. Plain loops on vectors of
// 16 floats (vectors.h), so that any processor can run it.
//
// Everything that multiplies matrices (projections, q k^T, p v) is one function, `multiply` (product.h: on AMX's
// tiles with -DAMX, on vectors without), and one layout:
//
//   word    32 bits: two bfloat16 that are neighbours in the summed dimension, or one float32
//   panel   16 columns of a matrix: [words][16], so that one vector holds the same word of 16 columns
//
// A weight [out, in] is panels of 16 outputs. In the KV cache each block and head has K as panels of 16 tokens (summed
// over head_dim) and V as panels of 16 channels (summed over tokens). No panel is ever unpacked, transposed or copied.
//
// Sums run in float32 in an order that does not depend on the batch: a token's result has the same bits whether it is
// computed alone, beside others, or as part of a prompt.

#include <omp.h>
#include "product.h"

// ---- projections

// So many rows of x stay in the L2 cache while all panels pass: 1 MiB of them, or 256 of wide ones.
#define MOST_ROWS (512 / ROWS * ROWS)
#define ROW_BLOCK(num_words) ((num_words) <= 512 ? MOST_ROWS : 256 / ROWS * ROWS)
// So many words of a pair of panels stay in L1 while these rows pass, where products are faster than L2. Few rows wait for
// memory, which is read best from one end of a panel to the other.
#ifdef HAS_TILES
#define WORD_BLOCK(num_rows) ((num_rows) <= 2 * ROWS ? LONG_MAX : 128)
#else
#define WORD_BLOCK(num_rows) LONG_MAX
#endif

struct matrix {
    void *values;
    long num_columns;
    const element *bias;  // as many as the panels have columns, or NULL
    bool is_float, streams;
};

static inline floats finish_sums(const struct matrix *y, const float *sums, long column) {
    const floats x = *(const floats *)sums;
    return y->bias ? x + load(y->bias + column) : x;
}

// y's rows from `row` and columns from `column` = sums: [num_rows, width * 16] + bias
static void finish_rows(const struct matrix *y, const float *sums, long row, long column, int num_rows, int width) {
    const bool has_lines = y->streams && width == 2 && y->num_columns - column >= 2 * LANES;
    for (int r = 0; r < num_rows; r++, sums += width * LANES) {
        const long start = (row + r) * y->num_columns;
        if (has_lines && !y->is_float) {
            stream_two((element *)y->values + start + column, finish_sums(y, sums, column),
                       finish_sums(y, sums + LANES, column + LANES));
            continue;
        }
        for (int i = 0; i < width; i++) {
            const long from = column + i * LANES, left = y->num_columns - from, count = left < LANES ? left : LANES;
            const floats x = finish_sums(y, sums + i * LANES, from);
            if (has_lines) stream_floats((float *)y->values + start + from, x);
            else if (y->is_float) store_some_floats((float *)y->values + start + from, x, count);
            else store_some((element *)y->values + start + from, x, count);
        }
    }
}

// Whether y: [m, row_bytes] is written past the caches, which could not keep it: many rows, whose lines of 64 bytes fall
// on the same places of a cache, pushed one another out before they were whole.
static bool streams(const void *y, long m, long row_bytes) {
    return m * row_bytes > 1 << 20 && row_bytes >= 1 << 12 && row_bytes % 64 == 0 && (uintptr_t)y % 64 == 0;
}

// Rows `first` … `last - 1` of x: [m, num_words] times `width` panels, to y's columns from `column`.
static void multiply_rows(const uint32_t *x, const uint32_t *panels, const struct matrix *y, long first, long last,
                          long column, long num_words, int width) {
    _Alignas(64) float sums[MOST_ROWS * 2 * LANES];  // or fewer rows and more panels
    const long tile = rows_at_a_time(last - first), block = WORD_BLOCK(last - first);
    const long part = num_words < block ? num_words : block;
    for (long word = 0; word < num_words; word += part)
        for (long row = first; row < last; row += tile) {
            const int num_rows = last - row < tile ? last - row : tile;
            struct product p = {
                .x = x + row * num_words + word, .x_stride = num_words, .adds = word > 0,
                .num_words = num_words - word < part ? num_words - word : part,
                .out = sums + (row - first) * width * LANES, .out_stride = width * LANES};
            for (int i = 0; i < width; i++) {
                p.panels[i] = panels + (i * num_words + word) * LANES;
                p.next[i] = row > first && !ASKS_AGAIN ? NULL : p.panels[i] + AHEAD(last - first);
            }
            multiply(&p, num_rows, width);
            if (word + part >= num_words) finish_rows(y, p.out, row, column, num_rows, width);
        }
}

// x: [m, k] -> y: [m, n] = x weight^T + bias. weight: [ceil(n / 16)] panels of k / PER_WORD words; bias: as many columns
// as the panels have, or NULL. y is float32 where `wants_floats`: logits are not rounded.
void linear(const element *x, const uint32_t *weight, const element *bias, void *y, long m, long n, long k,
            int wants_floats) {
    const long row_bytes = n * (wants_floats ? sizeof(float) : sizeof(element));
    const struct matrix out = {y, n, bias, wants_floats, streams(y, m, row_bytes)};
    const long num_panels = (n + LANES - 1) / LANES, num_words = k / PER_WORD, panel_words = num_words * LANES;
    const long block = ROW_BLOCK(num_words);
    // a few rows wait for memory, and ask for four panels at once; many rows need the registers for their sums
    const long most = m <= FEW_ROWS && PANELS >= 4 ? 4 : 2;
#pragma omp parallel
    {
        for (long first = 0; first < m; first += block) {
            const long last = m - first < block ? m : first + block;
#pragma omp for schedule(static) nowait
            for (long panel = 0; panel < num_panels; panel += most) {
                const int width = num_panels - panel < most ? num_panels - panel : most;
                multiply_rows((const uint32_t *)x, weight + panel * panel_words, &out, first, last, panel * LANES,
                              num_words, width);
            }
        }
        finish_streams();
        release_tiles();
    }
}

// ---- attention over the paged KV cache

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

// 2 / (1 + e^-2|x|) - 1, with the sign of x
static inline floats tanh_lanes(floats x) {
    const floats e = exp_lanes(pick(x < 0, x, -x) * 2);
    const floats t = (1 - e) / (1 + e);
    return pick(x < 0, -t, t);
}

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

// ---- what lies between the matrix products

// x: [num_tokens, num_heads, size], tokens `stride` elements apart -> y: the same, contiguous. Where weight is not NULL, a
// norm of each head, with weight + 1 where `is_offset` (Gemma's, which is rounded once); where cos is not NULL, a rotation
// of its first 2 * half elements by cos, sin: [num_tokens, half].
void rms_norm(const element *x, const element *weight, const element *cos, const element *sin, element *y,
              long num_tokens, long num_heads, long size, long half, long stride, int is_offset, float eps) {
#pragma omp parallel for schedule(static) if (num_tokens * num_heads * size > 1 << 13)
    for (long token = 0; token < num_tokens; token++)
        for (long head = 0; head < num_heads; head++) {
            const element *from = x + token * stride + head * size;
            element *to = y + (token * num_heads + head) * size;
            floats squares = {0};
            for (long i = 0; weight && i < size; i += LANES) squares += load(from + i) * load(from + i);
            const float factor = 1 / sqrtf(sum_lanes(squares) / size + eps);
            for (long i = 0; weight && i < size; i += LANES) {
                const floats normed = load(from + i) * factor;
                if (is_offset) {
                    store(to + i, normed * (1 + load(weight + i)));
                    continue;
                }
                store(to + i, normed);  // rounded before the product, as layers/norm.py does
                store(to + i, load(to + i) * load(weight + i));
            }
            if (!weight) memcpy(to, from, size * sizeof(element));
            for (long i = 0; cos && i < half; i += LANES) {
                const floats a = load(to + i), b = load(to + half + i);
                const floats c = load(cos + token * half + i), s = load(sin + token * half + i);
                store(to + i, a * c - b * s);
                store(to + half + i, b * c + a * s);
            }
        }
}

// x / (1 + e^-x)
static inline floats silu_lanes(floats x) {
    const floats e = exp_lanes(pick(x < 0, x, -x));  // e^-|x|: never overflows
    return x * (pick(x < 0, e, (floats){0} + 1) / (1 + e));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
static inline floats gelu_lanes(floats x) {
    return x * 0.5f * (1 + tanh_lanes(0.79788456f * (x + 0.044715f * x * x * x)));
}

// gate, up: [num_tokens, size], tokens `stride` elements apart -> y: [num_tokens, size] = act(gate) * up
#define AND_MUL(name, act) \
    void name(const element *gate, const element *up, element *y, long num_tokens, long size, long stride) { \
        _Pragma("omp parallel for schedule(static) if (num_tokens * size > 1 << 13)") \
        for (long token = 0; token < num_tokens; token++) \
            for (long i = 0; i < size; i += LANES) { \
                element *to = y + token * size + i; \
                store(to, act(load(gate + token * stride + i))); /* rounded, as layers/activation.py does */ \
                store(to, load(to) * load(up + token * stride + i)); \
            } \
    }
AND_MUL(silu_and_mul, silu_lanes)
AND_MUL(gelu_and_mul, gelu_lanes)

// x += y, both of `count` elements
static void add(element *x, const element *y, long count) {
#pragma omp parallel for schedule(static) if (count > 1 << 13)
    for (long i = 0; i < count; i += LANES) store(x + i, load(x + i) + load(y + i));
}

// ---- greedy sampling

// x: [num_rows, num_columns] float32 -> ids: [num_rows], of the first among a row's largest numbers. NaN is the largest
// of all, as in PyTorch.
void argmax(const float *x, int64_t *ids, long num_rows, long num_columns) {
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (long row = 0; row < num_rows; row++) {
        const float *from = x + row * num_columns;
        floats max = {0};
        max += -INFINITY;
        ints nan = {0};
        long i = 0;
        for (; i + LANES <= num_columns; i += LANES) {
            floats numbers;
            memcpy(&numbers, from + i, sizeof numbers);
            nan |= numbers != numbers;
            max = max_of(numbers, max);
        }
        float largest = -INFINITY;
        bool has_nan = false;
        for (int lane = 0; lane < LANES; lane++) {
            largest = max[lane] > largest ? max[lane] : largest;
            has_nan |= nan[lane];
        }
        for (; i < num_columns; i++) {
            largest = from[i] > largest ? from[i] : largest;
            has_nan |= from[i] != from[i];
        }
        for (i = 0; has_nan ? from[i] == from[i] : from[i] != largest;) i++;
        ids[row] = i;
    }
}

// ---- a whole decoder layer

struct layer {
    const uint32_t *qkv_proj, *o_proj, *gate_up_proj, *down_proj;  // as `linear` takes them
    const element *qkv_bias, *o_bias, *gate_up_bias, *down_bias;   // or NULL
    const element *input_norm, *q_norm, *k_norm, *post_attention_norm;  // q_norm, k_norm: or NULL
    long hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size, window;
    float eps, scale, softcap;
};

struct step {
    const element *cos, *sin;  // [num_tokens, half]
    const int32_t *slot_mapping, *block_tables, *seq_lens, *cu_seqlens_q;
    long num_tokens, num_seqs, max_num_blocks, half;
};

// x: [num_tokens, hidden_size], changed in place. The functions above in their order, without the way
// through Python between them.
void decoder_layer(const struct layer *l, const struct step *s, element *x, uint32_t *k_cache, uint32_t *v_cache) {
    const long n = s->num_tokens, head_dim = l->head_dim, q_size = l->num_heads * head_dim;
    const long kv_size = l->num_kv_heads * head_dim, qkv_size = q_size + 2 * kv_size, size = l->intermediate_size;
    const long wider = qkv_size > 2 * size ? qkv_size : 2 * size;
    const long narrower = q_size + kv_size > size ? q_size + kv_size : size;
    element *product = aligned_alloc(64, (n * (wider + narrower + l->hidden_size) * sizeof(element) + 63) / 64 * 64);
    element *input = product + n * wider, *normed = input + n * narrower, *q = input, *k = q + n * q_size;
    rms_norm(x, l->input_norm, NULL, NULL, normed, n, 1, l->hidden_size, 0, l->hidden_size, false, l->eps);
    linear(normed, l->qkv_proj, l->qkv_bias, product, n, qkv_size, l->hidden_size, false);
    rms_norm(product, l->q_norm, s->cos, s->sin, q, n, l->num_heads, head_dim, s->half, qkv_size, false, l->eps);
    rms_norm(product + q_size, l->k_norm, s->cos, s->sin, k, n, l->num_kv_heads, head_dim, s->half, qkv_size, false,
             l->eps);
    store_kv(k, product + q_size + kv_size, k_cache, v_cache, s->slot_mapping, n, kv_size, qkv_size, l->num_kv_heads,
             head_dim, l->block_size);
    attend(q, product, k_cache, v_cache, s->block_tables, s->seq_lens, s->cu_seqlens_q, s->num_seqs, s->max_num_blocks,
           q_size, l->num_heads, l->num_kv_heads, head_dim, l->block_size, l->window, l->scale, l->softcap);
    linear(product, l->o_proj, l->o_bias, normed, n, l->hidden_size, q_size, false);
    add(x, normed, n * l->hidden_size);
    rms_norm(x, l->post_attention_norm, NULL, NULL, normed, n, 1, l->hidden_size, 0, l->hidden_size, false, l->eps);
    linear(normed, l->gate_up_proj, l->gate_up_bias, product, n, 2 * size, l->hidden_size, false);
    silu_and_mul(product, product + size, input, n, size, 2 * size);
    linear(input, l->down_proj, l->down_bias, normed, n, l->hidden_size, size, false);
    add(x, normed, n * l->hidden_size);
    free(product);
}

#include "experts.h"
#include "latent.h"

const char *instructions(void) {
#if defined HAS_TILES && defined AMX
    return "AMX BF16";
#elif defined HAS_TILES
    return "AMX BF16, emulated";
#elif defined __AVX512BF16__ && defined BFLOAT16
    return "AVX-512 BF16";
#elif defined __AVX512F__
    return "AVX-512";
#elif defined __AVX2__
    return "AVX2";
#elif defined __ARM_NEON
    return "NEON";
#else
    return "generic";
#endif
}
