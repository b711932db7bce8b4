"""The GPU suite without a GPU: what it computes from a trace, what it runs and repeats, and one rehearsal of it all."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_suite, roofline
from benchmarks.common import QWEN3_06B, ModelShape, named_workload, random_workload
from benchmarks.gpu import jobs as gpu_jobs_module
from benchmarks.gpu import machine
from benchmarks.gpu.jobs import Job, gpu_jobs, rehearsal_jobs
from benchmarks.gpu.profile import Event, busy_by_kind, describe, device_events, kind_of, top_kernels
from benchmarks.gpu.report import best_offline, markdown, offline_table
from benchmarks.offline import parse_args as parse_offline_args
from benchmarks.roofline import Rates, workload_roofline

PATH = Path("does-not-exist.json")
H200 = Rates(read_bytes_per_s=4.3e12, gemm_flops_per_s=780e12)

# ---- from a trace


def complete(name, start, duration, category="kernel", tid=7):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": tid}


def test_device_events_are_kernels_copies_and_fills_in_order():
    trace = [
        complete("late", 9, 1),
        complete("Memcpy HtoD", 5, 1, "gpu_memcpy"),
        complete("aten::mm", 0, 50, "cpu_op"),
        complete("Memset", 1, 1, "gpu_memset"),
        complete("decode", 2, 9, "gpu_user_annotation"),
        {"ph": "M", "name": "process_name"},
        {"ph": "i", "cat": "kernel", "name": "instant", "ts": 3},
    ]
    assert [event.name for event in device_events(trace)] == ["Memset", "Memcpy HtoD", "late"]


def test_without_a_gpu_operators_count_that_no_other_called():
    trace = [
        complete("aten::linear", 0, 10, "cpu_op"),
        complete("aten::mm", 1, 8, "cpu_op"),
        complete("aten::mul", 10, 2, "cpu_op"),
        complete("aten::add", 3, 20, "cpu_op", tid=8),  # another thread
    ]
    assert {event.name for event in device_events(trace)} == {"aten::linear", "aten::mul", "aten::add"}


def brute_busy(events):
    """Microsecond by microsecond: how many have a kernel, out of how many."""
    busy = {t for event in events for t in range(int(event.start), int(event.start + event.duration))}
    start, end = min(e.start for e in events), max(e.start + e.duration for e in events)
    return len(busy), end - start


@pytest.mark.parametrize(
    "intervals",
    [
        [(0, 5)],
        [(0, 5), (5, 5)],
        [(0, 5), (8, 2)],
        [(0, 10), (2, 3), (20, 1)],  # one inside of another
        [(0, 10), (5, 10), (14, 3), (30, 2)],  # a chain of overlaps
        [(100, 3), (100, 7), (101, 1)],
        [(7, 2), (0, 3)],  # in no order
    ],
)
def test_busy_time_is_the_length_of_the_union(intervals):
    events = [Event("gemm" if i % 2 else "flash_fwd", start, duration) for i, (start, duration) in enumerate(intervals)]
    by_kind, span = busy_by_kind(events)
    assert (sum(by_kind.values()), span) == brute_busy(events)


def test_an_instant_belongs_to_the_kernel_that_started_first():
    by_kind, span = busy_by_kind([Event("decode_kernel", 0, 10), Event("Memcpy DtoH", 6, 8)])
    assert by_kind == {"attention": 10, "copies": 4}
    assert span == 14


def test_no_events_at_all():
    assert busy_by_kind([]) == ({}, 0.0)
    assert describe([], 10, 0.0)["idle_share"] == 0


def test_idle_is_what_a_step_takes_without_a_profiler_less_its_kernels():
    """Two steps of 30 µs of kernels each; the profiler stretched a step to 80 µs, without it a step takes 40."""
    events = [Event("decode_kernel", 0, 10), Event("nvjet_tst_64x8", 20, 20)]
    events += [Event(e.name, e.start + 80, e.duration) for e in events]
    row = describe(events, 2, 40.0)
    assert (row["busy_us"], row["step_us"], row["launches"]) == (30.0, 40.0, 2.0)
    assert row["idle_share"] == 0.25
    assert row["idle_share_in_trace"] == pytest.approx(1 - 60 / 120)
    assert row["kinds_us"]["attention"] == 10
    assert row["kinds_us"]["matrix products"] == 20
    assert row["kinds_us"]["idle"] == 10
    assert sum(row["kinds_us"].values()) == 40


def test_kernels_that_overlap_more_than_a_step_takes_leave_no_negative_idle_time():
    assert describe([Event("gemm", 0, 50)], 1, 40.0)["idle_share"] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode_kernel", "attention"),
        ("merge_kernel", "attention"),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, ...>>", "attention"),
        ("nvjet_tst_192x208_64x4_2x1_v_bz_TNT", "matrix products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, ...>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, ...>", "matrix products"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::ArgMaxOps<float>>>", "sampling"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "sampling"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::MeanOps<float>>>",
         "norms, rotary, activation, K and V"),
        ("truncate_kernel", "sampling"),
        ("few_tokens_kernel", "matrix products"),
        ("norm_rotary_store_kernel", "norms, rotary, activation, K and V"),
        ("store_kv_kernel", "norms, rotary, activation, K and V"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", "copies"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


def test_top_kernels_are_the_longest_in_sum():
    events = [Event("often", i, 2) for i in range(10)] + [Event("long", 50, 15), Event("short", 70, 1)]
    rows = top_kernels(events, 5, 2)
    assert [(row["name"], row["us_per_step"], row["calls_per_step"], row["us_each"]) for row in rows] == [
        ("often", 4.0, 2.0, 2.0),
        ("long", 3.0, 0.2, 15.0),
    ]


# ---- the roofline of a GPU


def test_an_fp8_cache_halves_the_bytes_of_k_and_v_alone():
    shape = ModelShape.from_folder(QWEN3_06B)
    workload = named_workload("offline", shape.vocab_size)
    bf16, fp8 = (workload_roofline(shape, workload, ("bfloat16", None, kv), H200) for kv in ("auto", "fp8"))
    weight_bytes = 2 * (shape.body_params + shape.head_params) * bf16.num_decode_steps
    assert fp8.decode_bytes - weight_bytes == (bf16.decode_bytes - weight_bytes) / 2
    assert fp8.decode_s < bf16.decode_s
    assert fp8.prefill_s == bf16.prefill_s
    assert bf16.memory_bound_steps == bf16.num_decode_steps  # far from what the tensor cores could do


class FakeEvent:
    """CUDA's clock, by which every call takes 2 ms."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return 2.0


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_rates_of_a_gpu_count_bytes_both_ways_and_products_as_two(fake_cuda, monkeypatch):
    monkeypatch.setattr(roofline, "CUDA_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "CUDA_GEMM_SHAPES", [(8, 16, 32), (64, 16, 32)])
    assert roofline.measure_cuda_copy_bandwidth("cpu") == (2 << 20) / 2e-3
    assert roofline.measure_cuda_gemm_rate("bfloat16", "cpu") == 2 * 64 * 16 * 32 / 2e-3


def test_what_is_said_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=150_754_820_096)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    answer = SimpleNamespace(returncode=0, stdout="580.159.03, 700.00 W, 1980 MHz, 3201 MHz\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: answer)
    described = machine.describe_gpu()
    assert described["compute_capability"] == "9.0"
    assert described["driver_version"] == "580.159.03"
    assert described["clocks.max.memory"] == "3201 MHz"
    answer.returncode = 9
    assert "driver_version" not in machine.describe_gpu()


# ---- which jobs run


def test_only_the_sweep_runs_slow_tests():
    """A `-m` of the command line replaces pyproject's, including its "not slow"."""
    marks = {
        job.name: job.command[job.command.index("-m", 2) + 1]
        for job in gpu_jobs()
        if "benchmarks.gpu.tests" in job.command
    }
    assert marks.pop("sweep") == "slow"  # these words make the examples more as well: tests/conftest.py
    assert marks
    assert all("not slow" in mark for mark in marks.values())


def test_the_jobs_that_test_name_their_files():
    """Others need packages that a machine with a GPU may lack. No file with the mark `gpu` is left out."""
    files = {
        job.name: {Path(word).name for word in job.command if word.endswith(".py")}
        for job in gpu_jobs()
        if "benchmarks.gpu.tests" in job.command
    }
    assert files["tests/engine"] == files["tests/memory"] == {"test_gpu.py"}
    tests = Path(__file__).resolve().parents[1]
    marked = {path.name for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")}
    assert marked - {Path(__file__).name} == files["tests/engine"] | files["tests/kernels"]
    assert files["sweep"] == files["tests/engine"] | files["tests/kernels"]


def test_the_jobs_of_a_card():
    jobs = gpu_jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    stages = list(dict.fromkeys(job.stage for job in jobs))
    figures, checks = ["machine", "offline", "profile", "latency", "picture"], ["tests", "kernels", "sampling"]
    assert stages == [*figures, *checks, "sweep"], "a first run that is cut short has the figures"
    assert {"offline/eager", "offline/layers", "offline/graphs", "offline/overlap", "offline/fp8"} < set(names)
    rehearsed = {job.name for job in rehearsal_jobs()} - {"latency/torch"}  # triton is not installed
    assert rehearsed < set(names)


OFFLINE_JOBS = [job for job in gpu_jobs() if "benchmarks.offline" in job.command]


@pytest.mark.parametrize("job", OFFLINE_JOBS, ids=lambda job: job.name)
def test_offline_jobs_have_options_that_exist(job, monkeypatch, tmp_path):
    suite = gpu_suite.Suite(tmp_path / "a.json", tmp_path, {"rates": vars(H200), "jobs": {}}, 100)
    monkeypatch.setattr(sys, "argv", suite.fill_in(job.command, tmp_path / "out.json")[1:])
    args = parse_offline_args()
    assert args.rates == [4300.0, 780000.0]
    assert args.json == tmp_path / "out.json"
    is_step = job.name.partition("/")[2] in gpu_jobs_module.ABLATION
    assert args.enforce_eager == (job.name == "offline/eager")
    assert args.cuda_graphs == (False if job.name in ("offline/eager", "offline/layers") else None)
    assert args.overlap == (None if job.name in ("offline/overlap", "offline/fp8") or not is_step else False)


def test_without_rates_a_job_measures_them_itself(tmp_path):
    suite = gpu_suite.Suite(tmp_path / "a.json", tmp_path / "images", {"jobs": {}}, 100)
    filled = suite.fill_in(["program", "{rates}", "--json", "{out}", "{stem}", "{images}"], tmp_path / "o")
    assert filled == ["program", "--json", str(tmp_path / "o"), str(tmp_path / "a"), str(tmp_path / "images")]


DONE = {
    "jobs": {"a/1": {"status": "ok"}, "a/2": {"status": "failed"}, "b": {"status": "ok"}, "picture": {"status": "ok"}}
}
JOBS = [Job(name, [], 1) for name in ("a/1", "a/2", "a/3", "b", "picture")]


@pytest.mark.parametrize(
    ("only", "again", "chosen"),
    [
        ([], None, ["a/2", "a/3", "picture"]),
        ([], [], ["a/1", "a/2", "a/3", "b", "picture"]),
        ([], ["b"], ["a/2", "a/3", "b", "picture"]),
        (["a"], None, ["a/2", "a/3"]),
        (["a/1"], None, []),
        (["a/1"], ["a"], ["a/1"]),
        (["b", "picture"], None, []),
        (["b", "picture"], ["b"], ["b", "picture"]),
    ],
)
def test_what_is_done_is_not_repeated_unless_asked_for(only, again, chosen):
    assert [job.name for job in gpu_suite.choose(JOBS, DONE, only, again)] == chosen


def test_an_unknown_stage_is_named():
    with pytest.raises(SystemExit, match="unknown stage ofline; there are .*a/3"):
        gpu_suite.check_names(["ofline"], JOBS)


def test_only_the_same_code_on_the_same_day_goes_on(tmp_path):
    path = tmp_path / "gpu.json"
    identity = {"gpu": "G", "date": "2026-11-21", "code": "abc"}
    results = gpu_suite.begin(path, identity, False, "abc")
    assert results["jobs"] == {}
    results["jobs"]["a"] = {"status": "ok"}
    path.write_text(json.dumps(results))
    assert gpu_suite.begin(path, identity, False, "abc") == results
    assert gpu_suite.begin(path, identity | {"code": "abd"}, False, "abd")["jobs"] == {}
    path.write_text("{ cut off")
    assert gpu_suite.begin(path, identity, False, "abc")["jobs"] == {}


def test_names_of_files():
    assert gpu_suite.slug("NVIDIA H200") == "nvidia-h200"
    assert gpu_suite.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


# ---- running them


def python(name, code, limit_s=30.0):
    return Job(name, ["-c", code, "{out}"], limit_s)


WRITE = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps({}));"


@pytest.fixture
def run(tmp_path):
    def run(*jobs, budget_s=100.0):
        results = gpu_suite.begin(tmp_path / "r.json", {"gpu": "G", "date": "today", "code": "c"}, True, "c")
        gpu_suite.Suite(tmp_path / "r.json", tmp_path, results, budget_s).run(list(jobs))
        written = json.loads((tmp_path / "r.json").read_text())
        assert written == results
        return written

    return run


def test_a_job_that_fails_is_told_and_the_rest_goes_on(run):
    figures = WRITE.format('{"passed": 3, "failures": {"test_x": "why"}}')
    results = run(
        python("tests", figures + "print('last words'); sys.exit(3)"),
        python("bad", WRITE.format("1")[:-8]),
        python("later", WRITE.format('{"x": 1}')),
    )
    assert [job["status"] for job in results["jobs"].values()] == ["failed", "failed", "ok"]
    assert results["jobs"]["tests"]["tail"].endswith("last words\n")
    assert results["jobs"]["tests"]["figures"]["passed"] == 3  # also of what failed
    assert "SyntaxError" in results["jobs"]["bad"]["tail"]
    assert results["jobs"]["later"]["figures"] == {"x": 1}
    assert "tail" not in results["jobs"]["later"]
    assert "| tests | failed |" in markdown(results)
    assert "`test_x`" in markdown(results)


@pytest.mark.slow
def test_a_job_that_hangs_is_stopped_with_its_children_and_says_where(run, tmp_path):
    mark = tmp_path / "mark"
    child = f"import time, pathlib\nwhile True: time.sleep(0.1); pathlib.Path({str(mark)!r}).touch()"
    code = (
        "import signal, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "def sleep_here():\n    time.sleep(60)\n"
        "sleep_here()"
    )
    limit_s = 5.0  # a busy machine takes more than a second to start Python twice
    results = run(python("hangs", code, limit_s=limit_s), python("later", WRITE.format("{}")))
    assert [job["status"] for job in results["jobs"].values()] == ["timeout", "ok"]
    assert results["jobs"]["hangs"]["seconds"] < limit_s + 5
    assert "sleep_here" in results["jobs"]["hangs"]["tail"]
    mark.unlink()  # the child had started
    time.sleep(0.5)
    assert not mark.exists()


def test_when_the_time_is_used_up_the_rest_is_skipped_and_named(run, monkeypatch):
    monkeypatch.setattr(gpu_suite, "LEAST_SECONDS", 0.5)
    results = run(python("slow", "import time; time.sleep(9)"), python("never", WRITE.format("1")), budget_s=1.0)
    assert [job["status"] for job in results["jobs"].values()] == ["skipped", "skipped"]
    assert [job["reason"] for job in results["jobs"].values()] == [
        "the suite's time was used up while it ran",
        "the suite's time was used up",
    ]


def test_what_cannot_run_here_is_skipped_with_its_reason(run):
    results = run(Job("kernels", [], 10, "no GPU"))
    assert results["jobs"]["kernels"] == {"status": "skipped", "seconds": 0.0, "reason": "no GPU"}
    assert "| kernels | skipped | 0.0 | no GPU |" in markdown(results)


TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "because"
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_unreached(broken): pass
"""


def test_outcomes_of_tests_are_counted_and_failures_named(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # what is installed beside pytest takes seconds to load
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import nothing_of_this_name")
    command = [
        "-m",
        "benchmarks.gpu.tests",
        "--output",
        "{out}",
        "--",
        str(tmp_path),
        "--continue-on-collection-errors",
    ]
    job = run(Job("tests", command, 60))["jobs"]["tests"]
    assert job["status"] == "failed"
    figures = job["figures"]
    assert (figures["passed"], figures["failed"], figures["skipped"]) == (1, 3, 1)
    failures = {name.rpartition("/")[2]: why for name, why in figures["failures"].items()}
    assert set(failures) == {"test_other.py", "test_some.py::test_bad", "test_some.py::test_unreached"}
    assert "because" in failures["test_some.py::test_bad"]
    assert "nothing_of_this_name" in failures["test_other.py"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("skipped", 0), ("failed", 1), ("timeout", 1)])
def test_exit_status(tmp_path, status, code):
    results = {"jobs": {"a/1": {"status": "ok"}, "a/2": {"status": status}}, "offline": None}
    with pytest.raises(SystemExit) as exit_:
        gpu_suite.finish(results, tmp_path / "r.json", JOBS)
    assert exit_.value.code == code


# ---- the figures at fixed places


def offline(**speeds):
    row = {"roofline_fraction": 0.5, "elapsed_s": 1.0, "workload": "offline", "dtype": "bfloat16", "requests": 256}
    return {
        "jobs": {
            f"offline/{name}": {"status": status, "figures": {**row, "output_tokens_per_second": speed}}
            for name, (speed, status) in speeds.items()
        }
    }


def test_the_best_bfloat16_configuration_is_the_one_reported():
    results = offline(
        eager=(5, "ok"), overlap=(9, "ok"), flash_attn=(11, "failed"), fp8=(12, "ok"), transformers=(20, "ok")
    )
    best = best_offline(results)
    assert (best["configuration"], best["output_tokens_per_second"], best["roofline_fraction"]) == ("overlap", 9, 0.5)
    assert best_offline({"jobs": {}}) is None


def test_steps_of_the_ablation_keep_their_order_whatever_ran_first():
    results = offline(transformers=(2, "ok"), overlap=(9, "ok"), something=(3, "ok"), eager=(5, "ok"))
    results["jobs"]["offline/transformers"]["figures"]["requests"] = 64
    lines = offline_table(results).splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("|")][2:]
    assert names == [
        "PyTorch's layers, triton attention",
        "+ overlap of steps",
        "transformers, the first 64 requests",
        "something",
    ]


KERNELS = {
    "machine": {"device": "G"},
    "copy_bandwidth": 4.3e12,
    "layers": {"kernels": [{"kernel": "norm", "us": 2.5}]},
    "triton, blocks of 16": {"decode": [{"batch": 1, "context": 128, "of copy": "71%"}], "store_kv": []},
}


def test_tables_of_kernels_have_whatever_columns_were_measured():
    results = gpu_suite.begin(PATH, {"date": "today"}, True, "c")
    results["jobs"]["kernels"] = {"status": "timeout", "seconds": 1.0, "figures": KERNELS}
    text = markdown(results)
    assert "layers: kernels\n\n| kernel | us |\n| --- | ---: |\n| norm | 2.5 |" in text
    assert (
        "triton, blocks of 16: decode\n\n| batch | context | of copy |\n| --- | ---: | ---: |\n| 1 | 128 | 71% |"
        in text
    )
    assert "store_kv" not in text
    assert "| kernels | timeout |" in text


def test_a_job_may_print_its_figures_last(run):
    figures = {"results": {"greedy": {"ms": 1.23456}, "top_p": {"ms": 20.0, "triton ms": 0.5}}}
    code = f"import json; print('hello'); print(json.dumps({figures!r}))"
    results = run(Job("sampling", ["-c", code], 30), Job("prose", ["-c", "print(7)"], 30))
    assert results["jobs"]["sampling"]["figures"] == figures
    assert results["jobs"]["prose"].keys() == {"status", "seconds"}
    assert "| greedy | 1.23 |  |\n| top_p | 20 | 0.5 |" in markdown(results)


# ---- all of it


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """(its folder, its command, how it went)"""
    folder = tmp_path_factory.mktemp("rehearsal")
    command = ["-m", "benchmarks.gpu_suite", "--device", "cpu", "--rehearse", "--output-dir", str(folder)]
    return folder, command, gpu_suite.run_process(command, 300, folder / "log")


@pytest.mark.slow  # each job is a process that takes seconds to begin
def test_rehearsal(rehearsal):
    folder, command, entry = rehearsal
    assert entry["status"] == "ok", entry["tail"]
    (path,) = folder.glob("*.json")
    results = json.loads(path.read_text())
    assert results["rehearsal"] is True
    statuses = {name: job["status"] for name, job in results["jobs"].items()}
    assert list(statuses) == [job.name for job in rehearsal_jobs()]
    assert {name for name, status in statuses.items() if status == "skipped"} <= {"kernels", "sampling", "offline/fp8"}
    assert set(statuses.values()) <= {"ok", "skipped"}
    assert results["offline"]["output_tokens_per_second"] > 0
    assert 0 < results["offline"]["roofline_fraction"] < 1
    assert results["rates"].keys() == vars(H200).keys()
    assert results["machine"]["torch"]
    work = random_workload(6, (4, 12), (4, 8), 0, 2048)  # what the jobs ask for
    for name in ("offline/eager", "offline/overlap"):
        assert results["jobs"][name]["figures"]["output_tokens"] == work.num_output_tokens
    assert results["jobs"]["tests/engine"]["figures"]["passed"] > 10
    assert results["jobs"]["offline/transformers"]["figures"]["requests"] == 4
    for row in results["jobs"]["profile"]["figures"]["rows"]:
        assert (folder / row["trace"]).exists()
        assert row["busy_us"] > 0
        assert row["kinds_us"]["matrix products"] > 0
        assert row["kinds_us"]["attention"] > 0
    endings = {file.name.replace(path.stem, "") for file in folder.iterdir() if file.name.startswith(path.stem)}
    assert {".json", ".md", "-offline.png", "-step.png"} < endings
    text = path.with_suffix(".md").read_text()
    assert text.startswith("# Rehearsal on a CPU: no figure means anything")
    for heading in ("Offline throughput", "A single user", "Where a decode step's time goes", "What ran"):
        assert f"\n## {heading}\n" in text


@pytest.mark.slow
def test_a_rehearsal_again_runs_nothing(rehearsal):
    folder, command, *_ = rehearsal
    (path,) = folder.glob("*.json")
    before = json.loads(path.read_text())
    entry = gpu_suite.run_process(command, 60, folder / "log")
    assert entry["status"] == "ok"
    assert entry["seconds"] < 10
    after = json.loads(path.read_text())
    assert after == before
