"""States in host memory: which sequence may come back, how the memory is divided, and which bits are copied.

Random traffic is in `test_slots.py`, all schedules of few requests are in `test_schedule_search.py`.
"""

import pytest
import torch

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.execution.state_pool import StatePool
from nanovllm_extras.execution.transfers import Transfers
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.models.layer_inputs import StateShape
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from tests.extras.states import state_traffic

SHAPE = StateShape(num_layers=3, conv=(3, 10), recurrent=(2, 4, 5))


def make_scheduler(num_host_blocks, num_host_slots, num_blocks=4, num_slots=2, **options):
    space = SwapSpace(num_host_blocks, num_host_slots)
    return state_traffic.make_scheduler(num_blocks, 4, num_slots, (9, 64, 20), space=space, **options), space


def add(scheduler, num_tokens, first_token):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seq = Sequence(str(first_token), list(range(first_token, first_token + num_tokens)), params)
    scheduler.add(seq)
    return seq


def step(scheduler):
    """Run a step -> its copies of blocks out and in, those of states, and the slots of the sequences"""
    scheduled = scheduler.schedule()
    scheduler.update(scheduled, [7] * len(scheduled.samples))
    moves = scheduled.copies
    return moves.swap_outs, moves.swap_ins, moves.state_copies, moves.slots


def run_until_preempted(scheduler, seq):
    """Step until `seq`, which runs, is preempted -> its slot before that step, and what the step has done"""
    while seq in scheduler.running:
        slot = scheduler.block_manager.states.owned[seq]
        done = step(scheduler)
    return slot, done


def test_a_state_goes_out_and_comes_back():
    """The first sequence needs the blocks of the second one. When it ends, the second one goes on where it was."""
    scheduler, space = make_scheduler(num_host_blocks=5, num_host_slots=2)
    first, second = add(scheduler, 7, first_token=10), add(scheduler, 7, first_token=30)
    step(scheduler)
    slot, (outs, ins, copies, slots) = run_until_preempted(scheduler, second)
    assert (len(outs), ins) == (2, [])
    assert copies[-1] == (slot, -1)
    assert slots == [scheduler.block_manager.states.owned[first]]
    assert (space.num_free_blocks, space.num_free_slots) == (3, 1)
    assert second.num_computed_tokens == 8
    assert scheduler.block_manager.states.num_free_slots == 1, "the second one owns none"
    while first.finish_reason is None:
        step(scheduler)
    outs, ins, copies, slots = step(scheduler)
    assert (outs, len(ins)) == ([], 2)
    assert copies[-1] == (-1, slots[0])
    assert second.num_computed_tokens == 9, "nothing is computed again"
    assert (space.num_free_blocks, space.num_free_slots) == (5, 2)
    assert scheduler.block_manager.observer.num_swaps == 1


@pytest.mark.parametrize(("num_host_blocks", "num_host_slots"), [(5, 0), (1, 2)])
def test_without_a_host_slot_or_host_blocks_a_sequence_is_computed_again(num_host_blocks, num_host_slots):
    scheduler, space = make_scheduler(num_host_blocks, num_host_slots)
    _, second = add(scheduler, 7, first_token=10), add(scheduler, 7, first_token=30)
    step(scheduler)
    _, (outs, ins, copies, _) = run_until_preempted(scheduler, second)
    assert (outs, ins) == ([], [])
    assert all(source > 0 and destination > 0 for source, destination in copies)
    assert second.num_computed_tokens == 0
    assert (space.num_free_blocks, space.num_free_slots) == (num_host_blocks, num_host_slots)
    assert scheduler.block_manager.observer.num_swaps == 0


