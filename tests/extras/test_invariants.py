"""`check_invariants`: it accepts what runs, and names the rule, the block and the sequence of each planted fault.

A fault changes the state of one object directly, as a mistake in a method would. The parts run without a model, as in
`schedule_search.py`; one of them, and the option, are tested in engines.
"""

import pytest

import nanovllm
import nanovllm_extras
from nanovllm import TINY_QWEN3
from nanovllm.prefix_cache import hash_block
from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.engine.invariants import check_invariants, name_of
from nanovllm_testing.fake_kv_cache import table_of
from tests.extras.full_traffic import Run
from tests.extras.schedule_world import OTHER_TEXT, TEXT, Setting, World
from tests.extras.speculative_traffic import Guesser
from tests.extras.states.test_drafted_slots import start_one

REQUESTS = ((TEXT[:5], 1), (TEXT[:3], 2), (OTHER_TEXT, 1), ((8, 9), 1))
ACTIONS = {  # what is in the pool when a fault is planted
    "core": [("add", 1), ("step",), ("add", 0)],  # two samples share a block that is not full; a sequence is queued
    "groups": [("add", 0)] + [("step",)] * 3,
    "states": [("add", 0), ("step",), ("add", 3), ("step",)],
    "swapped states": [("add", 0), ("add", 0), ("add", 2)],
}


def reach(kind):
    if kind == "windows":  # a sequence that is longer than those of a `World`
        world = Run(window=3, block_size=2, budget=1)
        world.add(list(range(12)))
        for _ in range(12):
            world.step()
    else:
        world = World(Setting(kind, 4, REQUESTS))
        for action in ACTIONS[kind]:
            world.apply(action)
        while world.space is not None and not world.space._held:
            world.apply(("step",))
    check_invariants(world.scheduler)
    return world


def first(world):
    return world.scheduler.running[0]


def entry(world, i=0):
    """The cached block `i` of the first sequence."""
    cache = world.manager.prefix_cache
    return cache._by_id[table_of(first(world))[i]]


def change(world, known, **values):
    """Replace what the prefix cache says of a block, under the hash that it has then."""
    cache = world.manager.prefix_cache
    del cache._by_hash[known.block_hash]
    changed = known._replace(**values)
    cache._by_id[changed.block_id] = cache._by_hash[changed.block_hash] = changed


# ---- faults: each changes the state, and returns what the error must name


def a_block_is_leaked(world):
    block_id, _ = world.manager._free.popitem()
    return f"leaked: neither free nor owned; block {block_id}"


def a_block_is_freed_twice(world):
    block_id = table_of(first(world))[0]
    world.manager._free[block_id] = None
    return f"free and owned; block {block_id}; sample 1 of request '0'"


def a_block_has_a_reference_too_many(world):
    block_id = table_of(first(world))[0]
    world.manager._ref_counts[block_id] += 1
    return f"2 owners and 3 references; block {block_id}"


def a_free_block_has_a_reference(world):
    block_id = next(iter(world.manager._free))
    world.manager._ref_counts[block_id] = 1
    return f"no owner and 1 references; block {block_id}"


def the_null_block_is_free(world):
    world.manager._free[0] = None
    return "not of the pool, but free or owned; block 0"


def a_table_begins_with_the_null_block(world):
    seq = first(world)
    world.manager._ref_counts[table_of(seq)[0]] -= 1
    seq.block_table[0] = 0
    return "block table 0 has 1 null blocks, but only 0 are behind the window; sample 0 of request '0'"


def a_table_is_too_long(world):
    seq = first(world)
    world.manager._append(seq, world.manager.take(seq))
    return "block table 0 has 3 entries for 3 computed tokens; sample 0 of request '0'"


def a_sequence_owns_a_block_twice(world):
    manager, seq = world.manager, first(world)
    kept, lost = table_of(seq)
    seq.block_table[1] = kept
    seq.has_shared_tail = True
    manager._ref_counts[lost] -= 1
    manager._ref_counts[kept] += 1
    return f"owns it twice; block {kept}; sample 0 of request '0'"


def a_shared_block_is_not_marked(world):
    seq = first(world)
    seq.has_shared_tail = False
    return f"written without a copy; block {table_of(seq)[-1]}; sample 0 of request '0'"


def a_copy_is_left_behind(world):
    world.manager._copies.append((1, 2))
    return "block copies are still to be done; block 2"


def a_cached_block_has_other_tokens(world):
    known = entry(world)
    tokens = bytes(len(known.tokens))
    change(world, known, tokens=tokens, block_hash=hash_block(0, tokens))
    return f"block 0 of a sequence is cached for other tokens; block {known.block_id}; sample 0 of request '0'"


