"""Compute attention over a block table in one pass, with a running maximum m, sum l and output o.

    python -m labs.demos.online_softmax                     # the tables of chapter 6
    python -m labs.demos.online_softmax --plot picture.png  # and its picture

The first table has five tokens, which you can check by hand. The second table has 50 tokens in 13 scattered blocks. It
compares one pass, two parts that are merged, and the engine's `attend_padded` with a softmax over all tokens at once.
Scores are in units of log2, as in the engine's kernels: a token has the weight 2 ** score.
"""

import argparse
from functools import reduce
from math import log2
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.layers.attention import attend_padded, softmax_attention

Part = tuple[Tensor, Tensor, Tensor]
"""Attention to a part of the tokens: (m, l, o). The output of attention is o / l.

m, l: [num_heads], the largest score and the sum of weights; o: [num_heads, head_dim], the weighted sum of values"""


def attend_to_block(scores: Tensor, v: Tensor) -> Part:
    """Attend to the tokens of one block. scores: [num_heads, num_tokens]; v: [num_heads, num_tokens, head_dim]"""
    m = scores.amax(dim=-1)  # [num_heads]
    weights = torch.exp2(scores - m[:, None])  # [num_heads, num_tokens], at most 1
    return m, weights.sum(dim=-1), torch.einsum("ht,htd->hd", weights, v)


def merge(a: Part, b: Part) -> Part:
    """Return attention to the tokens of both parts. The sums of the part with the smaller maximum are scaled down."""
    (m_a, l_a, o_a), (m_b, l_b, o_b) = a, b
    m = torch.maximum(m_a, m_b)  # [num_heads]
    shrink_a, shrink_b = torch.exp2(m_a - m), torch.exp2(m_b - m)  # [num_heads] each; one of the two is 1
    return m, shrink_a * l_a + shrink_b * l_b, shrink_a[:, None] * o_a + shrink_b[:, None] * o_b


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention in one pass over the blocks of a sequence.")
    parser.add_argument("--plot", type=Path, help="draw m and l after each block to this file")
    args = parser.parse_args()
    check_by_hand()
    print("\nlargest difference from a softmax over all tokens at once, in float64")
    print(f"{'':<26}float64    float32")
    results = [compare(torch.float64), compare(torch.float32)]
    for name in results[0]:
        print(f"{name:<24}" + "".join(f"  {show_bound(result[name])}" for result in results).rstrip())
    if args.plot:
        plot(args.plot)


