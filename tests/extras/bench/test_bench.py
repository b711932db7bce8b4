"""`nanovllm bench serve`: does it offer the load that it was asked for, and measure what the server did?

Oracles: a scripted server that notes when it wrote each token, by the same clock; the exponential distribution; plain
arithmetic on times that were written down; `statistics` of the standard library.

Seen to fail when broken: gaps that are even, or whose mean is twice the asked; a load that waits for answers; a bound
that does not hold; times from the departure that was drawn instead of the real one; TPOT divided by all tokens; the
chunk that only tells the end, or the role, counted as a token; chunks counted where the server counts tokens; failed
requests among the times; goodput that looks at one limit only.
"""

import asyncio
import itertools
import json
import math
import re
import statistics
import time
import types
from collections import Counter

import pytest

from nanovllm_extras.bench import benchmark, client
from nanovllm_extras.bench.load_generator import Exchange, draw_departures, offer
from nanovllm_extras.bench.report import Options, summarize
from nanovllm_extras.bench.results import Result, read_result
from nanovllm_extras.bench.workloads import make_prefix_repetition, make_random
from tests.extras.scripted_server import ScriptedServer, running


@pytest.fixture
def server():
    with running(ScriptedServer()) as server:
        yield server


def bench(server, tmp_path, *options, status=0):
    """Run the command; returns what it saves."""
    arguments = ["--base-url", server.url, "--disable-tqdm", "--save-detailed", "--result-dir", tmp_path]
    arguments += ["--result-filename", "out.json", "--random-input-len", 5, "--random-output-len", 3, *options]
    assert benchmark.main(list(map(str, arguments))) == status
    return json.loads((tmp_path / "out.json").read_text())


# ---- when requests leave


def test_departures_are_a_poisson_process():
    """Gaps follow the exponential distribution: Kolmogorov and Smirnov's distance is below that of 1 in 1,000."""
    num_gaps, rate = 4000, 8.0
    departures = draw_departures(num_gaps + 1, rate, seed=3)
    assert departures[0] == 0.0
    assert draw_departures(3, math.inf) == [0.0, 0.0, 0.0], "without a rate all leave at once"
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(departures))
    distances = [abs(1 - math.exp(-rate * gap) - (i + 0.5) / num_gaps) for i, gap in enumerate(gaps)]
    assert max(distances) < 1.95 / math.sqrt(num_gaps)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_keeps_the_rate_and_changes_the_spread(burstiness):
    departures = draw_departures(20_000, 8.0, burstiness, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(departures)]
    mean, deviation = statistics.mean(gaps), statistics.stdev(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert deviation / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_the_loop_is_open():
    """Requests leave at their moments, though no answer comes before the last has left."""
    all_gone = asyncio.Event()
    num_sent = 0

    async def send(body, exchange):
        nonlocal num_sent
        num_sent += 1
        if num_sent == 5:
            all_gone.set()
        await all_gone.wait()

    async def run():
        return await asyncio.wait_for(offer([b""] * 5, [0.0, 0.02, 0.04, 0.06, 0.1], send), timeout=30)

    exchanges = asyncio.run(run())
    first = exchanges[0].due
    assert [round(exchange.due - first, 6) for exchange in exchanges] == [0.0, 0.02, 0.04, 0.06, 0.1]
    assert all(exchange.sent >= exchange.due for exchange in exchanges)


def test_a_bound_holds_back_what_is_too_much():
    now = peak = 0

    async def send(body, exchange):
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0.01)
        now -= 1

    start = time.perf_counter()
    exchanges = asyncio.run(offer([b""] * 7, [0.0] * 7, send, max_concurrency=2))
    assert peak == 2
    assert exchanges[-1].sent - start > 0.029  # the fourth pair, after three that took their time
    assert exchanges[-1].sent - exchanges[-1].due > 0.029  # and so says its lag


# ---- what they ask


