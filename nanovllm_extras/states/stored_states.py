"""What a step does for stored states: snapshots that are loaded before its forward pass, and saved after it.

    moves.state_loads    data: [bytes_per_slot] in host memory -> slots of the pool
    moves.state_saves    slots of the pool -> host memory, [num_saves, bytes_per_slot]

The bytes of a snapshot are the recurrent state of all layers, and then the inputs of their convolutions. A load is done
after all copies of states: a slot that is loaded may have been the source of a copy. `state_store.py` decides what is
loaded and saved.
"""

from typing import Any

import torch

from nanovllm_extras.kv_store.moves import NamedBlocks, StoreMoves, copy_in, loading
from nanovllm_extras.states.pool import StateKVCache
from nanovllm_extras.states.slots import StateMoves


class StateStoreMoves(StoreMoves):
    """The moves of blocks, and lists of (name, slot): `state_loads` and `state_saves`."""

    def __init__(self, copies: list[tuple[int, int]], loads: NamedBlocks, saves: NamedBlocks, loaded: Any) -> None:
        super().__init__(copies, loads, saves, loaded)
        self.state_loads: NamedBlocks = []
        self.state_saves: NamedBlocks = []

    @property
    def has_saves(self) -> bool:
        return super().has_saves or bool(self.state_saves)

    def save(self, saver: Any, kv_cache: Any) -> None:
        super().save(saver, kv_cache)
        if self.state_saves:
            saver.save(tensors_of(kv_cache), self.state_saves, kv_cache.bytes_per_slot)


def loading_states(cache_class: type[Any]) -> type[Any]:
    """Return `cache_class`, a kind of `StateKVCache`, that also does the loads of blocks and states of a step."""

    class LoadingStateKVCache(loading(cache_class)):  # type: ignore[misc]
        def copy_states(self, copies: StateMoves) -> None:
            super().copy_states(copies)
            moves = copies.block_moves
            if isinstance(moves, StateStoreMoves):
                for name, slot in moves.state_loads:
                    write_state(tensors_of(self), moves.loaded[name], slot)

    return LoadingStateKVCache


def tensors_of(kv_cache: StateKVCache) -> list[torch.Tensor]:
    """Return the pool in the form of KV caches: [1, num_state_layers, num_slots + 1, …], in which a slot is a block.

    The tensor of float32 comes first, so that the parts of a snapshot's bytes begin at multiples of their item sizes.
    """
    return [states[None] for states in reversed(kv_cache.states)]


def write_state(tensors: list[torch.Tensor], data: torch.Tensor, slot: int) -> None:
    """Copy a snapshot to a slot. data: [bytes_per_slot] uint8 in host memory"""
    start = 0
    for states in tensors:
        stop = start + states[:, :, slot].nbytes
        copy_in(states, [(data[start:stop], slot)])
        start = stop
