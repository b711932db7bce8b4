"""Faults that `test_schedule_search.py` plants in scheduler and block managers. Each is a mistake that one could make.

A fault is a function that replaces methods by wrong ones, with pytest's `monkeypatch.setattr`. `FAULTS` in
the test says where each must be found, and after how many actions.
"""

from array import array

from nanovllm import prefix_cache
from nanovllm.block_manager import BlockManager as CoreBlockManager
from nanovllm.prefix_cache import PrefixCache as CorePrefixCache
from nanovllm.scheduler import Scheduler as CoreScheduler
from nanovllm_extras.memory import block_manager, store_link
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.kinds import NULL_BLOCK, Window
from nanovllm_extras.memory.prefix_cache import OtherGroups, PrefixCache
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.memory.store_link import StoreLink
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling import drafter, pending, scheduler
from nanovllm_extras.scheduling.drafter import Drafter
from nanovllm_extras.scheduling.pending import Pending
from nanovllm_extras.scheduling.scheduler import Scheduler
from nanovllm_testing.fake_kv_cache import table_of


def do_nothing(*arguments, **options):
    """Replaces a method that returns nothing."""


# ---- blocks, and their cache


def a_fork_does_not_count_as_an_owner(replace):
    right = CoreBlockManager.fork

    def fork(self, parent, child):
        right(self, parent, child)
        for block_id in table_of(child):
            self._ref_counts[block_id] -= 1

    replace(CoreBlockManager, "fork", fork)


def a_shared_block_is_written_without_a_copy(replace):
    replace(CoreBlockManager, "_copy_tail", lambda self, seq: None)


def copies_are_not_part_of_the_step(replace):
    def take_copies(self):
        self._copies = []
        return []

    replace(CoreBlockManager, "take_copies", take_copies)


def a_preempted_sequence_keeps_its_last_block(replace):
    right = CoreScheduler.preempt

    def preempt(self, seq, needy):
        self.block_manager._ref_counts[table_of(seq)[-1]] += 1
        right(self, seq, needy)

    replace(CoreScheduler, "preempt", preempt)


def an_evicted_block_can_still_be_found(replace):
    def take(self, seq):
        block_id = self._free.popitem(last=False)[0]
        self._ref_counts[block_id] = 1
        return block_id

    replace(CoreBlockManager, "take", take)


def a_block_is_known_by_its_own_tokens_only(replace):
    """The tokens before it are in neither the hash nor the comparison."""
    right = prefix_cache.hash_block

    def find(self, seq):
        hits = []
        while len(hits) < seq.max_cached_tokens // self.block_size:
            block_hash, _, tokens = self.key(seq, hits)
            hit = self._by_hash.get(block_hash)
            if hit is None or hit.tokens != tokens:
                break
            hits.append(hit)
        return hits

    replace(prefix_cache, "hash_block", lambda parent_hash, tokens: right(0, tokens))
    replace(CorePrefixCache, "find", find)


def a_whole_prompt_is_found(replace):
    """No token is left whose computation would give the logits."""
    replace(Sequence, "max_cached_tokens", property(lambda self: len(self.token_ids)))


def found_blocks_need_no_room(replace):
    """A block that is found may be free, and is not any more afterwards."""

    def try_admit(self, seq, num_reserved=0):
        hits = self.prefix_cache.find(seq)
        if self.num_missing_blocks(seq) - len(hits) > len(self._free) - num_reserved:
            return False
        for hit in hits:
            self._share(seq, hit.block_id)
        seq.num_computed_tokens, seq.cached_blocks = len(hits) * self.block_size, hits
        return True

    replace(CoreBlockManager, "try_admit", try_admit)


def a_resumed_sequence_goes_on_where_it_was(replace):
    right = CoreScheduler.preempt

    def preempt(self, seq, needy):
        num_computed = seq.num_computed_tokens
        right(self, seq, needy)
        seq.num_computed_tokens = num_computed

    replace(CoreScheduler, "preempt", preempt)


def tokens_reach_the_wrong_sequences(replace):
    right = CoreScheduler.update
    replace(CoreScheduler, "update", lambda self, step, new_token_ids: right(self, step, new_token_ids[::-1]))


def samples_that_will_fork_take_no_places(replace):
    right = CoreScheduler.admit_waiting

    def admit_waiting(self, budget, chunks):
        limit, self.max_num_seqs = self.max_num_seqs, self.max_num_seqs + 1
        budget = right(self, budget, chunks)
        self.max_num_seqs = limit
        return budget

    replace(CoreScheduler, "admit_waiting", admit_waiting)


# ---- windows


