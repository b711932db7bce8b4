// The layers of a decoder on CPU, as layers/*.py define them in PyTorch, for steps of a few to a few thousand tokens.
//
// library.py compiles this file on first use, once for each dtype: bfloat16 with -DBFLOAT16, float32 without it. The
// code is plain loops on vectors of 16 floats (vectors.h), so that any processor can run it. Products with weights are
// in linear.h, attention over the KV cache (kv_cache.h) is in attention.h, and recurrent states are in gated_delta.h.
// This file has the operations between them, and a whole layer. quantised.c and int8_kv.c are separate libraries, for
// weights of 8 and 4 bits and for K and V of 8 bits.
//
// All matrix products (projections, q k^T, p v) use one function, `multiply` (product.h: on AMX's tiles with -DAMX, on
// vectors without), and one layout:
//
//   word    32 bits: two bfloat16 that are neighbours in the summed dimension, or one float32
//   panel   16 columns of a matrix: [words][16], so that one vector holds the same word of 16 columns
//
// A weight [out, in] is panels of 16 outputs. In the KV cache each block and head has K as panels of 16 tokens (summed
// over head_dim) and V as panels of 16 channels (summed over tokens). Panels are never unpacked, transposed or copied.
//
// Sums are in float32, in an order that does not depend on the batch. So a token's result has the same bits in every
// batch and every chunk.

#include "adapters.h"
#include "attention.h"
#include "linear.h"
#include "ranks.h"

// ---- operations between the matrix products

enum norm_kind { TWICE_ROUNDED, UNIT_OFFSET, ONCE_ROUNDED };  // the numbers in cpu_layers.py

struct norm {
    const element *x, *weight, *cos, *sin;
    element *y;
    long num_heads, size, half, stride;
    enum norm_kind kind;
    float eps;
};

static void norm_tokens(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct norm n = *(const struct norm *)arguments;
    for (long token = first; token < last; token++)
        for (long head = 0; head < n.num_heads; head++) {
            const element *from = n.x + token * n.stride + head * n.size;
            element *to = n.y + (token * n.num_heads + head) * n.size;
            floats squares = {0};
            for (long i = 0; n.weight && i < n.size; i += LANES) squares += load(from + i) * load(from + i);
            const float offset = n.kind == UNIT_OFFSET, factor = 1 / sqrtf(sum_lanes(squares) / n.size + n.eps);
            for (long i = 0; n.weight && i < n.size; i += LANES) {
                const floats normed = load(from + i) * factor;
                const floats weight = load(n.weight + i) + offset;
                store(to + i, (n.kind == TWICE_ROUNDED ? round_lanes(normed) : normed) * weight);
            }
            if (!n.weight) memcpy(to, from, n.size * sizeof(element));
            for (long i = 0; n.cos && i < n.half; i += LANES) {
                const floats a = load(to + i), b = load(to + n.half + i);
                const floats c = load(n.cos + token * n.half + i), s = load(n.sin + token * n.half + i);
                store(to + i, a * c - b * s);
                store(to + n.half + i, b * c + a * s);
            }
        }
}

// Normalise and rotate each head. x: [num_tokens, num_heads, size], tokens `stride` elements apart -> y: the same
// shape, contiguous. If weight is not NULL, normalise. The kind says whether the number is rounded before it is
// multiplied by the weight (layers/basic.py), or only the product; Gemma's products are with weight + 1. If cos is not
// NULL, rotate the first 2 * half elements by cos, sin: [num_tokens, half].
void rms_norm(const element *x, const element *weight, const element *cos, const element *sin, element *y,
              long num_tokens, long num_heads, long size, long half, long stride, int kind, float eps) {
    const struct norm n = {x, weight, cos, sin, y, num_heads, size, half, stride, kind, eps};
    parallel_for(norm_tokens, &n, num_tokens, items_of(num_heads * size), LONG_MAX);
}

struct sum {
    element *x;
    const element *y;
    float factor;
};

static void add_elements(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct sum *s = arguments;
    for (long i = first * LANES; i < last * LANES; i += LANES)
        store(s->x + i, load(s->x + i) + round_lanes(load(s->y + i) * s->factor));
}

