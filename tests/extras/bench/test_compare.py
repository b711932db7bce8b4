"""`nanovllm bench compare`: does it measure both sides alike, and call different only what is?

Oracles: numpy on times that were written down; all orders of two sets of runs, counted one by one; an engine with a
clock of its own; `kv_use` of the core's tests, which looks at every block table; the engine's own `Counters`; and the
lengths in `bench.py`.

Seen to fail when broken: a request that is timed from the step that took it up; a prefix cache that stays from run to
run; a rank test with one side; ties that count as wins; extra arguments for the base; a turn that does not wait for the
turn before it; the answer missing from the next turn's prompt; line numbers that count from 0.
"""

import io
import json
import os
import random
import re
import subprocess
import sys
from contextlib import ExitStack
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from bench import WORKLOADS as LENGTHS
from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.bench import compare, compare_worker
from nanovllm_extras.bench.compare_engine import make_engine, make_params
from nanovllm_extras.bench.compare_figures import (
    FIGURES,
    Comparison,
    chance_of,
    compare_figures,
    compare_tokens,
    figures_of,
)
from nanovllm_extras.bench.compare_options import parse
from nanovllm_extras.bench.compare_report import Report, as_json, as_markdown, as_text
from nanovllm_extras.bench.compare_side import SideRun, SideSettings
from nanovllm_extras.bench.compare_workloads import TimedWork, load_of_trace, make_load
from nanovllm_extras.bench.results import Result
from nanovllm_extras.bench.serve_load import LoadServer, ServedLoad, StalledError
from nanovllm_extras.bench.trace_file import read_trace
from tests.core_alone import ROOT

# ---- the rule


def test_the_chance_is_that_of_all_orders_of_the_runs():
    """Each of the sets of n ranks is as likely; a chance of both sides counts sets that are at least as far apart."""
    rng = random.Random(0)
    for num in (2, 4, 5):
        ranks = range(2 * num)
        middle = num * (2 * num - 1) / 2
        distances = [abs(sum(chosen) - middle) for chosen in combinations(ranks, num)]
        for _ in range(20):
            one = rng.sample(ranks, num)
            other = [rank for rank in ranks if rank not in one]
            expected = sum(distance >= abs(sum(one) - middle) for distance in distances) / len(distances)
            assert chance_of(one, other) == chance_of(other, one) == pytest.approx(min(1.0, expected))
    assert chance_of([1, 1, 2], [1, 1, 2]) == 1.0
    assert chance_of([1.0] * 5, [2.0] * 5) == pytest.approx(2 / 252)
    assert chance_of([1.0] * 5, [2.0] * 4 + [1.0]) > 0.01, "a tie is not a win"


def test_equal_engines_look_different_rarely_and_others_often():
    rng = np.random.default_rng(0)

    def verdicts(factor, number):
        for _ in range(number):
            base, extension = 100 * np.exp(rng.normal(0, 0.03, (2, 5)))
            yield Comparison(FIGURES["output_throughput"], base.tolist(), (factor * extension).tolist()).verdict

    equal = list(verdicts(1.0, 2000))
    assert equal.count("no difference seen") > 0.98 * 2000
    assert {"better", "worse"} < set(equal), "by chance, in 1 of 126"
    assert set(verdicts(1.25, 100)) == {"better"}
    assert set(verdicts(0.8, 100)) == {"worse"}


def test_a_verdict_knows_which_direction_is_good():
    low, high = [1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4]
    assert Comparison(FIGURES["p99_ttft_ms"], low, high).verdict == "worse"
    assert Comparison(FIGURES["prefix_cache_hit_rate"], low, high).verdict == "better"
    assert Comparison(FIGURES["num_preemptions"], [0.0] * 5, [0.0] * 5).verdict == "equal"
    zero = Comparison(FIGURES["num_preemptions"], [0.0] * 5, [3.0] * 5)
    assert (zero.verdict, zero.ratios) == ("worse", None)
    assert Comparison(FIGURES["waste"], low[:4], high[:4]).verdict == "too few turns"


# ---- figures and tokens


def served(times, token_ids=None, **counters):
    """A run: for each request when it arrived, and when its tokens came."""
    results = [
        Result(sent, output_tokens=len(chunks), prompt_tokens=7, chunk_times=list(chunks)) for sent, *chunks in times
    ]
    return ServedLoad(results, token_ids or [[] for _ in times], counters)


