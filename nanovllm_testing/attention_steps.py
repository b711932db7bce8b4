"""Random steps over a paged cache, and what attention must compute from them, for every backend.

The reference is float64 and plain loops, without a cache, blocks or a batch. Every slot in which no token was stored
holds NaN, so that reading one shows.
"""

import math
import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention import Attention
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm_testing.steps import batch_of

Lens = list[tuple[int, int]]
"""(num_computed, num_new) of each sequence of a step"""

# ---- the reference


HEADS = [(4, 4), (4, 2), (8, 2), (8, 1)]  # num_heads, num_kv_heads: ratios of 1, 2, 4 and 8


def attend_with_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the last n tokens of one sequence -> [n, num_heads, head_dim] in float64

    q: [n, num_heads, head_dim]; k, v: [seq_len, num_kv_heads, head_dim]

    sinks: [num_heads], a further score of each head, which has no value
    """
    n, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    q, k, v = q.double(), k.double(), v.double()
    out = q.new_empty(n, num_heads, v.shape[-1])
    for i in range(n):
        num_seen = seq_len - n + i + 1
        first = max(0, num_seen - (window or seq_len))
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = k[first:num_seen, kv_head] @ q[i, head] * (scale or 1 / math.sqrt(head_dim))  # [num_seen]
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            more = scores[:0] if sinks is None else sinks[head : head + 1].double().cpu()
            weights = torch.cat((scores, more)).softmax(0)[: len(scores)]
            out[i, head] = weights @ v[first:num_seen, kv_head]
    return out


class Step:
    """Random Q, K and V of sequences that have `num_computed` tokens in the cache and `num_new` in this step.

    Their blocks are anywhere in the cache. `expected` is the reference's answer, on CPU: [num_tokens, num_heads,
    head_dim]. `chunks` are the sequences with their block tables. Subclasses override the methods.

    window, softcap, scale, sinks: how the layer attends. Blocks that no token's window reaches have been given back.
    The null block, which holds NaN, replaces them.
    """

    def __init__(
        self,
        backend: Any,
        lens: Lens,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **asked: Any,
    ) -> None:
        window = asked.get("window")
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        size, num_kv_heads, head_dim = backend.block_size, backend.num_kv_heads, backend.head_dim

        def normal(num_tokens: int, num_heads: int) -> Tensor:
            return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)  # on CPU

        lens = sorted(lens, key=lambda computed_and_new: computed_and_new[1] > 1)
        num_blocks = [-(-sum(pair) // size) for pair in lens]
        ids = list(range(1, sum(num_blocks) + 4))
        rng.shuffle(ids)
        cache = self.empty_cache(backend.kv_cache_shape(2, len(ids) + 1), dtype).to(device)
        self.cache, self.layer_cache = cache, cache[:, 1]
        self.chunks: list[tuple[Sequence, int, int]] = []
        qs, ks, vs, expected = [], [], [], []
        for (num_computed, num_new), needed in zip(lens, num_blocks, strict=True):
            table, ids = ids[:needed], ids[needed:]
            q = normal(num_new, backend.num_heads)
            k = normal(num_computed + num_new, num_kv_heads)
            v = self.values_of(k, normal)
            slots = [table[i // size] * size + i % size for i in range(num_computed)]
            if slots:  # earlier steps
                old = (k[:num_computed].to(device), v[:num_computed].to(device))
                backend.store_kv(*old, self.layer_cache, torch.tensor(slots, dtype=torch.int32, device=device))
            seq = Sequence("seq", [0] * (num_computed + num_new), SamplingParams())
            seq.num_computed_tokens = num_computed
            num_behind = max(0, num_computed - window + 1) // size if window else 0
            for block_id in [0] * num_behind + table[num_behind:]:
                seq.block_table.append(block_id)
            self.chunks.append((seq, num_computed, num_new))
            qs.append(q)
            ks.append(k[num_computed:])
            vs.append(v[num_computed:])
            expected.append(attend_with_loops(q, self.kept(k), self.kept(v), **asked))
        self.batch = on_device(batch_of(self.chunks, size), device)
        self.q, self.k, self.v = (torch.cat(parts).to(device) for parts in (qs, ks, vs))
        self.expected = torch.cat(expected)

    def values_of(self, k: Tensor, normal: Callable[[int, int], Tensor]) -> Tensor:
        return normal(k.shape[0], k.shape[1])

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    def kept(self, x: Tensor) -> Tensor:
        """Return K or V, as the cache keeps it."""
        return x

    def make_layer(self, backend: Any) -> Any:
        return Attention(backend)

    def run(self, backend: Any) -> Tensor:
        """Return what the backend computes: [num_tokens, num_heads, head_dim]"""
        layer = self.make_layer(backend)
        out: Tensor = layer(self.q, self.k, self.v, self.layer_cache, self.batch.metadata)
        return out


def on_device(record: Any, device: str | torch.device) -> Any:
    """Return the record with all of its tensors on the device. Unlike `to_device`, this needs no pinned memory."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    moved |= {name: on_device(value, device) for name, value in values.items() if is_dataclass(value)}
    return replace(record, **moved)


TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_close(out: Tensor, step: Step) -> None:
    """Raise unless `out` is the reference's answer, but for rounding."""
    assert out.shape == step.q.shape
    assert out.dtype == step.q.dtype
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double().cpu(), step.expected, rtol=tolerance, atol=tolerance)


def random_lens(block_size: int, seed: int) -> Lens:
    """Return six sequences, most of which begin or end at a block border or one token before or after it."""
    rng = random.Random(seed)
    borders = [max(0, n * block_size + d) for n in range(3) for d in (-1, 0, 1)]
    lens = [(rng.choice(borders), 1) for _ in range(3)]
    for _ in range(3):
        start, stop = sorted(rng.choice(borders) for _ in range(2))
        lens.append((start, max(2, stop - start)))
    return lens


def shared_step(backend: Any) -> tuple[Tensor, Tensor]:
    """Compute a step in which B begins with the block that A fills: (the rows of A and B, the expected rows)."""
    size = backend.block_size
    step = Step(backend, [(0, size + 3)])
    a = Sequence("a", [0] * (size + 3), SamplingParams())
    b = Sequence("b", [0] * (size + 2), SamplingParams())
    b.num_computed_tokens = size
    for seq, table in ((a, [2, 3]), (b, [2, 1])):
        for block_id in table:
            seq.block_table.append(block_id)
    batch = batch_of([(a, 0, size + 3), (b, size, 2)], size)
    # B's own tokens are A's, so its rows are A's rows at the same positions
    q, k, v = (torch.cat([t, t[size : size + 2]]) for t in (step.q, step.k, step.v))
    expected = torch.cat([step.expected, step.expected[size : size + 2]])
    cache = torch.full(backend.kv_cache_shape(1, 4), math.nan)[:, 0]
    return Attention(backend)(q, k, v, cache, batch.metadata), expected
