"""Run the tests, benchmarks and profiles of this engine on a GPU with one command.

    python -m benchmarks.gpu_suite
    python -m benchmarks.gpu_suite --first --carried FOLDER # a first run on a card
    python -m benchmarks.gpu_suite --only offline profile   # groups of jobs, or single jobs
    python -m benchmarks.gpu_suite --again tests            # jobs that have a result; without a name all
    python -m benchmarks.gpu_suite --device cpu --rehearse --output-dir /tmp/x   # all of the code, without a GPU

After each job it writes `<gpu>-<date>.json` to `benchmarks/results`, and a table in Markdown to the same folder. A
second call on the same GPU and day, with the same code, runs the jobs that have no result yet. A job is a separate
process with a time limit (`benchmarks/gpu/jobs.py` lists the jobs). If a job fails or hangs, its last output is
recorded and the next job starts. Exits with 1 if any job failed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.jobs import Job, first_jobs, gpu_jobs, rehearsal_jobs, rehearse_first
from benchmarks.gpu.report import advice, best_offline, markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
TAIL_CHARS = 3000  # of a failed job's output
LEAST_SECONDS = 15  # with less than this left no job is begun
Results = dict[str, Any]


def main() -> None:
    args = parse_args()
    device = "cpu-rehearsal" if args.rehearse else torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if device is None:
        sys.exit("benchmarks.gpu_suite needs a CUDA device, and this machine has none (--rehearse runs it on a CPU)")
    today = datetime.now(timezone.utc).date().isoformat()
    output_dir = args.output_dir or RESULTS
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / f"{slug(device)}-{today}.json"
    commit = args.commit or read_commit()
    results = begin(
        path, {"gpu": device, "date": today, "code": f"{commit} {digest_of_engine()}"}, args.rehearse, commit
    )
    args.carried = args.carried and args.carried.resolve()  # jobs have another current folder
    wheels = sorted(args.carried.glob("flash_attn*.whl")) if args.carried else []
    site = Path(tempfile.gettempdir(), f"nanovllm-{wheels[-1].stem}") if wheels else None  # what this run installs
    if args.first:
        jobs = (rehearse_first if args.rehearse else first_jobs)(args.carried, site)
    else:
        jobs = rehearsal_jobs() if args.rehearse else gpu_jobs()
    check_names([*args.only, *(args.again or [])], jobs)
    if site is not None and not site.exists():  # another machine may have run what is done: install it here
        results["jobs"].pop("first/library", None)
        args.only += ["first/library"] * bool(args.only)
    suite = Suite(path, args.output_dir or IMAGES, results, args.budget_s, site)
    suite.run(choose(jobs, results, args.only, args.again))
    finish(results, path, jobs)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test, measure and profile this engine on a GPU.")
    parser.add_argument(
        "--first", action="store_true", help="run the jobs for a card that has run none, in about seven minutes"
    )
    parser.add_argument("--carried", type=Path, help="folder with a wheel of flash-attn and more (docs/gpu.md)")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="groups of jobs, or single jobs")
    parser.add_argument("--again", nargs="*", metavar="STAGE", help="repeat jobs that are done; without names all jobs")
    parser.add_argument("--budget-s", type=float, default=560, help="skip jobs that have not begun by then (560)")
    parser.add_argument("--output-dir", type=Path, help="for everything (default: benchmarks/results, docs/images)")
    parser.add_argument("--commit", help="name of the version, if there is no git")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="run all of the code on a CPU, with little work")
    args = parser.parse_args()
    if (args.device == "cpu") != args.rehearse:
        parser.error("--device cpu and --rehearse go together: on a CPU there is nothing to measure here")
    return args


# ---- which results there are already


def begin(path: Path, identity: dict[str, str], is_rehearsal: bool, commit: str) -> Results:
    """Return the results of an earlier call with the same GPU, day and code, or empty results."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("identity") == identity:
            return found
        print(f"{path} is the result of other code, and is replaced")
    date = identity["date"]
    return {
        "rehearsal": is_rehearsal,
        "date": date,
        "commit": commit,
        "identity": identity,
        "offline": None,
        "jobs": {},
    }


def choose(jobs: list[Job], results: Results, only: list[str], again: list[str] | None) -> list[Job]:
    """Return the selected jobs that have no result or must be repeated, and the picture if any other job runs."""
    wanted = [job for job in jobs if not only or is_named(job, only)]
    repeated = [] if again is None else [job for job in wanted if not again or is_named(job, again)]
    chosen = [job for job in wanted if job in repeated or results["jobs"].get(job.name, {}).get("status") != "ok"]
    is_news = any(job.skip is None for job in chosen)
    return [job for job in wanted if job in chosen or (is_news and job.stage == "picture")]


def is_named(job: Job, names: Sequence[str]) -> bool:
    return job.name in names or job.stage in names


