"""Every schedule of a few small requests is right, and the search that says so finds planted faults."""

import json

import pytest

from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.prefix_cache import OtherGroups, PrefixCache
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.memory.store_link import StoreLink
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.scheduling.drafter import Drafter
from nanovllm_extras.scheduling.pending import Pending
from nanovllm_extras.trace import view
from tests.extras import schedule_faults as faults
from tests.extras.schedule_search import Counterexample, record, search
from tests.extras.schedule_world import KINDS, OTHER_TEXT, TEXT, BreakingOffError, FakeStore, Setting, World

ALL_PARTS = [kind for kind in KINDS if kind.startswith("all")]  # swap, a store, overlap and drafts
SWEPT_KINDS = [kind if kind == "states" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
FEW = ((TEXT[:5], 1), (TEXT[:3], 2), (OTHER_TEXT, 1))
REQUESTS = {  # budget -> the requests that may come, each up to three times
    1: ((TEXT[:1], 1), (TEXT[:3], 2), (OTHER_TEXT, 1)),
    2: ((TEXT[:2], 2), (TEXT[:5], 1), (OTHER_TEXT, 1)),
    3: FEW,
    4: ((TEXT[:4], 1), (TEXT[:5], 2), (OTHER_TEXT, 1)),
}
INTERVALS = {1: 1, 2: 2, 3: 1, 4: 64}  # budget -> blocks between snapshots; after 64 blocks is only the end of a prompt


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_of_few_actions_is_wrong(kind):
    depth, max_requests = (3, 2) if kind in ALL_PARTS else (4, 3)
    num_states = search(Setting(kind, 3, FEW, max_requests=max_requests), depth).num_states
    assert num_states > (40 if kind in ALL_PARTS else 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "budget"),  # swap has the most schedules, so two budgets are enough for it
    [(kind, budget) for kind in KINDS for budget in REQUESTS if kind not in ("swapped states", *ALL_PARTS)
     or budget in (1, 4)],
)  # fmt: skip
def test_no_schedule_is_wrong(kind, budget):
    depth = 9 if kind in ALL_PARTS else 12
    searched = search(Setting(kind, budget, REQUESTS[budget], snapshot_interval=INTERVALS[budget]), depth)
    assert searched.num_states > 1000


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        *[(kind, 2) for kind in ("all for groups", "all for states")],
        *[pytest.param(kind, 6, marks=pytest.mark.slow) for kind in KINDS],
    ],
)
def test_no_schedule_with_a_step_that_fails_is_wrong(kind, depth):
    """After it has run, or while it is scheduled."""
    assert search(Setting(kind, 4, FEW, max_failures=1), depth).num_states > 10


# ---- what the search would miss


