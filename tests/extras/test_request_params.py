"""`SamplingParams` of extras: which values are legal, and the messages for those that are not.

Oracles: a list of vLLM's defaults written down by hand, and a table of bad values with what the message must hold: the
field, the value, the range.

Seen to fail when broken: a default changed; a range widened, narrowed or made half open by one; a check left out; a
value that is not shown in its message.
"""

import copy
import dataclasses
import math
import pickle
import typing
from types import SimpleNamespace

import pydantic
import pytest

import nanovllm
import nanovllm_extras
from nanovllm_extras import RequestOutputKind, SamplingParams
from nanovllm_extras.options.chat_options import ChatOptions, render_chat
from tests import test_sampling_params as core
from tests.test_sampling_params import (  # noqa: F401 (with the fixture `fields` below)
    NOT_BOOLS,
    NOT_INTEGERS,
    NOT_NUMBERS,
    test_an_empty_stop_string,
    test_fields_and_defaults_are_vllms,
    test_legal_values_are_kept_as_they_are,
    test_many_greedy_samples_are_refused,
    test_strings_in_lists,
    test_token_ids_in_lists,
    test_unknown_fields,
    test_values_of_the_wrong_type,
    test_values_out_of_range,
)

VLLM_DEFAULTS = {
    **core.VLLM_DEFAULTS,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "min_tokens": 0,
    "thinking_token_budget": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "logit_bias": None,
    "allowed_token_ids": None,
    "logits_processors": None,
    "structured_outputs": None,
}


# field: [(range as the message must say it, values outside)]
OUT_OF_RANGE = {
    **core.OUT_OF_RANGE,
    "seed": (core.OUT_OF_RANGE["seed"][0], [-2, -(2**70), 2**64]),  # vLLM takes -1 as None
    "presence_penalty": ([">= -2", "<= 2"], [-2.01, 2.01, math.inf, -math.inf, math.nan]),
    "frequency_penalty": ([">= -2", "<= 2"], [-2.01, 2.01, math.inf, -math.inf, math.nan]),
    "repetition_penalty": (["> 0"], [0, 0.0, -1, math.inf, math.nan]),
    "min_tokens": ([">= 0"], [-1]),
    "thinking_token_budget": ([">= 0", "None"], [-2]),
    "logprobs": ([">= -1", "None"], [-2]),
    "prompt_logprobs": ([">= -1", "None"], [-2]),
}
WRONG_TYPE = {
    **core.WRONG_TYPE,
    "presence_penalty": ([">= -2", "<= 2"], NOT_NUMBERS),
    "frequency_penalty": ([">= -2", "<= 2"], NOT_NUMBERS),
    "repetition_penalty": (["> 0"], NOT_NUMBERS),
    "min_tokens": ([">= 0"], [*NOT_INTEGERS, None]),
    "thinking_token_budget": ([">= 0", "None"], [1.5, "2", [3], True]),
    "logprobs": ([">= -1", "None"], [1.5, "2", [3]]),
    "prompt_logprobs": ([">= -1", "None"], [1.5, "2", [3]]),
    "include_stop_str_in_output": (["True or False"], NOT_BOOLS),
    "detokenize": (["True or False"], NOT_BOOLS),
    "skip_special_tokens": (["True or False"], NOT_BOOLS),
    "bad_words": (["list of strings", "None"], ["word", 5, b"word", {"a": 1}]),
    "allowed_token_ids": (["list of token ids", "None"], [5, "7", {5: 1}, b"5"]),
    "logits_processors": (["list of callables", "None"], [len, {"a": len}, "len"]),
    "logit_bias": (["dict", "None"], [[(1, 2.0)], 5, "1", {1, 2}]),
}


@pytest.fixture
def fields():
    tables = {"out_of_range": OUT_OF_RANGE, "wrong_type": WRONG_TYPE, "legal": LEGAL}
    return SimpleNamespace(kind=SamplingParams, defaults=VLLM_DEFAULTS, **tables)


