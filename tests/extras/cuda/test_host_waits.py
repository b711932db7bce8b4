"""On CUDA, the host waits for nothing between a step's launch and its tokens, and no tensor is on the wrong device.

Shown without a GPU on PyTorch's `meta` device, whose tensors have shapes and no data: code that reads a number, or a
shape that depends on one, gets an error, and so does an operation over two devices. Where CUDA would be more lenient
and copy what lies on the host, `DeviceCheck` is not. Kernels of libraries and Triton's are stand-ins that check their
arguments. The batches are those of real traffic on CPU.
"""

import importlib.machinery
import random
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.kv_cache import KVCache
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras import Config, LLMEngine, SamplingParams
from nanovllm_extras.execution.cuda_warm_up import warm_up
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.input_buffer import InputBuffer
from nanovllm_extras.execution.layout import Layout
from nanovllm_extras.execution.step_graphs import CudaGraphs, StepSizes
from nanovllm_extras.execution.transfers import Transfers
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens, Computed, has_placeholders
from nanovllm_extras.weights.quantise import quantise
from tests.extras.late_runner import LateRunner
from tests.extras.test_full_engine import ids
from tests.extras.test_overlap import KINDS

META = torch.device("meta")
SHAPE = NetworkConfig(300, 64, 128, 2, 4, 2, 32, 512, tie_word_embeddings=True)


class OneCopy(Device):
    """Sends each step in one copy, as CUDA's does."""

    def __init__(self, buffer):
        self.buffer = buffer

    def send(self, record):
        return self.buffer.send_record(record)


def compute_eagerly(runner, batch):
    """Send, compute and sample a step. Copies of blocks are left out."""
    sent = runner.send_batch(batch)
    return runner.sample_step(Computed(runner.forward(sent), sent))


class DeviceCheck(TorchDispatchMode):
    """No operation on the device reads a tensor on the host, but for the one copy of a step's input."""

    def __init__(self, inputs):
        super().__init__()
        self.inputs, self.num_copies = inputs, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor) and x.dim()]
        if len({tensor.device for tensor in tensors}) > 1:
            assert func is torch.ops.aten.copy_.default, f"{func} mixes devices"
            assert args[0].untyped_storage()._cdata == self.inputs.device_bytes.untyped_storage()._cdata
            self.num_copies += 1
        return func(*args, **(kwargs or {}))


def assert_on_device(*values):
    for tensor in tree_leaves(values):
        assert not isinstance(tensor, torch.Tensor) or tensor.device == META


@pytest.fixture
def flash_attn(monkeypatch):
    def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, **masking):
        assert_on_device(q, k_cache, v_cache, cache_seqlens, block_table)
        return torch.empty_like(q)

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, **masking):
        assert_on_device(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        return torch.empty_like(q)

    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = with_kvcache, varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)


class KernelStandIn:
    """Launched as Triton's kernels are, with a grid of numbers that the host knows."""

    def __init__(self, kernel):
        self.num_launches, self.variants, self._params = 0, set(), kernel.params

    def __getitem__(self, grid):
        assert all(type(n) is int for n in grid)

        def launch(*args, **constants):
            assert_on_device(args)
            self.num_launches += 1
            arguments = tuple(map(specialised, args, self._params))
            self.variants.add((arguments, frozenset(constants.items())))

        return launch


def specialised(arg, param):
    """Return what Triton specialises a kernel for: types, and whether an integer is one or a multiple of 16."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype
    if type(arg) is int and not param.do_not_specialize:
        return 1 if arg == 1 else "16" if arg % 16 == 0 else "int"
    return type(arg)


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins of all that are written in Triton, by name."""
    pytest.importorskip("triton")
    from nanovllm.layers import triton_layers
    from nanovllm_extras.kernels.cuda import (
        cuda_quantised as quantised,
    )
    from nanovllm_extras.kernels.cuda import (
        few_tokens,
        paged_attention,
        sample,
        store_kv,
        truncate,
    )
    from nanovllm_extras.kernels.cuda import (
        norm_kernels as norm,
    )

    kernels = {}
    for module in (triton_layers, few_tokens, norm, paged_attention, quantised, sample, store_kv, truncate):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernels[name] = KernelStandIn(getattr(module, name))
            monkeypatch.setattr(module, name, kernels[name])
    assert len(kernels) == 15
    return kernels


