"""A K/V store of sequences with states, over a pool of a few blocks and slots.

Random traffic with stores that fail is in `test_slots.py`: the fake store keeps for each block the prefixes on which
its K and V depend, and for each snapshot the tokens that its state has seen. Engines with a store are in
`tests/extras/models/test_stored_states.py`.
"""

import random

import pytest
import torch

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.engine.prefix_misses import PrefixMisses
from nanovllm_extras.engine.watching import Observers
from nanovllm_extras.execution.state_pool import StatePool
from nanovllm_extras.execution.transfers import Transfers
from nanovllm_extras.kv_store.copies import copy_out
from nanovllm_extras.kv_store.share import name_of_state
from nanovllm_extras.models.layer_inputs import StateShape
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from tests.extras.fake_store import FakeStore
from tests.extras.states.state_traffic import Model, Traffic, make_scheduler


def test_the_traffic_loads_and_saves_states_with_stores_that_fail():
    """Also snapshots that are taken after their step: the blocks of outputs are registered later."""
    runs = [Traffic(random.Random(seed), "store", "overlap", "drafts") for seed in range(12)]
    for run in runs:
        for _ in range(150):
            run.act()
    longest_prompt = 7
    assert sum(run.num_late for run in runs) > 25
    assert sum(len(tokens) > longest_prompt for run in runs for tokens in run.store.states.values()) > 25
    assert sum(run.num_state_loads for run in runs) > 30
    assert sum(run.num_state_loads > 0 and run.store.rng is not None for run in runs) > 3
    assert sum(run.store.stats.num_loaded_blocks for run in runs) > 60
    assert sum(run.store.num_failures for run in runs) > 10


