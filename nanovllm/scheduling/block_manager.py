"""Who owns which block of the KV cache.

The cache is cut into blocks of `block_size` tokens, and a sequence's block table lists its blocks in order, so that
memory is handed out as sequences grow and wasted only in each one's last block (PagedAttention, Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). Blocks that hold the same tokens after the same prefix are shared: prefix caching.

This file decides which block is given, shared, kept and evicted, each in O(1). It knows no queues of requests (that is
the `Scheduler`, its only caller in a step) and no tensors.

Where a token lives, with block_size 4 and the block table [7, 2]:

    position              0   1   2   3   4   5
    block_table[pos // 4] 7   7   7   7   2   2
    slot = block * 4 + pos % 4
                         28  29  30  31   8   9
"""

from collections import OrderedDict
from itertools import count
from typing import NamedTuple

import xxhash

from nanovllm.scheduling.sequence import Sequence

ROOT_SERIAL = 0  # the parent of every first block


def hash_block(parent_hash: int, tokens: bytes) -> int:
    """The key of a full block: 64 bits over its tokens, seeded with the key of the block before it."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent_hash)


class CachedBlock(NamedTuple):
    """What a full block holds. The hash finds it; `parent_serial` and `tokens` prove it.

    A serial number is given once and never again, so a parent's serial stands for the whole prefix before the block,
    and two prefixes can't be mistaken for each other even where their hashes collide.
    """

    block_id: int
    block_hash: int
    serial: int
    parent_serial: int
    tokens: bytes


class BlockManager:
    """Blocks 1 … `num_blocks` for sequences; block 0, the null block, fills up rows of `block_tables`: nobody owns it.

    A block is owned (reference count above zero), or free; a free block that is still cached can be hit again until
    it is handed out anew. So `num_free_blocks == num_blocks` whenever no sequence runs.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # for the statistics alone: tokens in shared blocks, for each owner but one
        self.num_duplicate_tokens = 0
        self._ref_counts = [0] * (num_blocks + 1)
        # in the order in which they are to be handed out again
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._cached_by_hash: dict[int, CachedBlock] = {}
        self._cached_by_id: dict[int, CachedBlock] = {}
        self._serials = count(ROOT_SERIAL + 1)
        self._partial: dict[int, int] = {}  # tokens in the shared blocks that are not full, likewise
        self._copies: list[tuple[int, int]] = []
        self._registered_now: set[int] = set()  # by this step's chunks, so not computed yet
        self._registered_before: set[int] = set()  # by the step before, if that is in flight

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_references(self) -> int:
        """How often sequences own a block, together; 0 at rest."""
        return sum(self._ref_counts)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have in the cache when it is alone."""
        return self.num_blocks * self.block_size

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Blocks that `seq` still needs for all of its tokens."""
        return -(-seq.num_tokens // self.block_size) - seq.block_table.length

    # ---- giving and taking back

    def begin_step(self, is_ahead: bool = False) -> None:
        """`is_ahead`: the step before is still in flight, and may fail like this one."""
        self._registered_before = self._registered_now if is_ahead else set()
        self._registered_now = set()

    def end_step(self) -> None:
        """The oldest step in flight has succeeded: the blocks that it has filled cannot become untrue any more."""
        self._registered_before.clear()

    def rollback_steps(self) -> None:
        """Hide the blocks that the chunks in flight should have filled: their steps have failed."""
        for block_id in self._registered_before | self._registered_now:
            self._forget(block_id)

    def try_admit(self, seq: Sequence, num_promised: int = 0) -> bool:
        """Give `seq`, which owns nothing, the cached blocks of its prefix, if all of its tokens find room right now.

        Looking at the whole sequence, and not only at its first chunk, keeps a long prompt from being admitted only
        to be preempted half-way; its output is not looked at. `num_promised` blocks are still to be given to sequences
        that run, for what they have not computed yet. Sets `num_computed_tokens` to what was found, short of the last
        token, which must be computed in any case.
        """
        assert not seq.block_table.length, "a sequence that is admitted owns no blocks"
        num_free = len(self._free) - num_promised
        if num_free <= 0:
            return False
        hits = self._find_prefix(seq)
        if len(hits) * self.block_size == seq.num_tokens and hits[-1].block_id in self._registered_now:
            hits.pop()  # it would have to be copied before it is computed
        num_found = min(len(hits) * self.block_size, seq.num_tokens - 1)
        num_revived = sum(self._ref_counts[hit.block_id] == 0 for hit in hits)  # hits that count as free until now
        # the last token of a prompt that is cached whole is written anew: not into a block that others own
        has_shared_tail = num_found < len(hits) * self.block_size
        needs_copy = has_shared_tail and self._ref_counts[hits[-1].block_id] > 0
        num_new_blocks = self.num_missing_blocks(seq) - len(hits) + needs_copy
        if num_new_blocks + num_revived > num_free:
            return False
        for hit in hits:
            self._own(seq, hit.block_id)
        seq.num_computed_tokens = num_found
        seq.num_registered_blocks = len(hits)
        seq.parent_serial = hits[-1].serial if hits else ROOT_SERIAL
        seq.has_shared_tail = has_shared_tail
        return True

    def try_admit_swapped(self, seq: Sequence, num_promised: int) -> bool:
        """Give `seq`, whose K and V are in host memory, blocks of its own for them, if all of its tokens find room."""
        if self.num_missing_blocks(seq) > len(self._free) - num_promised:
            return False
        for _ in range(-(-seq.num_computed_tokens // self.block_size)):
            self._own(seq, self._take())
        seq.num_registered_blocks = 0
        return True

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Let the block table of `seq` cover its first `num_tokens` tokens; False, and no change, if blocks run out.

        If the first new token goes to a block that others own too, `seq` gets its own copy of it (copy-on-write).
        The blocks that these tokens fill can be shared from now on, even by later sequences of the same step: each
        layer stores the K and V of the whole batch before it attends. See `rollback_steps` for a step that fails.
        """
        needs_copy = seq.has_shared_tail and self._ref_counts[self._tail(seq)] > 1
        num_new_blocks = -(-num_tokens // self.block_size) - seq.block_table.length
        if num_new_blocks + needs_copy > len(self._free):
            return False
        if needs_copy:
            self._copy_tail(seq)
        elif seq.has_shared_tail:
            self._partial.pop(self._tail(seq), None)  # the last owner may write to it
        seq.has_shared_tail = False
        for _ in range(num_new_blocks):
            self._own(seq, self._take())
        if self.enable_prefix_caching and num_tokens // self.block_size > seq.num_registered_blocks:
            self._register(seq, num_tokens)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which owns nothing, share all that is computed of `parent`."""
        num_in_tail = parent.num_computed_tokens % self.block_size
        if num_in_tail:
            self._partial.setdefault(self._tail(parent), num_in_tail)
            parent.has_shared_tail = child.has_shared_tail = True
        for block_id in parent.block_table.view().tolist():
            self._own(child, block_id)
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_hashes = parent.block_hashes.copy()
        child.num_registered_blocks = parent.num_registered_blocks
        child.parent_serial = parent.parent_serial

    def free(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back, the last one first, so that the tails of prefixes are evicted first.

        Nothing of it is computed any more: `num_computed_tokens` is 0.
        """
        # a token that was not known when it was scheduled has not let its block be registered
        if self.enable_prefix_caching and seq.block_table.length:
            self._register(seq, seq.num_computed_tokens)
        for block_id in seq.block_table.view()[::-1].tolist():
            self._disown(block_id)
        seq.block_table.clear()
        seq.has_shared_tail = False
        seq.num_registered_blocks = 0
        seq.parent_serial = ROOT_SERIAL
        seq.num_computed_tokens = 0

    def take_copies(self) -> list[tuple[int, int]]:
        """The (source, destination) blocks of this step's copy-on-write, to be copied before it runs."""
        copies, self._copies = self._copies, []
        return copies

    def _own(self, seq: Sequence, block_id: int) -> None:
        """One more owner for a block, which may have been free."""
        if self._ref_counts[block_id] == 0:
            self._free.pop(block_id, None)
        else:
            self.num_duplicate_tokens += self._partial.get(block_id, self.block_size)
        self._ref_counts[block_id] += 1
        seq.block_table.append(block_id)

    def _disown(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            self.num_duplicate_tokens -= self._partial.get(block_id, self.block_size)
            return
        self._partial.pop(block_id, None)
        self._free[block_id] = None
        if block_id not in self._cached_by_id:  # nothing in it can be hit: reuse it first
            self._free.move_to_end(block_id, last=False)

    def _take(self) -> int:
        """A free block: one that holds nothing cached, else the one freed longest ago, whose contents are forgotten."""
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _tail(self, seq: Sequence) -> int:
        """The block that the next token's K and V go to."""
        return int(seq.block_table.data[seq.num_computed_tokens // self.block_size])

    def _copy_tail(self, seq: Sequence) -> None:
        i, source = seq.num_computed_tokens // self.block_size, self._tail(seq)
        destination = self._take()
        self._ref_counts[destination] = 1
        self._copies.append((source, destination))
        seq.block_table.data[i] = destination
        self._disown(source)

    # ---- prefix caching

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents; sequences that run keep their blocks."""
        self._cached_by_hash.clear()
        self._cached_by_id.clear()

    def _find_prefix(self, seq: Sequence) -> list[CachedBlock]:
        """The longest run of cached blocks that `seq` begins with."""
        hits: list[CachedBlock] = []
        if not self.enable_prefix_caching or seq.sampling_params.prompt_logprobs is not None:  # these need all logits
            return hits
        parent_serial = ROOT_SERIAL
        for i in range(seq.num_tokens // self.block_size):
            block_hash, tokens = self._key(seq, i)
            hit = self._cached_by_hash.get(block_hash)
            if hit is None or hit.parent_serial != parent_serial or hit.tokens != tokens:
                break
            hits.append(hit)
            parent_serial = hit.serial
        return hits

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` tokens of `seq`, as far as these are known."""
        for i in range(seq.num_registered_blocks, min(num_tokens, seq.num_known_tokens) // self.block_size):
            block_hash, tokens = self._key(seq, i)
            known = self._cached_by_hash.get(block_hash)
            if known is None or known.parent_serial != seq.parent_serial or known.tokens != tokens:
                if known is not None:  # another block under the same hash: the newer one wins
                    self._forget(known.block_id)
                block_id = int(seq.block_table.view()[i])
                known = CachedBlock(block_id, block_hash, next(self._serials), seq.parent_serial, tokens)
                self._cached_by_hash[block_hash] = self._cached_by_id[block_id] = known
                self._registered_now.add(block_id)
            # else: a twin was registered meanwhile. Full blocks are never exchanged, so both copies stay.
            seq.parent_serial = known.serial
            seq.num_registered_blocks = i + 1

    def _key(self, seq: Sequence, i: int) -> tuple[int, bytes]:
        """Hash and tokens of the `i`-th block of `seq`, which is full; `i` counts up, so its parent's hash is known."""
        tokens = seq.token_ids.view(i * self.block_size, (i + 1) * self.block_size).tobytes()
        if i == len(seq.block_hashes):
            seq.block_hashes.append(hash_block(seq.block_hashes[-1] if i else 0, tokens))
        return seq.block_hashes[i], tokens

    def _forget(self, block_id: int) -> None:
        """Drop what the prefix cache knows of a block, if anything."""
        cached = self._cached_by_id.pop(block_id, None)
        if cached is not None:
            del self._cached_by_hash[cached.block_hash]
