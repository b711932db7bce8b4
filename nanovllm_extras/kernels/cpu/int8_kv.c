// K and V of 8 bits, with a scale for each token and head: the layout of a block, and attention over such a cache.
//
// nanovllm_extras/kernels/int8_kv.py is the definition. Queries, and the weights of 16 tokens at a time, are rounded to 16 bits. Both
// products are then sums of whole numbers, which are exact in any order. So a row's bits do not depend on how many rows
// are computed together.
//
// This file is a separate library for models with such a cache. It has its own `store_kv` and `attend`, with the
// arguments of those in cpu.c.
//
//   pair    16 bits of a panel: two numbers that are neighbours in the summed dimension
//   panel   16 columns, tokens of K or channels of V: [pairs][16], as in other caches
//
// For each head, a block has the panels of K or V, followed by a scale for each token: block_size float32.

#define ROWS 12  // rows that read the same tokens
#include "instructions.h"
#include "rounding.h"
#include "spans.h"
#include "vnni.h"

#define MOST_HEAD_DIM 512  // a sum of more products of 8 and 16 bits could overflow
#define PAIR_BYTES (2 * LANES)  // bytes of the pairs of 16 columns
#define GROUP_ROWS 4  // rows computed together at most: with 4 rows and 4 panels, all sums of K stay in registers
#define GROUP_PANELS 4

typedef int16_t shorts __attribute__((vector_size(2 * LANES)));

// ---- the cache

static inline int8_t *at_head(uint32_t *part, const struct cache *c, long block, long head) {
    const long num_bytes = c->block_size * (c->head_dim + (long)sizeof(float));
    return (int8_t *)part + (block * c->num_kv_heads + head) * num_bytes;
}

// Return the same for a block of a span.
static inline int8_t *in_span(uint32_t *part, const struct cache *c, const struct span *span, long block, long head) {
    return at_head(part, c, span->block_table[block], head);
}

// Return the scales of a block's tokens, which follow the panels of the head.
static inline float *scales_of(const struct cache *c, const int8_t *head) {
    return (float *)(head + c->block_size * c->head_dim);
}

// The arguments of `store_kv`.
struct tokens {
    const element *k, *v;
    struct cache cache;
    const int32_t *slot_mapping;
    long k_stride, v_stride;
};

// Store one head of one token for each item.
static void store_heads(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct tokens *t = arguments;
    const struct cache *c = &t->cache;
    const long head_dim = c->head_dim, block_size = c->block_size;
    for (long i = first; i < last; i++) {
        const long token = i / c->num_kv_heads, head = i % c->num_kv_heads;
        const long block = t->slot_mapping[token] / block_size, offset = t->slot_mapping[token] % block_size;
        int8_t *to_k = at_head(c->k, c, block, head), *to_v = at_head(c->v, c, block, head);
        int8_t numbers[MOST_HEAD_DIM];
        int32_t sum;
        round_group(t->k + token * t->k_stride + head * head_dim, head_dim, numbers, scales_of(c, to_k) + offset, &sum);
        int8_t *to = to_k + offset / LANES * LANES * head_dim + offset % LANES * 2;
        for (long d = 0; d < head_dim; d += 2) memcpy(to + d * LANES, numbers + d, 2);
        round_group(t->v + token * t->v_stride + head * head_dim, head_dim, numbers, scales_of(c, to_v) + offset, &sum);
        to = to_v + offset / 2 * PAIR_BYTES + offset % 2;
        for (long d = 0; d < head_dim; d++) to[d / LANES * LANES * block_size + d % LANES * 2] = numbers[d];
    }
}

// Store k and v, with the arguments of `store_kv` in kv_cache.h.
void store_kv(const element *k, const element *v, uint32_t *k_cache, uint32_t *v_cache, const int32_t *slot_mapping,
              long num_tokens, long k_stride, long v_stride, long num_kv_heads, long head_dim, long block_size) {
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
    const struct tokens t = {k, v, c, slot_mapping, k_stride, v_stride};
    parallel_for(store_heads, &t, num_tokens * num_kv_heads, 4, LONG_MAX);
}

// The position of 16 tokens of a span: the number of the block in the span, and the first slot in the block. Moving to
// the next position needs no division.
struct place { long block, offset; };

static inline struct place place_after(struct place p, const struct cache *c) {
    p.offset += LANES;
    return p.offset < c->block_size ? p : (struct place){p.block + 1, 0};
}

// Return the number of blocks of V that stay in the L1 cache while all rows and channels are computed.
static inline long blocks_of_v(const struct cache *c) { return c->block_size < 128 ? 128 / c->block_size : 1; }

