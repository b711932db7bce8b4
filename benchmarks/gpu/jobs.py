"""The jobs of the GPU suite: what each runs, its time limit, and why it cannot run on some machines.

A job is one process. In its command, `{out}` is the JSON file that it writes (without it, the job prints a line of JSON
last), `{stem}` is the beginning of the names of other files that it writes, `{results}` is the suite's own file so far,
`{images}` is the folder of pictures, and `{rates}` are the machine's rates as an option of `benchmarks.offline`.
`benchmarks.gpu_suite` runs the jobs. The rehearsal is the same list on a CPU, with the bundled model and little work.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention

ROOT = Path(__file__).resolve().parent.parent.parent
TINY_MODEL = str(ROOT / "nanovllm" / "assets" / "tiny-qwen3")
ENGINE_TESTS = str(ROOT / "tests" / "extras" / "test_gpu.py")
RECORD = ["-m", "benchmarks.gpu.tests", "--output", "{out}", "--"]
HF_REQUESTS = 64  # of the 256: `transformers` would take minutes for all of them
# Each configuration adds one optimisation to the one before. All are in bfloat16, except for the fp8 cache.
ABLATION = {
    "eager": ["--enforce-eager", "--no-cuda-graphs", "--no-overlap"],
    "layers": ["--no-cuda-graphs", "--no-overlap"],
    "graphs": ["--no-overlap"],
    "overlap": [],
    "fp8": ["--kv-cache-dtype", "fp8"],
}


@dataclass(frozen=True)
class Job:
    name: str
    """Such as `offline/graphs`; the part before the slash names its group (`stage`)."""
    command: list[str]
    """The arguments of Python."""
    limit_s: float
    """The time limit, in seconds."""
    skip: str | None = None
    """Why it cannot run on this machine, or None."""

    @property
    def stage(self) -> str:
        return self.name.partition("/")[0]


def gpu_jobs() -> list[Job]:
    """Return the jobs in their order: figures of the whole engine, tests, figures of kernels, the long tests.

    The most important jobs come first, because a first run may reach its time limit. The jobs' own limits include the
    10 to 30 seconds that Triton compiles at first.
    """
    return [
        Job("machine", ["-m", "benchmarks.gpu.machine", "--output", "{out}"], 60),
        *offline_jobs(),
        profile_job(),
        *[latency_job(backend, []) for backend in ("triton", "flash_attn")],
        picture_job(),
        *test_jobs(),
        Job(
            "kernels",
            ["-m", "benchmarks.kernels", "--fp8", "--context", "128", "1024", "8192", "32768", "--output", "{out}"],
            200,
        ),  # fmt: skip
        sampling_job(["--num-rows", "256", "--device", "cuda"]),
        sweep_job(),
    ]


def first_jobs(carried: Path | None, site: Path | None) -> list[Job]:
    """Return the jobs of a first run on a GPU. Those of which least is known come first; all take about 430 seconds.

    carried: the folder of what the machine lacks, or None; site: the folder into which a wheel of flash-attn that is
    there is installed, or None
    """
    first = ["-m", "benchmarks.gpu.first"]
    files = [] if carried is None else ["--carried", str(carried)]
    if site is not None:
        files += ["--site", str(site)]
    no_library = None if site is not None else missing("flash_attn")
    has_peer = carried is not None and any(carried.glob("peers/*.tar.gz"))
    no_peer = None if has_peer else "no peers/*.tar.gz was carried"
    bench = ["bench.py", "--json", "{out}", "--device", "cuda", "--temperature", "0.6"]
    triton = [*bench, "--extras", "--attention-backend", "triton", "--block-size", "16"]
    return [
        Job("first/library", [*first, "library", *files, "--output", "{out}"], 90, no_library),
        Job("first/text", [*first, "text", "--output", "{out}"], 60),
        Job("first/core-graphs", bench, 75),
        Job("first/core-eager", [*bench, "--enforce-eager"], 90),
        Job("first/nano-vllm", [*first, "peer", *files, "--output", "{out}"], 100, no_peer),
        Job("first/extras-flash_attn", [*bench, "--extras", "--attention-backend", "flash_attn"], 60, no_library),
        Job("first/extras-triton", triton, 75),
        Job("first/extras-fp8", [*triton, "--kv-cache-dtype", "fp8"], 75),
        Job("first/check", [*first, "check", "--output", "{out}"], 60),
        Job("machine", ["-m", "benchmarks.gpu.machine", "--output", "{out}"], 60),
        profile_job(),
        *offline_jobs(),
        test_jobs()[0],
    ]


def rehearse_first(carried: Path | None, site: Path | None) -> list[Job]:
    """Return the same jobs for a CPU, with the bundled model and little work. They test the suite."""
    work = ["--device", "cpu", "--model", TINY_MODEL, "--num-requests", "4", "--input-len", "4", "12"]
    work += ["--output-len", "4", "8", "--max-model-len", "64", "--num-kv-blocks", "64"]
    jobs = []
    for job in [job for job in first_jobs(carried, site) if job.stage == "first"]:
        command = [
            "cpu" if word == "cuda" else "torch" if word in ("triton", "flash_attn") else word for word in job.command
        ]
        skip = "the fp8 cache needs a CUDA device" if "fp8" in command else job.skip
        if "bench.py" in command:
            command += work[2:]
        elif "peer" in command:
            command += ["--", *work]
        elif "text" in command:
            command += ["--device", "cpu"]
        jobs.append(Job(job.name, command, job.limit_s, skip))
    return [*jobs, *[job for job in rehearsal_jobs() if job.name in ("machine", "profile")]]


def profile_job() -> Job:
    options = ["--attention-backend", "triton", "--output", "{out}", "--trace", "{stem}"]
    return Job("profile", ["-m", "benchmarks.gpu.profile", *options], 100)


def test_jobs() -> list[Job]:
    """Return the jobs that test the engine on the GPU, then its kernels.

    They name their files, because importing all tests needs packages that a GPU does not. A `-m` replaces the one in
    pyproject.toml, so it repeats "not slow".
    """
    return [
        Job("tests/engine", [*RECORD, ENGINE_TESTS, "-m", "gpu and not alone and not slow", *workers()], 240),
        Job("tests/memory", [*RECORD, ENGINE_TESTS, "-m", "gpu and alone and not slow"], 60),
        Job("tests/kernels", [*RECORD, *kernel_test_files(), "-m", "not slow", *workers()], 180),
    ]


def sweep_job() -> Job:
    """Return the job with the long form of the same tests, for which Triton compiles a hundred variants."""
    return Job(
        "sweep",
        [*RECORD, ENGINE_TESTS, *kernel_test_files(), "-m", "slow", *workers()],
        240,
    )


def workers() -> list[str]:
    """Return options of pytest for several processes: the tests wait for compilers more than for the GPU."""
    count = max(2, min(12, (os.cpu_count() or 1) * 3 // 4))
    return ["-n", str(count)] if importlib.util.find_spec("xdist") else []


def kernel_test_files() -> list[str]:
    """Return the files of tests that run on a GPU, and without one in Triton's interpreter."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "IS_INTERPRETED" in file.read_text()]


