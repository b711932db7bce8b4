"""The fake KV cache of models with groups of layers: a block holds the K and V of the group that it belongs to.

What a slot of a group with a window holds begins with the group's number, as a negative token. So a block that another
group has written holds the K and V of another prefix.
"""

from nanovllm_extras.records.full_observer import count_empty_slots
from nanovllm_testing.fake_kv_cache import stored_slots, table_of
from tests.extras.full_fake_kv_cache import FullFakeKVCache


class GroupedFakeKVCache(FullFakeKVCache):
    """Group 0 sees all tokens, and the other groups, `num_others`, see `window` tokens."""

    def __init__(self, block_size, window, num_others):
        super().__init__(block_size)
        self.window_of_groups = window
        self.num_others = num_others

    def write(self, seq, start, stop):
        """Returns what `spoil` needs."""
        journal = super().write(seq, start, stop)
        tokens = self.tokens_of(seq, stop)
        for group, table in enumerate(window_tables(seq), 1):
            for position in range(start, stop):
                slot = table[position // self.block_size], position % self.block_size
                assert slot[0], f"group {group} has no block for position {position}"
                journal.append((self.slots, slot, self.slots.get(slot)))
                self.slots[slot] = (-group, *tokens[: position + 1])
        return journal

    def check(self, seq, num_tokens):
        """Each group finds its own K and V where the next token sees them."""
        super().check(seq, num_tokens)
        reader = min(num_tokens, self.starts.get(seq, num_tokens))
        tokens = self.tokens_of(seq, num_tokens)
        for group, table in enumerate(window_tables(seq), 1):
            for position in range(max(0, reader - self.window_of_groups + 1), num_tokens):
                held = self.slots.get((table[position // self.block_size], position % self.block_size))
                assert held == (-group, *tokens[: position + 1]), (
                    f"{seq.request_id} would read other K and V at position {position}, in group {group}"
                )

    def check_host(self, seq, num_tokens, host_block_ids):
        """The same for what is kept of `seq` in the swap space: blocks of group 0, then those of each other group."""
        num_blocks, num_groups = -(-num_tokens // self.block_size), self.num_others
        super().check_host(seq, num_tokens, host_block_ids[:num_blocks])
        windows, tokens = host_block_ids[num_blocks:], self.tokens_of(seq, num_tokens)
        size = len(windows) // num_groups
        for group in range(1, num_groups + 1):
            table = [None] * (num_blocks - size) + windows[(group - 1) * size : group * size]
            for position in range(max(0, num_tokens - self.window_of_groups + 1), num_tokens):
                held = self.host_slots.get((table[position // self.block_size], position % self.block_size))
                assert held == (-group, *tokens[: position + 1]), f"group {group} would get other K and V back"


def window_tables(seq):
    return [table.tolist() for table in seq.window_tables]


def all_blocks(seq):
    """The blocks that `seq` owns, in all groups."""
    return [*table_of(seq), *[block_id for table in window_tables(seq) for block_id in table if block_id]]


def check_cached_windows(manager, cache):
    """What is found of a group with a window holds the tokens of the block that it is found with."""
    found, size = manager.prefix_cache, manager.block_size
    blocks_of = {known.serial: block_id for block_id, known in found._by_id.items()}
    every = [block_id for blocks in found.others.blocks_of.values() for block_id in blocks]
    assert sorted(every) == sorted(found.others.serial_of), "a stale entry, or a block that is known twice"
    for serial, blocks in found.others.blocks_of.items():
        assert [found.others.serial_of[block_id] for block_id in blocks] == [serial] * (manager.num_groups - 1)
        for group, block_id in enumerate(blocks, 1):
            held = [cache.slots.get((block_id, i)) for i in range(size)]
            assert held == [(-group, *cache.slots[blocks_of[serial], i]) for i in range(size)], "of another prefix"


def grouped_slots(manager, seqs):
    """The slots that hold a computed token of `seqs`, in all groups."""
    size = manager.block_size
    windows = {(table[position // size], position % size) for seq in seqs for table in window_tables(seq)
               for position in range(seq.num_computed_tokens) if table[position // size]}  # fmt: skip
    return stored_slots(seqs, size) | windows


def check_grouped_stored(manager, seqs):
    """The slots of owned blocks are those that hold a token, and the empty ones at the end of each group's tables."""
    num_slots = manager.num_used_blocks * manager.block_size
    num_empty = manager.num_groups * count_empty_slots(seqs, manager.block_size)
    assert num_empty == num_slots - len(grouped_slots(manager, seqs))
