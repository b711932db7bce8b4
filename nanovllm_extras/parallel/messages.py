"""What rank 0 sends the others: one message for each step, the batch's own arrays as int32 in one piece.

    header          kind, and the sizes of what follows
    input ids       [num_tokens]      token ids; with overlap, placeholders of tokens that only rank 0's device knows
    positions       [num_tokens]
    slot mapping    [num_tokens]
    block tables    [num_seqs, max_num_blocks]
    sequence lengths, and offsets of the sequences' rows
    windows         with groups of layers, the slots of each group with a window, then their block tables
    adapters        [num_tokens]      the slots of LoRA adapters, if rows have any
    logits indices  [num_samples]     rows whose logits are computed
    states          with recurrent states, the slots that each sequence writes and reads
    moves           pairs of blocks and slots: copies, and with swap those out to host memory and in from it
    loads, saves    with a K/V store, its blocks and states: each with its place in the KV cache, key and tokens

Drafts of the model's own head are a message like that of a step, and the hidden states of the tokens before follow.

No worker sees a sequence, a sampling parameter or a token's text: rank 0 draws. Nothing is ever pickled.
"""

import json
import socket
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.records.adapter_metadata import adapters_of, with_adapters
from nanovllm_extras.records.grouped_metadata import with_windows
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.records.tier import BlockName
from nanovllm_extras.sampling.processed_batch import ProcessedSampling
from nanovllm_extras.sampling.runner_hooks import wants_only_tokens

MAX_LINE = 1 << 20  # bytes of a line of JSON
STEP, LOGITS = 1, 2  # compute a batch; compute the logits of hidden states that rank 0 sends
DRAFTS = 3  # compute a batch by the model's head only, from hidden states that rank 0 sends
# find blocks in the K/V store, or load a block or a state for the next step; each rank answers with a number
MATCH, LOAD, LOAD_STATE = 4, 5, 6
COMMAND = 7  # JSON, such as an adapter to be loaded; each rank answers with a number
KEY_VALUES = 8  # int32 values of a key in the K/V store
ARRAYS = ("slot_mapping", "block_tables", "seq_lens", "cu_seqlens_q", "prefill_cu_seqlens_q", "prefill_cu_seqlens_k")
PAIRS = ("swap_outs", "swap_ins", "state_copies")  # of `Moves`
NAMED = ("loads", "saves", "state_loads", "state_saves")
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
    num_adapters: int = 0  # one for each token, if rows have LoRA adapters
    num_slots: int = 0  # of recurrent states: one for each sequence, or none
    num_copies: int = 0  # of blocks and slots, as in `Moves`
    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_state_copies: int = 0
    num_loads: int = 0
    num_saves: int = 0
    num_state_loads: int = 0
    num_state_saves: int = 0


HEADER_BYTES = 4 * len(Header._fields)


