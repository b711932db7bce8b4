"""Blocks are owned as often as tables say, written by one sequence only, and prefix hits are never wrong.

Oracles: `fake_kv_cache.py`, which knows by its whole prefix what each slot holds, and counts over the block tables; for
which blocks must be hit, a table from whole prefixes to blocks. Keys of blocks are real, constant, weak, or blind for
the parent: a hit may be lost through a bad hash, but never be wrong.
"""

import time
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import nanovllm.prefix_cache
from nanovllm.block_manager import BlockManager
from nanovllm.prefix_cache import hash_block
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm_testing.fake_kv_cache import (
    FakeKVCache,
    WriterCheck,
    check_cached_blocks,
    check_ownership,
    stored_slots,
    table_of,
    tokens_of,
)

HASHES = {
    "real": hash_block,
    "constant": lambda parent_hash, tokens: 7,
    "weak": lambda parent_hash, tokens: (parent_hash + sum(tokens)) % 3,
    "blind for the parent": lambda parent_hash, tokens: hash_block(0, tokens),
}


def make_seq(tokens, name="seq", **params):
    return Sequence(name, tokens, SamplingParams(**params))


def start(manager, cache, tokens):
    """Admit a sequence and compute all of its tokens in a step of its own; it must fit."""
    seq = make_seq(tokens)
    assert manager.try_admit(seq)
    advance(manager, cache, seq, seq.num_tokens)
    return seq


def advance(manager, cache, seq, num_tokens):
    assert manager.try_allocate(seq, num_tokens)
    cache.copy(manager.take_copies())
    cache.write(seq, seq.num_computed_tokens, num_tokens)
    cache.check(seq, num_tokens)
    seq.num_computed_tokens = num_tokens


def append(manager, cache, seq, *tokens):
    """Decode: each token in a step of its own."""
    for token in tokens:
        seq.append_token(token)
        advance(manager, cache, seq, seq.num_tokens)


def fork(manager, parent, name="child"):
    child = make_seq(tokens_of(parent), name)
    manager.fork(parent, child)
    return child


def num_hits(manager, tokens):
    """How many blocks a sequence that begins with `tokens` would find; changes nothing."""
    return len(manager.prefix_cache.find(make_seq([*tokens, 99])))


# ---- random use, against the oracle


TOKENS = (0, 1, 2, 3)


class Known:
    """What the oracle expects of a registered block; `parent` is the one before it."""

    def __init__(self, block_id, parent):
        self.block_id = block_id
        self.parent = parent


