"""A CPU that plays a CUDA device for the core: flash-attn's two functions, CUDA graphs, and what a device refuses.

The rules: an operation on the device takes only tensors of the device; nothing that is computed there is read on the
host while a graph is recorded; a graph repeats its operations with the same addresses and numbers, and what Python
decided while recording stays decided.
"""

import sys
import types
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.engine import LLMEngine
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm.model_runner import ModelRunner

FACTORIES = ("arange", "zeros", "ones", "empty", "full", "tensor")


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Device(TorchDispatchMode):
    """Checks each operation. `log` collects operations while a graph is recorded."""

    def __init__(self):
        super().__init__()
        self.kept = []  # so that no address is used twice
        self.memory = set()
        self.log = None

    def own(self, tensors):
        self.kept += tensors
        self.memory |= {memory_of(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        if self.log is not None:
            assert name not in ("item", "_local_scalar_dense"), "the host waits for a number"
            assert name != "nonzero", "a shape depends on the device"
        for tensor in tensors_in((args, kwargs)):
            assert memory_of(tensor) in self.memory or tensor.numel() <= 1, f"{name} gets a tensor of the host"
        out = func(*args, **kwargs)
        self.own(tensors_in(out))
        if self.log is not None:
            self.log.append((func, args, kwargs, out))
        return out

    def launch(self, function, *args):
        """Run a kernel that PyTorch does not know: one operation of a graph."""
        for tensor in tensors_in(args):
            assert memory_of(tensor) in self.memory, "the kernel gets a tensor of the host"
        with _disable_current_modes():
            out = function(*args)
        self.own([out])
        if self.log is not None:
            self.log.append((function, args, {}, out))
        return out


class Factories(TorchFunctionMode):
    """Checks that a new tensor names its device: what a dispatch mode sees always has one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FACTORIES and getattr(torch, func.__name__, None) is func:
            assert kwargs.get("device") is not None, f"{func.__name__} makes a tensor on the host"
        return func(*args, **kwargs)


class Graph:
    """`torch.cuda.CUDAGraph`: operations in the order in which they were recorded, over the same memory."""

    def __init__(self):
        self.operations = []
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        with _disable_current_modes():
            for func, args, kwargs, recorded in self.operations:
                for place, new in zip(tensors_in(recorded), tensors_in(func(*args, **kwargs)), strict=True):
                    if memory_of(place) != memory_of(new):  # otherwise it is a view, or was written in place
                        place.copy_(new)


class Stream:
    """`torch.cuda.Stream`: the stand-in runs everything at once."""

    def wait_stream(self, other):
        pass


def attend_one(q, k, v):
    """q: [num_heads, head_dim]; k, v: [len, num_kv_heads, head_dim] -> as q, in float64"""
    group = q.shape[0] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", q.double(), k) / q.shape[-1] ** 0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v).to(q.dtype)


def slots_of(cache, block_table, n):
    return cache[block_table.long()].flatten(0, 1)[:n]


def decode(q, k_cache, v_cache, cache_seqlens, block_table):
    out = torch.zeros_like(q)
    for i, n in enumerate(cache_seqlens.tolist()):
        if n:
            out[i, 0] = attend_one(q[i, 0], *(slots_of(cache, block_table[i], n) for cache in (k_cache, v_cache)))
    return out


def prefill(q, k_cache, v_cache, cu_q, cu_k, block_table):
    out = torch.zeros_like(q)
    for i, table in enumerate(block_table):
        first, last, n = int(cu_q[i]), int(cu_q[i + 1]), int(cu_k[i + 1] - cu_k[i])
        k, v = slots_of(k_cache, table, n), slots_of(v_cache, table, n)
        for j in range(first, last):
            seen = n - (last - 1 - j)  # causal, aligned at the ends
            out[j] = attend_one(q[j], k[:seen], v[:seen])
    return out


def flash_attn(device):
    """The module `flash_attn`, with the arguments of its documentation."""

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
        assert causal
        assert q.shape[1] == 1
        assert k_cache.shape[1] % 4 == 0
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        assert len(q) == len(cache_seqlens) == len(block_table)
        return device.launch(decode, q, k_cache, v_cache, cache_seqlens, block_table)

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, causal):
        assert causal
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        assert {cu_seqlens_q.dtype, cu_seqlens_k.dtype, block_table.dtype} == {torch.int32}
        assert device.log is None, "prefill is never recorded"
        out = device.launch(prefill, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
        with _disable_current_modes():
            assert cu_seqlens_q.diff().max() == max_seqlen_q
            assert cu_seqlens_k.diff().max() == max_seqlen_k
            assert cu_seqlens_q[-1] == len(q)
        return out

    return types.SimpleNamespace(
        flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
    )


class StandInRunner(ModelRunner):
    """The core's runner on the stand-in."""

    device_rules = None

    def make_graphs(self):
        if self.config.enforce_eager:
            return None
        max_num_seqs = min(self.config.max_num_seqs, self.max_num_batched_tokens)
        max_num_blocks = -(-self.max_model_len // self.backend.block_size)
        return CudaGraphs(self.model, self.kv_cache.tensor, max_num_seqs, max_num_blocks, self.metadata_cls)

    def start(self):
        self.rules = Device()
        sys.modules["flash_attn"] = flash_attn(self.rules)
        super().start()

    def send(self, batch):
        sent = copy_record(batch)
        self.rules.own(list(tensors_in([values_of(sent)])))
        return sent

    def forward(self, batch):
        self.own_all()
        with self.rules, Factories():
            return super().forward(batch)

    def sample(self, hidden, batch):
        self.rules.own([hidden])
        with self.rules, Factories():
            return super().sample(hidden, batch)

    def own_all(self):
        rotary = self.model.model.rotary
        graphs = [] if self.graphs is None else tensors_in([*vars(self.graphs).values()])
        self.rules.own([*self.model.parameters(), self.kv_cache.tensor, rotary.frequencies, *graphs])


def values_of(record):
    return [values_of(one) if is_dataclass(one) else one for one in (getattr(record, f.name) for f in fields(record))]


def copy_record(record):
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    copied = {name: one.clone() for name, one in values.items() if isinstance(one, torch.Tensor)}
    return replace(record, **copied, **{name: copy_record(one) for name, one in values.items() if is_dataclass(one)})


class StandInEngine(LLMEngine):
    runner_class = StandInRunner

    def make_runner(self, folder):
        return self.runner_class(self.config, folder)


def install(monkeypatch):
    """Let engines of `StandInEngine` use flash-attn and graphs."""
    monkeypatch.setattr(FlashAttention, "why_not", staticmethod(lambda *_: None))
    monkeypatch.setattr(FlashAttention, "default_block_size", 4)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    runners = []
    record = CudaGraphs.record

    def record_by_the_rules(self, size):
        runner = next(one for one in runners if one.kv_cache.tensor is self.kv_cache)
        runner.graphs = self
        runner.own_all()
        with runner.rules, Factories():
            record(self, size)

    monkeypatch.setattr(CudaGraphs, "record", record_by_the_rules)
    start = StandInRunner.start

    def start_and_know(self):
        runners.append(self)
        start(self)

    monkeypatch.setattr(StandInRunner, "start", start_and_know)

    @contextmanager
    def graph(one, pool, stream):
        assert pool == "pool"
        assert isinstance(stream, Stream)
        rules = next(runner.rules for runner in reversed(runners))
        rules.log = one.operations
        yield
        rules.log = None

    monkeypatch.setattr(torch.cuda, "graph", graph)
