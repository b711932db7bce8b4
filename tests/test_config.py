"""Every option: its default, what is refused and how the error reads. The tables below are the oracle."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.checks import checks_of
from nanovllm.config import Config, resolve_device, resolve_dtype

DEFAULTS = {
    "dtype": "auto",
    "device": "auto",
    "max_model_len": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": None,
    "block_size": None,
    "num_kv_blocks": None,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "attention_backend": "auto",
    "enforce_eager": False,
    "load_format": "auto",
    "seed": 0,
    "extension": None,
    "scheduler_cls": None,
    "block_manager_cls": None,
    "prefix_cache_cls": None,
    "runner_cls": None,
    "sampler_cls": None,
    "models": None,
    "extra_args": None,
}

GOOD = [
    ("dtype", ["auto", "float32", "bfloat16", "float16", torch.float32, torch.bfloat16, torch.float16]),
    ("device", ["auto", "cpu", "cuda", "cuda:1"]),
    ("max_model_len", [None, 2, 100_000]),
    ("max_num_seqs", [1, 1000]),
    ("max_num_batched_tokens", [None, 1, 100_000]),
    ("block_size", [None, 1, 16, 256]),
    ("num_kv_blocks", [None, 1]),
    ("gpu_memory_utilization", [0.01, 0.5, 1, 1.0]),
    ("enable_prefix_caching", [True, False]),
    ("attention_backend", ["auto", "torch", "flash_attn", "a-plug-in", "module:Class"]),
    ("load_format", ["auto", "safetensors", "dummy"]),
    ("enforce_eager", [True, False]),
    ("seed", [0, 1, 2**63, 2**64 - 1]),
    ("scheduler_cls", [None, dict]),  # the engine wants a subclass of its own (test_extension.py)
    ("sampler_cls", [None, len]),
    ("models", [None, {"AForCausalLM": object()}]),
    ("extra_args", [None, {}, {"deadline": float}]),
]

NO_INTEGERS = [1.5, "16", True, [1], math.nan]
BAD_TYPES = [
    ("model", [None, 3, b"Qwen/Qwen3-0.6B", ["a"]]),
    ("device", [None, 0, torch.device("cpu")]),
    ("attention_backend", ["", None, 1]),
    ("max_model_len", NO_INTEGERS),
    ("max_num_seqs", [None, *NO_INTEGERS]),
    ("max_num_batched_tokens", NO_INTEGERS),
    ("block_size", NO_INTEGERS),
    ("num_kv_blocks", NO_INTEGERS),
    ("gpu_memory_utilization", [None, "0.9", True, [0.9], 1j]),
    ("enable_prefix_caching", [None, 0, 1, "true"]),
    ("enforce_eager", [None, 0, 1, "false"]),
    ("seed", [None, *NO_INTEGERS]),
    ("extension", ["", 1]),
    ("scheduler_cls", [1, len]),
    ("block_manager_cls", [1]),
    ("prefix_cache_cls", [1]),
    ("runner_cls", [1]),
    ("sampler_cls", [1]),
    ("models", [dict, {1: dict}]),
    ("extra_args", [["deadline"], {1: float}, {"deadline": 1.0}]),
]
BAD_VALUES = [
    ("dtype", ["float64", "fp16", "", "torch.float16", None, torch.float64, torch.int8]),
    ("max_model_len", [1, 0, -1]),
    ("max_num_seqs", [0, -1]),
    ("max_num_batched_tokens", [0, -1]),
    ("block_size", [0, -16]),
    ("num_kv_blocks", [0, -1]),
    ("gpu_memory_utilization", [0, 0.0, -0.1, 1.01, 90, math.nan, math.inf, -math.inf, 10**400]),
    ("load_format", ["", "gguf", None, 1]),
    ("seed", [-1, 2**64]),  # torch's generators take 64 bits
]


@pytest.fixture
def options():
    """The class of options under test, and its tables. `tests/extras/test_all_options.py` has another one."""
    return SimpleNamespace(kind=Config, defaults=DEFAULTS, good=GOOD, bad_types=BAD_TYPES, bad_values=BAD_VALUES)


def make(options, name, value):
    return options.kind(**{"model": "a-model", name: value})


def test_each_field_has_a_check(options):
    assert set(checks_of(options.kind)) == set(options.defaults)


def test_defaults(options):
    config = options.kind("a-model")
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert found == {"model": "a-model", **options.defaults}


def test_good_values_are_kept(options):
    for name, values in options.good:
        for value in values:
            assert getattr(make(options, name, value), name) == value


def test_values_of_a_wrong_type_are_named(options):
    for name, values in options.bad_types:
        for value in values:
            with pytest.raises(TypeError, match=f"^{name} must be .*got {re.escape(repr(value))}$"):
                make(options, name, value)


def test_values_that_are_not_allowed_are_named(options):
    for name, values in options.bad_values:
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must be .* got .*{re.escape(str(value)[:50])}"):
                make(options, name, value)


@pytest.mark.parametrize("model", ["folder", Path("/some/where")])
def test_model_is_a_folder(model):
    assert Config(model).model == model


def test_empty_model_is_refused(options):
    with pytest.raises((TypeError, ValueError), match="^model must be .* got ''$"):
        options.kind("")


def test_unknown_argument_is_refused(options):
    with pytest.raises(TypeError, match="max_seqs"):
        options.kind("a-model", max_seqs=3)


def test_config_is_frozen(options):
    for name in ["model", *options.defaults]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options.kind("a-model"), name, 1)


# ---- devices and dtypes


def with_gpus(monkeypatch, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(
    ("num_gpus", "device", "resolved"),
    [(0, "auto", "cpu"), (1, "auto", "cuda"), (0, "cpu", "cpu"), (2, "cuda:1", "cuda:1"), (1, "cuda", "cuda")],
)
def test_device_that_is_there(monkeypatch, num_gpus, device, resolved):
    with_gpus(monkeypatch, num_gpus)
    assert resolve_device(device) == torch.device(resolved)


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_device_that_is_not_there_is_named(monkeypatch, num_gpus, device):
    with_gpus(monkeypatch, num_gpus)
    with pytest.raises(ValueError, match=f"'{device}' is not on this machine: it has {num_gpus} CUDA devices"):
        resolve_device(device)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:x", ""])
def test_device_that_is_none_of_ours_is_named(device):
    with pytest.raises(ValueError, match=f"^device must be .* got '{device}'$"):
        resolve_device(device)


@pytest.mark.parametrize(
    ("dtype", "checkpoint_dtype", "resolved"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("float16", "bfloat16", torch.float16),
        (torch.float32, "bfloat16", torch.float32),
        ("float32", "int8", torch.float32),
    ],
)
def test_dtype_auto_is_the_one_of_the_checkpoint(dtype, checkpoint_dtype, resolved):
    assert resolve_dtype(dtype, checkpoint_dtype, torch.device("cpu")) is resolved


@pytest.mark.parametrize(("capability", "dtype", "resolved"), [
    ((7, 5), "auto", torch.float16),
    ((7, 5), "bfloat16", torch.bfloat16),
    ((8, 0), "auto", torch.bfloat16),
])  # fmt: skip
def test_dtype_auto_is_not_bfloat16_where_a_gpu_emulates_it(monkeypatch, caplog, capability, dtype, resolved):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    caplog.set_level("INFO")
    assert resolve_dtype(dtype, "bfloat16", torch.device("cuda")) is resolved
    assert resolve_dtype(dtype, "float32", torch.device("cuda")) is (torch.float32 if dtype == "auto" else resolved)
    assert ("compute capability 7.5 has no bfloat16" in caplog.text) == (resolved == torch.float16)


def test_dtype_of_a_checkpoint_that_is_none_of_ours_is_named():
    with pytest.raises(ValueError, match="'float8_e4m3fn'.*float32, bfloat16, float16"):
        resolve_dtype("auto", "float8_e4m3fn", torch.device("cpu"))
