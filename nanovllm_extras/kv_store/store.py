"""The engine's side of the store: which blocks are loaded when a sequence is admitted, and which are saved.

`KVStore` lives as long as the engine. `StoreHooks` connects it with the block manager of a new scheduler, by wrapping
four methods:

    try_admit       after the pool's own prefix hits: load the blocks that follow, and count them as computed
    register        a full block is registered in the prefix cache: note it, to be saved after the step
    forget          the block is evicted before it was saved: drop the note
    take_copies     the loads and saves of the step travel with its copies (`moves.py`)

A step with prefix hits from the pool and from the store, and with block_size 4:

    prompt          [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 ]
    pool            [ block 7 ]
    store                     [ loaded into block 2 ]
    computed                                [ block 5, saved after the step | block 3 ]

Loading is synchronous: when `load` has filled a buffer, the block counts as computed, and the buffer is copied to the
device before the step's forward pass. If a load fails, the sequence computes from this block on.
"""

import weakref
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm_extras.kv_store.keys import digest_model, make_root_key, names_of
from nanovllm_extras.kv_store.share import Loaded, Share
from nanovllm_extras.kv_store.store_options import is_private, option_of, role_of, smallest_size
from nanovllm_extras.kv_store.tier import BlockName, Tier, TierStats
from nanovllm_extras.records import Moves, Named
from nanovllm_extras.window_blocks import NULL_BLOCK

if TYPE_CHECKING:
    from nanovllm_extras.full_runner import ModelRunner