@pytest.fixture(scope="module")
def batches(with_tokenizer):
    """What a busy engine has its runner compute: all kinds of requests, chunked prefill, preemption, overlap."""
    options = {"max_num_batched_tokens": 40, "num_kv_blocks": 30, "block_size": 16, "enable_overlap": True}
    engine = LLMEngine(Config(with_tokenizer, device="cpu", dtype="float32", max_num_seqs=7, **options))
    LateRunner(engine)
    run, seen = engine.runner.run, []
    engine.runner.run = lambda batch: (seen.append(batch), run(batch))[1]
    rng = random.Random(0)
    kinds = [kind for name, kind in KINDS.items() if name != "logits processors"]  # these are the user's own
    for i in range(40):
        fields = {"max_tokens": rng.randint(1, 12), **rng.choice(kinds)(i)}
        engine.add_request(str(i), ids(rng.randint(1, 60), seed=i), SamplingParams(**fields))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(seen) > 50
    assert any(has_placeholders(batch) for batch in seen)
    assert any(batch.readers for batch in seen)
    assert any(batch.copies for batch in seen)
    assert (
        {batch.metadata.num_decodes > 0 for batch in seen}
        == {batch.metadata.max_seqlen_q > 0 for batch in seen}
        == {True, False}
    )
    return seen


def make_runner(backend, has_fast_layers, quantization=None):
    with META:
        model = Qwen3ForCausalLM(SHAPE, backend).to(torch.bfloat16)
        if quantization:
            quantise(model, quantization)
    model.model.rotary(torch.zeros(1, dtype=torch.int32, device=META), torch.bfloat16)  # the first call moves its table
    if has_fast_layers:
        backend.make_fast(model, 512)
    from nanovllm_extras.kernels.cuda.sample import sample_tokens

    kv_cache = KVCache(backend, SHAPE.num_hidden_layers, torch.bfloat16, META)
    kv_cache.allocate(30)
    runner = ModelRunner.__new__(ModelRunner)
    runner.model, runner.backend, runner.kv_cache, runner.draw = model, backend, kv_cache, sample_tokens
    runner.device, runner.graphs, runner.has_overlap = META, None, True
    runner.layout = Layout(Config("model"), SHAPE, torch.bfloat16, META)
    buffer = InputBuffer(META, 1 << 20)
    runner.device_setup = OneCopy(buffer)
    runner.transfers, runner.shape, runner.dtype = Transfers([kv_cache]), SHAPE, torch.bfloat16
    runner.newest_ids = torch.zeros(64, dtype=torch.int64, device=META)
    return runner, buffer


def make_backend(name):
    if name == "flash_attn":
        return FlashAttention(4, 2, 32, 16)
    from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention

    return TritonAttention(4, 2, 32, 16)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("backend", "has_fast_layers"),
    [("triton", False), ("flash_attn", True), pytest.param("triton", True, marks=pytest.mark.slow)],
)
@torch.inference_mode()
def test_an_eager_step_is_one_copy_and_no_wait(flash_attn, kernels, batches, backend, has_fast_layers):
    runner, buffer = make_runner(make_backend(backend), has_fast_layers)
    for batch in batches:
        with DeviceCheck(buffer) as check:
            compute_eagerly(runner, batch)
        assert check.num_copies == 1
    # of two layers
    num_few = sum(len(batch.input_ids) <= 16 for batch in batches)
    num_more = len(batches) - num_few
    assert num_few > 10 < num_more
    expected = {
        "rms_norm_kernel": (num_few + 5 * num_more) * has_fast_layers,
        "norm_rotary_store_kernel": 2 * len(batches) * has_fast_layers,
        "silu_and_mul_kernel": 2 * num_more * has_fast_layers,
        "few_tokens_kernel": 8 * num_few * has_fast_layers,
        "store_kv_kernel": 2 * len(batches) * (backend == "triton" and not has_fast_layers),
        "decode_kernel": 2 * sum(batch.metadata.num_decodes > 0 for batch in batches) * (backend == "triton"),
        "prefill_kernel": 2 * sum(batch.metadata.max_seqlen_q > 0 for batch in batches) * (backend == "triton"),
        "stats_kernel": sum(len(batch.logits_indices) > 0 for batch in batches),
        "pick_kernel": sum(len(batch.logits_indices) > 0 for batch in batches),
    }
    assert {name: kernels[name].num_launches for name in expected} == expected
    assert kernels["truncate_kernel"].num_launches > 0


