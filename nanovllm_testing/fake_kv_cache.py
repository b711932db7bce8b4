"""A KV cache without a model: it keeps for each slot what the K and V there depend on.

The K and V of a token are functions of that token and of all tokens before it, so a slot is identified by its whole
prefix. A sequence reads the right K and V exactly when each of its slots holds the sequence's own prefix. This is the
oracle of the block manager and of the scheduler: it uses no hashes, no reference counts and no free queue.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence
from nanovllm_testing.violation import Violation, require

GARBAGE = "garbage"

Slot = tuple[int, int]
"""(block, offset in the block)"""
Write = tuple[Sequence, int, int]
"""(sequence, start, stop): a step stores the K and V of the tokens [start, stop)."""


def tokens_of(seq: Sequence) -> list[int]:
    return seq.token_ids.tolist()


def table_of(seq: Sequence) -> list[int]:
    return seq.block_table.tolist()


class FakeKVCache:
    """`slots`: (block, offset) -> the tokens up to the one whose K and V are stored there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[Slot, Any] = {}

    def slot(self, seq: Sequence, position: int) -> Slot:
        """Return the slot of a position of `seq`, found through its block table."""
        table = table_of(seq)
        if position >= len(table) * self.block_size:
            raise Violation(
                f"{seq.request_id} computes its token {position}, but its block table {table} has only "
                f"{len(table) * self.block_size} slots"
            )
        return table[position // self.block_size], position % self.block_size

    def tokens_of(self, seq: Sequence, stop: int) -> list[int]:
        """Return the first `stop` tokens."""
        return tokens_of(seq)[:stop]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks: all are read before any is written."""
        require(len({to for _, to in copies}) == len(copies), "two blocks are copied to the same block")
        read = [[self.slots.get((block, i), GARBAGE) for i in range(self.block_size)] for block, _ in copies]
        for (_, block), contents in zip(copies, read, strict=True):
            self.slots |= {(block, i): held for i, held in enumerate(contents)}

    def write(self, seq: Sequence, start: int, stop: int) -> Any:
        """Store what a forward pass over the tokens [start, stop) stores."""
        tokens = self.tokens_of(seq, stop)
        for position in range(start, stop):
            self.slots[self.slot(seq, position)] = tuple(tokens[: position + 1])

    def check(self, seq: Sequence, num_tokens: int) -> None:
        """Raise unless the first `num_tokens` tokens of `seq` find their own K and V through its block table."""
        self.check_slots(seq, range(num_tokens), self.slots, table_of(seq))

    def check_slots(self, seq: Sequence, positions: range, slots: Mapping[Slot, Any], table: list[Any]) -> None:
        tokens = self.tokens_of(seq, positions.stop)
        for position in positions:
            i, offset = divmod(position, self.block_size)
            if i >= len(table):
                raise Violation(
                    f"{seq.request_id} has {positions.stop} computed tokens, but its block table {table} has no block "
                    f"for position {position}"
                )
            held = slots.get((table[i], offset))
            if held == tuple(tokens[: position + 1]):
                continue
            what = f"holds those of the tokens {list(held)}" if isinstance(held, tuple) else "holds none"
            raise Violation(
                f"{seq.request_id} would read the K and V of another prefix at position {position}: slot {offset} of "
                f"block {table[i]} should hold those of the tokens {tokens[: position + 1]}, but {what}"
            )


class WriterCheck:
    """Checks that no block is written by two sequences. Make it before a step, and call `check` with its writes."""

    def __init__(self, seqs: Iterable[Sequence]) -> None:
        self._tables = {seq: set(table_of(seq)) for seq in seqs}

    def check(self, writes: Iterable[Write], block_size: int) -> None:
        """Raise if two sequences own a block that one of them writes.

        A sequence that joins a block in this step may read what another one writes there, and must not write itself.
        """
        writer: dict[int, Sequence] = {}
        for seq, start, stop in writes:
            for block_id in table_of(seq)[start // block_size : -(-stop // block_size)]:
                first = writer.setdefault(block_id, seq)
                if first is not seq:
                    raise Violation(f"two sequences write to block {block_id}: {name_of(first)} and {name_of(seq)}")
        for other, before in self._tables.items():
            for block_id in before.intersection(table_of(other)):
                seq = writer.get(block_id, other)
                if seq is not other:
                    raise Violation(
                        f"block {block_id} is written by {name_of(seq)}, but {name_of(other)} owns it too: its K and V "
                        f"are overwritten"
                    )


def name_of(seq: Sequence) -> str:
    return f"{seq.request_id}, sample {seq.sample_index}" if seq.sample_index else seq.request_id


def check_owners(block_manager: BlockManager, tables: list[list[int]]) -> None:
    """Raise unless the block manager counts as many owners of each block as there are `tables` with it."""
    num_blocks = block_manager.num_blocks
    for table in tables:
        if len(set(table)) != len(table):
            raise Violation(f"a sequence owns a block twice: its block table is {table}")
    owners = Counter(block_id for table in tables for block_id in table)
    if owners and not 1 <= min(owners) <= max(owners) <= num_blocks:
        raise Violation(f"a block table has one of the blocks {sorted(owners)}, but sequences own 1 to {num_blocks}")
    for block_id in range(1, num_blocks + 1):
        counted, num_tables = block_manager.num_owners(block_id), owners[block_id]
        if counted != num_tables:
            what = "it is never free again" if counted > num_tables else "it can be given away while it is in use"
            raise Violation(
                f"block {block_id} is in {count(num_tables, 'block table')}, but the block manager counts "
                f"{count(counted, 'owner')}: {what}"
            )
    num_free, num_used = block_manager.num_free_blocks, block_manager.num_used_blocks
    if (num_free, num_used) != (num_blocks - len(owners), len(owners)):
        raise Violation(
            f"{len(owners)} of {num_blocks} blocks are in block tables, but num_free_blocks is {num_free} and "
            f"num_used_blocks {num_used}"
        )


def check_free_queue(block_manager: BlockManager, tables: list[list[int]]) -> None:
    """Raise unless the core's own block manager would give away exactly the blocks that nobody owns.

    A block manager with other data for its free blocks need not pass this check.
    """
    owned = {block_id for table in tables for block_id in table}
    free = set(range(1, block_manager.num_blocks + 1)) - owned
    require(set(block_manager._free) == free, f"the free queue has {list(block_manager._free)}, but {free} are free")
    require(block_manager.num_owners(0) == 0, "a sequence owns the null block")


def check_ownership(block_manager: BlockManager, seqs: Iterable[Sequence]) -> None:
    """Raise unless each block of the core's own block manager is free, or in as many tables of `seqs` as it counts."""
    tables = [table_of(seq) for seq in seqs]
    check_owners(block_manager, tables)
    check_free_queue(block_manager, tables)


def count(n: int, noun: str) -> str:
    """Return "1 block", "2 blocks", "no blocks"."""
    return f"{n or 'no'} {noun}{'s' * (n != 1)}"


def stored_slots(seqs: Iterable[Sequence], block_size: int) -> set[Slot]:
    """Return the slots that hold a computed token of `seqs`. A slot of several sequences counts once."""
    return {
        (table_of(seq)[position // block_size], position % block_size)
        for seq in seqs
        for position in range(seq.num_computed_tokens)
    }


def check_cached_blocks(block_manager: BlockManager, cache: FakeKVCache) -> None:
    """Raise unless each block in the core's own prefix cache is full, has the tokens of its key, and is there once.

    A prefix cache with other data need not pass this check. What a sequence reads is checked by `FakeKVCache.check`.
    """
    by_id, by_hash = block_manager.prefix_cache._by_id, block_manager.prefix_cache._by_hash
    require({known.block_hash: known for known in by_id.values()} == by_hash, "the prefix cache has a stale entry")
    size = block_manager.block_size
    for block_id, known in by_id.items():
        held = [cache.slots.get((block_id, i), GARBAGE) for i in range(size)]
        require(GARBAGE not in held, f"block {block_id} can be found, but its slots are not filled")
        lens = [len(prefix) for prefix in held]
        require(lens == [len(held[-1]) - size + 1 + i for i in range(size)], f"block {block_id} holds mixed prefixes")
        require(all(prefix == held[-1][: len(prefix)] for prefix in held), f"block {block_id} holds mixed prefixes")
        tokens = b"".join(token.to_bytes(4, "little") for token in held[-1][-size:])
        require(tokens == known.tokens, f"block {block_id} can be found by other tokens than it holds")
