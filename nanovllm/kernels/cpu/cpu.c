// The layers of a decoder on CPU: what layers/*.py define in PyTorch, for a step's few to few thousand tokens.
//
// Compiled on first use by cpu.py, once for each dtype: -DBFLOAT16, or float32 without it. Plain loops on vectors of
// 16 floats (GCC's and clang's vector extensions), so that any processor can run it; one instruction of AVX-512 is
// called by name, because it is worth a factor: `dpbf16ps` multiplies 16 pairs of bfloat16 and adds each pair.
//
// Everything that multiplies matrices (projections, q k^T, p v) is one function, `multiply`, and one layout:
//
//   word    32 bits: two bfloat16 that are neighbours in the summed dimension, or one float32
//   panel   16 columns of a matrix: [words][16], so that one vector holds the same word of 16 columns
//
// A weight [out, in] is panels of 16 outputs. In the KV cache each block and head has K as panels of 16 tokens (summed
// over head_dim) and V as panels of 16 channels (summed over tokens). No panel is ever unpacked, transposed or copied.
//
// Sums run in float32 in an order that does not depend on the batch: a token's result has the same bits whether it is
// computed alone, beside others, or as part of a prompt.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

// How much `multiply` takes at a time: the accumulators of 16 floats, a row times a panel each, have to fit the vector
// registers. A few rows are multiplied by many panels, since they wait for memory, and memory likes to be asked for much.
#ifdef __AVX512F__
#define ROWS 12
#define PANELS 8
#else
#define ROWS 3
#define PANELS 2
#endif
#define FEW_ROWS 3
#define WIDTH(num_rows) ((num_rows) <= FEW_ROWS ? PANELS : 2)
// How many blocks ahead memory is asked for V, since it does not foresee where a block table leads.
#define FAR 2

// ---- dtypes

#ifdef BFLOAT16
typedef uint16_t element;
#define PER_WORD 2
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline floats load(const element *p) {
    halves h;
    memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
}

static inline void store(element *p, floats x) {
#ifdef __AVX512BF16__
    halves h = (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x;  // to the nearest, ties to even; a NaN stays one
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(x != x);
    halves h = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
#endif
    memcpy(p, &h, sizeof h);
}

static inline floats multiply_add(floats sum, words a, uint32_t b) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#else
    union { uint32_t bits; float value; } low = {b << 16}, high = {b & 0xffff0000};
    sum += (floats)(a << 16) * low.value;
    return sum + (floats)(a & 0xffff0000) * high.value;
#endif
}
#else
typedef float element;
#define PER_WORD 1

