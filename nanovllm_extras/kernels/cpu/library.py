"""Compile `cpu.c` on first use, for this processor and one dtype, and keep the library in the user's cache folder.

`quantised.c`, for weights of 8 or 4 bits, and `int8_kv.c`, for K and V of 8 bits, become libraries in the same way.

Compiling takes some seconds and a C compiler (`toolchain.py`). Without one, `load_library` raises NoLibraryError with
the reason, and the engine runs the PyTorch layers. If the cache folder (`library_cache.py`) cannot be used, every
process compiles its own library.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from pathlib import Path

import torch

from nanovllm_extras.kernels.cpu.library_cache import (
    TEMPORARY,
    CacheError,
    NoLibraryError,
    cache_folder,
    find_or_compile,
)
from nanovllm_extras.kernels.cpu.threads import places
from nanovllm_extras.kernels.cpu.toolchain import (
    SYSTEMS,
    ask_for_tiles,
    cpu_flags,
    describe_processor,
    find_compiler,
    flags,
    has_tiles,
    thread_counter,
)
from nanovllm_extras.machine.own_process import load_elsewhere_first
from nanovllm_extras.models.masking import AttentionOptions

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.c")
QUANTISED = SOURCE.with_name("quantised.c")  # a separate library, as is int8_kv.c
INT8_KV = SOURCE.with_name("int8_kv.c")
HEADERS = sorted(SOURCE.parent.glob("*.h"))
LANES = 16  # floats in a vector, columns in a panel
FLAGS = flags(platform.system(), platform.machine())
DTYPES = (torch.bfloat16, torch.float32)
LONG_MAX = (1 << 63) - 1

FUNCTIONS_OF_LAYERS: dict[str, Sequence[type]] = {  # argument types: pointers, then sizes, then the rest
    "linear": [c_void_p] * 4 + [c_long] * 3 + [c_int],
    "store_kv": [c_void_p] * 5 + [c_long] * 6,
    "attend": [c_void_p] * 8 + [c_long] * 8 + [c_float] * 2,
    "rms_norm": [c_void_p] * 5 + [c_long] * 5 + [c_int, c_float],
    "gated_linear": [c_void_p] * 4 + [c_long] * 3 + [c_int],
    "gate_and_mul": [c_void_p] * 3 + [c_long] * 3 + [c_int],
    "argmax": [c_void_p] * 2 + [c_long] * 2,
    "decoder_layer": [c_void_p] * 5,
    "add_adapters": [c_void_p] * 4 + [c_long],
    "mixture": [c_void_p] * 5 + [c_long] * 2,
    "sigmoid": [c_void_p, c_long],
    "store_latents": [c_void_p] * 3 + [c_long] * 2,
    "attend_latents": [c_void_p] * 6 + [c_long] * 7 + [c_float] * 2,
    "gated_delta": [c_void_p] * 12 + [c_long] * 2,
    "head_linear": [c_void_p] * 3 + [c_long] * 4,
    "all_reduce": [c_void_p] * 2 + [c_long],
    "broadcast": [c_void_p] * 2 + [c_long],
    "gather": [c_void_p] * 3 + [c_long] * 2,
    "abort_ranks": [c_void_p],
    "keep_threads": [c_int],
}
FUNCTIONS_OF_QUANTISED: dict[str, Sequence[type]] = {
    "quantised_linear": [c_void_p] * 4 + [c_long] * 3 + [c_int],
    "quantised_gated_linear": [c_void_p] * 4 + [c_long] * 3 + [c_int],
    "quantised_rows": [c_void_p] * 3 + [c_long] * 2,
}
FUNCTIONS = {
    SOURCE: FUNCTIONS_OF_LAYERS,
    QUANTISED: FUNCTIONS_OF_QUANTISED,
    INT8_KV: {name: FUNCTIONS_OF_LAYERS[name] for name in ("store_kv", "attend")},
}
WITHOUT_STATUS = {  # all other functions return a status
    *("store_kv", "rms_norm", "gate_and_mul", "argmax", "sigmoid", "store_latents", "abort_ranks", "keep_threads"),
    "quantised_rows",
}
NO_MEMORY = 2  # of `enum status` in allocate.h; 1 is that the ranks were aborted


class Library(ctypes.CDLL):
    """A loaded library, compiled from `cpu.c`, `quantised.c` or `int8_kv.c`. LoadError if it crashes or hangs."""

    def __init__(self, path: Path, source: Path, why_no_tiles: str | None) -> None:
        load_elsewhere_first(path)
        super().__init__(str(path))
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        for name, argtypes in FUNCTIONS[source].items():
            getattr(self, name).argtypes = argtypes
            getattr(self, name).restype = None if name in WITHOUT_STATUS else c_int
            if name not in WITHOUT_STATUS:
                getattr(self, name).errcheck = check_memory
        self.instructions.restype = c_char_p
        self.element_bytes.restype = c_long
        self.dtype = next(dtype for dtype in DTYPES if dtype.itemsize == self.element_bytes())
        self.join_team.argtypes = [c_void_p, c_void_p, c_char_p, c_long]
        self.join_team.restype = c_void_p
        team = team_of_process()
        team.value = self.join_team(team, thread_counter(), *bound_cpus())
        name = self.instructions().decode()
        self.description = f"{name} (no AMX: {why_no_tiles})" if why_no_tiles else name

    def path_for_others(self) -> str:
        """Return a path from which another process can load the library. The file itself may have been deleted."""
        return self._name if os.path.exists(self._name) else f"/proc/{os.getpid()}/fd/{self._file}"


@functools.cache
def team_of_process() -> c_void_p:
    """Return the pointer to the team of threads (`team.h`) that all libraries share: NULL until the first is loaded."""
    return c_void_p()


@functools.cache
def bound_cpus() -> tuple[bytes | None, int]:
    """Return the processors of a team's threads as a bit mask, and its length in bytes; None if OpenMP binds no thread.

    Otherwise a new thread would inherit the one processor to which OpenMP has bound the main thread.
    """
    mask = sum(1 << cpu for cpu in places())
    num_bytes = (mask.bit_length() + 63) // 64 * 8
    return (mask.to_bytes(num_bytes, sys.byteorder), num_bytes) if mask else (None, 0)


def check_memory(status: int, function: Callable[..., object], arguments: tuple[object, ...]) -> int:
    """Return the status of a C function. Raises MemoryError if it could not allocate memory."""
    if status == NO_MEMORY:
        raise MemoryError(f"there was no memory for the buffers of the CPU kernel {function.__name__}")
    return status


@functools.cache
def load_library(dtype: torch.dtype, source: Path = SOURCE) -> Library:
    """Compile `source` for `dtype`, or take it from the cache, and load it.

    Raises NoLibraryError if that fails, and LoadError if the library crashes or hangs when it is loaded.
    """
    if dtype not in DTYPES:
        raise NoLibraryError(f"the CPU kernels support bfloat16 and float32, not {dtype}")
    system = platform.system()
    if system not in SYSTEMS:
        raise NoLibraryError(f"the CPU kernels are for {' and '.join(SYSTEMS)}, not for {system}")
    compiler = find_compiler(system)
    if not compiler:
        raise NoLibraryError("there is no C compiler (cc, gcc, clang or $CC) on this machine")
    command = [*shlex.split(compiler), *FLAGS, *(["-DBFLOAT16"] if dtype == torch.bfloat16 else [])]
    if source == INT8_KV or (source == SOURCE and dtype != torch.bfloat16):  # without tiles
        return compile_and_load(command, source)
    if not has_tiles():
        return compile_and_load(command, source, why_no_tiles_are_shown())
    reason = ask_for_tiles()
    if not reason:
        try:
            return compile_and_load([*command, "-DAMX"], source)
        except NoLibraryError:  # if AMX is not the cause, the call below raises it again
            reason = f"{command[0]} cannot compile it"
    return compile_and_load(command, source, reason)


def masking(options: AttentionOptions, default_scale: float) -> tuple[int, float, float]:
    """Return the values of C's `struct masking` but the sinks: (window, scale, softcap)."""
    window = LONG_MAX if options.window is None else options.window
    return window, default_scale if options.scale is None else options.scale, options.softcap or 0.0


