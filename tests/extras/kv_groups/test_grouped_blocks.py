"""The block manager of groups of layers under random traffic, and its decisions one by one.

The harness is that of `test_scheduling.py`: in every step, each group must find its own K and V at each position that
it sees. `test_schedule_search.py` searches all schedules of a few small requests.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from nanovllm_extras.engine.invariants import check_invariants
from nanovllm_extras.execution.layer_groups import LayerGroups, LayerPlace, group_layers
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_testing.fake_kv_cache import check_cached_blocks, table_of
from nanovllm_testing.machine import SETTINGS
from tests.conftest import examples
from tests.extras.full_traffic import BeamMachine, OverlapMachine, Run, SchedulerMachine, serve_behind_a_shared_window
from tests.extras.grouped_fake_kv_cache import (
    GroupedFakeKVCache,
    all_blocks,
    check_cached_windows,
    check_grouped_stored,
    grouped_slots,
    window_tables,
)
from tests.extras.speculative_traffic import SpeculativeRun


class GroupedRun(Run):
    """A run whose layers form `num_groups` groups, all but the first of which see `group_window` tokens."""

    def __init__(self, num_groups=2, group_window=5, **options):
        self.num_groups = num_groups
        self.group_window = group_window
        super().__init__(**options)

    is_plain = keeps_all_blocks = False

    def held(self, block_size):
        kinds = {"num_groups": self.num_groups, "other_kind": self.window_of(self.group_window, block_size)}
        return super().held(block_size) | kinds

    def make_cache(self, block_size):
        return GroupedFakeKVCache(block_size, self.group_window, self.manager.num_groups - 1)

    def tables(self, seq):
        """The block tables of the groups with a window."""
        return window_tables(seq)

    def in_use(self):
        running = self.scheduler.running
        return grouped_slots(self.manager, running), {one for seq in running for one in all_blocks(seq)}

    def owned_blocks(self, seq):
        return set(all_blocks(seq))

    def num_needed(self, seq):
        num_missing = max(0, -(-seq.num_tokens // self.manager.block_size) - len(table_of(seq)))
        of_windows = [
            min(num_missing, self.manager.other_kind.max_held - self.num_unshared(one)) for one in self.tables(seq)
        ]
        return num_missing + sum(of_windows) + self.num_groups * seq.has_shared_tail

    def check_blocks(self):
        check_invariants(self.scheduler)
        check_grouped_stored(self.manager, self.scheduler.running)
        check_cached_blocks(self.manager, self.cache)
        check_cached_windows(self.manager, self.cache)
        if not self.flights:
            self.check_flights_are_forgotten()


class GroupedTraffic:
    make_run = GroupedRun

    def draw_options(self, data):
        options = super().draw_options(data)
        num_groups = data.draw(st.integers(2, 4))
        sizes = {"num_groups": num_groups, "group_window": data.draw(st.sampled_from([1, 2, 3, 5, 9, 30]))}
        return options | sizes | {"num_blocks": num_groups * options["num_blocks"] + data.draw(st.integers(0, 3))}


class GroupedMachine(GroupedTraffic, BeamMachine):
    pass


class OverlapGroupedMachine(GroupedTraffic, OverlapMachine):
    pass


class GroupedSpeculativeRun(GroupedRun, SpeculativeRun):
    pass


class GroupedSpeculativeMachine(GroupedTraffic, SchedulerMachine):
    make_run = GroupedSpeculativeRun


class OverlapGroupedSpeculativeMachine(GroupedTraffic, BeamMachine):
    make_run = GroupedSpeculativeRun
    overlap = True


TestTrafficWithOverlap = pytest.mark.examples(OverlapGroupedMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(80))
TestTrafficWithEverything = pytest.mark.examples(OverlapGroupedSpeculativeMachine.TestCase)
TestTrafficWithEverything.settings = settings(SETTINGS, max_examples=examples(60))


# ---- which layers form a group


@pytest.mark.parametrize(
    ("num_layers", "is_full", "layers_per_block", "num_groups", "num_unused"),
    [
        (24, lambda i: i % 2, 12, 2, 0),  # gpt-oss-20b
        (48, lambda i: i % 6 == 5, 8, 6, 0),  # Gemma-3-12b
        (62, lambda i: i % 6 == 5, 10, 7, 8),  # Gemma-3-27b
    ],
)
def test_groups_have_as_many_layers_as_see_all_tokens(num_layers, is_full, layers_per_block, num_groups, num_unused):
    windows = [None if is_full(i) else 512 for i in range(num_layers)]
    groups = group_layers(shape_of(windows))
    assert (groups.layers_per_block, groups.num_groups, groups.num_unused_layers) == (
        layers_per_block, num_groups, num_unused)  # fmt: skip
    assert len(set(groups.places)) == num_layers, "no two layers share a place"
    for window, place in zip(windows, groups.places, strict=True):
        assert (place.group == 0) == (window is None)
        assert 0 <= place.layer < layers_per_block


def shape_of(windows):
    options = tuple(AttentionOptions(window=window) for window in windows)
    return NetworkConfig(100, 64, 96, len(windows), 4, 2, 32, attention_options=options)


def test_the_example_of_the_docstring():
    places = tuple(LayerPlace(group, i // 2) for i, group in enumerate([1, 0] * 3))
    assert group_layers(shape_of([5, None] * 3)) == LayerGroups(places, 3, 5)
    run = GroupedRun(num_blocks=20, block_size=4, budget=16)
    seq = run.add(list(range(10)), max_tokens=3)
    run.step()
    assert run.tables(seq)[0].count(0) == 0
    run.step()  # position 10 sees 6 … 10
    assert [block_id == 0 for block_id in run.tables(seq)[0]] == [True, False, False]
    assert all(table_of(seq))
    run.finish()


# ---- capacity


def test_a_long_sequence_needs_one_block_for_each_of_its_own_and_a_window():
    """240 tokens in blocks of 4: 60 in the group that sees all, and at most 7 in the other."""
    run = GroupedRun(num_blocks=67, block_size=4, budget=16, max_model_len=241, group_window=9)
    assert run.manager.other_kind.max_held == 7
    assert run.manager.capacity == 240
    seq = run.add(list(range(49)) * 4, max_tokens=44)
    run.finish()
    assert seq.num_output_tokens == 44
    assert run.stats.num_preemptions == 0
    assert 60 < run.stats.peak_used_blocks <= 67
    assert run.stats.num_window_blocks == (239 - 9) // 4, "all that the last token does not see"


@pytest.mark.parametrize(("num_blocks", "capacity"), [(30, 23 * 4), (14, 7 * 4), (13, 6 * 4), (2, 4), (15, 8 * 4)])
def test_capacity_is_what_a_sequence_by_itself_can_reach(num_blocks, capacity):
    run = GroupedRun(num_blocks=num_blocks, block_size=4, budget=16, max_model_len=1000, group_window=9)
    assert run.manager.capacity == capacity
    seq = run.add([1] * min(capacity, 3), max_tokens=None, ignore_eos=True)
    run.finish()
    assert (seq.num_tokens, seq.stop_reason) == (capacity + 1, "kv_cache")
    assert run.stats.num_preemptions == 0


# ---- prefix hits


def test_a_hit_needs_only_the_window_of_groups_with_one():
    """The blocks behind the window are evicted in group 1, and the prefix is found all the same."""
    run = GroupedRun(num_blocks=40, block_size=4, budget=16)
    prompt = list(range(24))
    run.add([*prompt, 1], max_tokens=2)
    run.finish()
    cache = run.manager.prefix_cache
    first = [cache.others.blocks_of[known.serial][0] for known in cache._by_id.values() if known.parent_serial == 0]
    assert len(first) == 1
    cache.forget(first[0])
    again = run.add([*prompt, 2], max_tokens=8)
    run.step()
    assert again.num_cached_tokens == 24
    assert [block_id == 0 for block_id in run.tables(again)[0]][:5] == [True] * 5
    run.finish()


def test_a_hit_ends_where_a_group_lacks_its_window():
    """Without block 5 of group 1, the longest prefix whose window is cached ends behind block 4."""
    run = GroupedRun(num_blocks=40, block_size=4, budget=32)
    prompt = list(range(24))
    run.add([*prompt, 1], max_tokens=2)
    run.finish()
    cache = run.manager.prefix_cache
    last = max(cache.others.blocks_of)
    cache.forget(cache.others.blocks_of[last][0])
    again = run.add([*prompt, 2], max_tokens=8)
    run.step()
    assert again.num_cached_tokens == 20
    run.finish()
    assert last in cache.others.blocks_of, "what was computed again can be found again"


def test_one_evicted_block_makes_those_of_other_groups_useless():
    run = GroupedRun(num_groups=3, num_blocks=40, block_size=4, budget=32)
    run.add([1, 2, 3, 4, 5], max_tokens=1)
    run.finish()
    cache = run.manager.prefix_cache
    (blocks,) = cache.others.blocks_of.values()
    cache.forget(blocks[1])
    assert not cache.others.blocks_of
    assert blocks[0] not in cache
    again = run.add([1, 2, 3, 4, 6], max_tokens=1)
    run.step()
    assert again.num_cached_tokens == 0


def test_a_failed_step_leaves_no_block_of_a_window_that_it_should_have_filled():
    """The block of group 0 is found and filled; that of group 1 is computed again, and its step fails."""
    run = GroupedRun(num_blocks=40, block_size=4, budget=32)
    run.add([1, 2, 3, 4, 5], max_tokens=1)
    run.finish()
    cache = run.manager.prefix_cache
    ((serial, (block_id,)),) = cache.others.blocks_of.items()
    cache.forget(block_id)
    again = run.add([1, 2, 3, 4, 6], max_tokens=1)
    run.step(is_done=False)
    assert serial not in cache.others.blocks_of
    run.finish()
    assert again.num_output_tokens == 1


def test_a_swapped_sequence_comes_back_with_the_windows_of_all_groups():
    """Seen to fail if the blocks of a window come back at the beginning of its table."""
    run = GroupedRun(num_groups=3, num_blocks=24, block_size=4, budget=8, group_window=7, num_swap_blocks=40)
    seqs = [run.add([i] * 8, max_tokens=20) for i in range(3)]
    run.finish()
    assert run.stats.num_swaps > 0
    assert run.stats.num_window_blocks > 0
    assert all(seq.num_output_tokens == 20 for seq in seqs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_groups", "num_blocks"), [(2, 20), (3, 26)])
def test_shared_blocks_that_are_given_back_stay_in_use(num_groups, num_blocks, overlap):
    """In the smaller pools, seen to preempt if they are counted as free; `Promise` finds the wrong count in any."""
    sizes = {"num_groups": num_groups, "num_blocks": num_blocks, "group_window": 9, "block_size": 4}
    assert serve_behind_a_shared_window(GroupedRun(**sizes, budget=20, threshold=8, overlap=overlap)) == (0, 24)


def test_a_step_ahead_has_room_to_copy_a_block_in_each_group():
    """Both samples may have to copy 3 blocks, and 2 are free. Seen to fail if one block is counted for each sample."""
    run = GroupedRun(num_groups=3, num_blocks=8, block_size=4, budget=8, overlap=True)
    run.add(list(range(6)), n=2, max_tokens=2)
    run.finish()
    assert run.stats.num_preemptions == 1, "after the step in flight has ended"
