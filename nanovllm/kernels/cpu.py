"""Fast layers on CPU: twins of what `layers/` defines in PyTorch, with the same signatures, that call `cpu.c`.

`cpu.c` is compiled on first use, for this processor and one dtype, and kept in the user's cache folder; it takes two
seconds and a C compiler. Without one, `load_library` says why, and the engine runs the PyTorch layers.

A weight is packed once, when its layer is replaced: `F.linear` would reorder a bfloat16 weight at every call. Add-on:
`startup.py` calls `select_backend`, and `replace_layers` when the weights are loaded; nothing else knows of it.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.batch import Batch
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RMSNormRotary

SOURCE = Path(__file__).with_name("cpu.c")
SOURCES = [SOURCE, *(SOURCE.with_name(f"cpu_{name}.h") for name in ("vectors", "product", "tiles"))]
LANES = 16  # floats in a vector, columns in a panel
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
DTYPES = (torch.bfloat16, torch.float32)

FUNCTIONS = {  # pointers, then sizes, then the rest
    "linear": [c_void_p] * 4 + [c_long] * 3 + [c_int],
    "store_kv": [c_void_p] * 5 + [c_long] * 6,
    "attend": [c_void_p] * 7 + [c_long] * 7 + [c_float],
    "rms_norm": [c_void_p] * 5 + [c_long] * 4 + [c_float],
    "silu_and_mul": [c_void_p] * 3 + [c_long] * 3,
    "decoder_layer": [c_void_p] * 5,
}


# ---- the library


class NoLibraryError(RuntimeError):
    """Why `cpu.c` cannot be used here."""


class Library(ctypes.CDLL):
    """`cpu.c`, compiled. Its functions are `FUNCTIONS`."""

    def __init__(self, path: Path, why_no_tiles: str | None) -> None:
        super().__init__(str(path))
        for name, argtypes in FUNCTIONS.items():
            getattr(self, name).argtypes = argtypes
            getattr(self, name).restype = None
        self.instructions.restype = ctypes.c_char_p
        name = self.instructions().decode()
        self.description = f"{name} (no AMX: {why_no_tiles})" if why_no_tiles else name


@functools.cache
def load_library(dtype: torch.dtype) -> Library:
    """`cpu.c`, compiled for `dtype`. NoLibraryError if that is not possible."""
    if dtype not in DTYPES:
        raise NoLibraryError(f"the CPU kernels know bfloat16 and float32, not {dtype}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if platform.system() != "Linux" or not compiler:
        raise NoLibraryError(f"there is no C compiler (cc, gcc, clang or $CC) on this {platform.system()} machine")
    command = [*shlex.split(compiler), *FLAGS, *(["-DBFLOAT16"] if dtype == torch.bfloat16 else [])]
    if dtype != torch.bfloat16 or not has_tiles():
        return compile_and_load(command)
    reason = ask_for_tiles()
    if not reason:
        try:
            return compile_and_load([*command, "-DAMX"])
        except NoLibraryError:  # if that has another cause, it comes back
            reason = f"{command[0]} cannot compile it"
    return compile_and_load(command, reason)


def compile_and_load(command: list[str], why_no_tiles: str | None = None) -> Library:
    command = [*command, str(SOURCE), *openmp_of_torch(), "-lm"]
    try:
        path = cache_folder() / f"cpu-{fingerprint(command)}.so"
        if not path.is_file():
            compile_to(path, command)
        return Library(path, why_no_tiles)
    except OSError as error:  # a folder that cannot be written, a compiler that is not there, ...
        raise NoLibraryError(f"{SOURCE.name} could not be compiled and loaded: {error}") from error


def has_tiles() -> bool:
    """Whether the processor has AMX for bfloat16, and neither Linux nor a hypervisor hides it."""
    return {"amx_tile", "amx_bf16"} <= set(cpu_flags())


def ask_for_tiles(feature: int = 18) -> str | None:
    """Why this process may not use AMX. Linux wants to be asked, since tiles are much to save at a change of threads.

    `feature` is XFEATURE_XTILE_DATA of Linux's <asm/fpu/types.h>."""
    arch_prctl, arch_req_xcomp_perm = 158, 0x1023  # of <asm/unistd_64.h>, <asm/prctl.h>
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(c_long(arch_prctl), c_long(arch_req_xcomp_perm), c_long(feature)) == 0:
        return None
    return f"Linux does not allow it: {os.strerror(ctypes.get_errno())}"


