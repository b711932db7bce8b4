"""The K/V store keeps the blocks of all groups of layers: each group finds its own K and V, at what its window sees.

Random traffic over pools of a few blocks, with a store that fails, and engines with the tokens of `transformers`.
`test_store_parity.py` has more engines of Gemma 3, whose layers form groups.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from nanovllm_testing.machine import SETTINGS
from tests.conftest import examples
from tests.extras.full_traffic import BeamMachine
from tests.extras.grouped_fake_kv_cache import GroupedFakeKVCache
from tests.extras.kv_groups.test_grouped_blocks import GroupedRun, GroupedSpeculativeRun, GroupedTraffic
from tests.extras.kv_groups.test_grouped_layers import (
    MAX_TOKENS,
    ONE_TABLE,
    SWAP,
    check_greedy,
    is_grouped,
    make_llm,
)
from tests.extras.kv_store.test_store_traffic import serve_twice
from tests.extras.models.gemma4_checkpoints import FULL, WINDOW, make_gemma4
from tests.extras.models.hybrid_checkpoints import continue_all
from tests.extras.store_traffic import Loading, WithStore


class LoadingGroupedCache(Loading, GroupedFakeKVCache):
    pass


class WithGroupedStore(WithStore):
    def make_cache(self, block_size):
        return LoadingGroupedCache(block_size, self.group_window, self.manager.num_groups - 1)


class GroupedStoreRun(WithGroupedStore, GroupedRun):
    pass


class SpeculativeGroupedStoreRun(WithGroupedStore, GroupedSpeculativeRun):
    pass


class StoreTraffic(GroupedTraffic):
    make_run = GroupedStoreRun

    def draw_options(self, data):
        return super().draw_options(data) | {"store_seed": data.draw(st.sampled_from([None, 0, 1, 2]))}


class StoreMachine(StoreTraffic, BeamMachine):
    pass


class EverythingMachine(StoreTraffic, BeamMachine):
    """Overlap, drafts, beams, swap and a store."""

    make_run = SpeculativeGroupedStoreRun
    overlap = True


TestTraffic = pytest.mark.examples(StoreMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(30))
TestTrafficWithEverything = pytest.mark.slow(EverythingMachine.TestCase)
TestTrafficWithEverything.settings = settings(SETTINGS, max_examples=examples(60))


OTHERS = [[50 + i] * 15 for i in range(12)]


@pytest.mark.parametrize(("window", "num_of_window"), [(1, 0), (5, 1), (9, 2), (99, 5)])
@pytest.mark.parametrize("num_groups", [2, 4])
def test_what_was_pushed_out_of_the_pool_is_loaded_in_all_groups(num_groups, window, num_of_window):
    """Position 20 sees the positions from 16, or from 12, on. The pool has none of the blocks of the prompt."""
    run = GroupedStoreRun(num_groups=num_groups, group_window=window, num_blocks=10 * num_groups, block_size=4)
    again = serve_twice(run, list(range(21)), OTHERS, max_tokens=4)
    assert again.num_cached_tokens == run.store.stats.loaded_tokens == 20
    assert run.store.num_loads == run.store.stats.num_loaded_blocks == 5 + (num_groups - 1) * num_of_window


def test_a_hit_ends_before_a_block_that_one_group_has_lost():
    run = GroupedStoreRun(num_groups=3, group_window=5, num_blocks=30, block_size=4)
    seq = run.add(list(range(21)), max_tokens=4)
    run.finish()
    names = run.store.names(seq, 0, 5)
    lost = [name for name in run.store.kept if name.tokens == names[4].tokens and name != names[4]]
    assert len(lost) == 2, "the fifth block of both groups with a window"
    del run.store.kept[lost[1]]
    for other in OTHERS:
        run.add(other, max_tokens=2)
        run.finish()
    again = run.add(list(range(21)), max_tokens=4)
    run.finish()
    assert again.num_cached_tokens == 16
    assert run.store.stats.loaded_tokens == 16


def test_what_the_pool_has_behind_the_window_of_loaded_blocks_is_given_back():
    """The pool has two blocks, and the store three more. Position 20 sees only the last one of them."""
    run = GroupedStoreRun(num_groups=3, group_window=5, num_blocks=30, block_size=4)
    serve_twice(run, list(range(21)), OTHERS, max_tokens=1)
    for other in OTHERS:
        run.add(other, max_tokens=1)
        run.finish()
    run.add(list(range(9)), max_tokens=1)
    run.finish()
    num_loads = run.store.num_loads
    seq = run.add(list(range(21)), max_tokens=3)
    run.step()
    assert run.store.num_loads - num_loads == 3 + 2
    assert [block_id == 0 for block_id in run.tables(seq)[0]] == [True] * 4 + [False] * 2
    run.finish()


# ---- engines


def check_loads(llm, prompts, expected):
    """Serve prompts in turns, so that each turn evicts blocks of the one before."""
    for _ in range(2):
        for some in (slice(4, 6), slice(0, 3), slice(3, 4)):
            check_greedy(llm, prompts[some], expected[some])
            assert llm.engine.parts.kv_store.saver.wait(5)
    stats = llm.get_stats().kv_store
    assert stats.num_loaded_blocks > 0
    assert stats.num_failed_loads == stats.num_dropped_blocks == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("gemma4_e2b", {"num_kv_blocks": 30}, marks=pytest.mark.slow),
        pytest.param("gemma4_31b", {"num_kv_blocks": 23, "max_num_batched_tokens": 30, **SWAP}, marks=pytest.mark.slow),
        pytest.param(
            "gemma3", {"num_kv_blocks": 6, "attention_backend": "cpu", "block_size": 16}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_engines_with_a_store_give_the_tokens_of_transformers(grouped, name, options):
    llm = make_llm(grouped.of(name)[0], kv_offloading_size=0.01, **options)
    assert is_grouped(llm)
    check_loads(llm, grouped.prompts(), grouped.greedy(name))


def test_blocks_of_another_layout_are_not_found(grouped, tmp_path):
    """In one folder: a new engine finds what an engine of the same layout has saved, and no other's.

    Two layers with a window, of which a block has two rows: as many rows as there are such layers.
    """
    folder, model = make_gemma4(
        tmp_path / "model", num_hidden_layers=3, layer_types=[WINDOW, WINDOW, FULL], num_kv_shared_layers=0
    )
    prompts = grouped.prompts()[4:5]
    expected = continue_all(model, prompts, MAX_TOKENS)
    where = {"shared_storage_path": str(tmp_path / "store")}
    store = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": where}
    num_loaded = []
    for options in ({}, {}, ONE_TABLE, ONE_TABLE):
        with make_llm(folder, kv_transfer_config=store, **options) as llm:
            assert is_grouped(llm) == (not options)
            check_greedy(llm, prompts, expected)
            assert llm.engine.parts.kv_store.saver.wait(5)
            stats = llm.get_stats().kv_store
            num_loaded.append(stats.num_loaded_blocks)
            assert stats.num_failed_loads == 0
    # of 48 tokens, 11 blocks are found, and in the group with a window the last two
    assert num_loaded == [0, 11 + 2, 0, 11]
