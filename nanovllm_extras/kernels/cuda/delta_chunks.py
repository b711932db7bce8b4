"""The recurrence of Gated DeltaNet for chunks of prompts in Triton, 32 tokens at a time, in two kernels.

`models/gated_delta.py` explains the products and the linear equations of a tile of tokens. The first kernel
inverts the matrix of each tile, which does not depend on the state, for all tiles at the same time. The second one goes
through the tiles of each sequence, with a state that stays in registers. `delta_kernels.py` calls both, for sequences
with at least as many new tokens as a tile has.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.layers.triton_layers import rounded
from nanovllm_extras.kernels.cuda.tile_walk import find_sequence

TOKENS = 32  # of a tile: larger ones take fewer turns, but more memory, as a tile has two matrices for each head
CHUNK_VALUES = 16  # columns of a state in one program: more of them would spill registers


@triton.jit
def compute_gates(b, a, a_log, dt_bias, dtype: tl.constexpr):
    """Compute the logarithms of the decays, and the strengths, rounding as PyTorch's layer does."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    softplus = tl.where(x > 20, x, tl.log(1 + tl.exp(x)))
    return -tl.exp(a_log.to(tl.float32)) * softplus, rounded(1 / (1 + tl.exp(-b.to(tl.float32))), dtype)


@triton.jit
def load_gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, head, places, is_token):
    """Load the logarithms of the decays, and the strengths, of some tokens: [n] each. Both are 0 for padding."""
    b, a = tl.load(b_ptr + places, mask=is_token, other=0.0), tl.load(a_ptr + places, mask=is_token, other=0.0)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    log_decay, strength = compute_gates(b, a, a_log, dt_bias, b_ptr.dtype.element_ty)
    return tl.where(is_token, log_decay, 0.0), tl.where(is_token, strength, 0.0)


@triton.jit
def load_unit(x_ptr, rows, is_token, NUM_CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Load the queries or keys of some tokens, scaled to length 1: [n, KEYS] float32. Those of padding are 0."""
    keys = tl.arange(0, KEYS)
    is_used = is_token[:, None] & (keys < KEY_DIM)[None, :]
    x = tl.load(x_ptr + rows[:, None] * NUM_CHANNELS + keys[None, :], mask=is_used, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "num_seqs", "first_tile"])
def invert_tiles_kernel(
    inverses_ptr,  # [num_tiles, NUM_HEADS, TOKENS, TOKENS] float32, as reads
    reads_ptr,
    qkv_ptr,  # [num_tokens, NUM_CHANNELS], contiguous
    b_ptr,  # [num_tokens, NUM_HEADS], any stride but the last, which is 1, as a
    a_ptr,
    a_log_ptr,  # [NUM_HEADS], as dt_bias
    dt_bias_ptr,
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    row_stride,  # of b and a
    num_seqs,
    first_tile,  # the number of the first tile that has a place in `inverses`
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Invert the matrix of one tile and head, and compute how much each token reads of what the others have written.

    Grid: (tiles * NUM_HEADS,), with the tiles of `find_sequence`.
    """
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    place, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    _, start, num_new, first = find_sequence(cu_seqlens_ptr, first_tile + place, num_seqs, TOKENS)
    if (num_new < TOKENS) | (first >= num_new):
        return
    i = tl.arange(0, TOKENS)
    is_token, rows = first + i < num_new, (start + first + i).to(tl.int64)
    log_decay, strength = load_gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, head, rows * row_stride + head, is_token)
    q_ptr = qkv_ptr + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
    q = load_unit(q_ptr, rows, is_token, NUM_CHANNELS, KEY_DIM, KEYS) * (1 / KEY_DIM**0.5)
    k = load_unit(q_ptr + NUM_KEY_HEADS * KEY_DIM, rows, is_token, NUM_CHANNELS, KEY_DIM, KEYS)
    # Sums of the logarithms behind each token: differences of sums from the beginning would lose what a strong decay
    # rounds away.
    is_later = i[:, None] > i[None, :]
    between = tl.exp(tl.cumsum(tl.where(is_later, log_decay[:, None], 0.0), 0))  # [TOKENS, TOKENS]
    reads = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * strength[:, None]
    system = tl.where(is_later, system, 0.0)
    # Each row needs those above it. (Powers of the matrix would take fewer steps, but may be large, and cancel each
    # other, which leaves little but their roundings.)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, TOKENS):
        is_row = (i == row)[:, None]
        of_row = tl.sum(tl.where(is_row, system, 0.0), 0)  # [TOKENS]
        inverse = tl.where(is_row, inverse - tl.sum(of_row[:, None] * inverse, 0)[None, :], inverse)
    places = (place * NUM_HEADS + head).to(tl.int64) * (TOKENS * TOKENS) + i[:, None] * TOKENS + i[None, :]
    tl.store(inverses_ptr + places, inverse)
    tl.store(reads_ptr + places, tl.where(i[:, None] >= i[None, :], reads, 0.0))


