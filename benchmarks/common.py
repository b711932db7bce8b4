"""What all benchmarks share: workloads, figures of a run, and a description of the machine.

The lengths of workloads W and W2 are in `bench.py`. Token ids are drawn uniformly from 0 to 10,000 with a fixed seed,
and every request ignores the end-of-sequence token, so that all engines do exactly the same work.

This file imports nothing of nanovllm, because other engines run in environments of their own.
"""

import importlib.metadata
import json
import os
import platform
import random
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import WORKLOADS
from benchmarks.layer_shapes import DeltaShape, ExpertShape, LatentShape

FOLDER = Path(__file__).parent
QWEN3_06B = FOLDER / "configs" / "qwen3-0.6b"  # only a config.json; the weights are random
MAX_TOKEN_ID = 10_000
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """The fields of a config.json that determine how much work a model is."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    experts: ExpertShape | None = None
    latents: LatentShape | None = None
    delta: DeltaShape | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelShape":
        raw = read_config(folder)
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            experts=ExpertShape.from_config(raw),
            latents=LatentShape.from_config(raw),
            delta=DeltaShape.from_config(raw),
        )

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - (self.delta.num_layers if self.delta is not None else 0)

    @property
    def body_params(self) -> int:
        """The weights that the layers' matrix products (q, k, v, o; gate, up, down) use for one token.

        Of a mixture of experts, only the experts of one token count: all tokens of a batch may use the same experts.
        """
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.latents is not None:
            attention = self.latents.params(self.hidden_size, self.num_heads)
        mixers = self.num_layers * attention
        if self.delta is not None:
            gate = self.hidden_size * self.head_dim * self.num_heads
            mixers = self.num_attention_layers * (attention + gate)
            mixers += self.delta.num_layers * self.delta.params(self.hidden_size)
        dense, sparse = 3 * self.hidden_size * self.intermediate_size, 0
        if self.experts is not None:
            sparse = self.experts.num_layers * (self.experts.params(self.hidden_size) - dense)
        return mixers + self.num_layers * dense + sparse

    @property
    def head_params(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one token that attends to one token: in each head, head_dim products for its score and for its
        value."""
        if self.latents is not None:  # with keys and values of each head, which takes fewer FLOPs
            return self.num_layers * self.num_heads * 2 * self.latents.values_per_head
        return self.num_attention_layers * self.num_heads * 2 * 2 * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        if self.latents is not None:
            return self.num_layers * (self.latents.rank + self.latents.rope_dim)
        return self.num_attention_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def state_flops_per_token(self) -> int:
        return self.delta.flops_per_token if self.delta is not None else 0

    @property
    def state_bytes_per_step(self) -> int:
        """Bytes of recurrent states, in float32, that a step reads and writes for each sequence."""
        return 2 * 4 * self.delta.state_values if self.delta is not None else 0


def find_model(name: str, with_weights: bool) -> Path:
    """Return the folder `name`, or download the needed files of the hub id `name`. ValueError if there is neither.

    Works without nanovllm, because other engines' environments may lack its dependencies.
    """
    if Path(name).is_dir():
        read_config(Path(name))
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = ["*.json", "*.safetensors"] if with_weights else ["config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"--model {name!r} is not a folder and not available from the hub: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model's folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"--model must be a folder with a config.json, got {str(folder)!r}")
    return json.loads(file.read_text(encoding="utf-8"))


def resolve_dtype_name(dtype: str, folder: Path) -> str:
    """Return the name of a dtype; `auto` is the dtype in config.json."""
    raw = read_config(folder)
    name = raw.get("dtype", raw.get("torch_dtype", "float32")) if dtype == "auto" else dtype
    if name not in DTYPE_BYTES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPE_BYTES)}, got {name!r}")
    return name


