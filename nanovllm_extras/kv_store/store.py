"""The engine's K/V store: the tiers that keep blocks and snapshots, and the thread that saves to them.

`memory/store_link.py` says which blocks are loaded when a sequence is admitted, and which are saved. A store keeps
blocks, and snapshots of recurrent states, which have another size.
"""

from dataclasses import dataclass, field, replace
from secrets import token_hex

import numpy as np

from nanovllm_extras.kv_store.keys import digest_model, make_root_key, names_of
from nanovllm_extras.kv_store.share import Loaded, Runner, Share, name_of_state
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.store_options import is_private, option_of, role_of, smallest_size
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.tier import BlockName, Tier, TierStats

MAX_LOOKUPS = 256


@dataclass
class StoreStats:
    """Counters of an engine's store."""

    num_loaded_blocks: int = 0
    """Blocks that were loaded, instead of being computed."""
    num_loaded_states: int = 0
    """Snapshots of recurrent states that were loaded."""
    loaded_tokens: int = 0
    """Tokens whose K and V came from the store when a sequence was admitted."""
    num_failed_loads: int = 0
    """Blocks and snapshots that a tier had when it was asked, and that could not be loaded."""
    num_dropped_blocks: int = 0
    """Blocks and snapshots that were not saved, because too many waited."""
    tiers: dict[str, TierStats] = field(default_factory=dict)
    """Name of each tier -> its counters."""


class KVStore(Share):
    """The tiers of one engine, and the thread that saves to them.

    Raises ValueError if a tier is smaller than one block, and a snapshot if the model has recurrent states.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        config = runner.config
        self.block_size = runner.backend.block_size
        self.stats = StoreStats()
        check_holds(config, *self._smallest_content())
        role = role_of(config)
        self.can_load, self.can_save = role != "kv_producer", role != "kv_consumer"
        self.root_key = make_root_key(facts_of(runner, has_digest=not is_private(config)))
        if self.bytes_per_state:
            pool = runner.layout.pool
            shape, dtypes = pool.shape, [str(states.dtype) for states in pool.states]
            facts = [shape.num_layers, shape.conv, shape.recurrent, dtypes]
            self.root_key = make_root_key({"blocks": self.root_key.hex(), "states": facts})
        self.tiers = runner.ranks.tiers_of_all(self.tiers, self.bytes_per_state)

    def add_draft(self, draft: Runner) -> None:
        """Let each block also have the K and V of a draft model, which shares the block tables."""
        check_holds(draft.config, *self._smallest_content())
        facts = facts_of(draft, has_digest=not is_private(draft.config))
        self.root_key = make_root_key({"large": self.root_key.hex(), "draft": facts})

    def wait(self) -> None:
        super().wait()
        self.tiers.finished()

    def forget_all(self) -> None:
        """Let new sequences find no block that was saved before: their keys begin with another root."""
        self.root_key = make_root_key({"before": self.root_key.hex(), "salt": token_hex()})

    def get_stats(self) -> StoreStats:
        """Return a copy of all counters, which other threads still change."""
        tiers = {tier.name: replace(tier.stats) for tier in self.tiers.tiers}
        return replace(self.stats, num_dropped_blocks=self.saver.num_dropped, tiers=tiers)

    def names(self, seq: Sequence, start: int, stop: int) -> list[BlockName]:
        """Return the names of the blocks [start, stop) of `seq`, whose tokens are known."""
        return names_of(seq, start, stop, self.root_key, self.block_size)

    def match(self, names: list[BlockName]) -> int:
        return self.tiers.match(names)

    def num_usable(self, names: list[BlockName], tier: Tier) -> int:
        """Return how many of the first of these blocks, which are found, can be used.

        These are all of them, or those up to the last snapshot that `tier` has. Only the last `MAX_LOOKUPS` ends are
        looked up, because no step runs meanwhile. By default, a prefix that was computed once has a snapshot in each 64
        blocks.
        """
        if not self.bytes_per_state:
            return len(names)
        for count in range(len(names), max(0, len(names) - MAX_LOOKUPS), -1):
            if tier.match([name_of_state(names[count - 1])]):
                return count
        return 0

    def load_ahead(self, names: list[BlockName], tiers: Tier) -> int:
        """Load blocks so that faster tiers have them. Returns how many of the first ones were there, and are usable."""
        block, state = np.empty(self.bytes_per_block, np.uint8), np.empty(self.bytes_per_state, np.uint8)
        while num_usable := self.num_usable(names, tiers):
            names = names[:num_usable]
            num_loaded = num_usable
            for i in reversed(range(num_usable)):  # the beginning of a prefix is evicted last
                if not tiers.load(names[i], block):
                    num_loaded = i
            if not self.bytes_per_state:
                return num_loaded
            if num_loaded == num_usable and tiers.load(name_of_state(names[-1]), state):
                return num_usable
            names = names[: min(num_loaded, num_usable - 1)]
        return 0

    def load_state(self, name: BlockName) -> Loaded | None:
        """Return the snapshot at the end of the block with this name, or None if it cannot be loaded."""
        return self.load(name_of_state(name), self.bytes_per_state)

    def load(self, name: BlockName, num_bytes: int | None = None) -> Loaded | None:
        block = super().load(name, num_bytes)
        self.stats.num_failed_loads += block is None
        return block

    def _smallest_content(self) -> tuple[str, int]:
        """Return what each tier must hold, in words, and its size in bytes."""
        num_bytes = self.bytes_per_block + self.bytes_per_state
        return "one block and one state" if self.bytes_per_state else "one block", num_bytes


def check_holds(config: Config, what: str, num_bytes: int) -> None:
    """Raise ValueError if a tier is smaller than `num_bytes`, the size of `what`."""
    if smallest_size(config) < num_bytes:
        option, given = option_of(config), smallest_size(config)
        raise ValueError(f"{option} must hold at least {what} of {num_bytes} bytes, got {given}")


def facts_of(runner: Runner, has_digest: bool) -> dict[str, object]:
    """Return what shapes the K and V of this runner's model.

    has_digest: include the contents of the model's files. Host memory that ends with the engine does not need them.
    """
    config, backend, cache = runner.config, runner.backend, runner.kv_cache
    kinds = [[type(one).__name__, getattr(one, "instructions", "")] for one in runner.backends]
    facts = {
        "model": [runner.model_class.__name__, repr(config.hf_overrides)],
        "shape": {name: repr(value) for name, value in vars(runner.shape).items()},
        "dtype": str(runner.dtype),
        "cache": [str(cache.dtype), *backend.kv_cache_shape(cache.num_layers, 1)],
        "block_size": backend.block_size,
        "backend": [*sum(kinds, []), config.enforce_eager],
        "weights": [repr(config.quantization), config.load_format, config.seed if config.load_format == "dummy" else 0],
        "ranks": config.tensor_parallel_size,
        "max_model_len": runner.max_model_len,  # some rope types depend on it
    }
    blocks = runner.layout.layers.block_layout  # of equal blocks for K and V of two shapes
    if blocks is not None:
        facts["layout"] = repr(blocks)
    return facts | {"digest": digest_model(runner.folder, config.load_format)} if has_digest else facts