def the_window_is_one_token_too_short(replace):
    def num_behind(self, position):
        return max(0, position - self.window + 2) // self.block_size

    replace(Window, "num_behind", num_behind)


def blocks_behind_the_window_are_not_freed(replace):
    def give_back(self, seq, position):
        num_behind = min(self.kind.num_behind(position), len(seq.block_table))
        self.prefix_cache.register(seq, num_behind * self.block_size)
        seq.block_table[:num_behind] = array("i", [NULL_BLOCK] * num_behind)

    replace(BlockManager, "give_back", give_back)


# ---- states


def states_are_copied_a_step_too_early(replace):
    """The step that forks, or whose chunk ends at a snapshot, computes the state that is to be copied."""
    right = Scheduler.schedule

    def schedule(self):
        step = right(self)
        if step.chunks:
            step.copies.state_copies += self.block_manager.states.take_copies()
        return step

    replace(Scheduler, "schedule", schedule)


def hits_are_copied_before_their_snapshots_are_taken(replace):
    def take_copies(self):
        copies = self._copies_for_this + self.copies_for_next
        self.copies_for_next, self._copies_for_this = [], []
        return copies

    replace(Slots, "take_copies", take_copies)


def a_snapshot_outlives_its_block(replace):
    replace(Slots, "forgotten", do_nothing)


def a_slot_is_not_freed(replace):
    replace(Slots, "free", do_nothing)


def samples_need_a_slot_too_many(replace):
    right = Slots.has_room_for
    replace(Slots, "has_room_for", lambda self, seq: len(seq.children) + 3 <= self.num_free_slots and right(self, seq))


def a_child_computes_in_the_slot_of_its_parent(replace):
    def fork(self, parent, child):
        self.owned[child] = self.owned[parent]

    replace(Slots, "fork", fork)


def a_step_without_chunks_drops_the_copies(replace):
    replace(Slots, "put_back", do_nothing)


def a_snapshot_is_taken_wherever_a_chunk_ends(replace):
    """The state has read tokens behind the last full block, under whose prefix it is found."""
    replace(Slots, "ends_at_snapshot", lambda self, seq: seq.num_registered_blocks > 0)


def a_hit_computes_in_the_snapshot(replace):
    """The slot of the snapshot is not copied, so the sequence overwrites it."""
    right = Slots.admit

    def admit(self, seq, num_found):
        right(self, seq, num_found)
        if seq.num_computed_tokens:
            source, slot = self._copies_for_this.pop()
            self.free_slots.append(slot)
            self.owned[seq] = source

    replace(Slots, "admit", admit)


# ---- states in host memory


def a_state_is_not_copied_out(replace):
    replace(Slots, "copy_out", do_nothing)


def a_state_is_not_copied_back(replace):
    """The sequence gets a slot, and computes with what another sequence has left there."""

    def copy_in(self, seq, host_slot):
        self.owned[seq] = self._take_free()

    replace(Slots, "copy_in", copy_in)


def a_state_is_copied_out_before_the_copy_of_its_fork(replace):
    """The copy for a fork or a snapshot, which is due, comes after those of this step."""
    hits_are_copied_before_their_snapshots_are_taken(replace)


def a_host_slot_is_not_freed(replace):
    def drop(self, seq):
        for blocks in self._held.pop(seq, ()):
            self._free += blocks

    replace(SwapSpace, "drop", drop)


def states_stay_when_blocks_are_swapped(replace):
    """Only the blocks are swapped, and nobody looks whether there is a host slot."""
    right = SwapSpace.try_swap_out
    replace(Slots, "copy_out", do_nothing)

    def try_swap_out(self, seq, tables, has_state=False):
        if not right(self, seq, tables):
            return False
        self._slots[seq] = self._free_slots.pop() if self._free_slots else -1
        return True

    replace(SwapSpace, "try_swap_out", try_swap_out)


# ---- groups of layers


def a_group_keeps_a_token_too_few(replace):
    the_window_is_one_token_too_short(replace)


def a_group_gives_back_what_only_the_last_token_of_a_chunk_does_not_see(replace):
    def try_allocate(self, seq, num_tokens):
        self.give_back(seq, num_tokens - 1)
        return self._try_allocate_in_groups(seq, num_tokens) and CoreBlockManager.try_allocate(self, seq, num_tokens)

    replace(BlockManager, "try_allocate", try_allocate)


def a_group_gives_nothing_back(replace):
    replace(block_manager, "take_before", lambda tables, stop: [])


def blocks_of_one_group_are_not_freed(replace):
    right = block_manager.last_first
    replace(block_manager, "last_first", lambda entries: right(entries[:1]))


