"""What the Triton kernels take of a GPU: registers, spills and shared memory, found by compiling them without one.

    python -m benchmarks.kernel_resources [--arch 80 90] [--quick] [--json]

Triton compiles for any target, and the machine code says what came out. A spill is a value that found no register and
goes through memory in each pass of a loop; there should be none. Shared memory and registers decide how many programs
fit a multiprocessor at a time (the last column).
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanovllm.kernels.activation import BLOCK, silu_and_mul_kernel
from nanovllm.kernels.launch import GPU, Launch, decode_launch, prefill_launch
from nanovllm.kernels.norm import HEAD_ELEMENTS, norm_rotary_store_kernel, rms_norm_kernel, warps_for
from nanovllm.kernels.paged_attention import decode_kernel, merge_kernel, prefill_kernel
from nanovllm.kernels.sample import (
    CAPACITY,
    CHUNK,
    GROUP,
    ZERO_BITS,
    num_truncate_warps,
    pick_kernel,
    stats_kernel,
    truncate_kernel,
)
from nanovllm.kernels.store_kv import store_kv_kernel

# num_multiprocessors, bytes of shared memory for one program
GPUS = {80: GPU(108, 163 * 1024), 90: GPU(132, 227 * 1024)}
REGISTERS, RESERVED_SHARED = 65536, 1024  # of a multiprocessor; of each program

SAMPLING = ("stats", "truncate", "pick")
CHUNKS = 128  # a power of two, of Qwen3's 151,936 tokens

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}


@dataclass(frozen=True)
class Case:
    """One kernel as it is compiled for a model: 8 K and V heads, a group of query heads to each.

    Kernels that know no heads get the size of a row as `head_dim`; those that sample need neither.
    """

    kernel: str
    arch: int
    dtype: torch.dtype
    head_dim: int = 128
    block_size: int = 16
    is_fp8: bool = False
    group: int = 4

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + ("+fp8" if self.is_fp8 else "")
        shape = "" if self.kernel in SAMPLING else f" head_dim {self.head_dim} block_size {self.block_size}"
        return f"{self.kernel} sm_{self.arch} {dtype}{shape}"


@dataclass(frozen=True)
class Resources:
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int

    def programs_per_multiprocessor(self, gpu: GPU) -> int:
        by_registers = REGISTERS // (self.registers * self.num_warps * 32)
        return min(by_registers, (gpu.shared_memory + RESERVED_SHARED) // (self.shared_bytes + RESERVED_SHARED))


def all_cases(arch: int, is_quick: bool = False) -> Iterator[Case]:
    """Every specialisation; with `is_quick` those that differ most."""
    half = [torch.bfloat16] if is_quick else [torch.bfloat16, torch.float16]
    for dtype in half:
        for head_dim in (64, 128):
            for is_fp8 in (False, True) if arch >= 89 else (False,):  # no e4m3 instructions before 8.9
                yield Case("store_kv", arch, dtype, head_dim, is_fp8=is_fp8)
                for block_size in (16, 256):
                    yield Case("decode", arch, dtype, head_dim, block_size, is_fp8)
                    yield Case("prefill", arch, dtype, head_dim, block_size, is_fp8)
                yield Case("norm_rotary_store", arch, dtype, head_dim, is_fp8=is_fp8)
            yield Case("merge", arch, dtype, head_dim)
        for hidden_size in (1024, 5120):
            yield Case("rms_norm", arch, dtype, hidden_size)
        yield Case("silu_and_mul", arch, dtype, 3072)
    for head_dim in (128,) if is_quick else (64, 128):
        yield Case("norm_rotary_store", arch, torch.float32, head_dim)
        yield Case("decode", arch, torch.float32, head_dim)
        yield Case("prefill", arch, torch.float32, head_dim)
    for dtype in (*half, torch.float32):
        for kernel in SAMPLING:
            yield Case(kernel, arch, dtype)


def compile_case(case: Case, launch: Launch | None = None) -> tuple[Any, Resources]:
    """The compiled kernel (its `asm` holds every stage) and what it takes."""
    gpu = GPUS[case.arch]
    x, cache = POINTERS[case.dtype], POINTERS[torch.float8_e4m3fn if case.is_fp8 else case.dtype]
    choose = {"decode": decode_launch, "prefill": prefill_launch}.get(case.kernel)
    if launch is None and choose is not None:
        launch = choose(case.group, case.head_dim, case.dtype, gpu)
    attention = {"NUM_KV_HEADS": 8, "GROUP": case.group, "HEAD_DIM": case.head_dim, "BLOCK_SIZE": case.block_size}
    num_warps, num_stages = 4, 3
    if launch is not None:
        attention |= {"ROWS": launch.rows, "TILE": launch.tile}
        num_warps, num_stages = launch.num_warps, launch.num_stages
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    if case.kernel == "store_kv":
        kernel, types = store_kv_kernel, {"k": x, "v": x, "k_cache": cache, "v_cache": cache, "slot_mapping": "*i32"}
        constants = {"NUM_KV_HEADS": 8, "HEAD_DIM": case.head_dim, "ROW": 8 * case.head_dim, "IS_FP8": case.is_fp8}
    elif case.kernel == "norm_rotary_store":
        kernel, heads = norm_rotary_store_kernel, min(HEAD_ELEMENTS // case.head_dim, 8)
        types = dict.fromkeys(("q", "qkv", "q_weight", "k_weight", "cos", "sin"), x) | dict.fromkeys(
            ("k_cache", "v_cache"), cache
        )
        constants = {"NUM_HEADS": 8 * case.group, "NUM_KV_HEADS": 8, "HEAD_DIM": case.head_dim, "HEADS": heads}
        constants["IS_FP8"] = case.is_fp8
        num_warps = warps_for(heads * case.head_dim * case.dtype.itemsize // 2)
    elif case.kernel == "rms_norm":
        kernel, types = rms_norm_kernel, {"y": x, "x": x, "weight": x}
        constants = {"SIZE": case.head_dim, "BLOCK": triton.next_power_of_2(case.head_dim)}
        num_warps = warps_for(constants["BLOCK"] * case.dtype.itemsize)
    elif case.kernel == "silu_and_mul":
        kernel, types, constants = silu_and_mul_kernel, {"z": x, "gate_up": x}, {"SIZE": case.head_dim, "BLOCK": BLOCK}
    elif case.kernel == "decode":
        kernel, constants = decode_kernel, attention
        types = {"out": x, "part": "*fp32", "part_lse": "*fp32", "q": x, "k_cache": cache, "v_cache": cache}
    elif case.kernel == "merge":
        kernel, types = merge_kernel, {"out": x, "part": "*fp32", "part_lse": "*fp32"}
        constants = {"HEAD_DIM": case.head_dim, "TILE": 64, "SPLITS": 16}
    elif case.kernel in SAMPLING:
        kernel, types, constants = sampling_case(case.kernel, case.dtype)
        num_warps = num_truncate_warps(CHUNK, GROUP) if case.kernel == "truncate" else 4
    else:
        kernel, constants = prefill_kernel, attention
        types = {"out": x, "q": x, "k_cache": cache, "v_cache": cache}

    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        floats = name.endswith("scale") or name == "eps"
        pointer = types.get(name.removesuffix("_ptr"), "*i32")
        signature[name] = pointer if name.endswith("_ptr") else "fp32" if floats else "i32"
        if name in constants:
            signature[name] = "constexpr"
        elif not floats and name not in kernel.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]  # tensors are aligned, and so are whole rows
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    registers, spill_bytes = read_cubin(compiled.asm["cubin"])
    return compiled, Resources(registers, spill_bytes, compiled.metadata.shared, num_warps, num_stages)


def sampling_case(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Kernel, types of pointers and constants for rows of all kinds."""
    kernel = {"stats": stats_kernel, "truncate": truncate_kernel, "pick": pick_kernel}[name]
    floats = ("maxima", "sums", "limits", "spare", "temperatures", "min_p", "top_p")
    types = {**dict.fromkeys(floats, "*fp32"), "uniforms": "*fp64", "top_k": "*i64", "token_ids": "*i64"}
    constants = {"CHUNK": CHUNK, "CHUNKS": CHUNKS, "GROUP": GROUP, "CAPACITY": CAPACITY, "ALL_GREEDY": False}
    constants |= {"HAS_LIMITS": True, "ZERO_BITS": ZERO_BITS[dtype]}
    own = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return kernel, {**types, "logits": POINTERS[dtype]}, own


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: these kernels put nothing there but what is spilled."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", log)
    assert used is not None, log
    return int(used.group(1)), int(used.group(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--quick", action="store_true", help="only the specialisations that differ most")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("| kernel | registers | spilled bytes | shared bytes | warps | stages | programs per multiprocessor |")
        print("|---|---|---|---|---|---|---|")
    for arch in args.arch:
        for case in all_cases(arch, args.quick):
            _, used = compile_case(case)
            programs = used.programs_per_multiprocessor(GPUS[arch])
            if args.json:
                print(json.dumps({"case": str(case), **asdict(used), "programs": programs}), flush=True)
            else:
                columns = [*asdict(used).values(), programs]
                print(f"| {case} | {' | '.join(map(str, columns))} |", flush=True)


if __name__ == "__main__":
    main()
