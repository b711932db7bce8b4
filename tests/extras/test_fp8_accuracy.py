"""The benchmark of the fp8 cache's accuracy measures what it says."""

import pytest

from benchmarks import fp8_accuracy
from benchmarks.fp8_accuracy import differences, measure, rms


def test_an_fp8_cache_keeps_the_answers_and_moves_the_logprobs(monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "MAX_TOKENS", 30)
    report = measure(["What is paged attention?", "What is a block table?"], "torch", "bfloat16")
    assert report["answered the same to the last token"] == report["questions"] == 2
    plain, fp8 = (report[f"rms error of log-probabilities, {name} cache"] for name in ("bfloat16", "fp8"))
    assert 0 < 2 * plain < fp8 < 8 * plain


def test_errors_are_those_of_the_same_tokens():
    errors = differences([{1: -0.5, 2: -2.0}, {3: -1.0}], [{2: -2.5, 1: -0.5, 9: -4.0}, {9: -1.0}])
    assert errors == [0.0, -0.5]
    assert rms([3.0, -4.0, 0.0, 0.0]) == pytest.approx(2.5)
