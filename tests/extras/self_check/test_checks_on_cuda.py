"""The self-check on CUDA, on a CPU that plays the device: graphs, packed layers, draws, the ways to compute in turn.

`recorded_operations.py` and `test_core_graphs.py` replace CUDA's recording.
"""

import json
import logging
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers import flash_attention
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm.sampler import sample_tokens
from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.execution import cuda_startup as startup
from nanovllm_extras.execution.chooser import Chooser
from nanovllm_extras.execution.cuda_startup import CudaDevice
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.step_graphs import DecodeInputs, choose_graphs
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.self_check import crash_test, fallbacks
from nanovllm_extras.self_check import runner_check as checks
from nanovllm_extras.self_check.core_on_cuda import CoreChooser
from nanovllm_extras.self_check.crash_test import CrashTest
from nanovllm_extras.self_check.random_layers import RandomLayers, describe_model
from nanovllm_extras.self_check.stored_results import StoredResult
from nanovllm_extras.weights import quantised_linear
from tests.cuda_stand_in import prefill
from tests.extras.cuda import test_graphs
from tests.extras.cuda.test_core_graphs import CPU, CUDA, make_engine, recorded  # noqa: F401 (a fixture)
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.recorded_operations import GatherAttention
from tests.extras.self_check.test_self_check import compiled_before, fresh_cache  # noqa: F401 (fixtures)
from tests.extras.test_full_engine import ids


def compare_graphs(engine):
    checks.SelfCheck(engine.runner, StoredResult(engine.runner), None).compare_graphs()


# ---- faults in graphs: (graphs, batch, what fills the inputs of the graphs)


def keep_old_ids(inputs, fill, batch):
    """As if the graph read its ids where they were first."""
    fill(replace(batch, input_ids=torch.full_like(batch.input_ids, 3)))


def keep_old_tables(inputs, fill, batch):
    old = inputs.tables.clone()
    fill(batch)
    if old.any():
        inputs.tables.copy_(old)


def keep_old_padding(inputs, fill, batch):
    """Rows behind the batch keep the slots and lengths of an older one."""
    columns, n = (inputs.slots, inputs.lens), len(batch.input_ids)
    old = [column.clone() for column in columns]
    fill(batch)
    for column, before in zip(columns, old, strict=True):
        column[n:] = before[n:]


def write_padding_to_the_first_block(inputs, fill, batch):
    fill(batch)
    inputs.slots[len(batch.input_ids) :] = inputs.block_size


GRAPH_FAULTS = [keep_old_ids, keep_old_tables, keep_old_padding, write_padding_to_the_first_block]


@pytest.mark.parametrize("fault", GRAPH_FAULTS[::2])
def test_faults_in_graphs_of_whole_steps_are_found(monkeypatch, tiny_checkpoint, fault):
    _, engine = test_graphs.make_engines(monkeypatch, tiny_checkpoint[0], late=False)
    compare_graphs(engine)
    assert engine.recorder.num_replays >= 6
    fill = DecodeInputs.fill

    def faulty(self, batch, size):
        metadata = self.batch(size).metadata
        inputs = types.SimpleNamespace(
            tables=self._block_tables[0], slots=metadata.slot_mapping, lens=metadata.seq_lens, block_size=16
        )
        fault(inputs, lambda changed: fill(self, changed, size), batch)

    monkeypatch.setattr(DecodeInputs, "fill", faulty)
    with pytest.raises(SelfCheckError, match=r"wrong result: decodes by a CUDA graph: \d+ of \d+ (tokens|keys)"):
        compare_graphs(engine)


def with_graph_fault(monkeypatch, fault, is_faulty=lambda graphs: True):
    """Plant a fault in the core's graphs, whose replay fills the inputs and then launches."""
    replay = CudaGraphs.replay

    def faulty(self, batch):
        if not is_faulty(self):
            return replay(self, batch)
        inputs = types.SimpleNamespace(
            tables=self.block_tables, slots=self.slot_mapping, lens=self.seq_lens, block_size=16
        )
        with monkeypatch.context() as patch:  # launch only when the fault is planted
            launched = []
            patch.setattr(type(next(iter(self.graphs.values()))[0]), "__call__", lambda graph: launched.append(graph))
            results = []
            fault(inputs, lambda changed: results.append(replay(self, changed)), batch)
        launched[0]()
        return results[0]

    monkeypatch.setattr(CudaGraphs, "replay", faulty)


