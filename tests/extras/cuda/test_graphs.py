"""CUDA graphs as far as they go without a GPU: which sizes, what padding does, what is sent, and that outputs are those
of eager steps.

`recorded_operations.py` replaces CUDA's recording: what it replays is fixed in the same way. On a GPU,
`test_gpu.py` compares the real thing.

Broken by hand, and seen here: padding that keeps the slots of an older batch; padding of one token; a table that is
spread with the wrong width; the newest tokens of an eager step not handed over; a replay of the next smaller size; rows
with children or without a sample replayed; penalties and log-probabilities of replayed rows left out.
"""

import contextlib
import dataclasses
import gc
import random

import pytest
import torch

from nanovllm.cuda_graphs import Recorder
from nanovllm.layers.attention import TorchAttention
from nanovllm.plugins import OWN_BACKENDS
from nanovllm.sampler import sample_tokens
from nanovllm_extras import BeamSearchParams, Config, LLMEngine, SamplingParams
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.step_graphs import (
    CudaGraphs,
    DecodeInputs,
    choose_graphs,
    frozen_objects,
    graph_sizes,
    measure_graph_bytes,
    record_graphs,
)
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.prompt_logprobs import TargetRows
from nanovllm_extras.sampling.processed_batch import ReadBatch, values_of
from nanovllm_extras.sampling.runner_hooks import wants_only_tokens
from nanovllm_testing.steps import batch_of
from tests.extras.late_runner import LateRunner
from tests.extras.recorded_operations import GatherAttention, OperationRecorder
from tests.extras.test_full_engine import assert_at_rest, greedy, ids, run, tokens_of
from tests.extras.test_overlap import KINDS, visible

CPU = torch.device("cpu")

# ---- sizes


def test_sizes_end_with_the_largest_and_waste_little():
    for largest in [*range(1, 70), 255, 256, 257, 500, 1024]:
        sizes = graph_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for n in range(1, largest + 1):
            padded = min(size for size in sizes if size >= n)
            assert padded - n < max(8, n / 8)
        assert len(sizes) <= 11 + 8 * max(0, largest.bit_length() - 6)
    assert graph_sizes(256)[:6] == [1, 2, 4, 8, 16, 24]


# ---- what is sent


def decode_batch(num_seqs, block_size, longest, seed=0, **params):
    rng = random.Random(seed)
    chunks, next_block = [], 1
    for i in range(num_seqs):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, longest))]
        seq = Sequence(str(i), prompt, SamplingParams(**params), frozenset(), seed=i)
        seq.num_computed_tokens = len(prompt) - 1
        num_blocks = -(-len(prompt) // block_size)
        for block in range(next_block, next_block + num_blocks):
            seq.block_table.append(block)
        next_block += num_blocks
        chunks.append((seq, len(prompt) - 1, 1))
    return batch_of(chunks, block_size)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {}])
