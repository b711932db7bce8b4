"""What all benchmarks share: the work, the measures of serving, and a description of the machine.

The lengths of the named workloads are in `workloads.json`; token ids are drawn uniformly from 0 … 10000 with a fixed
seed, and every request ignores the end token, so that all engines do exactly the same work.
"""

import json
import platform
import random
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent
QWEN3_06B = FOLDER / "configs" / "qwen3-0.6b"  # config.json alone: its shape, to be filled with dummy weights
MAX_TOKEN_ID = 10_000


@dataclass(frozen=True)
class Workload:
    """Requests by their token ids and how many tokens each is to generate."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def named_workload(name: str, vocab_size: int) -> Workload:
    """`offline`, `W`, `W2` or `W3` of workloads.json."""
    spec = json.loads((FOLDER / "workloads.json").read_text(encoding="utf-8"))[name]
    return make_workload(name, spec["prompt_lens"], spec["output_lens"], vocab_size, spec.get("shared_prefix_len", 0))


def random_workload(
    num_requests: int, input_range: tuple[int, int], output_range: tuple[int, int], seed: int, vocab_size: int
) -> Workload:
    """Lengths drawn uniformly from inclusive ranges."""
    rng = random.Random(seed)
    prompt_lens = [rng.randint(*input_range) for _ in range(num_requests)]
    output_lens = [rng.randint(*output_range) for _ in range(num_requests)]
    return make_workload("random", prompt_lens, output_lens, vocab_size, 0, seed)


def make_workload(
    name: str, prompt_lens: list[int], output_lens: list[int], vocab_size: int, shared_len: int, seed: int = 0
) -> Workload:
    rng = random.Random(seed)
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    shared = [rng.randint(0, top) for _ in range(shared_len)]
    prompts = [shared + [rng.randint(0, top) for _ in range(length - shared_len)] for length in prompt_lens]
    return Workload(name, prompts, list(output_lens))


@dataclass(frozen=True)
class Measurement:
    """One timed run; times in seconds from its start, at which all requests arrive."""

    engine: str
    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttfts_s: list[float]
    tpots_s: list[float]
    peak_memory_bytes: int

    def report(self) -> dict[str, object]:
        """Flat figures, as they are printed and written as JSON."""
        return {
            "engine": self.engine,
            "elapsed_s": round(self.elapsed_s, 3),
            "requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "requests_per_second": round(self.num_requests / self.elapsed_s, 3),
            "output_tokens_per_second": round(self.num_output_tokens / self.elapsed_s, 2),
            "total_tokens_per_second": round((self.num_prompt_tokens + self.num_output_tokens) / self.elapsed_s, 2),
            "ttft_s": percentiles(self.ttfts_s),
            "tpot_s": percentiles(self.tpots_s),
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 5) for p in (50, 90, 99)} if values else {}


def peak_memory_bytes(device: str) -> int:
    """On CUDA the most that tensors took, on CPU the most that this process had in memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_machine(device: str) -> dict[str, object]:
    """Hardware, versions and commit that belong beside every figure."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER)
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "commit": commit.stdout.strip() or "unknown",
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