@pytest.mark.triton
@torch.inference_mode()
def test_a_step_with_quantised_weights_does_not_wait_either(kernels, batches):
    runner, buffer = make_runner(make_backend("triton"), True, "int4")
    for batch in batches:
        with DeviceCheck(buffer) as check:
            compute_eagerly(runner, batch)
        assert check.num_copies == 1
    of_layers = 4 * 2 * len(batches)  # two layers; logits come on top
    assert kernels["quantised_linear_kernel"].num_launches == kernels["round_rows_kernel"].num_launches > of_layers
    assert kernels["norm_rotary_store_kernel"].num_launches == 2 * len(batches)


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["flash_attn", "triton"])
@torch.inference_mode()
def test_a_recorded_step_waits_for_nothing_and_reads_nothing_of_the_host(flash_attn, kernels, backend):
    runner, _ = make_runner(make_backend(backend), True)
    cache = runner.kv_cache.tensor
    graphs = CudaGraphs(runner.model, cache, runner.draw, [1, 2, 16, 17, 40], 8, DeviceRecorder())
    graphs.record_all()
    num_few, num_more = 3, 2
    expected = {
        "rms_norm_kernel": num_few + 5 * num_more,
        "norm_rotary_store_kernel": 2 * 5,
        "silu_and_mul_kernel": 2 * num_more,
        "few_tokens_kernel": 8 * num_few,
        "decode_kernel": 2 * 5 * (backend == "triton"),
        "prefill_kernel": 0,
        "stats_kernel": 5,
        "truncate_kernel": 5,
        "pick_kernel": 5,
    }
    assert {name: kernels[name].num_launches for name in expected} == expected


@pytest.mark.triton
@pytest.mark.parametrize("quantization", [None, pytest.param("int4", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_requests_compile_nothing_that_the_warm_up_has_not(kernels, batches, monkeypatch, quantization):
    """Also where the number of blocks is given, so that no forward pass measures memory."""
    runner, _ = make_runner(make_backend("triton"), True, quantization)
    monkeypatch.setattr(ArrivingTokens, "wait", lambda self: None)  # there are no numbers
    monkeypatch.setattr(ArrivingTokens, "__init__", lambda self, sampled: None)
    warm_up(runner, StepSizes(max_num_batched_tokens=40, max_num_seqs=7, max_model_len=2048))
    warm = {name: set(kernel.variants) for name, kernel in kernels.items()}
    quantised = {"round_rows_kernel", "quantised_linear_kernel"}
    unused = quantised if quantization is None else {"few_tokens_kernel"}
    unused |= {"store_kv_kernel", "norm_and_rotate_kernel"}  # of PyTorch's layers, and the core's
    assert {name for name, variants in warm.items() if not variants} == unused
    for batch in batches:
        compute_eagerly(runner, batch)
    assert {
        name: kernel.variants - warm[name] for name, kernel in kernels.items() if kernel.variants - warm[name]
    } == {}


class DeviceRecorder:
    """Replaces `graphs.Recorder`, and checks that nothing that is recorded touches the host's memory."""

    def record(self, function):
        with DeviceCheck(None) as check:
            results = function()
        assert check.num_copies == 0
        return lambda: None, results
