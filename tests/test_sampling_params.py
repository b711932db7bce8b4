"""`SamplingParams`: which values are legal, and the messages for those that are not.

Oracles: a list of vLLM's defaults written down by hand, and a table of bad values with what the message must hold: the
field, the value, the range.

Seen to fail when broken: a default changed; a range widened, narrowed or made half open by one; a check left out; a
value that is not shown in its message.
"""

import copy
import dataclasses
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from nanovllm.sampling_params import SamplingParams

VLLM_DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "extra_args": None,
}


NOT_INTEGERS = [1.5, "2", True, [3]]
NOT_NUMBERS = ["0.5", True, [0.5], None]
NOT_BOOLS = [0, 1, "yes", None]

# field: [(range as the message must say it, values outside)]
OUT_OF_RANGE = {
    "n": ([">= 1"], [0, -1, -(10**20)]),
    "temperature": ([">= 0"], [-0.1, -1e-9, math.inf, -math.inf, math.nan, 10**400]),
    "top_p": (["> 0", "<= 1"], [0, 0.0, -0.5, 1.01, math.inf, math.nan]),
    "top_k": ([">= -1"], [-2, -100]),
    "min_p": ([">= 0", "<= 1"], [-0.01, 1.01, math.inf, math.nan]),
    "seed": ([">= 0", "<= 18446744073709551615", "None"], [-1, -(2**70), 2**64]),
    "max_tokens": ([">= 1", "None"], [0, -1]),
}
WRONG_TYPE = {
    "n": ([">= 1"], [*NOT_INTEGERS, None]),
    "temperature": ([">= 0"], NOT_NUMBERS),
    "top_p": (["> 0", "<= 1"], NOT_NUMBERS),
    "top_k": ([">= -1"], [*NOT_INTEGERS, None]),
    "min_p": ([">= 0", "<= 1"], NOT_NUMBERS),
    "seed": ([">= 0", "None"], NOT_INTEGERS),
    "max_tokens": ([">= 1", "None"], NOT_INTEGERS),
    "ignore_eos": (["True or False"], NOT_BOOLS),
    "stop": (["list of strings", "None"], [5, b"end", {"a": 1}, {"a"}]),
    "stop_token_ids": (["list of token ids", "None"], [5, "7", {5: 1}, b"5"]),
}


@pytest.fixture
def fields():
    """The class under test, and its tables. `tests/extras/test_request_params.py` has another one."""
    tables = {"out_of_range": OUT_OF_RANGE, "wrong_type": WRONG_TYPE, "legal": LEGAL}
    return SimpleNamespace(kind=SamplingParams, defaults=VLLM_DEFAULTS, **tables)


def assert_refused(kind, given, exception, says):
    with pytest.raises(exception) as info:
        kind(**given)
    for part in says:
        assert part in str(info.value), f"{part!r} is not in {info.value}"


def test_fields_and_defaults_are_vllms(fields):
    assert dataclasses.asdict(fields.kind()) == fields.defaults


def test_values_out_of_range(fields):
    for name, (says, values) in fields.out_of_range.items():
        for value in values:
            assert_refused(fields.kind, {name: value}, ValueError, [name, f"got {value}", *says])


def test_values_of_the_wrong_type(fields):
    for name, (says, values) in fields.wrong_type.items():
        for value in values:
            assert_refused(fields.kind, {name: value}, TypeError, [name, f"got {value!r}", *says])


def test_token_ids_in_lists(fields):
    for name in fields.defaults.keys() & {"stop_token_ids", "allowed_token_ids"}:
        assert_refused(fields.kind, {name: [4, -1]}, ValueError, [f"{name}[1]", ">= 0", "got -1"])
        assert_refused(fields.kind, {name: [4, 5, 1.5]}, TypeError, [f"{name}[2]", ">= 0", "got 1.5"])
        assert_refused(fields.kind, {name: [True]}, TypeError, [f"{name}[0]", ">= 0", "got True"])


def test_strings_in_lists(fields):
    for name in fields.defaults.keys() & {"stop", "bad_words"}:
        assert_refused(fields.kind, {name: ["a", ""]}, ValueError, [f"{name}[1]", "empty", "''"])
        assert_refused(fields.kind, {name: ["a", 5]}, TypeError, [f"{name}[1]", "str", "5"])
        assert_refused(fields.kind, {name: [None]}, TypeError, [f"{name}[0]", "str", "None"])


def test_an_empty_stop_string(fields):
    assert_refused(fields.kind, {"stop": ""}, ValueError, ["stop", "empty", "''"])


@pytest.mark.parametrize("n", [2, 5])
def test_many_greedy_samples_are_refused(fields, n):
    assert_refused(fields.kind, {"n": n, "temperature": 0}, ValueError, ["n ", "1", "temperature 0", f"got {n}"])
    assert fields.kind(n=n, temperature=1e-3).n == n
    assert fields.kind(n=1, temperature=0).temperature == 0


def test_unknown_fields(fields):
    for name in ("top_q", "temprature"):
        assert_refused(fields.kind, {name: 1}, TypeError, [name])


LEGAL = [
    {"n": 100},
    {"temperature": 0},
    {"temperature": 1000.0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 1},
    {"top_k": 10**9},
    {"min_p": 0, "top_p": 1.0},
    {"min_p": 1},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"stop": "a"},
    {"stop": ["a", " ", "\n"]},
    {"stop": ()},
    {"stop_token_ids": []},
    {"stop_token_ids": (5, 5)},
    {"max_tokens": None},
    {"max_tokens": 1},
    {"seed": np.int64(3), "max_tokens": np.int32(4), "top_p": np.float32(0.5), "stop_token_ids": [np.int64(2)]},
]


def test_legal_values_are_kept_as_they_are(fields):
    for given in fields.legal:
        params = fields.kind(**given)
        assert {name: getattr(params, name) for name in given} == given


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_numbers_of_numpy_are_compared_without_a_warning(name, kind):
    """The largest float is infinite in a smaller type."""
    with np.errstate(all="raise"):
        assert getattr(SamplingParams(**{name: kind(0.5)}), name) == 0.5
        for wrong in (kind("nan"), kind("-inf"), kind("inf"), kind(-1)):
            with pytest.raises(ValueError, match=f"{name} must be"):
                SamplingParams(**{name: wrong})


def test_a_copy_is_checked():
    """A request takes one: what was assigned meanwhile is checked then."""
    params = SamplingParams(stop=["a"])
    params.stop.append("")
    with pytest.raises(ValueError, match=r"stop\[1\]"):
        dataclasses.replace(params)
    params = SamplingParams(n=2)
    params.temperature = 0
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        dataclasses.replace(params)


def test_it_can_be_pickled_and_copied():
    params = SamplingParams(stop=["a"], top_p=0.5, seed=5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ([], ()), ("ab", ("ab",)), (["ab"], ("ab",)), (("a", "b"), ("a", "b"))], ids=str
)
def test_stop_strings(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings
