"""Count the experts whose weights a step reads, by the number of its tokens.

    python -m labs.calculators.experts                                          # the shape of Qwen3-30B-A3B
    python -m labs.calculators.experts --experts 256 --per-token 8 --tokens 1 32 1024

    an expert is read       with probability  1 - (1 - per_token / experts) ** tokens
    bytes of a layer        experts that are read · 3 · hidden_size · intermediate_size · bytes of a weight
    tokens of an expert     tokens · per_token / experts that are read

The router is assumed to choose all experts equally often, for each token by itself. Real routers have favourites, so
that a step reads fewer experts, and the busiest one computes more tokens than the mean. No model runs.
"""

import argparse

from labs.calculators.common import print_table


def experts_read(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Return the expected number of experts that at least one of the tokens chooses."""
    return num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="The experts that a step reads, by the number of its tokens.")
    parser.add_argument("--experts", type=int, default=128, help="experts of a layer")
    parser.add_argument("--per-token", type=int, default=8, help="experts that compute each token")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=768, help="of one expert")
    parser.add_argument("--bytes-per-weight", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 1024], help="tokens of a step")
    args = parser.parse_args()
    if not 1 <= args.per_token <= args.experts:
        parser.error(f"--per-token must be from 1 to --experts ({args.experts}), got {args.per_token}")
    if min(args.tokens) < 1:
        parser.error(f"--tokens must be >= 1, got {min(args.tokens)}")
    bytes_of_expert = 3 * args.hidden_size * args.intermediate_size * args.bytes_per_weight
    rows = []
    for num_tokens in args.tokens:
        read = experts_read(args.experts, args.per_token, num_tokens)
        rows.append(
            [
                f"{num_tokens:,}",
                f"{read:.1f} of {args.experts}",
                f"{read * bytes_of_expert / 2**20:,.0f} MiB",
                f"{num_tokens * args.per_token / read:.1f}",
            ]
        )
    print_table(["tokens of the step", "experts read", "weights read, a layer", "tokens of an expert"], rows)


if __name__ == "__main__":
    main()