// ---- numbers of 16 bits

// Round x: [16] to numbers of 16 bits. `inverse`: 32,767 / the largest magnitude, which becomes 32,767
static inline void round_16(int16_t *numbers, floats x, float inverse) {
    const shorts n = __builtin_convertvector(nearest(x * inverse), shorts);
    memcpy(numbers, &n, sizeof n);
}

static void round_query(struct tile *t, int row, const element *q, long head_dim) {
    ints bits = {0};
    for (long i = 0; i < head_dim; i += LANES) bits = larger_magnitudes(bits, load(q + i));
    const float largest = largest_magnitude(bits), inverse = inverse_of(largest, 32767);
    for (long i = 0; i < head_dim; i += LANES) round_16((int16_t *)t->q + row * head_dim + i, load(q + i), inverse);
    t->q_scales[row] = largest / 32767;
}

// Compute the weights of one row and span: exponentials * one * the scales of V, rounded in groups of 16 tokens.
static void round_weights(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, int row,
                          float one, const struct masking *m) {
    const long first = first_seen(t, row, m), last = t->last[row], num_slots = slots_of(span), far = 128 / c->block_size + 1;
    struct place place = {0};
    for (long i = 0; i < num_slots; i += LANES, place = place_after(place, c)) {
        const long slot = span->first_token + i, at = row * t->num_slots + slot;
        const float *scales = scales_of(c, in_span(c->v, c, span, place.block, kv_head)) + place.offset;
        if (i + far * c->block_size < num_slots)
            __builtin_prefetch(scales_of(c, in_span(c->v, c, span, place.block + far, kv_head)) + place.offset);
        floats w = *(const floats *)(t->scores + at) * one * *(const floats *)scales;
        if (slot < first || slot + LANES > last)
            for (int lane = 0; lane < LANES; lane++)
                if (slot + lane < first || slot + lane >= last) w[lane] = 0;  // the scale of a masked token may be NaN
        const float largest = largest_magnitude(larger_magnitudes((ints){0}, w));
        round_16((int16_t *)t->weights + at, w, inverse_of(largest, 32767));
        t->weight_scales[at / LANES] = largest / 32767;
    }
}

// ---- products of 8 and 16 bits

// Widen 32 numbers of 8 bits to 16 bits.
static inline words widen_pairs(const int8_t *p) {
#ifdef __AVX512BW__
    return (words)_mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)p));
#elif defined __AVX2__
    __m256i halves[2];
    words pairs;
    for (int i = 0; i < 2; i++) halves[i] = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)p + i));
    memcpy(&pairs, halves, sizeof pairs);
    return pairs;
#else
    typedef int8_t bytes __attribute__((vector_size(2 * LANES)));
    typedef int16_t wide __attribute__((vector_size(4 * LANES)));
    return (words)__builtin_convertvector(*(const bytes *)p, wide);
#endif
}

// Return sum + the products of both numbers of each lane's pair with those of x.
static inline ints dot_pairs(ints sum, words pairs, uint32_t x) {
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32((int)x));
#elif defined __AVX512BW__
    const __m512i products = _mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32((int)x));
    return (ints)_mm512_add_epi32((__m512i)sum, products);
#elif defined __AVX2__
    __m256i halves[2], sums[2];
    memcpy(halves, &pairs, sizeof pairs);
    memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < 2; i++)
#ifdef HAS_VNNI
        sums[i] = add_products_of_pairs(sums[i], halves[i], _mm256_set1_epi32((int)x));
#else
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(halves[i], _mm256_set1_epi32((int)x)));
#endif
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    return sum + ((ints)(pairs << 16) >> 16) * (int16_t)x + ((ints)pairs >> 16) * (int16_t)(x >> 16);
#endif
}

// Compute sums[row][i] += x[row]'s pairs times panel i's, and prefetch `next`. `x_stride`: numbers from one row to the
// next
static inline __attribute__((always_inline)) void multiply_pairs(
    ints sums[GROUP_ROWS][GROUP_PANELS], const int16_t *x, long x_stride, const int8_t *const *panels,
    const int8_t *const *next, long num_pairs, const int num_rows, const int num_panels) {
    for (long pair = 0; pair < num_pairs; pair += 2) {  // a line of 64 bytes
        for (int i = 0; i < num_panels; i++) __builtin_prefetch(next[i] + pair * PAIR_BYTES, 0, 2);
        for (int half = 0; half < 2; half++) {
            words columns[GROUP_PANELS];
            for (int i = 0; i < num_panels; i++) columns[i] = widen_pairs(panels[i] + (pair + half) * PAIR_BYTES);
            for (int row = 0; row < num_rows; row++) {
                uint32_t two;
                memcpy(&two, x + row * x_stride + 2 * (pair + half), sizeof two);
                for (int i = 0; i < num_panels; i++) sums[row][i] = dot_pairs(sums[row][i], columns[i], two);
            }
        }
    }
}

