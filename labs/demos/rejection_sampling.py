"""Accept or reject the token of a draft model so that outputs have exactly the target model's distribution.

    python -m labs.demos.rejection_sampling
    python -m labs.demos.rejection_sampling --draft 0.1 0.1 0.8

The draft model draws a token x from q. It is accepted with probability min(1, p(x) / q(x)), where p is the target
model's distribution. A rejected token is replaced by a draw from the residual, max(0, p - q) divided by its sum.
"""

import argparse
from fractions import Fraction
from typing import Any

import numpy as np

TOKENS = ["a", "b", "c"]
TARGET = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]  # p
DRAFT = [Fraction(7, 10), Fraction(1, 10), Fraction(2, 10)]  # q
NUM_DRAWS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Rejection sampling of draft tokens.")
    kind: Any = {"type": Fraction, "nargs": len(TOKENS), "metavar": "P"}
    parser.add_argument("--target", **kind, default=TARGET, help="probabilities of the target model (0.5 0.3 0.2)")
    parser.add_argument("--draft", **kind, default=DRAFT, help="probabilities of the draft model (0.7 0.1 0.2)")
    args = parser.parse_args()
    target, draft = args.target, args.draft
    for name, numbers in (("--target", target), ("--draft", draft)):
        if sum(numbers) != 1 or min(numbers) <= 0:
            parser.error(f"{name} must be above 0 and add up to 1, got {' '.join(map(str, numbers))}")
    if target == draft:
        parser.error("--draft must differ from --target: otherwise no token is rejected")
    accept = [min(Fraction(1), p / q) for p, q in zip(target, draft, strict=True)]
    excess = [max(Fraction(0), p - q) for p, q in zip(target, draft, strict=True)]
    residual = [one / sum(excess) for one in excess]
    kept = [q * one for q, one in zip(draft, accept, strict=True)]
    rejected = 1 - sum(kept)
    print("token   target p   draft q   accepted if drawn   drawn and accepted   residual")
    for row in zip(TOKENS, target, draft, accept, kept, residual, strict=True):
        name, *numbers = row
        p, q, a, k, r = (f"{float(number):.3f}" for number in numbers)
        print(f"{name:5} {p:>10} {q:>9} {a:>19} {k:>20} {r:>10}")
    print(f"\naccepted: {float(1 - rejected):.3f}, rejected: {float(rejected):.3f}")
    output = [one + rejected * r for one, r in zip(kept, residual, strict=True)]
    print("accepted + rejected x residual:", ", ".join(f"{float(one):.3f}" for one in output), "= p")
    shares = draw_tokens(NUM_DRAWS, *(np.array(one, dtype=float) for one in (draft, accept, residual)))
    print(f"{NUM_DRAWS:,} draws:                  ", ", ".join(f"{share:.3f}" for share in shares))


def draw_tokens(num_draws: int, draft: np.ndarray, accept: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Draw tokens with the rule, and return the share of each token."""
    generator = np.random.default_rng(1)
    drafts = generator.choice(len(TOKENS), num_draws, p=draft)  # [num_draws]
    is_accepted = generator.random(num_draws) < accept[drafts]  # [num_draws]
    replacements = generator.choice(len(TOKENS), num_draws, p=residual)  # [num_draws]
    tokens = np.where(is_accepted, drafts, replacements)
    return np.bincount(tokens, minlength=len(TOKENS)) / num_draws


if __name__ == "__main__":
    main()
