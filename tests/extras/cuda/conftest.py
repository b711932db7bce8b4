"""`fake_cuda`, for tests without a GPU: it counts bytes, and binds each call to the signature of the real function, so
that a wrong name or argument shows. The model runs on CPU meanwhile.
"""

import contextlib
import inspect

import pytest
import torch

from nanovllm.plugins import OWN_BACKENDS
from nanovllm_extras import Config, LLMEngine
from tests.extras.recorded_operations import GatherAttention

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
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.events.append("synchronize"))
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
        return FakeStream(self.num_streams % 32)

    @contextlib.contextmanager
    def side_stream(self, stream):
        self.stream, self.warm_stream = "side", stream
        yield
        if "warm" not in self.events:
            self.free -= 100 << 20
            self.events.append("warm")
        self.stream = "main"


class FakeStream:
    def __init__(self, number=-1):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, FakeStream) and self.number == other.number

    def wait_stream(self, other):
        assert isinstance(other, FakeStream)


@pytest.fixture
def fake_cuda(monkeypatch):
    return FakeCuda(monkeypatch)


@pytest.fixture
def runner(monkeypatch, tiny_checkpoint):
    """Of an engine whose attention can be recorded."""
    monkeypatch.setitem(OWN_BACKENDS, "torch", GatherAttention)
    options = {"attention_backend": "torch", "num_kv_blocks": 8, "enforce_eager": True, "enable_cuda_graphs": False}
    runner = LLMEngine(Config(tiny_checkpoint[0], device="cpu", dtype="float32", **options)).runner
    assert isinstance(runner.backend, GatherAttention)
    runner.draw = lambda logits, *_: logits.argmax(-1)
    return runner
