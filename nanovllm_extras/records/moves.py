"""What the parts of the engine pass to each other. This file imports no part of it."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from nanovllm_extras.records.tier import BlockName

Pair = tuple[int, int]
"""(source, destination): blocks, or slots of states."""
Named = tuple[BlockName, int]
"""The name of a block in a K/V store, or of a snapshot, and the block or slot that has it."""


class Moves(list[Pair]):
    """All copies around the forward pass of a step, in the order in which they are done (`transfers.py`).

        swap_outs       block -> block in host memory: of sequences that are preempted
        swap_ins        and back
        the list        block -> block: copy-on-write. All are read before any is written
        loads           data of a K/V store -> block
        state_copies    slot -> slot, one after the other. Negative slots are in host memory
        state_loads     data of a K/V store -> slot
                        the forward pass: each chunk reads the state in its source, and writes that in its slot
        saves           block -> K/V store
        state_saves     slot -> K/V store

    `slots` and `sources` have an entry for each chunk, or none if the model has no states. A draft has another source
    than its slot. `loaded` has the data of loads: [num_bytes] uint8.
    """

    def __init__(
        self,
        copies: Iterable[Pair] = (),
        *,
        swap_outs: Iterable[Pair] = (),
        swap_ins: Iterable[Pair] = (),
        state_copies: Iterable[Pair] = (),
        slots: Iterable[int] = (),
        sources: Iterable[int] | None = None,
    ) -> None:
        super().__init__(copies)
        self.swap_outs, self.swap_ins, self.state_copies = list(swap_outs), list(swap_ins), list(state_copies)
        self.slots = list(slots)
        self.sources = self.slots if sources is None else list(sources)
        self.loads: list[Named] = []
        self.saves: list[Named] = []
        self.state_loads: list[Named] = []
        self.state_saves: list[Named] = []
        self.loaded: dict[BlockName, Tensor] = {}

    @classmethod
    def of(cls, copies: list[Pair]) -> "Moves":
        """Return `copies`, as moves if they are a plain list."""
        return copies if isinstance(copies, Moves) else cls(copies)


# ---- for `invariants.py`


class Table(NamedTuple):
    """One block table of a sequence. With `num_behind` and `max_held`, entries behind a window are null blocks."""

    entries: list[int]
    num_behind: int = 0  # the leading entries that no later token sees: at most these are null
    max_held: int | None = None  # the most entries that are not null; None if none may be null


class Pool(NamedTuple):
    """Blocks or slots that are free or owned. Without `ref_counts` each has one owner at most."""

    kind: str  # "block", "slot", "host block" …
    ids: range
    free: Collection[int]
    owned: Sequence[tuple[object, list[int]]]  # (sequence, or what else owns them; what it owns)
    ref_counts: Sequence[int] | None = None  # by id