@pytest.mark.parametrize("fault", GRAPH_FAULTS[1::2])
def test_faults_in_the_cores_graphs_are_found(monkeypatch, tiny_checkpoint, recorded, fault):  # noqa: F811
    engine = make_engine(monkeypatch, tiny_checkpoint[0], has_graphs=True)
    compare_graphs(engine)
    assert {size for size, graph in recorded if graph.num_replays} == {4, 6}
    with_graph_fault(monkeypatch, fault)
    with pytest.raises(SelfCheckError, match=r"wrong result: decodes by a CUDA graph: \d+ of \d+ (tokens|keys)"):
        compare_graphs(engine)


# ---- the ways to compute, in turn


class Kernels(GatherAttention, KernelBackend):
    """Plays the fused kernels."""


class WrongKernels(Kernels):
    def attend(self, *arguments):
        return super().attend(*arguments) * 1.1


class PackedLinear(torch.nn.Module):
    """A quantised layer of another layout, as a kernel may read it."""

    def __init__(self, layer):
        super().__init__()
        weight = layer.quantised
        self.weight_of_groups = replace(weight, q=weight.q.t().contiguous())
        self.kind, self.more = type(layer), (layer.bias, *([layer.parts] if hasattr(layer, "parts") else []))
        del layer.quantised

    def plain(self):
        weight = self.weight_of_groups
        return self.kind(replace(weight, q=weight.q.t()), *self.more)

    def forward(self, x):
        return self.plain()(x)


class PackingKernels(Kernels):
    packed = PackedLinear

    def pack_quantised(self, layer):
        is_linear = isinstance(layer, quantised_linear.QuantisedLinear)
        return self.packed(layer) if is_linear else layer

    def unpack_quantised(self, layer):
        return layer.plain() if isinstance(layer, PackedLinear) else layer


def decode(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
    """`flash_attn_with_kvcache`, so that it can be recorded."""
    attention = GatherAttention(q.shape[2], k_cache.shape[2], q.shape[3], k_cache.shape[1])
    metadata = AttentionMetadata.of_decodes(cache_seqlens, block_table, cache_seqlens, cache_seqlens)
    return attention.attend(q[:, 0], torch.stack((k_cache, v_cache)), metadata)[:, None]


@pytest.fixture
def on_cuda(monkeypatch, fresh_cache, recorded):  # noqa: F811
    """Return a function that sets what plays the kernels."""
    kernels = [Kernels]
    make_backends = Chooser.make_backends

    def make(chooser, config, shape, device, dtype):
        if config.attention_backend == "torch":
            return make_backends(chooser, config, shape, device, dtype)
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        return (kernels[-1](*heads, 16, dtype),), "as on CUDA"

    def make_device(_, runner):
        sizes = (runner.max_num_batched_tokens, runner.max_rows)
        return CudaDevice(runner.config, CPU, runner.backend, runner.shape, *sizes)

    def prefill_chunks(q, k, v, *, cu_seqlens_q, cu_seqlens_k, block_table, **_):
        return prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)

    library = types.SimpleNamespace(flash_attn_with_kvcache=decode, flash_attn_varlen_func=prefill_chunks)
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.setattr(FlashAttention, "why_not", staticmethod(lambda *_: None))
    monkeypatch.setattr(FlashAttention, "default_block_size", 16)
    monkeypatch.setattr(Chooser, "make_backends", make)
    monkeypatch.setattr(Chooser, "make_device", make_device)
    monkeypatch.setattr(startup, "choose_graphs", lambda *given: choose_graphs(*given[:3], CUDA, *given[4:]))
    monkeypatch.setattr(fallbacks, "resolve_device", lambda device: CUDA)
    monkeypatch.setattr(checks, "start_crash_test", lambda *_: CrashTest([sys.executable, "-I", "-S", "-c", ""], 60))
    return kernels.append


def start(folder, **options):
    return LLM(folder, device="cpu", dtype="float32", num_kv_blocks=40, max_num_seqs=6, **options)


def tokens_of(llm):
    prompt, params = {"prompt_token_ids": ids(19)}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def way_of(llm):
    runner = llm.engine.runner
    kind = "core" if isinstance(runner.chooser, CoreChooser) else type(runner.backend).__name__
    return kind if runner.graphs is None else f"{kind}, graphs"


WAYS = {  # what is wrong, and the way that is left
    "nothing": ((), "Kernels, graphs"),
    "graphs of kernels": (("graphs of kernels",), "Kernels"),
    "kernels and graphs": (("kernels", "graphs"), "core"),
    "all but PyTorch": (("kernels", "flash-attn"), "TorchAttention"),
}


