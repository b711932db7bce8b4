"""How many sequences fit into the KV cache of a model in which some layers see a window, and others see all tokens?

    python -m benchmarks.layer_groups
    python -m benchmarks.layer_groups --gib 40 --context-len 65536

No model runs: the engine's own block managers admit prompts of a context length, and compute them chunk by chunk, until
the next one has to wait. `one table` keeps K and V of all tokens in all layers, and
`groups` gives back the blocks behind the window (`nanovllm/extras/kv_groups`). The shapes are those of the models'
config.json.
"""

import argparse
from dataclasses import dataclass
from itertools import count

from nanovllm.block_manager import BlockManager
from nanovllm.extras.full_observer import Observer
from nanovllm.extras.full_sequence import Sequence
from nanovllm.extras.kv_groups.grouped_blocks import GroupedBlockManager
from nanovllm.extras.kv_groups.layer_groups import LayerGroups, group_layers
from nanovllm.extras.models.masking import AttentionOptions
from nanovllm.extras.models.network_config import NetworkConfig
from nanovllm.extras.request_params import SamplingParams

BUDGET = 2048  # tokens of a step, the engine's default on a CPU


@dataclass(frozen=True)
class MixedShape:
    """Layer i sees all tokens if i + 1 is a multiple of `period`, and otherwise `window` tokens."""

    num_layers: int
    period: int
    window: int
    num_kv_heads: int
    head_dim: int

    @property
    def groups(self) -> LayerGroups:
        windows = [None if (i + 1) % self.period == 0 else self.window for i in range(self.num_layers)]
        options = tuple(AttentionOptions(window=window) for window in windows)
        heads = (self.num_kv_heads, self.num_kv_heads, self.head_dim)
        return group_layers(NetworkConfig(0, 0, 0, self.num_layers, *heads, attention_options=options))

    def bytes_per_block(self, num_layers: int, block_size: int) -> int:
        """Return the size of a block of `num_layers` layers, with numbers of 16 bits."""
        return 2 * 2 * num_layers * block_size * self.num_kv_heads * self.head_dim


SHAPES = {
    "gpt-oss-20b": MixedShape(24, 2, 128, 8, 64),
    "Gemma-3-1b": MixedShape(26, 6, 512, 1, 256),
    "Gemma-3-4b": MixedShape(34, 6, 1024, 4, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the sequences that fit into the KV cache.")
    parser.add_argument("--gib", type=float, default=16, help="memory of the KV cache")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--context-len", type=int, nargs="+", default=[1024, 8192, 32768])
    args = parser.parse_args()
    columns = ("model", "context", "one table", "groups", "tokens", "ratio")
    print("{:<12}{:>9}{:>11}{:>8}{:>12}{:>7}".format(*columns))
    for name, shape in SHAPES.items():
        for context_len in args.context_len:
            one, grouped = (count_seqs(make(args.gib, args.block_size, shape), context_len) for make in MAKERS)
            num_tokens = grouped * context_len
            print(f"{name:<12}{context_len:>9,}{one:>11,}{grouped:>8,}{num_tokens:>12,}{grouped / one:>7.2f}")


def make_one_table(gib: float, block_size: int, shape: MixedShape) -> BlockManager:
    num_bytes = int(gib * 2**30)
    return BlockManager(num_bytes // shape.bytes_per_block(shape.num_layers, block_size) - 1, block_size, False)


def make_groups(gib: float, block_size: int, shape: MixedShape) -> BlockManager:
    groups, num_bytes = shape.groups, int(gib * 2**30)
    num_blocks = num_bytes // shape.bytes_per_block(groups.layers_per_block, block_size) - 1
    sizes = {"num_groups": groups.num_groups, "window": groups.window, "max_chunk_len": BUDGET}
    return GroupedBlockManager(num_blocks, block_size, False, Observer(), **sizes)


MAKERS = (make_one_table, make_groups)


def count_seqs(blocks: BlockManager, context_len: int) -> int:
    """Return how many sequences of `context_len` tokens have their K and V in the cache at the same time."""
    for num_seqs in count():
        seq = Sequence(str(num_seqs), [1] * context_len, SamplingParams())
        if not blocks.try_admit(seq):
            return num_seqs
        while seq.num_computed_tokens < context_len:
            stop = min(context_len, seq.num_computed_tokens + BUDGET)
            assert blocks.try_allocate(seq, stop), "there is room for an admitted sequence"
            seq.num_computed_tokens = stop
        blocks.try_allocate(seq, context_len)  # as before the first decode: gives back what it does not see
    raise AssertionError


if __name__ == "__main__":
    main()