def check_by_hand() -> None:
    """Print attention to five tokens in blocks of 2, with one head of one channel."""
    block_table, scores, values = [7, 2, 5], [0, 2, 3, 1, 2], [8, 4, 2, 16, 10]
    slots = [block_table[position // 2] * 2 + position % 2 for position in range(5)]
    for name, row in [("position", range(5)), ("slot", slots), ("score", scores), ("value", values)]:
        print(f"{name:<9}" + "".join(f"{one:>4}" for one in row))
    print("\nblock  scores       m      l      o   earlier l and o times")
    state = None
    for i, block_id in enumerate(block_table):
        seen = slice(2 * i, 2 * i + 2)
        part = attend_to_block(torch.tensor([scores[seen]]).float(), torch.tensor([values[seen]]).float()[..., None])
        before, state = state, part if state is None else merge(state, part)
        m, total, o = (one.item() for one in state)
        shrink = "" if before is None else f"   2 ** ({before[0].item():.0f} - {m:.0f})"
        print(f"{block_id:>5}  {scores[seen]!s:<8}{m:>6.0f}{total:>7g}{o:>7g}{shrink}")
    print(f"\no / l        {o:g} / {total:g} = {o / total:.4f}")
    weights = [2**score for score in scores]
    num = sum(weight * value for weight, value in zip(weights, values, strict=True))
    print(f"all at once  {num} / {sum(weights)} = {num / sum(weights):.4f}")
    large = torch.tensor([200.0, 198.0])
    print(f"without m    scores [200, 198] weigh {torch.exp2(large).tolist()}: float32 ends below 2 ** 128")


def compare(dtype: torch.dtype) -> dict[str, float]:
    """Return the largest difference of each method, for one query over 50 tokens.

    There are 6 query heads, 2 K and V heads of 64 channels, and blocks of 4.
    """
    random = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 32, 4, 2, 64, generator=random).to(dtype)  # [2, num_blocks, block_size, …]
    q = torch.randn(1, 6, 64, generator=random).to(dtype)  # [num_tokens, num_heads, head_dim]
    block_table, seq_len = torch.randperm(31, generator=random)[:13] + 1, 50
    # gathered, for comparison only: all K and V of the sequence, in its order, for each query head
    k, v = cache[:, block_table].flatten(1, 2)[:, :seq_len].repeat_interleave(3, dim=2).transpose(1, 2)
    scores = torch.einsum("hd,htd->ht", q[0], k) * 64**-0.5  # [num_heads, seq_len]
    expected = scores.double().softmax(dim=-1)[:, None] @ v.double()  # [num_heads, 1, head_dim]

    def attend_to_table_entry(i: int) -> Part:
        """Attend to block i of the table without a copy of the blocks. The last block holds 2 tokens."""
        k, v = cache[:, block_table[i], : seq_len - 4 * i].repeat_interleave(3, dim=2).transpose(1, 2)
        return attend_to_block(torch.einsum("hd,htd->ht", q[0], k) * (64**-0.5 * log2(torch.e)), v)

    blocks = [attend_to_table_entry(i) for i in range(13)]
    in_two = merge(reduce(merge, blocks[:7]), reduce(merge, blocks[7:]))
    outputs = {"one pass, 13 blocks": reduce(merge, blocks), "two parts, merged": in_two}
    difference = {name: (o / total[:, None] - expected[:, 0]).abs().max() for name, (_, total, o) in outputs.items()}
    engine = attend_padded(q[None], cache, block_table[None], torch.tensor([seq_len]), [seq_len], softmax_attention)
    difference["attend_padded"] = (engine[0, 0] - expected[:, 0]).abs().max()
    return {name: one.item() for name, one in difference.items()}


def show_bound(difference: float) -> str:
    """Return a bound of the difference that is equal on all machines. The digits of the difference are not equal."""
    return next((f"< 1e-{digits}" for digits in (12, 5) if difference < 10**-digits), "too much").ljust(9)


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scores = torch.randn(24, generator=torch.Generator().manual_seed(7)) * 2 + torch.linspace(0, 3, 24)
    parts = [attend_to_block(block[None], block[None, :, None]) for block in scores.split(4)]
    states = [reduce(merge, parts[: i + 1]) for i in range(6)]
    m = [state[0].item() for state in states]
    added = [part[1].item() * 2 ** (part[0].item() - m[i]) for i, part in enumerate(parts)]
    kept = [0.0] + [states[i][1].item() * 2 ** (m[i] - m[i + 1]) for i in range(5)]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    above.bar(range(24), scores.tolist(), color=[f"C{i // 4}" for i in range(24)])
    above.step([4 * i - 0.5 for i in range(7)], [*m, m[-1]], where="post", color="black", label="m, the largest so far")
    above.set_ylabel("score")
    centres = [4 * i + 1.5 for i in range(6)]
    below.bar(centres, kept, width=3, color="0.7", label="l of the blocks before, shrunk by 2 ** (m before - m)")
    below.bar(centres, added, bottom=kept, width=3, color=[f"C{i}" for i in range(6)], label="weights of this block")
    below.set_ylabel("l after this block")
    below.set_xlabel("position, in blocks of 4")
    for axes in (above, below):
        axes.set_xticks([4 * i - 0.5 for i in range(7)], [str(4 * i) for i in range(7)])
        axes.grid(axis="x")
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
