"""The benchmarks of the K/V store run, with little work, and their figures follow from what they have measured."""

import json
import os
import sys

import pytest

from benchmarks import kv_servers, kv_store
from nanovllm import TINY_QWEN3

pytestmark = pytest.mark.slow
LITTLE = ["--model", TINY_QWEN3, "--load-format", "safetensors", "--rounds", 1]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a benchmark; returns its rows."""

    def run(module, *arguments):
        words = [*arguments, *LITTLE, "--json", tmp_path / "out.json"]
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        module.main()
        return json.loads((tmp_path / "out.json").read_text())["rows"]

    return run


def test_an_engine_with_a_store(run):
    rows = run(kv_store, "both", "--prompt-len", 200, "--num-requests", 2, "--input-len", 40, "--output-len", 8)
    tiers = ["computed", "memory", "computed", "disk", "disk, cold", "computed", "shared"]
    assert [row["what"] for row in rows] == [*(f"ttft, {tier}" for tier in tiers), "costs, memory"]
    assert all(row["ms"] > 0 for row in rows[:-1])
    assert 0 < rows[-1]["asking"] < 100
    assert 0 < rows[-1]["saving"] < 100


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each engine needs a core")
def test_prefill_apart_from_decode(run):
    sizes = ["--prompt-len", 300, "--output-len", 300, "--streams", 2, "--quiet-tokens", 4]
    rows = run(kv_servers, "apart", *sizes)
    assert [row["what"] for row in rows] == ["together", "chunks", "apart"]
    for row in rows:
        assert row["longest_gap"] >= row["meanwhile"] > 0
        assert row["ttft"] > 0
        assert ("other" in row) == (row["what"] != "apart")