@dataclass
class StoreStats:
    """Counters of an engine's store."""

    num_loaded_blocks: int = 0
    """Blocks that were loaded, instead of being computed."""
    num_loaded_states: int = 0
    """Snapshots of recurrent states that were loaded (`states/state_store.py`)."""
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

    Raises ValueError if a tier is smaller than one block.
    """

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__(runner)
        config = runner.config
        self.block_size = runner.backend.block_size
        self.stats = StoreStats()
        check_holds(config, "one block", self.bytes_per_block)
        role = role_of(config)
        self.can_load, self.can_save = role != "kv_producer", role != "kv_consumer"
        self.root_key = make_root_key(facts_of(runner, has_digest=not is_private(config)))
        if config.tensor_parallel_size > 1:
            from nanovllm_extras.kv_store.ranks import AllRanks

            ranked: Any = runner
            self.tiers = AllRanks(self.tiers.tiers, ranked.ranks)

    def add_draft(self, draft: "ModelRunner") -> None:
        """Let each block also have the K and V of a draft model, which shares the block tables."""
        check_holds(draft.config, "one block", self.bytes_per_block)
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

    def names(self, seq: Any, start: int, stop: int) -> list[BlockName]:
        """Return the names of the blocks [start, stop) of `seq`, whose tokens are known."""
        return names_of(seq, start, stop, self.root_key, self.block_size)

    def match(self, names: list[BlockName]) -> int:
        return self.tiers.match(names)

    def num_usable(self, names: list[BlockName], tier: Tier) -> int:
        """Return how many of the first of these blocks, which are found, can be used: all of them."""
        return len(names)

    def load_ahead(self, names: list[BlockName], tiers: Tier) -> int:
        """Load blocks so that faster tiers have them. Returns how many of the first ones were there, and are usable."""
        num_loaded, buffer = len(names), np.empty(self.bytes_per_block, np.uint8)
        for i in reversed(range(num_loaded)):  # the beginning of a prefix is evicted last
            if not tiers.load(names[i], buffer):
                num_loaded = i
        return num_loaded

    def load(self, name: BlockName, num_bytes: int | None = None) -> Loaded | None:
        block = super().load(name, num_bytes)
        self.stats.num_failed_loads += block is None
        return block


def check_holds(config: Any, what: str, num_bytes: int) -> None:
    """Raise ValueError if a tier is smaller than `num_bytes`, the size of `what`."""
    if smallest_size(config) < num_bytes:
        option, given = option_of(config), smallest_size(config)
        raise ValueError(f"{option} must hold at least {what} of {num_bytes} bytes, got {given}")


def facts_of(runner: "ModelRunner", has_digest: bool) -> dict[str, Any]:
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
    blocks = getattr(runner.layout, "block_layout", None)  # of equal blocks for K and V of two shapes
    if blocks is not None:
        facts["layout"] = repr(blocks)
    return facts | {"digest": digest_model(runner.folder, config.load_format)} if has_digest else facts


class StoreHooks:
    """Wraps the methods of one block manager."""

    def __init__(self, store: KVStore, blocks: Any) -> None:
        self._store: KVStore = weakref.proxy(store)  # this object and the block manager refer to each other
        self.blocks = blocks
        self._loads: list[Named] = []
        self._loaded: dict[BlockName, torch.Tensor] = {}  # their data
        self._saves: dict[int, BlockName] = {}  # block id -> name, of blocks that are full after the next step
        cache = blocks.prefix_cache
        self._try_admit, self._take_copies = blocks.try_admit, blocks.take_copies
        self._register, self._forget = cache.register, cache.forget
        self.blocks.take_copies = self.take_copies
        if store.can_load:
            self.blocks.try_admit = self.try_admit
        if store.can_save:
            cache.register, cache.forget = self.register, self.forget

    # ---- the wrapped methods

    def try_admit(self, seq: Any, num_reserved: int = 0) -> bool:
        if not self._try_admit(seq, num_reserved):
            return False
        if seq.num_computed_tokens == seq.block_table.length * self.blocks.block_size:
            self._load_more(seq)  # it is not half-way in a block, as a swapped one may be
        return True

    def register(self, seq: Any, num_tokens: int) -> None:
        first = seq.num_registered_blocks
        self._register(seq, num_tokens)
        if seq.num_registered_blocks > first:
            names = self._store.names(seq, first, seq.num_registered_blocks)
            for name, block_id in zip(names, seq.block_table.view(first).tolist(), strict=False):
                if block_id in self.blocks.prefix_cache:  # else another block with the same contents is
                    self._saves[block_id] = name

    def forget(self, block_id: int) -> None:
        self._saves.pop(block_id, None)
        self._forget(block_id)

    def take_copies(self) -> Any:
        copies = self._take_copies()
        if not self._loads and not self._saves:
            return copies
        return self._add_to(Moves.of(copies))

    def _add_to(self, moves: Moves) -> Moves:
        moves.loads, moves.loaded = self._loads, self._loaded
        moves.saves = [(name, block_id) for block_id, name in self._saves.items()]
        self._loads, self._loaded, self._saves = [], {}, {}
        return moves

    # ---- loading

    def _load_more(self, seq: Any) -> None:
        """Load the full blocks after the computed tokens of `seq` that the store has, and count them as computed."""
        first, stop = seq.block_table.length, seq.max_cached_tokens // self.blocks.block_size
        if first >= stop:
            return
        names = self._store.names(seq, first, stop)
        num_found = self._store.match(names)
        if not num_found:
            return
        stop, loaded = self._load(names, first, first + num_found)
        if stop > first:
            self._append(seq, first, names[: stop - first], loaded)

    def _load(self, names: list[BlockName], first: int, stop: int) -> tuple[int, dict[int, Loaded]]:
        """Load the blocks [first, stop) that the token after them sees.

        Returns a smaller `stop` if a block cannot be loaded, and the loaded blocks by their places.
        """
        loaded: dict[int, Loaded] = {}
        while stop > first:
            for i in range(max(first, self._num_behind(stop)), stop):
                block = loaded.get(i)
                if block is None:
                    block = self._store.load(names[i - first])
                if block is None:
                    stop = i
                    break
                loaded[i] = block
            else:
                break  # all are there
        return stop, loaded

    def _append(self, seq: Any, first: int, names: list[BlockName], loaded: dict[int, Loaded]) -> None:
        """Append the blocks [first, stop) to the table of `seq`: null blocks behind the window, then loaded ones."""
        blocks, stop = self.blocks, first + len(names)
        num_behind = self._num_behind(stop)
        if seq.block_table.view(0, min(first, num_behind)).any():
            blocks._give_back(seq, min(first, num_behind))  # what the pool has found and the next token does not see
        by_tier: dict[str, list[int]] = {}  # name of a tier -> ids of the blocks that it had
        for i in range(first, stop):
            if i < num_behind:
                blocks._share(seq, NULL_BLOCK)
                continue
            for tier, block_id in self._append_block(seq, names[i - first], loaded[i]):
                by_tier.setdefault(tier, []).append(block_id)
        if num_behind > first:
            self._skip_registration(seq, num_behind)
        seq.num_computed_tokens = stop * blocks.block_size
        self._register(seq, seq.num_computed_tokens)
        self._store.stats.num_loaded_blocks += sum(map(len, by_tier.values()))
        self._store.stats.loaded_tokens += (stop - first) * blocks.block_size
        if stop > first:  # else only a state is loaded (`states/state_store.py`)
            blocks.observer.on_load_blocks(seq, by_tier, (stop - first) * blocks.block_size)

    def _append_block(self, seq: Any, name: BlockName, block: Loaded) -> list[tuple[str, int]]:
        """Append a loaded block to the table of `seq`. Returns the name of the tier that had it, and its id."""
        block_id = self.blocks._take(seq)
        self.blocks._append(seq, block_id)
        return [self._note_load(name, block_id, block)]

    def _note_load(self, name: BlockName, block_id: int, block: Loaded) -> tuple[str, int]:
        self._loads.append((name, block_id))
        self._loaded[name] = block.data
        return block.tier, block_id

    def _skip_registration(self, seq: Any, num_blocks: int) -> None:
        """Go on after `num_blocks` blocks, of which the prefix cache does not have all.

        Their serial numbers are unknown, so the last one gets a new number. Other sequences do not find the blocks that
        are registered after it, but these are noted and saved.
        """
        cache = self.blocks.prefix_cache
        for i in range(len(seq.block_hashes), num_blocks):
            cache._key(seq, i)  # appends the hash, from which the next one follows
        seq.num_registered_blocks, seq.parent_serial = num_blocks, next(cache._serials)

    def _num_behind(self, num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks are behind the window of the token after them."""
        find = getattr(self.blocks, "num_behind", None)
        return 0 if find is None else find(num_blocks * self.blocks.block_size)