@pytest.mark.slow
def test_the_search_meets_everything_that_can_happen(monkeypatch):
    """And no schedule with a fork between two steps is wrong."""
    expected, seen = set(), set()

    def watch(owner, name, what, is_met=lambda *_: True):
        method = getattr(owner, name)
        expected.add(what)

        def watched(self, *arguments):
            if is_met(self, *arguments):
                seen.add(what)
            return method(self, *arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(Observer, "on_preempt", "preemption")
    watch(Observer, "on_copy_block", "copy-on-write")
    watch(Observer, "on_wait", "no room")
    watch(Observer, "on_admit", "a prefix hit", lambda _, seq: seq.num_computed_tokens)
    watch(Observer, "on_admit", "a hit of its own blocks", lambda _, seq: seq.num_cached_tokens is not None)
    watch(Observer, "on_take_block", "an eviction", lambda _, seq, block_id, is_evicted: is_evicted)
    watch(Observer, "on_give_back", "a block behind the window")
    watch(Slots, "_take_free", "a dropped snapshot", lambda slots: not slots.free_slots)
    watch(Observer, "on_give_back", "blocks behind the window of groups", lambda _, seq, block_ids: seq.window_tables)
    watch(OtherGroups, "num_usable", "a prefix whose window is not cached",
          lambda others, hits: any(hit.serial not in others.blocks_of for hit in hits))  # fmt: skip
    watch(World, "fork", "a fork between two steps")
    watch(Observer, "on_swap_out", "a swap")
    watch(SwapSpace, "swap_in", "a sequence that comes back")
    watch(SwapSpace, "try_swap_out", "no host slot", lambda space, *_: not space._free_slots)
    watch(StoreLink, "_append", "a load")
    watch(StoreLink, "_append", "a load after cached blocks", lambda _, blocks, seq, names, shared, data: shared)
    watch(FakeStore, "load", "a block that the store has lost", lambda store, name: name not in store.kept)
    watch(StoreLink, "note_state", "a late snapshot", lambda _, seq, states, moves: moves is None)
    watch(StoreLink, "forgotten", "a block that is evicted before it is saved", lambda link, i, _: i in link._saves)
    watch(PrefixCache, "skip", "a prefix that is loaded without its first blocks")
    watch(BlockManager, "_put_back", "a step without chunks", lambda _, moves: moves.saves or moves.state_copies)
    watch(Pending, "add", "a step that is launched ahead", lambda pending, *_: pending.steps)
    watch(Drafter, "verify", "right drafts", lambda _, blocks, seq, drafts, drawn: drafts == drawn[:-1])
    watch(Drafter, "verify", "wrong drafts", lambda _, blocks, seq, drafts, drawn: drafts[0] != drawn[0])
    watch(
        Drafter, "rests", "a pause of drafts", lambda drafter, *_: any(one._pause for one in drafter._patience.values())
    )
    watch(BreakingOffError, "__init__", "scheduling that breaks off")
    for kind in KINDS:
        searched = search(Setting(kind, 4, FEW, max_forks=int(kind != "core"), max_requests=2), 6)
        assert searched.num_states > 100
    search(Setting("all for states", 4, FEW, max_failures=1), 3)
    assert seen == expected


@pytest.mark.parametrize("kind", SWEPT_KINDS)
def test_states_that_count_as_equal_have_equal_futures(kind):
    """Otherwise the search would leave out a state whose future it has not seen."""
    setting = Setting(kind, 3, FEW, max_requests=2)

    def futures(frozen):
        keys = set()
        for action in World.thaw(frozen, setting).actions():
            world = World.thaw(frozen, setting)
            world.apply(action)
            keys.add(world.key())
        return keys

    first = World(setting)
    reached, level, num_merged = {first.key(): first.freeze()}, [first.freeze()], 0
    for _ in range(5):
        next_level = []
        for frozen in level:
            for action in World.thaw(frozen, setting).actions():
                world = World.thaw(frozen, setting)
                world.apply(action)
                known = reached.setdefault(world.key(), new := world.freeze())
                if known is new:
                    next_level.append(new)
                elif known != new and num_merged < 100:
                    num_merged += 1
                    assert futures(known) == futures(new)
        level = next_level
    assert num_merged > 20


# ---- planted faults

FAULTS = [  # a fault, the parts that it is planted in, the fewest actions that show it, and what else may happen then
    (faults.a_fork_does_not_count_as_an_owner, "core", 2),
    (faults.a_shared_block_is_written_without_a_copy, "core", 3),
    (faults.copies_are_not_part_of_the_step, "core", 3),
    (faults.a_preempted_sequence_keeps_its_last_block, "core", 5),
    (faults.a_resumed_sequence_goes_on_where_it_was, "core", 5),
    (faults.an_evicted_block_can_still_be_found, "core", 5),
    (faults.a_block_is_known_by_its_own_tokens_only, "core", 6),
    (faults.a_whole_prompt_is_found, "core", 7),
    (faults.found_blocks_need_no_room, "core", 7),
    (faults.tokens_reach_the_wrong_sequences, "core", 2),
    (faults.samples_that_will_fork_take_no_places, "core", 3),
    (faults.the_window_is_one_token_too_short, "windows", 3),
    (faults.blocks_behind_the_window_are_not_freed, "windows", 3),
    (faults.a_group_keeps_a_token_too_few, "groups", 3),
    (faults.blocks_of_one_group_are_not_freed, "groups", 3),
    (faults.blocks_behind_the_window_are_given_back_in_all_tables_but_one, "groups", 4),
    (faults.a_fork_shares_only_the_blocks_of_the_first_group, "groups", 2),
    (faults.blocks_of_windows_are_written_without_a_copy, "groups", 3),
    (faults.found_blocks_of_windows_stay_in_the_free_queue, "groups", 5),
    (faults.room_is_counted_for_one_group, "groups", 4),
    (faults.a_hit_needs_only_the_last_block_of_its_window, "groups", 8),
    (faults.a_window_outlives_the_block_that_is_found, "groups", 6),
    (faults.an_evicted_block_of_a_window_can_still_be_found, "groups", 6),
    (faults.states_are_copied_a_step_too_early, "states", 2),
    (faults.hits_are_copied_before_their_snapshots_are_taken, "states", 4),
    (faults.a_snapshot_outlives_its_block, "states", 7),
    (faults.a_snapshot_is_taken_wherever_a_chunk_ends, "states", 5),
    (faults.a_hit_computes_in_the_snapshot, "states", 4),
    (faults.a_child_computes_in_the_slot_of_its_parent, "states", 3),
    (faults.a_slot_is_not_freed, "states", 3),
    (faults.samples_need_a_slot_too_many, "states", 2),
    (faults.a_step_without_chunks_drops_the_copies, "states", 4),
    (faults.a_state_is_not_copied_out, "swapped states", 5),
    (faults.a_state_is_not_copied_back, "swapped states", 7),
    (faults.a_state_is_copied_out_before_the_copy_of_its_fork, "swapped states", 4),
    (faults.a_host_slot_is_not_freed, "swapped states", 6),
    (faults.states_stay_when_blocks_are_swapped, "swapped states", 5),
    (faults.a_group_gives_back_what_only_the_last_token_of_a_chunk_does_not_see, "groups", 7),
    (faults.a_group_gives_nothing_back, "groups", 4),
    (faults.shared_blocks_of_groups_are_replaced_and_not_copied, "groups", 3),
    (
        faults.a_copy_in_groups_needs_no_room,
        "groups",
        4,
        {"num_blocks": 11, "requests": ((TEXT[:3], 1), (TEXT[:3], 2))},
    ),
    (faults.a_taken_block_of_a_group_can_still_be_found, "groups", 6),
    (faults.blocks_of_a_group_replace_those_that_are_found, "groups", 5),
    (faults.null_blocks_of_groups_are_found, "all for groups", 7),
    (faults.rejected_drafts_keep_the_blocks_of_groups, "all for groups", 3),
    (faults.only_the_first_group_comes_back_from_host_memory, "all for groups", 6),
    (faults.only_the_first_group_is_loaded, "all for groups", 7),
    (faults.all_groups_are_saved_under_one_name, "all for groups", 2),
    (faults.a_block_that_is_not_full_is_not_copied_out, "all for windows", 7),
    (faults.what_was_behind_the_window_is_copied_back, "all for windows", 8),
    (faults.a_sequence_that_ends_keeps_its_host_blocks, "swapped states", 6),
    (faults.a_sequence_comes_back_without_room, "all for windows", 7),
    (faults.a_failed_step_keeps_what_it_has_swapped_out, "swapped states", 5, {"max_failures": 1}),
    (faults.only_the_newest_step_forgets_what_it_has_swapped_out, "all for states", 5, {"max_failures": 1}),
    (faults.an_evicted_block_is_saved, "all for states", 7),
    (faults.a_step_without_chunks_saves_what_was_evicted_since, "all for groups", 6),
    (faults.a_late_snapshot_is_saved_from_the_slot_of_its_sequence, "all for states", 6),
    (faults.a_late_snapshot_is_saved_after_it_was_dropped, "all for states", 3),
    (faults.a_loaded_state_stays_in_host_memory, "all for states", 6),
    (faults.loads_are_done_again_by_the_next_step, "all for states", 7),
    (faults.blocks_of_unknown_tokens_are_found, "overlap and drafts", 3),
    (faults.a_placeholder_names_the_next_row, "overlap and drafts", 3),
    (faults.the_last_token_is_expected_too, "overlap and drafts", 6),
    (faults.a_sequence_that_ends_keeps_its_placeholders, "overlap and drafts", 4),
    (faults.a_step_ahead_takes_blocks_from_others, "overlap and drafts", 4),
    (faults.a_step_is_launched_ahead_of_drafts, "overlap and drafts", 4),
    (faults.all_drafts_are_right, "overlap and drafts", 3),
    (faults.the_token_after_a_wrong_draft_is_kept, "overlap and drafts", 3),
    (faults.blocks_of_wrong_drafts_are_kept, "overlap and drafts", 3),
    (faults.a_sequence_keeps_the_state_after_its_last_draft, "all for states", 4),
    (faults.slots_of_wrong_drafts_are_not_freed, "all for states", 4),
    (faults.drafts_read_the_state_of_their_sequence, "all for states", 3, {"snapshot_interval": 64}),
    (faults.drafts_go_on_behind_a_snapshot, "all for states", 4),
    (faults.drafts_take_slots_that_are_not_free, "all for states", 5),
    (faults.a_draft_may_end_its_sequence, "overlap and drafts", 4),
    (faults.drafts_take_blocks_from_others, "overlap and drafts", 5),
    (faults.a_snapshot_is_taken_before_its_tokens_are_known, "all for states", 4),
    (faults.a_sequence_that_will_fork_gets_drafts, "overlap and drafts", 3, {"requests": REQUESTS[4]}),
]


@pytest.mark.parametrize(
    ("plant", "kind", "num_actions", "options"),
    [
        pytest.param(*fault[:3], dict(*fault[3:]), id=fault[0].__name__, marks=[pytest.mark.slow] * (fault[2] > 3))
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_found(plant, kind, num_actions, options, monkeypatch):
    plant(monkeypatch.setattr)
    with pytest.raises(Counterexample) as caught:
        search(Setting(**{"kind": kind, "budget": 4, "requests": FEW, **options}), 8)
    assert len(caught.value.actions) == num_actions, caught.value


@pytest.mark.parametrize("kind", SWEPT_KINDS)
def test_a_counterexample_is_a_recording_that_can_be_viewed(kind, monkeypatch, tmp_path, capsys):
    plant = {
        "core": faults.copies_are_not_part_of_the_step,
        "windows": faults.the_window_is_one_token_too_short,
        "groups": faults.blocks_of_windows_are_written_without_a_copy,
        "states": faults.hits_are_copied_before_their_snapshots_are_taken,
        "swapped states": faults.a_state_is_copied_out_before_the_copy_of_its_fork,
    }.get(kind, faults.all_drafts_are_right)
    plant(monkeypatch.setattr)
    with pytest.raises(Counterexample) as caught:
        search(Setting(kind, 4, FEW), 6)
    record(caught.value, tmp_path / "run.jsonl")
    header, *lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert header["config"]["description"] == str(caught.value)
    codes = [event[0] for line in lines for event in line["events"]]
    assert codes.count("schedule") == caught.value.actions.count(("step",)), "the step that fails is there too"
    assert view.main([str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "run.html")]) == 0
    assert "run.html" in capsys.readouterr().out
