"""Results of self-checks, one small file for each, in the folder of compiled kernels.

The name of a file is a hash of everything that a result depends on: kernels, compiler, libraries, processor or GPU,
driver, shape of the network, dtypes. So a change of any of them leads to a new check.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.kernels.cpu.library_cache import CacheError, cache_folder
from nanovllm_extras.machine.machine_limits import read_text

PACKAGE = Path(__file__).parent.parent.parent
FOLDERS = (
    *("nanovllm", "nanovllm/layers", "nanovllm/models"),
    *(f"nanovllm_extras/{name}" for name in ("execution", "machine", "models", "sampling", "self_check", "weights")),
    *(f"nanovllm_extras/kernels{name}" for name in ("", "/cpu", "/cuda")),
)
CUDA_PACKAGES = ("triton", "flash-attn", "flash-attn-3")


class Result(NamedTuple):
    is_right: bool
    reason: str = ""
    """What was wrong."""
    date: str = ""


class StoredResult:
    """The result for one runner, whose attention backend is chosen."""

    def __init__(self, runner: Runner) -> None:
        parts = "\0".join(map(str, describe(runner)))
        name = f"checked-{hashlib.sha256(parts.encode()).hexdigest()[:32]}.json"
        self.path: Path | None = None
        with suppress(OSError, CacheError):  # without a folder, every start checks
            self.path = cache_folder() / name

    def read(self) -> Result | None:
        """Return the result, or None if there is none, or the file is damaged."""
        if self.path is None:
            return None
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return Result(bool(content["is_right"]), str(content["reason"]), str(content["date"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, result: Result) -> None:
        """Store the result. Nothing is stored if the folder cannot be written to."""
        if self.path is None:
            return
        content = json.dumps(result._replace(date=time.strftime("%Y-%m-%d"))._asdict())
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                new.write_text(content, encoding="utf-8")
                os.replace(new, self.path)
            finally:
                new.unlink(missing_ok=True)  # if the disk is full


def describe(runner: Runner) -> list[object]:
    """Return everything that the result depends on."""
    config, backend = runner.config, runner.backend
    libraries = [library._name for library in vars(backend).values() if hasattr(library, "_name")]
    parts: list[object] = [
        type(backend), getattr(backend, "instructions", None),
        backend.block_size, *map(os.path.basename, libraries),
        *(config.enforce_eager, config.enable_cuda_graphs, config.quantization, config.kv_cache_dtype),
        *(config.load_format == "gguf", config.num_kv_blocks, config.kv_cache_memory_bytes),
        *(config.max_num_batched_tokens, config.max_num_seqs, config.tensor_parallel_size, runner.part.rank),
        *(runner.shape, runner.dtype, runner.device, torch.__version__, torch.get_num_threads(), sources()),
    ]  # fmt: skip
    if runner.device.type == "cuda":
        parts += [torch.cuda.get_device_properties(runner.device), torch.version.cuda]
        parts += [read_text(Path("/proc/driver/nvidia/version")), *map(version_of, CUDA_PACKAGES)]
    return parts


def sources() -> list[tuple[str, int, int]]:
    """Return name, size and time of each source file that computes, or checks what computes."""
    found = []
    for folder in FOLDERS:
        with os.scandir(PACKAGE / folder) as entries:
            found += [(one.name, one.stat()) for one in entries if one.name.endswith((".py", ".c", ".h"))]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