@pytest.mark.parametrize(
    "name",  # by default the first way that is wrong, and then all of them that may be
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("nothing", "kernels and graphs"))) for name in WAYS],
)
def test_the_next_way_gives_the_right_tokens(monkeypatch, tiny_checkpoint, on_cuda, caplog, name):
    wrong, expected = WAYS[name]
    right_tokens = tokens_of(start(tiny_checkpoint[0], attention_backend="torch", enforce_eager=True))
    if "kernels" in wrong:
        on_cuda(WrongKernels)
    if "flash-attn" in wrong:
        attend = FlashAttention.attend
        monkeypatch.setattr(FlashAttention, "attend", lambda *given: attend(*given) * 0.9)
    if "graphs" in wrong or "graphs of kernels" in wrong:
        with_graph_fault(monkeypatch, keep_old_ids)
    with caplog.at_level(logging.WARNING):
        llm = start(tiny_checkpoint[0])
    assert way_of(llm) == expected
    assert tokens_of(llm) == right_tokens
    said = [record.message for record in caplog.records if "the self-check of" in record.message]
    assert len(said) == ["Kernels, graphs", "Kernels", "core, graphs", "core", "TorchAttention"].index(expected)
    assert all("wrong result: " in one and "please report it" in one for one in said)


# ---- quantised layers that are packed while they are loaded


def test_packed_layers_are_compared(monkeypatch, tiny_checkpoint, on_cuda):
    on_cuda(PackingKernels)
    options = {"quantization": "int4", "self_check": "strict"}
    llm = start(tiny_checkpoint[0], **options)
    packed = [module for module in llm.engine.runner.model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 8, "each layer has four products, and gets its packed ones back"
    forward = PackedLinear.forward
    faults = {64: lambda y: y * 1.05, 96: lambda y: y.roll(1, 0)}
    for max_num_batched_tokens, fault in faults.items():  # the option leads to a new check

        def faulty(self, x, fault=fault):
            y = forward(self, x)
            return tuple(map(fault, y)) if isinstance(y, tuple) else fault(y)

        monkeypatch.setattr(PackedLinear, "forward", faulty)
        with pytest.raises(SelfCheckError, match="wrong result: products with weights of [48] bits"):
            start(tiny_checkpoint[0], max_num_batched_tokens=max_num_batched_tokens, **options)


# ---- layers with recurrent states


class ScaledLayer(torch.nn.Module):
    """Plays the fast version of a layer with states."""

    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, *given):
        return self.layer(*given) * self.factor


class KernelsOfStates(Kernels):
    factor = 1.0

    def make_fast(self, model, max_model_len):
        for layer in model.model.layers:
            if layer.keeps_state:
                layer.linear_attn = ScaledLayer(layer.linear_attn, self.factor)


class WrongKernelsOfStates(KernelsOfStates):
    factor = 1.01


def test_layers_with_states_are_compared(tmp_path, on_cuda, caplog):
    pytest.importorskip("transformers.models.qwen3_5")
    hybrids = HybridCheckpoints(tmp_path)
    on_cuda(KernelsOfStates)
    assert way_of(start(hybrids.make()[0], self_check="strict")) == "KernelsOfStates, graphs"
    on_cuda(WrongKernelsOfStates)
    with caplog.at_level(logging.WARNING):
        llm = start(hybrids.make()[0], max_num_batched_tokens=64)  # the option leads to a new check
    assert "wrong result: a layer with recurrent states" in caplog.text
    assert way_of(llm) == "TorchAttention"
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    output = llm.generate([hybrids.prompts()[2]], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == hybrids.greedy()[2][0][:5]


# ---- the process of its own


class FailingLayer(torch.nn.Module):
    def forward(self, *_):
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "gemma3")) for name in ARCHITECTURES]
)
def test_layers_are_called_with_random_weights(monkeypatch, tmp_path, capsys, name):
    """As on CUDA, here with the C kernels. The weights of the model need not be there."""
    variant = next(iter(ARCHITECTURES[name].variants))
    folder, _ = Checkpoints(tmp_path).make(name, variant)
    options = Checkpoints(tmp_path).engine_options(name, variant)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    number = list(ARCHITECTURES).index(name)
    dtype, more = [("float32", {}), ("bfloat16", {"quantization": "int8"}), ("bfloat16", {"quantization": "int4"})][
        number % 3
    ]
    config = Config(folder, device="cpu", dtype=dtype, load_format="dummy", **options, **more)
    runner = ModelRunner(config, folder)
    backend, shape = runner.backend, runner.shape
    if shape.latent_rank is not None:  # these have no kernels on CUDA
        return
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, backend.block_size)
    attention = [crash_test.path_of(type(backend)), heads, "auto"]
    arguments = [attention, json.loads(json.dumps(describe_model(runner))), None, dtype, "cpu"]
    capsys.readouterr()
    crash_test.call_kernels(*arguments)
    assert capsys.readouterr().out.split() == ["15", "120"] * 7, "three steps of attention and of layers, logits"
    with monkeypatch.context() as patch:

        def put_failing(self, model, max_model_len):
            model.model.layers[-1] = FailingLayer()

        patch.setattr(type(backend), "make_fast", put_failing)
        with pytest.raises(SystemExit) as ended:
            crash_test.call_kernels(*arguments)
        assert ended.value.code == crash_test.FAILED
        assert "RuntimeError: an illegal memory access" in capsys.readouterr().out


