"""Show which tokens each filter keeps, which token a random number draws, and that a seed repeats a request.

    python -m labs.demos.sampling
    python -m labs.demos.sampling --plot picture.png      # each token's share of [0, 1) with each filter

The five tokens have the weights 16, 8, 4, 2, 1, so that you can check each probability by hand. Then a request with a
seed runs by itself, in a batch of 8, and in a pool so small that sequences are preempted.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from nanovllm.sampler import apply_min_p, apply_top_k, apply_top_p, sample_tokens
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

TOKENS = ["full", "empty", "paged", "slow", "blue"]
LOGITS = torch.tensor([math.log(weight) for weight in (16, 8, 4, 2, 1)])  # [5]
FILTERS: dict[str, dict[str, float]] = {
    "no filter": {},
    "top_k=4": {"top_k": 4},
    "top_p=0.8": {"top_p": 0.8},
    "min_p=0.3": {"min_p": 0.3},
    "temperature=0.5": {"temperature": 0.5},
}
UNIFORMS = [0.40, 0.60, 0.85, 0.95, 0.99]
ENGINE: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
PROMPTS = ["The scheduler", "A block table", "K and V", "The model", "A token", "The pool", "A request"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Filters, draws and seeds.")
    parser.add_argument("--plot", type=Path, help="draw the shares of [0, 1) to this file, and print nothing")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return
    show_filters()
    torch.set_num_threads(1)  # steps are too small for more
    with LLM(TINY_QWEN3, **ENGINE) as roomy, LLM(TINY_QWEN3, num_kv_blocks=28, block_size=4, **ENGINE) as small:
        show_seed(roomy, small)


def shares(temperature: float = 1.0, **filters: float) -> list[float]:
    """Return each token's probability after the filters, which is its share of [0, 1)."""
    logits = LOGITS[None] / temperature
    for name, apply in (("min_p", apply_min_p), ("top_k", apply_top_k), ("top_p", apply_top_p)):
        if name in filters:
            logits = apply(logits, torch.tensor([filters[name]]))
    return logits.softmax(dim=-1)[0].tolist()


def draw(temperature: float = 1.0, **filters: float) -> list[str]:
    """Return the token that each of `UNIFORMS` draws, by the function that the engine calls."""
    rows = len(UNIFORMS)
    limits: dict[str, Any] = {name: torch.tensor([value] * rows) for name, value in filters.items()}
    uniforms = torch.tensor(UNIFORMS, dtype=torch.float64)
    token_ids = sample_tokens(LOGITS.repeat(rows, 1), torch.full((rows,), temperature), uniforms, **limits)
    return [TOKENS[i] for i in token_ids.tolist()]


def show_filters() -> None:
    probs = shares()
    print("token   logit   probability   sum so far   share of the likeliest")
    for i, token in enumerate(TOKENS):
        row = f"{token:5}   {LOGITS[i]:5.2f}   {probs[i]:11.3f}   {sum(probs[: i + 1]):10.3f}"
        print(f"{row}   {probs[i] / probs[0]:22.4f}")
    print("\nprobability after  " + "".join(f"{token:>7}" for token in TOKENS))
    for name, options in FILTERS.items():
        print(f"{name:19}" + "".join(f"{share:7.3f}" if share else "      -" for share in shares(**options)))
    print("\nuniform number     " + "".join(f"{u:7.2f}" for u in UNIFORMS))
    for name, options in FILTERS.items():
        print(f"{name:19}" + "".join(f"{token:>7}" for token in draw(**options)))


def show_seed(roomy: LLM, small: LLM) -> None:
    print("\nrequest                      preemptions   its first tokens")
    for name, seed, num_others, llm in (
        ("seed 7, by itself", 7, 0, roomy),
        ("seed 7, in a batch of 8", 7, 7, roomy),
        ("seed 7, 8 in 28 blocks of 4", 7, 7, small),
        ("seed 8, by itself", 8, 0, roomy),
    ):
        before = llm.get_stats().num_preemptions
        others, own = (
            SamplingParams(temperature=1.0, top_k=20, max_tokens=24, ignore_eos=True, seed=one) for one in (None, seed)
        )
        prompts = [*PROMPTS[:num_others], "The KV cache"]
        outputs = llm.generate(prompts, [others] * num_others + [own], use_tqdm=False)
        tokens = outputs[-1].outputs[0].token_ids[:8]
        print(f"{name:27}  {llm.get_stats().num_preemptions - before:11}   {' '.join(f'{i:4}' for i in tokens)}")


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.4))
    for row, options in enumerate(FILTERS.values()):
        left = 0.0
        for i, share in enumerate(shares(**options)):
            axes.barh(-row, share, left=left, color=f"C{i}", alpha=0.7, edgecolor="white")
            if share > 0.06:
                axes.text(left + share / 2, -row, TOKENS[i], ha="center", va="center")
            left += share
    for u in UNIFORMS[1:3]:
        axes.axvline(u, color="black", linewidth=1, linestyle="--")
        axes.text(u, 0.55, f"u = {u}", ha="center", va="bottom")
    axes.set_yticks([-row for row in range(len(FILTERS))], list(FILTERS))
    axes.set_xlim(0, 1)
    axes.set_xlabel("each token's share of [0, 1); the number u draws the token in whose share it falls")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
