"""CUDA graphs of several ranks as far as they go without a GPU: each rank records its share of a decode step, in which
the collectives are operations as all others, and replays it when rank 0 does.

`recorded_operations.py` replaces CUDA's recording. Collectives become operations of PyTorch here, so that they are
recorded and replayed as NCCL's are.
"""

import dataclasses
import itertools

import pytest
import torch

from nanovllm.plugins import OWN_BACKENDS
from nanovllm_extras import Config, LLMEngine, PoolingParams, SamplingParams
from nanovllm_extras.execution.cuda_warm_up import draws, null_batch
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.step_graphs import CudaGraphs, graph_sizes
from nanovllm_extras.parallel import start_ranks as start
from nanovllm_extras.parallel.communicator import Communicator
from nanovllm_extras.parallel.messages import Header, pack_step
from nanovllm_extras.parallel.worker import compute_step
from tests.extras.cuda.test_graphs import draw_plainly, serve
from tests.extras.recorded_operations import GatherAttention, OperationRecorder

COMMUNICATORS = {}  # by number: operations of PyTorch take no other objects


@torch.library.custom_op("test_ranks::all_reduce", mutates_args=("x",))
def all_reduce(x: torch.Tensor, number: int) -> None:
    COMMUNICATORS[number].all_reduce(x)


@torch.library.custom_op("test_ranks::broadcast", mutates_args=("x",))
def broadcast(x: torch.Tensor, number: int) -> None:
    COMMUNICATORS[number].broadcast(x)


@torch.library.custom_op("test_ranks::gather", mutates_args=())
def gather(x: torch.Tensor, number: int) -> torch.Tensor:
    return COMMUNICATORS[number].gather(x.clone()).clone()  # what is recorded writes to x again, and is new memory


class RecordedCommunicator(Communicator):
    """Does what `inner` does, by operations that can be recorded."""

    def __init__(self, inner, number):
        self.inner, self.number = inner, number
        self.rank, self.size = inner.rank, inner.size
        COMMUNICATORS[number] = inner

    def all_reduce(self, x):
        all_reduce(x, self.number)
        return x

    def broadcast(self, x):
        broadcast(x, self.number)
        return x

    def gather(self, x):
        return gather(x, self.number)

    def abort(self):
        self.inner.abort()

    def close(self):
        self.inner.close()


class RecordingDevice(Device):
    """Adds graphs to the start, as CUDA's does. `made` gets a recorder for each rank."""

    def __init__(self, made):
        self.made = made

    def record(self, runner):
        self.made.append(OperationRecorder())
        draw = runner.draw if runner.draw is start.draw_nothing else draw_plainly
        max_rows, max_num_blocks = runner.largest_decode
        arguments = (runner.network, runner.kv_cache.tensor, draw, graph_sizes(max_rows), max_num_blocks)
        runner.step_graphs = CudaGraphs(*arguments, self.made[-1], runner.more_inputs)
        runner.step_graphs.record_all()


@pytest.fixture
def recorders(quick_ranks, monkeypatch):
    """One for each rank whose graphs have been recorded."""
    made, numbers, connect = [], itertools.count(), start.connect

    monkeypatch.setitem(OWN_BACKENDS, "torch", GatherAttention)
    monkeypatch.setattr(ModelRunner, "make_device", lambda runner: RecordingDevice(made))
    monkeypatch.setattr(start, "connect", lambda *args: RecordedCommunicator(connect(*args), next(numbers)))
    return made


REQUESTS = [
    ([5, 6, 7], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
    ([9] * 11, SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)),
    ([5, 6, 8, 2], SamplingParams(temperature=0, max_tokens=7, logprobs=2, prompt_logprobs=1, ignore_eos=True)),
    ([1], SamplingParams(temperature=0.9, seed=1, max_tokens=8, n=2, ignore_eos=True)),
]


def make_engines(folder, enable_overlap, **others):
    """The same engine of one rank, and of two."""
    options = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", "enforce_eager": True, **others}
    config = Config(folder, num_kv_blocks=60, enable_overlap=enable_overlap, **{"max_num_seqs": 6, **options})
    return LLMEngine(config), LLMEngine(dataclasses.replace(config, tensor_parallel_size=2))


def test_replayed_decodes_of_two_ranks_are_those_of_one(recorders, with_tokenizer):
    alone, engine = make_engines(with_tokenizer, True)
    del recorders[0]  # of the engine with one rank
    assert serve(engine, REQUESTS) == serve(alone, REQUESTS)
    assert [recorder.num_recorded for recorder in recorders] == [4, 4]  # 1, 2, 4, 6 on both ranks
    assert recorders[0].num_replays == recorders[1].num_replays > 5
    assert engine.runner.step_graphs is not None


def test_what_is_read_of_prompts_keeps_all_ranks_from_replaying(recorders, with_tokenizer):
    """Prompts of one token are decodes. Only rank 0 knows that their hidden states are read."""
    alone, engine = make_engines(with_tokenizer, True)
    del recorders[0]
    requests = [([5 + i], PoolingParams(pooling="mean")) for i in range(3)]
    vectors = []
    for one in (alone, engine):
        for i, (prompt, params) in enumerate(requests):
            one.add_request(str(i), prompt, params)
        done = {}
        while one.has_unfinished_requests():
            done |= {output.request_id: output.outputs.embedding for output in one.step().outputs}
        vectors.append(torch.tensor([done[str(i)] for i in range(3)]))
    torch.testing.assert_close(vectors[0], vectors[1])
    assert [recorder.num_replays for recorder in recorders] == [0, 0]


@pytest.mark.slow
def test_all_ranks_record_as_many_rows_for_drafts(recorders, with_tokenizer):
    """Only rank 0 knows of drafts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 4}
    alone, engine = make_engines(with_tokenizer, False, max_num_seqs=1, speculative_config=drafts)
    del recorders[0]
    requests = [([5, 6, 7, 8] * 4, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))]
    assert serve(engine, requests) == serve(alone, requests)
    assert [recorder.num_recorded for recorder in recorders] == [len(graph_sizes(64))] * 2
    assert recorders[0].num_replays == recorders[1].num_replays > 5


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_rank_replays_the_cores_graphs_exactly_if_rank_0_does(with_tokenizer, is_replayed):
    """Rank 0 also sends batches that it computes without its graphs, to find the request that made a step fail."""
    runner, replayed = LLMEngine(Config(with_tokenizer, device="cpu", dtype="float32", num_kv_blocks=8)).runner, []

    class Graphs:
        def can_replay(self, batch):
            return True

        def replay(self, batch):
            replayed.append(len(batch.input_ids))
            return torch.zeros(len(batch.input_ids), runner.shape.hidden_size)

    runner.graphs = Graphs()
    batch = null_batch([1, 1, 1], [1, 1, 1], True, 1, draws("greedy", 3))
    message = pack_step(batch, False, is_replayed)
    num_numbers = len(Header._fields)
    compute_step(runner, Header(*message[:num_numbers].tolist()), message[num_numbers:])
    assert replayed == ([3] if is_replayed else [])
