"""Faults that `test_schedule_search.py` plants in scheduler and block managers. Each is a mistake that one could make.

A fault is a function that replaces methods by wrong ones, with pytest's `monkeypatch.setattr`. `FAULTS` in
the test says where each must be found, and after how many actions.
"""

from nanovllm_extras.states.state_swap import StateSwapSpace

from nanovllm import prefix_cache
from nanovllm.block_manager import BlockManager
from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Scheduler
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.kv_groups import grouped_blocks
from nanovllm_extras.memory.block_manager import GroupedBlockManager, GroupedPrefixCache
from nanovllm_extras.memory.kinds import WindowBlockManager
from nanovllm_extras.memory.slots import SnapshotCache, StateBlockManager, StateScheduler
from nanovllm_extras.memory.swap_space import SwapSpace
from tests.fake_kv_cache import table_of

# ---- blocks, and their cache


def a_fork_does_not_count_as_an_owner(replace):
    right = BlockManager.fork

    def fork(self, parent, child):
        right(self, parent, child)
        for block_id in table_of(child):
            self._ref_counts[block_id] -= 1

    replace(BlockManager, "fork", fork)


def a_shared_block_is_written_without_a_copy(replace):
    replace(BlockManager, "_copy_tail", lambda self, seq: None)


def copies_are_not_part_of_the_step(replace):
    def take_copies(self):
        self._copies = []
        return []

    replace(BlockManager, "take_copies", take_copies)


def a_preempted_sequence_keeps_its_last_block(replace):
    right = Scheduler.preempt

    def preempt(self, seq, needy):
        self.block_manager._ref_counts[table_of(seq)[-1]] += 1
        right(self, seq, needy)

    replace(Scheduler, "preempt", preempt)


def an_evicted_block_can_still_be_found(replace):
    def take(self, seq):
        return self._free.popitem(last=False)[0]

    replace(BlockManager, "_take", take)


