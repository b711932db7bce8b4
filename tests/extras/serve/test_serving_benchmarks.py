"""The benchmarks of the server run, with little work, and their figures follow from what they have measured."""

import contextlib
import json
import os
import resource
import sys
from importlib.metadata import version
from statistics import median

import pytest

from benchmarks import cold_start, serving, serving_cost
from benchmarks.dummy_checkpoint import make_tokenizer
from nanovllm_extras import LLM


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a benchmark; returns what it writes."""

    def run(module, *arguments):
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments), "--json", str(out)])
        module.main()
        return json.loads(out.read_text())

    return run


@pytest.mark.slow
def test_servers_side_by_side(bundled_server, run, capsys):
    names = ["--server", f"a={bundled_server.url}", "--server", f"b={bundled_server.url}"]
    report = run(serving, *names, "--repeats", 3, "--num-prompts", 5, "--input-len", 40, "--output-len", 20)
    saturated = [one for one in report["runs"] if one["request_rate"] == "inf"]
    assert [one["server"] for one in saturated] == ["a", "b", "b", "a", "a", "b"]
    assert len(report["runs"]) == 12
    assert report["versions"] == dict.fromkeys("ab", version("nanovllm"))
    assert {one["completed"] for one in report["runs"]} == {5}
    rates = {name: median(one["request_throughput"] for one in saturated if one["server"] == name) for name in "ab"}
    assert report["half_rate"] == pytest.approx(min(rates.values()) / 2, abs=0.001)
    by_round = {(one["server"], one["repeat"]): one for one in saturated}
    ratios = [by_round["a", i]["output_throughput"] / by_round["b", i]["output_throughput"] for i in range(3)]
    assert report["summary"]["a / b"]["output_throughput"] == pytest.approx(median(ratios))
    assert by_round["a", 1]["total_input_tokens"] == by_round["b", 1]["total_input_tokens"]
    assert {one["total_cached_tokens"] for one in report["runs"] if one["server"] == "a" and one["repeat"] != 1} == {0}
    assert capsys.readouterr().out.splitlines()[-1].startswith("| a / b | ")


def test_a_streamed_token_has_its_price(bundled_server, run, monkeypatch):
    """The server is a thread of this process here; so the parts are, but the sums hold."""

    @contextlib.contextmanager
    def serving_here(model):
        yield bundled_server.url, os.getpid()

    monkeypatch.setattr(serving_cost, "serving", serving_here)
    kinds = dict(list(serving_cost.KINDS.items())[:1])  # each takes processes of its own
    monkeypatch.setattr(serving_cost, "KINDS", kinds)
    monkeypatch.setattr(serving_cost, "LLM", lambda model: LLM(model, device="cpu", num_kv_blocks=512))
    report = run(serving_cost, "--streams", 4, "--input-len", 8, "--output-len", 6, "--repeats", 1, "--burst", 3)
    (served,), (offline,) = report["served"], report["offline_tokens_per_second"]
    assert report["served / offline"] == pytest.approx(served["tokens_per_second"] / offline)
    assert 0 < served["chunks_per_token"] <= 1
    assert min(report[f"µs per token, {part}"] for part in ("event loop", "engine", "client")) > 0
    assert report["bursts"].keys() == kinds.keys()
    for kind, burst in report["bursts"].items():
        assert burst["statuses"] == {"200": 3}
        assert report[f"/health, {kind}, max ms"] == burst["max_ms"] > 0


def test_a_made_up_tokenizer_reads_what_it_writes():
    tokenizer = make_tokenizer(10_000)
    assert len(tokenizer) == 10_000 + 2
    ids = list(range(256 + 94, 10_000, 7))  # pairs and triples; single bytes need not be text
    assert tokenizer.encode(tokenizer.decode(tokenizer.encode("any text, ü"))) == tokenizer.encode("any text, ü")
    assert [tokenizer.decode([i]) for i in ids] == tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.slow
def test_a_cold_start_of_the_server_is_told_part_by_part(run, monkeypatch):
    """Of a server whose kernels are compiled already. The bound is on processor time, which hardly depends on what
    else the machine does; the seconds that a user waits are the benchmark's to tell.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    usual_cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    real_run, parts, before = cold_start.run_server, {}, resource.getrusage(resource.RUSAGE_CHILDREN)
    monkeypatch.setattr(
        cold_start, "run_server", lambda args, _: parts.update(parts or real_run(args, usual_cache)) or parts
    )
    report = run(cold_start, "--serve", "--repeats", 1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert report["later_s"] == report["first_ever_s"] == parts
    assert min(parts.values()) > 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 9