def test_inputs_arrive_in_their_places_and_padding_is_harmless(params):
    inputs = DecodeInputs(13, 9, CPU)
    static = {size: inputs.batch(size) for size in (1, 5, 13)}  # as a graph keeps them
    for seed, (num_seqs, size) in enumerate([(13, 13), (3, 5), (1, 1), (5, 5), (2, 13), (12, 13)]):
        sent = decode_batch(num_seqs, 4, 36, seed, **params)
        inputs.fill(sent, size)
        batch = static[size]
        assert batch.metadata.num_decodes == size
        assert batch.metadata.block_tables.shape == (size, 9)
        assert torch.equal(batch.metadata.cu_seqlens_q[: num_seqs + 1], sent.metadata.cu_seqlens_q)
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "logits_indices"):
            is_of_batch = hasattr(batch, name)
            column = getattr(batch if is_of_batch else batch.metadata, name)
            expected = getattr(sent if is_of_batch else sent.metadata, name)
            assert column.dtype == expected.dtype, name
            assert torch.equal(column[:num_seqs], expected), name
        assert torch.equal(
            batch.metadata.block_tables[:num_seqs, : sent.metadata.block_tables.shape[1]], sent.metadata.block_tables
        )
        off = {"uniforms": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperatures": None}
        for name, nothing in off.items():
            column, expected = getattr(batch.sampling, name), getattr(sent.sampling, name)
            expected = torch.full((num_seqs,), nothing, dtype=column.dtype) if expected is None else expected
            assert column.dtype == expected.dtype, name
            assert torch.equal(column[:num_seqs], expected), name
        for column in (
            batch.metadata.seq_lens,
            batch.metadata.slot_mapping,
            batch.sampling.temperatures,
            batch.input_ids,
        ):
            assert not column[num_seqs:].any(), "padding reads nothing, writes to the null block, and is greedy"


# ---- what is recorded


def test_a_function_is_run_once_before_it_is_recorded(fake_cuda):
    calls = []

    def function():
        calls.append((fake_cuda.stream, fake_cuda.is_recording))
        return torch.ones(1)

    replay, results = Recorder().record(function)
    assert calls == [("side", False), ("main", True)]
    assert results == torch.ones(1)
    replay()
    assert fake_cuda.events[-1] == "replay"


def test_recorders_that_live_at_a_time_have_streams_of_their_own(fake_cuda):
    """PyTorch has 32 streams, which come round again."""
    first = Recorder()
    for _ in range(70):
        assert Recorder()._stream != first._stream
    living = [Recorder() for _ in range(31)]
    assert all(living[i]._stream != other._stream for i in range(31) for other in [first, *living[:i]])
    with pytest.raises(RuntimeError, match="32 engines with CUDA graphs are alive on this device"):
        Recorder()
    del first
    assert all(Recorder()._stream != one._stream for one in living)


def test_graphs_are_recorded_and_measured(fake_cuda, runner):
    sizes = graph_sizes(20)
    recorded = (runner.model, runner.kv_cache.tensor, runner.draw, 20, 32)
    assert measure_graph_bytes(*recorded) == (107 << 20) + (len(sizes) - 1) * (7 << 20)
    free = fake_cuda.free
    num_streams = fake_cuda.num_streams
    graphs = record_graphs(*recorded)
    assert fake_cuda.num_streams == num_streams + 1, "of all graphs together, and of no others"
    assert sorted(graphs._graphs) == sizes
    assert free - fake_cuda.free == len(sizes) * (7 << 20)
    assert all(recorded.hidden.shape == (size, 64) for size, recorded in graphs._graphs.items())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_objects_that_the_program_has_frozen_stay_frozen(monkeypatch, is_frozen):
    """A server freezes all that it has loaded; a graph that is recorded afterwards does not thaw it."""
    calls, objects, num_frozen = [], [[]] * 9, 10 if is_frozen else 8
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: num_frozen)
    monkeypatch.setattr(gc, "get_objects", lambda: objects)
    with contextlib.suppress(KeyError), frozen_objects():
        calls.append("record")
        raise KeyError("a recording that fails")
    assert calls == (["collect", "record"] if is_frozen else ["collect", "freeze", "record", "unfreeze"])


# ---- what is computed


def wants_no_truncation(sampling):
    return wants_only_tokens(sampling) and sampling.top_k is sampling.top_p is sampling.min_p is None


def draw_plainly(logits, temperatures, uniforms, *_):
    """The draw that is recorded: PyTorch's truncation cannot be, so the rows that ask for it are drawn again."""
    return sample_tokens(logits, temperatures, uniforms)


def make_engines(monkeypatch, folder, max_num_seqs=6, late=True, **options):
    """The same engine with and without graphs, both with the same attention."""
    monkeypatch.setitem(OWN_BACKENDS, "torch", GatherAttention)
    monkeypatch.setattr("nanovllm_extras.execution.full_runner.wants_only_tokens", wants_no_truncation)
    recorder = OperationRecorder()

    class RecordingDevice(Device):
        def record(self, runner):
            max_rows, max_num_blocks = runner.largest_decode
            arguments = (runner.network, runner.kv_cache.tensor, draw_plainly, graph_sizes(max_rows), max_num_blocks)
            runner.step_graphs = CudaGraphs(*arguments, recorder, runner.more_inputs)
            runner.step_graphs.record_all()

    engines = []
    for has_graphs in (False, True):
        if has_graphs:
            monkeypatch.setattr(ModelRunner, "make_device", lambda runner: RecordingDevice())
        config = Config(folder, device="cpu", dtype="float32", attention_backend="torch", max_num_seqs=max_num_seqs,
                        enforce_eager=True, enable_cuda_graphs=False, **options)  # fmt: skip
        engine = LLMEngine(config)
        assert isinstance(engine.runner.backend, GatherAttention)
        assert (engine.runner.step_graphs is not None) == has_graphs
        engine.recorder = recorder if has_graphs else None
        engine.runner.kv_cache.tensor[:, :, 1:] = 50.0  # garbage that would show
        if late and engine.parts.enable_overlap:
            LateRunner(engine)
        engines.append(engine)
    return engines


