"""A worker gets the very batch that rank 0 computes, in whatever pieces the socket brings it; nothing is unpickled."""

import dataclasses
import pickle
import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.parallel.messages import (
    COMMAND,
    HEADER_BYTES,
    LOGITS,
    MATCH,
    STEP,
    Header,
    pack_command,
    pack_logits,
    pack_names,
    pack_step,
    receive,
    receive_json,
    send_json,
    unpack_command,
    unpack_names,
    unpack_step,
)
from nanovllm_extras.records.adapter_metadata import AdapterMetadata
from nanovllm_extras.records.grouped_metadata import GroupedMetadata
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.records.tier import BlockName
from nanovllm_extras.sampling.processed_batch import ProcessedSampling
from nanovllm_extras.sampling.runner_hooks import draw_arguments
from tests.conftest import examples

INT32 = st.integers(-(2**31), 2**31 - 1)
PAIRS = st.lists(st.tuples(*[st.integers(0, 2**31 - 1)] * 2), max_size=4)
NAMES = st.builds(BlockName, st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16))
NAMED = st.lists(st.tuples(NAMES, st.integers(0, 2**31 - 1)), max_size=3)
SLOTS = st.integers(-9, 2**31 - 1)  # those in host memory are negative
STATE_COPIES = st.lists(st.tuples(SLOTS, SLOTS), max_size=4)


@st.composite
def batches(draw):
    """As `build_batch` makes them, with any numbers in them: placeholders are negative."""

    def array(*shape):
        count = int(np.prod(shape))
        values = draw(st.lists(INT32, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.int32).view(shape)

    num_decodes, num_prefills = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    num_seqs, n = num_decodes + num_prefills, draw(st.integers(1, 6))
    num_samples = draw(st.integers(0, 3))
    metadata = AttentionMetadata(
        slot_mapping=array(n),
        block_tables=array(num_seqs, draw(st.integers(1, 3))),
        seq_lens=array(num_seqs),
        cu_seqlens_q=array(num_seqs + 1),
        prefill_cu_seqlens_q=array(num_prefills + 1),
        prefill_cu_seqlens_k=array(num_prefills + 1),
        num_decodes=num_decodes,
        max_seqlen_q=draw(st.integers(0, 2**31 - 1)),
        max_seqlen_k=draw(st.integers(0, 2**31 - 1)),
        num_prefix_tokens=draw(st.integers(0, 2**31 - 1)),
    )
    if draw(st.booleans()):
        metadata = AdapterMetadata(**vars(metadata), adapters=array(n))
    if num_windows := draw(st.integers(0, 2)):
        shapes = metadata.slot_mapping.shape, metadata.block_tables.shape
        slots, tables = ([array(*shape) for _ in range(num_windows)] for shape in shapes)
        metadata = GroupedMetadata(**vars(metadata), window_slots=tuple(slots), window_tables=tuple(tables))
    temperatures = torch.rand(num_samples)
    sampling = SamplingBatch(temperatures)
    if draw(st.booleans()):
        sampling = ProcessedSampling(temperatures, num_logprobs=draw(st.sampled_from([None, 0, 5])))
    moves = draw(PAIRS)
    if draw(st.booleans()):
        num_slots = draw(st.sampled_from([0, num_seqs]))
        slots, sources = (draw(st.lists(SLOTS, min_size=num_slots, max_size=num_slots)) for _ in range(2))
        pairs = {"swap_outs": draw(PAIRS), "swap_ins": draw(PAIRS), "state_copies": draw(STATE_COPIES)}
        moves = Moves(moves, **pairs, slots=slots, sources=sources)
        moves.loads, moves.saves = draw(NAMED), draw(NAMED)
        moves.state_loads, moves.state_saves = draw(NAMED), draw(NAMED)
    return Batch(array(n), array(n), metadata, array(num_samples), sampling, moves)


def sent(message):
    """The message as a worker gets it: its header, and its values, in pieces of a few bytes."""
    ours, theirs = socket.socketpair()
    data = message.tobytes()

    def send():
        for i in range(0, len(data), 37):
            ours.sendall(data[i : i + 37])

    sender = threading.Thread(target=send)
    with ours, theirs:
        sender.start()
        header = Header(*np.frombuffer(receive(theirs, HEADER_BYTES), dtype=np.int32).tolist())
        values = np.frombuffer(receive(theirs, 4 * header.num_values), dtype=np.int32)
        sender.join()
    return header, values


def num_logprobs(batch):
    return getattr(batch.sampling, "num_logprobs", None)


@given(batches(), st.booleans())
@settings(max_examples=examples(160), deadline=None, derandomize=True)
@pytest.mark.examples
def test_a_batch_arrives_as_it_was(batch, has_draw):
    message = pack_step(batch, has_draw)
    assert message.dtype == np.int32
    header, values = sent(message)
    assert header.kind == STEP
    found = unpack_step(header, values)
    assert type(found.metadata) is type(batch.metadata)
    for field in dataclasses.fields(batch.metadata):
        ours, theirs = getattr(found.metadata, field.name), getattr(batch.metadata, field.name)
        if isinstance(theirs, int | None):
            assert ours == theirs, field.name
            continue
        if isinstance(theirs, torch.Tensor):
            ours, theirs = (ours,), (theirs,)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), field.name
    assert torch.equal(found.input_ids, batch.input_ids)
    assert torch.equal(found.positions, batch.positions)
    assert torch.equal(found.logits_indices, batch.logits_indices if has_draw else torch.empty(0, dtype=torch.int32))
    assert type(found) is Batch, "no readers"
    assert list(found.copies) == list(batch.copies)
    assert vars(found.copies) == vars(Moves.of(batch.copies))
    assert num_logprobs(found) is None if num_logprobs(batch) is None else num_logprobs(found) is not None
    assert draw_arguments(found.sampling)[1:] == (None,) * 4
    assert not found.sampling.temperatures.any()
    assert len(found.sampling.temperatures) == len(found.logits_indices)


def test_the_announcement_of_hidden_states():
    header, values = sent(pack_logits(5, 64))
    assert (header.kind, header.num_samples, header.hidden_size, len(values)) == (LOGITS, 5, 64, 0)


@pytest.mark.parametrize("num_names", [0, 1, 3])
def test_names_of_blocks(num_names):
    names = [BlockName(bytes([i] * 32), np.array([i, -1, 0, 2**31 - 1], "<i4").tobytes()) for i in range(num_names)]
    header, values = sent(pack_names(MATCH, names))
    assert (header.kind, unpack_names(values, block_size=4)) == (MATCH, names)


def test_a_line_of_json_leaves_what_follows():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_json(ours, {"ready": True, "text": "ä\n"})
        ours.sendall(b"rest")
        assert receive_json(theirs) == {"ready": True, "text": "ä\n"}
        assert receive(theirs, 4) == b"rest"


@pytest.mark.parametrize("num_bytes", [0, 3])
def test_a_closed_socket_is_an_error_and_not_silence(num_bytes):
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(b"x" * num_bytes)
        with pytest.raises(ConnectionError, match="closed"):
            receive(theirs, 4)


def test_no_rank_unpickles(tiny_checkpoint, rank_threads, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something is pickled")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    with LLM(tiny_checkpoint[0], tensor_parallel_size=2, attention_backend="torch", num_kv_blocks=20) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
        assert len(llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids) == 3


@given(st.lists(st.integers() | st.text(), max_size=4))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
@pytest.mark.examples
def test_a_command_arrives_as_it_was(order):
    header, values = sent(pack_command(order))
    assert (header.kind, unpack_command(values)) == (COMMAND, order)
