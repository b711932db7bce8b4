"""Every benchmark that the documents name runs, with little work, and measures what it says.

Figures that depend on no clock are computed once more by other means; times are only held against each other.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from benchmarks import (
    busy,
    cold_start,
    cpu,
    cpu_kernels,
    decode_profile,
    instruction_sets,
    kv_store,
    kv_tiers,
    layer_groups,
    long_prefill,
    offline,
    preemption,
    roofline,
    sampling,
    speculation,
    step_overhead,
)
from benchmarks.common import QWEN3_06B, ModelShape, named_workload, random_workload, read_config
from benchmarks.roofline import Rates
from nanovllm_extras import TINY_QWEN3, LLMEngine
from nanovllm_extras.engine import full_engine
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.transfers import Transfers
from nanovllm_extras.kernels.cpu.library import NoLibraryError, load_library
from nanovllm_extras.records.moves import Moves

ROOT = Path(__file__).resolve().parents[2]
TINY_WORK = ["--num-requests", "3", "--input-len", "4", "9", "--output-len", "2", "6"]


def cells(row):
    """Of a row of a Markdown table."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


# ---- the engine's own work


def test_tiers_of_the_store_are_measured(run_main, monkeypatch, tmp_path):
    def slow(save):
        return lambda *arguments: (time.sleep(0.02), save(*arguments))

    for tier in (kv_tiers.DiskTier, kv_tiers.SharedTier):
        monkeypatch.setattr(tier, "save", slow(tier.save))
    options = ["--blocks", 2, "--repeats", 1, "--folder", tmp_path]
    lines = run_main(kv_tiers, *options, "--json", tmp_path / "out.json")
    assert lines[0] == "2 blocks of 1.75 MiB, median of 1"
    rows = {row.pop("what"): row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert len(rows) == len(lines) - 1
    for row in rows.values():
        if "gb_per_s" in row:
            assert row["gb_per_s"] * row["ms_per_block"] == pytest.approx(1.75 * 2**20 / 1e6)
    assert min(rows[f"{tier}: save"]["ms_per_block"] for tier in ("disk", "shared")) >= 20
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_step_overhead_is_the_sum_of_the_parts_that_an_engine_runs(run_main, monkeypatch, tmp_path):
    real_build_batch = full_engine.build_batch

    def slow_build_batch(*args):
        time.sleep(0.02)
        return real_build_batch(*args)

    monkeypatch.setattr(full_engine, "build_batch", slow_build_batch)
    sizes = ["--num-seqs", 2, 5, "--context-len", 20, "--block-size", 4, 16]
    options = ["--option", "attention_backend=torch", "--option", "enforce_eager=True"]
    lines = run_main(step_overhead, *sizes, *options, "--steps", 1, "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["core"], report["options"]) == (False, {"attention_backend": "torch", "enforce_eager": True})
    rows = report["rows"]
    assert [(r["num_seqs"], r["context_len"], r["block_size"]) for r in rows] == [
        (2, 20, 4), (2, 20, 16), (5, 20, 4), (5, 20, 16)
    ]  # fmt: skip
    assert [[float(x) for x in line.split()] for line in lines[1:]] == [
        [round(row[name]) for name in lines[0].split()[:-1]] for row in rows
    ]
    for row in rows:  # of one step each
        assert row["sum"] == pytest.approx(row["schedule"] + row["build_batch"] + row["update"], abs=0.3)
        assert row["build_batch"] >= 20_000  # the sleep, in microseconds
        assert min(row["schedule"], row["update"], row["outputs"]) > 0
        assert row["step"] > row["sum"] + row["outputs"]


@pytest.mark.slow
def test_speculation_compares_the_same_answers(run_main):
    """Twelve prompts and four sums; drafts are right where the answer repeats its prompt."""
    rows = [line for line in run_main(speculation, "--rounds", 1) if re.search(r"\d\.\d\dx ", line)]
    assert len(rows) == 12 + 4
    sums = {row[:12].strip(): row.split()[-1] for row in rows if " all " in row}
    assert sums.keys() == {"asked again", "passage", "explanation", "fact"}
    assert sums["asked again"] == "100%"


@pytest.mark.slow
def test_the_machine_is_quiet_and_busy_in_turns(run_main, monkeypatch, tmp_path):
    """A busy process runs during every second measured run, and none is left."""
    started, running, real_serve = [], [], busy.serve

    def popen(*args, **kwargs):
        started.append(subprocess.Popen(*args, **kwargs))
        return started[-1]

    def serve(llm, workload):
        running.append(sum(process.poll() is None for process in started))
        real_serve(llm, workload)
        return [0.0, 40.0, 10.0, 50.0, 20.0][len(running) - 1]

    monkeypatch.setattr(busy, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    monkeypatch.setattr(busy, "serve", serve)
    path = tmp_path / "out.json"
    sizes = ["--workloads", "W2", "--rounds", 2, "--processes", 2]
    lines = run_main(busy, "--model", TINY_QWEN3, *sizes, "--json", path)
    assert running == [0, 0, 2, 0, 2]
    assert len(started) == 4
    assert all(process.poll() is not None for process in started)
    assert cells(lines[-1]) == ["W2", "45.0", "15.0", "32%"]  # the median of 0.25 and 0.4, rounded to even
    assert json.loads(path.read_text(encoding="utf-8"))["W2"] == {"quiet": [40.0, 50.0], "busy": [10.0, 20.0]}


def test_preemption_moves_and_computes_the_whole_context(run_main, monkeypatch):
    moves, computed = [], []
    real_copy, real_run = Transfers.before, ModelRunner.run

    def copy(self, copies):
        copies = Moves.of(copies)
        moves.append((copies.swap_outs, copies.swap_ins))
        real_copy(self, copies)

    def run(self, batch):
        computed.append(len(batch.input_ids))
        return real_run(self, batch)

    monkeypatch.setattr(Transfers, "before", copy)
    monkeypatch.setattr(ModelRunner, "run", run)
    lines = run_main(preemption, "--context-len", 33, 48, "--rounds", 1)
    assert computed == [33, 33, 48, 48]  # a warm-up and a round each
    outs = [out for out, _ in moves if out]
    assert [len(set(out)) for out in outs] == [3] * 4  # blocks of 16
    backs = [back for _, back in moves if back]
    assert [[(device, host) for host, device in back] for back in backs] == outs
    for line, context_len in zip(lines[-2:], (33, 48), strict=True):
        context, swap, recompute, ratio = map(float, line.replace("ms", "").split())
        assert context == context_len
        assert ratio == pytest.approx(recompute / swap, rel=0.1, abs=0.1)


def test_the_store_saves_and_loads_a_whole_prompt(run_main):
    sizes = ("--prompt-len", 70, "--num-requests", 2, "--input-len", 20, "--output-len", 15)
    options = ("--model", TINY_QWEN3, "--load-format", "auto", "--rounds", 1, "--tiers", "memory")
    lines = run_main(kv_store, *options, *sizes)
    found = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert lines[0].startswith("prompt of 70 tokens")
    assert float(found["computed"][1]) > 0 < float(found["memory"][1])
    assert sum("0 blocks were dropped" in line for line in lines) == 1
    shares = [float(line.split("%")[0].split()[-1]) for line in lines if line.startswith("  keys")]
    assert 0 < shares[0] < 100 > shares[1] > 0


CASES_OF_LAYER_GROUPS = [  # (model, groups, bytes of a token in all layers, blocks of a window)
    ("gpt-oss", 2, 24 * 2 * 8 * 64 * 2, 9),
    ("Gemma-4-E2B", 3, (12 * 256 + 3 * 512) * 2 * 2, 33),
]


def test_sequences_that_fit_are_counted_as_by_hand(run_main):
    """1 GiB and 4,096 tokens in blocks of 16: 256 blocks, and 9 or 33 in each group with a window of 128 or 512.

    With one table, a block of gpt-oss-20b has 24 layers of K and V of 8 heads of 64 numbers of 2 bytes. One of Gemma 4
    E2B has 12 layers with a head of 256 numbers and 3 layers with one of 512.
    """
    lines = run_main(layer_groups, "--gib", 1, "--context-len", 4096)
    for model, num_groups, bytes_per_token, of_window in CASES_OF_LAYER_GROUPS:
        one_table, grouped = (int(one) for one in next(line for line in lines if line.startswith(model)).split()[2:4])
        num_blocks = 2**30 // (bytes_per_token * 16)
        assert one_table == (num_blocks - 1) // 256
        most = num_groups * num_blocks // (256 + (num_groups - 1) * of_window)
        assert most - 1 <= grouped <= most, "a prompt needs room for its last chunk"


def test_short_prompts_wait_for_the_long_one_or_go_beside_it(run_main, monkeypatch, tiny_checkpoint):
    """With a clock that ticks once per step, times to first token can be told in advance."""
    steps = Counter()
    real_step = LLMEngine.step

    def step(self):
        steps[None] += 1
        return real_step(self)

    monkeypatch.setattr(LLMEngine, "step", step)
    monkeypatch.setattr(long_prefill, "time", SimpleNamespace(monotonic=lambda: steps.total()))
    monkeypatch.setattr(long_prefill, "MODEL", tiny_checkpoint[0])
    sizes = ["--long-len", 300, "--short-len", 8, "--num-short", 3, "--budget", 64]
    lines = run_main(long_prefill, *sizes, "--thresholds", 0, 32)
    seen = [[float(figure) for figure in re.findall(r"([\d.]+) s", line)] for line in lines[-2:]]
    # 300 = 4 * 64 + 44: two of 8 fit beside the last 44. Capped, 300 = 9 * 32 + 12, and the short ones go at once.
    assert seen == [[5.0, 5.0], [1.0, 10.0]]


# ---- the start


@pytest.mark.slow  # two starts
def test_a_cold_start_is_told_part_by_part(run_main, monkeypatch, tmp_path):
    real_run = cold_start.run
    usual_cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    first, caches, elapsed = {}, [], []

    def run(args, cache):
        assert list(Path(cache).iterdir()) == []
        caches.append(cache)
        if len(caches) > 1:
            return {part: 2 * seconds for part, seconds in first.items()}
        start = time.perf_counter()
        first.update(real_run(args, usual_cache))  # where other tests have compiled the kernels
        elapsed.append(time.perf_counter() - start)
        return first

    monkeypatch.setattr(cold_start, "run", run)
    lines = run_main(cold_start, "--repeats", 2, "--json", tmp_path / "out.json")
    assert len(caches) == 3
    assert len(set(caches)) == 1
    assert min(first.values()) > -0.01  # a part that is counted twice leaves less than nothing for the rest
    assert 0.5 * elapsed[0] < sum(first.values()) < elapsed[0]  # the process also has to end
    rows = [cells(line) for line in lines[2:]]
    assert [row[0] for row in rows] == [*first, "sum"]
    for label, once, later in rows[:-1]:
        assert float(once) == pytest.approx(first[label], abs=0.006)
        assert float(later) == pytest.approx(2 * first[label], abs=0.006)
    assert float(rows[-1][1]) == pytest.approx(sum(first.values()), abs=0.006)
    assert json.loads((tmp_path / "out.json").read_text())["first_ever_s"] == first
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = " ".join(page.partition("## The start")[2].partition("\n## ")[0].split())
    assert [part for part in first if f"`{part}`" not in section] == []


# ---- on a CPU


@pytest.fixture
def small_kernels(monkeypatch):
    """`cpu_kernels` with matrices of a few KiB, nothing that compiles for seconds, and in float32."""
    try:
        load_library(torch.float32)
    except NoLibraryError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cpu_kernels, "LAYER_SHAPES", [(64, 32), (32, 64)])
    monkeypatch.setattr(cpu_kernels, "HEAD_SHAPE", (96, 32))
    monkeypatch.setattr(cpu_kernels, "NUM_LAYERS", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(cpu_kernels, "LARGER_THAN_CACHES", 1 << 16)
    monkeypatch.setattr(cpu_kernels, "measure_read_bandwidth", lambda: 25e9)


def test_cpu_kernels_race(small_kernels, run_main, tmp_path):
    options = ["--dtype", "float32", "--batch", 1, 3, "--context-len", 20, "--repeats", 1]
    lines = run_main(cpu_kernels, *options, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [
        ("products", 1), ("products", 3), ("attention", 1), ("attention", 3)
    ]  # fmt: skip
    assert all(ms > 0 for row in rows for ms in row["milliseconds"].values())
    assert all(
        line.startswith(f"{row['kind']}, batch {row['batch']}: ") for line, row in zip(lines, rows, strict=False)
    )


def test_contenders_compute_the_same_products(small_kernels):
    for batch, contenders in cpu_kernels.make_products([1, 3], 0, torch.float32):
        outputs = [run() for run in contenders.values()]
        assert len(outputs) == 3
        assert [tuple(y.shape) for y in outputs[0]] == [(batch, n) for n in (64, 32, 64, 32, 96)]
        for others in outputs[1:]:
            for y, expected in zip(others, outputs[0], strict=True):
                torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)


def test_parts_of_a_decode_step_add_up(run_main, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    durations = []
    real_step = LLMEngine.step

    def step(self):
        start = time.thread_time()
        output = real_step(self)
        durations.append(1e3 * (time.thread_time() - start))
        return output

    monkeypatch.setattr(LLMEngine, "step", step)
    # the clock of this thread, which stands still while other programs run
    monkeypatch.setattr(decode_profile, "time", SimpleNamespace(perf_counter=time.thread_time))
    monkeypatch.setattr(decode_profile, "measure_rates_apart", lambda dtype: Rates(1e9, 1e15))  # memory is the limit
    options = ["--model", TINY_QWEN3, "--num-seqs", 3, "--context-len", 20, "--steps", 2]
    lines = run_main(decode_profile, *options, "--json", tmp_path / "out.json", "--png", tmp_path / "out.png")
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    measured, bound = row["measured_ms"], row["bound_ms"]
    # prefill, a decode, and the one that is measured
    assert sum(measured.values()) == pytest.approx(durations[2], rel=0.02, abs=0.2)
    assert min(measured.values()) > 0  # a part that is counted twice leaves less than nothing for the rest
    shape = ModelShape.from_folder(TINY_QWEN3)
    body_ms = 1e3 * 2 * shape.body_params / 1e9  # bfloat16
    assert sum(bound[part] for part in decode_profile.PROJECTIONS) == pytest.approx(body_ms)
    assert bound["attention"] == pytest.approx(1e3 * 2 * 3 * 20 * shape.kv_values_per_token / 1e9)
    labels = [cells(line)[0] for line in lines if line.startswith("| ")]
    assert labels == ["milliseconds", *decode_profile.PARTS, "**step**"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_sampling_times_every_case(run_main):
    sizes = ["--num-rows", 3, "--vocab-size", 200, "--rounds", 1, "--device", "cpu"]
    report = json.loads(run_main(sampling, *sizes, "--json")[-1])
    assert set(report["results"]) == {"argmax alone", sampling.ONE_TOP_P, *sampling.CASES}
    assert all(result["ms"] > 0 for result in report["results"].values())
    assert len(run_main(sampling, *sizes)) == 1 + len(report["results"])


def test_rooflines_of_the_workloads_are_printed(run_main, monkeypatch):
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "GEMM_SHAPES", [(16, 32, 64)])
    rates = json.loads(run_main(roofline, "--rates-only", "--dtype", "float32")[-1])
    assert min(rates.values()) > 0
    monkeypatch.setattr(roofline, "measure_rates", lambda *_: Rates(25e9, 1e12))
    lines = run_main(roofline)
    assert [line.split()[0] for line in lines[1:]] == ["W", "W2", "W3"]
    # W2 is one request of 64 tokens out: each step reads at least all weights, in bfloat16
    shape = ModelShape.from_folder(QWEN3_06B)
    limit = 25e9 / (2 * (shape.body_params + shape.head_params))
    assert 0.9 * limit < float(lines[2].split()[1]) <= limit * 1.001


# ---- offline throughput


def run_tiny(run_main, module, path, *options):
    lines = run_main(module, "--model", TINY_QWEN3, "--device", "cpu", *TINY_WORK, "--json", path, *options)
    report = json.loads(path.read_text())
    assert report["requests"] == 3
    assert 12 <= report["prompt_tokens"] <= 27
    assert 6 <= report["output_tokens"] <= 18
    elapsed_s = report["output_tokens"] / report["output_tokens_per_second"]
    assert elapsed_s == pytest.approx(report["elapsed_s"], abs=0.001)
    if "ttft_s" in report:
        assert 0 < report["ttft_s"]["p50"] <= report["elapsed_s"] + 0.001
    printed = {line.split()[0] for line in lines}
    assert set(report) <= printed
    return report


def test_offline_serves_the_work(run_main, tmp_path):
    report = run_tiny(run_main, offline, tmp_path / "out.json", "--rates", 25, 1000, "--num-kv-blocks", 64)
    workload = random_workload(3, (4, 9), (2, 6), 0, ModelShape.from_folder(TINY_QWEN3).vocab_size)
    assert report["steps"] == max(workload.output_lens)  # all prompts fit into the first
    assert report["output_tokens"] == sum(workload.output_lens)
    assert report["kv_blocks"] == 64
    bound = report["roofline"]
    assert bound["num_decode_steps"] == max(workload.output_lens) - 1
    weights = ModelShape.from_folder(TINY_QWEN3)
    least_bytes = bound["num_decode_steps"] * 2 * (weights.body_params + weights.head_params)
    assert least_bytes < bound["decode_bytes"] < 1.1 * least_bytes


def test_offline_serves_the_same_work_through_transformers(run_main, tmp_path):
    report = run_tiny(run_main, offline, tmp_path / "out.json", "--engine", "hf", "--no-roofline")
    assert "roofline" not in report
    assert report["ttft_s"]
    assert report["machine"]["transformers"]


@pytest.mark.parametrize("options", [["--extras"], []])
def test_bench_serves_the_work(run_main, tmp_path, options):
    report = run_tiny(run_main, bench, tmp_path / "out.json", *options)
    assert (report["workload"], report["model"]) == ("random", "tiny-qwen3")
    assert ("ttft_s" in report) == (options == ["--extras"])  # the others record no times of requests


@pytest.mark.slow
def test_bench_runs_from_any_folder(tmp_path):
    """A copy of the one file runs with an installed nanovllm."""
    shutil.copy(bench.__file__, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    (tmp_path / "packages").mkdir()
    for package in ("nanovllm", "nanovllm_extras"):
        (tmp_path / "packages" / package).symlink_to(ROOT / package)
    command = [sys.executable, "bench.py", "--model", str(TINY_QWEN3), "--device", "cpu", *TINY_WORK]
    done = subprocess.run(
        # without kernels, which would be compiled again for each folder
        [*command, "--load-format", "safetensors", "--attention-backend", "torch"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "output_tokens_per_second" in done.stdout, done.stderr


def test_bench_has_the_shape_and_the_workloads_of_the_benchmarks(monkeypatch, tmp_path):
    config = read_config(QWEN3_06B)
    assert {name: config[name] for name in bench.QWEN3_06B} == bench.QWEN3_06B
    for options, name in ((["--device", "cpu"], "W"), (["--workload", "W2"], "W2"), (["--device", "cuda"], "offline")):
        monkeypatch.setattr(sys, "argv", ["bench.py", *options])
        args, expected = bench.parse_args(tmp_path), named_workload(name, config["vocab_size"])
        assert list(map(len, args.prompts)) == list(map(len, expected.prompts))
        assert args.output_lens == expected.output_lens
    assert (expected.num_prompt_tokens, expected.num_output_tokens) == (142_827, 133_966)


def test_bench_passes_options_of_the_engine_on(monkeypatch, tmp_path, capsys):
    options = ["--block-size", "32", "--quantization", "int8", "--speculative-config", '{"method": "ngram"}']
    options += ["--enforce-eager", "--enable-overlap", "false"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    args = bench.parse_args(tmp_path)
    assert (args.block_size, args.quantization, args.speculative_config) == (32, "int8", {"method": "ngram"})
    assert (args.enforce_eager, args.enable_overlap, args.enable_cuda_graphs) == (True, False, None)
    assert args.extras, "options that only the extras have imply them"
    monkeypatch.setattr(sys, "argv", ["bench.py", *options[:2]])
    assert not bench.parse_args(tmp_path).extras
    monkeypatch.setattr(sys, "argv", ["bench.py", "--engine", "hf", "--quantization", "int8"])
    with pytest.raises(SystemExit):
        bench.parse_args(tmp_path)
    assert "--quantization is for nanovllm, not for --engine hf" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_run_side_by_side(run_main, monkeypatch, tmp_path):
    """`benchmarks.offline` in a process of its own, as `benchmarks.cpu` starts it."""
    arguments = ["--model", TINY_QWEN3, "--first", 2, "--no-roofline", "--num-kv-blocks", 128]
    options = [option for argument in arguments for option in ("--arg", f"nanovllm:{argument}")]
    settings = ["--workloads", "W3", "--repeats", 1, "--retries", 0, "--quiet-timeout", 0]
    lines = run_main(cpu, "--engines", "nanovllm", *settings, *options, "--json", tmp_path / "out.json")
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["requests"], run["output_tokens"], run["model"]) == (2, 64, "tiny-qwen3")
    assert cells(lines[-1])[1].startswith(str(round(run["output_tokens_per_second"], 2)))


def test_sets_of_instructions_are_compared_by_turns(run_main, monkeypatch, tmp_path):
    """A ratio is of runs of one turn, so a machine that becomes slower between two turns does not change it."""
    seconds = iter([1.0, 3.0, 60.0, 20.0])  # all, avx2; then the other way round, on a machine 20 times as slow
    order = []

    def measure(work, name):
        order.append(name)
        return {"bench.py": next(seconds)}

    monkeypatch.setattr(instruction_sets, "measure", measure)
    file = tmp_path / "out.json"
    file.write_text('{"works": {"ladder": "measured before"}}')
    run_main(instruction_sets, "--works", "W2", "--turns", "2", "--json", str(file))
    works = json.loads(file.read_text())["works"]
    assert order == ["all", "avx2", "avx2", "all"]
    assert works["W2"]["avx2 / all"] == {"bench.py": 3.0}
    assert works["ladder"] == "measured before"
