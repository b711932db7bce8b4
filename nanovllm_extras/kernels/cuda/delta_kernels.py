"""Gated DeltaNet in Triton between its projections: a short convolution, the recurrence of each head, a gated norm.

`models/gated_delta.py` is the definition, which needs the lengths of chunks on the host. These kernels find the
sequences on the device, so a step of decodes is three launches, and one with long chunks of prompts five
(`delta_chunks.py`). They round at the same points as PyTorch's layer. `cuda_gated_delta.py` calls them, with the
`StateMetadata` of a step.

A draft reads the state that the row before it writes (`memory/slots.py`). Programs do not wait for each other.
So the program of a decode goes on with the drafts that follow it, and the programs of drafts return at once:

    row                 0     1     2     3        row 1 is a decode with the drafts 2 and 3
    reads slot          4     2     2     5
    writes slot         4     2     5     6
    computed by program 0     1     1     1
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.layers.triton_layers import rounded
from nanovllm_extras.kernels.cuda.delta_chunks import TOKENS, compute_gates, delta_chunks
from nanovllm_extras.kernels.cuda.tile_walk import find_sequence

CHANNELS = 256  # of the convolution, in one program
MIN_CONV_TOKENS = 8  # tokens of a chunk that one program convolves
VALUES = 16  # columns of a state in one program: with 128 channels of keys, 64 registers of each thread of a warp
STAGES = 3  # tokens whose q, k and v are on their way
NORM_ROWS = 8  # heads that one program normalises


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def is_draft(slots_ptr, sources_ptr, seq, num_seqs):
    """Return whether a sequence of the step is a draft: it reads the state that the row before it writes."""
    slot = tl.load(slots_ptr + seq, mask=seq < num_seqs, other=0)
    return slot != tl.load(sources_ptr + seq, mask=seq < num_seqs, other=0)


@triton.jit
def next_draft(slots_ptr, sources_ptr, seq, num_seqs):
    """Return the number of the sequence behind `seq` if it is a draft, or else -1."""
    return tl.where(is_draft(slots_ptr, sources_ptr, seq + 1, num_seqs), seq + 1, -1)


# ---- the convolution


@triton.jit
def load_inputs(
    x_ptr,  # the chunk's first row
    tail_ptr,  # [WIDTH - 1, NUM_CHANNELS], the inputs before the chunk
    positions,  # [n] in the chunk; negative ones are in the tail
    channels,  # [m]
    num_new,
    row_stride,
    has_tail,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load inputs of the convolution: [n, m] float32. Zeros are before the first token of a sequence."""
    is_channel = (channels < NUM_CHANNELS)[None, :]
    is_new = ((positions >= 0) & (positions < num_new))[:, None] & is_channel
    x = tl.load(x_ptr + positions.to(tl.int64)[:, None] * row_stride + channels[None, :], mask=is_new, other=0.0)
    is_old = ((positions < 0) & has_tail)[:, None] & is_channel
    old = tl.load(
        tail_ptr + (positions + WIDTH - 1)[:, None] * NUM_CHANNELS + channels[None, :], mask=is_old, other=0.0
    )
    return x.to(tl.float32) + old.to(tl.float32)


