"""Blocks are owned as often as tables say, prefix hits are never wrong, and eviction is least recently used.

Oracles: `fake_kv_cache.py`, which knows by its whole prefix what each slot holds, and counts over the block tables; for
which blocks must be hit, a table from whole prefixes to blocks. Keys of blocks are real, constant, weak, or blind for
the parent: a hit may be lost through a bad hash, but never be wrong.
"""

import time
from itertools import count

import pytest
from fake_kv_cache import FakeKVCache, check_cached_blocks, check_ownership, table_of, tokens_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import nanovllm.block_manager
from nanovllm.block_manager import BlockManager, hash_block
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence

HASHES = {
    "real": hash_block,
    "constant": lambda parent_hash, tokens: 7,
    "weak": lambda parent_hash, tokens: (parent_hash + sum(tokens)) % 3,
    "blind for the parent": lambda parent_hash, tokens: hash_block(0, tokens),
}


def make_seq(tokens, name="seq"):
    return Sequence(name, tokens, SamplingParams())


def start(manager, cache, tokens):
    """Admit a sequence and compute all of its tokens; it must fit."""
    seq = make_seq(tokens)
    assert manager.try_admit(seq)
    advance(manager, cache, seq, seq.num_tokens)
    return seq


def advance(manager, cache, seq, num_tokens):
    assert manager.try_allocate(seq, num_tokens)
    cache.write(seq, seq.num_computed_tokens, num_tokens)
    cache.check(seq, num_tokens)
    seq.num_computed_tokens = num_tokens


def num_hits(manager, tokens):
    """How many blocks a sequence that begins with `tokens` would find; changes nothing."""
    return len(manager._find_prefix(make_seq([*tokens, 99])))


# ---- random use, against the oracle


class Known:
    """What the oracle expects of a registered block; `parent` is the one before it."""

    def __init__(self, block_id, parent):
        self.block_id = block_id
        self.parent = parent


