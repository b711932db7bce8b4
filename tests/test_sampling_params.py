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
}


def test_fields_and_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == VLLM_DEFAULTS


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


def cases(table):
    return [(field, value, says) for field, (says, values) in table.items() for value in values]


def assert_refused(fields, exception, says, cls=SamplingParams):
    with pytest.raises(exception) as info:
        cls(**fields)
    for part in says:
        assert part in str(info.value), f"{part!r} is not in {info.value}"


@pytest.mark.parametrize(("field", "value", "says"), cases(OUT_OF_RANGE))
def test_values_out_of_range(field, value, says):
    assert_refused({field: value}, ValueError, [field, f"got {value}", *says])


@pytest.mark.parametrize(("field", "value", "says"), cases(WRONG_TYPE))
def test_values_of_the_wrong_type(field, value, says):
    assert_refused({field: value}, TypeError, [field, f"got {value!r}", *says])


def test_token_ids_in_lists():
    assert_refused({"stop_token_ids": [4, -1]}, ValueError, ["stop_token_ids[1]", ">= 0", "got -1"])
    assert_refused({"stop_token_ids": [4, 5, 1.5]}, TypeError, ["stop_token_ids[2]", ">= 0", "got 1.5"])
    assert_refused({"stop_token_ids": [True]}, TypeError, ["stop_token_ids[0]", ">= 0", "got True"])


def test_strings_in_lists():
    assert_refused({"stop": ["a", ""]}, ValueError, ["stop[1]", "empty", "''"])
    assert_refused({"stop": ["a", 5]}, TypeError, ["stop[1]", "str", "5"])
    assert_refused({"stop": [None]}, TypeError, ["stop[0]", "str", "None"])


def test_an_empty_stop_string():
    assert_refused({"stop": ""}, ValueError, ["stop", "empty", "''"])


@pytest.mark.parametrize("n", [2, 5])
def test_many_greedy_samples_are_refused(n):
    assert_refused({"n": n, "temperature": 0}, ValueError, ["n ", "1", "temperature 0", f"got {n}"])
    assert SamplingParams(n=n, temperature=1e-3).n == n
    assert SamplingParams(n=1, temperature=0).temperature == 0


def test_unknown_fields():
    for field in ("top_q", "temprature"):
        assert_refused({field: 1}, TypeError, [field])


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


@pytest.mark.parametrize("fields", LEGAL, ids=str)
def test_legal_values_are_kept_as_they_are(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


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