def a_fork_shares_only_the_blocks_of_the_first_group(replace):
    replace(BlockManager, "fork", CoreBlockManager.fork)


def blocks_of_windows_are_written_without_a_copy(replace):
    replace(BlockManager, "_copy_tail", CoreBlockManager._copy_tail)


def shared_blocks_of_groups_are_replaced_and_not_copied(replace):
    right = BlockManager._copy_tail

    def copy_tail(self, seq):
        num_before = len(self._copies)
        right(self, seq)
        del self._copies[num_before + 1 :]

    replace(BlockManager, "_copy_tail", copy_tail)


def a_copy_in_groups_needs_no_room(replace):
    right = BlockManager._try_allocate_in_groups

    def try_allocate_in_groups(self, seq, num_tokens):
        """As if only group 0 copied the shared block."""
        has_shared_tail, seq.has_shared_tail = seq.has_shared_tail, False
        if len(self._free) < has_shared_tail or not right(self, seq, num_tokens):
            seq.has_shared_tail = has_shared_tail
            return False
        if has_shared_tail and self._ref_counts[self._tail(seq)] > 1:
            self._copy_tail(seq)
        return True

    replace(BlockManager, "_try_allocate_in_groups", try_allocate_in_groups)


def blocks_behind_the_window_are_given_back_in_all_tables_but_one(replace):
    """They are free blocks, which the sequence still owns in the table of the last group."""

    def take_before(tables, stop):
        taken = block_manager.last_first([table[:stop] for table in tables])
        for table in tables[:-1]:
            table[:stop] = array("i", [NULL_BLOCK] * stop)
        return taken

    replace(block_manager, "take_before", take_before)


def a_hit_needs_only_the_last_block_of_its_window(replace):
    def num_usable(self, hits):
        return next((i for i in range(len(hits), 0, -1) if hits[i - 1].serial in self.blocks_of), 0)

    replace(OtherGroups, "num_usable", num_usable)


def a_window_outlives_the_block_that_is_found(replace):
    """The blocks of windows are still known when the block of group 0 with the same tokens is evicted."""
    right = OtherGroups.forgotten

    def forgotten(self, block_id, serial):
        if serial is None:
            right(self, block_id, serial)

    replace(OtherGroups, "forgotten", forgotten)


def an_evicted_block_of_a_window_can_still_be_found(replace):
    replace(OtherGroups, "forgotten", do_nothing)


def a_taken_block_of_a_group_can_still_be_found(replace):
    def take_in_groups(self, seq, i):
        return tuple(self._free.popitem(last=False)[0] for _ in range(1, self.num_groups))

    replace(BlockManager, "_take_in_groups", take_in_groups)


def blocks_of_a_group_replace_those_that_are_found(replace):
    """A prefix that is computed again gives its blocks the serial number of those that are still known."""

    def registered(self, cache, seq, i):
        blocks = tuple([table[i] for table in seq.window_tables])
        if NULL_BLOCK not in blocks:
            self.blocks_of[seq.parent_serial] = blocks
            self.serial_of.update(dict.fromkeys(blocks, seq.parent_serial))

    replace(OtherGroups, "registered", registered)


def null_blocks_of_groups_are_found(replace):
    """Blocks behind the window of a prefix that was loaded."""

    def registered(self, cache, seq, i):
        blocks = tuple([table[i] for table in seq.window_tables])
        if seq.parent_serial not in self.blocks_of:
            self.blocks_of[seq.parent_serial] = blocks
            self.serial_of.update(dict.fromkeys(blocks, seq.parent_serial))

    replace(OtherGroups, "registered", registered)


def room_is_counted_for_one_group(replace):
    def counted_for_one(right):
        def count(self, *arguments):
            num_groups, self.num_groups = self.num_groups, 1
            num_blocks = right(self, *arguments)
            self.num_groups = num_groups
            return num_blocks

        return count

    for name in ("num_needed_for", "num_missing_blocks"):
        replace(BlockManager, name, counted_for_one(getattr(BlockManager, name)))


def found_blocks_of_windows_stay_in_the_free_queue(replace):
    def set_in_groups(self, seq, i, blocks):
        for table, block_id in zip(seq.window_tables, blocks, strict=True):
            table[i] = block_id
            self._ref_counts[block_id] += 1

    replace(BlockManager, "_set_in_groups", set_in_groups)


def rejected_drafts_keep_the_blocks_of_groups(replace):
    right = BlockManager.rewind

    def rewind(self, seq, num_tokens):
        windows, seq.window_tables = seq.window_tables, []
        given_back = right(self, seq, num_tokens)
        seq.window_tables = windows
        return given_back

    replace(BlockManager, "rewind", rewind)