def cpu_flags() -> list[str]:
    """What Linux says that the first processor can do."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if platform.system() == "Linux" else ""
    line = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    return line.partition(":")[2].split()


def keep_freed_memory() -> None:
    """Have malloc keep what one step frees for the next: fresh memory is cleared page by page, a tenth of a prefill.

    Called when the weights lie where they stay. What is as large as a KV cache still comes fresh, and untouched."""
    m_trim_threshold, m_mmap_threshold = -1, -3  # of <malloc.h>
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_threshold, 1 << 28)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def openmp_of_torch() -> list[str]:
    """Linked first, so that torch and `cpu.c` share one pool of threads: two would wait for each other's cores."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return ["-Wl,--as-needed", str(found[0])] if found else []


def cache_folder() -> Path:
    """Only its owner may write into it: what lies there is run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "nanovllm"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise NoLibraryError(f"others than you can write into {folder}: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


def fingerprint(command: list[str]) -> str:
    """Changes with the source, the command, the compiler and the processor."""
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    sources = [source.read_bytes() for source in SOURCES]
    processor = " ".join([platform.machine(), *cpu_flags()])
    parts = [*sources, "\0".join(command).encode(), version, processor.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def compile_to(path: Path, command: list[str]) -> None:
    """Two processes may compile at once: each writes a file of its own, and the last to finish takes the name."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        run = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
        if run.returncode:
            raise NoLibraryError(f"{command[0]} could not compile {SOURCE.name}: {run.stderr.strip()[:500]}")
        os.replace(target, path)


# ---- attention