def sampling_job(options: list[str]) -> Job:
    """Return a job that prints its figures as its last line."""
    source = (ROOT / "benchmarks" / "sampling.py").read_text(encoding="utf-8")
    dtype = ["--dtype", "bfloat16"] if '"--dtype"' in source else []
    skip = None if '"--json"' in source else "benchmarks.sampling writes no JSON"
    return Job("sampling", ["-m", "benchmarks.sampling", "--json", *options, *dtype], 90, skip)


def offline_jobs() -> list[Job]:
    """Return one job for each configuration: 256 requests of 100 to 1,024 tokens in and out."""
    triton = ["--attention-backend", "triton", "--block-size", "16"]
    bench = ["-m", "benchmarks.offline", "--json", "{out}", "--device", "cuda", "{rates}"]
    jobs = [Job(f"offline/{name}", [*bench, *triton, *options], 75) for name, options in ABLATION.items()]
    triton_256 = ["--attention-backend", "triton", "--block-size", "256"]
    flash = ["--attention-backend", "flash_attn"]
    hf = ["--engine", "hf", "--first", str(HF_REQUESTS), "--hf-batch-size", str(HF_REQUESTS)]
    return [
        *jobs,
        Job("offline/triton-256", [*bench, *triton_256], 75),
        Job("offline/flash_attn", [*bench, *flash], 75, why_no_flash_attn()),
        Job("offline/transformers", [*bench, *hf], 100),
    ]


def latency_job(backend: str, options: list[str]) -> Job:
    command = ["-m", "benchmarks.gpu.latency", "--attention-backend", backend, "--output", "{out}", "{rates}", *options]
    return Job(f"latency/{backend}", command, 60, why_no_flash_attn() if backend == "flash_attn" else None)


def picture_job() -> Job:
    return Job(
        "picture", ["-m", "benchmarks.gpu.report", "{results}", "--images", "{images}"], 40, missing("matplotlib")
    )


def missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"the package {package} is not installed"


def why_no_flash_attn() -> str | None:
    return FlashAttention.why_not(torch.device("cuda"), torch.bfloat16, 128, None)


def rehearsal_jobs() -> list[Job]:
    """Return the same jobs for a CPU, as far as it can run them. They test the suite; their figures have no meaning."""
    tiny = ["--device", "cpu", "--model", TINY_MODEL]
    bench = ["-m", "benchmarks.offline", "--json", "{out}", "{rates}", *tiny, "--load-format", "auto"]
    bench += ["--num-requests", "6", "--input-len", "4", "12", "--output-len", "4", "8", "--max-model-len", "64"]
    ours = [*bench, "--attention-backend", "torch"]
    record = [*RECORD, "--noconftest", "tests/test_config.py"]
    hf = ["--engine", "hf", "--first", "4", "--hf-batch-size", "4"]
    latency = [*tiny, "--input-len", "8", "--output-len", "8", "--long-len", "100"]
    profile = ["-m", "benchmarks.gpu.profile", "--output", "{out}", "--trace", "{stem}", *tiny, "--num-seqs", "4", "1"]
    profile += ["--context-len", "16", "--attention-backend", "torch"]
    return [
        Job("machine", ["-m", "benchmarks.gpu.machine", "--output", "{out}", "--device", "cpu"], 60),
        Job("tests/engine", record, 60),
        Job("kernels", [], 60, "the kernels need a CUDA device"),
        sampling_job(["--num-rows", "2", "--vocab-size", "500", "--rounds", "1", "--device", "cpu"]),
        Job("offline/eager", [*ours, *ABLATION["eager"]], 60),
        Job("offline/overlap", [*ours, "--overlap"], 60),
        Job("offline/fp8", [], 60, "the fp8 cache needs a CUDA device"),
        Job("offline/transformers", [*bench, *hf], 60),
        latency_job("torch", latency),
        Job("profile", profile, 60),
        picture_job(),
    ]
