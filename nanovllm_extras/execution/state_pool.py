"""The pool of states: tensors beside the KV cache, with one slot for each running sequence.

A state is overwritten by every token, so it belongs to one sequence and cannot be shared like a block. Its size does
not depend on the sequence's length. Slot 0 is the null slot: rows of padding read and write it.

    layer            0        1        2        3        4      …
    kind             state    state    state    K and V  state
    its cache        conv[0], conv[1], conv[2], kv[:, 0], conv[3], …        the same for `recurrent`

`memory/slots.py` decides which sequence owns which slot. `Layout` passes `StateCaches` to the model.

With several ranks, each has its heads of every state, in the same slot as the other ranks. Rank 0 decides which
sequence owns which slot:

    state of a sequence        rank 0                rank 1
    recurrent, 4 heads         heads 0, 1            heads 2, 3
    convolution                channels of q, k and v of these heads
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.memory.slots import NULL_SLOT
from nanovllm_extras.models.layer_inputs import StateMetadata, StateShape
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.speculation_options import MAX_DRAFTED_ROWS, read_options
from nanovllm_extras.records.moves import Moves

logger = logging.getLogger(__name__)


def slot_tensors(slots: list[int], sources: list[int], device: torch.device | None = None) -> dict[str, Any]:
    """Return the fields of `StateMetadata` for chunks that write to `slots` and read from `sources`."""
    as_tensor = partial(torch.tensor, device=device)
    rounds = tuple(map(as_tensor, find_rounds(slots, sources)))
    return {"state_slots": as_tensor(slots), "state_sources": as_tensor(sources), "rounds": rounds}


def with_states(batch: Batch) -> Batch:
    """Return a batch whose metadata has the slots that its chunks write and read. A step without slots uses none."""
    metadata, moves = batch.metadata, Moves.of(batch.copies)
    if not moves.slots:
        moves = Moves(slots=[NULL_SLOT] * len(metadata.seq_lens))
    lens = metadata.cu_seqlens_q.diff()  # [num_seqs], new tokens
    fields = {"is_first": metadata.seq_lens == lens, **slot_tensors(moves.slots, moves.sources, lens.device)}
    return replace(batch, metadata=StateMetadata(**vars(metadata), **fields))


def find_rounds(slots: list[int], sources: list[int]) -> list[list[int]]:
    """Group the rows of a step so that each one reads a state that an earlier group has written.

    slots [4, 2, 5, 6], sources [4, 2, 2, 5] -> [[0, 1], [2], [3]]; no groups if each row reads its own slot
    """
    rounds: list[list[int]] = []
    if slots == sources:
        return rounds
    depth = 0
    for row, (slot, source) in enumerate(zip(slots, sources, strict=True)):
        depth = 0 if slot == source else depth + 1
        if depth == len(rounds):
            rounds.append([])
        rounds[depth].append(row)
    return rounds


class StatePool:
    """The states of all sequences: `num_slots` slots, and the null slot. A new pool has only the null slot.

    If `num_slots` is set, `allocate` makes the others.
    """

    def __init__(self, shape: StateShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.num_slots = 0
        self.allocate()

    @property
    def bytes_per_slot(self) -> int:
        return self.shape.bytes_per_slot(self.dtype)

    @property
    def num_bytes(self) -> int:
        """The size of the pool."""
        return (self.num_slots + 1) * self.bytes_per_slot

    def describe(self) -> str:
        """Return how many slots the pool has, and how many bytes it takes: one slot more, the null slot."""
        return f"{self.num_slots:,} slots of states, which take {self.num_bytes:,} bytes"

    @property
    def states(self) -> tuple[Tensor, ...]:
        """The tensors of the pool, whose second dimension is the slots. Models may have no recurrent or hidden ones.

        The tensor of float32 comes first, so that the parts of a snapshot begin at multiples of their item sizes.
        """
        return tuple([states for states in (self.recurrent, self.conv, self.hidden) if states.numel()])

    def allocate(self) -> None:
        shape, (num_layers, num_slots) = self.shape, (self.shape.num_layers, self.num_slots + 1)
        # no slot is read before it is written; memory that was never written takes no space on a CPU
        self.conv = torch.empty(num_layers, num_slots, *shape.conv, dtype=self.dtype, device=self.device)
        self.recurrent = torch.empty(num_layers, num_slots, *shape.recurrent, dtype=torch.float32, device=self.device)
        self.hidden = torch.empty(1, num_slots, shape.hidden_size, dtype=self.dtype, device=self.device)
        for states in (self.conv, self.recurrent, self.hidden):
            states[:, NULL_SLOT] = 0

    def copy(self, source: int, destination: int) -> None:
        """Copy the state of one slot to another."""
        for states in self.states:
            states[:, destination] = states[:, source]


# ---- memory


class HasMemory(Protocol):
    """A runner that divides its memory between states and blocks."""

    config: Config
    backend: TorchAttention
    max_model_len: int

    @property
    def memory_knob(self) -> str:
        """The option to raise if there is not enough memory."""

    def free_bytes(self) -> int:
        """Return the memory for both, if the options do not set it."""

    def count_blocks(self) -> int:
        """Return the number of blocks that fit, by `config`."""


def divide_memory(pool: StatePool, runner: HasMemory) -> int:
    """Return the number of blocks, and set the number of slots: for sequences that may run, snapshots and drafts.

    Unless the number of blocks is configured, at most half of the memory is for states. If this is too little for
    `max_num_seqs` states, fewer sequences run at the same time.
    """
    config = runner.config
    most_slots = config.max_num_seqs * (2 if config.enable_prefix_caching else 1) + num_draft_slots(config)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
        pool.num_slots = most_slots
    else:
        num_blocks = divide_bytes(pool, runner, most_slots)
    logger.info(pool.describe())  # before they are allocated, which may fail
    return num_blocks


def divide_bytes(pool: StatePool, runner: HasMemory, most_slots: int) -> int:
    """Divide the memory of the KV cache as `divide_memory` does."""
    config, given, size = runner.config, runner.config.kv_cache_memory_bytes, pool.bytes_per_slot
    num_bytes = runner.free_bytes() if given is None else given
    pool.num_slots = min(most_slots, num_bytes // 2 // size - 1)  # one more is the null slot
    if pool.num_slots < 1:
        raise ValueError(f"{num_bytes} bytes are left for K, V and states, but states need half of it, and their "
                         f"least size, two slots, takes {2 * size}: raise {runner.memory_knob}")  # fmt: skip
    max_num_seqs = min(config.max_num_seqs, pool.num_slots)
    if max_num_seqs < config.max_num_seqs:
        logger.info("max_num_seqs is %d instead of %d: a state takes %d bytes, and %d bytes are for states, half "
                    "of the memory of the KV cache", max_num_seqs, config.max_num_seqs, size,
                    num_bytes // 2)  # fmt: skip
    left = num_bytes - pool.num_bytes
    runner.config = replace(config, max_num_seqs=max_num_seqs, kv_cache_memory_bytes=left)
    num_blocks = runner.count_blocks()
    if given is not None:  # the prefix cache may keep more than what runs
        return num_blocks
    return min(num_blocks, max_num_seqs * -(-runner.max_model_len // runner.backend.block_size))


def num_draft_slots(config: Config) -> int:
    """Return for how many drafts of a step there are slots in addition to those of sequences and snapshots."""
    if config.speculative_config is None:
        return 0
    most: int = read_options(config.speculative_config).num_speculative_tokens
    return min(config.max_num_seqs * most, MAX_DRAFTED_ROWS)
