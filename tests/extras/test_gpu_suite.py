"""The GPU suite without a GPU: what it computes from a trace, what it runs and repeats, and one rehearsal of it all."""

import itertools
import json
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.common import random_workload
from benchmarks.gpu import jobs as gpu_jobs_module
from benchmarks.gpu.jobs import Job, gpu_jobs, rehearsal_jobs
from benchmarks.gpu.profile import Event, busy_by_kind, describe, kind_of
from benchmarks.gpu.report import advice, best_offline, markdown
from benchmarks.offline import parse_args as parse_offline_args
from benchmarks.roofline import Rates

PATH = Path("does-not-exist.json")
H200 = Rates(read_bytes_per_s=4.3e12, gemm_flops_per_s=780e12)

# ---- from a trace


def brute_busy(events):
    """Microsecond by microsecond: how many have a kernel, out of how many."""
    busy = {t for event in events for t in range(int(event.start), int(event.start + event.duration))}
    start, end = min(e.start for e in events), max(e.start + e.duration for e in events)
    return len(busy), end - start


def test_busy_time_is_the_length_of_the_union():
    for intervals in (
        [(0, 5)],
        [(0, 5), (5, 5)],
        [(0, 5), (8, 2)],
        [(0, 10), (2, 3), (20, 1)],  # one inside of another
        [(0, 10), (5, 10), (14, 3), (30, 2)],  # a chain of overlaps
        [(7, 2), (0, 3)],  # in no order
    ):
        names = itertools.cycle(["gemm", "flash_fwd"])
        events = [Event(name, *interval) for name, interval in zip(names, intervals, strict=False)]
        by_kind, span = busy_by_kind(events)
        assert (sum(by_kind.values()), span) == brute_busy(events)


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


KINDS = {
    "decode_kernel": "attention",
    "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, ...>>": "attention",
    "nvjet_tst_192x208_64x4_2x1_v_bz_TNT": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, ...>": "matrix products",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::ArgMaxOps<float>>>": "sampling",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::MeanOps<float>>>":
        "norms, rotary, activation, K and V",
    "few_tokens_kernel": "matrix products",
    "norm_rotary_store_kernel": "norms, rotary, activation, K and V",
    "Memcpy DtoH (Device -> Pinned)": "copies",
    "something_new": "other",
}  # fmt: skip


def test_kinds_of_kernels():
    assert {name: kind_of(name) for name in KINDS} == KINDS


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


OFFLINE_JOBS = [job for job in gpu_jobs() if "benchmarks.offline" in job.command]


def test_offline_jobs_have_options_that_exist(monkeypatch, tmp_path):
    suite = gpu_suite.Suite(tmp_path / "a.json", tmp_path, {"rates": vars(H200), "jobs": {}}, 100)
    for job in OFFLINE_JOBS:
        monkeypatch.setattr(sys, "argv", suite.fill_in(job.command, tmp_path / "out.json")[1:])
        args = parse_offline_args()
        assert args.rates == [4300.0, 780000.0]
        assert args.json == tmp_path / "out.json"
        is_step = job.name.partition("/")[2] in gpu_jobs_module.ABLATION
        assert args.enforce_eager == (job.name == "offline/eager")
        assert args.cuda_graphs == (False if job.name in ("offline/eager", "offline/layers") else None)
        assert args.overlap == (None if job.name in ("offline/overlap", "offline/fp8") or not is_step else False)


DONE = {
    "jobs": {"a/1": {"status": "ok"}, "a/2": {"status": "failed"}, "b": {"status": "ok"}, "picture": {"status": "ok"}}
}
JOBS = [Job(name, [], 1) for name in ("a/1", "a/2", "a/3", "b", "picture")]


def test_what_is_done_is_not_repeated_unless_asked_for():
    for only, again, chosen in (
        ([], None, ["a/2", "a/3", "picture"]),
        ([], [], ["a/1", "a/2", "a/3", "b", "picture"]),
        ([], ["b"], ["a/2", "a/3", "b", "picture"]),
        (["a"], None, ["a/2", "a/3"]),
        (["a/1"], None, []),
        (["a/1"], ["a"], ["a/1"]),
        (["b", "picture"], ["b"], ["b", "picture"]),
    ):
        assert [job.name for job in gpu_suite.choose(JOBS, DONE, only, again)] == chosen


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
        "def sleep_here():\n    time.sleep(600)\n"
        "sleep_here()"
    )
    for limit_s in (3.0, 30.0):  # a busy machine takes seconds to start Python twice
        results = run(python("hangs", code, limit_s=limit_s), python("later", WRITE.format("{}")))
        if mark.exists():
            break
    assert [job["status"] for job in results["jobs"].values()] == ["timeout", "ok"]
    assert results["jobs"]["hangs"]["seconds"] < 60
    assert "sleep_here" in results["jobs"]["hangs"]["tail"]
    mark.unlink()  # the child had started
    time.sleep(0.5)
    assert not mark.exists()


def test_when_the_time_is_used_up_the_rest_is_skipped_and_named(run, monkeypatch):
    monkeypatch.setattr(gpu_suite, "LEAST_SECONDS", 0.5)
    jobs = python("slow", "import time; time.sleep(60)"), python("never", WRITE.format("1"))
    for budget_s in (1.0, 20.0):  # on a busy machine, the first may use up all before a job begins
        results = run(*jobs, budget_s=budget_s)
        if results["jobs"]["slow"]["reason"].endswith("while it ran"):
            break
    assert [job["status"] for job in results["jobs"].values()] == ["skipped", "skipped"]
    assert [job["reason"] for job in results["jobs"].values()] == [
        "the suite's time was used up while it ran",
        "the suite's time was used up",
    ]


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
    entry = gpu_suite.run_process(command, 300, folder / "log")
    assert entry["status"] == "ok"
    after = json.loads(path.read_text())
    assert after == before