def test_figures_are_those_of_numpy():
    rng = np.random.default_rng(1)
    gaps = rng.uniform(0.01, 0.5, (40, 9))
    times = np.cumsum(gaps, axis=1)  # [requests, arrival and 8 tokens]
    ttft, tpot = 1e3 * gaps[:, 1], 1e3 * gaps[:, 2:].mean(axis=1)
    counters = {"num_preemptions": 3, "prefix_cache_query_tokens": 80, "prefix_cache_hit_tokens": 60}
    run = served(times.tolist(), **counters, kv_tokens_stored=70, kv_slots_reserved=100)
    duration = times.max() - times[:, 0].min()
    num_good = ((ttft <= 300) & (tpot <= 260)).sum()
    assert 0 < num_good < 40
    assert figures_of(run, {"ttft": 300, "tpot": 260}) == pytest.approx(
        {
            "output_throughput": 40 * 8 / duration,
            "p50_ttft_ms": np.percentile(ttft, 50),
            "p99_ttft_ms": np.percentile(ttft, 99),
            "p50_tpot_ms": np.percentile(tpot, 50),
            "p99_tpot_ms": np.percentile(tpot, 99),
            "request_goodput": num_good / duration,
            "good_share": num_good / 40,
            "prefix_cache_hit_rate": 0.75,
            "num_preemptions": 3,
            "waste": 0.3,
        }
    )
    # nothing was counted, and no request has a second token
    assert figures_of(served([(0.0, 1.0)]), {}).keys() == {"output_throughput", "p50_ttft_ms", "p99_ttft_ms"}


def test_tokens_are_compared_turn_by_turn():
    base = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    same = compare_tokens([base, base], [base, base])
    assert (same.first, same.differing, same.unsteady) == (None, [], [])
    changed = compare_tokens([base, base], [[[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 3], [4, 0, 0], [7, 8, 9]]])
    assert changed.differing == [1, 2]
    first = changed.first
    assert (first.turn, first.request, first.position, first.base_token, first.extension_token) == (0, 2, 2, 9, None)
    assert compare_tokens([base, [[0], *base[1:]]], [base, base]).unsteady == [0]


def test_the_report_says_what_differs():
    runs = [{"output_throughput": 100.0 + i, "num_preemptions": 2.0} for i in range(5)]
    faster = [{"output_throughput": 200.0 + i, "num_preemptions": 2.0} for i in range(5)]
    base, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    tokens = compare_tokens([base] * 5, [other] * 5)
    figures = compare_figures(runs, faster)
    report = Report(
        "nanovllm", "tiny", "my_file.py", {"--block-size": 4}, "w", 2, 5, ("a", "b"), figures, (2**21, 2**20), tokens
    )
    text = as_text(report)
    assert re.search(
        r"output tokens per second +102.0 \(100.0 to 104.0\) +202.0 .* 1.980 \(1.962 to 2.000\) +better", text
    )
    assert re.search(r"preemptions +2 +2 +1.000 .* +equal", text)
    assert re.search(r"peak memory, MiB +2 +1 +0.500", text)
    expected = "1 of 2 requests differ. First difference: request 1, position 1 (base token 4, extension token 5)"
    assert expected in text
    assert "The base is computed by a, the extension by b." in text
    lines = as_markdown(report).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "| preemptions | 2 | 2 | 1.000 (1.000 to 1.000) | equal |" in lines
    saved = json.loads(json.dumps(as_json(report)))
    assert saved["figures"]["output_throughput"]["extension_median"] == np.median([200, 201, 202, 203, 204])
    assert saved["tokens"]["differing"] == [1]
    assert not saved["tokens"]["are_equal"]


# ---- serving


class ClockedEngine:
    """Each step takes a second of a clock of its own, and gives a token to every request; the last ends a request."""

    def __init__(self, is_stuck=False):
        self.now, self.is_stuck = 0.0, is_stuck
        self.requests, self.added = {}, {}
        self.stats = SimpleNamespace(steps=0, num_preemptions=4)

    def reset(self):
        self.requests.clear()

    def add_request(self, request_id, prompt, params):
        self.requests[request_id] = [params, []]
        self.added[request_id] = self.now

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        self.now += 1.0
        if self.is_stuck:
            return []
        self.stats.steps += 1
        self.stats.num_preemptions += 1
        outputs = []
        for request_id, (num_tokens, tokens) in list(self.requests.items()):
            tokens.append(int(request_id))
            sample, finished = SimpleNamespace(token_ids=tokens), len(tokens) == num_tokens
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[sample], finished=finished))
            if finished:
                del self.requests[request_id]
        return outputs

    def sleep(self, seconds):
        self.now += seconds


