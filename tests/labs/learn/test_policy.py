"""Policies are scored by the waits that the engine's scheduler gives, and each kind of failure is explained."""

import pytest

from labs.learn.catalog import find_exercise
from labs.learn.policy import (
    MAX_SCORE,
    OURS,
    Request,
    fair_share,
    fcfs,
    judge,
    make_traces,
    mean_over_users,
    serve,
    shortest_first,
)
from labs.learn.texts import LANGUAGES

START = "def my_policy(request):\n    return "
RIGHT = "request.num_prompt_tokens + 8 * request.arrival + 60 * request.num_earlier"
WRONG = {
    "0": "The same as first come, first served",
    "request.num_prompt_tokens": "A request starves",
    "-request.arrival": "A request starves",
    "request.num_earlier": "Not yet good enough",
    f"-({RIGHT})": "The order is reversed",
    "__import__('random').random()": "Two runs differ",
}


@pytest.fixture
def check(tmp_path):
    def check_source(source, language="en"):
        (tmp_path / "my_policy.py").write_text(source, encoding="utf-8")
        return find_exercise("my_policy").check(tmp_path / "my_policy.py", language)

    return check_source


def test_waits_agree_with_a_count_by_hand():
    trace = [Request(0, 16, 3, user) for user in "aaaab"]
    # A step has a budget of 64 tokens, and 4 sequences run: they end in step 3, then the fifth is admitted.
    assert serve(fcfs, trace) == [1, 1, 1, 1, 4]
    assert serve(fair_share, trace) == [1, 1, 1, 4, 1]  # `b` and the first of `a` go first
    assert mean_over_users(trace, [1, 1, 1, 4, 1]) == (7 / 4 + 1) / 2
    long = [Request(0, 150, 1, "a"), Request(0, 10, 1, "b"), Request(1, 10, 1, "c")]
    assert serve(fcfs, long) == [3, 3, 2]  # 64 + 64 + 22 tokens; in the third step there is budget for all
    assert serve(shortest_first, long) == [3, 1, 2]  # 10 + 54, 64, 32 + 10: `c` comes when the long prompt runs


def test_our_policies_on_the_traces():
    traces = list(make_traces().values())
    bases = [serve(fcfs, trace) for trace in traces]
    results = {policy.__name__: judge(policy, traces, bases) for policy in OURS.values()}
    assert results["fcfs"].scores == [100, 100, 100]
    assert any(results["shortest_first"].starving)
    assert not any(any(results[name].starving) for name in ("fcfs", "sjf", "fair_share"))
    assert not any(result.passes for result in results.values())


def test_a_score_is_reported_and_a_right_policy_passes(check):
    report = check(START + RIGHT)
    assert report.passed
    assert report.numbers["score"] <= MAX_SCORE
    assert report.drawings[0].lines[5].endswith("yours")


@pytest.mark.slow
@pytest.mark.parametrize("policy", WRONG)
def test_each_failure_is_explained(policy, check):
    report = check(START + policy)
    assert not report.passed
    assert report.mistake == WRONG[policy]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("source", ["x = 1\n", START + "None", START + "float('nan')", START + "request.length"])
def test_what_is_not_a_policy_is_a_report(source, language, check):
    report = check(source, language)
    assert not report.passed
    assert not report.numbers
