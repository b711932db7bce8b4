"""A KV cache without a model: it keeps for each slot what the K and V there depend on.

The K and V of a token are functions of that token and of all tokens before it, so a slot is known by its whole prefix.
A sequence reads the right cache exactly when each of its slots holds its own prefix. This is the oracle of the block
manager's and the scheduler's tests: it does not use hashes, reference counts or a free queue.
"""

from collections import Counter

GARBAGE = "garbage"


def tokens_of(seq):
    return seq.token_ids.tolist()


def table_of(seq):
    return seq.block_table.tolist()


class FakeKVCache:
    """`slots`: (block, offset) -> the tokens up to the one stored."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}

    def slot(self, seq, position):
        return table_of(seq)[position // self.block_size], position % self.block_size

    def tokens_of(self, seq, stop):
        """The first `stop` tokens."""
        return tokens_of(seq)[:stop]

    def copy(self, copies):
        """Whole blocks, all at once."""
        assert len({to for _, to in copies}) == len(copies), "two blocks are copied to the same place"
        read = [[self.slots.get((block, i), GARBAGE) for i in range(self.block_size)] for block, _ in copies]
        for (_, block), contents in zip(copies, read, strict=True):
            self.slots |= {(block, i): held for i, held in enumerate(contents)}

    def write(self, seq, start, stop):
        """What a forward pass over tokens [start, stop) stores."""
        tokens = self.tokens_of(seq, stop)
        for position in range(start, stop):
            self.slots[self.slot(seq, position)] = tuple(tokens[: position + 1])

    def check(self, seq, num_tokens):
        """The first `num_tokens` tokens of `seq` find their own K and V through its block table."""
        self.check_slots(seq, range(num_tokens), self.slots, table_of(seq))

    def check_slots(self, seq, positions, slots, table):
        tokens = self.tokens_of(seq, positions.stop)
        for position in positions:
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
    check_owners(block_manager, [table_of(seq) for seq in seqs])


def check_owners(block_manager, tables):
    owners = Counter(block_id for table in tables for block_id in table)
    assert all(len(set(table)) == len(table) for table in tables), "a sequence owns a block twice"
    assert set(owners) <= set(range(1, block_manager.num_blocks + 1)), "the null block, or one that is not there"
    free = set(range(1, block_manager.num_blocks + 1)) - set(owners)
    assert set(block_manager._free) == free
    assert block_manager._ref_counts == [owners[block_id] for block_id in range(block_manager.num_blocks + 1)]
    assert block_manager.num_free_blocks == len(free)
    assert block_manager.num_used_blocks == len(owners)
    assert sum(block_manager._ref_counts) == sum(owners.values())


def stored_slots(seqs, block_size):
    """The slots that hold a computed token of `seqs`; a slot of several sequences is one."""
    return {
        (table_of(seq)[position // block_size], position % block_size)
        for seq in seqs
        for position in range(seq.num_computed_tokens)
    }


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
