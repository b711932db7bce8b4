"""A KV cache without a model: it keeps for each slot what the K and V there depend on.

The K and V of a token are functions of that token and of all tokens before it, so a slot is known by its whole prefix.
A sequence reads the right cache exactly when each of its slots holds its own prefix. This is the oracle of the block
manager's and the scheduler's tests: it knows no hashes, no reference counts and no free queue.
"""

from collections import Counter

from nanovllm.extras.full_observer import count_empty_slots

GARBAGE = "garbage"


def tokens_of(seq):
    return seq.token_ids.view().tolist()


def table_of(seq):
    return seq.block_table.view().tolist()


class FakeKVCache:
    """`slots` on the device and `host_slots` in the swap space: (block, offset) -> the tokens up to the one stored.

    `newest` are the tokens that the last step has drawn: the device knows them when the host does not yet. With a
    `window`, a sequence reads only what the next token sees, or the first token of the chunk that was just computed.
    """

    def __init__(self, block_size, window=None):
        self.block_size = block_size
        self.window = window
        self.starts = {}  # of each sequence's last chunk
        self.slots = {}
        self.host_slots = {}
        self.newest = []

    def slot(self, seq, position):
        return table_of(seq)[position // self.block_size], position % self.block_size

    def tokens_of(self, seq, stop):
        """The first `stop`, with those that are under way."""
        tokens = seq.token_ids.data[:stop].tolist()
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

    def write(self, seq, start, stop):
        """What a forward pass over tokens [start, stop) stores; returns what `spoil` needs."""
        journal = []
        self.starts[seq] = start
        tokens = self.tokens_of(seq, stop)
        for position in range(start, stop):
            slot = self.slot(seq, position)
            journal.append((self.slots, slot, self.slots.get(slot)))
            self.slots[slot] = tuple(tokens[: position + 1])
        return journal

    def spoil(self, journal):
        """What a step that died half-way leaves: nothing that anybody may read, but what was there before."""
        for memory, slot, before in reversed(journal):
            if memory[slot] != before:
                memory[slot] = GARBAGE

    def check(self, seq, num_tokens):
        """The first `num_tokens` tokens of `seq` find their own K and V through its block table."""
        self._check(seq, num_tokens, self.slots, table_of(seq), min(num_tokens, self.starts.get(seq, num_tokens)))

    def check_host(self, seq, num_tokens, host_block_ids):
        """The same for what is kept of `seq` in the swap space."""
        num_null = -(-num_tokens // self.block_size) - len(host_block_ids)
        assert num_null == 0 or self.window is not None
        self._check(seq, num_tokens, self.host_slots, [None] * num_null + host_block_ids, num_tokens)

    def _check(self, seq, num_tokens, slots, table, reader):
        """`reader` is the position of the first token that reads."""
        tokens = self.tokens_of(seq, num_tokens)
        for position in range(0 if self.window is None else max(0, reader - self.window + 1), num_tokens):
            held = slots.get((table[position // self.block_size], position % self.block_size))
            assert held == tuple(tokens[: position + 1]), (
                f"{seq.request_id} would read the K and V of another prefix at position {position}"
            )


class WriterCheck:
    """No block is written by two sequences: made before a step, asked with the (sequence, start, stop) it writes."""

    def __init__(self, seqs):
        self._tables = {seq: set(table_of(seq)) for seq in seqs}

    def check(self, writes, block_size):
        """A sequence that joins a block in this very step may read what another writes there, and may not write."""
        writer = {}
        for seq, start, stop in writes:
            for block_id in table_of(seq)[start // block_size : -(-stop // block_size)]:
                assert writer.setdefault(block_id, seq) is seq, f"two sequences write to block {block_id}"
        for other, before in self._tables.items():
            for block_id in before.intersection(table_of(other)):
                assert writer.get(block_id, other) is other, f"block {block_id} is written, but another owned it before"


def check_ownership(block_manager, seqs):
    """Each block is free, or owned exactly as often as the tables of the living `seqs` name it; all counts agree."""
    tables = [table_of(seq) for seq in seqs]
    if hasattr(block_manager, "window"):
        for table in tables:  # null blocks only at its beginning
            assert 0 not in table[table.count(0) :]
        tables = [[block_id for block_id in table if block_id] for table in tables]
    owners = Counter(block_id for table in tables for block_id in table)
    assert all(len(set(table)) == len(table) for table in tables), "a sequence owns a block twice"
    assert set(owners) <= set(range(1, block_manager.num_blocks + 1)), "the null block, or one that is not there"
    free = set(range(1, block_manager.num_blocks + 1)) - set(owners)
    assert set(block_manager._free) == free
    assert block_manager._ref_counts == [owners[block_id] for block_id in range(block_manager.num_blocks + 1)]
    assert block_manager.num_free_blocks == len(free)
    assert block_manager.num_used_blocks == len(owners)
    assert sum(block_manager._ref_counts) == sum(owners.values())


def check_stored(block_manager, seqs):
    """`count_empty_slots` against the slots themselves: slots of owned blocks, less those that hold a token."""
    size = block_manager.block_size
    slots = {
        (table_of(seq)[position // size], position % size)
        for seq in seqs
        for position in range(seq.num_computed_tokens)
        if table_of(seq)[position // size]  # behind a window there is the null block
    }
    assert count_empty_slots(seqs, size) == block_manager.num_used_blocks * size - len(slots)


def forget_new(block_manager):
    """The step has failed: hide the blocks that it should have filled."""
    for block_id in block_manager.prefix_cache.new_blocks:
        block_manager.prefix_cache.forget(block_id)


def check_cached_blocks(block_manager, cache):
    """Each block that can be hit is filled, holds the tokens it is known for, and is known once."""
    by_id, by_hash = block_manager.prefix_cache._by_id, block_manager.prefix_cache._by_hash
    assert {known.block_hash: known for known in by_id.values()} == by_hash, "a stale entry"
    size = block_manager.block_size
    for block_id, known in by_id.items():
        held = [cache.slots.get((block_id, i), GARBAGE) for i in range(size)]
        assert GARBAGE not in held, f"block {block_id} can be hit, but nobody has filled it"
        assert [len(prefix) for prefix in held] == [len(held[-1]) - size + 1 + i for i in range(size)]
        assert all(prefix == held[-1][: len(prefix)] for prefix in held), "a block of mixed prefixes"
        assert b"".join(token.to_bytes(4, "little") for token in held[-1][-size:]) == known.tokens
