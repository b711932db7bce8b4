"""vLLM's fields of a request that mean nothing here, and parameters as vLLM's server makes them.

Oracle: the same parameters, made of the fields that they have here.
"""

import dataclasses
import math

import pytest

from nanovllm_extras import BeamSearchParams, SamplingParams

DEFAULTS = dataclasses.asdict(SamplingParams())

NEUTRAL = {  # fields of vLLM 0.32, and of older ones, that mean nothing here: (what they may be, what they may not)
    "best_of": (1, 4),
    "use_beam_search": (False, True),
    "flat_logprobs": (False, True),
    "extra_args": (None, {"a": 1}),
    "logprob_token_ids": (None, [5]),
    "thinking_token_budget": (None, 100),
    "watermarking": (None, True),
    "stream_interval": (None, 4),
    "guided_decoding": (None, "json"),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_vllms_other_fields_are_accepted_at_their_neutral_values_alone(name):
    neutral, other = NEUTRAL[name]
    assert SamplingParams(**{name: neutral, "top_k": 5}) == SamplingParams(top_k=5)
    with pytest.raises(ValueError, match=f"{name}=.* is not supported, only .*: "):
        SamplingParams(**{name: other})


def test_vllms_other_fields_of_a_beam_search():
    params = BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.0, include_stop_str_in_output=False)
    assert params == BeamSearchParams(2, 3)
    with pytest.raises(ValueError, match="temperature=0.7 is not supported"):
        BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.7)


# --- as a server makes them


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