def only_the_first_group_comes_back_from_host_memory(replace):
    right = SwapSpace.swap_in

    def swap_in(self, seq, tables):
        right(self, seq, [tables[0], *([NULL_BLOCK] * len(table) for table in tables[1:])])

    replace(SwapSpace, "swap_in", swap_in)


def only_the_first_group_is_loaded(replace):
    right = StoreLink._append

    def append(self, blocks, seq, names, shared, data):
        num_before = len(self._loads.loads)
        right(self, blocks, seq, names, shared, data)
        self._loads.loads[num_before:] = [one for one in self._loads.loads[num_before:] if one[0] in names]

    replace(StoreLink, "_append", append)


def all_groups_are_saved_under_one_name(replace):
    replace(store_link, "name_in_group", lambda name, group: name)


# ---- what is moved


def a_block_that_is_not_full_is_not_copied_out(replace):
    def computed_blocks(self, seq):
        num_blocks = seq.num_computed_tokens // self.block_size
        return [seq.block_table[:num_blocks].tolist()]

    replace(BlockManager, "computed_blocks", computed_blocks)


def what_was_behind_the_window_is_copied_back(replace):
    """The host blocks pair up with the first entries of the block table, and not with the last ones."""
    right = SwapSpace.swap_in

    def swap_in(self, seq, tables):
        counts = [len(blocks) for blocks in self._held[seq]]
        right(self, seq, [table[:count] for table, count in zip(tables, counts, strict=True)])

    replace(SwapSpace, "swap_in", swap_in)


def a_sequence_that_ends_keeps_its_host_blocks(replace):
    replace(BlockManager, "free", BlockManager._free_all)


def a_sequence_comes_back_without_room(replace):
    def try_swap_in(self, seq, space, num_free):
        self.try_allocate(seq, seq.num_computed_tokens)
        space.swap_in(seq, self.computed_blocks(seq))
        return True

    replace(BlockManager, "_try_swap_in", try_swap_in)


def a_failed_step_keeps_what_it_has_swapped_out(replace):
    """Nothing may have been copied, and the sequence comes back to it."""

    def forget_step(self):
        self._outs, self._ins, self._left, self._leaving = [], [], [], []
        return []

    replace(SwapSpace, "forget_step", forget_step)
    right = BlockManager.forget_step
    replace(BlockManager, "forget_step", lambda self, preempted: right(self, ()))


def only_the_newest_step_forgets_what_it_has_swapped_out(replace):
    """The failed step is the one before it: another one was launched ahead."""
    right = BlockManager.forget_step
    replace(BlockManager, "forget_step", lambda self, preempted: right(self, ()))


def an_evicted_block_is_saved(replace):
    replace(StoreLink, "forgotten", do_nothing)


def a_step_without_chunks_saves_what_was_evicted_since(replace):
    right = StoreLink.take_moves

    def put_back(self, moves):
        self.carried = moves.saves

    def take_moves(self, moves):
        right(self, moves)
        moves.saves = getattr(self, "carried", []) + moves.saves
        self.carried = []

    replace(StoreLink, "put_back", put_back)
    replace(StoreLink, "take_moves", take_moves)


def a_late_snapshot_is_saved_from_the_slot_of_its_sequence(replace):
    """The step before which it is noted changes the state in that slot."""
    right = StoreLink.note_state

    def note_state(self, seq, states, moves):
        right(self, seq, states, moves)
        if moves is None and self._late:
            name, serial = self._late[-1]
            self._late[-1] = name, (serial, states.owned[seq])

    def save_late(self, moves, states):
        moves.state_saves += [(name, slot) for name, (serial, slot) in self._late if serial in states.snapshots]
        self._late = []

    replace(StoreLink, "note_state", note_state)
    replace(StoreLink, "save_late", save_late)


def a_late_snapshot_is_saved_after_it_was_dropped(replace):
    """Its slot has another state by then."""
    right = StoreLink.note_state

    def note_state(self, seq, states, moves):
        right(self, seq, states, moves)
        if moves is None and self._late and not isinstance(self._late[-1][1], tuple):
            name, serial = self._late[-1]
            self._late[-1] = name, (states.snapshots[serial],)

    def save_late(self, moves, states):
        moves.state_saves += [(name, slot) for name, (slot,) in self._late]
        self._late = []

    replace(StoreLink, "note_state", note_state)
    replace(StoreLink, "save_late", save_late)


def a_loaded_state_stays_in_host_memory(replace):
    right = StoreLink.take_moves

    def take_moves(self, moves):
        right(self, moves)
        moves.state_loads = []

    replace(StoreLink, "take_moves", take_moves)