def check_names(names: list[str], jobs: list[Job]) -> None:
    known = {job.name for job in jobs} | {job.stage for job in jobs}
    if unknown := sorted(set(names) - known):
        sys.exit(f"unknown stage {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def slug(device: str) -> str:
    """`NVIDIA H200` → `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def read_commit() -> str:
    """The short hash, with a plus sign if files differ from it; `unknown` without git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, cwd=ROOT
        )
    except OSError:
        return "unknown"
    return commit.stdout.strip() + "+" * bool(status.stdout.strip()) if commit.returncode == 0 else "unknown"


def digest_of_engine() -> str:
    """A hash of the engine's source files: a commit does not tell what was changed after it."""
    folders = (ROOT / "nanovllm", ROOT / "nanovllm_extras")
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))
    contents = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(contents).hexdigest()[:12]


# ---- running


class Suite:
    """Runs jobs one after another, and writes the results after each."""

    def __init__(self, path: Path, images: Path, results: Results, budget_s: float, site: Path | None = None) -> None:
        self.path, self.images, self.results, self.site = path, images, results, site
        self.started_at, self.budget_s = time.monotonic(), budget_s

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started_at)

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.results["jobs"][job.name] = entry = self.run_one(job)
            words = entry.get("reason") or entry.get("tail", "")[-1500:]
            print(f"{job.name:<24} {entry['status']:<8} {entry['seconds']:>6.1f} s  {words}", flush=True)
            self.write()

    def run_one(self, job: Job) -> dict[str, Any]:
        if job.skip:
            return {"status": "skipped", "seconds": 0.0, "reason": job.skip}
        if self.left_s < LEAST_SECONDS:
            return {"status": "skipped", "seconds": 0.0, "reason": "the suite's time was used up"}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            limit_s = min(job.limit_s, self.left_s)
            log = Path(folder) / "log"
            entry = run_process(self.fill_in(job.command, out), limit_s, log, self.site)
            if "{out}" not in job.command:
                out.write_bytes(log.read_bytes().strip().rpartition(b"\n")[2])
            with contextlib.suppress(OSError, ValueError):  # it wrote nothing, or was stopped while it wrote
                figures = json.loads(out.read_text(encoding="utf-8"))
                if isinstance(figures, dict):
                    entry["figures"] = figures
        if entry["status"] == "timeout" and limit_s < job.limit_s:
            entry |= {"status": "skipped", "reason": "the suite's time was used up while it ran"}
        return entry

    def fill_in(self, command: list[str], out: Path) -> list[str]:
        """The command with the places for files and rates filled in; see jobs.py."""
        stem = self.path.with_suffix("")
        places = {"{out}": out, "{stem}": stem, "{results}": self.path, "{images}": self.images}
        rates = self.results.get("rates")
        filled: list[str] = []
        for word in command:
            if word != "{rates}":
                filled.append(str(places.get(word, word)))
            elif rates:  # without, the job measures them itself
                filled += ["--rates", *(f"{rates[key] / 1e9:.3f}" for key in ("read_bytes_per_s", "gemm_flops_per_s"))]
        return filled

    def write(self) -> None:
        """Replace the file in one step, so that it is always complete."""
        self.results |= self.results["jobs"].get("machine", {}).get("figures", {})
        self.results["offline"] = best_offline(self.results)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path)
        try:
            table = markdown(self.results)
        except Exception:  # the figures are safe, and the jobs that are left are worth more than their table
            table = traceback.format_exc()
        self.path.with_suffix(".md").write_text(table, encoding="utf-8")


def run_process(command: list[str], limit_s: float, log: Path, site: Path | None = None) -> dict[str, Any]:
    """Run Python with a time limit. Return the status, the seconds and, if it failed, the end of its output.

    site: a folder of packages that is searched before the others, if it exists
    """
    start = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if site is not None and site.exists():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it started can be stopped with it
        )
        try:
            status = "failed" if process.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            status = "timeout"
            process.send_signal(signal.SIGABRT)  # Python then says where it hangs
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    entry: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if status != "ok":
        entry["tail"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
    return entry


def finish(results: Results, path: Path, jobs: list[Job]) -> None:
    """Print the status of each job, and exit with 1 if any failed."""
    by_status: dict[str, list[str]] = {}
    for job in jobs:
        by_status.setdefault(results["jobs"].get(job.name, {}).get("status", "not run"), []).append(job.name)
    print(f"\n{path}")
    for status, names in by_status.items():
        print(f"{status}: {', '.join(names)}")
    if results["offline"]:
        print(json.dumps(results["offline"]))
    for line in advice(results, [job.name for job in jobs]):
        print(line)
    sys.exit(1 if by_status.keys() & {"failed", "timeout"} else 0)


if __name__ == "__main__":
    main()
