"""A KV cache without a model: it keeps for each slot what the K and V there depend on.

The K and V of a token are functions of that token and of all tokens before it, so a slot is known by its whole prefix.
A sequence reads the right cache exactly when each of its slots holds its own prefix. This is the oracle of the block
manager's and the scheduler's tests: it knows no hashes, no reference counts and no free queue.
"""

from collections import Counter


def tokens_of(seq):
    return seq.token_ids.view().tolist()


def table_of(seq):
    return seq.block_table.view().tolist()


class FakeKVCache:
    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}  # slot -> the tokens up to and including the one stored there

    def slot(self, seq, position):
        return table_of(seq)[position // self.block_size] * self.block_size + position % self.block_size

    def write(self, seq, start, stop):
        """What a forward pass over tokens [start, stop) stores."""
        tokens = tokens_of(seq)
        for position in range(start, stop):
            self.slots[self.slot(seq, position)] = tuple(tokens[: position + 1])

    def spoil(self, seq, start, stop):
        """What a forward pass that died half-way leaves: nothing that anybody may read."""
        for position in range(start, stop):
            self.slots[self.slot(seq, position)] = "garbage"

    def check(self, seq, num_tokens):
        """The first `num_tokens` tokens of `seq` find their own K and V through its block table."""
        tokens = tokens_of(seq)
        for position in range(num_tokens):
            assert self.slots.get(self.slot(seq, position)) == tuple(tokens[: position + 1]), (
                f"{seq.request_id} would read the K and V of another prefix at position {position}"
            )


def check_ownership(block_manager, seqs):
    """Each block is free, or owned exactly as often as the tables of the living `seqs` name it; all counts agree."""
    tables = [table_of(seq) for seq in seqs]
    owners = Counter(block_id for table in tables for block_id in table)
    assert all(len(set(table)) == len(table) for table in tables), "a sequence owns a block twice"
    assert set(owners) <= set(range(1, block_manager.num_blocks + 1)), "the null block, or one that is not there"
    free = set(range(1, block_manager.num_blocks + 1)) - set(owners)
    assert set(block_manager._free) == free
    assert block_manager._ref_counts == [owners[block_id] for block_id in range(block_manager.num_blocks + 1)]
    assert block_manager.num_free_blocks == len(free)
    assert block_manager.num_used_blocks == len(owners)
    assert block_manager.num_references == sum(owners.values())


def check_cached_blocks(block_manager, cache):
    """Each block that can be hit is filled, holds the tokens it is known for, and is known once."""
    by_id, by_hash = block_manager._cached_by_id, block_manager._cached_by_hash
    assert {known.block_hash: known for known in by_id.values()} == by_hash, "a stale entry"
    size = block_manager.block_size
    for block_id, known in by_id.items():
        held = cache.slots.get((block_id + 1) * size - 1)
        assert isinstance(held, tuple), f"block {block_id} can be hit, but nobody has filled it"
        assert b"".join(token.to_bytes(4, "little") for token in held[-size:]) == known.tokens
