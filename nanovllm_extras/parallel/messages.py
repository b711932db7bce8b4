"""What rank 0 sends the others: one message for each step, the batch's own arrays as int32 in one piece.

    header          kind, and the sizes of what follows
    input ids       [num_tokens]      token ids; with overlap, placeholders of tokens that only rank 0's device knows
    positions       [num_tokens]
    slot mapping    [num_tokens]
    block tables    [num_seqs, max_num_blocks]
    sequence lengths, and offsets of the sequences' rows
    windows         with groups of layers, the slots of each group with a window, then their block tables
    logits indices  [num_samples]     rows whose logits are computed
    states          with recurrent states, the slot of each sequence, and pairs of slots: copies of states
    moves           pairs of blocks: copies, and with swap those out to host memory and in from it
    loads, saves    with a K/V store, its blocks: each with its place in the KV cache, key and tokens

No worker sees a sequence, a sampling parameter or a token's text: rank 0 draws. Nothing is ever pickled.
"""

import json
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.processed_batch import ProcessedSampling
from nanovllm_extras.runner_hooks import wants_only_tokens

MAX_LINE = 1 << 20  # bytes of a line of JSON
STEP, LOGITS = 1, 2  # compute a batch; compute the logits of hidden states that rank 0 sends
MATCH, LOAD = 3, 4  # find blocks in the K/V store, or load one for the next step; each rank answers with a number
KEY_VALUES = 8  # int32 values of a key in the K/V store
ARRAYS = ("slot_mapping", "block_tables", "seq_lens", "cu_seqlens_q", "prefill_cu_seqlens_q", "prefill_cu_seqlens_k")
NUMBERS = ("num_decodes", "max_seqlen_q", "max_seqlen_k", "num_prefix_tokens")


class Header(NamedTuple):
    """The first numbers of each message."""

    kind: int
    num_values: int  # that follow the header
    num_tokens: int = 0
    num_seqs: int = 0
    table_width: int = 0
    num_samples: int = 0
    is_plain: int = 1  # no row asks for more than a draw
    is_replayed: int = 0  # from a CUDA graph: rank 0 decides, because it knows what is read of hidden states
    num_decodes: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    num_prefix_tokens: int = 0
    hidden_size: int = 0
    num_windows: int = 0  # groups of layers with a window, if each has a block table of its own
    num_state_copies: int = -1  # without recurrent states
    num_copies: int = 0
    num_swap_outs: int = -1  # without swap
    num_swap_ins: int = -1
    num_loads: int = -1  # without a K/V store
    num_saves: int = -1


HEADER_BYTES = 4 * len(Header._fields)


def pack_step(batch: Batch, has_draw: bool, is_replayed: bool = False) -> np.ndarray:
    """Pack `batch`, on the host, into one array of int32. Without `has_draw` no logits are computed."""
    metadata = batch.metadata
    logits_indices = batch.logits_indices.numpy() if has_draw else np.empty(0, np.int32)
    moves, (states, numbers) = moves_of(batch.copies), states_of(batch.copies)
    slots, tables = getattr(metadata, "window_slots", ()), getattr(metadata, "window_tables", ())
    arrays = [
        batch.input_ids.numpy(),
        batch.positions.numpy(),
        *(getattr(metadata, name).numpy() for name in ARRAYS),
        *(one.numpy() for one in (*slots, *tables)),
        logits_indices,
        *states,
        *(np.array(pairs, dtype=np.int32) for pairs in moves.values()),
    ]
    sizes = {
        "num_tokens": len(batch.input_ids),
        "num_seqs": len(metadata.seq_lens),
        "table_width": metadata.block_tables.shape[1],
        "num_samples": len(logits_indices),
        "is_plain": wants_only_tokens(batch.sampling),
        "is_replayed": is_replayed,
        "num_windows": len(slots),
        **{name: getattr(metadata, name) for name in NUMBERS},
        **numbers,
        **{f"num_{name}": len(pairs) for name, pairs in moves.items()},
    }
    header = Header(STEP, sum(array.size for array in arrays), **sizes)
    return np.concatenate([np.array(header, dtype=np.int32), *(array.reshape(-1) for array in arrays)], dtype=np.int32)


def pack_logits(num_rows: int, hidden_size: int) -> np.ndarray:
    """Announce hidden states, which are broadcast after this message."""
    return np.array(Header(LOGITS, 0, num_samples=num_rows, hidden_size=hidden_size), dtype=np.int32)