def test_random_prompts_have_the_lengths_that_were_asked_for():
    works = make_random(500, 100, 20, range_ratio=0.5, prefix_len=7, vocab_size=50, seed=2)
    lens = [len(work.prompt_token_ids) - 7 for work in works]
    assert (min(lens), max(lens)) == (50, 150)
    assert statistics.mean(lens) == pytest.approx(100, rel=0.05)
    assert {work.output_len for work in works} == set(range(10, 31))
    assert {token_id for work in works for token_id in work.prompt_token_ids} == set(range(50))
    assert len({tuple(work.prompt_token_ids[:7]) for work in works}) == 1
    assert len({tuple(work.prompt_token_ids[7:17]) for work in works}) == 500
    assert works == make_random(500, 100, 20, range_ratio=0.5, prefix_len=7, vocab_size=50, seed=2)
    assert works != make_random(500, 100, 20, range_ratio=0.5, prefix_len=7, vocab_size=50, seed=3)


def test_each_prefix_is_shared_by_as_many_prompts():
    works = make_prefix_repetition(20, prefix_len=6, suffix_len=4, num_prefixes=5, output_len=9, seed=2)
    assert {len(work.prompt_token_ids) for work in works} == {10}
    prefixes = [tuple(work.prompt_token_ids[:6]) for work in works]
    assert sorted(Counter(prefixes).values()) == [4] * 5
    assert prefixes != sorted(prefixes, key=prefixes.index), "those of a prefix do not come one after the other"
    assert len({tuple(work.prompt_token_ids[6:]) for work in works}) == 20
    assert all(len(work.text.split()) == 10 for work in works)
    assert len({" ".join(work.text.split()[:6]) for work in works}) == 5


# ---- what is measured


def test_times_are_those_of_the_server(server, tmp_path):
    """Sent before it was received, read after it was written, by little."""
    server.texts, server.ttft, server.gap = ["a", "b", "c", "d"], 0.2, 0.06
    report = bench(server, tmp_path, "--num-prompts", 6, "--request-rate", 100)
    served = [one for one in server.served if one.path == "/v1/completions"]
    assert [report[name] for name in ("completed", "failed", "total_output_tokens")] == [6, 0, 24]
    assert report["total_input_tokens"] == 6 * 7  # as the server says
    for metric, truth in {
        "ttft": [one.written[0] - one.received for one in served],
        "tpot": [(one.written[-1] - one.written[0]) / 3 for one in served],
        "itl": [b - a for one in served for a, b in itertools.pairwise(one.written)],
        "e2el": [one.written[-1] - one.received for one in served],
    }.items():
        # On a busy machine a thread is late by about 20 ms; between two tokens, mostly both are.
        near = 60 if metric in ("ttft", "e2el") else 12
        assert report[f"p50_{metric}_ms"] == pytest.approx(1e3 * statistics.median(truth), abs=near), metric
    assert report["mean_ttft_ms"] > 200 - 0.1
    assert report["mean_itl_ms"] > 60 - 12
    ends = max(one.written[-1] for one in served) - served[0].received
    assert report["duration"] == pytest.approx(ends, abs=0.1)
    assert report["output_throughput"] == pytest.approx(24 / report["duration"])
    assert report["generated_texts"] == ["abcd"] * 6


def exchange(*chunks, sent=10.0, status=200):
    """Of (seconds after it was sent, chunk)."""
    reads = [(sent + after, b"data: " + json.dumps(chunk).encode() + b"\n\n") for after, chunk in chunks]
    return Exchange(sent - 0.5, sent, reads, 99.0, status)