# ---- a first run

WITHOUT = ("docstring_parser", "fastapi", "llguidance", "openai", "prompt_toolkit", "pydantic", "uvicorn")
BLOCK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WITHOUT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""
PEER = """
import argparse, json, nanovllm
parser = argparse.ArgumentParser()
for name in ("workloads", "tokenizer", "json"):
    parser.add_argument("--" + name)
args = parser.parse_args()
work = json.load(open(args.workloads))["offline"]
assert len(work["prompt_lens"]) == len(work["output_lens"]) == 4
json.dump({"of": nanovllm.NAME, "output_tokens_per_second": [2.0, 3.0]}, open(args.json, "w"))
"""


def carry(folder, check='print("all checks passed")', peer=PEER):
    """What docs/gpu.md lists, as stand-ins: a wheel, its check, a peer."""
    info = "flash_attn-0.dist-info"
    with zipfile.ZipFile(folder / "flash_attn-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flash_attn/__init__.py", "__version__ = '0'")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: flash_attn\nVersion: 0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "fa2_check.py").write_text("import flash_attn; assert flash_attn.__version__ == '0'\n" + check)
    (folder / "peers" / "nanovllm").mkdir(parents=True)
    (folder / "peers" / "nanovllm" / "__init__.py").write_text("NAME = 'the peer'")
    with tarfile.open(folder / "peers" / "peer.tar.gz", "w:gz") as archive:
        archive.add(folder / "peers" / "nanovllm", "nanovllm")
    (folder / "peers" / "peer_bench.py").write_text(peer)
    return folder


@pytest.mark.slow
def test_a_first_run_on_a_machine_that_lacks_what_the_card_lacks(tmp_path, monkeypatch):
    carried, out, path = (tmp_path / name for name in ("carried", "out", "path"))
    carried.mkdir(), path.mkdir()
    (path / "sitecustomize.py").write_text(BLOCK)
    monkeypatch.setenv("PYTHONPATH", str(path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the wheel is installed
    command = ["-m", "benchmarks.gpu_suite", "--first", "--carried", str(carry(carried)), "--device", "cpu"]
    entry = gpu_suite.run_process([*command, "--rehearse", "--output-dir", str(out)], 300, tmp_path / "log")
    said = (tmp_path / "log").read_text()
    assert entry["status"] == "ok", said
    (file,) = out.glob("*.json")
    results = json.loads(file.read_text())
    statuses = {name: job["status"] for name, job in results["jobs"].items()}
    assert [name for name, status in statuses.items() if status == "skipped"] == ["first/extras-fp8"]
    assert set(statuses.values()) == {"ok", "skipped"}
    text = results["jobs"]["first/text"]["figures"]
    assert text["answers"] == 6 == text["equal"] + len(text["gaps_of_logits"])
    peer = results["jobs"]["first/nano-vllm"]["figures"]
    assert (peer["of"], peer["output_tokens_per_second"]) == ("the peer", 3.0)
    assert results["jobs"]["first/core-graphs"]["figures"]["temperature"] == 0.6
    assert list(statuses)[:2] == ["first/library", "first/text"], "the unknowns first"


@pytest.mark.slow
def test_parts_of_a_first_run_that_fail_are_told_at_the_end(tmp_path, monkeypatch):
    carried = tmp_path / "carried"
    carried.mkdir()
    carry(carried, check="raise ValueError('a wrong sum')", peer="raise KeyError('nothing here')")
    jobs = {job.name: job for job in gpu_jobs_module.rehearse_first(carried, tmp_path / "site")}
    names = ["first/library", "first/nano-vllm"]
    results = gpu_suite.begin(tmp_path / "r.json", {"gpu": "G", "date": "today", "code": "c"}, True, "c")
    gpu_suite.Suite(tmp_path / "r.json", tmp_path, results, 100).run([jobs[name] for name in names])
    assert [results["jobs"][name]["status"] for name in names] == ["failed", "failed"]
    first, second = advice(results, names)
    assert first.startswith("1. fix first/library: ")
    assert "a wrong sum" in first
    assert second.startswith("2. fix first/nano-vllm: ")
    assert "nothing here" in second


def test_what_is_slower_than_hoped_is_told_after_what_failed():
    speeds = {"core-graphs": 900, "core-eager": 800, "nano-vllm": 1000, "extras-triton": 1400, "extras-fp8": 1500}
    jobs = {f"first/{name}": {"status": "ok", "figures": {"output_tokens_per_second": n}} for name, n in speeds.items()}
    tail = "line\nlast line\nExtension modules: numpy, torch (total: 2)\n"
    jobs["machine"] = {"status": "timeout", "tail": tail, "seconds": 60.1}
    lines = advice({"jobs": jobs}, ["first/core-graphs", "machine"])
    assert lines[0] == "1. fix machine: its time was up after 60.1 s. last line"
    assert [line.split(": ")[0][3:] for line in lines[1:]] == ["look at first/core-graphs"] * 2
    assert advice({"jobs": {}}, []) == ["nothing to fix: all that ran is as hoped"]