class CpuAttention(AttentionBackend):
    """Walks the block tables in C. A block holds each head's K and V in the layout that the products like best."""

    default_block_size = 16

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.library = load_library(self.dtype)
        self.instructions = self.library.description

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if device.type != "cpu":
            return f"it runs on CPU, not on {device}"
        if head_dim % (2 * LANES):
            return f"the model's head_dim must be a multiple of {2 * LANES}, it is {head_dim}"
        if block_size is not None and block_size % LANES:
            return f"block_size must be a multiple of {LANES}, got {block_size}"
        try:
            load_library(dtype)
        except NoLibraryError as error:
            return str(error)
        return None

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return (2, num_layers, num_blocks, self.num_kv_heads, self.block_size * self.head_dim)

    def replace_layers(self, model: nn.Module) -> None:
        from nanovllm.kernels.cpu_layer import fuse_layers

        replace_layers(model, self.dtype)
        fuse_layers(model, self)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        k_cache, v_cache = layer_cache
        self.library.store_kv(
            *(t.data_ptr() for t in (k, v, k_cache, v_cache, slot_mapping)),
            *(len(k), k.stride(0), v.stride(0), self.num_kv_heads, self.head_dim, self.block_size),
        )

    def attend(self, q: torch.Tensor, layer_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        tensors = (q, out, *layer_cache, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
        self.library.attend(
            *(t.data_ptr() for t in tensors),
            *(*batch.block_tables.shape, q.stride(0), self.num_heads, self.num_kv_heads, self.head_dim),
            *(self.block_size, self.scale),
        )
        return out


# ---- the other layers


class HugePages:
    """Memory for weights in pages of 2 MiB, where Linux has some: with pages of 4 KiB, looking up addresses can take
    half of the time of reading them."""

    ALIGNMENT = 64  # of each tensor, for vector loads

    def __init__(self, num_bytes: int) -> None:
        page = 2 << 20
        memory = mmap.mmap(-1, num_bytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`, as do all its slices
        self._next = -self._memory.data_ptr() % page

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start, num_bytes = self._next, math.prod(shape) * dtype.itemsize
        self._next += num_bytes + -num_bytes % self.ALIGNMENT
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def packed_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Of a weight [out, in]: panels of 16 outputs, [ceil(out / 16), in / per_word, 16, per_word]"""
    per_word = 4 // weight.itemsize  # elements in 32 bits
    return (-(-weight.shape[0] // LANES), weight.shape[1] // per_word, LANES, per_word)


def pack(weight: torch.Tensor, memory: HugePages) -> torch.Tensor:
    """[out, in] -> `packed_shape`, the last panel filled up with zeros."""
    num_panels, num_words, _, per_word = shape = packed_shape(weight)
    padded = F.pad(weight, (0, 0, 0, -len(weight) % LANES))
    panels = padded.view(num_panels, LANES, num_words, per_word).transpose(1, 2)
    return memory.empty(shape, weight.dtype).copy_(panels)


class CpuLinear(nn.Module):
    """x: [num_tokens, in_features] -> x @ weight.T + bias: [num_tokens, out_features]"""

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages) -> None:
        super().__init__()
        self.library = load_library(weight.dtype)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", pack(weight, memory))
        padded = None if bias is None else F.pad(bias, (0, -len(bias) % LANES))
        self.register_buffer("bias", padded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, torch.empty(len(x), self.out_features, dtype=x.dtype))

    def product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y` may be float32: it gets the sums as they are."""
        x, bias = x.contiguous(), None if self.bias is None else self.bias.data_ptr()
        wants_floats = y.dtype == torch.float32
        self.library.linear(
            *(x.data_ptr(), self.packed.data_ptr(), bias, y.data_ptr()),
            *(len(x), self.out_features, self.in_features, wants_floats),
        )
        return y


class CpuFusedLinear(CpuLinear):
    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages, rows: tuple[int, ...]
    ) -> None:
        super().__init__(weight, bias, memory)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return super().forward(x).split(self.rows, dim=-1)


class CpuEmbedding(CpuLinear):
    """Reads vectors from the packed weight too, so that tied embeddings are in memory once."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.packed[token_ids // LANES, :, token_ids % LANES].flatten(1)  # [num_tokens, hidden_size]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size] float32: the sampler wants no rounded ones"""
        return self.product(hidden, torch.empty(len(hidden), self.out_features, dtype=torch.float32))


class CpuRMSNorm(nn.Module):
    """Also `RMSNormRotary`: with cosines and sines each head is turned as well."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.library = load_library(weight.dtype)
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [num_tokens, (num_heads,) size]; cos, sin: [num_tokens, 1, size / 2]"""
        y = torch.empty(x.shape, dtype=x.dtype)
        num_heads = x.shape[1] if x.dim() == 3 else 1
        angles = (None, None) if cos is None or sin is None else (cos.data_ptr(), sin.data_ptr())
        self.library.rms_norm(
            *(x.data_ptr(), self.weight.data_ptr(), *angles, y.data_ptr()),
            *(len(x), num_heads, x.shape[-1], x.stride(0), self.eps),
        )
        return y


class CpuSiluAndMul(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.library = load_library(dtype)

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.shape[1] % LANES:
            return F.silu(gate) * up
        y = torch.empty(gate.shape, dtype=gate.dtype)
        self.library.silu_and_mul(
            *(gate.data_ptr(), up.data_ptr(), y.data_ptr()), *(len(gate), gate.shape[1], gate.stride(0))
        )
        return y


def replace_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Put the fast twin in the place of every layer that has one for its shape. The model's weights are loaded."""
    weights = [layer.weight for layer in model.modules() if has_matrix(layer)]
    memory = HugePages(sum(math.prod(packed_shape(w)) * w.itemsize + HugePages.ALIGNMENT for w in weights))
    twins: dict[nn.Module, nn.Module | None] = {}  # a layer may have two places: tied embeddings
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children() leaves out a second name
            if child is None:
                continue
            if child not in twins:
                twins[child] = make_twin(child, dtype, memory)
                if twins[child] is not None:  # the layer may live on in `twins`, but its weight is not needed twice
                    child._parameters.clear()
            if twins[child] is not None:
                setattr(module, name, twins[child])
    keep_freed_memory()


def has_matrix(layer: nn.Module) -> TypeGuard[Linear | Embedding]:
    """Whether its weight can be packed."""
    return isinstance(layer, Linear | Embedding) and layer.weight.shape[1] % 2 == 0


def make_twin(layer: nn.Module, dtype: torch.dtype, memory: HugePages) -> nn.Module | None:
    if isinstance(layer, SiluAndMul):
        return CpuSiluAndMul(dtype)
    if isinstance(layer, RMSNorm):
        unit = 2 * LANES if isinstance(layer, RMSNormRotary) else LANES
        return None if len(layer.weight) % unit else CpuRMSNorm(layer.weight, layer.eps)
    if not has_matrix(layer):
        return None
    if isinstance(layer, FusedLinear):
        return CpuFusedLinear(layer.weight, layer.bias, memory, tuple(layer.parts.values()))
    if isinstance(layer, Linear):
        return CpuLinear(layer.weight, layer.bias, memory)
    return CpuEmbedding(layer.weight, None, memory)
