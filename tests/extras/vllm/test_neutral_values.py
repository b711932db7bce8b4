"""Values that mean "as it is" are accepted, for each option that vLLM has and this engine knows.

The names and neutral values are those of vLLM 0.32's signatures. The oracle is the object, or the output, without them.
"""

import dataclasses
import json
from pathlib import Path

import pytest

import nanovllm_extras
from nanovllm_extras import (
    LLM,
    BeamSearchParams,
    Config,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm_extras.options.vllm_tables import VALUES

VLLM = json.loads((Path(__file__).parent / "vllm_engine_options.json").read_text())
OWN = {field.name: field.default for field in dataclasses.fields(Config) if field.name != "model"}
OF_REQUESTS = [
    (SamplingParams, {}, {
        "skip_reading_prefix_cache": [None, False], "extra_args": [None], "flat_logprobs": [False],
        "skip_clone": [False], "thinking_token_budget": [None], "repetition_detection": [None], "seed": [None, -1],
        "bad_words": [None, []], "stop": [None, []], "stop_token_ids": [None, []], "allowed_token_ids": [None],
        "logit_bias": [None], "structured_outputs": [None], "truncate_prompt_tokens": [None],
    }),
    (PoolingParams, {}, {
        "dimensions": [None], "task": [None, "embed"], "use_activation": [None, True], "normalize": [None, True],
        "step_tag_id": [None], "returned_token_ids": [None], "requires_token_ids": [False],
        "skip_reading_prefix_cache": [None, False], "extra_kwargs": [None], "truncate_prompt_tokens": [None],
        "output_kind": [RequestOutputKind.FINAL_ONLY], "late_interaction_params": [None],
    }),
    (StructuredOutputsParams, {"regex": "a"}, {
        "json": [None], "choice": [None], "grammar": [None], "json_object": [None], "structural_tag": [None],
        "disable_fallback": [False], "disable_any_whitespace": [False], "disable_additional_properties": [False],
        "whitespace_pattern": [None], "_backend": [None], "_backend_was_auto": [False],
    }),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 3}, {
        "ignore_eos": [False], "temperature": [0.0], "length_penalty": [1.0], "include_stop_str_in_output": [False],
    }),
]  # fmt: skip
CASES = [
    (cls, needed, name, value)
    for cls, needed, fields in OF_REQUESTS
    for name, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("cls", "needed", "name", "value"), CASES)
def test_parameters_of_a_request(cls, needed, name, value):
    made = cls(**needed, **{name: value})
    plain = cls(**needed)
    names = [field.name for field in dataclasses.fields(cls)]
    assert [getattr(made, one) or None for one in names] == [getattr(plain, one) or None for one in names]


@pytest.mark.parametrize(
    ("cls", "needed", "name", "value"),
    [
        (SamplingParams, {}, "skip_reading_prefix_cache", True),
        (PoolingParams, {}, "dimensions", 16),
        (PoolingParams, {}, "task", "classify"),
        (PoolingParams, {}, "requires_token_ids", True),
        (StructuredOutputsParams, {"regex": "a"}, "structural_tag", "{}"),
        (StructuredOutputsParams, {"regex": "a"}, "disable_additional_properties", True),
    ],
)
def test_other_values_are_refused_by_name(cls, needed, name, value):
    with pytest.raises(ValueError, match=f"{name}=.* is not supported, only None"):
        cls(**needed, **{name: value})


def test_use_activation_is_normalize():
    assert not PoolingParams(use_activation=False).normalize
    with pytest.raises(TypeError, match="normalize must be True or False"):
        PoolingParams(use_activation=1)


def test_a_dict_of_a_form_may_have_them_too():
    params = {"regex": "a", "structural_tag": None, "disable_fallback": False}
    assert StructuredOutputsParams.of(params) == StructuredOutputsParams(regex="a")


@pytest.mark.parametrize("name", sorted(set(VLLM) & set(OWN)))
def test_none_is_the_default_of_an_option_of_the_engine(name):
    assert getattr(Config.from_options("a-model", {name: None}), name) == OWN[name]


def test_the_defaults_in_the_table_are_those_of_the_options():
    assert {name: values[None] for name, values in VALUES.items() if None in values} == {
        name: OWN[name] for name, values in VALUES.items() if None in values
    }


@pytest.mark.parametrize("kv_cache_dtype", [None, "auto", "float32", "float"])
def test_the_dtype_of_k_and_v_may_be_named(tiny_checkpoint, kv_cache_dtype):
    options = {"dtype": "float32", "num_kv_blocks": 16}
    with LLM(tiny_checkpoint[0], **options, kv_cache_dtype=kv_cache_dtype) as llm:
        assert llm.engine.config.kv_cache_dtype == "auto"
        params = SamplingParams(temperature=0, max_tokens=5)
        outputs = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    with LLM(tiny_checkpoint[0], **options) as llm:
        assert (
            outputs[0].outputs[0].token_ids == llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        )


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "bfloat16"), ("bfloat16", "half")])
def test_another_dtype_of_k_and_v_is_refused(tiny_checkpoint, dtype, kv_cache_dtype):
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be auto, fp8, int8 or {dtype}"):
        LLM(tiny_checkpoint[0], dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_kv_blocks=16)


CALLS = {
    "generate": ["lora_request", "priority", "tokenization_kwargs", "mm_processor_kwargs"],
    "chat": [
        "lora_request",
        "chat_template",
        "tools",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "media_io_kwargs",
    ],
    "embed": ["lora_request", "pooling_params", "tokenization_kwargs", "truncate_prompt_tokens"],
    "beam_search": ["lora_request", "concurrency_limit", "mm_processor_kwargs"],
}


@pytest.fixture(scope="module")
def llm():
    with LLM(nanovllm_extras.TINY_QWEN3, num_kv_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize("method", CALLS)
def test_methods(llm, method):
    arguments = {
        "generate": ("a", SamplingParams(max_tokens=1)),
        "chat": ([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1)),
        "embed": ("a",),
        "beam_search": (["a"], BeamSearchParams(beam_width=2, max_tokens=1)),
    }[method]
    for name in CALLS[method]:
        assert getattr(llm, method)(*arguments, use_tqdm=False, **{name: None}), name
    with pytest.raises(ValueError, match="lora_request=3 is not supported"):
        getattr(llm, method)(*arguments, use_tqdm=False, lora_request=3)
    llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)


def test_async_llm_is_a_name_of_the_package():
    from nanovllm_extras.serve.async_llm import AsyncLLM

    assert nanovllm_extras.AsyncLLM is AsyncLLM
