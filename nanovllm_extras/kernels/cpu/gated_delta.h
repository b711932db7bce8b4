// Gated DeltaNet (nanovllm_extras/models/gated_delta.py) between its projections: a short convolution, the recurrence of each
// head, and a gated norm. A decode and a chunk of a prompt are the same loops.
//
// The tokens of a sequence are computed one after the other, in prompts too. So a token has the same bits in every chunk
// and every batch. The columns of a state do not depend on each other: a few of them stay in the L1 cache for all tokens
// of a tile, and are read from memory once.
//
// A piece of work is one sequence and one head of the keys, with the heads of the values that it serves.

#pragma once
#include "allocate.h"
#include "gates.h"

#define TILE_TOKENS 32  // tokens whose q, k and v are in a thread's buffer
#define COLUMNS 32      // columns of a state that are computed together: 16 KiB if keys have 128 channels

// A vector that fits into a register: GCC keeps wider ones on the stack.
#if defined __AVX512F__
#define REGISTER_LANES 16
#elif defined IN_HALVES
#define REGISTER_LANES 8
#else
#define REGISTER_LANES 4
#endif
typedef float lanes __attribute__((vector_size(4 * REGISTER_LANES)));

struct delta_layer {
    const float *taps;              // [width, num_channels]: of the convolution, the newest token's last
    const float *rates, *dt_bias;   // [num_heads]: -exp(A_log), and what is added to a
    const element *norm;            // [value_dim]
    long num_key_heads, num_heads, key_dim, value_dim, width;
    float eps;
};

struct delta {
    struct delta_layer layer;
    const element *qkv, *z, *b, *a;  // the projections of each token, tokens `stride` elements apart
    const int64_t *slots, *sources;  // [num_seqs]: where states are written, and where they are read
    const bool *is_first;            // [num_seqs]: the chunk begins its sequence
    const int32_t *cu_seqlens_q;     // [num_seqs + 1]
    element *conv;                   // [num_slots + 1, width - 1, num_channels]
    float *recurrent;                // [num_slots + 1, num_heads, key_dim, value_dim]
    element *y;                      // [num_tokens, num_heads, value_dim]
    float *buffers;                  // of all threads
    long stride, num_channels, num_seqs;
};

// The tokens `first` … `first + count - 1` of the batch, which are of sequence `seq`, whose chunk begins at `start`.
struct delta_tile {
    long seq, start, first, count;
    float *q, *k, *v;         // [count, key_dim], [count, key_dim], [count, value_dim]; v becomes the output
    float *products;          // [count]: q · k
    float *decay, *strength;  // [count]
};

static long delta_buffer_floats(const struct delta_layer *l) {
    return TILE_TOKENS * (2 * l->key_dim + l->value_dim + 3);
}

// Return 16 channels of the input at `position` of the sequence's chunk: negative ones are in the tail.
static inline floats input_at(const struct delta *d, long seq, long position, long channel) {
    if (position >= 0) return load(d->qkv + (d->cu_seqlens_q[seq] + position) * d->stride + channel);
    if (d->is_first[seq]) return (floats){0};
    const long width = d->layer.width;
    return load(d->conv + (d->sources[seq] * (width - 1) + width - 1 + position) * d->num_channels + channel);
}

// Compute out: [count, size] = silu(convolution) of the channels from `channel` on, rounded twice, as in PyTorch.
static void convolve(const struct delta *d, const struct delta_tile *t, long channel, long size, float *out) {
    const long width = d->layer.width;
    for (long i = 0; i < t->count; i++)
        for (long c = 0; c < size; c += LANES) {
            floats sum = {0};
            for (long tap = 0; tap < width; tap++) {
                floats weight;
                memcpy(&weight, d->layer.taps + tap * d->num_channels + channel + c, sizeof weight);
                sum += weight * input_at(d, t->seq, t->first - t->start + i - width + 1 + tap, channel + c);
            }
            const floats x = round_lanes(silu_lanes(round_lanes(sum)));
            memcpy(out + i * size + c, &x, sizeof x);
        }
}

// Keep the newest inputs of the channels for the next chunk. The oldest place is written first, as later ones are read.
static void keep_tail(const struct delta *d, long seq, long channel, long size) {
    const long width = d->layer.width, num_tokens = d->cu_seqlens_q[seq + 1] - d->cu_seqlens_q[seq];
    for (long place = 0; place < width - 1; place++)
        for (long c = channel; c < channel + size; c += LANES)
            store(d->conv + (d->slots[seq] * (width - 1) + place) * d->num_channels + c,
                  input_at(d, seq, num_tokens - width + 1 + place, c));
}

