"""How many sequences fit into the KV cache of a model in which some layers see a window, and others see all tokens?

    python -m benchmarks.layer_groups
    python -m benchmarks.layer_groups --gib 40 --context-len 65536

No model runs: the engine's own block managers admit prompts of a context length, and compute them chunk by chunk, until
the next one has to wait. `one table` keeps K and V of all tokens in all layers, and `groups` gives back the blocks
behind the window (`memory/kinds.py`). The shapes are those of the models' config.json. For Gemma 4, they are
not read from these files, but are as several public programs that read them state them.
"""

import argparse
from itertools import count
from typing import Any, NamedTuple

from nanovllm.block_manager import BlockManager
from nanovllm_extras.execution.equal_blocks import lay_out
from nanovllm_extras.execution.layer_groups import group_layers
from nanovllm_extras.memory import block_manager as full
from nanovllm_extras.memory.kinds import Window
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.window_layers import FULL, SLIDING
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence

BUDGET = 2048  # tokens of a step, the engine's default on a CPU


class Shape(NamedTuple):
    """What the block managers need of a model. K and V are numbers of 16 bits."""

    bytes_per_token: int  # in all layers
    group_bytes_per_token: int  # that a block has for each of its tokens, if each group has a table
    num_groups: int
    window: int


def mixed(num_layers: int, period: int, window: int, num_kv_heads: int, head_dim: int) -> Shape:
    """Return the shape of a model in which layer i sees all tokens if i + 1 is a multiple of `period`."""
    windows = [None if (i + 1) % period == 0 else window for i in range(num_layers)]
    options = tuple(AttentionOptions(window=one) for one in windows)
    heads = (num_kv_heads, num_kv_heads, head_dim)
    groups = group_layers(NetworkConfig(0, 0, 0, num_layers, *heads, attention_options=options))
    of_layer = 2 * 2 * num_kv_heads * head_dim
    return Shape(num_layers * of_layer, groups.layers_per_block * of_layer, groups.num_groups, window)


def gemma4(**fields: Any) -> Shape:
    """Return the shape of a Gemma 4 with these fields of config.json. Heads have the default sizes, 256 and 512."""
    sizes = {"vocab_size": 262_144, "hidden_size": 2560, "intermediate_size": 10_240}  # do not matter
    _, shape = find_architecture({"architectures": ["Gemma4ForCausalLM"], **sizes, **fields})
    layout, groups = lay_out(shape.kv_groups), group_layers(shape)
    of_token = 2 * 2 * sum([group.num_layers * group.num_kv_heads * group.head_dim for group in shape.kv_groups])
    return Shape(of_token, 2 * layout.num_rows * layout.row_size, groups.num_groups, groups.window)


SHAPES = {
    "gpt-oss-20b": mixed(24, 2, 128, 8, 64),
    "Gemma-3-1b": mixed(26, 6, 512, 1, 256),
    "Gemma-3-4b": mixed(34, 6, 1024, 4, 256),
    "Gemma-4-E2B": gemma4(num_hidden_layers=35, layer_types=[*[SLIDING] * 4, FULL] * 7, num_kv_shared_layers=20,
                          num_attention_heads=8, num_key_value_heads=1),
    "Gemma-4-E4B": gemma4(num_hidden_layers=42, num_kv_shared_layers=18, num_attention_heads=8, num_key_value_heads=2),
    "Gemma-4-31B": gemma4(num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16, sliding_window=1024,
                          attention_k_eq_v=True, num_global_key_value_heads=4),
    "Gemma-4-26B": gemma4(num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8, sliding_window=1024,
                          attention_k_eq_v=True, num_global_key_value_heads=2),
}  # fmt: skip


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
            ratio = f"{grouped / one:.2f}" if one else "-"
            print(f"{name:<12}{context_len:>9,}{one:>11,}{grouped:>8,}{grouped * context_len:>12,}{ratio:>7}")


def make_one_table(gib: float, block_size: int, shape: Shape) -> BlockManager:
    return BlockManager(int(gib * 2**30) // (shape.bytes_per_token * block_size) - 1, block_size, False)


def make_groups(gib: float, block_size: int, shape: Shape) -> BlockManager:
    num_blocks = int(gib * 2**30) // (shape.group_bytes_per_token * block_size) - 1
    window = Window(shape.window, BUDGET, block_size)
    return full.BlockManager(num_blocks, block_size, False, num_groups=shape.num_groups, other_kind=window)


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