def loads_are_done_again_by_the_next_step(replace):
    right = StoreLink.take_moves

    def take_moves(self, moves):
        loads = self._loads
        right(self, moves)
        self._loads = loads

    replace(StoreLink, "take_moves", take_moves)


# ---- tokens that are not known


def blocks_of_unknown_tokens_are_found(replace):
    def register(self, seq, num_tokens):
        for i in range(seq.num_registered_blocks, num_tokens // self.block_size):
            CorePrefixCache.register(self, seq, (i + 1) * self.block_size)
            for part in self.parts:
                part.registered(self, seq, i)

    replace(PrefixCache, "register", register)


def a_placeholder_names_the_next_row(replace):
    right = pending.expect_token
    replace(pending, "expect_token", lambda seq, row: right(seq, row + 1))


def the_last_token_is_expected_too(replace):
    """A step computes its K and V, although the sequence ends with it."""

    def add(self, planned, drafts, expects_tokens):
        for row, seq in enumerate(planned.samples if expects_tokens and not drafts else ()):
            pending.expect_token(seq, row)
        return right(self, planned, drafts, expects_tokens and bool(drafts))

    right = Pending.add
    replace(Pending, "add", add)


def a_sequence_that_ends_keeps_its_placeholders(replace):
    replace(scheduler, "forget_unknown", do_nothing)


def a_step_ahead_takes_blocks_from_others(replace):
    def can_schedule_ahead(self):
        return self.pending.verification is None and self.drafter.rests(self.running, self.may_admit())

    replace(Scheduler, "can_schedule_ahead", can_schedule_ahead)


def a_step_is_launched_ahead_of_drafts(replace):
    replace(Scheduler, "can_schedule_ahead", lambda self: True)


def all_drafts_are_right(replace):
    right = Drafter.verify
    replace(Drafter, "verify", lambda self, blocks, seq, drafts, drawn: right(self, blocks, seq, drafts, drafts))


def the_token_after_a_wrong_draft_is_kept(replace):
    right = Drafter.verify

    def verify(self, blocks, seq, drafts, drawn):
        return min(len(drafts), 1 + right(self, blocks, seq, drafts, drawn))

    replace(Drafter, "verify", verify)


def blocks_of_wrong_drafts_are_kept(replace):
    replace(BlockManager, "rewind", lambda self, seq, num_tokens: [])


def a_sequence_keeps_the_state_after_its_last_draft(replace):
    right = Slots.rewind
    replace(Slots, "rewind", lambda self, seq, num_accepted: right(self, seq, len(self.drafts[seq])))


def slots_of_wrong_drafts_are_not_freed(replace):
    def rewind(self, seq, num_accepted):
        self.owned[seq] = self.slots_of(seq)[num_accepted]
        del self.drafts[seq]

    replace(Slots, "rewind", rewind)


def drafts_read_the_state_of_their_sequence(replace):
    """Each draft must read the state after the draft before it."""
    right = Slots.rows_of

    def rows_of(self, seqs):
        seqs = list(seqs)
        slots, _ = right(self, seqs)
        return slots, [self.owned[seq] for seq in seqs for _ in self.slots_of(seq)]

    replace(Slots, "rows_of", rows_of)


def drafts_go_on_behind_a_snapshot(replace):
    """A chunk ends there, so these drafts are not computed."""

    def with_slots(states, running, wanted):
        return [(seq, count) for seq, count in wanted if count <= states.num_free_slots // len(wanted)]

    replace(drafter, "with_slots", with_slots)


def drafts_take_slots_that_are_not_free(replace):
    def with_slots(states, running, wanted):
        return [(seq, min(count, states.next_cut(seq) - seq.num_tokens)) for seq, count in wanted
                if states.next_cut(seq) > seq.num_tokens]  # fmt: skip

    replace(drafter, "with_slots", with_slots)


def a_draft_may_end_its_sequence(replace):
    replace(Drafter, "_allow", lambda self, seq, proposed: proposed)


def drafts_take_blocks_from_others(replace):
    replace(BlockManager, "has_room_for_drafts", lambda self, running, counts: True)


def a_snapshot_is_taken_before_its_tokens_are_known(replace):
    """It is found by the serial number of an earlier block."""
    replace(Slots, "ends_at_snapshot", lambda self, seq: self.is_due(seq) and seq.num_registered_blocks > 0)


def a_sequence_that_will_fork_gets_drafts(replace):
    right = Drafter._patience_with

    def patience_with(self, seq):
        children, seq.children = seq.children, []
        patience = right(self, seq)
        seq.children = children
        return patience

    replace(Drafter, "_patience_with", patience_with)