def pack_step(batch: Batch, has_draw: bool, is_replayed: bool = False, hidden_size: int = 0) -> np.ndarray:
    """Pack `batch`, on the host, into one array of int32. Without `has_draw` no logits are computed.

    hidden_size: if the model's head computes the batch, the size of the hidden states that follow the message
    """
    metadata = batch.metadata
    logits_indices = batch.logits_indices.numpy() if has_draw else np.empty(0, np.int32)
    moves = Moves.of(batch.copies)
    pairs = {"copies": list(moves), **{name: getattr(moves, name) for name in PAIRS}}
    named = {kind: [(block_id, *values_of(name)) for name, block_id in getattr(moves, kind)] for kind in NAMED}
    adapters = adapters_of(metadata)
    slots, tables = getattr(metadata, "window_slots", ()), getattr(metadata, "window_tables", ())
    arrays = [
        batch.input_ids.numpy(),
        batch.positions.numpy(),
        *(getattr(metadata, name).numpy() for name in ARRAYS),
        *(one.numpy() for one in (*slots, *tables)),
        *(() if adapters is None else (adapters.numpy(),)),
        logits_indices,
        *(
            np.array(values, dtype=np.int32)
            for values in (moves.slots, moves.sources, *pairs.values(), *named.values())
        ),
    ]
    sizes = {
        "num_tokens": len(batch.input_ids),
        "num_seqs": len(metadata.seq_lens),
        "table_width": metadata.block_tables.shape[1],
        "num_samples": len(logits_indices),
        "is_plain": wants_only_tokens(batch.sampling),
        "is_replayed": is_replayed,
        "num_windows": len(slots),
        "num_adapters": 0 if adapters is None else len(adapters),
        **{name: getattr(metadata, name) for name in NUMBERS},
        "hidden_size": hidden_size,
        "num_slots": len(moves.slots),
        **{f"num_{name}": len(some) for name, some in (*pairs.items(), *named.items())},
    }
    header = Header(DRAFTS if hidden_size else STEP, sum(array.size for array in arrays), **sizes)
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

    shapes = shapes_of(header)
    input_ids, positions = take(header.num_tokens), take(header.num_tokens)
    arrays: dict[str, Any] = {name: take(*shapes[name]) for name in ARRAYS}
    metadata = AttentionMetadata(**arrays, **{name: getattr(header, name) for name in NUMBERS})
    windows = [[take(*shapes[name]) for _ in range(header.num_windows)] for name in ("slot_mapping", "block_tables")]
    if header.num_adapters:
        metadata = with_adapters(metadata, take(header.num_adapters))
    if header.num_windows:
        metadata = with_windows(metadata, *windows)
    logits_indices = take(header.num_samples)
    slots, sources = take(2, header.num_slots).tolist()
    pairs = {name: map(tuple, take(getattr(header, f"num_{name}"), 2).tolist()) for name in ("copies", *PAIRS)}
    moves = Moves(pairs.pop("copies"), **pairs, slots=slots, sources=sources)
    counts = [getattr(header, f"num_{name}") for name in NAMED]
    rows = iter(rest.view(sum(counts), -1).numpy() if len(rest) else ())
    for kind, count in zip(NAMED, counts, strict=True):
        setattr(moves, kind, [(name_in(row[1:]), int(row[0])) for row in islice(rows, count)])
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


# ---- commands


def pack_command(order: list[Any]) -> np.ndarray:
    """Pack a command, which JSON can hold."""
    text = json.dumps(order).encode()
    values = np.frombuffer(text + b" " * (-len(text) % 4), dtype=np.int32)
    return np.concatenate([np.array(Header(COMMAND, len(values)), dtype=np.int32), values])


def unpack_command(values: np.ndarray) -> list[Any]:
    order: list[Any] = json.loads(values.tobytes())
    return order


# ---- the K/V store


def pack_names(kind: int, names: Sequence[BlockName]) -> np.ndarray:
    """Pack names of blocks, for a message of `kind`: MATCH, or LOAD for one block."""
    values = [values_of(name) for name in names]
    return np.concatenate([np.array(Header(kind, sum(map(len, values))), dtype=np.int32), *values])


def unpack_names(values: np.ndarray, block_size: int) -> list[BlockName]:
    return [name_in(row) for row in values.reshape(-1, KEY_VALUES + block_size)]


def values_of(name: BlockName) -> np.ndarray:
    """Return the name of a block as int32: its key, and its tokens."""
    return np.frombuffer(name.key + name.tokens, dtype=np.int32)


def name_in(values: np.ndarray) -> BlockName:
    """Return the name of a block from values: [KEY_VALUES + block_size] int32."""
    return BlockName(values[:KEY_VALUES].tobytes(), values[KEY_VALUES:].tobytes())


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


def send_json(peer: socket.socket, value: object) -> None:
    peer.sendall(json.dumps(value).encode() + b"\n")


def receive_json(peer: socket.socket, max_bytes: int = MAX_LINE) -> Any:
    """Read one line byte by byte, and nothing after it. Raises ValueError if it is not JSON, or too long."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) == max_bytes:
            raise ValueError(f"a line must have at most {max_bytes} bytes")
        line += receive(peer, 1)
    return json.loads(line)