// Scale each row of x: [count, size] to the length `length`. The small summand keeps zeros from becoming NaN.
static void set_length(float *x, long count, long size, float length) {
    for (long i = 0; i < count; i++, x += size) {
        floats squares = {0};
        for (long c = 0; c < size; c += LANES) squares += *(const floats *)(x + c) * *(const floats *)(x + c);
        const float factor = length / sqrtf(sum_lanes(squares) + 1e-6f);
        for (long c = 0; c < size; c += LANES) *(floats *)(x + c) *= factor;
    }
}

// Compute the product of each row of x with that of y: [count, size] both.
static void multiply_pairs(const float *x, const float *y, float *products, long count, long size) {
    for (long i = 0; i < count; i++, x += size, y += size) {
        floats sum = {0};
        for (long c = 0; c < size; c += LANES) sum += *(const floats *)(x + c) * *(const floats *)(y + c);
        products[i] = sum_lanes(sum);
    }
}

static inline float to_float(const element *p) {
    element all[LANES] = {*p};
    return load(all)[0];
}

// Compute the decay and the strength of each token, which is rounded, as in PyTorch.
static void compute_gates(const struct delta *d, const struct delta_tile *t, long head) {
    const struct delta_layer *l = &d->layer;
    for (long i = 0; i < t->count; i++) {
        const long at = (t->first + i) * d->stride + head;
        const float a = to_float(d->a + at) + l->dt_bias[head], b = to_float(d->b + at);
        const float softplus = a > 20 ? a : log1pf(expf(a));
        t->decay[i] = expf(l->rates[head] * softplus);
        t->strength[i] = round_lanes((floats){0} + 1 / (1 + expf(-b)))[0];
    }
}

// Advance `num` vectors of columns of the state `from`, rows `size` floats apart, by all tokens of the tile, and write
// them to `state`, which may be the same. With the old state S, the output is q^T (a S + k w^T) = a S^T q + (q · k) w,
// so that S is read once for S^T k and S^T q.
static inline __attribute__((always_inline)) void advance_columns(
    const struct delta_tile *t, const float *from, float *state, float *v, long key_dim, long size, const int num) {
    for (long i = 0; i < t->count; i++, v += size, from = state) {
        const float *q = t->q + i * key_dim, *k = t->k + i * key_dim;
        lanes stored[COLUMNS / REGISTER_LANES] = {{0}}, seen[COLUMNS / REGISTER_LANES] = {{0}};
        for (long row = 0; row < key_dim; row++)
            for (int c = 0; c < num; c++) {
                lanes s;
                memcpy(&s, from + row * size + c * REGISTER_LANES, sizeof s);
                stored[c] += s * k[row];
                seen[c] += s * q[row];
            }
        for (int c = 0; c < num; c++) {
            lanes w;
            memcpy(&w, v + c * REGISTER_LANES, sizeof w);
            stored[c] = (w - stored[c] * t->decay[i]) * t->strength[i];  // w: what the state lacks under the key
            seen[c] = seen[c] * t->decay[i] + stored[c] * t->products[i];
            memcpy(v + c * REGISTER_LANES, &seen[c], sizeof w);
        }
        for (long row = 0; row < key_dim; row++)
            for (int c = 0; c < num; c++) {
                lanes s;
                memcpy(&s, from + row * size + c * REGISTER_LANES, sizeof s);
                s = s * t->decay[i] + stored[c] * k[row];
                memcpy(state + row * size + c * REGISTER_LANES, &s, sizeof s);
            }
    }
}

// Normalise the outputs of a head and multiply them by silu(z), rounding as `GatedRMSNorm` does.
static void write_outputs(const struct delta *d, const struct delta_tile *t, long head) {
    const struct delta_layer *l = &d->layer;
    const long size = l->value_dim;
    for (long i = 0; i < t->count; i++) {
        const float *x = t->v + i * size;
        const element *z = d->z + (t->first + i) * d->stride + head * size;
        element *y = d->y + ((t->first + i) * l->num_heads + head) * size;
        floats squares = {0};
        for (long c = 0; c < size; c += LANES) {
            const floats rounded = round_lanes(*(const floats *)(x + c));
            squares += rounded * rounded;
        }
        const float factor = 1 / sqrtf(sum_lanes(squares) / size + l->eps);
        for (long c = 0; c < size; c += LANES) {
            const floats normed = round_lanes(round_lanes(*(const floats *)(x + c)) * factor);
            store(y + c, round_lanes(normed * load(l->norm + c)) * silu_lanes(load(z + c)));
        }
    }
}