@triton.jit
def advance_tile(
    state,  # [KEYS, VALUES] float32
    q,  # [TOKENS, KEYS], as k
    k,
    v,  # [TOKENS, VALUES]
    log_decay,  # [TOKENS], as later and strength
    later,  # the logarithm of the decay of the next token
    strength,
    inverse,  # [TOKENS, TOKENS], as reads: what `invert_tiles_kernel` has computed
    reads,
    PRECISION: tl.constexpr,
):
    """Advance columns of a state by a tile of tokens. Returns what the tokens read, like v, and the new state."""
    before = tl.exp(tl.cumsum(log_decay, 0))[:, None]  # how much each token still sees of `state`
    stored = tl.dot(k, state, input_precision=PRECISION)
    lacking = strength[:, None] * (v - before * stored)
    w = tl.dot(inverse, lacking, input_precision=PRECISION)  # [TOKENS, VALUES]
    out = before * tl.dot(q, state, input_precision=PRECISION) + tl.dot(reads, w, input_precision=PRECISION)
    after = tl.exp(tl.cumsum(later, 0, reverse=True))[:, None]  # how much is left of each token's w after the tile
    state = tl.exp(tl.sum(log_decay, 0)) * state + tl.dot(tl.trans(after * k), w, input_precision=PRECISION)
    return out, state