def compile_and_load(command: list[str], source: Path, why_no_tiles: str | None = None) -> Library:
    """Compile and load a library in the cache folder or, if that fails, in a temporary folder."""
    command = [*command, str(source), "-lm"]
    try:
        name = f"{source.stem}-{fingerprint(command, source)}"
        return load_from_cache_or_temporary_folder(name, command, source, why_no_tiles)
    except OSError as error:  # the compiler does not exist, no folder can be created, ...
        raise NoLibraryError(f"{source.name} could not be compiled and loaded: {error}") from error


def load_from_cache_or_temporary_folder(
    name: str, command: list[str], source: Path, why_no_tiles: str | None
) -> Library:
    try:
        return Library(find_or_compile(cache_folder(), name, command), source, why_no_tiles)
    except (OSError, CacheError, NoLibraryError) as error:  # owned by another user, read-only, full, noexec, ...
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
            library = Library(find_or_compile(Path(folder), name, command), source, why_no_tiles)
        logger.warning("the CPU kernels are compiled for this process only: %s", error)
        return library


def why_no_tiles_are_shown() -> str | None:
    """Return why a processor that should have AMX does not show it, or None.

    Intel's servers have AVX-512 FP16 and AMX together. If Linux shows only AVX-512 FP16, AMX is hidden.
    """
    return "Linux shows no amx_tile and amx_bf16" if "avx512_fp16" in cpu_flags() else None


def keep_freed_memory() -> None:
    """Make malloc keep memory that one step frees for the next step.

    Linux clears new memory page by page, which takes a tenth of the time of a prefill. Call this function after the
    weights have been packed. Allocations as large as a KV cache still get new memory, whose pages are not touched.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # of <malloc.h>
    if platform.system() == "Linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(m_mmap_threshold, 1 << 28)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def fingerprint(command: list[str], source: Path) -> str:
    """Return a hash of the source, the command, the compiler's version and the processor."""
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    sources = [path.read_bytes() for path in (source, *HEADERS)]
    processor = describe_processor(platform.system()).encode()
    parts = [*sources, "\0".join(command).encode(), version, processor]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
