"""Host blocks for preempted sequences: given once, copied out and back in pairs, and given up again.

Oracles: a dict of what each block holds, which plays both memories, and counts.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.block_tables import BlockTable
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.request_params import SamplingParams


def make_seq(num_tokens, block_ids, num_computed_tokens=None):
    seq = Sequence("seq", list(range(num_tokens)), SamplingParams())
    seq.num_computed_tokens = num_tokens if num_computed_tokens is None else num_computed_tokens
    for block_id in block_ids:
        seq.block_table.append(block_id)
    return seq


def give_table(seq, block_ids):
    seq.block_table = BlockTable()
    for block_id in block_ids:
        seq.block_table.append(block_id)


@pytest.mark.parametrize(("num_computed", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_that_hold_computed_tokens_are_copied_out(num_computed, num_blocks):
    """And no more: blocks at the end of the table may have been given for tokens that were never computed."""
    space = SwapSpace(10, 4)
    seq = make_seq(12, [7, 3, 5], num_computed)
    assert space.try_swap_out(seq)
    outs, ins = space.take_moves()
    assert outs == list(zip([7, 3, 5][:num_blocks], space.host_block_ids(seq), strict=True))
    assert ins == []
    assert space.num_free_blocks == 10 - num_blocks
    assert len(set(space.host_block_ids(seq))) == num_blocks
    assert set(space.host_block_ids(seq)) <= set(range(10))


def test_copies_in_pair_up_with_the_first_blocks_of_the_new_table():
    space = SwapSpace(10, 4)
    seq = make_seq(9, [7, 3, 5])
    assert space.try_swap_out(seq)
    space.take_moves()
    kept = list(space.host_block_ids(seq))
    give_table(seq, [2, 9, 4, 1])  # the fourth is for later tokens
    space.swap_in(seq)
    assert space.take_moves() == ([], list(zip(kept, [2, 9, 4], strict=True)))
    assert space.host_block_ids(seq) == []
    assert space.num_free_blocks == 10


def test_moves_are_taken_once():
    space = SwapSpace(10, 4)
    assert space.try_swap_out(make_seq(4, [1]))
    assert len(space.take_moves()[0]) == 1
    assert space.take_moves() == ([], [])


def test_sequence_that_does_not_fit_changes_nothing():
    space = SwapSpace(3, 4)
    small, large = make_seq(8, [1, 2]), make_seq(8, [3, 4])
    assert space.try_swap_out(small)
    moves = space.take_moves()
    assert not space.try_swap_out(large)
    assert (space.host_block_ids(large), space.num_free_blocks, space.take_moves()) == ([], 1, ([], []))
    assert len(moves[0]) == 2
    space.drop(small)
    assert space.try_swap_out(large)


def test_the_last_block_is_given_too():
    space = SwapSpace(2, 4)
    assert space.try_swap_out(make_seq(8, [1, 2]))
    assert space.num_free_blocks == 0


@pytest.mark.parametrize("num_blocks", [0, 5])
def test_sequence_of_which_nothing_is_computed_is_not_swapped(num_blocks):
    space = SwapSpace(num_blocks, 4)
    assert not space.try_swap_out(make_seq(8, [1, 2], num_computed_tokens=0))
    assert space.num_free_blocks == num_blocks


def test_dropping_is_harmless_where_nothing_is_kept():
    space = SwapSpace(3, 4)
    seq = make_seq(5, [1, 2])
    space.drop(seq)
    assert space.num_free_blocks == 3
    assert space.try_swap_out(seq)
    space.drop(seq)
    space.drop(seq)
    assert space.num_free_blocks == 3
    assert space.host_block_ids(seq) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_what_comes_back_is_what_went_out(data):
    """Random traffic: each block of both memories is played by a dict, and each block's contents have a name."""
    space = SwapSpace(data.draw(st.integers(0, 8)), 4)
    device, host, kept, next_block = {}, {}, {}, 1  # block 0 is the null block
    for step in range(data.draw(st.integers(1, 12))):
        if not kept or data.draw(st.booleans()):
            num_tokens = data.draw(st.integers(1, 16))
            blocks = list(range(next_block, next_block + -(-num_tokens // 4)))
            next_block += len(blocks)
            device.update({block: f"{step}:{i}" for i, block in enumerate(blocks)})
            seq = make_seq(num_tokens, blocks)
            has_room = len(blocks) <= space.num_free_blocks
            assert space.try_swap_out(seq) == has_room
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
                give_table(seq, blocks)
                space.swap_in(seq)
                _, ins = space.take_moves()
                device.update({to: host[source] for source, to in ins})
                assert [device[block] for block in blocks] == contents
        outs, ins = space.take_moves()
        assert ins == []
        host.update({to: device[source] for source, to in outs})
        used = [block for seq in kept for block in space.host_block_ids(seq)]
        assert len(used) == len(set(used)) == space.num_blocks - space.num_free_blocks
        assert {seq: [host[block] for block in space.host_block_ids(seq)] for seq in kept} == kept