def a_cached_block_has_the_hash_of_others(world):
    known = entry(world)
    change(world, known, block_hash=known.block_hash + 1)
    return f"another hash than its tokens and its parent; block {known.block_id}"


def a_cached_block_has_another_parent(world):
    known = entry(world)
    change(world, known, parent_serial=99)
    return f"block 0 of a sequence is cached after serial 99; block {known.block_id}"


def a_stale_hash_is_found(world):
    cache, known = world.manager.prefix_cache, entry(world)
    del cache._by_id[known.block_id]
    return "1 hashes and 0 serials find 0 cached blocks"


def a_block_that_is_not_full_is_cached(world):
    cache, seq, parent = world.manager.prefix_cache, first(world), entry(world)
    tokens = seq.token_ids[2:4].tobytes()
    block_hash = hash_block(parent.block_hash, tokens)
    known = parent._replace(block_id=table_of(seq)[1], block_hash=block_hash, serial=9, parent_serial=parent.serial)
    cache._by_id[known.block_id] = cache._by_hash[block_hash] = known._replace(tokens=tokens)
    return f"block 1 of a sequence is cached before its tokens are known and computed; block {known.block_id}"


def a_sequence_that_waits_counts_as_computed(world):
    world.scheduler.waiting[0].num_computed_tokens = 2
    return "waits has 2 computed tokens, but no K and V; sample 0 of request '1'"


def a_sequence_is_in_both_queues(world):
    world.scheduler.running.append(world.scheduler.waiting[0])
    return "in the queues twice; sample 0 of request '1'"


def a_sequence_that_has_ended_runs(world):
    first(world).finish_reason = "stop"
    return "has ended is in a queue; sample 0 of request '0'"


def a_block_that_the_window_sees_is_given_back(world):
    seq = first(world)
    kind, size = world.manager.kind, world.manager.block_size
    num_behind = kind.num_behind(seq.num_computed_tokens)
    world.manager.give_back(seq, (num_behind + 1) * size + kind.window - 1)
    return f"{num_behind + 1} null blocks, but only {num_behind} are behind the window; sample 0 of request 'seq-0'"


def blocks_behind_the_window_are_kept(world):
    manager, seq = world.manager, first(world)
    for i in range(table_of(seq).count(0)):
        seq.block_table[i] = manager.take(seq)
    return f"keeps more than {manager.kind.max_held} blocks of a window; block {table_of(seq)[0]}"


def a_block_of_one_group_is_not_freed(world):
    first(world).window_tables[1][-1] = 0
    return "block table 2 has a null block behind other blocks; block 0"


def a_window_is_found_without_its_block(world):
    cache = world.manager.prefix_cache
    known = entry(world)
    del cache._by_id[known.block_id], cache._by_hash[known.block_hash]
    return f"beside a block that is not cached, of serial {known.serial}"


def a_block_is_found_in_two_groups(world):
    others, known = world.manager.prefix_cache.others, entry(world)
    others.serial_of[known.block_id] = known.serial
    return f"found in two groups; block {known.block_id}"


def a_block_of_a_window_is_cached_at_another_place(world):
    others = world.manager.prefix_cache.others
    one, other = entry(world, 0), entry(world, 1)
    block_id = first(world).window_tables[0][1]
    assert others.serial_of[block_id] == other.serial
    others.serial_of[block_id] = one.serial
    return f"cached for place 0 and for place 1; block {block_id}; sample 0 of request '0'"


def a_slot_has_two_owners(world):
    states, (seq, other, *_) = world.states, world.scheduler.running
    states.free_slots.append(states.owned[seq])
    states.owned[seq] = states.owned[other]
    return f"it has two owners; slot {states.owned[seq]}"


def a_slot_is_leaked(world):
    _, slot = world.states.snapshots.popitem()
    return f"leaked: neither free nor owned; slot {slot}"


def the_null_slot_is_free(world):
    world.states.free_slots.append(0)
    return "not of the pool, but free or owned; slot 0"


def a_running_sequence_has_no_slot(world):
    world.states.free_slots.append(world.states.owned.pop(first(world)))
    return "a running sequence has no slot; sample 0 of request '0'"


def a_snapshot_outlives_its_block(world):
    snapshots = world.states.snapshots
    snapshots[99] = snapshots.popitem()[1]
    return "beside a block that is not cached, of serial 99"


def a_host_block_is_free_and_in_use(world):
    seq, (held,) = next(iter(world.space._held.items()))
    world.space._free.append(held[0])
    return f"free and owned; host block {held[0]}; {name_of(seq)}"


def a_host_block_is_lost(world):
    seq, (held,) = next(iter(world.space._held.items()))
    world.space._free.append(held.pop())
    return f"{len(held)} host blocks keep {seq.num_computed_tokens} tokens in 1 tables; {name_of(seq)}"