@triton.jit
def convolve_tile(
    out_ptr,  # these pointers are those of the kernel
    tails_ptr,
    x_ptr,
    weight_ptr,
    slots_ptr,
    sources_ptr,
    is_first_ptr,
    seq,
    start,  # row of the chunk's first token
    num_new,  # tokens of the chunk
    first,  # token of the tile, in the chunk
    channels,  # [BLOCK]
    row_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Convolve some channels of a tile of a chunk, and apply silu. The chunk's first tile also replaces the tail."""
    chunk_ptr = x_ptr + tl.cast(start, tl.int64) * row_stride
    tail_ptr = tails_ptr + tl.load(sources_ptr + seq) * ((WIDTH - 1) * NUM_CHANNELS)
    has_tail = tl.load(is_first_ptr + seq) == 0
    tokens, is_channel = first + tl.arange(0, TOKENS), (channels < NUM_CHANNELS)[None, :]
    acc = tl.zeros([TOKENS, channels.shape[0]], tl.float32)
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=channels < NUM_CHANNELS, other=0.0).to(tl.float32)
        places = tokens - (WIDTH - 1) + tap
        x = load_inputs(chunk_ptr, tail_ptr, places, channels, num_new, row_stride, has_tail, NUM_CHANNELS, WIDTH)
        acc += x * weight[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = silu(rounded(acc, dtype)).to(dtype)  # rounded twice, as in PyTorch
    rows = (start + tokens).to(tl.int64)[:, None]
    tl.store(out_ptr + rows * NUM_CHANNELS + channels[None, :], out, mask=(tokens < num_new)[:, None] & is_channel)
    if first == 0:
        i = tl.arange(0, TAIL)
        newest = num_new - (WIDTH - 1) + i  # positions; those from num_new on are padding
        kept = load_inputs(chunk_ptr, tail_ptr, newest, channels, num_new, row_stride, has_tail, NUM_CHANNELS, WIDTH)
        kept_ptr = tails_ptr + tl.load(slots_ptr + seq) * ((WIDTH - 1) * NUM_CHANNELS)
        tl.debug_barrier()  # all threads have read the old tail, which may be in the same slot
        kept_ptr += i[:, None] * NUM_CHANNELS + channels[None, :]
        tl.store(kept_ptr, kept.to(dtype), mask=(i < WIDTH - 1)[:, None] & is_channel)
        tl.debug_barrier()  # a draft that follows reads the new tail


@triton.jit(do_not_specialize=["slots_ptr", "sources_ptr", "is_first_ptr", "cu_seqlens_ptr", "num_seqs"])
def causal_conv_kernel(
    out_ptr,  # [num_tokens, NUM_CHANNELS], contiguous
    tails_ptr,  # [num_slots + 1, WIDTH - 1, NUM_CHANNELS], contiguous
    x_ptr,  # [num_tokens, NUM_CHANNELS], any stride but the last, which is 1
    weight_ptr,  # [NUM_CHANNELS, WIDTH], the newest token's last
    slots_ptr,  # [num_seqs] int64, where tails are written
    sources_ptr,  # [num_seqs] int64, where they are read
    is_first_ptr,  # [num_seqs] bool: the chunk begins its sequence
    cu_seqlens_ptr,  # [num_seqs + 1] int32: rows cu[i] … cu[i + 1] of x are the new tokens of sequence i
    row_stride,
    num_seqs,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,  # WIDTH - 1, rounded up to a power of two
    TOKENS: tl.constexpr,  # at least WIDTH - 1, so that only the first tile of a chunk reads the tail
    BLOCK: tl.constexpr,
    ARE_DECODES: tl.constexpr,  # each sequence has one new token
    HAS_DRAFTS: tl.constexpr,
):
    """Convolve BLOCK channels of up to TOKENS tokens of a chunk, and then of the drafts that follow it.

    Grid: (tiles * blocks of channels,), with the tiles of `find_sequence`, or one for each decode. Only the program of
    a chunk's first tile reads and replaces the tail. The programs of drafts do nothing.
    """
    NUM_BLOCKS: tl.constexpr = (NUM_CHANNELS + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) // NUM_BLOCKS
    channels = tl.program_id(0) % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    if ARE_DECODES:
        seq, start, num_new, first = tile, tile, 1, 0
    else:
        seq, start, num_new, first = find_sequence(cu_seqlens_ptr, tile, num_seqs, TOKENS)
    if first >= num_new:
        return
    if HAS_DRAFTS and is_draft(slots_ptr, sources_ptr, seq, num_seqs):
        return
    # fmt: off
    convolve_tile(
        out_ptr, tails_ptr, x_ptr, weight_ptr, slots_ptr, sources_ptr, is_first_ptr,
        seq, start, num_new, first, channels, row_stride, NUM_CHANNELS, WIDTH, TAIL, TOKENS,
    )
    if HAS_DRAFTS:  # Triton 3.6 does not compile a loop that the constant -1 never enters
        draft = next_draft(slots_ptr, sources_ptr, seq, num_seqs)
        while draft >= 0:
            convolve_tile(  # one token, whose row has the number of the draft: decodes are the first rows
                out_ptr, tails_ptr, x_ptr, weight_ptr, slots_ptr, sources_ptr, is_first_ptr,
                draft, draft, 1, 0, channels, row_stride, NUM_CHANNELS, WIDTH, TAIL, 1,
            )
            draft = next_draft(slots_ptr, sources_ptr, draft, num_seqs)
    # fmt: on


# ---- the recurrence


@triton.jit
def load_token(
    token_ptr,  # [2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM]
    head,
    keys,  # [KEYS]
    values,  # [VALUES]
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Load q and k of a head, scaled to their lengths, and some of its v: [KEYS], [KEYS] and [VALUES] float32."""
    q_ptr = token_ptr + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM + keys
    v_ptr = token_ptr + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    q = tl.load(q_ptr, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(q_ptr + NUM_KEY_HEADS * KEY_DIM, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
    v = tl.load(v_ptr, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (1 / KEY_DIM**0.5)
    return q, k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6), v


@triton.jit
def advance(state, q, k, v, log_decay, strength):
    """Advance columns of a state by one token. Returns what the token reads, and the new state.

    With the old state S, the output is q^T (a S + k w^T) = a S^T q + (q · k) w. So S^T k and S^T q are summed together.
    """
    decay = tl.exp(log_decay)
    stored = tl.sum(state * k[:, None], 0)  # [VALUES]: S^T k
    seen = tl.sum(state * q[:, None], 0)  # S^T q
    w = strength * (v - decay * stored)  # what the state lacks under the key
    return decay * seen + tl.sum(q * k, 0) * w, decay * state + k[:, None] * w[None, :]


@triton.jit(do_not_specialize=["slots_ptr", "sources_ptr", "is_first_ptr", "cu_seqlens_ptr"])
def gated_delta_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM], contiguous
    states_ptr,  # [num_slots + 1, NUM_HEADS, KEY_DIM, VALUE_DIM] float32, contiguous
    qkv_ptr,  # [num_tokens, (2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM)], contiguous
    b_ptr,  # [num_tokens, NUM_HEADS], any stride but the last, which is 1
    a_ptr,  # as b
    a_log_ptr,  # [NUM_HEADS], as dt_bias
    dt_bias_ptr,
    slots_ptr,  # [num_seqs] int64, where states are written
    sources_ptr,  # [num_seqs] int64, where they are read
    is_first_ptr,  # [num_seqs] bool: the chunk begins its sequence
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    row_stride,  # of b and a
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    VALUES: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """Advance VALUES columns of the state of one head by all new tokens of one sequence, one after the other.

    Grid: (NUM_HEADS * blocks of columns, num_seqs). The columns of a state do not depend on each other, and stay in
    registers from the first token to the last draft. Sequences with TOKENS or more are left to `delta_chunks.py`.
    """
    NUM_BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    STATE_SIZE: tl.constexpr = NUM_HEADS * KEY_DIM * VALUE_DIM
    head, seq, num_seqs = tl.program_id(0) // NUM_BLOCKS, tl.program_id(1), tl.num_programs(1)
    begin, end = tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1)
    if (begin == end) | (end - begin >= TOKENS):
        return
    if HAS_DRAFTS and is_draft(slots_ptr, sources_ptr, seq, num_seqs):
        return
    keys, values = tl.arange(0, KEYS), tl.program_id(0) % NUM_BLOCKS * VALUES + tl.arange(0, VALUES)
    is_used = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    state_ptr = states_ptr + head * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + values[None, :]
    has_state = tl.load(is_first_ptr + seq) == 0
    source_ptr = state_ptr + tl.load(sources_ptr + seq) * STATE_SIZE
    state = tl.load(source_ptr, mask=is_used & has_state, other=0.0)  # [KEYS, VALUES]
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    while seq >= 0:
        for token in tl.range(tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1), num_stages=STAGES):
            row = tl.cast(token, tl.int64)
            token_ptr = qkv_ptr + row * NUM_CHANNELS
            q, k, v = load_token(token_ptr, head, keys, values, NUM_KEY_HEADS, NUM_HEADS, KEY_DIM, VALUE_DIM)
            b, a = tl.load(b_ptr + row * row_stride + head), tl.load(a_ptr + row * row_stride + head)
            out, state = advance(state, q, k, v, *compute_gates(b, a, a_log, dt_bias, dtype))
            out_row = out_ptr + (row * NUM_HEADS + head) * VALUE_DIM
            tl.store(out_row + values, out.to(dtype), mask=values < VALUE_DIM)
        tl.store(state_ptr + tl.load(slots_ptr + seq) * STATE_SIZE, state, mask=is_used)
        seq = next_draft(slots_ptr, sources_ptr, seq, num_seqs) if HAS_DRAFTS else -1


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    x_ptr,  # [num_rows, SIZE], contiguous: all heads of all tokens. It is replaced
    gate_ptr,  # [num_tokens, NUM_HEADS * SIZE], any stride but the last, which is 1
    weight_ptr,  # [SIZE]
    num_rows,
    gate_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    ROWS: tl.constexpr,
):
    """Normalise ROWS heads in place, and multiply them by silu(gate). Grid: (num_rows / ROWS,), rounded up."""
    rows, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_used = (rows < num_rows)[:, None] & (i < SIZE)[None, :]
    places = rows.to(tl.int64)[:, None] * SIZE + i[None, :]
    gate_rows = (rows // NUM_HEADS).to(tl.int64) * gate_stride + rows % NUM_HEADS * SIZE
    x = tl.load(x_ptr + places, mask=is_used, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_rows[:, None] + i[None, :], mask=is_used, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    normed = rounded(x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None], dtype)
    normed = rounded(weight[None, :] * normed, dtype)
    tl.store(x_ptr + places, (normed * silu(gate)).to(dtype), mask=is_used)


def causal_conv(x: torch.Tensor, tails: torch.Tensor, weight: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Compute silu of the convolution of each sequence's new inputs, and keep the newest ones for its next chunk.

    x: [num_tokens, num_channels]; tails: [num_slots + 1, width - 1, num_channels]; weight: [num_channels, 1, width]
    -> like x
    """
    num_tokens, num_channels = x.shape
    num_seqs, width = len(metadata.state_slots), weight.shape[-1]
    out = torch.empty(num_tokens, num_channels, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    assert tails.is_contiguous()
    assert weight.is_contiguous()
    are_decodes, tail = metadata.num_decodes == num_seqs, triton.next_power_of_2(width - 1)
    tokens = 1 if are_decodes else max(MIN_CONV_TOKENS, tail)
    num_tiles = num_seqs if are_decodes else num_tokens // tokens + num_seqs
    with torch.cuda.device_of(x):
        causal_conv_kernel[(num_tiles * triton.cdiv(num_channels, CHANNELS),)](
            out,
            tails,
            x,
            weight,
            *chunks_of(metadata),
            x.stride(0),
            num_seqs,
            NUM_CHANNELS=num_channels,
            WIDTH=width,
            TAIL=tail,
            TOKENS=tokens,
            BLOCK=CHANNELS,
            ARE_DECODES=are_decodes,
            HAS_DRAFTS=len(metadata.rounds) > 0,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def gated_delta(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    num_key_heads: int,
    metadata: Any,
) -> torch.Tensor:
    """Advance the states of all sequences by their new tokens, and return what each token reads.

    qkv: [num_tokens, num_channels]; b, a: [num_tokens, num_heads], parts of one tensor; a_log, dt_bias: [num_heads];
    states: [num_slots + 1, num_heads, key_dim, value_dim] float32 -> [num_tokens, num_heads, value_dim]
    """
    num_heads, key_dim, value_dim = states.shape[1:]
    out = torch.empty(len(qkv), num_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    gates = (b, a, a_log, dt_bias)
    assert qkv.is_contiguous()
    assert states.is_contiguous()
    assert a.stride() == b.stride()
    with torch.cuda.device_of(qkv):
        gated_delta_kernel[(num_heads * triton.cdiv(value_dim, VALUES), len(metadata.state_slots))](
            out,
            states,
            qkv,
            *gates,
            *chunks_of(metadata),
            a.stride(0),
            NUM_KEY_HEADS=num_key_heads,
            NUM_HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEYS=triton.next_power_of_2(key_dim),
            VALUES=VALUES,
            STAGES=STAGES,
            TOKENS=TOKENS,
            HAS_DRAFTS=len(metadata.rounds) > 0,
            num_warps=1,  # so that a sum over the keys needs no shared memory
            enable_fp_fusion=True,
        )
        if len(qkv) - metadata.num_decodes >= TOKENS:  # else no sequence has as many new tokens
            delta_chunks(out, qkv, gates, states, num_key_heads, metadata)
    return out


def chunks_of(metadata: Any) -> tuple[torch.Tensor, ...]:
    """Return what kernels read of a step: slots, sources and first chunks: [num_seqs]; offsets: [num_seqs + 1]"""
    return metadata.state_slots, metadata.state_sources, metadata.is_first, metadata.cu_seqlens_q


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head of x in place, multiply it by silu(gate), and return x.

    x: [num_tokens, num_heads, size], contiguous; gate: [num_tokens, num_heads * size]; weight: [size]
    """
    num_tokens, num_heads, size = x.shape
    num_rows, block = num_tokens * num_heads, triton.next_power_of_2(size)
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    with torch.cuda.device_of(x):
        gated_norm_kernel[(triton.cdiv(num_rows, NORM_ROWS),)](
            x,
            gate,
            weight,
            num_rows,
            gate.stride(0),
            eps,
            NUM_HEADS=num_heads,
            SIZE=size,
            BLOCK=block,
            ROWS=NORM_ROWS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return x