// A part of one of the two products: rows of a span, starting at `row`, and the tokens and channels that they read.
struct part {
    const struct cache *c;
    const struct tile *t;
    const struct span *span;
    long kv_head, then;
    int row;
    struct place place;  // position of the first tokens
    long slot;           // number of the first token in the span
    long num_blocks;     // blocks of V
    long channel;
};

// Compute scores = q k^T for panels of 16 tokens, starting at `slot`. Prefetch as multiply_k in attention.h does.
static inline __attribute__((always_inline)) void score_tokens(
    const struct part *p, const int num_rows, const int num_panels) {
    const struct cache *c = p->c;
    const long head_dim = c->head_dim;
    const bool asks_v = is_short(c, p->span, sizeof(int8_t)) || p->slot + 2 * num_panels * LANES > slots_of(p->span);
    struct place place = p->place, after = p->place;
    for (int i = 0; i < num_panels && !asks_v; i++) after = place_after(after, c);
    const int8_t *panels[GROUP_PANELS], *next[GROUP_PANELS];
    const float *scales[GROUP_PANELS];
    ints sums[GROUP_ROWS][GROUP_PANELS] = {0};
    for (int i = 0; i < num_panels; i++) {
        const int8_t *head = in_span(c->k, c, p->span, place.block, p->kv_head);
        const int8_t *then = in_span(asks_v ? c->v : c->k, c, p->span, after.block, p->kv_head);
        panels[i] = head + place.offset * head_dim;
        next[i] = then + after.offset * head_dim;
        scales[i] = scales_of(c, head) + place.offset;
        __builtin_prefetch(scales_of(c, then) + after.offset);
        place = place_after(place, c);
        after = place_after(after, c);
    }
    const int16_t *q = (const int16_t *)p->t->q + p->row * head_dim;
    multiply_pairs(sums, q, head_dim, panels, next, head_dim / 2, num_rows, num_panels);
    float *out = p->t->scores + p->row * p->t->num_slots + p->span->first_token + p->slot;
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < num_panels; i++) {
            const floats scale = *(const floats *)scales[i] * p->t->q_scales[p->row + row];
            *(floats *)(out + row * p->t->num_slots + i * LANES) = __builtin_convertvector(sums[row][i], floats) * scale;
        }
}

// Compute out = weights v for `num_blocks` blocks and panels of 16 channels, starting at `channel`, and add it to that
// of the blocks before them. Prefetch as multiply_v in attention.h does.
static inline __attribute__((always_inline)) void sum_values(
    const struct part *p, const int num_rows, const int num_panels) {
    const struct cache *c = p->c;
    const long head_dim = c->head_dim, num_slots = slots_of(p->span), panel_bytes = c->block_size * LANES;
    const long stride = p->t->num_slots, all_blocks = (num_slots + c->block_size - 1) / c->block_size;
    const long far = is_short(c, p->span, sizeof(int8_t)) ? all_blocks : blocks_of_v(c);
    const int16_t *weights = (const int16_t *)p->t->weights;
    float *out = p->t->out + p->row * head_dim + p->channel;
    const bool adds = p->span->first_token + p->slot > 0;
    floats totals[GROUP_ROWS][GROUP_PANELS];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < num_panels; i++)
            totals[row][i] = adds ? *(floats *)(out + row * head_dim + i * LANES) : (floats){0};
    long at = p->row * stride + p->span->first_token + p->slot;
    for (long block = p->place.block, left = num_slots - p->slot; block < p->place.block + p->num_blocks; block++) {
        const long ahead = block + far, in_block = p->channel * c->block_size;
        const int8_t *head = in_span(c->v, c, p->span, block, p->kv_head) + in_block, *after;
        if (ahead < all_blocks) after = in_span(c->v, c, p->span, ahead, p->kv_head) + in_block;
        else after = in_span(c->k, c, p->span, ahead - all_blocks, p->then) + in_block;
        for (long offset = 0; offset < c->block_size && left > 0; offset += LANES, left -= LANES, at += LANES) {
            const int8_t *panels[GROUP_PANELS], *next[GROUP_PANELS];
            for (int i = 0; i < num_panels; i++) {
                panels[i] = head + i * panel_bytes + offset * LANES;
                next[i] = after + i * panel_bytes + offset * LANES;
            }
            ints sums[GROUP_ROWS][GROUP_PANELS] = {0};
            multiply_pairs(sums, weights + at, stride, panels, next, LANES / 2, num_rows, num_panels);
            for (int row = 0; row < num_rows; row++) {
                const floats scale = (floats){0} + p->t->weight_scales[(at + row * stride) / LANES];
                for (int i = 0; i < num_panels; i++) totals[row][i] = add_scaled(totals[row][i], sums[row][i], scale);
            }
        }
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < num_panels; i++) *(floats *)(out + row * head_dim + i * LANES) = totals[row][i];
}

