"""Random traffic of sequences with states over a pool of a few blocks and slots, without a model.

The fake pool keeps, for each slot, the tokens that its state has seen, and for each place of a block the tokens on
which its K and V depend. So a state that is used twice, copied too early, or not copied at all shows in the next chunk,
and so does a block of another prefix.
"""

import random

from nanovllm_extras.engine.invariants import check_invariants
from nanovllm_extras.execution.state_pool import find_rounds
from nanovllm_extras.kv_store.share import name_of_state
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.memory.store_link import StoreLink
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.scheduling.drafter import Drafter
from nanovllm_extras.scheduling.ordered_queues import fcfs
from nanovllm_extras.scheduling.roll_back import roll_back
from nanovllm_extras.scheduling.scheduler import Scheduler, count_places, fork_anytime
from tests.extras.fake_store import FakeStore

VOCAB_SIZE = 50


def make_scheduler(
    num_blocks,
    block_size,
    num_slots,
    limits,
    *,
    has_cache=True,
    observer=None,
    interval=0,
    space=None,
    store=None,
    overlaps=False,
    proposer=None,
    max_drafts=4,
    policy=fcfs,
):
    """A scheduler of sequences with states. limits: `max_num_seqs`, `max_num_batched_tokens`, `max_model_len`"""
    observer = observer or SchedulingStats()
    states = Slots(num_slots, block_size, observer, has_cache, interval)
    link = None if store is None else StoreLink(store)
    blocks = BlockManager(num_blocks, block_size, has_cache, observer, states=states, swap_space=space, store=link)
    budget = limits[1]
    sizes = {"max_drafts": min(max_drafts, budget - 1), "max_rows": min(24, budget), "max_seqs": 99}
    drafter = None if proposer is None else Drafter(proposer, **sizes, vocab_size=VOCAB_SIZE)
    return Scheduler(blocks, *limits, policy, overlaps=overlaps, drafter=drafter)


class Guesser:
    """Knows the rule of `token_after`. A guess is right with the probability `share_right`."""

    def __init__(self, share_right, seed=0):
        self.share_right, self.rng = share_right, random.Random(seed)

    def propose(self, wanted):
        return [self.guess(seq, count) for seq, count in wanted]

    def guess(self, seq, count):
        tokens, drafts = seq.token_ids.tolist(), []
        for _ in range(count):
            right = token_after(tokens + drafts, seq.sample_index)
            drafts.append(right if self.rng.random() < self.share_right else (right + 1) % VOCAB_SIZE)
        return drafts


def token_after(tokens, sample_index):
    return (sum(tokens) + 7 * sample_index) % VOCAB_SIZE


def expected(seq):
    """The output that follows from the prompt of `seq`."""
    tokens = seq.token_ids[: seq.num_prompt_tokens].tolist()
    while len(tokens) < len(seq.token_ids):
        tokens.append(token_after(tokens, seq.sample_index))
    return tokens[seq.num_prompt_tokens :]


