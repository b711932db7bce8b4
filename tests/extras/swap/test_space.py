"""Host blocks for preempted sequences: given once, copied out and back in pairs, and given up again.

Oracles: a dict of what each block holds, which plays both memories, and counts.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.scheduler import Step
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence


def make_seq():
    return Sequence("seq", [1, 2, 3], SamplingParams())


@pytest.mark.parametrize("tables", [[[7]], [[7, 3]], [[7, 3, 5]], [[7, 3, 5], [0, 0, 4], [0, 2, 6]]])
def test_blocks_of_all_groups_are_copied_out(tables):
    """But not the null blocks behind a window."""
    space, seq = SwapSpace(10), make_seq()
    assert space.try_swap_out(seq, tables)
    outs, ins = space.take_moves()
    sources = [block_id for table in tables for block_id in table if block_id]
    assert outs == list(zip(sources, space.host_block_ids(seq), strict=True))
    assert ins == []
    assert space.num_free_blocks == 10 - len(sources)
    assert len(set(space.host_block_ids(seq))) == len(sources)
    assert set(space.host_block_ids(seq)) <= set(range(10))


@pytest.mark.parametrize(("num_computed", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_only_blocks_that_hold_computed_tokens_are_copied_out(num_computed, num_blocks):
    """Blocks at the end of the table may have been given for tokens that were never computed."""
    space = SwapSpace(10)
    blocks, seq = BlockManager(5, 4, swap_space=space), Sequence("seq", list(range(12)), SamplingParams())
    assert blocks.try_admit(seq)
    assert blocks.try_allocate(seq, 12)
    table, seq.num_computed_tokens = seq.block_table.tolist(), num_computed
    blocks.preempt(seq)
    moves = blocks.take_copies()
    assert moves.swap_outs == list(zip(table[:num_blocks], space.host_block_ids(seq), strict=True))
    assert (seq in space, seq.num_computed_tokens, blocks.num_used_blocks) == (True, num_computed, 0)
    assert blocks.try_admit(seq)
    assert blocks.take_copies().swap_ins == [
        (host, block_id) for (_, host), block_id in zip(moves.swap_outs, seq.block_table, strict=True)
    ]
    assert space.num_free_blocks == 10


@pytest.mark.parametrize(
    ("tables", "new_tables", "pairs"),
    [
        ([[7, 3, 5]], [[2, 9, 4]], [(0, 2), (1, 9), (2, 4)]),
        # the blocks of a window are the last ones of its table
        ([[7, 3, 5], [0, 0, 4]], [[2, 9, 8], [0, 0, 6]], [(0, 2), (1, 9), (2, 8), (3, 6)]),
        # the second block has left the window meanwhile
        ([[7, 3, 5], [0, 1, 4]], [[2, 9, 8], [0, 0, 6]], [(0, 2), (1, 9), (2, 8), (4, 6)]),
    ],
)
def test_copies_in_pair_up_with_the_new_tables(tables, new_tables, pairs):
    space, seq = SwapSpace(10), make_seq()
    assert space.try_swap_out(seq, tables)
    space.take_moves()
    kept = list(space.host_block_ids(seq))
    space.swap_in(seq, new_tables)
    assert space.take_moves() == ([], [(kept[i], block_id) for i, block_id in pairs])
    assert space.host_block_ids(seq) == []
    assert space.num_free_blocks == 10


def test_a_step_without_chunks_copies_nothing_out():
    """The scheduler never preempts without a chunk (`test_schedule_search.py`): its copies would have no step."""
    blocks = BlockManager(4, 4, swap_space=SwapSpace(9))
    seq = Sequence("seq", [1, 2, 3, 4, 5], SamplingParams())
    assert blocks.try_admit(seq)
    assert blocks.try_allocate(seq, 5)
    seq.num_computed_tokens = 5
    blocks.complete(Step(), blocks.take_copies())
    blocks.preempt(seq)
    moves = blocks.take_copies()
    with pytest.raises(AssertionError):
        blocks.complete(Step(), moves)


@pytest.mark.parametrize("num_slots", [0, 3])
def test_sequence_that_does_not_fit_changes_nothing(num_slots):
    space, has_state = SwapSpace(3, num_slots), num_slots > 0
    small, large = make_seq(), make_seq()
    assert space.try_swap_out(small, [[1, 2]], has_state)
    moves = space.take_moves()
    assert not space.try_swap_out(large, [[3, 4]], has_state)
    assert (space.host_block_ids(large), space.num_free_blocks, space.take_moves()) == ([], 1, ([], []))
    assert space.num_free_slots == num_slots - has_state
    assert len(moves[0]) == 2
    space.drop(small)
    assert space.num_free_slots == num_slots
    assert space.try_swap_out(large, [[3, 4]], has_state)


def test_sequence_whose_state_does_not_fit_changes_nothing():
    space, first, second = SwapSpace(9, 1), make_seq(), make_seq()
    assert space.try_swap_out(first, [[1, 2]], has_state=True)
    assert space.slot_of(first) == -1
    space.take_moves()
    assert not space.try_swap_out(second, [[3, 4]], has_state=True)
    assert (second in space, space.num_free_blocks, space.take_moves()) == (False, 7, ([], []))


def test_sequence_of_which_nothing_is_computed_is_not_swapped():
    space = SwapSpace(5)
    assert not space.try_swap_out(make_seq(), [[], []])
    assert space.num_free_blocks == 5


def test_dropping_is_harmless_where_nothing_is_kept():
    space = SwapSpace(3)
    seq = make_seq()
    space.drop(seq)
    assert space.num_free_blocks == 3
    assert space.try_swap_out(seq, [[1, 2]])
    space.drop(seq)
    space.drop(seq)
    assert space.num_free_blocks == 3
    assert space.host_block_ids(seq) == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_failed_step_names_the_sequences_that_it_was_to_copy_out(is_taken):
    space, early, seq = SwapSpace(9), make_seq(), make_seq()
    assert space.try_swap_out(early, [[1, 2]])
    for _ in range(2):  # the step has run, and another one
        space.take_moves()
    assert space.try_swap_out(seq, [[3]])
    if is_taken:
        space.take_moves()
    assert space.forget_step() == [seq]
    assert space.take_moves() == ([], [])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_what_comes_back_is_what_went_out(data):
    """Random traffic: each block of both memories is played by a dict, and each block's contents have a name."""
    space = SwapSpace(data.draw(st.integers(0, 8)))
    device, host, kept, next_block = {}, {}, {}, 1  # block 0 is the null block
    for step in range(data.draw(st.integers(1, 12))):
        if not kept or data.draw(st.booleans()):
            blocks = list(range(next_block, next_block + data.draw(st.integers(1, 4))))
            next_block += len(blocks)
            device.update({block: f"{step}:{i}" for i, block in enumerate(blocks)})
            seq = make_seq()
            has_room = len(blocks) <= space.num_free_blocks
            assert space.try_swap_out(seq, [blocks]) == has_room
            if has_room:
                kept[seq] = [device[block] for block in blocks]
        else:
            seq = data.draw(st.sampled_from(list(kept)))
            contents = kept.pop(seq)
            if data.draw(st.booleans()):
                space.drop(seq)
            else:
                blocks = list(range(next_block, next_block + len(contents)))
                next_block += len(blocks)
                space.swap_in(seq, [blocks])
                _, ins = space.take_moves()
                device.update({to: host[source] for source, to in ins})
                assert [device[block] for block in blocks] == contents
        outs, ins = space.take_moves()
        assert ins == []
        host.update({to: device[source] for source, to in outs})
        used = [block for seq in kept for block in space.host_block_ids(seq)]
        assert len(used) == len(set(used)) == space.num_blocks - space.num_free_blocks
        assert {seq: [host[block] for block in space.host_block_ids(seq)] for seq in kept} == kept