def resolve_device_name(device: str) -> str:
    """Return `cuda` or `cpu` for `auto`, and any other name as it is: the engine checks it."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the number of tokens that each request generates."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def first(self, num_requests: int) -> "Workload":
        """Return the first requests as a workload with a name of its own."""
        name = f"{self.name}, the first {num_requests}"
        return Workload(name, self.prompts[:num_requests], self.output_lens[:num_requests])


def named_workload(name: str, vocab_size: int) -> Workload:
    """Return one of these workloads:

    offline: the usual offline benchmark, 256 requests of 100 to 1,024 tokens in and out
    W: 32 requests for a CPU
    W2: one request, which measures latency
    W3: 32 requests that share their first 512 tokens
    """
    if name == "offline":
        rng = random.Random(0)  # as in nano-vllm's bench.py, which draws each prompt after its length
        prompt_lens = [len([rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(100, 1024))]) for _ in range(256)]
        return make_workload(name, prompt_lens, [rng.randint(100, 1024) for _ in range(256)], vocab_size, 0)
    if name == "W3":
        return make_workload(name, [528] * 32, [32] * 32, vocab_size, 512)
    return make_workload(name, *WORKLOADS[name], vocab_size, 0)


def random_workload(
    num_requests: int, input_range: tuple[int, int], output_range: tuple[int, int], seed: int, vocab_size: int
) -> Workload:
    """Draw the lengths uniformly from (minimum, maximum), both included."""
    rng = random.Random(seed)
    prompt_lens = [rng.randint(*input_range) for _ in range(num_requests)]
    output_lens = [rng.randint(*output_range) for _ in range(num_requests)]
    return make_workload("random", prompt_lens, output_lens, vocab_size, 0, seed)


def make_workload(
    name: str, prompt_lens: list[int], output_lens: list[int], vocab_size: int, shared_len: int, seed: int = 0
) -> Workload:
    """Draw the token ids; the first `shared_len` are the same in all prompts."""
    rng = random.Random(seed)
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    shared = [rng.randint(0, top) for _ in range(shared_len)]
    prompts = [shared + [rng.randint(0, top) for _ in range(length - shared_len)] for length in prompt_lens]
    return Workload(name, prompts, list(output_lens))


@dataclass(frozen=True)
class Measurement:
    """One timed run. All requests arrive at its start, and times are in seconds from there."""

    engine: str
    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttfts_s: list[float]
    tpots_s: list[float]
    peak_memory_bytes: int
    details: dict[str, object] = field(default_factory=dict)  # figures that only one engine has

    def report(self) -> dict[str, object]:
        """Return the figures that are printed and written as JSON."""
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
            **self.details,
        }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 5) for p in (50, 90, 99)} if values else {}


def peak_memory_bytes(device: str) -> int:
    """Return the peak memory of tensors on CUDA, or the peak memory of this process and its children on a CPU.

    The sum of the processes' peaks counts, even if they were not reached at the same time.
    """
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024 + children_peak_bytes()


def children_peak_bytes() -> int:
    """Return the peak memory of this process's living descendants on Linux; some engines compute in such a process."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines() if ":" in line)
        except OSError:
            continue  # the process has ended meanwhile
        pid = int(file.parent.name)
        parents[pid] = int(fields["PPid"])
        peaks[pid] = int(fields.get("VmHWM", "0 kB").split()[0]) * 1024  # kernel threads have none
    family = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return sum(peaks[pid] for pid in family - {os.getpid()})


def describe_machine(device: str, packages: tuple[str, ...] = ()) -> dict[str, object]:
    """Return the hardware, versions and commit to report with the figures; `packages` are those of the engine."""
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bfloat16": cpu_bfloat16(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version for name in packages if (version := package_version(name))},
        "platform": platform.platform(),
        "commit": read_commit(),
    }


def read_commit() -> str:
    """Return the short hash, or `unknown` without git or outside a repository."""
    try:
        result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER)
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_bfloat16() -> list[str]:
    """Return which bfloat16 instructions the CPU has."""
    flags = cpu_info("flags").split()
    return [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]


def cpu_info(field: str) -> str:
    """Return a field of /proc/cpuinfo for the first CPU; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == field), "")
