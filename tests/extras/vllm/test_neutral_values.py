"""Values that mean "as it is" are accepted, for each option that vLLM has and this engine knows.

The names and neutral values are those of vLLM 0.32's signatures. The oracle is the object, or the output, without them.
"""

import dataclasses
import json
import math
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
        "best_of": [1], "use_beam_search": [False], "logprob_token_ids": [None], "watermarking": [None],
        "stream_interval": [None], "guided_decoding": [None],
        "skip_reading_prefix_cache": [None, False], "extra_args": [None], "flat_logprobs": [False],
        "skip_clone": [False], "thinking_token_budget": [None, -1], "repetition_detection": [None], "seed": [None, -1],
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


@pytest.mark.parametrize(("cls", "needed", "fields"), OF_REQUESTS)
def test_parameters_of_a_request(cls, needed, fields):
    plain, names = cls(**needed), [field.name for field in dataclasses.fields(cls)]
    for name, value in [(name, value) for name, values in fields.items() for value in values]:
        made = cls(**needed, **{name: value})
        assert [getattr(made, one) or None for one in names] == [getattr(plain, one) or None for one in names], name


OTHER_VALUES = {
    SamplingParams: {"best_of": 4, "use_beam_search": True, "flat_logprobs": True,
                     "logprob_token_ids": [5], "watermarking": True, "stream_interval": 4,
                     "guided_decoding": "json", "skip_reading_prefix_cache": True},
    PoolingParams: {"dimensions": 16, "task": "classify", "requires_token_ids": True},
    StructuredOutputsParams: {"structural_tag": "{}", "disable_additional_properties": True},
    BeamSearchParams: {"temperature": 0.7},
}  # fmt: skip


@pytest.mark.parametrize(("cls", "needed", "_"), OF_REQUESTS)
def test_other_values_are_refused_by_name(cls, needed, _):
    for name, value in OTHER_VALUES[cls].items():
        with pytest.raises(ValueError, match=f"{name}=.* is not supported, only "):
            cls(**needed, **{name: value})


def test_use_activation_is_normalize():
    assert not PoolingParams(use_activation=False).normalize
    with pytest.raises(TypeError, match="normalize must be True or False"):
        PoolingParams(use_activation=1)


def test_a_dict_of_a_form_may_have_them_too():
    params = {"regex": "a", "structural_tag": None, "disable_fallback": False}
    assert StructuredOutputsParams.of(params) == StructuredOutputsParams(regex="a")


def test_none_is_the_default_of_an_option_of_the_engine():
    for name in sorted(set(VLLM) & set(OWN)):
        assert getattr(Config.from_options("a-model", {name: None}), name) == OWN[name], name


def test_the_defaults_in_the_table_are_those_of_the_options():
    assert {name: values[None] for name, values in VALUES.items() if None in values} == {
        name: OWN[name] for name, values in VALUES.items() if None in values
    }


def test_the_dtype_of_k_and_v_may_be_named_and_another_one_is_refused(tiny_checkpoint):
    for dtype, name, other in (("float32", "float", "bfloat16"), ("bfloat16", None, "half")):
        options = {"dtype": dtype, "num_kv_blocks": 16}
        with LLM(tiny_checkpoint[0], **options, kv_cache_dtype=name) as llm:
            assert llm.engine.config.kv_cache_dtype == "auto"
        with pytest.raises(ValueError, match=f"kv_cache_dtype must be auto, fp8, int8 or {dtype}"):
            LLM(tiny_checkpoint[0], **options, kv_cache_dtype=other)


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


def test_methods():
    arguments = {
        "generate": ("a", SamplingParams(max_tokens=1)),
        "chat": ([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1)),
        "embed": ("a",),
        "beam_search": (["a"], BeamSearchParams(beam_width=2, max_tokens=1)),
    }
    llm = LLM(nanovllm_extras.TINY_QWEN3, num_kv_blocks=64)
    for method, names in CALLS.items():
        call = getattr(llm, method)
        assert call(*arguments[method], use_tqdm=False, **dict.fromkeys(names))
        with pytest.raises(TypeError, match="lora_request must be a LoRARequest, .* got 3"):
            call(*arguments[method], use_tqdm=False, lora_request=3)
    llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)


# ---- as vLLM's server makes them

DEFAULTS = dataclasses.asdict(SamplingParams())


def test_from_optional_takes_none_for_defaults():
    needed = {name: None for name, value in DEFAULTS.items() if value is not None and name != "max_tokens"}
    assert SamplingParams.from_optional(**needed) == SamplingParams()
    assert SamplingParams.from_optional() == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(temperature=0.5, top_k=None, seed=3) == SamplingParams(temperature=0.5, seed=3)


def test_from_optional_takes_biases_as_json_has_them():
    params = SamplingParams.from_optional(logit_bias={"7": 5, 8: -1000.0, " 9 ": 1e9})
    assert params.logit_bias == {7: 5, 8: -100.0, 9: 100.0}
    for bias in ({"a": 1.0}, {"1.5": 1.0}, {"7": "high"}, {"7": math.nan}):
        with pytest.raises((TypeError, ValueError), match="logit_bias"):
            SamplingParams.from_optional(logit_bias=bias)


def test_from_optional_refuses_what_the_constructor_refuses():
    for fields in ({"top_q": None}, {"temperature": -1}, {"n": 2, "temperature": 0}):
        with pytest.raises((TypeError, ValueError)):
            SamplingParams.from_optional(**fields)