def test_a_swapped_sequence_waits_for_a_slot():
    """Shorter prompts go first, so the third sequence takes the slot that the second one has lost."""
    scheduler, _ = make_scheduler(5, 2, num_blocks=50, policy=lambda seq: seq.num_prompt_tokens)
    first, second = add(scheduler, 7, first_token=10), add(scheduler, 8, first_token=30)
    step(scheduler)
    scheduler.running.remove(second)
    scheduler.preempt(second, needy=first)
    scheduler.waiting.insert(0, second)
    third = add(scheduler, 3, first_token=50)
    while not third.finish_reason and not first.finish_reason:
        step(scheduler)
        assert second in scheduler.waiting, "there are blocks and places, but two slots only"
    step(scheduler)
    assert second in scheduler.running
    assert second.num_computed_tokens == 8, "the first half of the prompt is not computed again"


def test_a_snapshot_is_dropped_for_a_sequence_that_comes_back():
    scheduler, _ = make_scheduler(5, 2, num_blocks=50)
    first, second = add(scheduler, 7, first_token=10), add(scheduler, 8, first_token=30)
    step(scheduler)
    step(scheduler)
    scheduler.running.remove(second)
    scheduler.preempt(second, needy=first)
    scheduler.finish(first, "abort")
    third = add(scheduler, 9, first_token=50)
    step(scheduler)  # it computes 8 tokens, where a snapshot is due
    snapshots = scheduler.block_manager.states.snapshots
    assert len(snapshots) == scheduler.block_manager.states.num_free_slots == 1
    scheduler.waiting.insert(0, second)
    _, ins, copies, _ = step(scheduler)
    assert scheduler.running == [second, third]
    assert (len(ins), len(snapshots)) == (2, 0)
    assert copies[-1][0] == -1


# ---- memory


def make_memory(num_bytes, max_num_seqs=3, dtype=torch.float32, num_slots=4, num_blocks=6):
    backend = TorchAttention(num_heads=2, num_kv_heads=1, head_dim=4, block_size=2)
    cache, pool = KVCache(backend, 2, dtype, torch.device("cpu")), StatePool(SHAPE, dtype, torch.device("cpu"))
    pool.num_slots = num_slots
    cache.allocate(num_blocks)
    pool.allocate()
    transfers = Transfers([cache], pool, num_bytes, max_num_seqs)
    transfers.allocate()
    return [cache.tensor, pool.conv, pool.recurrent], transfers


def test_half_of_the_space_is_for_states():
    state, block = SHAPE.bytes_per_slot(torch.float32), 2 * 2 * 2 * 4 * 4
    assert state == 3 * 4 * (3 * 10 + 2 * 4 * 5)
    for num_bytes, max_num_seqs, num_slots, num_blocks in [
        (state + block, 3, 1, 1),
        (2 * state + block, 3, 1, (state + block) // block),
        (4 * state, 3, 2, 2 * state // block),
        (5 * state, 3, 2, 3 * state // block),
        (100 * state, 3, 3, 97 * state // block),
    ]:
        _, transfers = make_memory(num_bytes, max_num_seqs)
        assert (transfers.num_swap_slots, transfers.num_swap_blocks) == (num_slots, num_blocks)
        host = [one.tensor for one in (*transfers.host_blocks, *transfers.host_states)]
        assert sum(one.nbytes for one in host) == num_slots * state + num_blocks * block <= num_bytes
    with pytest.raises(ValueError, match=f"swap_space_bytes must be >= {state + block}, one state and one block"):
        make_memory(state + block - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_and_both_parts_of_a_state_come_back_bit_by_bit(dtype):
    tensors, transfers = make_memory(1 << 14, dtype=dtype)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    transfers.before(Moves(swap_outs=[(2, 0), (3, 5)], state_copies=[(1, 2), (3, -2), (2, -1)], slots=[4]))
    for tensor in tensors:
        tensor.zero_()
    transfers.before(Moves(swap_ins=[(5, 1), (0, 6)], state_copies=[(-1, 4), (-2, 1), (1, 3)], slots=[4]))
    expected = [torch.zeros_like(one) for one in before]
    expected[0][:, :, [1, 6]] = before[0][:, :, [3, 2]]
    for states, held in zip(expected[1:], before[1:], strict=True):
        states[:, 4], states[:, 1], states[:, 3] = held[:, 1], held[:, 3], held[:, 3]
    for tensor, one in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, one)