def test_times_count_from_the_arrival():
    engine = ClockedEngine()
    server = LoadServer(engine, lambda index, num_tokens, extra: num_tokens, lambda: engine.now, engine.sleep)
    load = [TimedWork([1], 2), TimedWork([1], 1, 0.25), TimedWork([1], 2, 7.5), TimedWork([1], 1, 0.5, after=2)]
    run = server.serve(load)
    assert [result.sent for result in run.results] == [0.0, 0.25, 7.5, 10.0]
    assert [result.chunk_times for result in run.results] == [[1.0, 2.0], [2.0], [8.5, 9.5], [11.0]]
    assert engine.added == {"0": 0.0, "1": 1.0, "2": 7.5, "3": 10.0}, "0 is in a step when 1 arrives"
    assert run.token_ids == [[0, 0], [1], [2, 2], [3]]
    assert run.counters == {"num_preemptions": 5}, "of this load only"


def test_an_engine_that_computes_nothing_is_an_error():
    engine = ClockedEngine(is_stuck=True)
    server = LoadServer(engine, lambda index, num_tokens, extra: num_tokens, lambda: engine.now, engine.sleep)
    with pytest.raises(StalledError, match="computed nothing"):
        server.serve([TimedWork([1], 2)])


EXTENSION = """
from collections import Counter

from nanovllm.scheduler import Scheduler
from nanovllm_testing.run import kv_use

print("an extension may print")


class Wrong(Scheduler):
    '''Changes the third token of every other request, and notes the use of the KV cache.'''

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.uses, self.counts = [], Counter()

    def schedule(self):
        step = super().schedule()
        if step.chunks:
            self.uses.append(kv_use(self.running, self.block_manager.block_size))
        return step

    def update(self, step, new_token_ids):
        self.counts.update(seq.request_id for seq in step.samples)
        wrong = [int(seq.request_id) % 2 and self.counts[seq.request_id] == 3 for seq in step.samples]
        return super().update(step, [77 if one else old for one, old in zip(wrong, new_token_ids)])


scheduler_cls = Wrong
extra_args = {"deadline": float}
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    path = tmp_path_factory.mktemp("extension") / "wrong_tokens.py"
    path.write_text(EXTENSION, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def engines(extension):
    """Of each package the engine without and with the extension, with a cache that is too small for all requests."""
    options = {"num_kv_blocks": 24, "block_size": 16, "dtype": "float32", "max_num_batched_tokens": 200}
    with ExitStack() as stack:
        yield {
            (package, name): make_engine(package, str(TINY_QWEN3), options, file, stack)
            for package in ("nanovllm", "nanovllm_extras")
            for name, file in (("base", None), ("extension", extension))
        }


def server_of(engine, package):
    return LoadServer(engine, lambda index, num_tokens, extra: make_params(package, num_tokens, 0.0, index, extra))


@pytest.fixture(scope="module")
def load():
    """Requests that share prefixes, need more blocks than there are, and have answers of 24 tokens."""
    works = make_load("prefixes", 12, float("inf"), 0, 500)
    return [TimedWork(work.prompt_token_ids[128:], 24 + i % 3) for i, work in enumerate(works)]


@pytest.mark.parametrize("package", ["nanovllm", "nanovllm_extras"])
def test_a_scheduler_that_changes_tokens_is_found_out(package, engines, load):
    runs = [server_of(engines[package, name], package).serve(load).token_ids for name in ("base", "extension")]
    prompts, lens = [work.prompt_token_ids for work in load], [work.output_len for work in load]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens]
    llm = LLM(TINY_QWEN3, dtype="float32", attention_backend="torch", num_kv_blocks=400)
    assert runs[0] == [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    tokens = compare_tokens(runs[:1], runs[1:])
    assert tokens.differing == [1, 3, 5, 7, 9, 11]
    # the outputs of the extras have the sampled token, and only the sequence has the changed one
    first, position = tokens.first, 2 if package == "nanovllm" else 3
    assert (first.request, first.position) == (1, position)
    assert (first.base_token, first.extension_token) == (runs[0][1][position], runs[1][1][position])
    assert runs[1][1][2] == 77 or package == "nanovllm_extras"


@pytest.mark.parametrize("package", ["nanovllm", "nanovllm_extras"])
def test_counted_figures_are_those_of_the_engine(package, engines, load):
    engine = engines[package, "extension"]
    server = server_of(engine, package)
    server.serve(load)
    stats = engine.stats
    names = ("num_preemptions", "prefix_cache_query_tokens", "prefix_cache_hit_tokens")
    before = [getattr(stats, name) for name in names]
    figures = figures_of(server.serve(load), {})
    num_preemptions, query, hit = (getattr(stats, name) - old for name, old in zip(names, before, strict=True))
    assert num_preemptions > 0
    assert 0 < hit < query == sum(len(work.prompt_token_ids) for work in load)
    assert figures["num_preemptions"] == num_preemptions
    assert figures["prefix_cache_hit_rate"] == hit / query
    num_stored, num_slots = np.sum(engine.scheduler.uses, axis=0)  # since the scheduler was made, for this load
    assert figures["waste"] == pytest.approx(1 - num_stored / num_slots)
    again = figures_of(server.serve(load), {})
    assert [again[name] for name in ("num_preemptions", "prefix_cache_hit_rate", "waste")] == [
        figures[name] for name in ("num_preemptions", "prefix_cache_hit_rate", "waste")
    ], "each load begins with an empty prefix cache"


def test_the_worker_answers_each_line_by_a_line(extension):
    settings = SideSettings("nanovllm", str(TINY_QWEN3), {"num_kv_blocks": 16}, extension)
    work = {"prompt_token_ids": [1, 2, 3], "output_len": 4, "arrival": 0.0, "after": None}
    messages = [vars(settings), *[{"load": [work], "extra_args": extra} for extra in (None, [{"deadline": 0.5}])]]
    replies = io.StringIO()
    with ExitStack() as stack:
        compare_worker.answer(io.StringIO("".join(json.dumps(one) + "\n" for one in messages)), replies, stack)
    ready, *runs = map(json.loads, replies.getvalue().splitlines())
    assert ready["max_prompt_and_output"] == 16 * 16
    assert [len(run["token_ids"][0]) for run in runs] == [4, 4]
    assert len(runs[0]["results"][0]["chunk_times"]) == 4
    assert runs[0]["peak_memory_bytes"] > 50 * 2**20
    refused = {"load": [work], "extra_args": [{"dead_line": 0.5}]}
    lines = "".join(json.dumps(one) + "\n" for one in [vars(settings), refused])
    with ExitStack() as stack, pytest.raises(ValueError, match="dead_line"):
        compare_worker.answer(io.StringIO(lines), io.StringIO(), stack)


# ---- the turns


class ScriptedSide:
    """Notes what it is to serve, and answers each request with tokens that name its number of requests before."""

    def __init__(self, name, log):
        self.name, self.log, self.num_served = name, log, 0

    def serve(self, load, extra_args=None):
        self.log.append((self.name, load, extra_args))
        answers = [[900 + self.num_served + i] * work.output_len for i, work in enumerate(load)]
        self.num_served += len(load)
        return SideRun(served([(0.0, 1.0)] * len(load), answers), 1)


def test_sides_take_turns_and_the_first_run_of_each_is_not_counted():
    log = []
    extra = compare.draw_extra_args({"deadline": [0.2, 2.0], "tenant": ["a", "b"]}, 40, 7)
    load = make_load("w", 40, 100.0, 0)
    runs = compare.run_turns(ScriptedSide("base", log), ScriptedSide("extension", log), load, extra, 3)
    assert [name for name, _, _ in log] == ["base", "extension"] * 4
    assert [[run.served.token_ids[0][0] for run in side] for side in runs] == [[940, 980, 1020]] * 2
    assert all(one == load for _, one, _ in log), "both serve the same requests"
    assert [one for _, _, one in log] == [None, extra] * 4, "the base knows no extra arguments"
    assert {(one["deadline"], one["tenant"]) for one in extra} == {(d, t) for d in (0.2, 2.0) for t in "ab"}
    assert compare.draw_extra_args({}, 40, 7) is None


def test_a_turn_repeats_the_conversation_with_the_answers_of_the_base():
    log = []
    load = make_load("conversations", 12, float("inf"), 0)
    compare.run_turns(ScriptedSide("base", log), ScriptedSide("extension", log), load, None, 1)
    complete = log[-1][1]
    assert [work.after for work in complete] == [None] * 3 + list(range(9))
    for i, work in enumerate(complete[3:], 3):
        before = complete[i - 3].prompt_token_ids
        answer = [900 + i - 3] * load[i - 3].output_len
        assert work.prompt_token_ids == before + answer + load[i].prompt_token_ids
    assert [len(one) for _, one, _ in log] == [3, 3, 3, 12, 12, 12, 12]


# ---- the requests


def test_w_and_w2_are_those_of_the_benchmarks():
    for name in ("w", "w2"):
        inputs, outputs = LENGTHS[name.upper()]
        load = make_load(name, len(inputs), float("inf"), 0)
        assert [len(work.prompt_token_ids) for work in load] == inputs
        assert [work.output_len for work in load] == outputs


def test_workloads_have_the_seed_and_the_rate_that_are_asked_for():
    rate = make_load("long", 400, 8.0, 3)
    assert rate == make_load("long", 400, 8.0, 3) != make_load("long", 400, 8.0, 4)
    assert rate[-1].arrival / 399 == pytest.approx(1 / 8, rel=0.2)
    assert sorted({len(work.prompt_token_ids) for work in rate}) == [48, 1000]
    burst = [work.arrival for work in make_load("burst", 10, float("inf"), 0)]
    assert burst == [0.0, 0.25, 0.5, 0.75] + [1.0] * 6
    prefixes = make_load("prefixes", 24, float("inf"), 0)
    assert len({tuple(work.prompt_token_ids[:256]) for work in prefixes}) == 4
    assert len({tuple(work.prompt_token_ids) for work in prefixes}) == 24


MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 600, "output_length": 1, "hash_ids": [0, 3]}

{"timestamp": 4000, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 4]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,10,7
2023-11-16 18:16:46.6805901,879,26
"""