def serve(engine, requests):
    todo, outputs = list(enumerate(requests)), {}
    while todo or engine.has_unfinished_requests():
        for i, (prompt, params) in todo[:2]:
            engine.add_request(str(i), prompt, params, stream=False)
        del todo[:2]
        outputs |= {output.request_id: visible(output) for output in engine.step().outputs}
    assert_at_rest(engine)
    return outputs


FEW_BLOCKS = {"enable_overlap": True, "num_kv_blocks": 48, "block_size": 4}
CONFIGURATIONS = {
    "one at a time": {"enable_overlap": False},
    "overlap": {"enable_overlap": True},
    "overlap, chunked prefill": {"enable_overlap": True, "max_num_batched_tokens": 9, "block_size": 4},
    "overlap, preemption": FEW_BLOCKS,
    "overlap, swap": {**FEW_BLOCKS, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    "length that is no multiple of the block size": {"enable_overlap": True, "max_model_len": 61, "block_size": 8},
}


@pytest.mark.parametrize(
    ("configuration", "kind"),
    [
        ("length that is no multiple of the block size", "logprobs"),
        ("overlap, chunked prefill", "penalties"),
        ("overlap, swap", "all kinds"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("one at a time", "seeded"), ("overlap", "samples"), ("overlap, preemption", "biases"))
        ),
    ],
)
def test_outputs_are_those_of_eager_steps(monkeypatch, with_tokenizer, configuration, kind):
    rng, stem = random.Random(1), ids(20)
    requests = []
    for i in range(9):
        prompt = stem[: rng.choice([0, 7, 16])] + ids(rng.randint(1, 16), seed=i)
        fields = KINDS[rng.choice(list(KINDS)) if kind == "all kinds" else kind](i)
        requests.append((prompt, SamplingParams(**{"max_tokens": rng.randint(2, 16), "ignore_eos": True, **fields})))
    eager, graphs = make_engines(monkeypatch, with_tokenizer, **CONFIGURATIONS[configuration])
    assert serve(graphs, requests) == serve(eager, requests)
    assert graphs.recorder.num_recorded == 4  # 1, 2, 4, 6
    assert graphs.recorder.num_replays > 5
    # padding has written to the null block, and nothing else has
    assert eager.runner.kv_cache.tensor[:, :, 0].abs().sum() == 0


@pytest.mark.slow
def test_every_batch_size_and_beams(monkeypatch, tiny_checkpoint):
    eager, graphs = make_engines(monkeypatch, tiny_checkpoint[0], max_num_seqs=11, enable_overlap=True)
    outputs = []
    for engine in (eager, graphs):
        for i in range(11):  # they end one after the other
            engine.add_request(str(i), ids(3 + i, seed=i), greedy(4 + 2 * i))
        done = tokens_of(run(engine))
        engine.add_request("beams", ids(5), BeamSearchParams(3, 6))
        engine.add_request("beside", ids(9), greedy(14))
        found = run(engine)
        beams = [(one.tokens, pytest.approx(one.cum_logprob, abs=1e-4)) for one in found.pop("beams").sequences]
        outputs.append((done, beams, tokens_of(found)))
    assert outputs[0] == outputs[1]
    assert graphs.recorder.num_replays > 20


REPEATING = [([5, 6, 7, 8] * 4, greedy(40)), ([9, 4] * 8, SamplingParams(temperature=0.5, seed=3, max_tokens=30))]


def drafting(**options):
    return {"speculative_config": {"num_speculative_tokens": 5, "disable_by_batch_size": 4, **options}}


@pytest.mark.slow
def test_drafts_of_few_users_are_replayed(monkeypatch, with_tokenizer):
    """Each draft is a decode: one user has up to 6 here, and 64 at most are recorded."""
    eager, graphs = make_engines(monkeypatch, with_tokenizer, max_num_seqs=1, **drafting(method="ngram"))
    rows, replay = [], CudaGraphs.replay
    monkeypatch.setattr(CudaGraphs, "replay", lambda *args: rows.append(len(args[1].input_ids)) or replay(*args))
    assert serve(graphs, REPEATING) == serve(eager, REPEATING)
    assert graphs.recorder.num_recorded == len(graph_sizes(64))
    assert graphs.get_stats().num_accepted_tokens > 5
    assert max(rows) > 2