static inline floats load(const element *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void store(element *p, floats x) { memcpy(p, &x, sizeof x); }

static inline floats multiply_add(floats sum, words a, uint32_t b) {
    union { uint32_t bits; float value; } one = {b};
    return sum + (floats)a * one.value;
}
#endif

// The same for the last few columns of a matrix.
static inline floats load_some(const element *p, long count) {
    element all[LANES] = {0};
    memcpy(all, p, count * sizeof(element));
    return load(all);
}

static inline void store_some(element *p, floats x, long count) {
    if (count == LANES) {
        store(p, x);
        return;
    }
    element all[LANES];
    store(all, x);
    memcpy(p, all, count * sizeof(element));
}

static inline void store_some_floats(float *p, floats x, long count) {
    if (count == LANES) memcpy(p, &x, sizeof x);
    else memcpy(p, &x, count * sizeof(float));
}

static inline float sum_lanes(floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static inline floats pick(ints is_first, floats first, floats second) {
    return (floats)(((ints)first & is_first) | ((ints)second & ~is_first));
}

static inline floats max_of(floats a, floats b) { return pick(a > b, a, b); }

// e^x for x <= 0, to 2 units in the last place: 2^n times a polynomial of degree 6 for what lies between
static inline floats exp_lanes(floats x) {
    x = max_of(x, (floats){0} - 87.0f);
    floats n = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the rounded integer
    ints exponent = (ints)n - 0x4b400000;
    n -= 12582912.0f;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (floats)((ints)y + (exponent << 23));
}

// ---- the matrix product

// Up to ROWS rows of x times up to PANELS panels: out[row][16 * i + lane] = bias + sum of x[row]'s words times panel i's.
struct product {
    const uint32_t *x;
    long x_stride;   // words from one row to the next
    long num_words;  // to be summed
    const uint32_t *panels[PANELS];
    const uint32_t *next[PANELS];  // what will be read after them: it is asked of memory meanwhile
    // Panels may be cut into blocks that lie anywhere: the b-th part is at panels[i] + blocks[b] * block_words, and holds
    // words_per_block words. NULL is one block. (V of a sequence has as many as its block table.)
    const int32_t *blocks;
    long block_words, words_per_block;
    bool is_odd;  // the last word holds one bfloat16 only; what lies beside it may be no number, and 0 * NaN is NaN
    const element *bias;  // [16 * num_panels], or NULL
    // one of the two, rows `out_stride` elements apart
    float *floats_out;
    element *out;
    long out_stride;
};

static inline __attribute__((always_inline)) void multiply_tile(
    const struct product *p, const int num_rows, const int num_panels) {
    floats sums[ROWS][PANELS];
    for (int i = 0; i < num_panels; i++) {
        const floats start = p->bias ? load(p->bias + i * LANES) : (floats){0};
        for (int row = 0; row < num_rows; row++) sums[row][i] = start;
    }
    const uint32_t *x = p->x;
    const long per_block = p->blocks ? p->words_per_block : p->num_words;
    for (long start = 0, block = 0; start < p->num_words; start += per_block, block++) {
        const uint32_t *panels[PANELS], *next[PANELS];
        const bool has_far = start + FAR * per_block < p->num_words;
        for (int i = 0; i < num_panels; i++) {
            panels[i] = p->panels[i] + (p->blocks ? p->blocks[block] * p->block_words : 0);
            next[i] = has_far ? p->panels[i] + p->blocks[block + FAR] * p->block_words : p->next[i];
        }
        const long left = p->num_words - start, end = left < per_block ? left : per_block;
        for (long k = 0; k < end; k++) {
            words columns[PANELS];
            for (int i = 0; i < num_panels; i++) {
                columns[i] = *(const words *)(panels[i] + k * LANES);
                __builtin_prefetch(next[i] + k * LANES, 0, 2);
            }
            if (p->is_odd && start + k == p->num_words - 1)
                for (int i = 0; i < num_panels; i++) columns[i] &= 0xffff;
            for (int row = 0; row < num_rows; row++) {
                const uint32_t word = x[row * p->x_stride + k];
                for (int i = 0; i < num_panels; i++) sums[row][i] = multiply_add(sums[row][i], columns[i], word);
            }
        }
        x += end;
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < num_panels; i++) {
            const long at = row * p->out_stride + i * LANES;
            if (p->out) store(p->out + at, sums[row][i]);
            else memcpy(p->floats_out + at, &sums[row][i], sizeof(floats));
        }
}

// With both counts known to the compiler, all sums stay in registers.
static void multiply(const struct product *p, int num_rows, int num_panels) {
#define CASE(rows, panels) \
    case (rows) * 16 + (panels): multiply_tile(p, rows, panels); break;
#define MANY(rows) CASE(rows, 1) CASE(rows, 2)
#define FEW(rows) CASE(rows, 3) CASE(rows, 4) CASE(rows, 5) CASE(rows, 6) CASE(rows, 7) CASE(rows, 8)
    switch (num_rows * 16 + num_panels) {
        MANY(1) MANY(2) MANY(3)
#if ROWS > FEW_ROWS
        FEW(1) FEW(2) FEW(3) MANY(4) MANY(5) MANY(6) MANY(7) MANY(8) MANY(9) MANY(10) MANY(11) MANY(12)
#endif
    }
}

// x: [m, k] -> y: [m, n] = x weight^T + bias. weight: [ceil(n / 16)] panels of k / PER_WORD words; bias: as many columns
// as the panels have, or NULL. y is float32 where `wants_floats`: logits are not rounded.
void linear(const element *x, const uint32_t *weight, const element *bias, void *y, long m, long n, long k,
            int wants_floats) {
    const long num_panels = (n + LANES - 1) / LANES, num_words = k / PER_WORD, panel_words = num_words * LANES;
    const long num_tiles = (m + ROWS - 1) / ROWS, tile = (m + num_tiles - 1) / (num_tiles + !m);  // equal: 32 is 11 + 11 + 10
    const size_t size = wants_floats ? sizeof(float) : sizeof(element);
    // a few rows wait for memory, and ask for four panels at once; many rows need the registers for their sums
    const long most = m <= FEW_ROWS && PANELS >= 4 ? 4 : 2, ahead = most == 4 ? 256 : 1024;
#pragma omp parallel for schedule(static)
    for (long panel = 0; panel < num_panels; panel += most) {
        const int width = num_panels - panel < most ? num_panels - panel : most;
        const long column = panel * LANES, num_columns = n - column < width * LANES ? n - column : width * LANES;
        for (long row = 0; row < m; row += tile) {
            const int num_rows = m - row < tile ? m - row : tile;
            float narrow[ROWS * PANELS * LANES];  // for the last columns, if they are less than whole panels
            char *to = (char *)y + (row * n + column) * size;
            void *out = num_columns == width * LANES ? (void *)to : (void *)narrow;
            struct product p = {
                .x = (const uint32_t *)(x + row * k), .x_stride = num_words, .num_words = num_words,
                .bias = bias ? bias + column : NULL, .out = wants_floats ? NULL : out,
                .floats_out = wants_floats ? out : NULL, .out_stride = out == to ? n : width * LANES};
            for (int i = 0; i < width; i++) {
                p.panels[i] = weight + (panel + i) * panel_words;
                p.next[i] = p.panels[i] + ahead;
            }
            multiply(&p, num_rows, width);
            for (int r = 0; out != to && r < num_rows; r++)
                memcpy(to + r * n * size, (char *)narrow + r * width * LANES * size, num_columns * size);
        }
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

// Softmax of the first `num_visible` of `num_slots` scores; what lies behind them becomes 0.
static void softmax(float *scores, element *weights, long num_visible, long num_slots, float scale) {
    for (long i = num_visible; i < num_slots; i++) scores[i] = -INFINITY;
    floats max = {0};
    max += -INFINITY;
    for (long i = 0; i < num_slots; i += LANES) max = max_of(*(const floats *)(scores + i), max);
    float largest = max[0];
    for (int i = 1; i < LANES; i++) largest = max[i] > largest ? max[i] : largest;
    floats sum = {0};
    for (long i = 0; i < num_slots; i += LANES) {
        floats p = exp_lanes((*(const floats *)(scores + i) - largest) * scale);
        if (i + LANES > num_visible)
            for (int lane = 0; lane < LANES; lane++)
                if (i + lane >= num_visible) p[lane] = 0;
        *(floats *)(scores + i) = p;
        sum += p;
    }
    const float one = 1 / sum_lanes(sum);
    for (long i = 0; i < num_slots; i += LANES) store(weights + i, *(const floats *)(scores + i) * one);
}

// Room for one tile of rows. A row of scores has one for every slot that its sequence has.
struct scratch {
    float *scores;     // [ROWS, num_slots]
    element *weights;  // [ROWS, num_slots]
    element *q, *out;  // [ROWS, head_dim]
};

// Up to ROWS rows (query tokens times the query heads of one K and V head) against all that they see, in three strides:
// scores = q k^T, softmax, out = weights v.
static void attend_rows(const struct cache *c, const struct scratch *s, const int32_t *block_table, long kv_head,
                        int num_rows, const long *num_visible, float scale) {
    const long head_dim = c->head_dim, block_size = c->block_size, q_words = head_dim / PER_WORD;
    const long num_tokens = num_visible[num_rows - 1];  // the last row sees most
    const long num_panels = (num_tokens + LANES - 1) / LANES, num_slots = num_panels * LANES;
    const long block_words = c->num_kv_heads * head_words(c);
    const uint32_t *k = c->k + kv_head * head_words(c), *v = c->v + kv_head * head_words(c);  // of block 0
    const long width = WIDTH(num_rows);
    for (long panel = 0; panel < num_panels; panel += width) {  // of 16 tokens
        struct product p = {.x = (const uint32_t *)s->q, .x_stride = q_words, .num_words = q_words,
                            .floats_out = s->scores + panel * LANES, .out_stride = num_slots};
        const int count = num_panels - panel < width ? num_panels - panel : width;
        for (int i = 0; i < count; i++) {
            const long slot = (panel + i) * LANES, next_slot = slot + width * LANES;
            p.panels[i] = k + block_table[slot / block_size] * block_words + slot % block_size * q_words;
            p.next[i] = next_slot < num_tokens
                            ? k + block_table[next_slot / block_size] * block_words + next_slot % block_size * q_words
                            : v + block_table[slot % (width * LANES) / block_size] * block_words;  // v comes next
        }
        multiply(&p, num_rows, count);
    }
    for (int row = 0; row < num_rows; row++)
        softmax(s->scores + row * num_slots, s->weights + row * num_slots, num_visible[row], num_slots, scale);
    const long v_panel_words = block_size / PER_WORD * LANES;
    for (long d = 0; d < head_dim; d += width * LANES) {  // panels of 16 channels
        struct product p = {.x = (const uint32_t *)s->weights, .x_stride = num_slots / PER_WORD,
                            .num_words = (num_tokens + PER_WORD - 1) / PER_WORD, .blocks = block_table,
                            .block_words = block_words, .words_per_block = block_size / PER_WORD,
                            .is_odd = num_tokens % PER_WORD, .out = s->out + d, .out_stride = head_dim};
        const int count = head_dim - d < width * LANES ? (head_dim - d) / LANES : width;
        for (int i = 0; i < count; i++) p.next[i] = p.panels[i] = v + (d / LANES + i) * v_panel_words;
        multiply(&p, num_rows, count);
    }
}

struct work {
    int32_t seq, kv_head, first_row;
};

// q, out: [num_tokens, num_heads, head_dim]. Each new token attends to its sequence's tokens up to itself.
void attend(const element *q, element *out, uint32_t *k_cache, uint32_t *v_cache, const int32_t *block_tables,
            const int32_t *seq_lens, const int32_t *cu_seqlens_q, long num_seqs, long max_num_blocks, long q_stride,
            long num_heads, long num_kv_heads, long head_dim, long block_size, float scale) {
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
    const long max_slots = (max_len + LANES - 1) / LANES * LANES;
    const size_t num_bytes = ROWS * (max_slots * (sizeof(float) + sizeof(element)) + 2 * head_dim * sizeof(element));
#pragma omp parallel
    {
        struct scratch s = {.scores = aligned_alloc(64, (num_bytes + 63) / 64 * 64)};
        s.weights = (element *)(s.scores + ROWS * max_slots);
        s.q = s.weights + ROWS * max_slots;
        s.out = s.q + ROWS * head_dim;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < num_work; i++) {
            const struct work w = work[i];
            const long first_token = cu_seqlens_q[w.seq], num_new = cu_seqlens_q[w.seq + 1] - first_token;
            const long left = num_new * group - w.first_row;
            const int num_rows = left < ROWS ? left : ROWS;
            long num_visible[ROWS], at[ROWS];
            for (int row = 0; row < num_rows; row++) {
                const long token = (w.first_row + row) / group;
                num_visible[row] = seq_lens[w.seq] - num_new + token + 1;
                at[row] = (first_token + token) * num_heads + w.kv_head * group + (w.first_row + row) % group;
                const element *from = q + (first_token + token) * q_stride + at[row] % num_heads * head_dim;
                memcpy(s.q + row * head_dim, from, head_dim * sizeof(element));
            }
            attend_rows(&c, &s, block_tables + w.seq * max_num_blocks, w.kv_head, num_rows, num_visible, scale);
            for (int row = 0; row < num_rows; row++)
                memcpy(out + at[row] * head_dim, s.out + row * head_dim, head_dim * sizeof(element));
        }
        free(s.scores);
    }
    free(work);
}

// ---- what lies between the matrix products

// x: [num_tokens, num_heads, size], tokens `stride` elements apart -> y: the same, contiguous. A norm of each head, and
// where cos is not NULL, a rotation of it by cos, sin: [num_tokens, size / 2].
void rms_norm(const element *x, const element *weight, const element *cos, const element *sin, element *y,
              long num_tokens, long num_heads, long size, long stride, float eps) {
    const long half = size / 2;
#pragma omp parallel for schedule(static) if (num_tokens * num_heads * size > 1 << 13)
    for (long token = 0; token < num_tokens; token++)
        for (long head = 0; head < num_heads; head++) {
            const element *from = x + token * stride + head * size;
            element *to = y + (token * num_heads + head) * size;
            floats squares = {0};
            for (long i = 0; i < size; i += LANES) squares += load(from + i) * load(from + i);
            const float factor = 1 / sqrtf(sum_lanes(squares) / size + eps);
            for (long i = 0; i < size; i += LANES) {
                store(to + i, load(from + i) * factor);  // rounded before the product, as layers/norm.py does
                store(to + i, load(to + i) * load(weight + i));
            }
            for (long i = 0; cos && i < half; i += LANES) {
                const floats a = load(to + i), b = load(to + half + i);
                const floats c = load(cos + token * half + i), s = load(sin + token * half + i);
                store(to + i, a * c - b * s);
                store(to + half + i, b * c + a * s);
            }
        }
}

// gate, up: [num_tokens, size], tokens `stride` elements apart -> y: [num_tokens, size] = silu(gate) * up
void silu_and_mul(const element *gate, const element *up, element *y, long num_tokens, long size, long stride) {
#pragma omp parallel for schedule(static) if (num_tokens * size > 1 << 13)
    for (long token = 0; token < num_tokens; token++)
        for (long i = 0; i < size; i += LANES) {
            const floats g = load(gate + token * stride + i);
            const floats e = exp_lanes(pick(g < 0, g, -g));  // e^-|g|: never overflows
            const floats sigmoid = pick(g < 0, e, (floats){0} + 1) / (1 + e);
            element *to = y + token * size + i;
            store(to, g * sigmoid);  // rounded before the product, as layers/activation.py does
            store(to, load(to) * load(up + token * stride + i));
        }
}

const char *instructions(void) {
#if defined __AVX512BF16__ && defined BFLOAT16
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
