"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): attention with a memory of constant size.

A head of ordinary attention keeps the key and the value of each token. A head of this layer keeps one matrix S, its
state: [key_dim, value_dim]. S^T k is the value that is stored under the key k. Each token with query q, key k and value
v changes S, and then reads from it:

    forget      S = a S                          the decay a is in (0, 1]
    correct     w = b (v - S^T k)                what S lacks under the key k; b in (0, 1) is the strength
    write       S = S + k w^T                    if b is 1 and k has length 1, S^T k is v now
    read        output = S^T q

"Delta" is the difference in the second line: a key that is written again replaces its value, instead of adding to it.
`advance` does these four lines for one new token of each of several sequences: a decode.

One token after the other would make many small products of a long prompt. `advance_chunk` gets the same numbers for n
tokens from a few large products. Let G_i be the sum of log a over the tokens 1 … i of the chunk, and S_0 the state
before it. The state that token i corrects is

    exp(G_i) S_0 + sum over j < i of exp(G_i - G_j) k_j w_j^T

so its w_i depends on those of the tokens before it:

    w_i + sum over j < i of b_i exp(G_i - G_j) (k_i · k_j) w_j  =  b_i (v_i - exp(G_i) S_0^T k_i)

These are n linear equations. Their matrix has ones on its diagonal and zeros above it, so one triangular solve gives
all w. The outputs and the last state are sums over them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.basic import FusedLinear, Linear, RMSNorm
from nanovllm_extras.models.layer_inputs import StateMetadata

CHUNK_LEN = 64  # tokens: longer chunks have fewer products, but more pairs of tokens


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Advance the states of several sequences by one token each. Returns the outputs, like v, and the new states.

    state: [num_seqs, num_heads, key_dim, value_dim]; q, k: [num_seqs, num_heads, key_dim];
    v: [num_seqs, num_heads, value_dim]; log_decay, beta: [num_seqs, num_heads]
    """
    state = state * log_decay.exp()[..., None, None]
    stored = (k[..., None, :] @ state)[..., 0, :]  # [num_seqs, num_heads, value_dim]: S^T k
    w = beta[..., None] * (v - stored)  # [num_seqs, num_heads, value_dim]
    state = state + k[..., None] * w[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def advance_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the state of one sequence by n tokens at once. Returns the outputs, like v, and the new state.

    state: [num_heads, key_dim, value_dim]; q, k: [num_heads, n, key_dim]; v: [num_heads, n, value_dim];
    log_decay, beta: [num_heads, n]
    """
    total = log_decay.cumsum(-1)  # [num_heads, n]: G
    # [num_heads, n, n]: exp(G_i - G_j) for j <= i, else 0. The first `tril` keeps exponents small
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    before = total.exp()[..., None]  # [num_heads, n, 1]: how much each token still sees of `state`
    system = beta[..., None] * (k @ k.mT) * between  # [num_heads, n, n]; its diagonal counts as ones
    lacking = beta[..., None] * (v - before * (k @ state))  # [num_heads, n, value_dim]
    w = torch.linalg.solve_triangular(system, lacking, upper=False, unitriangular=True)  # [num_heads, n, value_dim]
    out = before * (q @ state) + ((q @ k.mT) * between) @ w  # [num_heads, n, value_dim]
    after = between[:, -1, :, None]  # [num_heads, n, 1]: how much is left of each token's w at the end of the chunk
    return out, before[:, -1:] * state + (after * k).mT @ w


def advance_by_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk_len: int = CHUNK_LEN
) -> tuple[Tensor, Tensor]:
    """Advance the state of one sequence by any number of tokens. Returns the outputs, like v, and the new state.

    state: [num_heads, key_dim, value_dim]; q, k: [num_tokens, num_heads, key_dim];
    v: [num_tokens, num_heads, value_dim]; log_decay, beta: [num_tokens, num_heads]
    """
    outputs = []
    for chunk in zip(*(t.split(chunk_len) for t in (q, k, v, log_decay, beta)), strict=True):
        out, state = advance_chunk(state, *(t.transpose(0, 1) for t in chunk))  # heads before tokens
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


