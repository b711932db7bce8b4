"""Compute three prompts in a padded rectangle and packed into one row, and count the places that hold no token.

    python -m labs.demos.padding
    python -m labs.demos.padding 2 5 10        # prompts of these lengths: the waste, and the mask of the packed row

A rectangle has a row for each sequence, and each row is as long as the longest one: the rest is padding. A packed row
has the tokens of all sequences end to end. Its mask is block-diagonal: a token sees only its own sequence. The hidden
states of all tokens must be the same as those of each prompt by itself.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.model import TINY_QWEN3, Model

PROMPTS = ["block table", "a block table", "a block table is a"]
MAX_DRAWN = 40  # tokens of a packed row whose mask is drawn
CASES = {  # the new tokens of each sequence of a step
    "prompts of 2, 5 and 10": [2, 5, 10],
    "8 decodes, a prompt of 100": [1] * 8 + [100],
    "63 decodes, a prompt of 961": [1] * 63 + [961],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Count the places that hold no token if prompts of different lengths are padded."
    )
    parser.add_argument(
        "lens", type=int, nargs="*", metavar="LENGTH", help="tokens of a prompt; without lengths, all steps are shown"
    )
    lens = parser.parse_args().lens
    if any(n < 1 for n in lens):
        parser.error(f"a prompt has at least 1 token, got the lengths {lens}")
    if lens:
        show_lengths(lens)
    else:
        show_all()


def show_lengths(lens: list[int]) -> None:
    """Print the mask of the packed row if it fits on a screen, and the waste of a padded rectangle."""
    num_tokens, num_places = sum(lens), len(lens) * max(lens)
    if num_tokens <= MAX_DRAWN:
        print("the mask of the packed row: a row for each token, a column for each token that it may see\n")
        for row in packed_mask(lens)[0]:
            print(f"  {show(row)}")
        print()
    seen = sum(n * (n + 1) // 2 for n in lens)
    print(f"rectangle   {len(lens)} rows of {max(lens)}: {num_places:,} places, {num_places - num_tokens:,} of padding")
    print(f"used        {num_tokens:,} of {num_places:,} places, {num_tokens / num_places:.1%}")
    print(f"packed      {num_tokens:,} places, no padding")
    print(f"mask        {num_tokens:,} × {num_tokens:,}: {seen:,} of {num_tokens**2:,} are True")


def show_all() -> None:
    """Compute three prompts in both ways, and count the places of some steps."""
    model = Model(TINY_QWEN3)
    prompts = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    lens = [len(prompt) for prompt in prompts]
    print(f"prompts of {lens[0]}, {lens[1]} and {lens[2]} tokens; a row of the mask for each place\n")
    draw(rectangle_mask(lens), packed_mask(lens))
    num_tokens, num_places = sum(lens), len(lens) * max(lens)
    one_by_one = [compute_packed(model, [prompt], packed_mask([len(prompt)])) for prompt in prompts]
    expected = torch.cat(one_by_one)  # [num_tokens, hidden_size]
    only_causal = torch.ones(1, num_tokens, num_tokens).tril() > 0
    report("rectangle", num_places, compute_rectangle(model, prompts), expected)
    report("packed", num_tokens, compute_packed(model, prompts, packed_mask(lens)), expected)
    report("packed, only causal", num_tokens, compute_packed(model, prompts, only_causal), expected)
    print("\nnew tokens of a step         rectangle   tokens  padding   used   scores: rectangle  dense mask  needed")
    for name, case in CASES.items():
        print_counts(name, case)


def rectangle_mask(lens: list[int]) -> Tensor:
    """Return which places each place sees: [num_rows, longest, longest]. Padding is on the left, and sees nothing."""
    longest = max(lens)
    is_token = torch.arange(longest) >= longest - torch.tensor(lens)[:, None]  # [num_rows, longest]
    is_before = torch.ones(longest, longest).tril() > 0  # [longest, longest]
    return is_before & is_token[:, None] & is_token[:, :, None]


def packed_mask(lens: list[int]) -> Tensor:
    """Return which tokens each token sees: [1, num_tokens, num_tokens]."""
    owner = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))  # [num_tokens], the sequence of each token
    is_before = torch.ones(len(owner), len(owner)).tril() > 0
    return (is_before & (owner == owner[:, None]))[None]


def compute_rectangle(model: Model, prompts: list[list[int]]) -> Tensor:
    """Return the hidden states of the tokens, without those of padding: [num_tokens, hidden_size]."""
    lens = [len(prompt) for prompt in prompts]
    longest = max(lens)
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])  # [num_rows, longest]
    positions = torch.arange(longest) - longest + torch.tensor(lens)[:, None]  # [num_rows, longest]
    is_token = positions >= 0
    # if a place saw nothing, its softmax would be NaN, and 0 * NaN is NaN in the rows that do not see it
    mask = rectangle_mask(lens) | torch.eye(longest).bool()  # padding sees itself
    hidden = model(input_ids.flatten(), positions.clamp(min=0).flatten(), partial(attend_in_rows, mask))
    return hidden[is_token.flatten()]


def compute_packed(model: Model, prompts: list[list[int]], mask: Tensor) -> Tensor:
    """Return the hidden states of all tokens: [num_tokens, hidden_size]."""
    input_ids = torch.tensor([token_id for prompt in prompts for token_id in prompt])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    return model(input_ids, positions, partial(attend_in_rows, mask))


def attend_in_rows(mask: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each place attend to the places of its row that it sees: q [num_places, num_heads, head_dim] -> as q"""
    q, k, v = (x.unflatten(0, (len(mask), -1)).transpose(1, 2) for x in (q, k, v))  # [num_rows, heads, row_len, …]
    return F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True).transpose(1, 2).flatten(0, 1)


def draw(rectangle: Tensor, packed: Tensor) -> None:
    """Print the mask of each row of the rectangle, and beside them the mask of the packed row."""
    longest = rectangle.shape[-1]
    for i, packed_row in enumerate(packed[0]):
        rows = [show(row[i]) if i < longest else " " * (2 * longest - 1) for row in rectangle]
        print("   ".join([*rows, f"  {show(packed_row)}"]))
    print()


def show(row: Tensor) -> str:
    return " ".join("■" if is_seen else "·" for is_seen in row.tolist())


def report(name: str, num_places: int, hidden: Tensor, expected: Tensor) -> None:
    is_same = torch.allclose(hidden, expected, atol=1e-4)
    print(f"{name:<21}{num_places} places computed, the same as each prompt by itself: {is_same}")


def print_counts(name: str, lens: list[int]) -> None:
    places, tokens = len(lens) * max(lens), sum(lens)
    row = f"{name:<29}{places:>9,}{tokens:>9,}{places - tokens:>9,}{tokens / places:>7.1%}"
    if 1 not in lens:  # all are prompts: a decode also has a score for each cached token
        row += f"{len(lens) * max(lens) ** 2:>20,}{tokens**2:>12,}{sum(n * (n + 1) // 2 for n in lens):>8,}"
    print(row)


if __name__ == "__main__":
    main()
