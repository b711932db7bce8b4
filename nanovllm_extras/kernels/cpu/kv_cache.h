// The paged KV cache. K and V are stored in panels (cpu.c describes the layout), so that products read them directly.

#pragma once
#include "product.h"
#include "spans.h"

static inline long head_words(const struct cache *c) { return c->block_size * c->head_dim / PER_WORD; }

// Return the panels of a slot's block and head.
static inline uint32_t *at_slot(uint32_t *part, const struct cache *c, long slot, long head) {
    return part + (slot / c->block_size * c->num_kv_heads + head) * head_words(c);
}

// Return the first word of K of a slot and head: lane offset % 16 in panel offset / 16. A token's words are 16 apart.
static inline uint32_t *k_at(const struct cache *c, long slot, long head) {
    const long offset = slot % c->block_size;
    return at_slot(c->k, c, slot, head) + offset / LANES * LANES * c->head_dim / PER_WORD + offset % LANES;
}

// Write V of one token and head. In each panel of 16 channels, it has one element of the word offset / PER_WORD of each
// channel.
static void store_v(const struct cache *c, const element *from, long slot, long head) {
    const long offset = slot % c->block_size;
    element *to = (element *)(at_slot(c->v, c, slot, head) + offset / PER_WORD * LANES) + offset % PER_WORD;
    for (long d = 0; d < c->head_dim; d++) to[d / LANES * LANES * c->block_size + d % LANES * PER_WORD] = from[d];
}

// Write V of both tokens of a word, one line of 64 bytes at a time.
static void store_v_pair(const struct cache *c, const element *first, const element *second, long slot, long head) {
    uint32_t *to = at_slot(c->v, c, slot, head) + slot % c->block_size / PER_WORD * LANES;
    for (long d = 0; d < c->head_dim; d += LANES) {
        element line[LANES][2];
        for (int lane = 0; lane < LANES; lane++) {
            line[lane][0] = first[d + lane];
            line[lane][1] = second[d + lane];
        }
        memcpy(to + d * c->block_size / PER_WORD, line, sizeof line);
    }
}

// The arguments of `store_kv`.
struct tokens {
    const element *k, *v;
    struct cache cache;
    const int32_t *slot_mapping;
    long num_tokens, k_stride, v_stride;
};

// Store one head of one token for each item.
//
// Each word of a decoded token's K is in a different line of 64 bytes, and none of these lines is in a cache. So the
// lines of the next head are prefetched while those of this head are written.
static void store_heads(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct tokens *t = arguments;
    const struct cache *c = &t->cache;
    const long num_kv_heads = c->num_kv_heads, head_dim = c->head_dim;
    const int32_t *slots = t->slot_mapping;
    for (long i = first; i < last; i++) {
        const long token = i / num_kv_heads, head = i % num_kv_heads, slot = slots[token];
        const long then = i + 1 < t->num_tokens * num_kv_heads ? i + 1 : i;
        const uint32_t *next = k_at(c, slots[then / num_kv_heads], then % num_kv_heads);
        const element *from_k = t->k + token * t->k_stride + head * head_dim;
        const element *from_v = t->v + token * t->v_stride + head * head_dim;
        uint32_t *to = k_at(c, slot, head);
        const bool follows = token > 0 && slots[token - 1] == slot - 1, asks = !follows || slot % LANES == 0;
        for (long word = 0; word < head_dim / PER_WORD; word++) {
            if (asks) __builtin_prefetch(next + word * LANES, 1, 2);
            memcpy(to + word * LANES, from_k + word * PER_WORD, sizeof *to);
        }
        const bool precedes = token + 1 < t->num_tokens && slots[token + 1] == slot + 1;
        if (slot % PER_WORD ? !follows : !precedes || PER_WORD == 1) store_v(c, from_v, slot, head);
        else if (slot % PER_WORD == 0) store_v_pair(c, from_v, from_v + t->v_stride, slot, head);
    }
}

// Write k, v: [num_tokens, num_kv_heads, head_dim] to their slots. Tokens are `stride` elements apart.
void store_kv(const element *k, const element *v, uint32_t *k_cache, uint32_t *v_cache, const int32_t *slot_mapping,
              long num_tokens, long k_stride, long v_stride, long num_kv_heads, long head_dim, long block_size) {
    const struct cache c = {k_cache, v_cache, num_kv_heads, head_dim, block_size};
    const struct tokens t = {k, v, c, slot_mapping, num_tokens, k_stride, v_stride};
    parallel_for(store_heads, &t, num_tokens * num_kv_heads, 4, LONG_MAX);
}