class CausalConv(nn.Module):
    """Mix each channel with its newest values: the sum of `width` values, each with a weight."""

    def __init__(self, num_channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))  # [num_channels, 1, width], the newest last
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None  # [num_channels]

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve x: [num_seqs, n, num_channels]. Returns the outputs, like x, and the tail for the next call.

        tail: [num_seqs, width - 1, num_channels], the inputs before x; zeros where a sequence begins
        """
        inputs = torch.cat((tail, x), dim=1)  # [num_seqs, width - 1 + n, num_channels]
        out = F.conv1d(inputs.mT, self.weight, self.bias, groups=len(self.weight)).mT  # [num_seqs, n, num_channels]
        return out, inputs[:, -tail.shape[1] :]


class GatedRMSNorm(RMSNorm):
    """x, gate: [..., size] -> weight * x / sqrt(mean(x²) + eps) * silu(gate)"""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (super().forward(x) * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """The layer: projections, a short convolution, the recurrence of each head, a gate, and a projection.

    There may be more heads of values than of keys: each head of the keys then serves several of them.
    """

    needs_rounds = True  # drafts are computed in rounds, which the host finds (`execution/graph_inputs.py`)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_key_heads, self.num_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        key_size, value_size = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        self.qkv_sizes = (key_size, key_size, value_size)
        self.stacked = {"in_proj_qkv": self.qkv_sizes, "conv1d": self.qkv_sizes}
        """Tensors that stack q, k and v: a rank has its own heads of each (`weights/cut.py`)."""
        parts = {"in_proj_qkv": sum(self.qkv_sizes), "in_proj_z": value_size}
        parts |= {"in_proj_b": self.num_heads, "in_proj_a": self.num_heads}
        self.in_proj = FusedLinear(config.hidden_size, parts)
        self.conv1d = CausalConv(sum(self.qkv_sizes), config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))  # [num_heads]
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))  # [num_heads]
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(value_size, config.hidden_size)

    def forward(self, x: Tensor, conv: Tensor, recurrent: Tensor, metadata: StateMetadata) -> Tensor:
        """Compute the layer: [num_tokens, hidden_size] -> the same shape. Reads and writes the sequences' states.

        conv: [num_slots + 1, width - 1, num_channels]; recurrent: [num_slots + 1, num_heads, key_dim, value_dim]
        """
        qkv, z, b, a = self.in_proj(x)  # [num_tokens, …] each
        dtype = recurrent.dtype
        beta = b.sigmoid().to(dtype)  # [num_tokens, num_heads]
        log_decay = -self.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + self.dt_bias)  # [num_tokens, num_heads]
        out = torch.empty(len(x), self.num_heads, self.value_dim, dtype=x.dtype, device=x.device)
        step = (metadata.state_slots, metadata.state_sources, metadata.is_first)  # [num_seqs] each
        for seqs, rows in groups_of(metadata):
            slots, sources, is_first = (t[seqs] for t in step)
            tail, state = read_states(conv, sources, is_first), read_states(recurrent, sources, is_first)
            inputs = qkv[rows].unflatten(0, (len(slots), -1))  # [num_seqs, n, num_channels]: one of the first two is 1
            mixed, conv[slots] = self.conv1d(inputs, tail)
            tokens = (*self.heads(F.silu(mixed).flatten(0, 1), dtype), log_decay[rows], beta[rows])
            if inputs.shape[1] == 1:  # decodes
                new, recurrent[slots] = advance(state, *tokens)
            else:
                new, recurrent[slots] = advance_by_chunks(state[0], *tokens)
            out[rows] = new.to(x.dtype)
        return self.out_proj(self.norm(out, z.unflatten(-1, (-1, self.value_dim))).flatten(1))

    def heads(self, qkv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv: [n, num_channels] into q, k: [n, num_heads, key_dim] and v: [n, num_heads, value_dim].

        q and k have length 1, and q is scaled like the queries of attention.
        """
        q, k, v = qkv.to(dtype).split(self.qkv_sizes, dim=-1)
        q, k = (unit_length(t.unflatten(-1, (-1, self.key_dim))) for t in (q, k))  # [n, num_key_heads, key_dim]
        group = self.num_heads // self.num_key_heads
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)  # [n, num_heads, key_dim]
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (-1, self.value_dim))


def unit_length(x: Tensor) -> Tensor:
    """Scale vectors to length 1: [..., size] -> the same shape. The small summand keeps zeros from becoming NaN."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def read_states(states: Tensor, slots: Tensor, is_first: Tensor) -> Tensor:
    """Return the states of some sequences: [num_seqs, …]. A chunk that begins its sequence starts from zeros.

    states: [num_slots + 1, …]; slots: [num_seqs] int64; is_first: [num_seqs] bool
    """
    found = states[slots]  # a copy
    return found.masked_fill_(is_first.view(-1, *[1] * (found.dim() - 1)), 0)


def groups_of(metadata: StateMetadata) -> list[tuple[Tensor | slice, Tensor | slice]]:
    """Return (sequences, rows) of what is computed at once: decodes, then each prefill chunk.

    All decodes are one group, unless some are drafts, which read the states of the rounds before.
    """
    nd = metadata.num_decodes
    # the host reads offsets only for chunks of prompts: a step of decodes may be recorded in a CUDA graph
    starts = metadata.cu_seqlens_q[nd:].tolist() if nd < len(metadata.state_slots) else []
    chunks = [(slice(nd + i, nd + i + 1), slice(*starts[i : i + 2])) for i in range(len(starts) - 1)]
    rounds = metadata.rounds or ((slice(0, nd),) if nd else ())
    return [*((rows, rows) for rows in rounds), *chunks]
