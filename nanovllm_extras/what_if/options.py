"""The options that a run is simulated with: the sizes that the scheduler keeps, and the classes that decide."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.checks import check_bool, check_class, check_int, checked, checks_of
from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Scheduler

MAX_BLOCK_SIZE = 1 << 20
MAX_BLOCKS = 10_000_000
"""The largest sizes that a recording may have (`trace/check.py`). A block manager takes memory for each block."""


@dataclass(frozen=True)
class Options:
    """Sizes with the names of `Config`. A bad value raises a TypeError or ValueError that names the field."""

    block_size: int = checked(16, check_int, minimum=1, maximum=MAX_BLOCK_SIZE)
    num_blocks: int = checked(4096, check_int, minimum=1, maximum=MAX_BLOCKS)
    """Blocks that sequences can own; `num_kv_blocks` of `Config`."""
    max_num_batched_tokens: int = checked(8192, check_int, minimum=1)
    max_num_seqs: int = checked(256, check_int, minimum=1)
    max_model_len: int = checked(131_072, check_int, minimum=2)
    enable_prefix_caching: bool = checked(True, check_bool)

    def __post_init__(self) -> None:
        for name, check in checks_of(self).items():
            check(name, getattr(self, name))

    def changed(self, changes: Mapping[str, Any]) -> "Options":
        """Return these options with some changed.

        A new block size without a number of blocks keeps the memory of the pool: 128 blocks of 4 become 16 of 32.
        """
        values = dict(changes)
        if "block_size" in values and "num_blocks" not in values:
            check_int("block_size", values["block_size"], minimum=1)
            num_slots = self.num_blocks * self.block_size
            values["num_blocks"] = num_slots // values["block_size"]
            if not values["num_blocks"]:
                raise ValueError(
                    f"block_size {values['block_size']} is larger than the pool, which has {num_slots} tokens; "
                    f"give a smaller one, or the number of blocks"
                )
        return replace(self, **values)

    def difference(self, other: "Options") -> dict[str, Any]:
        """Return the options that differ from those of `other`, by name."""
        own, others = asdict(self), asdict(other)
        return {name: value for name, value in own.items() if value != others[name]}


@dataclass(frozen=True)
class Parts:
    """The classes that decide: the core's, or subclasses of them."""

    scheduler_cls: type[Scheduler] = checked(Scheduler, check_class, base=Scheduler)
    block_manager_cls: type[BlockManager] = checked(BlockManager, check_class, base=BlockManager)
    prefix_cache_cls: type[PrefixCache] = checked(PrefixCache, check_class, base=PrefixCache)

    def __post_init__(self) -> None:
        for name, check in checks_of(self).items():
            check(name, getattr(self, name))
            if any(one.__module__.startswith("nanovllm_extras.") for one in getattr(self, name).__mro__):
                raise ValueError(f"{name} must extend the core's class, got {getattr(self, name).__qualname__}, which "
                                 f"extends a class of nanovllm_extras")  # fmt: skip