@pytest.mark.parametrize("features", [("overlap",), ("overlap", "drafts")], ids=" and ".join)
@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_the_last_block_of_an_answer_is_saved_by_the_next_step(max_tokens, features):
    """With overlap or drafts it is registered when no step follows that could save it."""
    run = Traffic(random.Random(0), "store", *features, sizes=(4, 30, 9))
    run.store.rng = None  # nothing fails
    seqs = [Sequence("", [first, 2, 3], SamplingParams(temperature=0, max_tokens=max_tokens)) for first in (1, 9)]
    for seq in seqs:
        run.scheduler.add(seq)
        while seq.finish_reason is None:
            run.step()
    names = run.store.names(seqs[0], 0, (3 + max_tokens - 1) // run.blocks.block_size)
    assert [name in run.store.kept for name in names] == [True] * len(names)


# ---- one sequence at a time, with blocks of 4


class Served(Model):
    """Serves one prompt after the other. The store never fails."""

    def __init__(self, num_blocks=6, num_slots=4, observer=None, **options):
        store = FakeStore(4, has_states=True)
        scheduler = make_scheduler(num_blocks, 4, num_slots, (1, 64, 32), observer=observer, store=store, **options)
        super().__init__(scheduler, store)
        self.blocks.observer.on_start(self.blocks)
        self.chunks = []

    def serve(self, prompt, max_tokens=1):
        seq = Sequence("", prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        self.chunks = []
        self.scheduler.add(seq)
        while seq.finish_reason is None:
            self.step()
        return seq

    def compute_chunk(self, seq, tokens, start, source, slot):
        super().compute_chunk(seq, tokens, start, source, slot)
        self.chunks.append((start, len(tokens)))

    def evict(self):
        """Serve other prompts, which take all blocks of the pool."""
        for i in range(3):
            self.serve([100 + i] * 19)

    def ends(self, prompt):
        """Return the numbers of tokens of `prompt` after which the store has a snapshot."""
        names = self.store.names(Sequence("", prompt, SamplingParams()), 0, len(prompt) // 4)
        return [4 * i for i, name in enumerate(names, 1) if name_of_state(name) in self.store.states]

    def lose(self, prompt, *ends):
        """Remove the snapshots after `ends` tokens of `prompt` from the store."""
        names = self.store.names(Sequence("", prompt, SamplingParams()), 0, len(prompt) // 4)
        for end in ends:
            del self.store.states[name_of_state(names[end // 4 - 1])]


PROMPT = list(range(18))


def test_what_was_pushed_out_of_the_pool_is_loaded():
    run = Served()
    assert run.serve(PROMPT, max_tokens=4).num_cached_tokens == 0
    assert run.ends(PROMPT) == [16]
    run.evict()
    again = run.serve(PROMPT, max_tokens=4)
    assert (again.num_cached_tokens, run.chunks[0]) == (16, (16, 18))
    assert (run.store.stats.num_loaded_blocks, run.store.stats.num_loaded_states) == (4, 1)
    assert run.store.stats.loaded_tokens == 16
    assert run.blocks.observer.prefix_cache_hit_tokens == 0, "of the pool"
    longer = run.serve([*PROMPT[:16], 50, 51, 52, 53, 54])
    assert (longer.num_cached_tokens, run.store.stats.num_loaded_states) == (16, 2), "the pool has only its blocks"


def test_the_example_of_the_docstring():
    run = Served(num_blocks=20, interval=1)
    run.serve(PROMPT)
    assert run.ends(PROMPT) == [4, 8, 12, 16]
    run.lose(PROMPT, 4, 8, 16)
    kept, states, run.store.kept, run.store.states = run.store.kept, run.store.states, {}, {}
    for i in range(8):
        run.serve([100 + i] * 19)
    run.states.snapshot_interval = 0
    run.serve(PROMPT[:5])
    run.serve([*PROMPT[:8], 60])  # it finds the snapshot after 4 tokens, and takes one after 8
    run.states._drop(list(run.states.snapshots)[-1], "forgotten")
    run.store.kept, run.store.states = kept, states
    other = [*PROMPT[:16], *range(70, 76)]
    names = run.store.names(Sequence("", other, SamplingParams()), 0, 4)
    assert [name in kept for name in names] == [True] * 4
    num_hits = run.blocks.observer.prefix_cache_hit_tokens
    assert run.serve(other).num_cached_tokens == 12
    assert run.store.stats.num_loaded_blocks == run.store.stats.num_loaded_states == 1
    assert run.blocks.observer.prefix_cache_hit_tokens == num_hits + 8, "two blocks of the pool"
    assert run.chunks == [(12, 16), (16, 20), (20, 22)], "a snapshot where the prompt leaves the known blocks"
    assert run.ends(other) == [12, 16, 20]


def test_a_prefix_of_the_store_without_a_snapshot_gets_one_from_its_second_prompt():
    """The pool has lost the prefix each time, so only the store shows where the prompts branch."""
    run = Served()
    prompts = [[*PROMPT[:9], *range(40 + 10 * i, 49 + 10 * i)] for i in range(3)]
    cached = []
    for prompt in prompts:
        cached.append(run.serve(prompt).num_cached_tokens)
        run.evict()
    assert cached == [0, 0, 8]
    assert run.ends(prompts[1]) == [8, 16]


def test_a_snapshot_is_saved_although_the_pool_has_no_slot_for_it():
    run = Served(num_slots=1)
    run.serve(PROMPT)
    assert len(run.states.snapshots) == 0
    assert run.serve(PROMPT).num_cached_tokens == 16
    assert run.store.stats.num_loaded_blocks == 0, "the blocks are in the pool"


def test_a_snapshot_that_the_pool_has_is_saved_once():
    run, saved = Served(num_blocks=20), []
    save = run.store.save_state
    run.store.save_state = lambda name, tokens: saved.append(tokens) or save(name, tokens)
    for _ in range(3):
        run.serve(PROMPT)
    assert saved == [PROMPT[:16]]


def test_an_earlier_snapshot_is_loaded_if_the_last_one_is_lost_meanwhile():
    run = Served(interval=1)
    run.serve(PROMPT)
    assert run.ends(PROMPT) == [4, 8, 12, 16]
    run.evict()
    load = run.store.load_state
    run.store.load_state = lambda name: None if len(run.store.states[name_of_state(name)]) == 16 else load(name)
    assert run.serve(PROMPT).num_cached_tokens == 12
    assert run.store.stats.num_loaded_blocks == 3


def test_an_earlier_snapshot_is_loaded_if_a_block_is_lost_meanwhile():
    run = Served(interval=2)
    run.serve(PROMPT)
    run.evict()
    load = run.store.load
    run.store.load = lambda name: None if len(run.store.kept[name][-1]) == 12 else load(name)
    assert run.serve(PROMPT).num_cached_tokens == 8
    assert (run.store.stats.num_loaded_blocks, run.store.stats.num_loaded_states) == (2, 1)


# ---- memory


def make_memory(dtype=torch.bfloat16, num_slots=4):
    shape = StateShape(num_layers=3, conv=(3, 7), recurrent=(2, 4, 5), hidden_size=6)
    backend = TorchAttention(num_heads=2, num_kv_heads=1, head_dim=4, block_size=2)
    cache, pool = KVCache(backend, 2, dtype, torch.device("cpu")), StatePool(shape, dtype, torch.device("cpu"))
    pool.num_slots = num_slots
    cache.allocate(6)
    pool.allocate()
    for tensor in (cache.tensor, *pool.states):
        tensor.copy_(torch.randn(tensor.shape))
    return cache, pool


class Kept:
    """Plays a `Saver` that keeps what it gets."""

    def save(self, tensors, saves, num_bytes):
        data = torch.cat([copy_out(one, [slot for _, slot in saves], None).data for one in tensors], dim=1)
        self.saved = {name: row for (name, _), row in zip(saves, data, strict=True)}
        assert {len(row) for row in self.saved.values()} == {num_bytes}


def test_a_snapshot_comes_back_bit_by_bit_after_the_copies_of_the_step():
    (cache, pool), saver = make_memory(), Kept()
    assert len(pool.states) == 3
    all_before = [states.clone() for states in pool.states]
    transfers, moves = Transfers([cache], pool), Moves()
    moves.state_saves = [("a", 1), ("b", 3)]
    transfers.save(moves, saver)
    # slot 4 is copied before it is loaded, and what an earlier step copies to slot 2 is replaced
    moves = Moves(state_copies=[(4, 1), (1, 2)], slots=[4, 2])
    moves.state_loads, moves.loaded = [("a", 4), ("b", 2)], saver.saved
    transfers.before(moves)
    for states, before in zip(pool.states, all_before, strict=True):
        expected = [before[:, i] for i in (0, 4, 3, 3, 1)]
        assert torch.equal(states, torch.stack(expected, dim=1))


# ---- why tokens were not found


def explaining():
    return Observers(SchedulingStats(), explanation=PrefixMisses())


def causes(seq):
    return [(miss.start, miss.end, miss.cause) for miss in seq.prefix_misses]


def test_tokens_have_no_snapshot_only_if_neither_pool_nor_store_has_one():
    run = Served(num_blocks=20, num_slots=1, observer=explaining(), interval=2)
    run.serve(PROMPT)
    assert len(run.states.snapshots) == 0
    assert causes(run.serve(PROMPT)) == [(16, 18, "partial_block")]
    run.lose(PROMPT, 16)
    assert causes(run.serve(PROMPT)) == [(8, 16, "no_snapshot"), (16, 18, "partial_block")]
    assert run.ends(PROMPT) == [8, 16], "it was taken again"
    run.lose(PROMPT, 8, 16)
    assert causes(run.serve(PROMPT)) == [(0, 16, "no_snapshot"), (16, 18, "partial_block")]


def test_what_was_evicted_and_loaded_is_no_miss():
    run = Served(observer=explaining())
    run.serve(PROMPT)
    run.serve([100] * 19)
    assert causes(run.serve(PROMPT)) == [(16, 18, "partial_block")]
    run.serve([100] * 19)
    run.store.states.clear()
    assert causes(run.serve(PROMPT)) == [(0, 4, "no_snapshot"), (4, 16, "evicted"), (16, 18, "partial_block")]
