"""The swap space: which blocks and slots of host memory keep the K, V and state of preempted sequences.

Copying K and V out and back can be cheaper than computing them again. A sequence that is swapped out owns neither
blocks nor a slot of the pool. The blocks of all groups of layers wait in host memory together. For a sequence with
three blocks in group 0, of which a group with a window has the last two:

    block tables     [ 7 2 5 ]   [ 0 3 6 ]
    copied out         7 2 5         3 6         to five host blocks

A recurrent state needs a slot in host memory, too; the sequence is computed again if either is missing. These slots
have negative numbers, so one ordered list holds all copies of states:

    A forks B in step 1; step 2 needs blocks, so it preempts B and copies B's state out; step 5 copies it back

    step 2    state_copies [(1, 2), (2, -1)]    the copy for the fork is due, and then slot 2 is copied to host slot -1
    step 5    state_copies [(-1, 4)]            B goes on with slot 4

This file has integers only. `transfers.py` has the memory, and does the copies before the step's forward pass.
"""

from itertools import chain

from nanovllm_extras.memory.kinds import NULL_BLOCK
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Pair, Pool


class SwapSpace:
    """Host memory for `num_blocks` blocks and, if a sequence has a state, `num_slots` states."""

    def __init__(self, num_blocks: int, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self._free = list(range(num_blocks))
        self._free_slots = list(range(-num_slots, 0))
        self._held: dict[Sequence, list[list[int]]] = {}  # of swapped sequences: the blocks of each group
        self._slots: dict[Sequence, int] = {}  # and the slots
        self._outs: list[Pair] = []
        self._ins: list[Pair] = []
        self._leaving: list[Sequence] = []  # swapped out since `take_moves`
        self._left: list[Sequence] = []  # swapped out by the newest step

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._held

    def host_block_ids(self, seq: Sequence) -> list[int]:
        """Return the host blocks with the K and V of `seq` while it is swapped out."""
        return [*chain(*self._held.get(seq, ()))]

    def slot_of(self, seq: Sequence) -> int:
        """Return the host slot with the state of `seq`, which is swapped out."""
        return self._slots[seq]

    def pools(self) -> list[Pool]:
        """Return what `check_invariants` needs to know of host memory."""
        held = [(seq, self.host_block_ids(seq)) for seq in self._held]
        pools = [Pool("host block", range(self.num_blocks), self._free, held)]
        if self.num_slots:
            owned = [(seq, [slot]) for seq, slot in self._slots.items()]
            pools.append(Pool("host slot", range(-self.num_slots, 0), self._free_slots, owned))
        return pools

    def try_swap_out(self, seq: Sequence, tables: list[list[int]], has_state: bool = False) -> bool:
        """Note that these blocks are to be copied out; False, and no change, if they do not fit, or if there are none.

        tables: of each group, the entries for the computed tokens of `seq`. The null blocks behind a window come first.
        has_state: the sequence needs a slot too. `slot_of` says which one it gets.
        """
        owned = [[block_id for block_id in entries if block_id != NULL_BLOCK] for entries in tables]
        num_blocks = sum(map(len, owned))
        if not 0 < num_blocks <= len(self._free) or has_state and not self._free_slots:
            return False
        self._held[seq] = [[self._free.pop() for _ in blocks] for blocks in owned]
        if has_state:
            self._slots[seq] = self._free_slots.pop()
        self._outs += zip(chain(*owned), self.host_block_ids(seq), strict=True)
        self._leaving.append(seq)
        return True

    def swap_in(self, seq: Sequence, tables: list[list[int]]) -> None:
        """Note that the blocks of `seq` are to be copied back. tables: its new blocks, as for `try_swap_out`"""
        for held, entries in zip(self._held[seq], tables, strict=True):
            # a block may have left the window by now: then the null block replaces it
            self._ins += [
                pair for pair in zip(held, entries[len(entries) - len(held) :], strict=True) if pair[1] != NULL_BLOCK
            ]
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Take back the host memory of `seq`, if it has any."""
        self._free += chain(*self._held.pop(seq, ()))
        if seq in self._slots:
            self._free_slots.append(self._slots.pop(seq))

    def take_moves(self) -> tuple[list[Pair], list[Pair]]:
        """Return pairs (source, destination) of blocks to copy out, and to copy back in, before the step runs.

        Copies out are done first. All of them are noted before the first copy in of the step, so a host block that a
        copy in gives up is not overwritten by a copy out of the same step.
        """
        moves = self._outs, self._ins
        self._outs, self._ins = [], []
        self._left, self._leaving = self._leaving, []
        return moves

    def forget_step(self) -> list[Sequence]:
        """Forget the copies of a step that has failed. Returns the sequences that it was to copy out."""
        seqs = [seq for seq in [*self._left, *self._leaving] if seq in self._held]
        self._outs, self._ins, self._left, self._leaving = [], [], [], []
        return seqs