def unpack_step(header: Header, values: np.ndarray) -> Batch:
    """Unpack values: [header.num_values] int32 -> a batch of greedy rows. Its tensors are views of `values`."""
    rest = torch.from_numpy(values)

    def take(*shape: int) -> torch.Tensor:
        nonlocal rest
        count = int(np.prod(shape))
        taken, rest = rest[:count].view(shape), rest[count:]
        return taken

    shapes, num_seqs = shapes_of(header), header.num_seqs
    input_ids, positions = take(header.num_tokens), take(header.num_tokens)
    arrays: dict[str, Any] = {name: take(*shapes[name]) for name in ARRAYS}
    metadata = AttentionMetadata(**arrays, **{name: getattr(header, name) for name in NUMBERS})
    if header.num_windows:
        from nanovllm_extras.kv_groups.grouped_tables import with_windows

        windows = [
            [take(*shapes[name]) for _ in range(header.num_windows)] for name in ("slot_mapping", "block_tables")
        ]
        metadata = with_windows(metadata, *windows)
    logits_indices = take(header.num_samples)
    has_states = header.num_state_copies >= 0
    slots = take(num_seqs if has_states else 0).tolist()
    state_copies = list(map(tuple, take(max(0, header.num_state_copies), 2).tolist()))
    *counts, num_loads, num_saves = header[-5:]
    moves = make_moves(*[list(map(tuple, take(count, 2).tolist())) for count in counts if count >= 0])
    if num_saves >= 0:
        moves = with_store(moves, num_loads, rest.view(num_loads + num_saves, -1).numpy())
    if has_states:
        moves = with_states(moves, state_copies, slots)
    greedy = SamplingBatch(torch.zeros(header.num_samples))
    if not header.is_plain:
        greedy = ProcessedSampling(torch.zeros(header.num_samples), num_logprobs=0)
    return Batch(input_ids, positions, metadata, logits_indices, greedy, moves)


def shapes_of(header: Header) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of `ARRAYS`."""
    num_seqs, num_prefills = header.num_seqs, header.num_seqs - header.num_decodes
    return {
        "slot_mapping": (header.num_tokens,),
        "block_tables": (num_seqs, header.table_width),
        "seq_lens": (num_seqs,),
        "cu_seqlens_q": (num_seqs + 1,),
        "prefill_cu_seqlens_q": (num_prefills + 1,),
        "prefill_cu_seqlens_k": (num_prefills + 1,),
    }


def moves_of(copies: list[Any]) -> dict[str, list[Any]]:
    """Return the moves of blocks of a step: copies on the device, and those of swap and of a store if there are any."""
    moves: Any = getattr(copies, "block_moves", copies)  # of a step with states
    found = {"copies": moves}
    if hasattr(moves, "swap_outs"):
        found |= {"swap_outs": moves.swap_outs, "swap_ins": moves.swap_ins}
    if hasattr(moves, "saves"):
        for kind in ("loads", "saves"):
            found[kind] = [(block_id, *values_of(name)) for name, block_id in getattr(moves, kind)]
    return found


def make_moves(copies: list[Any], *of_swap: list[Any]) -> list[Any]:
    if not of_swap:
        return copies
    from nanovllm_extras.swap.space import SwapMoves

    return SwapMoves(copies, *of_swap)


# ---- recurrent states


def states_of(copies: Any) -> tuple[list[np.ndarray], dict[str, int]]:
    """Return what a message has of a `StateMoves`: arrays of slots and copies, and numbers of the header."""
    if not hasattr(copies, "state_copies"):
        return [], {}
    arrays = [np.array(values, dtype=np.int32) for values in (copies.slots, copies.state_copies)]
    return arrays, {"num_state_copies": len(copies.state_copies)}


def with_states(moves: list[Any], state_copies: list[Any], slots: list[int]) -> list[Any]:
    from nanovllm_extras.states.slots import StateMoves

    return StateMoves(moves, state_copies, slots)


# ---- the K/V store


def pack_names(kind: int, names: Sequence[Any]) -> np.ndarray:
    """Pack names of blocks, for a message of `kind`: MATCH, or LOAD for one block."""
    values = [values_of(name) for name in names]
    return np.concatenate([np.array(Header(kind, sum(map(len, values))), dtype=np.int32), *values])


def unpack_names(values: np.ndarray, block_size: int) -> list[Any]:
    return [name_in(row) for row in values.reshape(-1, KEY_VALUES + block_size)]


def values_of(name: Any) -> np.ndarray:
    """Return the name of a block as int32: its key, and its tokens."""
    return np.frombuffer(name.key + name.tokens, dtype=np.int32)


def name_in(values: np.ndarray) -> Any:
    """Return the name of a block from values: [KEY_VALUES + block_size] int32."""
    from nanovllm_extras.kv_store.tier import BlockName

    return BlockName(values[:KEY_VALUES].tobytes(), values[KEY_VALUES:].tobytes())


def with_store(copies: list[Any], num_loads: int, rows: np.ndarray) -> list[Any]:
    """Return moves with loads and saves. rows: [num_loads + num_saves, 1 + KEY_VALUES + block_size] int32"""
    from nanovllm_extras.kv_store.moves import StoreMoves

    named = [(name_in(row[1:]), int(row[0])) for row in rows]
    return StoreMoves(copies, named[:num_loads], named[num_loads:], {})


# ---- sockets


def receive(peer: socket.socket, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes`. Raises ConnectionError if the peer closes the socket."""
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the peer has closed the socket")
        view = view[count:]
    return received


def send_json(peer: socket.socket, value: Any) -> None:
    peer.sendall(json.dumps(value).encode() + b"\n")


def receive_json(peer: socket.socket, max_bytes: int = MAX_LINE) -> Any:
    """Read one line byte by byte, and nothing after it. Raises ValueError if it is not JSON, or too long."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) == max_bytes:
            raise ValueError(f"a line must have at most {max_bytes} bytes")
        line += receive(peer, 1)
    return json.loads(line)
