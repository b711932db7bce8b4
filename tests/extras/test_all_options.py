"""Every option of extras: its default, what is refused and how the error reads. The tables below are the oracle.

The tests are those of `tests/test_config.py`.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm_extras.options.all_options import Config
from tests import test_config as core
from tests.test_config import (  # noqa: F401 (with the fixture `options` below)
    NO_INTEGERS,
    test_config_is_frozen,
    test_defaults,
    test_each_field_has_a_check,
    test_empty_model_is_refused,
    test_good_values_are_kept,
    test_unknown_argument_is_refused,
    test_values_of_a_wrong_type_are_named,
    test_values_that_are_not_allowed_are_named,
)

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
    "reasoning_parser": "qwen3",
    "generation_config": "auto",
    "override_generation_config": None,
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "max_cpu_loras": None,
    "proposer_cls": None,
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
    ("reasoning_parser", ["qwen3", "gemma4", "openai_gptoss"]),
    ("generation_config", ["auto", "vllm", Path("/some/where")]),
    ("override_generation_config", [None, {"temperature": 0.5}]),
    ("enable_lora", [True, False]),
    ("max_loras", [1, 100]),
    ("max_lora_rank", [1, 512]),
    ("max_cpu_loras", [None, 1, 100]),
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
    ("enable_lora", [None, 1, "yes"]),
    *[(name, NO_INTEGERS) for name in ("max_loras", "max_lora_rank", "max_cpu_loras")],
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
    ("reasoning_parser", ["", "r1", None, 1]),
    ("self_check", ["", "ON", True, False]),
    *[(name, [0, -1]) for name in ("max_loras", "max_lora_rank", "max_cpu_loras")],
]


@pytest.fixture
def options():
    return SimpleNamespace(kind=Config, defaults=DEFAULTS, good=GOOD, bad_types=BAD_TYPES, bad_values=BAD_VALUES)


@pytest.mark.parametrize("model", ["folder", "Qwen/Qwen3-0.6B", Path("/some/where")])
def test_model_is_a_folder_or_a_hub_id(model):
    assert Config(model).model == model


def test_unknown_option_is_named_beside_the_known_ones():
    with pytest.raises(TypeError, match="unknown argument max_seqs, num_blocks; allowed are") as error:
        Config.from_options("a-model", {"num_blocks": 5, "seed": 1, "max_seqs": 3})
    assert all(name in str(error.value) for name in DEFAULTS)


def test_options_are_passed_on():
    assert Config.from_options("a-model", {"seed": 7, "block_size": 8}) == Config("a-model", seed=7, block_size=8)
