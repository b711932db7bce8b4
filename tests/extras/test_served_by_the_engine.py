"""`nanovllm.LLM` with this package installed: what one reads is what runs, with the kernels and networks from here.

Oracles: `transformers` token for token; the classes and functions of `nanovllm/` themselves, by identity.
"""

import json
import logging
import runpy
import subprocess
import sys

import pytest
import torch

import nanovllm
import nanovllm_extras
from nanovllm import (
    LLM,
    TINY_QWEN3,
    SamplingParams,
    block_manager,
    engine,
    model_runner,
    prefix_cache,
    sampler,
    scheduler,
)
from nanovllm.layers.attention import BackendError, TorchAttention
from nanovllm.plugins import find_plugins
from nanovllm_extras import TINY_QWEN3_5
from nanovllm_extras.execution.full_runner import pytorch_layers
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.models.architectures import ARCHITECTURES as REGISTERED
from nanovllm_extras.plugins.backends import CpuBackend, TritonBackend
from nanovllm_extras.self_check.stored_results import StoredResult
from tests.core_alone import ROOT
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.models.architectures import ARCHITECTURES, MAX_TOKENS, Checkpoints
from tests.extras.self_check.test_self_check import Wrong, compiled_before, fresh_cache  # noqa: F401 (fixtures)