def test_layers_that_are_too_large_are_not_called(tiny_checkpoint):
    runner = ModelRunner(Config(tiny_checkpoint[0], device="cpu", dtype="float32"), tiny_checkpoint[0])
    given = (CPU, describe_model(runner))
    for max_bytes, expected in ((1 << 30, [0, 1]), (200_000, [0]), (100, [])):
        layers = RandomLayers(runner.backend, torch.float32, *given, max_bytes)
        assert layers.chosen == expected
        layers.run(lambda: None)


# ---- draws


def draw_the_wrong_row(logits, *arguments, **named):
    return sample_tokens(logits, *arguments, **named).roll(1)


def test_a_kernel_that_draws_is_checked_with_attention_in_pytorch(
    monkeypatch,
    tiny_checkpoint,
    on_cuda,
    caplog,  # noqa: F811
):
    class DrawingDevice(Device):
        draw = staticmethod(draw_the_wrong_row)

        def prepare(self, runner):
            runner.draw = self.draw

    commands = []

    def test_in_a_process(runner, kind):
        with monkeypatch.context() as patch:
            patch.setattr(crash_test, "CrashTest", lambda command, timeout: commands.append(json.loads(command[-1])))
            crash_test.start_crash_test(runner, kind)
        return CrashTest([sys.executable, "-I", "-S", "-c", ""], 60)

    monkeypatch.setattr(
        ModelRunner, "make_device", lambda runner: Device() if runner.config.enforce_eager else DrawingDevice()
    )
    monkeypatch.setattr(checks, "start_crash_test", test_in_a_process)
    with caplog.at_level(logging.WARNING):
        llm = start(tiny_checkpoint[0], attention_backend="torch")
    assert "the self-check of PyTorch with a kernel that draws tokens has failed: wrong result: greedy" in caplog.text
    assert llm.engine.runner.draw is sample_tokens
    assert commands == [[None, None, [f"{__name__}.draw_the_wrong_row", 300], "float32", "cpu"]]
    monkeypatch.setattr(DrawingDevice, "draw", staticmethod(lambda *given: sample_tokens(*given)))
    llm = start(tiny_checkpoint[0], attention_backend="torch", seed=1, max_num_batched_tokens=64)
    assert llm.engine.runner.draw is DrawingDevice.draw


# ---- the choices


def test_the_ways_to_compute_on_cuda(monkeypatch):
    monkeypatch.setattr(fallbacks, "resolve_device", lambda device: torch.device("cuda", 0))
    assert [way.name for way in fallbacks.ways_to_compute(Config("model"))] == [
        "fused kernels",
        "fused kernels without CUDA graphs",
        "the core's flash-attn",
        "the core's flash-attn without CUDA graphs",
        "PyTorch",
    ]
    ways = fallbacks.ways_to_compute(Config("model", enforce_eager=True))
    assert [way.name for way in ways] == ["fused kernels", "the core's flash-attn without CUDA graphs", "PyTorch"]
    ways = fallbacks.ways_to_compute(Config("model", enforce_eager=True, tensor_parallel_size=2))
    assert [way.name for way in ways] == ["fused kernels", "PyTorch"]


def test_the_cores_path_on_cuda_has_graphs_of_the_forward_pass(monkeypatch, tiny_checkpoint):
    """As far as a machine without a GPU can go: the runner's choices."""
    cuda, shape = torch.device("cuda", 0), NetworkConfig(300, 64, 96, 2, 4, 2, 32, 512)
    chooser, config = CoreChooser(), Config("model")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (backend,), _ = chooser.make_backends(config, shape, cuda, torch.bfloat16)
    assert type(backend) is flash_attention.FlashAttention
    runner = SimpleNamespace(config=config, shape=shape, device=cuda, backend=backend, max_num_batched_tokens=64)
    device = chooser.make_device(runner)
    assert (device.replayed, device.draw) == ("forward", None)
    runner.config = Config("model", enable_cuda_graphs=False)
    assert chooser.make_device(runner).replayed is None
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(SelfCheckError, match="flash-attn cannot be used here"):
        chooser.make_backends(config, shape, cuda, torch.bfloat16)
