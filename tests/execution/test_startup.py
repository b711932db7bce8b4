"""What happens once: its parts are timed, memory is divided up, and CUDA is asked in the right words.

Without a GPU, `FakeCuda` counts the bytes, and binds each call to the signature of the real function: a wrong name or
argument shows. The model runs on CPU meanwhile.
"""

import contextlib
import inspect

import pytest
import torch

from nanovllm import Config, LLMEngine
from nanovllm.execution.cache_size import StepSizes, count_swap_blocks, measure_free_bytes, widest_batch
from nanovllm.execution.cuda_graph import Recorder, graph_sizes, measure_graph_bytes, record_graphs
from nanovllm.execution.memory_advice import advice_on_start_memory
from tests.recorded_operations import GatherAttention

GIB = 1 << 30


class FakeCuda:
    """Memory of 80 GiB, of which 4 are used; a warm-up for the first time takes 100 MiB, a graph 7."""

    def __init__(self, monkeypatch):
        self.events, self.free, self.stream = [], 76 * GIB, "main"
        self.is_recording, self.warm_stream, self.num_streams = False, None, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 3 * GIB)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 2 * GIB)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: self.events.append("reset peak"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.events.append("empty cache"))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
        monkeypatch.setattr(torch.cuda, "stream", self.side_stream)
        real_graph = inspect.signature(torch.cuda.graph.__init__)
        real_methods = vars(torch.cuda.CUDAGraph)
        cuda = self

        class FakeGraph:
            def replay(self):
                assert "replay" in real_methods
                cuda.events.append("replay")

        @contextlib.contextmanager
        def graph(*args, **kwargs):
            bound = real_graph.bind(None, *args, **kwargs).arguments
            assert isinstance(bound["cuda_graph"], FakeGraph)
            assert bound["pool"] == "pool"
            assert bound["stream"] is cuda.warm_stream, "the graph's memory for cuBLAS is that of the warm-up's stream"
            cuda.is_recording = True
            yield
            cuda.is_recording = False
            cuda.free -= 7 << 20

        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "graph", graph)

    def mem_get_info(self, device=None):
        return self.free, 80 * GIB

    def make_stream(self, device=None):
        self.num_streams += 1
        return FakeStream()

    @contextlib.contextmanager
    def side_stream(self, stream):
        self.stream, self.warm_stream = "side", stream
        yield
        if "warm" not in self.events:
            self.free -= 100 << 20
            self.events.append("warm")
        self.stream = "main"


class FakeStream:
    def wait_stream(self, other):
        assert isinstance(other, FakeStream)


@pytest.fixture
def fake_cuda(monkeypatch):
    return FakeCuda(monkeypatch)


@pytest.fixture
def runner(monkeypatch, tiny_checkpoint):
    """Of an engine whose attention can be recorded."""
    monkeypatch.setattr("nanovllm.layers.backends.TorchAttention", GatherAttention)
    options = {"attention_backend": "torch", "num_kv_blocks": 8, "enforce_eager": True}
    runner = LLMEngine(Config(tiny_checkpoint[0], device="cpu", dtype="float32", **options)).runner
    runner.draw = lambda logits, *_: logits.argmax(-1)
    return runner


def test_parts_are_timed_in_order(tiny_checkpoint):
    startup = LLMEngine(Config(tiny_checkpoint[0], device="cpu")).startup
    assert list(startup.seconds) == ["backend", "weights", "layers", "memory", "graphs"]
    assert all(seconds >= 0 for seconds in startup.seconds.values())
    assert sum(startup.seconds.values()) > 0


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


@pytest.mark.parametrize("has_graphs", [False, True])
def test_free_bytes_are_what_weights_a_step_graphs_and_others_leave(fake_cuda, runner, has_graphs):
    runner.kv_cache.allocate(0)
    config = Config("model", gpu_memory_utilization=0.5)
    sizes = StepSizes(max_num_batched_tokens=40, max_num_seqs=20, max_model_len=512)
    free = measure_free_bytes(runner, config, sizes, has_graphs)
    graphs = 107 + (len(graph_sizes(20)) - 1) * 7 if has_graphs else 0
    used_by_others = 80 * GIB - fake_cuda.free - 3 * GIB
    assert free == 40 * GIB - 2 * GIB - (graphs << 20) - used_by_others
    # what an engine that is gone has left is not counted as this one's
    assert fake_cuda.events[:2] == ["empty cache", "reset peak"]


@pytest.mark.parametrize(("tokens", "seqs", "length"), [(40, 20, 512), (7, 20, 512), (100, 3, 16), (1, 1, 2)])
def test_the_widest_batch_uses_up_every_limit(tokens, seqs, length):
    sizes = StepSizes(tokens, seqs, length)
    batch = widest_batch(sizes, 16)
    assert len(batch.input_ids) == batch.metadata.seq_lens.sum() == tokens
    assert len(batch.logits_indices) >= min(seqs, tokens) == sizes.max_decodes
    assert batch.metadata.seq_lens.max() <= length
    assert not batch.metadata.slot_mapping.any()
    assert not batch.metadata.block_tables.any()


def test_what_to_do_when_memory_is_short():
    with (
        pytest.raises(
            ValueError, match="lower gpu_memory_utilization .*max_num_batched_tokens or max_num_seqs.*tried to"
        ),
        advice_on_start_memory(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate")
    with pytest.raises(KeyError), advice_on_start_memory():
        raise KeyError("x")


def test_swap_space_is_whole_blocks():
    assert [count_swap_blocks(n, 100) for n in (0, 100, 199, 1000)] == [0, 1, 1, 10]
    with pytest.raises(ValueError, match="swap_space_bytes must be >= 100, one block, got 99"):
        count_swap_blocks(99, 100)