QUESTION = [{"role": "user", "content": "What is a block table?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(autouse=True)
def _needs_kernels():
    need_a_compiler(torch.bfloat16)


def make(model=TINY_QWEN3, **options):
    return LLM(model, **{"device": "cpu", "num_kv_blocks": 64, **options})


def text_of(llm):
    return llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text


# ---- what one reads is what runs


def test_the_classes_that_run_are_the_engines_own():
    llm = make()
    parts = [llm, llm.engine, llm.engine.runner, llm.engine.scheduler, llm.engine.scheduler.block_manager]
    parts.append(llm.engine.scheduler.block_manager.prefix_cache)
    expected = [LLM, engine.LLMEngine, model_runner.ModelRunner, scheduler.Scheduler, block_manager.BlockManager]
    assert list(map(type, parts)) == [*expected, prefix_cache.PrefixCache]
    assert type(llm.engine.runner.backend) is CpuBackend
    assert model_runner.sample_tokens is sampler.sample_tokens


@pytest.mark.parametrize(
    ("backend", "functions"),
    [
        ("auto", [engine.LLMEngine.step, engine.LLMEngine.launch, engine.LLMEngine.compute, engine.LLMEngine.complete,
                  scheduler.Scheduler.schedule, model_runner.ModelRunner.run, sampler.sample_tokens]),
        ("torch", [TorchAttention.attend, TorchAttention.store_kv, sampler.sample_tokens]),
    ],
)  # fmt: skip
def test_breakpoints_in_the_engine_fire(backend, functions):
    """A debugger stops in a function if its code object is called."""
    llm = make(attention_backend=backend)
    called = set()
    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: called.add(frame.f_code))
    try:
        text_of(llm)
    finally:
        sys.settrace(before)
    assert [function.__qualname__ for function in functions if function.__code__ not in called] == []


RUNS = """
import json, os, sys
from nanovllm import LLM, TINY_QWEN3, SamplingParams

environment = dict(os.environ)
without = {"CC": sys.argv[1] + "/no-compiler", "XDG_CACHE_HOME": sys.argv[1]}
for backend, others in (("torch", {}), ("auto", without), ("auto", {})):
    os.environ.clear()
    os.environ.update(environment | others)
    llm = LLM(TINY_QWEN3, attention_backend=backend, device="cpu", num_kv_blocks=20)
    llm.generate("What is a block table?", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    print(json.dumps([llm.engine.description, [one for one in sys.modules if one.startswith("nanovllm_extras")]]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(description of the engine, modules of this package) of runs without plug-ins, without a compiler, with both."""
    command = [sys.executable, "-c", RUNS, tmp_path_factory.mktemp("no library")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()[-3:]]


def test_a_run_loads_no_engine_from_here(runs):
    (_, without_plug_ins), _, (description, with_kernels) = runs
    assert without_plug_ins == []
    assert "nanovllm_extras.kernels.cpu.cpu_attention" in with_kernels
    assert "TorchAttention" not in description
    engine = ("nanovllm_extras.engine.", "nanovllm_extras.execution.full_runner", "nanovllm_extras.serve")
    assert [one for one in with_kernels if one.startswith(engine)] == []


def test_the_example_runs_the_engine_that_one_reads(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["example.py"])
    runpy.run_path(str(ROOT / "example.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "nanovllm.engine.LLMEngine" in printed
    for measured in ("time to first token", "time per output token", "prefix-cache hit rate", "KV waste"):
        assert measured in printed


# ---- kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_layer_of_the_bundled_model_is_left_in_pytorch(dtype):
    """A kernel knows layers by the paths of their classes: if one has moved, tokens stay right and speed is lost."""
    for model in (make(dtype=dtype).engine.runner.model, nanovllm_extras.LLM(
        TINY_QWEN3, dtype=dtype, device="cpu", num_kv_blocks=20
    ).engine.runner.model):  # fmt: skip
        assert pytorch_layers(model) == set()


def test_no_layer_of_the_bundled_hybrid_is_left_in_pytorch():
    description = nanovllm_extras.LLM(TINY_QWEN3_5, device="cpu", num_kv_blocks=20).engine.description
    assert "in PyTorch" not in description.split("; ")[-1]


def test_pytorchs_threads_rest_during_a_step(monkeypatch):
    num_threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # so that the engine leaves the number as it is
    torch.set_num_threads(3)
    try:
        llm, seen = make(), []
        forward = llm.engine.runner.model.forward
        monkeypatch.setattr(
            llm.engine.runner.model, "forward", lambda *batch: seen.append(torch.get_num_threads()) or forward(*batch)
        )
        text_of(llm)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(llm.engine.runner.model, "compute_logits", lambda hidden: hidden / "a fault")
        with pytest.raises(TypeError):
            text_of(llm)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(num_threads)


def test_entry_points_are_registered():
    assert {name: one.load() for name, one in find_plugins("backends").items()} == {
        "cpu": CpuBackend,
        "triton": TritonBackend,
    }
    assert set(find_plugins("models")) == set(REGISTERED) - {"Qwen3ForCausalLM"}


# ---- the self-check


@pytest.fixture
def wrong_layers(monkeypatch):
    make_fast = CpuAttention.make_fast

    def change(self, model, max_model_len):
        make_fast(self, model, max_model_len)
        model.model.layers[0] = Wrong(model.model.layers[0])

    monkeypatch.setattr(CpuAttention, "make_fast", change)


def test_layers_that_compute_wrongly_are_found_and_replaced(fresh_cache, wrong_layers, caplog):  # noqa: F811
    caplog.set_level(logging.WARNING, "nanovllm")
    expected = text_of(make(attention_backend="torch", dtype="float32"))
    for says in ("wrong result: layers", "found on "):  # the second start reads what the first has stored
        caplog.clear()
        llm = make(dtype="float32")
        assert type(llm.engine.runner.backend) is TorchAttention
        assert text_of(llm) == expected
        (record,) = [one for one in caplog.records if one.levelname == "WARNING" and "is not used" in one.message]
        assert record.name == "nanovllm.model_runner"
        assert says in record.message
    with pytest.raises(BackendError, match="wrong result: layers"):
        make(dtype="float32", attention_backend="cpu")


def test_strict_replaces_nothing(fresh_cache, wrong_layers, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NANOVLLM_SELF_CHECK", "strict")
    with pytest.raises(RuntimeError, match="wrong result: layers"):
        make(dtype="float32")


def test_layers_that_compute_rightly_are_checked_once(fresh_cache, monkeypatch):  # noqa: F811
    assert type(make().engine.runner.backend) is CpuBackend
    (stored,) = fresh_cache.glob("checked-*.json")
    assert json.loads(stored.read_text())["is_right"]
    monkeypatch.setattr(StoredResult, "write", lambda *_: pytest.fail("checked again"))
    assert type(make().engine.runner.backend) is CpuBackend


@pytest.mark.parametrize("is_wrong", [False, True])
def test_attention_is_checked_in_eager_engines_too(fresh_cache, monkeypatch, is_wrong):  # noqa: F811
    attend = CpuAttention.attend
    if is_wrong:
        monkeypatch.setattr(CpuAttention, "attend", lambda *arguments: 1.1 * attend(*arguments))
    llm = make(dtype="float32", enforce_eager=True)
    assert type(llm.engine.runner.backend) is (TorchAttention if is_wrong else CpuBackend)
    assert pytorch_layers(llm.engine.runner.model) != set()


def test_without_a_compiler_pytorch_computes(runs):
    _, (description, _), _ = runs
    assert "nanovllm.layers.attention.TorchAttention" in description.split("; ")[-1]
    assert "not cpu: " in description


# ---- networks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("served"))


REFUSED = {name: "a cache of latents: nanovllm_extras.LLM serves it" for name in ARCHITECTURES if "deepseek" in name}
REFUSED["qwen3"] = "nanovllm_extras.LLM may serve it"  # the variants that the engine's own network does not compute


SERVED = [name for name in ARCHITECTURES if name not in REFUSED]


@pytest.mark.parametrize(("name", "backend"), [(name, ("auto", "torch")[i % 2]) for i, name in enumerate(SERVED)])
def test_networks_from_here_give_the_tokens_of_transformers(checkpoints, name, backend):
    variant = next(iter(ARCHITECTURES[name].variants))
    folder, _ = checkpoints.make(name, variant)
    llm = make(folder, dtype="float32", attention_backend=backend, max_num_batched_tokens=40,
               **checkpoints.engine_options(name, variant))  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(checkpoints.prompts(name, variant), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == checkpoints.greedy(name, variant)
    assert type(llm.engine.runner) is model_runner.ModelRunner
    assert (type(llm.engine.runner.backend) is CpuBackend) == (backend == "auto")


@pytest.mark.parametrize("name", REFUSED)
def test_networks_that_need_more_are_refused(checkpoints, name):
    folder, _ = checkpoints.make(name, next(iter(ARCHITECTURES[name].variants)))
    with pytest.raises(ValueError, match=REFUSED[name]):
        make(folder)


def test_models_with_states_are_refused():
    with pytest.raises(ValueError, match="layers with recurrent states: nanovllm_extras.LLM serves it"):
        make(TINY_QWEN3_5)


# ---- no option is silently lost


def test_options_from_here_are_refused_by_the_engine():
    llm = make()
    with pytest.raises(ValueError, match="presence_penalty=1 is an option of nanovllm_extras.LLM"):
        llm.generate("a", nanovllm_extras.SamplingParams(presence_penalty=1), use_tqdm=False)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is an option of nanovllm_extras.LLM"):
        nanovllm.LLMEngine(nanovllm_extras.Config(TINY_QWEN3, tensor_parallel_size=2))
    with pytest.raises(TypeError, match="has no option 'tensor_parallel_size'; nanovllm_extras.LLM has more"):
        make(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="nanovllm_extras.LLM takes hub ids too"):
        LLM("Qwen/Qwen3-0.6B")


def test_parameters_from_here_serve_the_engine_if_only_its_own_are_set():
    llm = make()
    (output,) = llm.chat(QUESTION, nanovllm_extras.SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert output.outputs[0].text == text_of(llm)
    made = nanovllm.LLMEngine(nanovllm_extras.Config(TINY_QWEN3, num_kv_blocks=20, device="cpu"))
    assert type(made.config) is nanovllm.Config
    assert made.config.num_kv_blocks == 20


def test_the_classes_of_the_engine_serve_here_too():
    expected = text_of(make())
    llm = nanovllm_extras.LLM(TINY_QWEN3, device="cpu", num_kv_blocks=20)
    assert llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text == expected
    made = nanovllm_extras.LLMEngine(nanovllm.Config(TINY_QWEN3, device="cpu", num_kv_blocks=20))
    made.add_request("a", "What is a block table?", nanovllm.SamplingParams(temperature=0, max_tokens=3))
    outputs = [output for _ in range(3) for output in made.step()]
    assert outputs[-1].finished


def test_dummy_weights_are_the_same_in_both(checkpoints):
    folder, _ = checkpoints.make("gemma3", next(iter(ARCHITECTURES["gemma3"].variants)), initializer_range=0.02)
    options = {"dtype": "float32", "load_format": "dummy", "num_kv_blocks": 20, "seed": 3, "device": "cpu"}
    outputs = [
        kind(folder, **options).generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for kind in (LLM, nanovllm_extras.LLM)
    ]
    assert outputs[0] == outputs[1]
