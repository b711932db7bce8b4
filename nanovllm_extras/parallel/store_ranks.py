"""A store with several ranks: each rank keeps its share of a block, under a name of its own.

Rank 0 has the scheduler, and decides. A block is found or loaded only if that is true on every rank:

    match    rank 0 sends names of blocks; each rank answers how many of the first ones it has, and the least counts
    load     rank 0 sends a name; each rank loads its share into a buffer, and answers whether that was possible
    a step   its message names the loaded blocks with their places in the KV cache, and the blocks to be saved

The ranks of a machine can share a folder, because each hashes the keys of rank 0 with its number. On several machines
each one has a folder of this path, and shared memory of this name. If the tiers of two ranks differ, because one of
them has lost a block or has not saved it yet, the block is computed and saved again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm_extras.kv_store.share import Share, name_in_share
from nanovllm_extras.parallel.messages import LOAD, LOAD_STATE, MATCH, pack_names, unpack_names
from nanovllm_extras.records.moves import Moves, Pair
from nanovllm_extras.records.tier import BlockName, Chain, Tier


class AsksRanks(Protocol):
    """A `Driver` (`parallel/driver.py`)."""

    def ask(self, message: np.ndarray, answer: Callable[[], int]) -> int:
        """Send a message that each rank answers with a number, rank 0 by `answer`. Returns the least of the answers."""


class AllRanks(Chain):
    """The tiers of all ranks, as rank 0 sees them. What it saves is its own share: each rank saves for itself."""

    def __init__(self, tiers: Sequence[Tier], driver: AsksRanks, bytes_per_state: int = 0) -> None:
        super().__init__(tiers)
        self._driver = driver
        self._bytes_per_state = bytes_per_state
        self.finished()  # each rank makes its tiers now, or ends with the reason, such as a folder of its machine

    def match(self, blocks: Sequence[BlockName]) -> int:
        num_found = super().match(blocks)
        return num_found and self._driver.ask(pack_names(MATCH, blocks[:num_found]), lambda: num_found)

    def load_from(self, block: BlockName, out: np.ndarray) -> Tier | None:
        """Return the tier that had the share of rank 0, if every rank has loaded its share."""
        own: list[Tier | None] = []
        kind = LOAD_STATE if out.nbytes == self._bytes_per_state else LOAD
        is_loaded = self._driver.ask(pack_names(kind, [block]), lambda: self._load_own(block, out, own))
        return own[0] if is_loaded else None

    def finished(self) -> None:
        """Return when all ranks have ended the step before. The ranks of a producer then have saved its blocks."""
        self._driver.ask(pack_names(MATCH, []), lambda: 0)

    def failed(self, block: BlockName) -> None:
        """Do nothing: each rank has forgotten the block if its own share was bad."""

    def _load_own(self, block: BlockName, out: np.ndarray, own: list[Tier | None]) -> bool:
        own.append(super().load_from(block, out))
        if own[0] is None:
            super().failed(block)
        return own[0] is not None


class RankShare(Share):
    """The share of a rank above 0, which does what the messages of rank 0 say. Their names are those of rank 0."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._name = f"rank {runner.part.rank}".encode()
        self._loaded: dict[BlockName, torch.Tensor] = {}  # for the next step

    def answer(self, kind: int, values: np.ndarray, block_size: int) -> int:
        """Do what a message of `kind` asks for, and return the answer. values: [num_values] int32"""
        names = unpack_names(values, block_size)
        if kind == MATCH:
            return self.tiers.match([name_in_share(name, self._name) for name in names])
        num_bytes = self.bytes_per_state if kind == LOAD_STATE else None
        block = self.load(name_in_share(names[0], self._name), num_bytes)
        if block is not None:
            self._loaded[names[0]] = block.data
        return block is not None

    def take_part(self, moves: list[Pair]) -> None:
        """Complete the moves of a step: they get the loaded data, and this rank's names of blocks to be saved."""
        loaded, self._loaded = self._loaded, {}
        if not isinstance(moves, Moves):
            return
        moves.loaded = loaded
        moves.saves = [(name_in_share(name, self._name), block_id) for name, block_id in moves.saves]
        moves.state_saves = [(name_in_share(name, self._name), slot) for name, slot in moves.state_saves]