def a_block_is_known_by_its_own_tokens_only(replace):
    """The tokens before it are in neither the hash nor the comparison."""
    right = prefix_cache.hash_block

    def find(self, seq):
        hits = []
        for i in range(seq.max_cached_tokens // self.block_size):
            block_hash, tokens = self._key(seq, i)
            hit = self._by_hash.get(block_hash)
            if hit is None or hit.tokens != tokens:
                break
            hits.append(hit)
        return hits

    replace(prefix_cache, "hash_block", lambda parent_hash, tokens: right(0, tokens))
    replace(PrefixCache, "find", find)


def a_whole_prompt_is_found(replace):
    """No token is left whose computation would give the logits."""
    replace(Sequence, "max_cached_tokens", property(lambda self: self.token_ids.length))


def found_blocks_need_no_room(replace):
    """A block that is found may be free, and is not any more afterwards."""

    def try_admit(self, seq, num_reserved=0):
        hits = self.prefix_cache.find(seq)
        if self.num_missing_blocks(seq) - len(hits) > len(self._free) - num_reserved:
            return False
        for hit in hits:
            self._share(seq, hit.block_id)
        seq.num_computed_tokens, seq.num_registered_blocks = len(hits) * self.block_size, len(hits)
        seq.parent_serial = hits[-1].serial if hits else 0
        return True

    replace(BlockManager, "try_admit", try_admit)


def a_resumed_sequence_goes_on_where_it_was(replace):
    right = Scheduler.preempt

    def preempt(self, seq, needy):
        num_computed = seq.num_computed_tokens
        right(self, seq, needy)
        seq.num_computed_tokens = num_computed

    replace(Scheduler, "preempt", preempt)


def tokens_reach_the_wrong_sequences(replace):
    right = Scheduler.update
    replace(Scheduler, "update", lambda self, step, new_token_ids: right(self, step, new_token_ids[::-1]))


def samples_that_will_fork_take_no_places(replace):
    right = Scheduler.admit_waiting

    def admit_waiting(self, budget, chunks, admitted):
        limit, self.max_num_seqs = self.max_num_seqs, self.max_num_seqs + 1
        budget = right(self, budget, chunks, admitted)
        self.max_num_seqs = limit
        return budget

    replace(Scheduler, "admit_waiting", admit_waiting)


# ---- windows


def the_window_is_one_token_too_short(replace):
    def num_behind(self, position):
        return max(0, position - self.window + 2) // self.block_size

    replace(WindowBlockManager, "num_behind", num_behind)


def blocks_behind_the_window_are_not_freed(replace):
    def give_back(self, seq, num_behind):
        self.prefix_cache.register(seq, num_behind * self.block_size)
        seq.block_table.view(0, num_behind)[:] = 0

    replace(WindowBlockManager, "_give_back", give_back)


# ---- states


def states_are_copied_a_step_too_early(replace):
    """The step that forks, or whose chunk ends at a snapshot, computes the state that is to be copied."""
    right = StateScheduler.schedule

    def schedule(self):
        step = right(self)
        if step.chunks:
            step.copies.state_copies += self.block_manager.take_state_copies()
        return step

    replace(StateScheduler, "schedule", schedule)


def hits_are_copied_before_their_snapshots_are_taken(replace):
    right = StateScheduler.schedule

    def schedule(self):
        num_earlier = len(self.block_manager._copies_for_next)
        step = right(self)
        if step.chunks:
            copies = step.copies.state_copies
            copies[:] = copies[num_earlier:] + copies[:num_earlier]
        return step

    replace(StateScheduler, "schedule", schedule)


def a_snapshot_outlives_its_block(replace):
    replace(SnapshotCache, "forget", PrefixCache.forget)


def a_slot_is_not_freed(replace):
    replace(StateBlockManager, "free", BlockManager.free)


def samples_need_a_slot_too_many(replace):
    right = StateBlockManager.try_admit

    def try_admit(self, seq, num_reserved=0):
        return len(seq.children) + 3 <= self.num_free_slots and right(self, seq, num_reserved)

    replace(StateBlockManager, "try_admit", try_admit)


def a_child_computes_in_the_slot_of_its_parent(replace):
    def fork(self, parent, child):
        BlockManager.fork(self, parent, child)
        self._slots[child] = self._slots[parent]

    replace(StateBlockManager, "fork", fork)


def a_step_without_chunks_drops_the_copies(replace):
    replace(StateBlockManager, "put_back", lambda self, copies: None)


def a_snapshot_is_taken_wherever_a_chunk_ends(replace):
    """The state has read tokens behind the last full block, under whose prefix it is found."""

    def take_snapshot(self, seq):
        snapshots, serial = self.prefix_cache.snapshots, seq.parent_serial
        if serial and serial not in snapshots and self.num_free_slots and self.prefix_cache.last_block(seq):
            snapshots[serial] = self.prefix_cache.take_slot()
            self._copies_for_next.append((self._slots[seq], snapshots[serial]))

    replace(StateBlockManager, "take_snapshot", take_snapshot)


def a_hit_computes_in_the_snapshot(replace):
    """The slot of the snapshot is not copied, so the sequence overwrites it."""
    right = StateBlockManager.try_admit

    def try_admit(self, seq, num_reserved=0):
        is_admitted = right(self, seq, num_reserved)
        if is_admitted and seq.num_computed_tokens:
            source, slot = self._copies_for_this.pop()
            self.prefix_cache.free_slots.append(slot)
            self._slots[seq] = source
        return is_admitted

    replace(StateBlockManager, "try_admit", try_admit)


# ---- states in host memory


def a_state_is_not_copied_out(replace):
    replace(StateBlockManager, "copy_out", lambda self, seq, host_slot: None)


def a_state_is_not_copied_back(replace):
    """The sequence gets a slot, and computes with what another sequence has left there."""

    def copy_in(self, seq, host_slot):
        self._slots[seq] = self.prefix_cache.take_slot()

    replace(StateBlockManager, "copy_in", copy_in)


def a_state_is_copied_out_before_the_copy_of_its_fork(replace):
    """The copy for a fork or a snapshot, which is due, comes after those of this step."""
    hits_are_copied_before_their_snapshots_are_taken(replace)


def a_host_slot_is_not_freed(replace):
    replace(StateSwapSpace, "drop", SwapSpace.drop)


def states_stay_when_blocks_are_swapped(replace):
    """Only the blocks are swapped, and nobody looks whether there is a host slot."""

    def try_swap_out(self, seq):
        if not SwapSpace.try_swap_out(self, seq):
            return False
        self._slots[seq] = self._free_slots.pop() if self._free_slots else -1
        return True

    replace(StateSwapSpace, "try_swap_out", try_swap_out)


# ---- groups of layers


def a_group_keeps_a_token_too_few(replace):
    def num_blocks_behind(position, window, block_size):
        return max(0, position - window + 2) // block_size

    replace(grouped_blocks, "num_blocks_behind", num_blocks_behind)


def blocks_of_one_group_are_not_freed(replace):
    right = grouped_blocks.owned_by_windows
    replace(grouped_blocks, "owned_by_windows", lambda entries: right(entries[:1]))


def a_fork_shares_only_the_blocks_of_the_first_group(replace):
    replace(GroupedBlockManager, "fork", BlockManager.fork)


def blocks_of_windows_are_written_without_a_copy(replace):
    replace(GroupedBlockManager, "_copy_tail", BlockManager._copy_tail)


def blocks_behind_the_window_are_given_back_in_all_tables_but_one(replace):
    """They are free blocks, which the sequence still owns in the table of the last group."""

    def take_windows(self, seq, first, stop=None):
        entries = self.block_tables.windows_of(seq.block_table)[:, first:stop]
        taken = grouped_blocks.owned_by_windows(entries)
        entries[:-1] = grouped_blocks.NULL_BLOCK
        return taken

    replace(GroupedBlockManager, "take_windows", take_windows)


def a_hit_needs_only_the_last_block_of_its_window(replace):
    def find(self, seq):
        hits = PrefixCache.find(self, seq)
        while hits and hits[-1].serial not in self.windows:
            hits.pop()
        return hits

    replace(GroupedPrefixCache, "find", find)


def a_window_outlives_the_block_that_is_found(replace):
    """The blocks of windows are still known when the block of group 0 with the same tokens is evicted."""
    right = GroupedPrefixCache.forget

    def forget(self, block_id):
        if block_id in self._by_id:
            PrefixCache.forget(self, block_id)
        else:
            right(self, block_id)

    replace(GroupedPrefixCache, "forget", forget)


def an_evicted_block_of_a_window_can_still_be_found(replace):
    replace(GroupedPrefixCache, "forget", PrefixCache.forget)


def room_is_counted_for_one_group(replace):
    right = GroupedBlockManager.try_admit

    def try_admit(self, seq, num_reserved=0):
        num_groups, self.num_groups = self.num_groups, 1
        is_admitted = right(self, seq, num_reserved)
        self.num_groups = num_groups
        return is_admitted

    replace(GroupedBlockManager, "try_admit", try_admit)
    replace(GroupedBlockManager, "num_missing_blocks", BlockManager.num_missing_blocks)


def found_blocks_of_windows_stay_in_the_free_queue(replace):
    def set_windows(self, seq, i, blocks):
        self.block_tables.windows_of(seq.block_table)[:, i] = blocks
        for block_id in blocks:
            self._ref_counts[block_id] += 1

    replace(GroupedBlockManager, "_set_windows", set_windows)
