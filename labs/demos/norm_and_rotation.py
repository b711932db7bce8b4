"""Show with small numbers what RMSNorm keeps, and why rotary embeddings (RoPE) make scores depend on distances only.

    python -m labs.demos.norm_and_rotation
    python -m labs.demos.norm_and_rotation --degrees 45 --shift 3

The rotation is `rotate` of `labs/model.py`, with a head of one pair of numbers. Query and key have the same content,
[1, 0], at each position: so the table shows what the positions do by themselves.
"""

import argparse
from math import pi

import torch
from torch import Tensor

from labs.model import rotate

NUM_POSITIONS = 5


def rms_norm(x: Tensor) -> Tensor:
    """Divide a vector by the root of the mean of its squares. The network then multiplies by a learned weight."""
    return x / x.square().mean(dim=-1, keepdim=True).sqrt()


def scores(query_positions: Tensor, key_positions: Tensor, degrees: float) -> Tensor:
    """Return q · k for each pair of positions: [num_queries, num_keys]."""

    def rotated(positions: Tensor) -> Tensor:
        angles = positions[:, None] * degrees * pi / 180  # [num_positions, head_dim / 2]
        return rotate(torch.tensor([1.0, 0.0]).expand(len(positions), 2), angles.cos(), angles.sin())

    return rotated(query_positions) @ rotated(key_positions).T


def main() -> None:
    parser = argparse.ArgumentParser(description="RMSNorm and rotary embeddings, with small numbers.")
    parser.add_argument("--degrees", type=float, default=30.0, help="the angle from one position to the next")
    parser.add_argument("--shift", type=int, default=1000, help="positions by which the second table moves all tokens")
    args = parser.parse_args()
    print("RMSNorm: x / sqrt(mean of x²)")
    for x in ([3.0, 4.0], [30.0, 40.0], [3.0, -4.0]):
        vector = torch.tensor(x, dtype=torch.float64)
        print(f"  {x!s:<14}-> {[round(one, 3) for one in rms_norm(vector).tolist()]}")
    positions = torch.arange(NUM_POSITIONS, dtype=torch.float64)
    for start in (0, args.shift):
        print(f"\nq · k, {args.degrees:g}° a position, positions from {start}; a row for each query")
        for row, query in zip(scores(positions + start, positions + start, args.degrees), positions, strict=True):
            seen = row[: int(query) + 1].tolist()
            print(f"  {int(query) + start:>6}  " + "".join(f"{round(one, 2) + 0:>7.2f}" for one in seen))


if __name__ == "__main__":
    main()
