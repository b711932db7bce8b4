"""Compare the memory of recurrent states with that of K and V, by the length of the context.

    python -m labs.calculators.state_bytes                                     # shapes of Qwen3.5, and Qwen3-0.6B
    python -m labs.calculators.state_bytes --tokens 500 5000
    python -m labs.calculators.state_bytes --model FOLDER                      # a config.json of a model with states

    state of a layer       =  heads · key_dim · value_dim · 4  +  (width - 1) · channels · 2
    K and V of a layer     =  2 · KV heads · head_dim · 2  for each token
    memory of a sequence   =  states of the layers that have one  +  tokens · K and V of the layers that attend
    smaller from           =  the first length at which this is less than with K and V in all layers
    a snapshot             =  K and V of (states / K and V of a token) tokens

States are float32; K, V and the inputs of the short convolution are bfloat16. `channels` are those of the queries, keys
and values together. Blocks that are not full are left out. No model runs.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common import find_model, read_config
from labs.calculators.common import print_table
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.layer_inputs import StateShape

LENGTHS = (1024, 8192, 32_768, 131_072)
BYTES_PER_VALUE = 2  # of K and V: bfloat16


@dataclass(frozen=True)
class HybridShape:
    """The sizes of a network that determine the memory of its sequences."""

    name: str
    num_layers: int
    kv_values: int
    """Values of K and V of a token in one layer: 2 · KV heads · head_dim."""
    state: StateShape | None = None
    """The state of the layers that have no K and V. None if all layers attend."""

    @property
    def bytes_of_state(self) -> int:
        return 0 if self.state is None else self.state.bytes_per_slot(torch.bfloat16)

    @property
    def bytes_per_token(self) -> int:
        num_states = 0 if self.state is None else self.state.num_layers
        return (self.num_layers - num_states) * self.kv_values * BYTES_PER_VALUE

    def bytes_of_sequence(self, num_tokens: int) -> int:
        return self.bytes_of_state + num_tokens * self.bytes_per_token

    def with_attention(self) -> "HybridShape":
        """Return the same layers with K and V in all of them."""
        return replace(self, name=f"{self.name}, all layers attend", state=None)

    def smaller_from(self, other: "HybridShape") -> int:
        """Return the first length at which this network takes less memory than `other`, which has more K and V."""
        return self.bytes_of_state // (other.bytes_per_token - self.bytes_per_token) + 1


def qwen35(name: str, num_layers: int, num_value_heads: int, num_kv_heads: int) -> HybridShape:
    """Return the shape of a Qwen3.5: three of four layers have a state, and heads have the same sizes in all models."""
    channels = 2 * 16 * 128 + num_value_heads * 128  # 16 heads of queries and of keys
    state = StateShape(num_layers * 3 // 4, conv=(3, channels), recurrent=(num_value_heads, 128, 128))
    return HybridShape(name, num_layers, 2 * num_kv_heads * 256, state)


QWEN3 = HybridShape("Qwen3-0.6B", 28, 2 * 8 * 128)
HYBRIDS = [qwen35("Qwen3.5-0.8B", 24, 16, 2), qwen35("Qwen3.5-4B", 32, 32, 4), qwen35("Qwen3.5-27B", 64, 48, 4)]


def shape_of_model(name: str) -> HybridShape:
    """Return the shape of a folder or hub id. Raise ValueError if it does not exist, or its layers have no states."""
    folder = find_model(name, with_weights=False)
    _, shape = find_architecture(read_config(folder))
    if shape.state_shape is None:
        raise ValueError(f"--model must be a model whose layers keep states, {name!r} has attention in all layers")
    title = folder.resolve().name if Path(name).is_dir() else name
    kv_values = 2 * shape.num_key_value_heads * shape.head_dim
    return HybridShape(title, shape.num_hidden_layers, kv_values, shape.state_shape)


def show_memory(shapes: list[HybridShape], lengths: list[int]) -> None:
    """Print a row for each shape: bytes of a state, of a token, and of whole sequences."""
    header = ["memory in MiB", "state", "a token", *[f"{n:,} tokens" for n in lengths]]
    rows = [
        [
            shape.name,
            f"{shape.bytes_of_state / 2**20:.1f}" if shape.state else "-",
            f"{shape.bytes_per_token / 2**20:.3f}",
            *[f"{shape.bytes_of_sequence(n) / 2**20:,.0f}" for n in lengths],
        ]
        for shape in shapes
    ]
    print_table(header, rows)


def show_borders(hybrids: list[HybridShape]) -> None:
    """Print from which length on each hybrid is smaller, and how many tokens have the size of a snapshot."""
    header = ["tokens", "smaller than if all layers attend", f"than {QWEN3.name}", "a snapshot = K and V of"]
    rows = []
    for one in hybrids:
        is_comparable = one.bytes_per_token < QWEN3.bytes_per_token
        than_qwen3 = f"from {one.smaller_from(QWEN3):,}" if is_comparable else "never"
        rows.append(
            [
                one.name,
                f"from {one.smaller_from(one.with_attention()):,}",
                than_qwen3,
                f"{one.bytes_of_state / one.bytes_per_token:,.0f}",
            ]
        )
    print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of recurrent states compared with that of K and V.")
    parser.add_argument("--model", nargs="+", default=[], help="folders with a config.json, or hub ids")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of the context")
    args = parser.parse_args()
    if min(args.tokens) < 1:
        parser.error("--tokens must be >= 1")
    try:
        hybrids = [shape_of_model(name) for name in args.model] or HYBRIDS
    except ValueError as error:
        parser.error(str(error))
    show_memory([QWEN3, *[row for one in hybrids for row in (one, one.with_attention())]], args.tokens)
    print()
    show_borders(hybrids)


if __name__ == "__main__":
    main()