def test_a_trace_of_mooncake(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE, encoding="utf-8")
    trace = read_trace(path)
    load = load_of_trace(trace, speed=2.0, scale=1.0, seed=0)
    assert [work.arrival for work in load] == [0.0, 0.25, 1.5]
    assert [len(work.prompt_token_ids) for work in load] == [1100, 600, 1030]
    assert [work.output_len for work in load] == [5, 1, 1]
    first, second, third = (work.prompt_token_ids for work in load)
    for one, other, num_equal in ((first, second, 512), (first, third, 1024), (second, third, 512)):
        assert one[:num_equal] == other[:num_equal]
        assert one[num_equal : num_equal + 6] != other[num_equal : num_equal + 6]
    small = load_of_trace(trace, speed=1.0, scale=0.0625, seed=0)  # blocks of 32
    assert [len(work.prompt_token_ids) for work in small] == [69, 38, 64]
    assert small[0].prompt_token_ids[:64] == small[2].prompt_token_ids
    assert len(read_trace(path, limit=2)) == 2


def test_a_trace_of_azure(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, encoding="utf-8-sig")
    trace = read_trace(path)
    assert [one.arrival_s for one in trace] == pytest.approx([0.0, 0.5, 60.0], abs=1e-5)
    assert [(one.input_len, one.output_len) for one in trace] == [(374, 44), (10, 7), (879, 26)]
    prompts = [tuple(work.prompt_token_ids) for work in load_of_trace(trace, 1.0, 1.0, 0)]
    assert len({prompt[:10] for prompt in prompts}) == 3, "without ids nothing is shared"
    path.write_text("timestamp,input_length,output_length,hash_ids\n7,600,3,0 9\n5,600,3,0 8\n", encoding="utf-8")
    assert [(one.arrival_s, one.hash_ids) for one in read_trace(path)] == [(0.0, (0, 8)), (0.002, (0, 9))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOONCAKE + '{"timestamp": 1, "input_length": 3', "line 5: must be a JSON object"),
        (MOONCAKE + "7,7,7", "line 5: "),
        (MOONCAKE + '{"timestamp": 1, "input_length": 3}', "line 5: must have the field output_length"),
        (MOONCAKE.replace("600", "-1"), "line 2: input_length must be an integer of at least 1, got -1"),
        (MOONCAKE.replace("600", "512"), "line 2: hash_ids must have at most one entry for each 512 tokens"),
        (MOONCAKE.replace("4000", '"soon"'), "line 4: timestamp must be a number of milliseconds"),
        (AZURE.replace("879", "many"), "line 4: input_length must be an integer of at least 1, got 'many'"),
        (AZURE.replace("10,7", "10"), "line 3: must have 3 columns, got 2"),
        (AZURE.replace("ContextTokens", "Tokens"), "line 1: .* the column input_length is missing"),
        ("", "must have at least one request"),
    ],
)
def test_a_broken_line_of_a_trace_is_named(text, message, tmp_path):
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_trace(path)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "'missing.py', which does not exist"),
        (["my_file"], "such as my_file.py, got 'my_file'"),
        (["BROKEN"], "FILE must be the Python file of an extension, got .*line 1"),
        (["--workload", "x"], "--workload must be one of w, w2, .* or trace:FILE, got 'x'"),
        (["--workload", "trace:missing.jsonl"], "trace:FILE must name a file, got 'missing.jsonl'"),
        (["--workload", "burst", "--request-rate", "3"], "--request-rate is not for --workload burst"),
        (["--speed", "2"], "--speed is for --workload trace:FILE"),
        (["--workload", "trace:BROKEN"], "line 1: must be a JSON object, or a head"),
        (["--quantization", "int8"], "--quantization is not an option of nanovllm: add --package nanovllm_extras"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer >= 1, got 0"),
        (["--package", "nanovllm_extras", "--block-size", "-1"], "block_size"),
        (["--repeats", "0"], "--repeats: must be >= 1"),
        (["--goodput", "speed:3"], "--goodput: must be one of ttft"),
        (["--json", "missing/out.json"], "--json must be a file in a folder that exists"),
        (["--extra-args", '{"deadline": [1]}'], "--extra-args is for an extension"),
        (["EXTENSION", "--extra-args", '{"deadline": 1}'], "got 1 for 'deadline'"),
    ],
)
def test_bad_options_are_refused_before_an_engine_starts(arguments, message, tmp_path, extension, monkeypatch, capsys):
    monkeypatch.setattr(compare, "Side", None)
    broken = tmp_path / "broken.py"
    broken.write_text("def (:", encoding="utf-8")
    files = {"BROKEN": str(broken), "EXTENSION": extension}
    for name, file in files.items():
        arguments = [one.replace(name, file) for one in arguments]
    with pytest.raises(SystemExit) as end:
        compare.main(arguments)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_only_options_that_were_given_reach_the_engine():
    """The packages have defaults of their own."""
    assert parse([]).options == {}
    settings = parse(["--max-num-seqs", "256", "--seed", "4", "--goodput", "ttft:500", "tpot:50"])
    assert settings.options == {"max_num_seqs": 256, "seed": 4}
    assert (settings.seed, settings.goodput) == (4, {"ttft": 500.0, "tpot": 50.0})


