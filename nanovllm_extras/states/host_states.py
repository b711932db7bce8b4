"""A KV cache with states, and with blocks and states in host memory for preempted sequences.

`state_swap.py` decides which sequence owns which host slot. A host slot -1, -2, … is the first, second, … of this
memory. Blocks and states are copied by the code of `swap/host_blocks.py`.
"""

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.states.pool import StateKVCache, StateShape
from nanovllm_extras.swap.host_blocks import HostBlocks
from nanovllm_extras.swap.space import SwapMoves


class SwappingStateKVCache(StateKVCache):
    """A `StateKVCache` that divides `swap_space_bytes` of host memory between states and blocks.

    States get half of it, but no more than one for each of `max_num_seqs`; blocks get the rest, at least one. Raises
    ValueError if one of each does not fit.
    """

    def __init__(
        self,
        backend: TorchAttention,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        shape: StateShape,
        swap_space_bytes: int,
        max_num_seqs: int,
    ) -> None:
        self.num_swap_blocks = self.num_swap_slots = 0
        super().__init__(backend, num_layers, dtype, device, shape)
        least = self.bytes_per_slot + self.bytes_per_block
        if swap_space_bytes < least:
            raise ValueError(f"swap_space_bytes must be >= {least}, one state and one block, got {swap_space_bytes}")
        most = (swap_space_bytes - self.bytes_per_block) // self.bytes_per_slot  # beside one block
        self.num_swap_slots = min(max_num_seqs, most, max(1, swap_space_bytes // 2 // self.bytes_per_slot))
        left = swap_space_bytes - self.num_swap_slots * self.bytes_per_slot
        self.num_swap_blocks = left // self.bytes_per_block

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.host_blocks = HostBlocks(self.tensor, self.num_swap_blocks)
        self.host_states = [HostBlocks(states[None], self.num_swap_slots) for states in self.states]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        moves = getattr(copies, "block_moves", None)
        if isinstance(moves, SwapMoves):
            self.host_blocks.copy_both(self.tensor, moves)
        super().copy_blocks(copies)

    def copy_state(self, source: int, destination: int) -> None:
        if source >= 0 and destination >= 0:
            super().copy_state(source, destination)
            return
        for states, host in zip(self.states, self.host_states, strict=True):
            blocks = states[None]  # in the form of a KV cache: [1, num_state_layers, num_slots + 1, …]
            if destination < 0:
                host.copy_out(blocks, [(source, -1 - destination)])
            else:
                host.copy_in(blocks, [(-1 - source, destination)])