// Advance a head of the values by the tokens of the tile.
static void advance_head(const struct delta *d, const struct delta_tile *t, long head, long channel) {
    const struct delta_layer *l = &d->layer;
    const long size = l->value_dim;
    const long state_size = l->key_dim * size;
    float *state = d->recurrent + (d->slots[t->seq] * l->num_heads + head) * state_size;
    const float *from = state;  // but the first tile reads what was before the chunk
    if (t->first == t->start) from = d->recurrent + (d->sources[t->seq] * l->num_heads + head) * state_size;
    if (t->first == t->start && d->is_first[t->seq]) from = memset(state, 0, state_size * sizeof *state);
    convolve(d, t, channel, size, t->v);
    compute_gates(d, t, head);
    long column = 0;
    for (; column + COLUMNS <= size; column += COLUMNS)
        advance_columns(t, from + column, state + column, t->v + column, l->key_dim, size, COLUMNS / REGISTER_LANES);
    if (column < size)
        advance_columns(t, from + column, state + column, t->v + column, l->key_dim, size, LANES / REGISTER_LANES);
    write_outputs(d, t, head);
}

// Advance the heads of the values that one head of the keys serves by all new tokens of a sequence.
static void advance_sequence(const struct delta *d, long seq, long key_head, float *buffer) {
    const struct delta_layer *l = &d->layer;
    const long key_dim = l->key_dim, value_dim = l->value_dim, group = l->num_heads / l->num_key_heads;
    const long q_channel = key_head * key_dim, k_channel = q_channel + l->num_key_heads * key_dim;
    const long v_channel = 2 * l->num_key_heads * key_dim + key_head * group * value_dim;
    const long start = d->cu_seqlens_q[seq], stop = d->cu_seqlens_q[seq + 1];
    struct delta_tile t = {.seq = seq, .start = start, .q = buffer, .k = buffer + TILE_TOKENS * key_dim};
    t.v = t.k + TILE_TOKENS * key_dim, t.products = t.v + TILE_TOKENS * value_dim;
    t.decay = t.products + TILE_TOKENS, t.strength = t.decay + TILE_TOKENS;
    for (t.first = start; t.first < stop; t.first += TILE_TOKENS) {
        t.count = stop - t.first < TILE_TOKENS ? stop - t.first : TILE_TOKENS;
        convolve(d, &t, q_channel, key_dim, t.q);
        convolve(d, &t, k_channel, key_dim, t.k);
        set_length(t.q, t.count, key_dim, 1 / sqrtf(key_dim));
        set_length(t.k, t.count, key_dim, 1);
        multiply_pairs(t.q, t.k, t.products, t.count, key_dim);
        for (long i = 0; i < group; i++)
            advance_head(d, &t, key_head * group + i, v_channel + i * value_dim);
    }
    keep_tail(d, seq, q_channel, key_dim);
    keep_tail(d, seq, k_channel, key_dim);
    keep_tail(d, seq, v_channel, group * value_dim);
}

// Return whether a chunk is a draft: it reads the state that the chunk before it writes.
static bool is_draft(const struct delta *d, long seq) { return d->sources[seq] != d->slots[seq]; }

static void advance_sequences(const void *arguments, long first, long last, int thread) {
    const struct delta *d = arguments;
    float *buffer = d->buffers + thread * delta_buffer_floats(&d->layer);
    for (long item = first; item < last; item++) {
        long seq = item / d->layer.num_key_heads;
        if (is_draft(d, seq)) continue;  // it comes after the chunk that it follows, below
        do advance_sequence(d, seq, item % d->layer.num_key_heads, buffer);
        while (++seq < d->num_seqs && is_draft(d, seq));
    }
}

// Compute y from the projections, and advance the states of the sequences: see `struct delta`. Return DONE or NO_MEMORY.
int gated_delta(const struct delta_layer *l, const element *qkv, const element *z, const element *b, const element *a,
                const int64_t *slots, const int64_t *sources, const bool *is_first, const int32_t *cu_seqlens_q,
                element *conv, float *recurrent, element *y, long num_seqs, long stride) {
    float *buffers = allocate(count_threads() * delta_buffer_floats(l) * sizeof *buffers);
    if (!buffers) return NO_MEMORY;
    const long num_channels = 2 * l->num_key_heads * l->key_dim + l->num_heads * l->value_dim;
    const struct delta d = {*l, qkv, z, b, a, slots, sources, is_first, cu_seqlens_q, conv, recurrent, y,
                            buffers, stride, num_channels, num_seqs};
    parallel_for(advance_sequences, &d, num_seqs * l->num_key_heads, 1, LONG_MAX);
    free(buffers);
    return DONE;
}
