"""What one runner stores of each block: the K and V of its own KV cache, with tiers and a thread that saves to them.

An engine of one rank has one share. With several ranks, each rank has one (`ranks.py`).
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.kv_store.keys import KEY_BYTES
from nanovllm_extras.kv_store.make_tiers import make_tiers
from nanovllm_extras.kv_store.saver import Saver
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.store_options import has_users_tier, role_of
from nanovllm_extras.records.moves import Moves, Pair
from nanovllm_extras.records.tier import BlockName, Chain

MAX_SAVE_S = 10.0  # how long a step of a producer waits until its blocks are saved


class Runner(Protocol):
    """A `ModelRunner`: what a store reads of it."""

    config: Config
    folder: Path
    shape: NetworkConfig
    dtype: torch.dtype
    max_model_len: int
    backend: TorchAttention
    kv_cache: KVCache
    layout: Any
    transfers: Any  # `Transfers`, because the options ask for a store
    ranks: Any  # `Alone`, or a `Driver`

    @property
    def model_class(self) -> type[nn.Module]:
        """Return the class of the network."""

    @property
    def backends(self) -> Sequence[TorchAttention]:
        """Return the attention backend of each shape of K and V."""


class Loaded(NamedTuple):
    """A block that was loaded."""

    data: torch.Tensor  # [num_bytes] uint8 in host memory
    tier: str
    """The name of the tier that had it."""


class Share:
    """The tiers of one runner. After each step it saves the blocks that the step's moves name."""

    def __init__(self, runner: Runner) -> None:
        config = runner.config
        self.transfers = runner.transfers
        self.is_pinned = runner.kv_cache.tensor.is_cuda
        tiers = make_tiers(config)
        self.tiers = Chain(tiers)
        own_tiers = tiers[:-1] if has_users_tier(config) else tiers
        self.saver = Saver(Chain(tiers), self.bytes_per_block, own_tiers)
        # when a producer answers, its blocks must be in the store: the engine that decodes is asked next
        self.waits = role_of(config) == "kv_producer"

    @property
    def bytes_per_block(self) -> int:
        return int(self.transfers.bytes_per_block)

    @property
    def bytes_per_state(self) -> int:
        """The size of a snapshot; 0 if the model has no recurrent states."""
        return 0 if self.transfers.pool is None else self.transfers.pool.bytes_per_slot

    def save_step(self, copies: list[Pair]) -> None:
        """Copy the blocks that a step has filled to the host, and have them saved. copies: those of the step's batch"""
        if isinstance(copies, Moves) and (copies.saves or copies.state_saves):
            self.transfers.save(copies, self.saver)
            if self.waits:
                self.wait()

    def wait(self) -> None:
        """Wait until the blocks of the step are saved."""
        self.saver.wait(MAX_SAVE_S)

    def load(self, name: BlockName, num_bytes: int | None = None) -> Loaded | None:
        """Return the block, or None if it cannot be loaded. `num_bytes`: its size, if it is not that of K and V."""
        data = torch.empty(num_bytes or self.bytes_per_block, dtype=torch.uint8, pin_memory=self.is_pinned)
        tier = self.tiers.load_from(name, data.numpy())
        if tier is not None:
            return Loaded(data, tier.name)
        self.tiers.failed(name)
        return None


def name_in_share(name: BlockName, share: bytes) -> BlockName:
    """Return the name of the same block in another share, which is known by at most 64 bytes."""
    return BlockName(blake2b(name.key, key=share, digest_size=KEY_BYTES).digest(), name.tokens)


def name_in_group(name: BlockName, group: int) -> BlockName:
    """Return the name of the block with the same tokens in a group of layers. Group 0 has the names of the tokens."""
    return name_in_share(name, f"group {group}".encode()) if group else name


def name_of_state(name: BlockName) -> BlockName:
    """Return the name of the snapshot at the end of a block. It has the same tokens and another key."""
    return name_in_share(name, b"state")
