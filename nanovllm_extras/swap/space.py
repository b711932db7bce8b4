"""The swap space: which host blocks hold the K and V of preempted sequences, and which copies are due.

Copying K and V out and back can be cheaper than computing them again. The scheduler decides which sequence is
preempted; `transfers.py` does the copies before the step's forward pass.
"""

from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm_extras.invariants import Pool
from nanovllm_extras.preemption import Recompute
from nanovllm_extras.records import Moves, Pair


class SwapSpace:
    """`num_blocks` blocks of `block_size` tokens in host memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._held: dict[Any, list[int]] = {}  # blocks of each sequence that is swapped out
        self._outs: list[Pair] = []
        self._ins: list[Pair] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def __contains__(self, seq: Any) -> bool:
        return seq in self._held

    def host_block_ids(self, seq: Any) -> list[int]:
        """Return the host blocks with the K and V of `seq` while it is swapped out."""
        return list(self._held.get(seq, ()))

    def pools(self) -> list[Pool]:
        """Return what `check_invariants` needs to know of host memory."""
        return [Pool("host block", range(self.num_blocks), self._free, list(self._held.items()))]

    def try_swap_out(self, seq: Any) -> bool:
        """Note that the computed blocks of `seq` are to be copied out; False, and no change, if they do not fit."""
        blocks = seq.block_table.view(0, -(-seq.num_computed_tokens // self.block_size)).tolist()
        blocks = [block_id for block_id in blocks if block_id]  # without those behind a window (`window_blocks.py`)
        if not blocks or len(blocks) > len(self._free):
            return False
        self._held[seq] = [self._free.pop() for _ in blocks]
        self._outs += zip(blocks, self._held[seq], strict=True)
        return True

    def swap_in(self, seq: Any) -> None:
        """Note that the blocks of `seq` are to be copied back, into the first blocks that it has been given."""
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        held = self._held[seq]
        block_ids = seq.block_table.view(num_blocks - len(held), num_blocks).tolist()
        # a block may have left the window by now: then the null block replaces it
        self._ins += [pair for pair in zip(held, block_ids, strict=True) if pair[1]]
        self.drop(seq)

    def drop(self, seq: Any) -> None:
        """Take back the host blocks of `seq`, if it has any."""
        self._free += self._held.pop(seq, [])

    def take_moves(self) -> tuple[list[Pair], list[Pair]]:
        """Return pairs (source, destination) of blocks to copy out, and to copy back in, before the step runs.

        Copies out are done first. All of them are noted before the first copy in of the step, so a host block that a
        copy in gives up is not overwritten by a copy out of the same step.
        """
        moves = self._outs, self._ins
        self._outs, self._ins = [], []
        return moves


class Swap(Recompute):
    """Preempted sequences go to `space` as long as it has room, and are computed again otherwise."""

    def __init__(self, block_manager: BlockManager, space: SwapSpace) -> None:
        super().__init__(block_manager)
        self.space = space
        self._leaving: list[Any] = []  # swapped out since `take_moves`
        self._left: list[Any] = []  # swapped out by the newest step

    def host_pools(self) -> list[Pool]:
        """Return what `check_invariants` needs to know of host memory."""
        return self.space.pools()

    def preempt(self, seq: Any) -> None:
        num_computed_tokens = seq.num_computed_tokens
        is_swapped = self.space.try_swap_out(seq)
        self.block_manager.free(seq)
        if is_swapped:
            seq.num_computed_tokens = num_computed_tokens
            self._leaving.append(seq)
            observer: Any = self.block_manager.observer
            observer.on_swap_out(seq, self.space.host_block_ids(seq))

    def try_admit(self, seq: Any, num_reserved: int) -> bool:
        if seq not in self.space:
            return super().try_admit(seq, num_reserved)
        if self.block_manager.num_missing_blocks(seq) > self.block_manager.num_free_blocks - num_reserved:
            return False
        self.block_manager.try_allocate(seq, seq.num_computed_tokens)  # blocks of its own
        self.space.swap_in(seq)
        return True

    def drop(self, seq: Any) -> None:
        self.space.drop(seq)

    def take_moves(self) -> list[Pair]:
        return self.with_swaps(super().take_moves())

    def with_swaps(self, copies: list[Pair]) -> list[Pair]:
        """Return a step's copies on the device with those that swap out and in."""
        self._left, self._leaving = self._leaving, []
        moves = Moves.of(copies)
        moves.swap_outs, moves.swap_ins = self.space.take_moves()
        return moves

    def roll_back(self) -> None:
        """Let sequences that the newest step has swapped out be computed again."""
        self.space.take_moves()
        for seq in [*self._left, *self._leaving]:
            self.forget(seq)

    def forget(self, seq: Any) -> None:
        if seq in self.space:
            self.block_manager.free(seq)
            self.space.drop(seq)


def make_swap(transfers: Any, blocks: BlockManager) -> Swap:
    """Return the strategy for a runner's `Transfers`, with as many blocks in host memory as it has."""
    return Swap(blocks, SwapSpace(transfers.num_swap_blocks, blocks.block_size))
