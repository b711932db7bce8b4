"""`Transfers`: carries out the moves of a step (`records/moves.py`), between blocks, slots of states, and host memory.

A runner has one. Its KV caches have the same block ids: those of all shapes of K and V, that of a head, that of a draft
model. A block's data in a K/V store are its parts in these caches, end to end. The data of a snapshot are the recurrent
states of all layers, and then the inputs of their convolutions.
"""

from collections.abc import Iterable
from typing import Any

import torch

from nanovllm.kv_cache import KVCache
from nanovllm_extras.execution.block_copies import BlockCopies
from nanovllm_extras.kv_store.copies import copy_in
from nanovllm_extras.kv_store.host_blocks import HostBlocks
from nanovllm_extras.kv_store.saver import Saver
from nanovllm_extras.records.moves import Moves, Pair


class Transfers(BlockCopies):
    """Copies for KV caches and a pool of states, with host memory of `swap_space_bytes` for preempted sequences.

    Raises ValueError if this space does not hold one block, and one state if the model has states.
    """

    def __init__(
        self,
        caches: Iterable[KVCache],
        pool: Any = None,
        swap_space_bytes: int = 0,
        max_num_seqs: int = 0,
        added_bytes: int = 0,
    ) -> None:
        """pool: a `StatePool`; added_bytes: the size of a block in the cache that `add` will add"""
        super().__init__(caches)
        self.pool = pool
        if swap_space_bytes:
            self._divide(swap_space_bytes, max_num_seqs, added_bytes)
        self.host_blocks: list[HostBlocks] = []
        self.host_states: list[HostBlocks] = []

    @property
    def state_tensors(self) -> list[torch.Tensor]:
        """The pool in the form of KV caches, where a slot is a block: [1, num_state_layers, num_slots + 1, …] each"""
        return [states[None] for states in self.pool.states]

    def allocate(self) -> None:
        if self.num_swap_blocks:
            self.host_blocks = [HostBlocks(cache.tensor, self.num_swap_blocks) for cache in self.caches]
        if self.num_swap_slots:
            self.host_states = [HostBlocks(states, self.num_swap_slots) for states in self.state_tensors]

    def add(self, cache: KVCache) -> None:
        super().add(cache)
        if self.num_swap_blocks:
            self.host_blocks.append(HostBlocks(cache.tensor, self.num_swap_blocks))

    def before(self, moves: list[Pair]) -> None:
        """Do what a step copies before its forward pass. A plain list has only copy-on-write."""
        if isinstance(moves, Moves) and self.host_blocks:
            for cache, host in zip(self.caches, self.host_blocks, strict=True):
                host.copy_both(cache.tensor, moves.swap_outs, moves.swap_ins)
        super().before(moves)
        if isinstance(moves, Moves):
            self._load_blocks(moves)
            for source, destination in moves.state_copies:
                self._copy_state(source, destination)
            for name, slot in moves.state_loads:
                self._load_state(moves.loaded[name], slot)

    def save(self, moves: list[Pair], saver: Saver) -> None:
        """Give what a step has filled to a thread that saves it."""
        if not isinstance(moves, Moves):
            return
        if moves.saves:
            saver.save([cache.tensor for cache in self.caches], moves.saves, self.bytes_per_block)
        if moves.state_saves:
            saver.save(self.state_tensors, moves.state_saves, self.pool.bytes_per_slot)

    def _load_blocks(self, moves: Moves) -> None:
        first = 0
        for cache in self.caches if moves.loads else ():
            part = slice(first, first + cache.bytes_per_block)
            copy_in(cache.tensor, [(moves.loaded[name][part], block_id) for name, block_id in moves.loads])
            first = part.stop

    def _copy_state(self, source: int, destination: int) -> None:
        """Copy a state between slots of the pool, or of host memory: -1 is the first slot there, -2 the second."""
        if source >= 0 and destination >= 0:
            self.pool.copy(source, destination)
            return
        for states, host in zip(self.state_tensors, self.host_states, strict=True):
            if destination < 0:
                host.copy_out(states, [(source, -1 - destination)])
            else:
                host.copy_in(states, [(-1 - source, destination)])

    def _load_state(self, data: torch.Tensor, slot: int) -> None:
        """Copy a snapshot to a slot. data: [bytes_per_slot] uint8 in host memory"""
        start = 0
        for states in self.state_tensors:
            stop = start + states[:, :, slot].nbytes
            copy_in(states, [(data[start:stop], slot)])
            start = stop

    def _divide(self, num_bytes: int, max_num_seqs: int, added_bytes: int) -> None:
        """Divide the host memory between blocks and states.

        States get half of it, but no more than one for each of `max_num_seqs`; blocks get the rest, at least one.
        """
        block, state = self.bytes_per_block + added_bytes, 0 if self.pool is None else self.pool.bytes_per_slot
        if num_bytes < block + state:
            what = "one state and one block" if state else "one block"
            raise ValueError(f"swap_space_bytes must be >= {block + state}, {what}, got {num_bytes}")
        if state:
            most = (num_bytes - block) // state  # beside one block
            self.num_swap_slots = min(max_num_seqs, most, max(1, num_bytes // 2 // state))
        self.num_swap_blocks = (num_bytes - self.num_swap_slots * state) // block