// Call a function with counts that the compiler knows, so that all sums stay in registers.
#define WITH_ROWS(function, rows) \
    case (rows) * 16 + 1: function(p, rows, 1); break; \
    case (rows) * 16 + 2: function(p, rows, 2); break; \
    case (rows) * 16 + 4: function(p, rows, 4); break;
#define WITH_COUNTS(function) \
    WITH_ROWS(function, 1) WITH_ROWS(function, 2) WITH_ROWS(function, 3) WITH_ROWS(function, 4)

static void multiply_int8_k(const struct part *p, int num_rows, int num_panels) {
    switch (num_rows * 16 + num_panels) { WITH_COUNTS(score_tokens) }
}

static void multiply_int8_v(const struct part *p, int num_rows, int num_panels) {
    switch (num_rows * 16 + num_panels) { WITH_COUNTS(sum_values) }
}

static inline int panels_together(long left, int most) { return left >= most ? most : left >= 2 ? 2 : 1; }

// Multiply all rows of the span by the same panels, GROUP_ROWS rows at a time.
static inline void multiply_rows_of(void (*multiply)(const struct part *, int, int), struct part p, int num_panels) {
    const int end = p.span->first_row + p.span->num_rows;
    for (p.row = p.span->first_row; p.row < end; p.row += GROUP_ROWS)
        multiply(&p, end - p.row < GROUP_ROWS ? end - p.row : GROUP_ROWS, num_panels);
}

static void score_span(const struct cache *c, const struct tile *t, const struct span *span, long kv_head) {
    struct part p = {c, t, span, kv_head, .then = kv_head};
    const long num_slots = slots_of(span);
    while (p.slot < num_slots) {
        const int count = panels_together((num_slots - p.slot) / LANES, 4);
        multiply_rows_of(multiply_int8_k, p, count);
        p.slot += count * LANES;
        for (int i = 0; i < count; i++) p.place = place_after(p.place, p.c);
    }
}

static void sum_span(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, long then) {
    struct part p = {c, t, span, kv_head, .then = then};
    const long num_slots = slots_of(span), most = blocks_of_v(c);
    for (; p.slot < num_slots; p.slot += most * p.c->block_size, p.place.block += most) {
        const long left = (num_slots - p.slot + p.c->block_size - 1) / p.c->block_size;
        p.num_blocks = left < most ? left : most;
        p.channel = 0;
        for (int count; p.channel < p.c->head_dim; p.channel += count * LANES) {
            count = panels_together((p.c->head_dim - p.channel) / LANES, p.span->num_rows < GROUP_ROWS ? 4 : 2);
            multiply_rows_of(multiply_int8_v, p, count);
        }
    }
}

static void weigh_row(const struct cache *c, const struct tile *t, const struct span *span, long kv_head, int row,
                      const struct masking *m) {
    const long num_slots = span->first_token + slots_of(span);
    const float one = exponentials(t->scores + row * t->num_slots, first_seen(t, row, m), t->last[row], num_slots, m,
                                   t->sinks[row]);
    if (t->num_spans > 1) round_weights(c, t, &t->spans[0], kv_head, row, one, m);
    round_weights(c, t, span, kv_head, row, one, m);
}

// Attend, with the arguments of `attend` in attention.h.
int attend(const element *q, element *out, uint32_t *k_cache, uint32_t *v_cache, const int32_t *block_tables,
           const int32_t *seq_lens, const int32_t *cu_seqlens_q, const float *sinks, long num_seqs, long max_num_blocks,
           long q_stride, long num_heads, long num_kv_heads, long head_dim, long block_size, long window, float scale,
           float softcap) {
    static const struct way way = {round_query, score_span, weigh_row, sum_span};
    const struct masking m = {window, scale, softcap, sinks};
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
    const struct batch b = {block_tables, seq_lens, cu_seqlens_q, num_seqs, max_num_blocks};
    return attend_rows(&way, q, out, &c, &b, &m, q_stride, num_heads);
}