def assert_refused(given, exception, says):
    core.assert_refused(SamplingParams, given, exception, says)


def test_a_bad_word_of_spaces():
    assert_refused({"bad_words": ["  "]}, ValueError, ["bad_words[0]", "empty", "'  '"])


def test_logits_processors_must_be_callable():
    assert_refused({"logits_processors": [len, 7]}, TypeError, ["logits_processors[1]", "callable", "got 7"])


def test_logit_bias():
    assert_refused({"logit_bias": {-1: 1.0}}, ValueError, ["logit_bias", ">= 0", "got -1"])
    assert_refused({"logit_bias": {"5": 1.0}}, TypeError, ["logit_bias", ">= 0", "got '5'"])
    for value in (100.5, -100.5, math.inf, math.nan):
        assert_refused({"logit_bias": {3: 0.0, 7: value}}, ValueError, ["logit_bias[7]", "-100", "100", f"got {value}"])
    assert_refused({"logit_bias": {7: "high"}}, TypeError, ["logit_bias[7]", "-100", "100", "got 'high'"])


def test_min_tokens_above_max_tokens():
    assert_refused({"min_tokens": 6, "max_tokens": 5}, ValueError, ["min_tokens", "max_tokens 5", "got 6"])
    assert_refused({"min_tokens": 17}, ValueError, ["min_tokens", "max_tokens 16", "got 17"])
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


def test_stop_strings_need_text():
    assert_refused({"stop": "END", "detokenize": False}, ValueError, ["stop", "'END'", "detokenize"])
    assert_refused({"stop": ["END"], "detokenize": False}, ValueError, ["stop", "'END'", "detokenize"])
    assert SamplingParams(stop=[], stop_token_ids=[5], detokenize=False).detokenize is False


def test_truncation():
    for value in (0, -2):
        assert_refused({"truncate_prompt_tokens": value}, ValueError, ["truncate_prompt_tokens", "-1", f"got {value}"])
    assert_refused({"truncate_prompt_tokens": 1.5}, TypeError, ["truncate_prompt_tokens", "got 1.5"])


def test_output_kind():
    for value in ("delta", 1, None):
        assert_refused({"output_kind": value}, TypeError, ["output_kind", "DELTA", f"got {value!r}"])


def test_no_token_allowed():
    assert_refused({"allowed_token_ids": []}, ValueError, ["allowed_token_ids", "at least 1", "empty"])


def test_the_refusal_of_an_unknown_field_names_the_known_ones():
    with pytest.raises(TypeError, match="unknown argument top_q; allowed are .*top_p"):
        SamplingParams(top_q=1)


LEGAL = [
    *core.LEGAL,
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"repetition_penalty": 0.001},
    {"repetition_penalty": 10},
    {"bad_words": ["a", " b"]},
    {"allowed_token_ids": [0]},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"logprobs": -1, "prompt_logprobs": -1},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 5: 100.0}},
    {"logits_processors": [max]},
    {"spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 7},
    {"output_kind": RequestOutputKind.DELTA},
]


# --- changed after it was made


def test_a_bad_assignment_is_refused_and_changes_nothing():
    for name, (_, values) in OUT_OF_RANGE.items():
        params = SamplingParams()
        with pytest.raises(ValueError, match=name):
            setattr(params, name, values[0])
        with pytest.raises(TypeError, match=name):
            setattr(params, name, object())
        assert params == SamplingParams()


def test_every_field_can_be_assigned():
    for fields in LEGAL:
        params = SamplingParams()
        for name, value in fields.items():
            setattr(params, name, value)
        assert params == SamplingParams(**fields)


def test_an_unknown_field_cannot_be_assigned():
    with pytest.raises(AttributeError, match="no field max_token; it has .*max_tokens"):
        SamplingParams().max_token = 20


def test_a_clone_is_equal_and_shares_nothing_that_can_change():
    for fields in LEGAL:
        params = SamplingParams(**fields)
        assert params.clone() == params
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0}, bad_words=["b"])
    clone = params.clone()
    params.stop.append("b")
    params.stop_token_ids.clear()
    params.logit_bias[5] = -1.0
    params.bad_words[0] = "c"
    params.temperature = 0.5
    assert clone == SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0}, bad_words=["b"])