class BlockManagerMachine(RuleBasedStateMachine):
    """Random sequences over two or three token ids, so that prefixes repeat, in a pool that runs out."""

    hash_name = "real"

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(nanovllm.block_manager, "hash_block", HASHES[self.hash_name])
        self.names = count()
        self.waiting = []
        self.running = []
        self.known = {}  # whole prefix -> Known
        self.parent = {}  # sequence -> Known, of its last registered block

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(1, 9))
    def make(self, block_size, num_blocks):
        self.manager = BlockManager(num_blocks, block_size)
        self.cache = FakeKVCache(block_size)

    # ---- what the scheduler does

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def add(self, tokens):
        self.waiting.append(make_seq(tokens[: self.manager.capacity], f"seq-{next(self.names)}"))

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def add_alike(self, data):
        """A sequence that begins as another does: at random, few prefixes would repeat."""
        tokens = tokens_of(data.draw(st.sampled_from(self.waiting + self.running)))
        tail = data.draw(st.lists(st.integers(0, 2), max_size=3))
        self.add((tokens[: data.draw(st.integers(1, len(tokens)))] + tail)[:12])

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), is_failure=st.integers(0, 4).map(lambda n: n == 4))
    def step(self, data, is_failure):
        """Up to three sequences get tokens, some maybe on blocks that others fill in this step; or the step fails."""
        chunks = {}
        for _ in range(data.draw(st.integers(1, 3))):
            is_new = bool(self.waiting) and (not self.running or data.draw(st.booleans()))
            candidates = self.waiting if is_new else [seq for seq in self.running if seq not in chunks]
            if not candidates:
                break
            seq = data.draw(st.sampled_from(candidates))
            if is_new and not self.try_admit(seq):
                break
            if seq.num_computed_tokens == seq.num_tokens:
                seq.append_token(data.draw(st.integers(0, 2)))
            num_tokens = data.draw(st.integers(seq.num_computed_tokens + 1, seq.num_tokens))
            if not self.schedule(seq, num_tokens):
                assert not is_new, "an admitted sequence fits"
                break
            chunks[seq] = num_tokens
        if is_failure:
            self.fail(chunks)
            return
        for seq, num_tokens in chunks.items():
            self.cache.write(seq, seq.num_computed_tokens, num_tokens)
        for seq, num_tokens in chunks.items():
            self.cache.check(seq, num_tokens)
            seq.num_computed_tokens = num_tokens

    def fail(self, chunks):
        """The forward pass dies: nothing that it should have filled may be hit later."""
        for seq, num_tokens in chunks.items():
            self.cache.spoil(seq, seq.num_computed_tokens, num_tokens)
            self.manager.unregister(seq, seq.num_computed_tokens)
            self.forget(table_of(seq)[seq.num_computed_tokens // self.manager.block_size :])
        for seq in chunks:
            self.take_back(seq)
            self.waiting.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        seq = data.draw(st.sampled_from(self.running))
        self.take_back(seq)
        self.waiting.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.take_back(data.draw(st.sampled_from(self.running)))

    @rule()
    def reset_prefix_cache(self):
        self.manager.reset_prefix_cache()
        self.known.clear()

    # ---- what the oracle expects of it

    def try_admit(self, seq):
        size = self.manager.block_size
        hits, tokens = self.expected_hits(seq), tokens_of(seq)
        num_free = self.manager.num_free_blocks
        num_needed = -(-seq.num_tokens // size)
        is_admitted = self.manager.try_admit(seq)
        table = table_of(seq)
        if self.hash_name == "real":
            owned = {block_id for other in self.running for block_id in table_of(other)}
            num_shared = sum(known.block_id in owned for known in hits)
            assert is_admitted == (num_needed - num_shared <= num_free)
            assert not is_admitted or table == [known.block_id for known in hits]
        assert is_admitted or (not table and num_needed > num_free)
        if is_admitted:
            assert seq.num_computed_tokens == len(table) * size < len(tokens), "the last token is always computed"
            self.waiting.remove(seq)
            self.running.append(seq)
            self.parent[seq] = hits[-1] if hits else None

    def expected_hits(self, seq):
        """The longest run of known blocks, each registered on top of the one before it, short of the last token."""
        tokens, size = tokens_of(seq), self.manager.block_size
        hits = []
        for stop in range(size, len(tokens), size):
            known = self.known.get(tuple(tokens[:stop]))
            if known is None or known.parent is not (hits[-1] if hits else None):
                break
            hits.append(known)
        return hits

    def schedule(self, seq, num_tokens):
        """Give blocks for the first `num_tokens` tokens; the full ones are known from now on. False if blocks ran out."""
        before, num_free = table_of(seq), self.manager.num_free_blocks
        num_new = max(0, -(-num_tokens // self.manager.block_size) - len(before))
        has_room = self.manager.try_allocate(seq, num_tokens)
        table = table_of(seq)
        assert has_room == (num_new <= num_free)
        assert table[: len(before)] == before, "block tables are append-only"
        assert len(table) == len(before) + (num_new if has_room else 0)
        if has_room:
            self.forget(table[len(before) :])
            for i in range(seq.num_computed_tokens // self.manager.block_size, num_tokens // self.manager.block_size):
                prefix = tuple(tokens_of(seq)[: (i + 1) * self.manager.block_size])
                known = self.known.get(prefix)
                if known is None or known.parent is not self.parent[seq]:
                    known = self.known[prefix] = Known(table[i], self.parent[seq])
                self.parent[seq] = known
        return has_room

    def take_back(self, seq):
        self.manager.free(seq)
        assert len(table_of(seq)) == seq.num_computed_tokens == 0
        self.running.remove(seq)

    def forget(self, block_ids):
        self.known = {prefix: known for prefix, known in self.known.items() if known.block_id not in block_ids}

    # ---- what always holds

    @invariant()
    def every_block_is_free_or_owned(self):
        if hasattr(self, "manager"):
            check_ownership(self.manager, self.running + self.waiting)

    @invariant()
    def cached_blocks_hold_what_they_stand_for(self):
        if hasattr(self, "manager"):
            check_cached_blocks(self.manager, self.cache)
            if self.hash_name == "real":
                assert set(self.manager._cached_by_id) == {known.block_id for known in self.known.values()}

    def teardown(self):
        if hasattr(self, "manager"):
            for seq in list(self.running):
                self.take_back(seq)
            check_ownership(self.manager, [])
            everything = make_seq([3] * self.manager.capacity)
            assert self.manager.try_admit(everything), "a leak"
            assert self.manager.try_allocate(everything, everything.num_tokens), "a leak"
        self.patch.undo()


class ConstantHashMachine(BlockManagerMachine):
    hash_name = "constant"


class WeakHashMachine(BlockManagerMachine):
    hash_name = "weak"


class BlindHashMachine(BlockManagerMachine):
    hash_name = "blind for the parent"


SETTINGS = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
TestRealHash = BlockManagerMachine.TestCase
TestConstantHash = ConstantHashMachine.TestCase
TestWeakHash = WeakHashMachine.TestCase
TestBlindHash = BlindHashMachine.TestCase
TestRealHash.settings = TestConstantHash.settings = TestWeakHash.settings = TestBlindHash.settings = SETTINGS


# ---- prefix hits, by hand


@pytest.fixture(params=HASHES)
def any_hash(request, monkeypatch):
    monkeypatch.setattr(nanovllm.block_manager, "hash_block", HASHES[request.param])
    return request.param


@pytest.mark.parametrize("block_size", [1, 4])
def test_same_block_after_another_prefix_is_no_hit(any_hash, block_size):
    """A+X and B+Y are cached: B+X has B's block and not X's, which was computed after A."""
    a, b, x, y = ([token] * block_size for token in (1, 2, 3, 4))
    manager, cache = BlockManager(8, block_size), FakeKVCache(block_size)
    for tokens in (a + x, b + y):
        manager.free(start(manager, cache, tokens))
    assert num_hits(manager, b + x) <= 1
    if any_hash == "real":
        assert num_hits(manager, b + x) == 1
        assert num_hits(manager, a + x) == num_hits(manager, b + y) == 2
    start(manager, cache, [*b, *x, 9])  # its slots are checked against its own prefix


def test_colliding_blocks_replace_each_other_without_a_trace(any_hash):
    manager, cache = BlockManager(3, 2), FakeKVCache(2)
    for tokens in ([1, 1, 2, 2, 5], [3, 3, 2, 2, 5], [1, 1, 2, 2, 5], [2, 2, 1, 1, 5]):
        manager.free(start(manager, cache, tokens))
        check_ownership(manager, [])
        check_cached_blocks(manager, cache)


def test_parent_that_was_evicted_and_computed_anew_does_not_adopt_old_children():
    """A twin's child hangs on a parent that is gone; the parent's successor has another identity."""
    manager, cache = BlockManager(6, 2), FakeKVCache(2)
    first, twin = make_seq([1, 1]), make_seq([1, 1, 2, 2, 7])
    assert manager.try_admit(first)
    assert manager.try_admit(twin)  # before `first` is registered: it gets its own copy of block [1, 1]
    advance(manager, cache, first, 2)
    advance(manager, cache, twin, 5)
    manager.free(first)
    manager.free(start(manager, cache, [8, 8, 8, 8, 8, 8]))  # evicts the block that the child's parent names
    assert num_hits(manager, [1, 1, 2, 2]) == 0
    start(manager, cache, [1, 1, 4])
    assert num_hits(manager, [1, 1, 2, 2]) == 1


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_at_least_one_token_is_computed_when_all_are_cached(num_tokens):
    tokens = list(range(num_tokens))
    manager, cache = BlockManager(8, 4), FakeKVCache(4)
    manager.free(start(manager, cache, tokens))
    again = make_seq(tokens)
    assert manager.try_admit(again)
    assert again.num_computed_tokens == (num_tokens - 1) // 4 * 4
    assert 1 <= num_tokens - again.num_computed_tokens <= 4


def test_shared_block_is_one_block_until_its_last_owner_leaves():
    manager, cache = BlockManager(8, 2), FakeKVCache(2)
    first = start(manager, cache, [1, 2, 3])
    second = start(manager, cache, [1, 2, 4])
    assert table_of(first)[0] == table_of(second)[0]
    assert manager.num_used_blocks == 3
    manager.free(first)
    check_ownership(manager, [second])
    manager.free(second)
    check_ownership(manager, [])


def test_block_that_is_not_full_is_not_shared():
    manager, cache = BlockManager(8, 4), FakeKVCache(4)
    start(manager, cache, [1, 2, 3])
    assert start(manager, cache, [1, 2, 3, 4, 5]).num_computed_tokens == 5
    assert manager.num_references == manager.num_used_blocks


def test_generated_tokens_are_cached_too():
    manager, cache = BlockManager(8, 2), FakeKVCache(2)
    seq = start(manager, cache, [1, 2, 3])
    for token in (4, 5, 6):
        seq.append_token(token)
        advance(manager, cache, seq, seq.num_tokens)
    manager.free(seq)
    assert num_hits(manager, [1, 2, 3, 4, 5, 6]) == 3


def test_without_prefix_caching_nothing_is_found():
    manager, cache = BlockManager(8, 2, enable_prefix_caching=False), FakeKVCache(2)
    manager.free(start(manager, cache, [1, 2, 3, 4]))
    assert num_hits(manager, [1, 2, 3, 4]) == 0
    check_ownership(manager, [])


def test_reset_forgets_what_is_cached_and_leaves_running_sequences_alone():
    manager, cache = BlockManager(8, 2), FakeKVCache(2)
    running = start(manager, cache, [1, 2, 3, 4])
    manager.reset_prefix_cache()
    assert num_hits(manager, [1, 2, 3, 4]) == 0
    check_ownership(manager, [running])
    running.append_token(5)
    running.append_token(6)
    advance(manager, cache, running, 6)
    assert num_hits(manager, [1, 2, 3, 4, 5, 6]) == 0, "its first blocks were forgotten, so nobody gets at the third"
    check_cached_blocks(manager, cache)


def test_refused_admission_changes_nothing():
    manager, cache = BlockManager(3, 2), FakeKVCache(2)
    manager.free(start(manager, cache, [1, 2, 3]))
    running = start(manager, cache, [7, 8, 9])
    waiting = make_seq([1, 2, 3])  # its one cached block is among the free ones, and it needs another: one too many
    free_before = list(manager._free)
    assert len(free_before) == 1
    assert not manager.try_admit(waiting)
    assert list(manager._free) == free_before
    assert waiting.num_computed_tokens == len(table_of(waiting)) == 0
    check_ownership(manager, [running])


# ---- eviction


def test_freed_blocks_are_hit_until_they_are_handed_out_again():
    manager, cache = BlockManager(4, 2), FakeKVCache(2)
    manager.free(start(manager, cache, [1, 1, 2, 2]))
    assert manager.num_free_blocks == 4
    assert num_hits(manager, [1, 1, 2, 2]) == 2
    manager.free(start(manager, cache, [5, 5, 6, 6]))  # two blocks that held nothing
    assert num_hits(manager, [1, 1, 2, 2]) == 2
    manager.free(start(manager, cache, [7, 7, 8, 8]))
    assert num_hits(manager, [1, 1, 2, 2]) == 0


def test_least_recently_used_goes_first():
    manager, cache = BlockManager(3, 2), FakeKVCache(2)
    for token in (1, 2, 3):
        manager.free(start(manager, cache, [token, token]))
    # the oldest is used again: a hit, whose owner leaves the block behind as the newest
    seq = make_seq([1, 1, 9])
    assert manager.try_admit(seq)
    assert seq.num_computed_tokens == 2
    manager.free(seq)
    remaining = [[1], [2], [3]]
    for new_token, evicted in ((5, 2), (6, 3), (7, 1)):
        manager.free(start(manager, cache, [new_token, new_token]))
        remaining.remove([evicted])
        assert [[token] for token in (1, 2, 3) if num_hits(manager, [token, token])] == remaining


def test_tail_of_a_prefix_is_evicted_before_its_head():
    manager, cache = BlockManager(4, 2), FakeKVCache(2)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4]
    manager.free(start(manager, cache, tokens))
    holders = []
    for num_left in (3, 2, 1, 0):
        seq = make_seq([50 + num_left])
        assert manager.try_admit(seq)
        assert manager.try_allocate(seq, 1)
        holders.append(seq)
        assert num_hits(manager, tokens) == num_left
    check_ownership(manager, holders)


def test_blocks_that_nobody_can_hit_are_reused_first():
    manager, cache = BlockManager(3, 2), FakeKVCache(2)
    manager.free(start(manager, cache, [1, 1, 2, 2]))
    manager.free(start(manager, cache, [3]))  # its block is not full, so not cached
    manager.free(start(manager, cache, [4]))
    assert num_hits(manager, [1, 1, 2, 2]) == 2


def test_evicted_block_leaves_no_entry_behind():
    manager, cache = BlockManager(2, 2), FakeKVCache(2)
    for token in range(20):
        manager.free(start(manager, cache, [token, token, token + 1, token + 1]))
        check_cached_blocks(manager, cache)
    assert len(manager._cached_by_hash) == 2
    for token in range(19):
        assert num_hits(manager, [token, token]) == 0


def test_block_in_use_is_never_evicted():
    manager, cache = BlockManager(4, 2), FakeKVCache(2)
    running = start(manager, cache, [1, 1, 2, 2])
    for token in range(5, 15):
        manager.free(start(manager, cache, [token, token, token]))
        cache.check(running, 4)
    assert num_hits(manager, [1, 1, 2, 2]) == 2


# ---- what it costs


def test_each_block_is_hashed_once_in_the_life_of_its_sequence(monkeypatch):
    calls = []

    def counting_hash(parent_hash, tokens):
        calls.append(tokens)
        return hash_block(parent_hash, tokens)

    monkeypatch.setattr(nanovllm.block_manager, "hash_block", counting_hash)
    manager, cache = BlockManager(10, 2), FakeKVCache(2)
    neighbour = start(manager, cache, [90, 91] * 4)
    calls.clear()

    seq = make_seq(list(range(13)))
    for _ in range(3):
        assert not manager.try_admit(seq)
    manager.free(neighbour)
    assert manager.try_admit(seq)
    for num_tokens in (3, 4, 10, 13):
        advance(manager, cache, seq, num_tokens)
    manager.free(seq)  # preempted
    assert manager.try_admit(seq)
    assert seq.num_computed_tokens == 12
    advance(manager, cache, seq, 13)
    for token in range(13, 18):
        seq.append_token(token)
        advance(manager, cache, seq, seq.num_tokens)
    manager.free(seq)
    manager.reset_prefix_cache()
    assert manager.try_admit(seq)
    advance(manager, cache, seq, seq.num_tokens)
    assert len(calls) == len(set(calls)) == seq.num_tokens // 2


def full_pool(num_blocks):
    """All blocks free, cached, and of sequences of two blocks each."""
    manager = BlockManager(num_blocks, 1)
    for first in range(0, num_blocks, 2):
        seq = make_seq([first, first + 1])
        assert manager.try_admit(seq)
        assert manager.try_allocate(seq, 2)
        manager.free(seq)
    assert len(manager._cached_by_id) == num_blocks
    return manager


def seconds_of_use(manager):
    """Evictions at the front of the free queue, hits in its middle, frees at both ends; the best of several tries."""
    tokens = count(10_000_000)
    best = float("inf")
    for attempt in range(8):
        new = [make_seq([next(tokens)]) for _ in range(20)]
        middle = manager.num_blocks // 2 + 4 * attempt
        old = [make_seq([middle + 2 * i, middle + 2 * i + 1]) for i in range(2)]
        begin = time.perf_counter()
        for seq in new:
            assert manager.try_admit(seq)
            assert manager.try_allocate(seq, 1)
        for seq in old:
            assert manager.try_admit(seq)
            assert seq.num_computed_tokens == 1
        for seq in new + old:
            manager.free(seq)
        best = min(best, time.perf_counter() - begin)
    return best


def test_cost_of_a_block_does_not_grow_with_the_pool():
    """A thousand times the blocks: whatever scans them takes hundreds of times longer."""
    small, large = full_pool(400), full_pool(200_000)
    assert seconds_of_use(large) < 20 * seconds_of_use(small)