class Model:
    """Does what a device does for the steps of `scheduler`, with slots that keep what their states have seen."""

    def __init__(self, scheduler, store=None):
        self.scheduler, self.blocks, self.store = scheduler, scheduler.block_manager, store
        self.states, self.space = self.blocks.states, self.blocks.swap_space
        # the slots in host memory, which have negative numbers, are at its end
        self.pool = [None] * (self.states.num_slots + 1 + (self.space.num_slots if self.space else 0))
        self.kv, self.host_kv = {}, {}  # block id -> for each of its tokens, the tokens up to it
        self.newest, self.ahead = [], None
        self.num_ahead = self.num_state_loads = self.num_drafts = self.num_accepted = self.num_late = 0

    def step(self, fails=False):
        """Run a step, and return it. With overlap, the next one is launched before it is updated, if it can be."""
        launched, self.ahead = self.ahead if self.scheduler.pending.steps else None, None
        launched = launched or self.launch(is_saved=not fails)
        if launched is None:
            return None
        if self.scheduler.can_schedule_ahead():
            self.ahead = self.launch()
            self.num_ahead += self.ahead is not None
        if fails:
            roll_back(self.scheduler)
        else:
            self.update(*launched)
        return launched[0]

    def launch(self, is_saved=True):
        step = self.scheduler.schedule()
        if not step.chunks:
            return None
        moves = step.copies
        assert isinstance(moves, Moves)
        self.move(moves)
        for seq, start, num_new_tokens in step.chunks:  # each layer stores K and V of all chunks before it attends
            self.write(seq, start, start + num_new_tokens)
        assert len(set(moves.slots)) == len(step.chunks), "no slot is written twice"
        assert min(moves.slots) > 0, "the null slot is for padding"
        for row in self.in_order(moves, len(step.chunks)):
            seq, start, num_new_tokens = step.chunks[row]
            tokens = self.tokens_of(seq, start + num_new_tokens)
            self.compute_chunk(seq, tokens, start, moves.sources[row], moves.slots[row])
        if is_saved and self.store is not None:
            self.save(moves)
        drawn = []
        for seq, place in zip(step.samples, step.sampled_chunks, strict=True):
            owner, start, num_new_tokens = step.chunks[place]
            drawn.append(token_after(self.tokens_of(owner, start + num_new_tokens), seq.sample_index))
        self.newest = drawn
        return step, drawn

    def in_order(self, moves, num_rows):
        """The rows of a step; a row comes after the one that writes the slot which it reads."""
        rounds = find_rounds(moves.slots, moves.sources) or [range(num_rows)]
        return [row for rows in rounds for row in rows]

    def update(self, step, drawn):
        num_known = {seq: seq.num_known_tokens for seq in step.samples if seq.finish_reason is None}
        has_drafts = self.scheduler.pending.verification is not None
        self.scheduler.update(step, drawn)
        if has_drafts:
            self.num_drafts += len(step.samples) - len(num_known)
            self.num_accepted += sum(seq.num_known_tokens - num - 1 for seq, num in num_known.items())

    def move(self, moves):
        """Do what `Transfers.before` does, in its order."""
        for source, destination in moves.swap_outs:
            self.host_kv[destination] = list(self.kv[source])
        for source, destination in moves.swap_ins:
            self.kv[destination] = list(self.host_kv[source])
        copied = [list(self.kv[source]) for source, _ in moves]
        for (_, destination), contents in zip(moves, copied, strict=True):
            self.kv[destination] = contents
        for source, destination in moves.state_copies:
            self.pool[destination] = self.pool[source]
        for name, slot in moves.state_loads:
            self.pool[slot] = moves.loaded[name]
            self.num_state_loads += 1
        for name, block_id in moves.loads:
            self.kv[block_id] = list(moves.loaded[name])

    def tokens_of(self, seq, num_tokens):
        """The first tokens of `seq`: known ones, drafts, and those in flight, which the device knows."""
        ids = (seq.token_ids + seq.unknown_token_ids)[:num_tokens]
        return [token_id if token_id >= 0 else self.newest[-1 - token_id] for token_id in ids]

    def write(self, seq, start, stop):
        size, table, tokens = self.blocks.block_size, seq.block_table, self.tokens_of(seq, stop)
        for i in range(start, stop):
            block = self.kv.setdefault(table[i // size], [None] * size)
            block[i % size] = tokens[: i + 1]

    def compute_chunk(self, seq, tokens, start, source, slot):
        """Check what the chunk reads, and write its state."""
        size, table = self.blocks.block_size, seq.block_table
        assert not start or self.pool[source] == tokens[:start], "the state after the tokens before the chunk"
        for i in range(len(tokens)):
            assert self.kv[table[i // size]][i % size] == tokens[: i + 1], "K and V of the prefix"
        self.pool[slot] = tokens

    def save(self, moves):
        for name, block_id in moves.saves:
            self.store.save(name, list(self.kv[block_id]))
        for name, slot in moves.state_saves:
            assert slot > 0
            self.num_late += slot not in moves.slots  # a snapshot that was taken after its step
            self.check_state(name, self.pool[slot])
            self.store.save_state(name, self.pool[slot])

    def check_state(self, name, tokens):
        """Compute the name of a snapshot from the tokens that its state has seen: they end with a block."""
        seq = Sequence("", tokens, SamplingParams())
        num_blocks = len(tokens) // self.blocks.block_size
        [last] = self.store.names(seq, num_blocks - 1, num_blocks)
        assert len(tokens) == num_blocks * self.blocks.block_size
        assert name_of_state(last) == name

    def check(self):
        """Nothing contradicts itself. Host slots and snapshots have seen what they stand for."""
        check_invariants(self.scheduler)
        if self.space is not None:
            for seq, slot in self.space._slots.items():
                assert self.pool[slot] == seq.token_ids[: seq.num_computed_tokens].tolist()
        pool = list(self.pool)
        for source, destination in self.states.copies_for_next:
            pool[destination] = pool[source]
        cached = {one.serial: one for one in self.blocks.prefix_cache._by_id.values()}
        for serial, slot in self.states.snapshots.items():
            parts = []
            while serial in cached:  # until the root, or a block that was evicted
                parts.insert(0, cached[serial].tokens)
                serial = cached[serial].parent_serial
            text = b"".join(parts)
            tokens = [int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text), 4)]
            assert pool[slot][-len(tokens) :] == tokens
            assert len(pool[slot]) == len(tokens) or serial


class Traffic(Model):
    """Adds, aborts and forks requests at random. features: of "swap", "store", "overlap", "drafts", "no cache"."""

    def __init__(self, rng, *features, sizes=None, observer=None):
        self.rng = rng
        has_drafts = "drafts" in features
        largest = (12, 20, 9) if has_drafts else (9, 16, 9)
        smallest = (3, 6, 1) if has_drafts else (3, 5, 1)
        num_slots, num_blocks, budget = sizes or map(rng.randint, smallest, largest)
        limits = rng.randint(3, num_slots), budget, 12
        store = FakeStore(2, rng.choice([None, 0, 1, 2]), has_states=True) if "store" in features else None
        scheduler = make_scheduler(
            num_blocks,
            2,
            num_slots,
            limits,
            has_cache="no cache" not in features,
            observer=observer,
            interval=rng.choice([0, 1, 2, 64]),
            space=SwapSpace(rng.randint(1, 12), rng.randint(1, 4)) if "swap" in features else None,
            store=store,
            overlaps="overlap" in features,
            proposer=Guesser(rng.choice([0, 0.5, 0.8, 1]), rng.random()) if has_drafts else None,
        )
        super().__init__(scheduler, store)
        self.texts = [[rng.randrange(VOCAB_SIZE) for _ in range(7)] for _ in range(3)]
        self.seqs = []

    def act(self, rate=0.25):
        """Add, abort or fork a request, or run a step, at random."""
        what = self.rng.random()
        if what < rate:
            self.add()
        elif what < 1.2 * rate:
            self.abort()
        elif what < 1.5 * rate:
            self.fork()
        else:
            self.step(fails=what > 0.97)

    def add(self):
        prompt = self.rng.choice(self.texts)[: self.rng.randint(1, 7)]
        if self.rng.random() < 0.3:
            prompt = [*prompt[:-1], self.rng.randrange(VOCAB_SIZE)]
        n = self.rng.choice([1, 1, 2, 3])
        params = SamplingParams(temperature=0, max_tokens=self.rng.randint(1, 5), ignore_eos=True)
        seqs = [Sequence(str(len(self.seqs)), prompt, params, sample_index=i) for i in range(n)]
        seqs[0].children = seqs[1:]
        self.seqs += seqs
        self.scheduler.add(seqs[0])

    def abort(self):
        if alive := [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.finish(self.rng.choice(alive), "abort")

    def fork(self):
        """Fork a sequence that has caught up, between two steps, as a beam search does, which waits for each token."""
        ready = [seq for seq in self.scheduler.running if seq.num_computed_tokens == seq.num_tokens - 1]
        is_full = count_places(self.scheduler.running) >= self.scheduler.max_num_seqs
        if not ready or is_full or self.scheduler.pending.steps:
            return
        parent = self.rng.choice(ready)
        tokens = [*parent.token_ids[: parent.num_tokens - 1], self.rng.randrange(VOCAB_SIZE)]
        child = Sequence("fork", tokens, parent.sampling_params, sample_index=100 + len(self.seqs))
        child.max_num_tokens, child.order = parent.max_num_tokens, (*parent.order[:-1], child.sample_index)
        self.seqs.append(child)
        fork_anytime(self.scheduler, parent, child)

    def check_end(self):
        """Serve all that is left. Nothing leaks, and all outputs follow from their prompts."""
        for _ in range(600):
            self.step()
        self.check()
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.states.num_free_slots == self.states.num_slots
        assert self.blocks.num_used_blocks == 0
        for seq in self.seqs:
            if seq.finish_reason != "abort":
                assert seq.output_token_ids == expected(seq)