def a_host_slot_is_freed_too_early(world):
    seq, slot = world.space._slots.popitem()
    world.space._free_slots.append(slot)
    return "does not have both a host block and a host slot; sample 0 of request '1'"


def a_sequence_that_has_left_the_queue_keeps_its_host_blocks(world):
    seq = next(iter(world.space._held))
    world.scheduler.waiting.remove(seq)
    return f"a sequence that does not wait has a host block; {name_of(seq)}"


FAULTS = {
    "core": [
        a_block_is_leaked, a_block_has_a_reference_too_many, a_free_block_has_a_reference, the_null_block_is_free,
        a_table_begins_with_the_null_block, a_table_is_too_long, a_sequence_owns_a_block_twice,
        a_shared_block_is_not_marked, a_copy_is_left_behind, a_cached_block_has_other_tokens,
        a_cached_block_has_the_hash_of_others, a_cached_block_has_another_parent, a_stale_hash_is_found,
        a_block_that_is_not_full_is_cached,
        a_sequence_that_waits_counts_as_computed, a_sequence_is_in_both_queues, a_sequence_that_has_ended_runs,
        a_block_is_freed_twice,
    ],
    "windows": [a_block_that_the_window_sees_is_given_back, blocks_behind_the_window_are_kept],
    "groups": [
        a_block_of_one_group_is_not_freed, a_window_is_found_without_its_block, a_block_is_found_in_two_groups,
        a_block_of_a_window_is_cached_at_another_place,
    ],
    "states": [
        a_slot_has_two_owners, a_slot_is_leaked, the_null_slot_is_free, a_running_sequence_has_no_slot,
        a_snapshot_outlives_its_block,
    ],
    "swapped states": [
        a_host_block_is_free_and_in_use, a_host_block_is_lost, a_host_slot_is_freed_too_early,
        a_sequence_that_has_left_the_queue_keeps_its_host_blocks,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "plant"),
    [pytest.param(kind, plant, id=plant.__name__) for kind, plants in FAULTS.items() for plant in plants],
)
def test_a_planted_fault_is_named(kind, plant):
    world = reach(kind)
    expected = plant(world)
    with pytest.raises(AssertionError) as caught:
        check_invariants(world.scheduler)
    assert expected in str(caught.value)


def test_slots_of_drafts_belong_to_their_sequence():
    run, seq = start_one(Guesser(1))
    scheduler, states = run.scheduler, run.scheduler.block_manager.states
    while seq not in states.drafts:
        step = scheduler.schedule()
        if seq not in states.drafts:
            scheduler.update(step, [7] * len(step.samples))
    assert len(states.slots_of(seq)) > 1
    check_invariants(scheduler)
    states.free_slots.append(states.slots_of(seq)[-1])
    with pytest.raises(AssertionError, match="free and owned; slot"):
        check_invariants(scheduler)


# ---- engines


def test_an_engine_checks_after_each_step_if_it_is_told_to():
    options = {"enforce_eager": True, "attention_backend": "torch", "num_kv_blocks": 20, "block_size": 16}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for is_told in (True, False):
        engine = LLMEngine(Config(TINY_QWEN3, check_invariants=is_told, **options))
        engine.add_request("one", [5] * 20, params)
        assert engine.step().outputs
        engine.scheduler.block_manager._free.popitem()
        if is_told:
            with pytest.raises(AssertionError, match=r"leaked: neither free nor owned; block \d+$"):
                engine.step()


@pytest.mark.parametrize("engine_of", [nanovllm, nanovllm_extras], ids=["core", "extras"])
def test_engines_of_tests_are_checked_without_being_told(engine_of):
    """`tests/conftest.py` does that. If it did not, no other test would notice."""
    llm = engine_of.LLM(TINY_QWEN3, attention_backend="torch", num_kv_blocks=20)
    llm.engine.add_request("one", [5] * 20, engine_of.SamplingParams(max_tokens=8, ignore_eos=True))
    llm.engine.step()
    llm.engine.scheduler.block_manager._free.popitem()
    with pytest.raises(AssertionError, match="leaked: neither free nor owned; block"):
        llm.engine.step()


@pytest.mark.parametrize(
    "options", [{}, {"enable_overlap": True}, {"preemption_mode": "swap", "swap_space_bytes": 1 << 22}]
)
def test_what_runs_is_accepted(options):
    """A pool so small that sequences are preempted, with shared prefixes, samples and copies."""
    llm = LLM(TINY_QWEN3, num_kv_blocks=16, block_size=4, max_model_len=60, check_invariants=True, **options)
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([[7] * 9, [7] * 8 + [9], [5] * 6], params)
    assert [len(one.token_ids) for output in outputs for one in output.outputs] == [20] * 6
    assert llm.get_stats().num_preemptions > 0
