"""Blocks of K and V of two shapes: each number belongs to one block, and in a group to one layer.

`test_grouped_layers.py` runs models with them.
"""

import itertools
import math

import pytest
import torch

from nanovllm_extras import Config
from nanovllm_extras.execution.cached_layers import slots_of_pieces
from nanovllm_extras.execution.equal_blocks import LONG, lay_out
from nanovllm_extras.execution.layer_groups import describe_tables, group_layers, why_one_table
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.groups import KVGroup
from nanovllm_extras.models.masking import AttentionOptions
from tests.extras.models.gemma4_checkpoints import FULL, WINDOW, make_config

SHAPES = {  # (layers, heads, numbers of a head) that see all tokens; the same with a window
    "E2B": ((3, 1, 512), (12, 1, 256)),
    "E4B": ((4, 2, 512), (20, 2, 256)),
    "31B": ((10, 4, 512), (50, 16, 256)),
    "26B-A4B": ((5, 2, 512), (25, 8, 256)),
    "one size": ((4, 2, 8), (9, 2, 8)),
    "neither divides the other": ((2, 1, 96), (7, 2, 32)),
    "many layers see all": ((9, 3, 5), (2, 1, 4)),
}


def groups_of(name, window=9):
    full, windowed = SHAPES[name]
    return KVGroup(*windowed, AttentionOptions(window=window)), KVGroup(*full)


@pytest.mark.parametrize(
    ("name", "layers_per_block", "num_groups", "unused_share"),
    [
        ("E2B", (6, 3), 3, 0),
        ("E4B", (8, 4), 4, 4 * 512 / (4 * 4 * 1024)),  # the last group has 4 of 8 layers
        ("31B", (5, 10), 11, 0),
        # a block has 3 of 25 layers with 8 heads of 256, or 5 with 2 heads of 512
        ("26B-A4B", (3, 5), 10, 1 - (25 * 8 * 256 + 5 * 2 * 512) / (10 * 3 * 8 * 256)),
        ("one size", (4, 4), 4, 3 / 16),
    ],
)
def test_layers_per_block(name, layers_per_block, num_groups, unused_share):
    layout = lay_out(groups_of(name))
    assert (layout.layers_per_block, layout.num_groups) == (layers_per_block, num_groups)
    assert layout.unused_share == pytest.approx(unused_share)
    swapped = lay_out(groups_of(name)[::-1])
    assert (swapped.layers_per_block, swapped.num_rows) == (layers_per_block[::-1], layout.num_rows)


@pytest.mark.parametrize("name", SHAPES)
def test_no_other_number_of_layers_takes_less_memory_for_a_long_sequence(name):
    (num_full, *full), (num_windowed, *windowed) = SHAPES[name]
    unit = math.lcm(math.prod(full), math.prod(windowed))

    def size_of_block(num_layers):
        both = (num_full, full), (num_layers, windowed)
        return max(math.ceil(2 * n * math.prod(size) / unit) * unit for n, size in both)

    least = min(
        size_of_block(n) * (LONG + math.ceil(num_windowed / n))  # of a block of a group, and all blocks of a window
        for n in range(1, num_windowed + 1)
    )
    layout = lay_out(groups_of(name))
    assert layout.num_rows * layout.row_size * (LONG + layout.num_groups - 1) == least


@pytest.mark.parametrize("name", SHAPES)
def test_each_number_belongs_to_one_block_and_one_layer(name):
    """Every view is compared with the blocks of the KV cache, whose elements are numbered."""
    num_blocks, block_size = 3, 2
    groups = groups_of(name)
    layout = lay_out(groups, block_size)
    shape = layout.kv_cache_shape(layout.num_rows, num_blocks)
    kv_cache = torch.arange(math.prod(shape)).view(shape)
    in_blocks = [set(kv_cache[:, :, i].flatten().tolist()) for i in range(num_blocks)]
    for i, group in enumerate(groups):
        piece_shape, per_row = (block_size, group.num_kv_heads, group.head_dim), layout.pieces_per_row(i)
        found = [[] for _ in range(num_blocks)]
        for layer in range(layout.layers_per_block[i]):
            view = layout.view(kv_cache, i, layer, piece_shape)
            assert view.shape[2:] == piece_shape
            for part, block in itertools.product(range(2), range(num_blocks)):
                piece = view[part, block * per_row].flatten()
                assert piece.tolist() == list(range(piece[0], piece[0] + len(piece))), "contiguous, for kernels"
                found[block] += piece.tolist()
        for numbers, whole in zip(found, in_blocks, strict=True):
            assert len(numbers) == len(set(numbers)) == 2 * layout.layers_per_block[i] * math.prod(piece_shape)
            assert set(numbers) <= whole


def test_the_example_of_slots():
    slots = torch.tensor([30, 3, 0, 4], dtype=torch.int32)
    assert slots_of_pieces(slots, 2, 4).tolist() == [58, 3, 0, 8]
    assert slots_of_pieces(slots, 1, 4).equal(slots)
    assert slots_of_pieces(slots, 3, 4).dtype == torch.int32


# ---- models


def shape_of(**fields):
    fields = {"num_kv_shared_layers": 0, "num_hidden_layers": len(fields["layer_types"]), **fields}
    return find_architecture({**make_config(**fields).to_dict(), "architectures": ["Gemma4ForCausalLM"]})[1]


def test_the_groups_of_e2b():
    """The last 20 of 35 layers share the K and V of layers 13 and 14, which are in the groups 2 and 0."""
    heads = {"num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}
    groups = group_layers(shape_of(layer_types=[*[WINDOW] * 4, FULL] * 7, num_kv_shared_layers=20, **heads))
    assert (groups.num_groups, groups.layers_per_block, groups.layers_per_window_block) == (3, 3, 6)
    assert groups.num_unused_layers == 0
    numbers = [(place.group, place.layer) for place in groups.places]
    assert numbers[:10] == [(1, 0), (1, 1), (1, 2), (1, 3), (0, 0), (1, 4), (1, 5), (2, 0), (2, 1), (0, 1)]
    assert numbers[10:15] == [(2, 2), (2, 3), (2, 4), (2, 5), (0, 2)]
    assert numbers[15:] == [*[(2, 5)] * 4, (0, 2)] * 4
    assert str(groups) == "block tables: one for 3 layers that see all tokens, 2 for windows of 9"


def test_unused_layers_are_counted():
    groups = group_layers(shape_of(layer_types=[WINDOW, WINDOW, WINDOW, FULL]))
    assert (groups.num_groups, groups.layers_per_window_block, groups.num_unused_layers) == (3, 2, 1)


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        ([WINDOW, WINDOW, FULL], None),
        ([WINDOW, FULL], "most K and V are of layers that see all tokens"),  # which are twice as large
    ],
)
def test_models_that_have_one_table(types, reason):
    shape, config = shape_of(layer_types=types), Config("any", device="cpu")
    assert why_one_table(config, shape) == reason
    expected = "block tables: one for 1 layers" if reason is None else f"one block table for all layers ({reason}); "
    assert describe_tables(config, shape).startswith(expected)
