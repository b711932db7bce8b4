"""What a store of blocks is: five calls. A chain of tiers, from fast to slow, is a tier.

The engine calls `match` and `load` when it admits a sequence, and `save` and `finished` from another thread. All calls
may come from several threads at once. A block's data is one contiguous array of bytes: K and V of all layers, with the
scales of quantised ones. For models with recurrent states, a tier also gets snapshots of states, which have another
size. A block that a tier does not have, or has lost, is computed: a tier never needs to raise.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)


class BlockName(NamedTuple):
    """The content of a full block, by which a tier finds it. Names are equal only if the K and V are.

    `key` is a chained hash over all tokens up to the end of the block, and over everything else that shapes K and V.
    A tier keeps the tokens with the data and compares them, so that two blocks with the same key are a miss.
    """

    key: bytes  # 32 bytes
    tokens: bytes  # of the block itself, int32, little-endian


@dataclass
class TierStats:
    """Counters of one tier. Blocks are counted by `match`, bytes and seconds by `load` and `save`."""

    hits: int = 0
    misses: int = 0  # blocks that were asked for and not found, those after the first such block included
    loaded_bytes: int = 0
    saved_bytes: int = 0
    load_time_s: float = 0.0
    save_time_s: float = 0.0
    evictions: int = 0  # blocks that made room for others
    failures: int = 0  # calls that raised, and blocks that were found damaged


class Tier(ABC):
    """A store of blocks by content. `name` is its label in statistics and metrics."""

    name: str

    def __init__(self) -> None:
        self.stats = TierStats()

    @abstractmethod
    def match(self, blocks: Sequence[BlockName]) -> int:
        """Return how many of the first of these blocks the tier has."""

    @abstractmethod
    def load(self, block: BlockName, out: np.ndarray) -> bool:
        """Fill `out`: [num_bytes] uint8. False if the block is gone, damaged, or of another size.

        After False, `out` may hold anything.
        """

    @abstractmethod
    def save(self, block: BlockName, data: np.ndarray) -> None:
        """Keep a copy of `data`: [num_bytes] uint8. Does nothing if the tier has the block, or has no room."""

    def finished(self) -> None:  # noqa: B027  # most tiers have nothing to do
        """Make what was saved visible to other processes, and after a restart."""

    @abstractmethod
    def failed(self, block: BlockName) -> None:
        """Forget a block that turned out to be bad."""

    def close(self) -> None:  # noqa: B027
        """Release what the tier holds. No call follows."""


class Chain(Tier):
    """Tiers from fast to slow. A block that a slow tier has is saved to the faster ones when it is loaded.

    A tier that raises is treated as one that does not have the block. The others go on.
    """

    name = "chain"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        super().__init__()
        self.tiers = tuple(tiers)
        self._logged: set[tuple[object, ...]] = set()

    def match(self, blocks: Sequence[BlockName]) -> int:
        """Return how many of the first blocks the tiers have together: each may be in a different tier."""
        num_found = 0
        while num_found < len(blocks):
            rest = blocks[num_found:]
            # the first tier that has the next block says how far it has the rest
            num_more = next((count for tier in self.tiers if (count := self._match(tier, rest))), 0)
            if not num_more:
                break
            num_found += num_more
        return num_found

    def load(self, block: BlockName, out: np.ndarray) -> bool:
        return self.load_from(block, out) is not None

    def load_from(self, block: BlockName, out: np.ndarray) -> Tier | None:
        """Load a block as `load` does, and return the tier that had it."""
        for i, tier in enumerate(self.tiers):
            try:
                is_loaded = tier.load(block, out)
            except Exception as error:
                is_loaded = False
                self._note_failure(tier, "load", error)
            if is_loaded:
                for faster in self.tiers[:i]:
                    self._save(faster, block, out)
                return tier
        return None

    def save(self, block: BlockName, data: np.ndarray) -> None:
        for tier in self.tiers:
            self._save(tier, block, data)

    def finished(self) -> None:
        for tier in self.tiers:
            try:
                tier.finished()
            except Exception as error:
                self._note_failure(tier, "finished", error)

    def failed(self, block: BlockName) -> None:
        for tier in self.tiers:
            try:
                tier.failed(block)
            except Exception as error:
                self._note_failure(tier, "failed", error)

    def close(self) -> None:
        for tier in self.tiers:
            try:
                tier.close()
            except Exception as error:
                self._note_failure(tier, "close", error)

    def _match(self, tier: Tier, blocks: Sequence[BlockName]) -> int:
        try:
            return min(max(0, int(tier.match(blocks))), len(blocks))
        except Exception as error:
            self._note_failure(tier, "match", error)
            return 0

    def _save(self, tier: Tier, block: BlockName, data: np.ndarray) -> None:
        try:
            tier.save(block, data)
        except Exception as error:
            self._note_failure(tier, "save", error)

    def _note_failure(self, tier: Tier, call: str, error: Exception) -> None:
        """Count a call that has raised, and log the first one of each tier and cause."""
        tier.stats.failures += 1
        cause = (id(tier), *cause_of(error))
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning(
                "K/V store: %s of tier %r has raised, further errors of this kind are only counted: %r",
                *(call, tier.name, error),
            )


def cause_of(error: Exception) -> tuple[type[Exception], int | None]:
    """Return what errors of one cause have in common: a full disk is not a lost one."""
    return type(error), getattr(error, "errno", None)
