"""Where no kernel can draw tokens, CUDA replays the forward pass of decodes with the core's graphs, and draws eagerly.

`CudaDevice` and `CudaGraphs` are the real ones. The replacement of CUDA records PyTorch's operations, as in
`recorded_operations.py`. Outputs must be those of an engine that computes every step eagerly.
"""

import random

import pytest
import torch

from nanovllm import cuda_graphs
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm_extras import Config, LLMEngine, SamplingParams
from nanovllm_extras.execution import cuda_startup as startup
from nanovllm_extras.execution.chooser import Chooser
from nanovllm_extras.execution.cuda_startup import CudaDevice
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.step_graphs import choose_graphs
from tests.extras.cuda.test_graphs import CONFIGURATIONS, serve
from tests.extras.late_runner import LateRunner
from tests.extras.recorded_operations import GatherAttention, OperationRecorder
from tests.extras.test_full_engine import greedy, ids, run
from tests.extras.test_overlap import KINDS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Replay:
    def __init__(self, replay):
        self.replay, self.num_replays = replay, 0

    def __call__(self):
        self.num_replays += 1
        self.replay()


@pytest.fixture
def recorded(monkeypatch):
    """(size, replay) of all graphs that engines record; CUDA's part is played by `OperationRecorder`."""
    made = []
    record = CudaGraphs.record

    def record_and_keep(graphs, size):
        record(graphs, size)
        replay, hidden = graphs.graphs[size]
        graphs.graphs[size] = Replay(replay), hidden
        made.append((size, graphs.graphs[size][0]))

    monkeypatch.setattr(cuda_graphs, "Recorder", OperationRecorder)
    monkeypatch.setattr(CudaGraphs, "record", record_and_keep)
    return made


def make_backends(kind, block_size):
    """Replaces `Chooser.make_backends`: a backend of `kind` for each shape of K and V."""

    def make(chooser, config, shape, device, dtype):
        sizes = [(one.num_kv_heads, one.head_dim) for one in shape.kv_groups]
        sizes = sizes or [(shape.num_key_value_heads, shape.head_dim)]
        return tuple(kind(shape.num_attention_heads, *size, block_size) for size in sizes), "as on CUDA"

    return make


def make_engine(monkeypatch, folder, has_graphs, max_num_seqs=6, **options):
    """An engine without Triton, as on CUDA with flash-attn."""

    def make_device(runner):
        return CudaDevice(
            *(runner.config, CPU, runner.backend, runner.shape, runner.max_num_batched_tokens, runner.max_rows)
        )

    def choose(config, backend, has_draw_kernel, device, num_experts):
        return choose_graphs(config, backend, has_draw_kernel, CUDA, num_experts)

    block_size = options.pop("block_size", 16)
    with monkeypatch.context() as patch:
        patch.setattr(Chooser, "make_backends", make_backends(GatherAttention, block_size))
        patch.setattr(ModelRunner, "make_device", make_device)
        patch.setattr(startup, "choose_graphs", choose)
        options = {"enable_cuda_graphs": None if has_graphs else False, "num_kv_blocks": 200, **options}
        config = Config(folder, device="cpu", dtype="float32", max_num_seqs=max_num_seqs, **options)
        engine = LLMEngine(config)
    assert (engine.runner.graphs is not None) == has_graphs
    assert ("with CUDA graphs of the forward pass only (without triton" in engine.description) == has_graphs
    engine.runner.kv_cache.tensor[:, :, 1:] = 50.0  # garbage that would show
    if engine.parts.enable_overlap:
        LateRunner(engine)
    return engine


@pytest.mark.parametrize(
    ("configuration", "kind"),
    [("overlap, swap", "all kinds"), pytest.param("one at a time", "samples", marks=pytest.mark.slow)],
)
def test_outputs_are_those_of_eager_steps(monkeypatch, recorded, with_tokenizer, configuration, kind):
    rng, stem = random.Random(1), ids(20)
    requests = []
    for i in range(9):
        prompt = stem[: rng.choice([0, 7, 16])] + ids(rng.randint(1, 16), seed=i)
        fields = KINDS[rng.choice(list(KINDS)) if kind == "all kinds" else kind](i)
        requests.append((prompt, SamplingParams(**{"max_tokens": rng.randint(2, 16), "ignore_eos": True, **fields})))
    options = CONFIGURATIONS[configuration]
    eager, graphs = (make_engine(monkeypatch, with_tokenizer, has_graphs, **options) for has_graphs in (False, True))
    assert serve(graphs, requests) == serve(eager, requests)
    assert [size for size, _ in recorded] == [6, 4, 2, 1]
    assert sum(graph.num_replays for _, graph in recorded) > 5


def test_a_replay_computes_exactly_what_an_eager_decode_computes(monkeypatch, recorded, tiny_checkpoint):
    """Bit by bit: hidden states, and K and V, of batches that need no padding."""
    engine = make_engine(monkeypatch, tiny_checkpoint[0], True, max_num_seqs=4, enable_overlap=False)
    runner, compared = engine.runner, []
    graphs, cache = runner.graphs, runner.kv_cache.tensor
    replay = graphs.replay

    def replay_and_compare(batch):
        before = cache.clone()
        replayed = replay(batch)
        if len(batch.input_ids) in graphs.sizes:
            after = cache.clone()
            cache.copy_(before)
            assert torch.equal(replayed, runner.forward(batch))
            assert torch.equal(after, cache)
            compared.append(len(replayed))
        return replayed

    graphs.replay = replay_and_compare
    for i in range(4):
        engine.add_request(str(i), ids(5 + 3 * i, seed=i), greedy(3 + 4 * i))
    run(engine)
    assert set(compared) == {1, 2, 4}


def test_steps_with_prompts_are_computed_eagerly(monkeypatch, recorded, tiny_checkpoint):
    engine = make_engine(monkeypatch, tiny_checkpoint[0], True, max_num_seqs=4, enable_overlap=False)
    engine.add_request("a", ids(9), greedy(8))
    engine.step()
    assert sum(graph.num_replays for _, graph in recorded) == 0, "a prompt"
    engine.step()
    assert sum(graph.num_replays for _, graph in recorded) == 1
    engine.add_request("b", ids(9, seed=1), greedy(8))
    engine.step()
    assert sum(graph.num_replays for _, graph in recorded) == 1, "a decode beside a prompt"
    engine.step()
    assert sum(graph.num_replays for _, graph in recorded) == 2
