"""The benchmark of what quantised weights cost measures what it says."""

import pytest

from benchmarks import quantised_accuracy
from benchmarks.quantised_accuracy import SETTINGS, judge_text, measure, num_right
from nanovllm_extras import LLM, TINY_QWEN3

TEXT = "A step reads all weights of the model once. Fewer bits for each weight make it faster, and less exact. " * 3


@pytest.mark.slow
def test_fewer_bits_move_logprobs_farther(monkeypatch):
    corpus = quantised_accuracy.load_corpus(quantised_accuracy.CORPUS)[:4]
    monkeypatch.setattr(quantised_accuracy, "load_corpus", lambda folder: corpus)
    monkeypatch.setattr(quantised_accuracy, "split_sums", lambda: ([], [(12, 34), (56, 71)]))
    exact = judge_text(LLM(TINY_QWEN3, **SETTINGS["float32"]), TEXT, 5)
    names = ("float32", "bfloat16", "int8", "int4, groups of 128")
    rows = [measure(LLM(TINY_QWEN3, **SETTINGS[name]), TEXT, exact) for name in names]
    errors = [row["rms error"] for row in rows]
    assert errors[0] == 0 < errors[1] < errors[2] < errors[3] < 3
    assert rows[0]["same likeliest"] == "100.0%"
    assert {row["sums"] for row in rows} == {"2/2"}


def test_only_the_whole_answer_is_right():
    llm = LLM(TINY_QWEN3)
    questions = [("What is 12 + 34?", "12 + 34 = 46."), ("What is 12 + 34?", "12 + 34 = 46"), ("12 + 35", "46")]
    assert num_right(llm, questions) == 1
