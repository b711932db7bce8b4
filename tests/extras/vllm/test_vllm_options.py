"""vLLM's options: every one of vLLM 0.32 is known, its neutral value is taken, others are refused by name.

Oracle: the fields of vLLM 0.32's `AsyncEngineArgs` with their defaults, as that version prints them
(`vllm_engine_options.json`; null also represents a default that is an object of vLLM's own).
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm_extras import Config, EngineArgs
from nanovllm_extras.options.option_checks import translate_options
from nanovllm_extras.options.vllm_tables import WITHOUT_EFFECT

VLLM = json.loads((Path(__file__).parent / "vllm_engine_options.json").read_text())
OWN = [field.name for field in fields(Config)]


def options(**given):
    return translate_options(given, OWN, "engine")


def test_every_option_of_vllm_is_taken_at_its_default():
    """Whether it has the same name here, another one, or none. Most are dropped, and ours are kept."""
    kept = set()
    for name, default in VLLM.items():
        translated = options(**{name: default})
        assert set(translated) <= set(OWN), name
        kept |= {name} if translated else set()
        if name != "model":
            Config("a-model", **translated)
    assert kept == {name for name in VLLM if name in OWN} | {"num_gpu_blocks_override", "async_scheduling"}


REFUSED = [
    ("pipeline_parallel_size", 4, "tensor parallel ranks"),
    ("data_parallel_size", 2, "tensor parallel ranks"),
    ("distributed_executor_backend", "ray", "tensor parallel ranks"),
    ("trust_remote_code", True, "no code of a checkpoint is run"),
    ("tokenizer_mode", "slow", "no code"),
    ("quantization_config", {"bits": 4}, "quantization='int8'"),
    ("fully_sharded_loras", True, "tensor parallel ranks"),
    ("num_speculative_tokens", 5, "speculative_config"),
    ("diffusion_config", {"steps": 4}, "one after the other"),
    ("swap_space", 4, "swap_space_bytes"),
    ("cpu_offload_gb", 10, "gpu_memory_utilization"),
    ("limit_mm_per_prompt", {"image": 2}, "text or token ids"),
    ("runner", "draft", "LLM.embed"),
    ("enable_chunked_prefill", False, "max_num_batched_tokens"),
    ("compilation_config", {"mode": 3}, "enforce_eager"),
    ("rope_scaling", {"rope_type": "yarn"}, "hf_overrides"),
    ("logits_processors", ["a.b"], "SamplingParams"),
    ("download_dir", "/tmp", "HF_HOME"),
    ("enable_sleep_mode", True, "weights stay"),
    ("tool_call_parser", "hermes", "nanovllm serve"),
]


def test_other_values_are_refused_by_name_with_what_there_is_instead():
    for name, value, instead in REFUSED:
        with pytest.raises(ValueError, match=f"{name}=.* is not supported, only .*: .*{instead}") as error:
            options(**{name: value})
        assert repr(value) in str(error.value)


def test_a_neutral_value_has_the_right_type():
    with pytest.raises(ValueError, match="pipeline_parallel_size=True"):
        options(pipeline_parallel_size=True)
    with pytest.raises(ValueError, match="trust_remote_code=0"):
        options(trust_remote_code=0)


def test_other_names_and_other_values():
    assert options(num_gpu_blocks_override=50, async_scheduling=False) == {"num_kv_blocks": 50, "enable_overlap": False}
    assert options(dtype="half", kv_cache_dtype="fp8_e4m3", attention_backend="FLASH_ATTN", seed=None) == {
        "dtype": "float16",
        "kv_cache_dtype": "fp8",
        "attention_backend": "flash_attn",
        "seed": 0,
    }
    with pytest.raises(TypeError, match="num_kv_blocks is given twice"):
        options(num_gpu_blocks_override=50, num_kv_blocks=50)


def test_unknown_names_are_all_named():
    with pytest.raises(TypeError, match="unknown argument a, b; allowed are model, .*seed"):
        options(b=1, seed=1, a=2)


def test_options_of_requests_are_none_of_the_engine():
    assert translate_options({"lora_request": None, "cache_salt": None}, [], "request") == {}
    assert translate_options({"seed": None, "best_of": 1}, ["seed"], "request") == {"seed": None}
    for name in ("lora_request", "temperature", "best_of", "cache_salt"):
        with pytest.raises(TypeError, match=f"unknown argument {name}"):
            options(**{name: None})


def test_what_has_no_effect_is_nothing_of_ours():
    assert not WITHOUT_EFFECT & set(OWN)
    assert options(disable_log_stats=False, max_logprobs=5) == {}


def test_the_json_is_of_the_version_that_the_documents_name():
    assert len(VLLM) > 200
    assert {"enable_log_requests", "kv_cache_memory_bytes", "performance_mode"} <= set(VLLM)
    args = EngineArgs("a-model", **{name: value for name, value in VLLM.items() if name != "model"})
    assert args == EngineArgs("a-model", gpu_memory_utilization=0.92, hf_overrides={}, override_generation_config={})
