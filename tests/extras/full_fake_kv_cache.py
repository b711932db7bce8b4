"""The fake KV cache with what extras add: a swap space, windows, tokens in flight, and steps that die half-way."""

from nanovllm_extras.records.full_observer import count_empty_slots
from nanovllm_testing.fake_kv_cache import GARBAGE, FakeKVCache, check_free_queue, check_owners, stored_slots, table_of


class FullFakeKVCache(FakeKVCache):
    """`host_slots` are those of the swap space.

    `newest` are the tokens that the last step has drawn: the device knows them when the host does not yet. With a
    `window`, a sequence reads only what the next token sees, or the first token of the chunk that was just computed.
    """

    def __init__(self, block_size, window=None):
        super().__init__(block_size)
        self.window = window
        self.starts = {}  # of each sequence's last chunk
        self.host_slots = {}
        self.newest = []

    def tokens_of(self, seq, stop):
        """The first `stop`, with those that are under way."""
        tokens = (seq.token_ids + seq.unknown_token_ids)[:stop]
        return [self.newest[-1 - token] if token < 0 else token for token in tokens]

    def move(self, swap_outs=(), swap_ins=(), copies=()):
        """Whole blocks, kind by kind, each kind at once; returns what `spoil` needs."""
        journal = []
        for pairs, source, destination in (
            (swap_outs, self.slots, self.host_slots),
            (swap_ins, self.host_slots, self.slots),
            (copies, self.slots, self.slots),
        ):
            assert len({to for _, to in pairs}) == len(pairs), "two blocks are copied to the same place"
            read = [[source.get((block, i), GARBAGE) for i in range(self.block_size)] for block, _ in pairs]
            for (_, block), contents in zip(pairs, read, strict=True):
                for i, held in enumerate(contents):
                    destination[block, i] = held
                    journal.append((destination, (block, i), GARBAGE))
        return journal

    def copy(self, copies):
        self.move(copies=copies)

    def write(self, seq, start, stop):
        """Returns what `spoil` needs."""
        self.starts[seq] = start
        slots = [self.slot(seq, position) for position in range(start, stop)]
        journal = [(self.slots, slot, self.slots.get(slot)) for slot in slots]
        super().write(seq, start, stop)
        return journal

    def spoil(self, journal):
        """What a step that died half-way leaves: nothing that anybody may read, but what was there before."""
        for memory, slot, before in reversed(journal):
            if memory[slot] != before:
                memory[slot] = GARBAGE

    def check(self, seq, num_tokens):
        reader = min(num_tokens, self.starts.get(seq, num_tokens))
        self.check_slots(seq, self.seen(reader, num_tokens), self.slots, table_of(seq))

    def check_host(self, seq, num_tokens, host_block_ids):
        """The same for what is kept of `seq` in the swap space."""
        num_null = -(-num_tokens // self.block_size) - len(host_block_ids)
        assert num_null == 0 or self.window is not None
        table = [None] * num_null + host_block_ids
        self.check_slots(seq, self.seen(num_tokens, num_tokens), self.host_slots, table)

    def seen(self, reader, stop):
        """The positions that are read; `reader` is the position of the first token that reads."""
        return range(0 if self.window is None else max(0, reader - self.window + 1), stop)


def check_ownership(block_manager, seqs):
    """Check as `nanovllm_testing` does. Null blocks, which replace those behind a window, have no owner."""
    tables = [table_of(seq) for seq in seqs]
    if hasattr(block_manager, "window"):
        for table in tables:  # null blocks only at its beginning
            assert 0 not in table[table.count(0) :]
        tables = [[block_id for block_id in table if block_id] for table in tables]
    check_owners(block_manager, tables)
    check_free_queue(block_manager, tables)


def check_stored(block_manager, seqs):
    """`count_empty_slots` against the slots themselves: slots of owned blocks, less those that hold a token."""
    size = block_manager.block_size
    slots = {slot for slot in stored_slots(seqs, size) if slot[0]}  # behind a window there is the null block
    assert count_empty_slots(seqs, size) == block_manager.num_used_blocks * size - len(slots)


def forget_new(block_manager):
    """The step has failed: hide the blocks that it should have filled. The manager's observer is `SchedulingStats`."""
    for block_id in block_manager.observer.blocks_in_flight():
        block_manager.prefix_cache.forget(block_id)


def begin_step(block_manager):
    """The steps before have run: what they have registered is filled."""
    block_manager.observer.on_roll_back()