// Compute x += factor * y, both of `count` elements, a multiple of 16.
static void add(element *x, const element *y, long count, float factor) {
    parallel_for(add_elements, &(struct sum){x, y, factor}, count / LANES, items_of(LANES), LONG_MAX);
}

// ---- greedy sampling

struct rows {
    const float *x;
    int64_t *ids;
    long num_columns;
};

static void find_largest(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct rows *r = arguments;
    const long num_columns = r->num_columns;
    for (long row = first; row < last; row++) {
        const float *from = r->x + row * num_columns;
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
        r->ids[row] = i;
    }
}

// Find the first of each row's largest numbers: x: [num_rows, num_columns] float32 -> ids: [num_rows]. NaN is larger
// than all numbers, as in PyTorch.
void argmax(const float *x, int64_t *ids, long num_rows, long num_columns) {
    parallel_for(find_largest, &(struct rows){x, ids, num_columns}, num_rows, 1, LONG_MAX);
}

// ---- a whole decoder layer

// A weight for the products of another library. Each struct of such a weight begins with two functions, which have the
// arguments of `linear` and `gated_linear`.
struct other_weight {
    int (*linear)(const element *x, const struct other_weight *weight, const element *bias, void *y, long m, long n,
                  long k, int wants_floats);
    int (*gated_linear)(const element *x, const struct other_weight *weight, const element *bias, element *y, long m,
                        long n, long k, int gate);
};

struct layer {
    __typeof__(store_kv) *store_kv;  // of this library, or of the library for the cache's dtype
    __typeof__(attend) *attend;
    const uint32_t *qkv_proj, *o_proj, *gate_up_proj, *down_proj;  // as `linear` takes them
    const element *qkv_bias, *o_bias, *gate_up_bias, *down_bias;   // or NULL
    const element *input_norm, *q_norm, *k_norm, *post_attention_norm;  // q_norm, k_norm: or NULL
    long hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size, window, gate;
    float eps, scale, softcap, residual_factor;
    struct ranks *ranks;  // ranks that each have a share of this layer, or NULL for one process
    const struct other_weight *other_qkv, *other_o, *other_gate_up, *other_down;  // or NULL; replace those above
    const struct adapted *adapted_qkv, *adapted_o, *adapted_gate_up, *adapted_down;  // or NULL
};

struct step {
    const element *cos, *sin;  // [num_tokens, half]
    const int32_t *slot_mapping, *block_tables, *seq_lens, *cu_seqlens_q;
    long num_tokens, num_seqs, max_num_blocks, half;
    const struct adapted_rows *rows;  // that have adapters, or NULL
};

// Compute x += residual_factor * y: [count], with y summed over the ranks. Return DONE or ABORTED.
static int add_shares(const struct layer *l, element *x, element *y, long count) {
    if (l->ranks && all_reduce(l->ranks, y, count)) return ABORTED;
    add(x, y, count, l->residual_factor);
    return DONE;
}

// Call `linear` for the weight, or the other library's function if `other` is not NULL, and add the rows' adapters.
static int project(const struct step *s, const struct adapted *adapted, const element *x, const uint32_t *weight,
                   const struct other_weight *other, const element *bias, element *y, long n, long k) {
    const long m = s->num_tokens;
    const int status =
        other ? other->linear(x, other, bias, y, m, n, k, false) : linear(x, weight, bias, y, m, n, k, false);
    return status == DONE && adapted && s->rows ? add_adapters(adapted, s->rows, x, y, n) : status;
}

#define MOST_ADDED_ROWS 64

// Compute y = act(gate) * up, with the projections of x. `whole`: a buffer for both projections, if rows have adapters,
// or only for what the adapters add to them: for few rows, a product that is fused with its gate is faster. Both ways
// round at the same points.
static int project_gated(const struct layer *l, const struct step *s, const element *x, element *y, element *whole) {
    const struct other_weight *other = l->other_gate_up;
    const long m = s->num_tokens, n = l->intermediate_size, k = l->hidden_size;
    if (!s->rows || !l->adapted_gate_up || !l->adapted_gate_up->max_rank)
        return other ? other->gated_linear(x, other, l->gate_up_bias, y, m, n, k, l->gate)
                     : gated_linear(x, l->gate_up_proj, l->gate_up_bias, y, m, n, k, l->gate);
    if (other || m > MOST_ADDED_ROWS) {
        const int status = project(s, l->adapted_gate_up, x, l->gate_up_proj, other, l->gate_up_bias, whole, 2 * n, k);
        if (status == DONE) gate_and_mul(whole, whole + n, y, m, n, 2 * n, l->gate);
        return status;
    }
    memset(whole, 0, m * 2 * n * sizeof *whole);
    const int status = add_adapters(l->adapted_gate_up, s->rows, x, whole, 2 * n);
    return status == DONE ? gated_linear_and(x, l->gate_up_proj, l->gate_up_bias, whole, y, m, n, k, l->gate) : status;
}

