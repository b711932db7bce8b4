// The gate of the feed-forward network, act(gate) * up, for the activations in layers/basic.py and nanovllm_extras/models.

#pragma once
#include "team.h"
#include "vectors.h"

enum gate { NO_GATE, SILU, GELU, CLAMPED_SWIGLU };  // the numbers in cpu_layers.py

// Return tanh(x) = 2 / (1 + e^-2|x|) - 1, with the sign of x.
static inline floats tanh_lanes(floats x) {
    const floats e = exp_lanes(pick(x < 0, x, -x) * 2);
    const floats t = (1 - e) / (1 + e);
    return pick(x < 0, -t, t);
}

// Return x / (1 + e^-x).
static inline floats silu_lanes(floats x) {
    x = pick(x < -87, (floats){0} - 87, x);  // e^87 is finite
    return x / (1 + exp_lanes(-x));
}

// Return x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
static inline floats gelu_lanes(floats x) {
    return x * 0.5f * (1 + tanh_lanes(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Return gate * sigmoid(1.702 gate) * (up + 1), with inputs clamped to 7 (nanovllm_extras/models/gpt_oss.py).
static inline floats clamped_swiglu_lanes(floats gate, floats up) {
    const floats limit = (floats){0} + 7, least = (floats){0} - 51;
    gate = pick(gate > limit, limit, pick(gate < least, least, gate));  // e^(1.702 * 51) is finite
    up = pick(up > limit, limit, pick(up < -limit, -limit, up));
    const floats share = round_lanes(1 / (1 + exp_lanes(-round_lanes(1.702f * gate))));
    return round_lanes(gate * share) * round_lanes(up + 1);
}

// Return act(gate) * up. Every step is rounded, as in PyTorch; the caller's `store` rounds the last one.
static inline floats gate_lanes(enum gate kind, floats gate, floats up) {
    gate = round_lanes(gate);
    if (kind == CLAMPED_SWIGLU) return clamped_swiglu_lanes(gate, round_lanes(up));
    return round_lanes(kind == SILU ? silu_lanes(gate) : gelu_lanes(gate)) * round_lanes(up);
}

struct gated {
    const element *gate, *up;
    element *y;
    long size, stride;
    enum gate kind;
};

static void gate_tokens(const void *arguments, long first, long last, int thread) {
    (void)thread;
    const struct gated *g = arguments;
    for (long token = first; token < last; token++)
        for (long i = 0; i < g->size; i += LANES) {
            const long at = token * g->stride + i;
            store(g->y + token * g->size + i, gate_lanes(g->kind, load(g->gate + at), load(g->up + at)));
        }
}

// Compute y: [num_tokens, size] = act(gate) * up. gate, up: [num_tokens, size], tokens are `stride` elements apart.
void gate_and_mul(const element *gate, const element *up, element *y, long num_tokens, long size, long stride, int kind) {
    parallel_for(gate_tokens, &(struct gated){gate, up, y, size, stride, kind}, num_tokens, items_of(size), LONG_MAX);
}