@pytest.mark.slow
def test_steps_of_a_draft_model_are_replayed(monkeypatch, with_tokenizer):
    """Those that propose, and those of the large model, which it computes along."""
    options = drafting(model=str(with_tokenizer))
    eager, graphs = make_engines(monkeypatch, with_tokenizer, max_num_seqs=2, **options)
    draft, computed = graphs.scheduler.drafter.proposer.runner, []
    draft.model.register_forward_hook(lambda model, args, output: computed.append(args[2].max_seqlen_q))
    requests = [
        (prompt, dataclasses.replace(params, logprobs=i or None)) for i, (prompt, params) in enumerate(REPEATING)
    ]
    assert serve(graphs, requests) == serve(eager, requests)
    assert graphs.get_stats().num_accepted_tokens > 20
    assert computed
    assert all(computed), "only steps with prompts"


def test_what_is_no_plain_decode_is_not_replayed(monkeypatch, tiny_checkpoint):
    _, engine = make_engines(monkeypatch, tiny_checkpoint[0], max_num_seqs=3)
    graphs, none = engine.runner.step_graphs, torch.empty(0, dtype=torch.int64)
    batch = decode_batch(3, engine.parts.block_size, 8, temperature=0)
    assert graphs.can_replay(batch, none)
    assert not graphs.can_replay(decode_batch(4, engine.parts.block_size, 8, temperature=0), none), (
        "more than were recorded"
    )
    assert not graphs.can_replay(
        dataclasses.replace(batch, metadata=dataclasses.replace(batch.metadata, num_decodes=2)), none
    ), "one is a prefill chunk"
    judged = TargetRows(torch.tensor([0]), torch.tensor([5]), 1)
    assert not graphs.can_replay(ReadBatch(**values_of(batch), readers=(judged,)), none), "a prompt is judged"
    for rows in ([0, 1], [0, 2, 2], [0, 0, 1]):
        rows = torch.tensor(rows, dtype=torch.int32)
        assert not graphs.can_replay(dataclasses.replace(batch, logits_indices=rows), none), "not each row one token"
    assert not graphs.can_replay(batch, torch.zeros(4, dtype=torch.int64)), "tokens that have no place"


# ---- which batches are replayed


def test_they_are_refused_where_they_cannot_be(tiny_checkpoint):
    with pytest.raises(ValueError, match="enable_cuda_graphs=True is not available .*need a CUDA device, got cpu"):
        LLMEngine(Config(tiny_checkpoint[0], device="cpu", enable_cuda_graphs=True))


NONE, FORWARD = ", no CUDA graphs (", ", with CUDA graphs of the forward pass only ("
CHOICES = [
    ({}, GatherAttention, True, ", with CUDA graphs"),
    ({"enable_cuda_graphs": True}, GatherAttention, True, ", with CUDA graphs"),
    ({"enable_cuda_graphs": False}, GatherAttention, True, f"{NONE}enable_cuda_graphs=False)"),
    ({"enforce_eager": True}, GatherAttention, True, f"{NONE}enforce_eager=True)"),
    ({}, TorchAttention, True, f"{NONE}this attention backend reads lengths back to the host)"),
    ({}, GatherAttention, False, f"{FORWARD}without triton, drawing tokens makes the host wait)"),
    ({"enable_cuda_graphs": False}, GatherAttention, False, f"{NONE}enable_cuda_graphs=False)"),
    ({}, TorchAttention, False, f"{NONE}this attention backend reads lengths back to the host)"),
    ({"enforce_eager": True}, GatherAttention, False, f"{NONE}enforce_eager=True)"),
]


def test_who_has_them_on_cuda():
    for options, backend, has_draw_kernel, expected in CHOICES:
        config = Config("model", **options)
        chosen = choose_graphs(config, backend(4, 2, 16, 16), has_draw_kernel, torch.device("cuda", 0))
        replayed = "forward" if expected.startswith(FORWARD) else None if expected.startswith(NONE) else "step"
        assert chosen == (replayed, expected)


def test_graphs_that_must_be_are_whole_steps():
    with pytest.raises(ValueError, match="enable_cuda_graphs=True is not available .*without triton, drawing tokens"):
        choose_graphs(
            Config("model", enable_cuda_graphs=True), GatherAttention(4, 2, 16, 16), False, torch.device("cuda", 0)
        )


def test_experts_are_not_replayed():
    """How many tokens each expert gets is read back to the host in every layer."""
    choice = (GatherAttention(4, 2, 16, 16), True, torch.device("cuda", 0), 8)
    reason = "tokens are grouped by expert on the host"
    assert choose_graphs(Config("model"), *choice) == (None, f", no CUDA graphs ({reason})")
    without_draws = choice[0], False, *choice[2:]
    assert choose_graphs(Config("model"), *without_draws)[0] is None
    with pytest.raises(ValueError, match=rf"enable_cuda_graphs=True is not available \({reason}\)"):
        choose_graphs(Config("model", enable_cuda_graphs=True), *choice)