def completion(text, finish_reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def chat(finish_reason=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
}


@pytest.mark.parametrize(
    "chunks",
    [
        [(0.25, completion("a")), (0.5, completion("")), (1.75, completion("b", "length")), (2, USAGE)],
        [(0.25, completion("a")), (0.5, completion("b")), (1.75, completion("c")), (1.8, completion("", "stop")),
         (2, USAGE)],
        [(0.1, chat(role="assistant", content="")), (0.25, chat(reasoning="a")), (0.5, chat(content="b")),
         (1.75, chat(tool_calls=[{"index": 0}])), (1.8, chat("tool_calls")), (2, USAGE)],
    ],
)  # fmt: skip
def test_times_of_one_answer(chunks):
    """The first carries no text in the middle, the second no token at the end, the third none at the beginning."""
    result = read_result(exchange(*chunks), 99)
    assert result.error is None
    assert (result.lag, result.ttft, result.itls, result.e2el) == (0.5, 0.25, [0.25, 1.25], 1.75)
    assert result.tpot == 0.5  # 4 tokens, says the server, in 3 chunks
    assert (result.prompt_tokens, result.cached_tokens, result.output_tokens) == (5, 2, 4)


def test_times_of_answers_without_texts_or_usage():
    result = read_result(exchange((1.5, completion("", "length")), (2, USAGE)), 99)
    assert (result.error, result.ttft, result.e2el, result.output_tokens) == (None, 1.5, 1.5, 4)
    result = read_result(exchange((1, completion("a")), (2, completion("b", "stop"))), 99)
    assert (result.error, result.prompt_tokens, result.output_tokens, result.tpot) == (None, 99, 2, 1.0)


def test_what_counts_as_failed():
    for broken, message in (
        (exchange((1, {"error": {"message": "full"}}), status=429), "HTTP 429: .*full"),
        (exchange((1, completion("a")), (2, {"error": {"message": "no more"}})), "error in the stream: .*no more"),
        (exchange((1, completion("a")), (2, completion("b"))), "ended before"),
        (exchange((1, completion("", "stop"))), "no token"),
        (Exchange(0.0, 0.0, [(1.0, b"data: {\n\n")], 2.0, 200), "not JSON"),
        (Exchange(0.0, 0.0, [], 2.0, None, "ClientError: gone"), "gone"),
    ):
        assert re.search(message, read_result(broken, 99).error)


def make_result(sent, chunk_times, tokens, error=None):
    return Result(sent, 0.0, error, 10, 0, tokens, True, chunk_times)


def test_figures_of_a_load():
    results = [
        make_result(0.0, [1.0, 1.5, 2.0], 3),
        make_result(1.0, [1.2, 4.0], 5),
        make_result(1.9, [2.0], 1),
        make_result(0.0, [9.0], 1, error="HTTP 500"),
    ]
    report = summarize(results, Options(percentiles=(25, 90), goodput={"ttft": 500, "tpot": 600}))
    assert [report[name] for name in ("completed", "failed", "duration")] == [3, 1, 4.0]
    assert [report[name] for name in ("total_input_tokens", "total_output_tokens")] == [30, 9]
    assert [report[name] for name in ("request_throughput", "output_throughput")] == [3 / 4, 9 / 4]
    assert report["max_concurrent_requests"] == 3
    assert report["request_goodput"] == pytest.approx(1 / 4)  # one misses TTFT, one TPOT
    values = {"ttft": [1000, 200, 100], "tpot": [500, 700], "itl": [500, 500, 2800], "e2el": [2000, 3000, 100]}
    for metric, truth in values.items():
        assert report[f"mean_{metric}_ms"] == pytest.approx(statistics.mean(truth))
        assert report[f"median_{metric}_ms"] == pytest.approx(statistics.median(truth))
        assert report[f"std_{metric}_ms"] == pytest.approx(statistics.pstdev(truth))
        assert report[f"p25_{metric}_ms"] == pytest.approx(statistics.quantiles(truth, n=4, method="inclusive")[0])
        assert report[f"p90_{metric}_ms"] == pytest.approx(statistics.quantiles(truth, n=10, method="inclusive")[8])


# ---- the command


def test_requests_say_what_was_asked(server, tmp_path):
    options = ["--num-prompts", 2, "--ignore-eos", "--top-k", 5, "--extra-body", '{"priority": 1}', "--header", "X-A=b"]
    bench(server, tmp_path, *options, "--num-warmups", 1)
    warm_up, *served = [one for one in server.served if one.path == "/v1/completions"]
    works = make_random(2, 5, 3)
    for one, work in zip(
        sorted(served, key=lambda one: one.body["prompt"] != works[0].prompt_token_ids), works, strict=True
    ):
        assert one.body == {
            "model": "scripted", "prompt": work.prompt_token_ids, "max_tokens": 3, "temperature": 0.0, "top_k": 5,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "priority": 1,
        }  # fmt: skip
        assert one.headers["x-a"] == "b"
    assert warm_up.body["prompt"] not in [work.prompt_token_ids for work in works]


def test_chats(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.usage = {"prompt_tokens_details": {"cached_tokens": 4}}
    report = bench(
        server, tmp_path, "--num-prompts", 2, "--backend", "openai-chat", "--dataset-name", "prefix_repetition"
    )
    served = [one for one in server.served if one.path == "/v1/chat/completions"]
    assert len(served) == 2
    assert len(served[0].body["messages"][0]["content"].split()) == 256 + 256
    assert served[0].body["max_completion_tokens"] == 128
    assert served[0].headers["authorization"] == "Bearer secret"
    assert (report["total_cached_tokens"], report["total_output_tokens"]) == (8, 6)


def test_several_rates_are_several_loads_and_a_picture(server, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ["--num-prompts", 3, "--request-rate", 50, "inf", "--max-concurrency", 2, "--goodput", "ttft:1000"]
    report = bench(server, tmp_path, *options, "--plot", tmp_path / "out.png", "--metadata", "machine=this one")
    assert [run["request_rate"] for run in report["runs"]] == [50, "inf"]
    assert all(run["completed"] == 3 and run["machine"] == "this one" for run in report["runs"])
    assert server.peak <= 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("Time to first token") == 2
    assert "within the limits" in printed


def test_refused_requests_are_told(server, tmp_path, capsys):
    server.status = 429
    report = bench(server, tmp_path, "--num-prompts", 2, status=1)
    assert (report["completed"], report["failed"]) == (0, 2)
    assert "HTTP 429" in report["errors"][0]
    assert "as it was told" in capsys.readouterr().err


def test_a_dead_port_fails_soon_with_its_address(capsys, monkeypatch):
    monkeypatch.setattr(client, "REACHABLE_S", 0.3)
    for options in ([], ["--model", "m"]):
        clock = iter([0.0, 0.2, 0.4])  # of the beginning and of two tries
        monkeypatch.setattr(client, "time", types.SimpleNamespace(perf_counter=clock.__next__))
        assert benchmark.main(["--base-url", "http://127.0.0.1:9", *options]) == 1
        waiting, failed = capsys.readouterr().err.splitlines()
        assert waiting.startswith("waiting for http://127.0.0.1:9: ")
        assert "http://127.0.0.1:9/v1/models" in failed


REQUEST_INFO = types.SimpleNamespace(real_url="http://x/v1/models")


def test_a_server_that_loads_is_waited_for_longer(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "REACHABLE_S", 0.0)
    found = client.Client._first_model
    tries = []

    async def load(self):
        tries.append(self)
        if len(tries) < 3:
            raise client.aiohttp.ClientResponseError(REQUEST_INFO, (), status=503)
        return await found(self)

    monkeypatch.setattr(client.Client, "_first_model", load)
    assert bench(server, tmp_path, "--num-prompts", 1)["completed"] == 1
    assert len(tries) == 3


BAD = {"--request-rate": ("0", "nan"), "--goodput": ("speed:3", "ttft"), "--percentile-metrics": ("ttft,x",)}
BAD |= {"--metric-percentiles": ("101",), "--header": ("x",), "--extra-body": ("[1]",), "--num-prompts": ("0",)}
BAD |= {
    "--random-range-ratio": ("1",),
    "--temperature": ("-1",),
    "--random-prefix-len": ("-1",),
    "--num-warmups": ("-1",),
}


def test_bad_options_are_named(capsys):
    for option, value in [(option, value) for option, values in BAD.items() for value in values]:
        with pytest.raises(SystemExit) as ended:
            benchmark.main([option, value])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert option in error
        assert value.split(",")[-1] in error