// Compute a decoder layer with the buffer `product`: see `decoder_layer`.
static int compute_layer(const struct layer *l, const struct step *s, element *x, uint32_t *k_cache, uint32_t *v_cache,
                         element *product, long wider, element *whole) {
    const long n = s->num_tokens, head_dim = l->head_dim, q_size = l->num_heads * head_dim;
    const long kv_size = l->num_kv_heads * head_dim, qkv_size = q_size + 2 * kv_size;
    element *input = product + n * qkv_size, *normed = input + n * wider, *q = input, *k = q + n * q_size;
    int status;
#define TRY(call) if ((status = (call)) != DONE) return status
    rms_norm(x, l->input_norm, NULL, NULL, normed, n, 1, l->hidden_size, 0, l->hidden_size, TWICE_ROUNDED, l->eps);
    TRY(project(s, l->adapted_qkv, normed, l->qkv_proj, l->other_qkv, l->qkv_bias, product, qkv_size, l->hidden_size));
    rms_norm(product, l->q_norm, s->cos, s->sin, q, n, l->num_heads, head_dim, s->half, qkv_size, TWICE_ROUNDED,
             l->eps);
    rms_norm(product + q_size, l->k_norm, s->cos, s->sin, k, n, l->num_kv_heads, head_dim, s->half, qkv_size,
             TWICE_ROUNDED, l->eps);
    l->store_kv(k, product + q_size + kv_size, k_cache, v_cache, s->slot_mapping, n, kv_size, qkv_size, l->num_kv_heads,
                head_dim, l->block_size);
    TRY(l->attend(q, product, k_cache, v_cache, s->block_tables, s->seq_lens, s->cu_seqlens_q, NULL,
                  s->num_seqs, s->max_num_blocks, q_size, l->num_heads, l->num_kv_heads, head_dim, l->block_size,
                  l->window, l->scale, l->softcap));
    TRY(project(s, l->adapted_o, product, l->o_proj, l->other_o, l->o_bias, normed, l->hidden_size, q_size));
    TRY(add_shares(l, x, normed, n * l->hidden_size));
    rms_norm(x, l->post_attention_norm, NULL, NULL, normed, n, 1, l->hidden_size, 0, l->hidden_size, TWICE_ROUNDED,
             l->eps);
    TRY(project_gated(l, s, normed, input, whole));
    TRY(project(s, l->adapted_down, input, l->down_proj, l->other_down, l->down_bias, normed, l->hidden_size,
                l->intermediate_size));
    return add_shares(l, x, normed, n * l->hidden_size);
#undef TRY
}

// Compute a decoder layer in place, x: [num_tokens, hidden_size], by calling the functions above without returning to
// Python between them. Return DONE, NO_MEMORY, or ABORTED if the ranks were aborted. Unless it is DONE, the contents of
// x are invalid.
int decoder_layer(const struct layer *l, const struct step *s, element *x, uint32_t *k_cache, uint32_t *v_cache) {
    const long q_size = l->num_heads * l->head_dim, kv_size = l->num_kv_heads * l->head_dim;
    const long wider = q_size + kv_size > l->intermediate_size ? q_size + kv_size : l->intermediate_size;
    const long num_columns = q_size + 2 * kv_size + wider + l->hidden_size;
    const long whole = s->rows && l->adapted_gate_up ? 2 * l->intermediate_size : 0;
    element *product = allocate(s->num_tokens * (num_columns + whole) * sizeof *product);
    const int status = product ? compute_layer(l, s, x, k_cache, v_cache, product, wider,
                                               product + s->num_tokens * num_columns)
                               : NO_MEMORY;
    free(product);
    return status;
}

#include "experts.h"
#include "gated_delta.h"
#include "instructions.h"
#include "latent.h"
