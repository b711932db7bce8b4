"""What a machine has: processor, GPUs, memory, and the packages that parts of nanovllm need."""

import os
import platform
import time
from collections.abc import Collection
from pathlib import Path

import torch

from nanovllm.config import resolve_device
from nanovllm_extras.kernels.cpu.library import has_tiles
from nanovllm_extras.kernels.cpu.threads import allowed_threads, describe_cores
from nanovllm_extras.kernels.cpu.toolchain import cpu_flags, find_compiler
from nanovllm_extras.machine.machine_limits import free_bytes, read_text
from nanovllm_extras.self_check.stored_results import version_of

ALWAYS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "xxhash", "tqdm",
          "docstring-parser")  # fmt: skip
OPTIONAL = {  # package -> the extra of pyproject.toml that installs it
    "triton": "",
    "flash-attn": "cuda",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus-client": "serve",
    "uvloop": "serve",
    "pyarrow": "batch",
    "llguidance": "structured",
    "gguf": "gguf",
    "prompt_toolkit": "chat",
    "rich": "chat",
    "httpx": "chat",
    "aiohttp": "bench",
    "matplotlib": "bench",
    "hypothesis": "learn",
    "watchfiles": "learn",
    "ray": "ray",
}
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
NUM_BYTES = 1 << 28  # that are read to measure the memory's speed: more than caches hold


def describe_machine() -> dict[str, str]:
    """Return name -> value, in the order in which they are printed."""
    free = free_bytes()
    found = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
        "nanovllm": version_of("nanovllm") or "not installed (a folder of sources)",
        "processor": processor_name(),
        "class": machine_class(),
        "instructions": ", ".join(flag for flag in INSTRUCTIONS if flag in cpu_flags()) or "unknown",
        "cores to use": describe_cores(),
        "free memory": "unknown" if free is None else f"{free / 2**30:.1f} GiB",
        "C compiler": find_compiler(platform.system()) or "none: install gcc, for the C kernels",
    }
    if not torch.cuda.is_available():
        return {**found, "GPU": "none that PyTorch can use"}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        left, total = (num_bytes / 2**30 for num_bytes in torch.cuda.mem_get_info(i))
        found[f"GPU {i}"] = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        found[f"memory of GPU {i}"] = f"{left:.1f} of {total:.1f} GiB free"
    driver = read_text(Path("/proc/driver/nvidia/version")).splitlines()
    return {**found, "CUDA": str(torch.version.cuda), "driver": driver[0] if driver else "unknown"}


def processor_name() -> str:
    """Return the name of the processor, and whether it has AMX that the kernels use."""
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() + (", with AMX" if has_tiles() else "")
    return platform.processor() or platform.machine()


def machine_class() -> str:
    """Return the class of this machine: its cores and its instructions, by which figures can be compared."""
    return f"{allowed_threads() or os.cpu_count()} cores, {instruction_class(cpu_flags())}"


def instruction_class(flags: Collection[str]) -> str:
    """Return the widest instructions of a processor that the kernels use, in the words of docs/performance.md.

    flags: its features as in `/proc/cpuinfo`. The name of a processor does not say which instructions it has, and
    figures of processors with the same instructions can be compared.
    """
    if not flags:
        return "unknown instructions"
    if {"amx_tile", "amx_bf16", "amx_int8"} <= {*flags}:
        return "AMX, bfloat16 instructions"
    widest = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    name = next((name for flag, name in widest.items() if flag in flags), "neither AVX2 nor NEON")
    has_bfloat16 = "avx512_bf16" in flags if name == "AVX-512" else name == "NEON" and "bf16" in flags
    return f"{name}, {'' if has_bfloat16 else 'no '}bfloat16 instructions"


def describe_packages() -> list[tuple[str, str | None, str]]:
    """Return (package, version, command to install it) for all packages; the version is None if it is missing."""
    found: list[tuple[str, str | None, str]] = [(name, version_of(name), "") for name in ALWAYS]
    for name, extra in OPTIONAL.items():
        command = f"pip install 'nanovllm[{extra}]'" if extra else f"pip install {name}"
        installed = version_of(name)
        found.append((name, installed, "" if installed else command))
    return found


def memory_bandwidth(device_name: str) -> float:
    """Return how fast one sum over a large tensor reads the memory, in GB/s: the best of some runs."""
    device = resolve_device(device_name)
    numbers = torch.ones(NUM_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        numbers.sum().item()  # `item` waits for the device
        best = min(best, time.perf_counter() - start)
    return NUM_BYTES / best / 1e9