def test_requests_that_do_not_fit_are_named():
    load = make_load("conversations", 8, float("inf"), 0)
    compare.check_lengths(load, 128 + 3 * 64)
    with pytest.raises(ValueError, match="request 6 of the workload has 320 tokens"):
        compare.check_lengths(load, 128 + 3 * 64 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["nanovllm", "nanovllm_extras"])
def test_the_command_compares_two_processes(package, extension, tmp_path):
    out = tmp_path / "out.json"
    run = run_command(extension, "--package", package, "--json", str(out), "--num-prompts", "4", "--repeats", "2")
    assert run.returncode == 0, run.stderr
    assert "2 of 4 requests differ" in run.stdout
    assert "an extension may print" in run.stderr
    assert "an extension may print" not in run.stdout
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["tokens"]["differing"] == [1, 3]
    assert min(report["base_peak_memory_bytes"], report["extension_peak_memory_bytes"]) > 100 * 2**20
    assert report["figures"]["waste"]["verdict"] == "equal"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [("raise OSError('no disk')", "OSError: no disk"), ("import os; os._exit(7)", "has ended with status 7")],
)
def test_an_extension_that_fails_ends_the_command(fault, message, tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(
        f"from nanovllm.scheduler import Scheduler\nclass Failing(Scheduler):\n    def schedule(self):\n"
        f"        {fault}\nscheduler_cls = Failing\n",
        encoding="utf-8",
    )
    run = run_command(str(path), "--num-prompts", "1")
    assert run.returncode == 1
    assert f"the extension has failed: {message}" in run.stderr or message in run.stderr


def run_command(*arguments):
    command = [sys.executable, "-m", "nanovllm_extras", "bench", "compare", *arguments, "--num-kv-blocks", "64"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