class BlockManagerMachine(RuleBasedStateMachine):
    """Random sequences over few token ids, so that prefixes repeat, in a pool that runs out.

    A step's actions come in any order that a scheduler could choose, and more: sequences are admitted, get tokens, and
    those without a token in this step are preempted; then the step runs. In between sequences are forked, also in
    the middle of their prompt, and end.
    """

    hash_name = "real"
    ways_to_preempt = ("preempt",)

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(nanovllm.prefix_cache, "hash_block", HASHES[self.hash_name])
        self.names = count()
        self.waiting = []
        self.running = []
        self.known = {}  # whole prefix -> Known
        self.registered = {}  # running sequence -> (how many of its blocks are, Known of the last)

    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(1, 9))
    def make(self, block_size, num_blocks):
        self.size = block_size
        self.manager = self.make_manager(num_blocks, block_size)
        self.cache = self.make_cache(block_size)

    def make_manager(self, num_blocks, block_size):
        return BlockManager(num_blocks, block_size)

    def make_cache(self, block_size):
        return FakeKVCache(block_size)

    def make_seq(self, tokens):
        return make_seq(tokens, f"seq-{next(self.names)}")

    @property
    def seqs(self):
        return self.running + self.waiting

    # ---- what the scheduler does between two steps

    @rule(tokens=st.lists(st.sampled_from(TOKENS[:3]), min_size=1, max_size=12))
    def add(self, tokens):
        self.waiting.append(self.make_seq(tokens[: self.manager.capacity]))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def add_alike(self, data):
        """A sequence that begins as another does, often in whole blocks, or goes on as it does behind another token."""
        tokens = tokens_of(data.draw(st.sampled_from(self.seqs)))
        tokens[0] = data.draw(st.sampled_from([tokens[0], tokens[0], TOKENS[-1]]))
        length = data.draw(st.integers(1, len(tokens)))
        if data.draw(st.booleans()):
            length = max(1, length // self.size * self.size)
        self.add((tokens[:length] + data.draw(st.lists(st.sampled_from(TOKENS), max_size=3)))[:12])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.running))
        child = self.make_seq(tokens_of(parent))
        self.manager.fork(parent, child)
        assert table_of(child) == table_of(parent), "it shares all blocks, the last one included"
        assert child.num_computed_tokens == parent.num_computed_tokens
        self.running.append(child)
        self.registered[child] = self.registered[parent]

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def finish(self, data):
        seq = data.draw(st.sampled_from(self.seqs))
        if seq in self.running:
            self.take_back(seq)
        self.waiting = [other for other in self.waiting if other is not seq]

    # ---- a step

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def step(self, data):
        """Up to five actions, then the forward pass."""
        chunks, writers = {}, WriterCheck(self.running)
        self.act(data, chunks)
        self.forward(chunks, writers)

    def act(self, data, chunks):
        old, may_admit = set(self.running), True
        for _ in range(data.draw(st.integers(1, 5))):
            idle = [seq for seq in self.running if seq not in chunks]
            victims = [seq for seq in idle if seq in old]
            actions = ["go on"] * 2 * bool(idle) + ["admit"] * 2 * bool(self.waiting and may_admit)
            actions += self.ways_to_preempt * bool(victims)
            if not actions:
                break
            action = data.draw(st.sampled_from(actions))
            if action == "go on":
                self.schedule(data.draw(st.sampled_from(idle)), chunks, data)
            elif action == "admit":
                seq = data.draw(st.sampled_from(self.waiting))
                if self.try_admit(seq, data.draw(st.sampled_from([0, 0, 1, 2]))):
                    assert self.schedule(seq, chunks, data), "an admitted sequence fits"
            else:  # nothing is admitted after that: blocks of this step's copies may be free now
                may_admit = False
                self.preempt(data.draw(st.sampled_from(victims)), action)

    def forward(self, chunks, writers):
        writes = [(seq, seq.num_computed_tokens, num_tokens) for seq, num_tokens in chunks.items()]
        writers.check(writes, self.size)
        self.cache.copy(self.manager.take_copies())
        for seq, start, num_tokens in writes:
            self.cache.write(seq, start, num_tokens)
            seq.num_computed_tokens = num_tokens

    def preempt(self, seq, action):
        self.take_back(seq)
        self.waiting.append(seq)

    def take_back(self, seq):
        self.manager.free(seq)
        assert len(table_of(seq)) == seq.num_computed_tokens == 0
        self.running.remove(seq)
        del self.registered[seq]

    # ---- what the oracle expects of it

    def try_admit(self, seq, num_promised):
        num_free = self.manager.num_free_blocks - num_promised
        num_needed = -(-seq.num_tokens // self.size)
        hits = self.expected_hits(seq)
        owned = {block_id for other in self.running for block_id in table_of(other)}
        num_shared = sum(known.block_id in owned for known in hits)
        is_admitted = self.manager.try_admit(seq, num_promised)
        table = table_of(seq)
        if self.hash_name == "real":
            assert is_admitted == (num_needed - num_shared <= num_free and num_free > 0)
            if is_admitted:
                assert table == [known.block_id for known in hits[: len(table)]]
                assert seq.num_computed_tokens == len(hits) * self.size
        assert is_admitted or (not table and num_needed > num_free)
        if is_admitted:
            assert seq.num_computed_tokens < seq.num_tokens, "the last token is always computed"
            self.admit(seq, len(hits), hits[-1] if hits else None)
        return is_admitted

    def admit(self, seq, num_registered, last):
        self.waiting.remove(seq)
        self.running.append(seq)
        self.registered[seq] = num_registered, last

    def expected_hits(self, seq):
        """The longest run of known blocks, each registered on top of the one before it, short of the last token."""
        tokens = tokens_of(seq)
        hits = []
        for stop in range(self.size, len(tokens), self.size):
            known = self.known.get(tuple(tokens[:stop]))
            if known is None or known.parent is not (hits[-1] if hits else None):
                break
            hits.append(known)
        return hits

    def schedule(self, seq, chunks, data):
        """Give blocks for some more tokens; full ones are known from now on. False if blocks ran out."""
        if seq.num_computed_tokens == seq.num_tokens:
            seq.append_token(data.draw(st.sampled_from(TOKENS)))
        num_tokens = data.draw(st.integers(seq.num_computed_tokens + 1, seq.num_tokens))
        before, num_free = table_of(seq), self.manager.num_free_blocks
        num_needed = max(0, -(-num_tokens // self.size) - len(before))
        tail = seq.num_computed_tokens // self.size  # the block that is written first
        is_shared = tail < len(before) and any(before[tail] in table_of(o) for o in self.running if o is not seq)
        has_room = self.manager.try_allocate(seq, num_tokens)
        table = table_of(seq)
        assert has_room == (num_needed + is_shared <= num_free)
        if not has_room:
            assert table == before
            return False
        chunks[seq] = num_tokens
        assert len(table) == len(before) + num_needed
        changed = [i for i in range(len(before)) if table[i] != before[i]]
        assert changed == [tail] * is_shared, "block tables are append-only, but for copy-on-write"
        self.forget(table[len(before) :] + [table[i] for i in changed])
        self.register(seq, table, num_tokens)
        return True

    def register(self, seq, table, num_tokens):
        num_registered, parent = self.registered[seq]
        for i in range(num_registered, num_tokens // self.size):
            prefix = tuple(tokens_of(seq)[: (i + 1) * self.size])
            known = self.known.get(prefix)
            if known is None or known.parent is not parent:
                known = self.known[prefix] = Known(table[i], parent)
            parent = known
        self.registered[seq] = max(num_registered, num_tokens // self.size), parent

    def forget(self, block_ids):
        self.known = {prefix: known for prefix, known in self.known.items() if known.block_id not in block_ids}

    # ---- what always holds

    @invariant()
    def every_block_is_free_or_owned(self):
        if hasattr(self, "manager"):
            self.check_blocks()

    def check_blocks(self):
        check_ownership(self.manager, self.seqs)

    @invariant()
    def every_sequence_reads_its_own_prefix(self):
        for seq in self.running:
            self.cache.check(seq, seq.num_computed_tokens)

    @invariant()
    def cached_blocks_hold_what_they_stand_for(self):
        if hasattr(self, "manager"):
            check_cached_blocks(self.manager, self.cache)
            if self.hash_name == "real":
                assert set(self.manager.prefix_cache._by_id) == {known.block_id for known in self.known.values()}

    def teardown(self):
        if hasattr(self, "manager"):
            for seq in list(self.running):
                self.take_back(seq)
            check_ownership(self.manager, [])
            everything = self.make_seq([9] * self.manager.capacity)
            assert self.manager.try_admit(everything), "a leak"
            assert self.manager.try_allocate(everything, everything.num_tokens), "a leak"
        self.patch.undo()


class ConstantHashMachine(BlockManagerMachine):
    hash_name = "constant"


class WeakHashMachine(BlockManagerMachine):
    hash_name = "weak"


class BlindHashMachine(BlockManagerMachine):
    hash_name = "blind for the parent"


# `tests/extras/test_known_tokens.py` has the long sweep, with more rules
SETTINGS = settings(
    max_examples=12, stateful_step_count=40, deadline=None, derandomize=True, report_multiple_bugs=False
)
TestRealHash = BlockManagerMachine.TestCase
TestConstantHash = ConstantHashMachine.TestCase
TestWeakHash = WeakHashMachine.TestCase
TestBlindHash = BlindHashMachine.TestCase
TestConstantHash.settings = TestWeakHash.settings = TestBlindHash.settings = SETTINGS
TestRealHash.settings = settings(SETTINGS, max_examples=36)


# ---- prefix hits, by hand


@pytest.fixture(params=HASHES)
def any_hash(request, monkeypatch):
    monkeypatch.setattr(nanovllm.prefix_cache, "hash_block", HASHES[request.param])
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


@pytest.mark.parametrize("block_size", [1, 4])
def test_same_block_after_another_prefix_is_no_twin(any_hash, block_size):
    """A+X and B+X+Z are cached: A+X+Z has not Z's block, which was computed after B+X."""
    a, b, x, z = ([token] * block_size for token in (1, 2, 3, 4))
    manager, cache = BlockManager(8, block_size), FakeKVCache(block_size)
    for tokens in (a + x, b + x + z):
        manager.free(start(manager, cache, tokens))
    assert num_hits(manager, a + x + z) <= 2
    start(manager, cache, [*a, *x, *z, 9])


@pytest.mark.parametrize("block_size", [1, 4])
def test_other_block_with_the_same_hash_is_no_twin(any_hash, block_size):
    """A and B+Z are cached, A and B under one weak hash: A+Z has not Z's block, which was computed after B."""
    a, b, z = ([token] * block_size for token in (0, 3, 1))
    manager, cache = BlockManager(8, block_size), FakeKVCache(block_size)
    for tokens in (a, b + z):
        manager.free(start(manager, cache, tokens))
    assert num_hits(manager, a + z) <= 1
    start(manager, cache, [*a, *z, 9])


def test_parent_that_was_evicted_and_computed_anew_does_not_adopt_old_children():
    """The child of an equal block belongs to a parent that is gone; the parent's successor has another identity."""
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


@pytest.mark.parametrize(("num_tokens", "block_size"), [(1, 1), (2, 1), (3, 4), (4, 4), (5, 4), (8, 4), (9, 4)])
def test_of_a_prompt_that_is_cached_only_what_is_needed_is_computed(num_tokens, block_size):
    """Cached whole: its last token. Else: what follows the last full block."""
    tokens = list(range(num_tokens))
    manager, cache = BlockManager(16, block_size), FakeKVCache(block_size)
    manager.free(start(manager, cache, tokens))
    again = start_admitted(manager, tokens)
    assert again.num_computed_tokens == (num_tokens - 1) // block_size * block_size, "the last token is computed anew"
    advance(manager, cache, again, num_tokens)
    assert manager.num_used_blocks == -(-num_tokens // block_size)


def start_admitted(manager, tokens):
    """The beginning of a step, as far as the admission of one sequence, which must fit."""
    seq = make_seq(tokens)
    assert manager.try_admit(seq)
    return seq


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


# ---- forks and copy-on-write


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_fork_costs_no_block_until_somebody_writes(enable_prefix_caching):
    manager, cache = BlockManager(16, 4, enable_prefix_caching), FakeKVCache(4)
    parent = start(manager, cache, [1, 2, 3, 4, 5, 6])
    children = [fork(manager, parent, f"child-{i}") for i in range(3)]
    assert [table_of(child) for child in children] == [table_of(parent)] * 3
    assert manager.num_used_blocks == 2
    assert len(stored_slots([parent, *children], manager.block_size)) == 6
    check_ownership(manager, [parent, *children])
    for seq, num_used in zip([parent, *children], (3, 4, 5, 5), strict=True):  # the last one has the block for itself
        append(manager, cache, seq, 7)
        assert manager.num_used_blocks == num_used
    assert len({table_of(seq)[1] for seq in [parent, *children]}) == 4
    assert len({table_of(seq)[0] for seq in [parent, *children]}) == 1
    for seq in [parent, *children]:
        cache.check(seq, 7)


# ---- eviction


def test_least_recently_used_goes_first():
    manager, cache = BlockManager(3, 2), FakeKVCache(2)
    for token in (1, 2, 3):
        manager.free(start(manager, cache, [token, token]))
    # the oldest is used again: a hit, whose owner leaves the block behind as the newest
    seq = start_admitted(manager, [1, 1, 9])
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


# ---- what it costs


def test_a_running_sequence_hashes_each_block_once(monkeypatch):
    calls = []

    def counting_hash(parent_hash, tokens):
        calls.append(tokens)
        return hash_block(parent_hash, tokens)

    monkeypatch.setattr(nanovllm.prefix_cache, "hash_block", counting_hash)
    manager, cache = BlockManager(20, 2), FakeKVCache(2)
    neighbour = start(manager, cache, [90, 91] * 14)
    calls.clear()

    seq = make_seq(list(range(13)))
    assert not manager.try_admit(seq)
    manager.free(neighbour)
    assert manager.try_admit(seq)
    calls.clear()  # a waiting sequence hashes up to the first block that is not cached
    for num_tokens in (3, 4, 10, 13):
        advance(manager, cache, seq, num_tokens)
    append(manager, cache, seq, *range(13, 16))
    child = fork(manager, seq)
    append(manager, cache, seq, 16, 17)
    assert len(calls) == len(set(calls)) == seq.num_tokens // 2 == 9
    append(manager, cache, child, 20, 21)
    assert len(calls) == 10, "a fork knows its parent's hashes"


def full_pool(num_blocks):
    """All blocks free, cached, and of sequences of two blocks each."""
    manager = BlockManager(num_blocks, 1)
    for first in range(0, num_blocks, 2):
        seq = make_seq([first, first + 1])
        assert manager.try_admit(seq)
        assert manager.try_allocate(seq, 2)
        manager.free(seq)
    assert len(manager.prefix_cache._by_id) == num_blocks
    return manager


def seconds_of_use(manager, attempt, tokens):
    """Evictions at the front of the free queue, hits in its middle, forks, frees at both ends."""
    new = [make_seq([next(tokens)]) for _ in range(20)]
    middle = manager.num_blocks // 2 + 4 * attempt
    old = [make_seq([middle + 2 * i, middle + 2 * i + 1]) for i in range(2)]
    begin = time.thread_time()
    for seq in new:
        assert manager.try_admit(seq)
        assert manager.try_allocate(seq, 1)
    for seq in old:
        assert manager.try_admit(seq)
        assert seq.num_computed_tokens == 1
    children = [make_seq([1]) for _ in range(2)]
    for child in children:
        manager.fork(new[0], child)
    for seq in new + old + children:
        manager.free(seq)
    return time.thread_time() - begin


def test_cost_of_a_block_does_not_grow_with_the_pool():
    """Fifty times the blocks: whatever scans them takes fifty times longer. The shortest of eight turns each."""
    small, large, tokens = full_pool(400), full_pool(20_000), count(10_000_000)
    turns = [[seconds_of_use(manager, attempt, tokens) for manager in (small, large)] for attempt in range(8)]
    shortest = [min(seconds) for seconds in zip(*turns, strict=True)]
    assert shortest[1] < 15 * shortest[0]