@triton.jit(do_not_specialize=["slots_ptr", "is_first_ptr", "cu_seqlens_ptr", "first_tile"])
def delta_chunks_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM], contiguous
    states_ptr,  # [num_slots + 1, NUM_HEADS, KEY_DIM, VALUE_DIM] float32, contiguous
    inverses_ptr,  # [num_tiles, NUM_HEADS, TOKENS, TOKENS] float32, as reads
    reads_ptr,
    qkv_ptr,  # [num_tokens, NUM_CHANNELS], contiguous
    b_ptr,  # [num_tokens, NUM_HEADS], any stride but the last, which is 1, as a
    a_ptr,
    a_log_ptr,  # [NUM_HEADS], as dt_bias
    dt_bias_ptr,
    slots_ptr,  # [num_seqs] int64
    is_first_ptr,  # [num_seqs] bool: the chunk begins its sequence
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    row_stride,  # of b and a
    first_tile,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Advance VALUES columns of the state of one head by all new tokens of one sequence, a tile at a time.

    Grid: (NUM_HEADS * blocks of columns, num_seqs).
    """
    NUM_BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    head, seq = tl.program_id(0) // NUM_BLOCKS, tl.program_id(1)
    begin, end = tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1)
    if end - begin < TOKENS:
        return
    i, keys = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    values = tl.program_id(0) % NUM_BLOCKS * VALUES + tl.arange(0, VALUES)
    is_used = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    state_ptr = states_ptr + (tl.load(slots_ptr + seq) * NUM_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_ptr += keys[:, None] * VALUE_DIM + values[None, :]
    has_state = tl.load(is_first_ptr + seq) == 0
    state = tl.load(state_ptr, mask=is_used & has_state, other=0.0)  # [KEYS, VALUES]
    q_ptr = qkv_ptr + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
    v_ptr = qkv_ptr + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + values[None, :]
    of_head = i[:, None] * TOKENS + i[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for first in range(begin, end, TOKENS):
        is_token, rows = first + i < end, (first + i).to(tl.int64)
        gate_places = rows * row_stride + head
        log_decay, strength = load_gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, head, gate_places, is_token)
        is_next = (i < TOKENS - 1) & (first + i + 1 < end)
        later, _ = load_gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, head, gate_places + row_stride, is_next)
        q = load_unit(q_ptr, rows, is_token, NUM_CHANNELS, KEY_DIM, KEYS) * (1 / KEY_DIM**0.5)  # [TOKENS, KEYS]
        k = load_unit(q_ptr + NUM_KEY_HEADS * KEY_DIM, rows, is_token, NUM_CHANNELS, KEY_DIM, KEYS)
        is_value = is_token[:, None] & (values < VALUE_DIM)[None, :]
        v = tl.load(v_ptr + rows[:, None] * NUM_CHANNELS, mask=is_value, other=0.0).to(tl.float32)  # [TOKENS, VALUES]
        place = begin // TOKENS + seq + (first - begin) // TOKENS - first_tile
        matrix = (place * NUM_HEADS + head).to(tl.int64) * (TOKENS * TOKENS) + of_head
        inverse, reads = tl.load(inverses_ptr + matrix), tl.load(reads_ptr + matrix)
        out, state = advance_tile(state, q, k, v, log_decay, later, strength, inverse, reads, PRECISION)
        out_rows = out_ptr + (rows[:, None] * NUM_HEADS + head) * VALUE_DIM
        tl.store(out_rows + values[None, :], out.to(dtype), mask=is_value)
    tl.store(state_ptr, state, mask=is_used)


def delta_chunks(
    out: torch.Tensor,
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    num_key_heads: int,
    metadata: Any,
) -> None:
    """Advance the states of sequences with at least TOKENS new tokens, and write to `out` what each token reads.

    The arguments are those of `gated_delta`, of which `gates` are b, a, a_log and dt_bias.
    """
    num_seqs, (num_heads, key_dim, value_dim) = len(metadata.state_slots), states.shape[1:]
    first_tile = metadata.num_decodes // TOKENS + metadata.num_decodes  # of the first chunk of a prompt
    num_tiles = len(qkv) // TOKENS + num_seqs - first_tile
    inverses = torch.empty(2, num_tiles, num_heads, TOKENS, TOKENS, dtype=torch.float32, device=qkv.device)
    sizes = {"NUM_KEY_HEADS": num_key_heads, "NUM_HEADS": num_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    sizes |= {"KEYS": max(16, triton.next_power_of_2(key_dim)), "TOKENS": TOKENS}
    options = {**sizes, "PRECISION": precision_of(qkv.dtype), "num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    step = (metadata.state_slots, metadata.is_first, metadata.cu_seqlens_q)
    row_stride = gates[0].stride(0)
    invert_tiles_kernel[(num_tiles * num_heads,)](
        *inverses, qkv, *gates, step[2], row_stride, num_seqs, first_tile, **options
    )
    grid = (num_heads * triton.cdiv(value_dim, CHUNK_VALUES), num_seqs)
    delta_chunks_kernel[grid](
        out, states, *inverses, qkv, *gates, *step, row_stride, first_tile, VALUES=CHUNK_VALUES, **options
    )


def precision_of(dtype: torch.dtype) -> str:
    """Return how products round their inputs: float32 not at all, for half precision more finely than it does."""
    return "ieee" if dtype == torch.float32 else "tf32"
