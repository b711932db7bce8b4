"""Backends and networks of other packages: which one is taken, and what is said when one cannot be.

Planted packages stand in for those that one installs. `tests/extras/test_served_by_the_engine.py` has the real ones.
"""

import logging
import sys
from importlib.metadata import EntryPoint

import pytest

from nanovllm import LLM, TINY_QWEN3, SamplingParams, plugins
from nanovllm.layers.attention import BackendError, TorchAttention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.plugins import find_architecture

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Counting(TorchAttention):
    """PyTorch's attention, and what the engine calls of it."""

    priority = 5
    calls: list = []  # noqa: RUF012

    def replace_layers(self, loaded):
        what = (type(loaded.model).__name__, loaded.max_model_len, loaded.device.type, loaded.enforce_eager)
        self.calls.append(("replace_layers", *what))

    def step_context(self):
        self.calls.append(("step_context",))
        return super().step_context()

    def argmax(self, logits):
        self.calls.append(("argmax", len(logits)))
        return super().argmax(logits)


class Better(Counting):
    priority = 6


class Refusing(Counting):
    priority = 7

    @classmethod
    def why_not(cls, device, dtype, head_dim, block_size):
        return f"it is for other machines than {device}"


class Wrong(Counting):
    priority = 8

    def replace_layers(self, loaded):
        loaded.model.model.norm.weight.zero_()
        raise BackendError("its layers compute other numbers")


@pytest.fixture
def install(monkeypatch):
    """Let packages be installed that register these entry points of a group."""
    Counting.calls.clear()

    def install(group="backends", **plugged):
        found = [EntryPoint(name, value, f"nanovllm.{group}") for name, value in plugged.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: [one for one in found if one.group == group])

    install()
    return install


def make(**options):
    return LLM(TINY_QWEN3, device="cpu", num_kv_blocks=20, max_model_len=64, **options)


def tokens(llm):
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def right():
    return tokens(make(attention_backend="torch"))


def here(kind):
    return f"{__name__}:{kind.__name__}"


def test_auto_takes_the_plug_in_of_highest_priority_that_can_be_used(install, right):
    install(a=here(Counting), b=here(Better), c=here(Refusing))
    llm = make()
    assert type(llm.engine.runner.backend) is Better
    assert "not c: it is for other machines than cpu" in llm.engine.description
    assert f"{__name__}.Better" in llm.engine.description.split("; ")[-1]
    assert tokens(llm) == right
    assert Counting.calls[0] == ("replace_layers", "Qwen3ForCausalLM", 64, "cpu", False)
    assert Counting.calls.count(("step_context",)) == Counting.calls.count(("argmax", 1)) == 6


def test_flash_attn_comes_before_plug_ins(install):
    install(a=here(Better))
    assert [name for name, _ in plugins.find_backends("auto", [])] == ["flash_attn", "a", "torch"]


@pytest.mark.parametrize("name", ["a", here(Counting)], ids=["registered", "module and class"])
def test_a_backend_is_taken_by_its_name(install, right, name):
    install(a=here(Counting), b=here(Better))
    llm = make(attention_backend=name, block_size=8)
    assert type(llm.engine.runner.backend) is Counting
    assert llm.engine.runner.backend.block_size == 8
    assert tokens(llm) == right


def test_torch_imports_no_plug_in(install, monkeypatch):
    install(a="a_module_that_is_not_there:Kernels")
    monkeypatch.setattr(EntryPoint, "load", lambda self: pytest.fail("imported"))
    assert type(make(attention_backend="torch").engine.runner.backend) is TorchAttention


# ---- what cannot be used


def test_metadata_of_a_package_that_is_gone_is_only_a_debug_line(install, caplog):
    install(a="a_package_that_is_gone.kernels:Kernels")
    caplog.set_level(logging.DEBUG, "nanovllm")
    assert type(make().engine.runner.backend) is TorchAttention
    assert [record.levelname for record in caplog.records if "a_package_that_is_gone" in record.message] == ["DEBUG"]


@pytest.fixture
def broken_package(tmp_path, monkeypatch):
    (tmp_path / "broken_kernels.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "broken_kernels:Kernels"
    sys.modules.pop("broken_kernels", None)


def test_a_plug_in_that_cannot_be_imported_is_warned_of_once(install, caplog, broken_package, right):
    install(a=broken_package, b=here(Counting))
    llm = make()
    assert type(llm.engine.runner.backend) is Counting
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "attention backend a cannot be imported: ModuleNotFoundError" in record.message
    assert "not a: it cannot be imported" in llm.engine.description


@pytest.mark.parametrize("name", ["a", "broken_kernels:Kernels", "broken_kernels_2:Kernels", f"{__name__}:NoSuchClass"])
def test_by_name_it_is_an_error(install, broken_package, name):
    install(a=broken_package)
    with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot be imported .*; take 'torch' or 'auto'"):
        make(attention_backend=name)


def test_an_unknown_name_is_refused_with_those_that_are_known(install):
    install(a=here(Counting), z=here(Better))
    with pytest.raises(ValueError, match="one of auto, flash_attn, torch, a, z, or 'module:Class', got 'b'"):
        make(attention_backend="b")


def test_a_backend_that_cannot_be_used_is_refused_by_name(install):
    install(c=here(Refusing))
    for name, reason in (("c", "it is for other machines than cpu"), ("flash_attn", "it needs a CUDA device")):
        with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot be used .*{reason}"):
            make(attention_backend=name)


def test_a_backend_that_computes_wrongly_is_replaced_by_the_next_one(install, caplog, right):
    """The network is made again: the failed backend may have changed it."""
    install(a=here(Counting), w=here(Wrong))
    llm = make()
    assert type(llm.engine.runner.backend) is Counting
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.message.startswith("Wrong is not used: its layers compute other numbers")
    assert "not Wrong: its layers compute other numbers" in llm.engine.description
    assert tokens(llm) == right


def test_a_backend_that_was_asked_for_is_not_replaced(install):
    install(w=here(Wrong))
    with pytest.raises(BackendError, match="other numbers"):
        make(attention_backend="w")


def test_if_all_backends_compute_wrongly_the_start_fails(install, monkeypatch):
    install(w=here(Wrong))
    monkeypatch.setattr(TorchAttention, "replace_layers", Wrong.replace_layers)
    with pytest.raises(BackendError, match="other numbers"):
        make()


# ---- networks


def test_a_network_is_found_by_its_architecture(install):
    install("models", OtherForCausalLM="nanovllm.models.qwen3:Qwen3ForCausalLM", GoneForCausalLM="a_package:Network")
    assert find_architecture({"architectures": ["OtherForCausalLM"]}) is Qwen3ForCausalLM
    for name in ("GoneForCausalLM", "NewForCausalLM"):
        with pytest.raises(ValueError, match=f"OtherForCausalLM, .*got .*{name}.*; nanovllm_extras.LLM serves more"):
            find_architecture({"architectures": [name]})


def test_the_engines_own_network_comes_first(install):
    install("models", Qwen3ForCausalLM="a_package:Network")
    assert find_architecture({"architectures": ["Qwen3ForCausalLM"]}) is Qwen3ForCausalLM
