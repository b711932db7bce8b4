"""Blocks behind the window of all layers are given back, and nobody reads one that was.

The harness, and what holds in every step, are those of `test_scheduling.py`: a sequence must find its own K and V at
each position that its next token sees.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from nanovllm_extras import Config
from nanovllm_extras.engine.assembly import make_block_manager
from nanovllm_extras.execution.layout import Layout
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.kinds import AllTokens, Window
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.records.full_observer import Observer
from nanovllm_testing.fake_kv_cache import table_of, tokens_of
from nanovllm_testing.machine import SETTINGS
from tests.conftest import examples
from tests.extras.full_traffic import BeamMachine, OverlapMachine, Run, serve_behind_a_shared_window

WINDOWS = st.sampled_from([1, 2, 3, 5, 9, 30])


class WindowMachine(BeamMachine):
    windows = WINDOWS


class OverlapWindowMachine(OverlapMachine):
    windows = WINDOWS


TestTraffic = pytest.mark.examples(WindowMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithOverlap = pytest.mark.examples(OverlapWindowMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(60))


@pytest.mark.parametrize(
    ("window", "overlap", "speculation", "max_held"),
    [
        (None, True, None, None),
        (None, False, {"method": "ngram"}, None),
        (5, False, None, 6),
        (5, True, None, 6),
        (5, False, {"method": "ngram"}, 6),
        (5, False, {"model": "a draft model, which sees all tokens"}, None),
    ],
)
def test_a_model_with_a_layer_that_sees_all_keeps_all_blocks(window, overlap, speculation, max_held):
    config = Config("model", speculative_config=speculation and {**speculation, "num_speculative_tokens": 2})
    options = (AttentionOptions(window=window),) * 2
    shape = NetworkConfig(100, 64, 96, 2, 4, 2, 32, attention_options=options, widest_window=window)
    parts = SimpleNamespace(
        config=config,
        runner=SimpleNamespace(layout=Layout(config, shape, torch.float32, torch.device("cpu"))),
        enable_overlap=overlap,
        max_num_batched_tokens=16,
        num_kv_blocks=8,
        block_size=4,
        kv_store=None,
    )
    blocks = make_block_manager(parts, Observer())
    assert type(blocks) is BlockManager
    assert type(blocks.kind) is (AllTokens if max_held is None else Window)
    assert (blocks.kind.max_held, blocks.num_groups) == (max_held, 1)


def test_blocks_wholly_behind_the_window_are_given_back():
    """The window of position 10 begins at 6, in the second block; that of position 12 at 8, where a block begins."""
    run = Run(num_blocks=10, block_size=4, budget=16, window=5)
    seq = run.add(list(range(10)), max_tokens=6)
    run.step()
    assert run.stats.num_window_blocks == 0
    null_blocks = []
    while seq.finish_reason is None:
        table, position = table_of(seq), seq.num_computed_tokens
        run.step()
        if seq.finish_reason is None:
            null_blocks.append((position, table_of(seq).count(0)))
            assert table_of(seq)[2:3] == table[2:3]
    assert null_blocks == [(10, 1), (11, 1), (12, 2), (13, 2)]
    assert run.stats.num_window_blocks == 2


def test_a_sequence_longer_than_the_cache_is_served():
    """4 blocks of 4 hold a window of 5 and a chunk of 4, wherever they begin."""
    assert Window(5, 4, 4).max_held == 3
    run = Run(num_blocks=3, block_size=4, budget=4, max_model_len=200, window=5)
    seq = run.add(list(range(40)), max_tokens=100)
    run.finish()
    assert seq.num_output_tokens == 100
    assert run.stats.num_preemptions == 0
    assert run.stats.peak_used_blocks <= 3


@pytest.mark.parametrize("num_blocks", [3, 8])
def test_max_held_blocks_is_what_is_held_at_most(num_blocks):
    """Counted over all ways in which a chunk can lie: a block less would not do for some."""
    for window in range(1, 12):
        for chunk in range(1, 9):
            most = 0
            for start in range(40):
                first = max(0, start - window + 1) // num_blocks
                most = max(most, -(-(start + chunk) // num_blocks) - first)
            assert most <= Window(window, chunk, num_blocks).max_held <= most + 1


def test_a_prefix_whose_blocks_were_given_back_is_hit_while_they_are_not_handed_out():
    run = Run(num_blocks=20, block_size=4, budget=16, window=5)
    prompt = list(range(24))
    run.add([*prompt, 1], max_tokens=8)
    run.finish()
    again = run.add([*prompt, 2], max_tokens=8)
    run.step()
    assert again.num_cached_tokens == 24
    assert table_of(again)[:5] == [0] * 5  # found, and not owned
    run.finish()


def test_blocks_that_are_given_back_as_soon_as_their_tokens_are_known_are_hit():
    """A window of 1 leaves a block when it is full; with overlap, its last token was not known until then."""
    run = Run(num_blocks=20, block_size=4, budget=16, window=1, overlap=True)
    first = run.add([1] * 5, max_tokens=16)
    run.finish()
    again = run.add([*tokens_of(first), 2], max_tokens=2)
    run.finish()
    assert again.num_cached_tokens == 20


@pytest.mark.parametrize(("num_blocks", "num_hit", "overlap"), [(7, 0, False), (30, 24, True)])
def test_shared_blocks_that_are_given_back_stay_in_use(num_blocks, num_hit, overlap):
    """With 7 blocks the long prompt waits, and was seen to be preempted if shared blocks count as free.

    `Promise` finds the wrong count in any pool.
    """
    run = Run(num_blocks=num_blocks, block_size=4, budget=20, threshold=8, window=9, overlap=overlap)
    assert serve_behind_a_shared_window(run) == (0, num_hit)
