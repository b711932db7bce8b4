"""Every option of extras: its default, what is refused and how the error reads. The tables below are the oracle.

The options of the core are tested too, as the core's own are in `tests/test_config.py`.
"""

import dataclasses
from pathlib import Path

import pytest

from nanovllm.checks import checks_of
from nanovllm_extras.options.all_options import Config
from tests import test_config as core
from tests.test_config import NO_INTEGERS, each

DEFAULTS = {
    **core.DEFAULTS,
    "kv_cache_memory_bytes": None,
    "kv_cache_dtype": "auto",
    "quantization": None,
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "preemption_mode": "recompute",
    "swap_space_bytes": 0,
    "kv_offloading_size": None,
    "kv_transfer_config": None,
    "state_snapshot_interval": 64,
    "disable_hybrid_kv_cache_manager": False,
    "explain_prefix_misses": False,
    "check_invariants": False,
    "enable_cuda_graphs": None,
    "enable_overlap": None,
    "self_check": None,
    "speculative_config": None,
    "tensor_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "load_format": "auto",
    "revision": None,
    "hf_overrides": None,
    "tokenizer": None,
    "tokenizer_revision": None,
    "skip_tokenizer_init": False,
    "chat_template": None,
    "generation_config": "auto",
    "override_generation_config": None,
}

GOOD = [
    *[one for one in core.GOOD if one[0] != "attention_backend"],
    ("attention_backend", ["triton", "cpu"]),
    ("kv_cache_memory_bytes", [None, 1, 2**40]),
    ("kv_cache_dtype", ["auto", "fp8", "int8"]),
    ("state_snapshot_interval", [0, 1, 1000]),
    ("disable_hybrid_kv_cache_manager", [True, False]),
    ("explain_prefix_misses", [True, False]),
    ("check_invariants", [True, False]),
    ("enable_cuda_graphs", [None, True, False]),
    ("enable_overlap", [None, True, False]),
    ("tensor_parallel_size", [1, 2, 64]),
    ("nnodes", [1, 2]),
    ("node_rank", [0, 7]),
    ("master_addr", ["10.0.0.1", "a-host"]),
    ("master_port", [1, 65535]),
    ("load_format", ["auto", "safetensors", "dummy"]),
    ("revision", [None, "main"]),
    ("hf_overrides", [None, {}, {"rope_theta": 1e6}]),
    ("quantization", [None, "int8"]),  # tests/extras/quantization/test_quantization_options.py has the others
    ("self_check", [None, "on", "off", "strict"]),
    ("speculative_config", [None]),  # tests/extras/speculation/test_speculation_options.py has the others
    ("tokenizer", [None, "folder", Path("/some/where")]),
    ("tokenizer_revision", [None, "main"]),
    ("skip_tokenizer_init", [True, False]),
    ("chat_template", [None, "{{ messages }}", Path("a.jinja")]),
    ("generation_config", ["auto", "vllm", Path("/some/where")]),
    ("override_generation_config", [None, {"temperature": 0.5}]),
]

BAD_TYPES = [
    *[one for one in core.BAD_TYPES if one[0] != "attention_backend"],
    ("kv_cache_memory_bytes", [1e9, *NO_INTEGERS]),
    ("tensor_parallel_size", [None, *NO_INTEGERS]),
    ("nnodes", [None, *NO_INTEGERS]),
    ("node_rank", [None, *NO_INTEGERS]),
    ("master_addr", ["", None, 1]),
    ("master_port", [None, *NO_INTEGERS]),
    ("revision", ["", 1, Path("main")]),
    ("hf_overrides", ["{}", [1], {1: 2}]),
    ("speculative_config", ["ngram", [1], {1: 2}]),
    ("tokenizer", ["", 1, b"folder"]),
    ("tokenizer_revision", ["", 1]),
    ("disable_hybrid_kv_cache_manager", [None, 1, "no"]),
    ("explain_prefix_misses", [None, 0, "yes"]),
    ("check_invariants", [None, 0, "yes"]),
    ("skip_tokenizer_init", [None, 0, "yes"]),
    ("chat_template", ["", 1]),
    ("generation_config", [None, "", 1]),
    ("override_generation_config", ["{}", [1], {1: 2}]),
]
BAD_VALUES = [
    *[(name, [value for value in values if value != "gguf"]) for name, values in core.BAD_VALUES],
    ("kv_cache_memory_bytes", [0, -1]),
    ("kv_cache_dtype", ["fp16", "FP8", "float8", "", None, 8]),
    ("state_snapshot_interval", [-1]),
    ("tensor_parallel_size", [0, -1]),
    ("nnodes", [0]),
    ("node_rank", [-1]),
    ("master_port", [0, 65536]),
    ("load_format", ["pt", "", None, True]),
    ("self_check", ["", "ON", True, False]),
]


def make(name, value):
    return Config(**{"model": "a-model", name: value})


def test_each_field_has_a_check():
    assert set(checks_of(Config)) == set(DEFAULTS)


def test_defaults():
    config = Config("a-model")
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == {
        "model": "a-model",
        **DEFAULTS,
    }


@pytest.mark.parametrize(("name", "value"), each(GOOD))
def test_good_value_is_kept(name, value):
    assert getattr(make(name, value), name) == value


@pytest.mark.parametrize(("name", "value"), each(BAD_TYPES))
def test_value_of_a_wrong_type_is_named(name, value):
    with pytest.raises(TypeError) as error:
        make(name, value)
    assert str(error.value).startswith(f"{name} must be ")
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(("name", "value"), each(BAD_VALUES))
def test_value_that_is_not_allowed_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .* got ") as error:
        make(name, value)
    assert str(value)[:50] in str(error.value)


@pytest.mark.parametrize("model", ["folder", "Qwen/Qwen3-0.6B", Path("/some/where")])
def test_model_is_a_folder_or_a_hub_id(model):
    assert Config(model).model == model


def test_empty_model_is_refused():
    with pytest.raises((TypeError, ValueError), match="^model must be .* got ''$"):
        Config("")


def test_unknown_option_is_named_beside_the_known_ones():
    with pytest.raises(TypeError, match="unknown argument max_seqs, num_blocks; allowed are") as error:
        Config.from_options("a-model", {"num_blocks": 5, "seed": 1, "max_seqs": 3})
    assert all(name in str(error.value) for name in DEFAULTS)


def test_unknown_argument_is_refused_by_the_constructor_too():
    with pytest.raises(TypeError, match="max_seqs"):
        Config("a-model", max_seqs=3)


def test_options_are_passed_on():
    assert Config.from_options("a-model", {"seed": 7, "block_size": 8}) == Config("a-model", seed=7, block_size=8)


@pytest.mark.parametrize("name", ["model", *DEFAULTS])
def test_config_is_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Config("a-model"), name, 1)