def test_a_clone_is_checked():
    """What an assignment cannot see: lists that were changed in place, and fields that do not go together."""
    params = SamplingParams(stop=["a"])
    params.stop.append("")
    with pytest.raises(ValueError, match=r"stop\[1\]"):
        params.clone()
    params = SamplingParams(n=2)
    params.temperature = 0
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        params.clone()


def test_it_can_be_pickled_and_copied():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params


MORE_FIELDS = {"logit_bias": {3: 1.0}, "structured_outputs": {"regex": "a*"}}


@pytest.mark.parametrize(("kind", "more"), [(nanovllm.SamplingParams, {}), (SamplingParams, MORE_FIELDS)])
def test_a_model_of_pydantic_may_have_it_as_a_field(kind, more):
    read = pydantic.TypeAdapter(kind).validate_python
    fields = {"temperature": 0.5, "stop": ["a"], "stop_token_ids": [3], **more}
    assert read(fields) == kind(**fields)
    assert read({"stop": "ab"}).stop == "ab"
    with pytest.raises(pydantic.ValidationError, match="temperature must be"):
        read({"temperature": -1})


RECORDS = [one for one in map(nanovllm_extras.__dict__.get, nanovllm_extras.__all__) if dataclasses.is_dataclass(one)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_the_types_of_fields_can_be_read_at_run_time(record):
    """Pydantic, FastAPI and programs that make documentation or command lines read them."""
    assert typing.get_type_hints(record).keys() >= {one.name for one in dataclasses.fields(record)}


class Greedy(SamplingParams):
    """Its constructor has other arguments."""

    def __init__(self, max_tokens):
        super().__init__(temperature=0, max_tokens=max_tokens)


@dataclasses.dataclass
class Tagged(SamplingParams):
    """It has a field more, and another default."""

    tag: str = ""
    temperature: float = 0.5


@pytest.mark.parametrize("params", [Greedy(3), Tagged(tag="a", stop=["b"])], ids=["constructor", "fields"])
def test_subclasses(params):
    clone = params.clone()
    assert type(clone) is type(params)
    assert vars(clone) == vars(params)
    with pytest.raises(ValueError, match="temperature must be"):
        params.temperature = -1
    with pytest.raises(AttributeError, match="no field max_token"):
        params.max_token = 20


def test_other_forms_of_vllm_become_the_usual_ones():
    params = SamplingParams(seed=-1, logprobs=True, prompt_logprobs=True)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, 1, 1)
    assert type(params.logprobs) is type(params.prompt_logprobs) is int
    params.seed = -1
    assert params == params.clone() == SamplingParams(logprobs=1, prompt_logprobs=1)


@pytest.mark.parametrize("value", ["\ud800", "a\udfff", ["ok", "\ud83d"]])
def test_lone_surrogates_are_refused(value):
    """UTF-8 cannot encode them, so no tokenizer can."""
    for name in ("stop", "bad_words"):
        words = [value] if isinstance(value, str) else value
        with pytest.raises(ValueError, match=f"{name} must not hold half of a surrogate pair"):
            SamplingParams(**{name: words})
    tool = {"type": "function", "function": {"name": "f", "description": value}}
    for options in (
        {"tools": [tool]},
        {"chat_template_kwargs": {"x": value}},
        {"chat_template": f"{{{{ 1 }}}}{value}"},
    ):
        (name,) = options
        if name != "chat_template" or isinstance(value, str):
            with pytest.raises(ValueError, match=f"{name} must not hold half of a surrogate pair"):
                ChatOptions(**options)
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    for message in (
        {"role": "user", "content": value},
        {"role": "user", "content": "a", "name": value},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ):
        with pytest.raises(ValueError, match="messages must not hold half of a surrogate pair"):
            render_chat(None, [message])
