"""Find the GPU resources of the Triton kernels (registers, spills, shared memory) by compiling them without a GPU.

    python -m benchmarks.kernel_resources [--arch 80 86 89 90 100 120] [--quick] [--json]
    python -m benchmarks.kernel_resources --table --write     # benchmarks/results/kernel-resources.json

The table has one row for each kernel as Qwen3-8B launches it in bfloat16, by GPU. The slow tests compare it with the
compiled kernels. After a change of a kernel, write the table again, and its diff shows the cost of the change. There is
a table for each of `VERSIONS`: install the others elsewhere (`pip install --no-deps --target FOLDER triton==3.6.0`)
and write their tables with FOLDER in PYTHONPATH.

Triton compiles for any target, and the machine code shows the resources. A spill is a value that is in memory because
no register was free: a few bytes before a loop do not matter, hundreds of bytes in a loop are slow. Shared memory and
registers determine how many programs fit on a multiprocessor at the same time (the last column).
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanovllm.layers import triton_layers as layers
from nanovllm_extras.kernels.cuda import (
    cuda_quantised as quantised,
)
from nanovllm_extras.kernels.cuda import (
    delta_chunks,
    delta_kernels,
    few_tokens,
    inverse_cdf,
    logit_weights,
    paged_attention,
    store_kv,
    truncate,
)
from nanovllm_extras.kernels.cuda import (
    norm_kernels as norm,
)
from nanovllm_extras.kernels.cuda.bisection import ZERO_BITS
from nanovllm_extras.kernels.cuda.kernel_launch import GPU, Launch, decode_launch, prefill_launch

# by compute capability: multiprocessors, bytes of shared memory that one program can have
GPUS = {
    80: GPU(108, 163 * 1024),  # A100
    86: GPU(82, 99 * 1024),  # RTX 3090
    89: GPU(128, 99 * 1024),  # RTX 4090
    90: GPU(132, 227 * 1024),  # H100
    100: GPU(148, 227 * 1024),  # B200
    120: GPU(170, 99 * 1024),  # RTX 5090
}
REGISTERS, RESERVED_SHARED = 65536, 1024  # of a multiprocessor; of each program

NUM_KV_HEADS, HEADS_OF_A_GROUP = 8, 4  # Qwen3-8B's
QUANTISED_GROUP = 128
NUM_OUTPUTS = 4096  # of a quantised product: Qwen3-8B's hidden size
NUM_KEY_HEADS, NUM_VALUE_HEADS, CONV_WIDTH = 16, 32, 4  # of Gated DeltaNet in Qwen3.5-4B
STEP = {"slots": "*i64", "sources": "*i64", "is_first": "*i1"}  # what its kernels read of a step, beside lengths
CHUNKS = 128  # a power of two, of Qwen3's 151,936 tokens

VERSIONS = ("3.6", "3.8", "3.9")  # of torch 2.11, 2.14 and the newest one
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}


@dataclass(frozen=True)
class Case:
    """One kernel (a name in `BUILDS`), and what it is compiled for. A size is 0 if the kernel does not use it.

    `num_columns` is the length of a row of activations.
    """

    kernel: str
    arch: int
    dtype: torch.dtype
    head_dim: int = 0
    block_size: int = 0
    num_columns: int = 0
    is_fp8: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + ("+fp8" if self.is_fp8 else "")
        sizes = {name: getattr(self, name) for name in ("head_dim", "block_size", "num_columns")}
        return " ".join([self.kernel, f"sm_{self.arch}", dtype, *(f"{name} {n}" for name, n in sizes.items() if n)])

    @property
    def pointer(self) -> str:
        return POINTERS[self.dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.is_fp8 else self.dtype

    @property
    def cache_pointer(self) -> str:
        return POINTERS[self.cache_dtype]


@dataclass(frozen=True)
class Build:
    """Return the argument types of a launch. Pointers that `pointers` does not name (without `_ptr`) are to int32."""

    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    has_fusion: bool = True  # of a product and a sum into one instruction


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


# ---- how each kernel is launched


def build_store_kv(case: Case) -> Build:
    pointers = dict.fromkeys(("k", "v"), case.pointer) | dict.fromkeys(("k_cache", "v_cache"), case.cache_pointer)
    row = NUM_KV_HEADS * case.head_dim
    constants = {"NUM_KV_HEADS": NUM_KV_HEADS, "HEAD_DIM": case.head_dim, "ROW": row, "IS_FP8": case.is_fp8}
    return Build(store_kv.store_kv_kernel, pointers, constants)


def build_decode(case: Case) -> Build:
    pointers = {"part": "*fp32", "part_lse": "*fp32"}
    return build_attention(case, paged_attention.decode_kernel, decode_launch, pointers)


def build_prefill(case: Case) -> Build:
    return build_chunks(case, is_split=False)


def build_split_prefill(case: Case) -> Build:
    return build_chunks(case, is_split=True)


def build_chunks(case: Case, is_split: bool) -> Build:
    pointers = {"part": "*fp32", "part_lse": "*fp32"}
    build = build_attention(case, paged_attention.prefill_kernel, prefill_launch, pointers)
    return replace(build, constants={**build.constants, "IS_SPLIT": is_split})


def build_attention(case: Case, kernel: Any, choose: Callable[..., Launch], pointers: dict[str, str]) -> Build:
    launch = choose(HEADS_OF_A_GROUP, case.head_dim, case.dtype, case.cache_dtype, GPUS[case.arch])
    pointers = {**pointers, "out": case.pointer, "q": case.pointer}
    pointers |= dict.fromkeys(("k_cache", "v_cache"), case.cache_pointer)
    constants: dict[str, Any] = {"NUM_KV_HEADS": NUM_KV_HEADS, "GROUP": HEADS_OF_A_GROUP, "HEAD_DIM": case.head_dim}
    constants |= {"BLOCK_SIZE": case.block_size, "ROWS": launch.rows, "TILE": launch.tile, "WINDOW": 0, "SOFTCAP": 0.0}
    return Build(kernel, pointers, constants, launch.num_warps, launch.num_stages)


def build_merge(case: Case) -> Build:
    pointers = {"out": case.pointer, "part": "*fp32", "part_lse": "*fp32"}
    constants = {"HEAD_DIM": case.head_dim, "TILE": 64, "WINDOW": 0, "SPLITS": 16}
    return Build(paged_attention.merge_kernel, pointers, constants)


def build_merge_chunks(case: Case) -> Build:
    pointers = {"out": case.pointer, "part": "*fp32", "part_lse": "*fp32"}
    return Build(paged_attention.merge_chunks_kernel, pointers, {"HEAD_DIM": case.head_dim, "SPLITS": 16})


def build_norm_rotary_store(case: Case) -> Build:
    heads = min(norm.HEAD_ELEMENTS // case.head_dim, NUM_KV_HEADS)
    pointers = dict.fromkeys(("q", "qkv", "q_weight", "k_weight", "cos", "sin"), case.pointer)
    pointers |= dict.fromkeys(("k_cache", "v_cache"), case.cache_pointer)
    constants = {"NUM_HEADS": NUM_KV_HEADS * HEADS_OF_A_GROUP, "NUM_KV_HEADS": NUM_KV_HEADS, "HEADS": heads}
    constants |= {"HEAD_DIM": case.head_dim, "HAS_NORM": True, "IS_FP8": case.is_fp8}
    num_warps = layers.warps_for(heads * case.head_dim * case.dtype.itemsize // 2)
    return Build(norm.norm_rotary_store_kernel, pointers, constants, num_warps)


def build_rms_norm(case: Case) -> Build:
    block = triton.next_power_of_2(case.num_columns)
    constants = {"SIZE": case.num_columns, "BLOCK": block}
    pointers = dict.fromkeys(("y", "x", "weight"), case.pointer)
    return Build(layers.rms_norm_kernel, pointers, constants, layers.warps_for(block * case.dtype.itemsize))


def build_norm_and_rotate(case: Case) -> Build:
    heads = NUM_KV_HEADS * HEADS_OF_A_GROUP
    constants = {"NUM_HEADS": heads, "HALF": case.head_dim // 2, "HEADS": heads, "DIMS": case.head_dim // 2}
    pointers = dict.fromkeys(("y", "x", "weight", "cos", "sin"), case.pointer)
    num_warps = layers.warps_for(heads * case.head_dim * case.dtype.itemsize // 2)
    return Build(layers.norm_and_rotate_kernel, pointers, constants, num_warps)


def build_silu_and_mul(case: Case) -> Build:
    pointers = dict.fromkeys(("y", "gate", "up"), case.pointer)
    return Build(layers.silu_and_mul_kernel, pointers, {"SIZE": case.num_columns, "BLOCK": layers.BLOCK})


def build_norm_linear(case: Case) -> Build:
    return build_few_tokens(case, HAS_NORM=True)


def build_norm_gate_up(case: Case) -> Build:
    return build_few_tokens(case, HAS_NORM=True, IS_GATED=True)


def build_add_linear(case: Case) -> Build:
    return build_few_tokens(case, IS_ADDED=True)


def build_few_tokens(case: Case, **flags: bool) -> Build:
    launch = few_tokens.choose_launch(case.num_columns, case.dtype, flags.get("IS_GATED", False), GPUS[case.arch])
    flags = dict.fromkeys(("HAS_NORM", "HAS_BIAS", "IS_GATED", "IS_ADDED"), False) | flags
    sizes = {"NUM_INPUTS": case.num_columns, "ROWS": launch.rows, "OUTPUTS": few_tokens.OUTPUTS, "TILE": launch.tile}
    pointers = dict.fromkeys(("out", "x", "norm_weight", "weight", "bias"), case.pointer)
    return Build(few_tokens.few_tokens_kernel, pointers, {**sizes, **flags}, launch.num_warps, launch.num_stages)


def build_round_rows(case: Case) -> Build:
    pointers = {"q": "*i8", "scales": "*fp32", "x": case.pointer}
    constants = {"GROUP": QUANTISED_GROUP, "GROUPS": quantised.GROUPS_AT_ONCE, "SMALLEST": quantised.SMALLEST}
    return Build(quantised.round_rows_kernel, pointers, constants, has_fusion=False)


def build_int8_few(case: Case) -> Build:
    return build_quantised(case, bits=8, num_tokens=1)


def build_int8_some(case: Case) -> Build:
    return build_quantised(case, bits=8, num_tokens=32)


def build_int8_many(case: Case) -> Build:
    return build_quantised(case, bits=8, num_tokens=1000)


def build_int4_few(case: Case) -> Build:
    return build_quantised(case, bits=4, num_tokens=1)


def build_int4_some(case: Case) -> Build:
    return build_quantised(case, bits=4, num_tokens=32)


def build_int4_many(case: Case) -> Build:
    return build_quantised(case, bits=4, num_tokens=1000)


def build_quantised(case: Case, bits: int, num_tokens: int) -> Build:
    launch = quantised.choose_launch(num_tokens, NUM_OUTPUTS, GPUS[case.arch])
    pointers = {"q": "*i8", "weight": "*i8" if bits == 8 else "*u8", "out": case.pointer, "bias": case.pointer}
    pointers |= dict.fromkeys(("scales", "x_scales"), "*fp32")
    constants: dict[str, Any] = {"GROUP": QUANTISED_GROUP}
    constants |= {"OFFSET": 0 if bits == 8 else -8, "HAS_OFFSETS": False, "HAS_GROUPS": bits == 4, "HAS_BIAS": False}
    constants |= {"IS_INT4": bits == 4, "ROWS": launch.rows, "OUTPUTS": launch.tile}
    constants |= {"STAGES": launch.num_stages}
    shape = (launch.num_warps, launch.num_stages)
    return Build(quantised.quantised_linear_kernel, pointers, constants, *shape, has_fusion=False)


def build_causal_conv(case: Case) -> Build:
    return build_conv(case, are_decodes=False)


def build_decode_conv(case: Case) -> Build:
    return build_conv(case, are_decodes=True)


def build_draft_conv(case: Case) -> Build:
    return build_conv(case, are_decodes=True, has_drafts=True)


def build_conv(case: Case, are_decodes: bool, has_drafts: bool = False) -> Build:
    pointers = dict.fromkeys(("out", "tails", "x", "weight"), case.pointer) | STEP
    tokens = 1 if are_decodes else delta_kernels.MIN_CONV_TOKENS
    constants = {"NUM_CHANNELS": (2 * NUM_KEY_HEADS + NUM_VALUE_HEADS) * case.head_dim, "WIDTH": CONV_WIDTH, "TAIL": 4}
    constants |= {"TOKENS": tokens, "BLOCK": delta_kernels.CHANNELS}
    constants |= {"ARE_DECODES": are_decodes, "HAS_DRAFTS": has_drafts}
    return Build(delta_kernels.causal_conv_kernel, pointers, constants)


def build_gated_delta(case: Case) -> Build:
    return build_delta(case)


def build_draft_delta(case: Case) -> Build:
    return build_delta(case, has_drafts=True)


def build_delta(case: Case, has_drafts: bool = False) -> Build:
    pointers = dict.fromkeys(("out", "qkv", "b", "a", "a_log", "dt_bias"), case.pointer)
    pointers |= {"states": "*fp32", **STEP}
    constants = {"NUM_KEY_HEADS": NUM_KEY_HEADS, "NUM_HEADS": NUM_VALUE_HEADS, "KEYS": case.head_dim}
    constants |= {"KEY_DIM": case.head_dim, "VALUE_DIM": case.head_dim}
    constants |= {"VALUES": delta_kernels.VALUES, "STAGES": delta_kernels.STAGES, "TOKENS": delta_chunks.TOKENS}
    constants["HAS_DRAFTS"] = has_drafts
    return Build(delta_kernels.gated_delta_kernel, pointers, constants, num_warps=1)


def build_invert_tiles(case: Case) -> Build:
    return build_chunks_of_states(case, delta_chunks.invert_tiles_kernel)


def build_delta_chunks(case: Case) -> Build:
    return build_chunks_of_states(case, delta_chunks.delta_chunks_kernel)


def build_chunks_of_states(case: Case, kernel: Any) -> Build:
    pointers = dict.fromkeys(("out", "qkv", "b", "a", "a_log", "dt_bias"), case.pointer)
    pointers |= dict.fromkeys(("states", "inverses", "reads"), "*fp32") | STEP
    constants: dict[str, Any] = {"NUM_KEY_HEADS": NUM_KEY_HEADS, "NUM_HEADS": NUM_VALUE_HEADS, "KEYS": case.head_dim}
    constants |= {"KEY_DIM": case.head_dim, "VALUE_DIM": case.head_dim, "VALUES": delta_chunks.CHUNK_VALUES}
    constants |= {"TOKENS": delta_chunks.TOKENS, "PRECISION": delta_chunks.precision_of(case.dtype)}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = {name: kind for name, kind in pointers.items() if f"{name}_ptr" in kernel.arg_names}
    return Build(kernel, pointers, constants, num_stages=1)


def build_gated_norm(case: Case) -> Build:
    pointers = dict.fromkeys(("x", "gate", "weight"), case.pointer)
    constants = {"NUM_HEADS": NUM_VALUE_HEADS, "SIZE": case.head_dim, "BLOCK": case.head_dim}
    constants |= {"ROWS": delta_kernels.NORM_ROWS}
    return Build(delta_kernels.gated_norm_kernel, pointers, constants)


def build_stats(case: Case) -> Build:
    return build_sampling(case, logit_weights.stats_kernel)


def build_truncate(case: Case) -> Build:
    return build_sampling(
        case, truncate.truncate_kernel, truncate.num_truncate_warps(logit_weights.CHUNK, truncate.GROUP)
    )


def build_pick(case: Case) -> Build:
    return build_sampling(case, inverse_cdf.pick_kernel)


def build_sampling(case: Case, kernel: Any, num_warps: int = 4) -> Build:
    """For rows of all kinds: some greedy, some with limits."""
    floats = ("maxima", "sums", "limits", "spare", "temperatures", "min_p", "top_p")
    pointers = {**dict.fromkeys(floats, "*fp32"), "uniforms": "*fp64", "top_k": "*i64", "token_ids": "*i64"}
    constants = {"CHUNK": logit_weights.CHUNK, "CHUNKS": CHUNKS}
    constants |= {"GROUP": truncate.GROUP, "CAPACITY": truncate.CAPACITY}
    constants |= {"ALL_GREEDY": False, "HAS_LIMITS": True, "ZERO_BITS": ZERO_BITS[case.dtype]}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Build(kernel, {**pointers, "logits": case.pointer}, constants, num_warps)


SAMPLING: dict[str, Callable[[Case], Build]] = {"stats": build_stats, "truncate": build_truncate, "pick": build_pick}
FEW_TOKENS: dict[str, Callable[[Case], Build]] = {
    "norm_linear": build_norm_linear,
    "norm_gate_up": build_norm_gate_up,
    "add_linear": build_add_linear,
}
STATES: dict[str, Callable[[Case], Build]] = {
    "causal_conv": build_causal_conv,
    "decode_conv": build_decode_conv,
    "draft_conv": build_draft_conv,
    "gated_delta": build_gated_delta,
    "draft_delta": build_draft_delta,
    "invert_tiles": build_invert_tiles,
    "delta_chunks": build_delta_chunks,
    "gated_norm": build_gated_norm,
}
QUANTISED: dict[str, Callable[[Case], Build]] = {
    "int8_few": build_int8_few,
    "int8_some": build_int8_some,
    "int8_many": build_int8_many,
    "int4_few": build_int4_few,
    "int4_some": build_int4_some,
    "int4_many": build_int4_many,
}
BUILDS: dict[str, Callable[[Case], Build]] = {
    "store_kv": build_store_kv,
    "decode": build_decode,
    "prefill": build_prefill,
    "split_prefill": build_split_prefill,
    "merge": build_merge,
    "merge_chunks": build_merge_chunks,
    "norm_rotary_store": build_norm_rotary_store,
    "rms_norm": build_rms_norm,
    "norm_and_rotate": build_norm_and_rotate,
    "silu_and_mul": build_silu_and_mul,
    "round_rows": build_round_rows,
    **STATES,
    **QUANTISED,
    **FEW_TOKENS,
    **SAMPLING,
}


# ---- what is compiled


def all_cases(arch: int, is_quick: bool = False) -> Iterator[Case]:
    """Every specialisation; with `is_quick` those that differ most."""
    half = [torch.bfloat16] if is_quick else [torch.bfloat16, torch.float16]
    for dtype in half:
        for head_dim in (64, 128):
            for is_fp8 in (False, True) if arch >= 89 else (False,):  # no e4m3 instructions before 8.9
                yield Case("store_kv", arch, dtype, head_dim, is_fp8=is_fp8)
                for block_size in (16, 256):
                    yield Case("decode", arch, dtype, head_dim, block_size, is_fp8=is_fp8)
                    yield Case("prefill", arch, dtype, head_dim, block_size, is_fp8=is_fp8)
                yield Case("split_prefill", arch, dtype, head_dim, 16, is_fp8=is_fp8)
                yield Case("norm_rotary_store", arch, dtype, head_dim, is_fp8=is_fp8)
            yield Case("merge", arch, dtype, head_dim)
            yield Case("merge_chunks", arch, dtype, head_dim)
            yield Case("norm_and_rotate", arch, dtype, head_dim)
            for kernel in STATES:
                yield Case(kernel, arch, dtype, head_dim)
        for hidden_size in (1024, 5120):
            yield Case("rms_norm", arch, dtype, num_columns=hidden_size)
        yield Case("silu_and_mul", arch, dtype, num_columns=3072)
        for kernel in ("round_rows", *QUANTISED):
            yield Case(kernel, arch, dtype)
    for kernel in ("decode", "prefill", "split_prefill"):
        yield Case(kernel, arch, torch.bfloat16, 512, 16)  # the largest heads: Gemma 4's
    for head_dim in (128,) if is_quick else (64, 128):
        yield Case("norm_rotary_store", arch, torch.float32, head_dim)
        yield Case("decode", arch, torch.float32, head_dim, 16)
        yield Case("prefill", arch, torch.float32, head_dim, 16)
    for dtype in (*half, torch.float32):
        for kernel in FEW_TOKENS:
            yield Case(kernel, arch, dtype, num_columns=3072 if kernel == "add_linear" else 1024)
        for kernel in SAMPLING:
            yield Case(kernel, arch, dtype)


def one_of_each(arch: int) -> list[Case]:
    """The first specialisation of each kernel."""
    first: dict[str, Case] = {}
    for case in all_cases(arch, is_quick=True):
        first.setdefault(case.kernel, case)
    return list(first.values())


def table_cases(arch: int) -> list[Case]:
    """The rows of the table: each kernel in bfloat16, with heads of 128 and blocks of 16, and over an fp8 cache."""
    sizes = (0, 128), (0, 16), (0, 1024, 3072)
    cases = [case for case in all_cases(arch, is_quick=True) if case.dtype == torch.bfloat16]
    return [
        case
        for case in cases
        if all(n in of for n, of in zip((case.head_dim, case.block_size, case.num_columns), sizes, strict=True))
    ]


def compile_case(case: Case) -> tuple[Any, Resources]:
    """The compiled kernel (its `asm` holds every stage) and what it takes."""
    build = BUILDS[case.kernel](case)
    signature, attributes = {}, {}
    for i, name in enumerate(build.kernel.arg_names):
        is_float = name.endswith("scale") or name == "eps"
        pointer = build.pointers.get(name.removesuffix("_ptr"), "*i32")
        signature[name] = pointer if name.endswith("_ptr") else "fp32" if is_float else "i32"
        if name in build.constants:
            signature[name] = "constexpr"
        elif not is_float and name not in build.kernel.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]  # tensors are aligned, and so are whole rows
    source = ASTSource(build.kernel, signature, build.constants, attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": build.has_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    registers, spill_bytes = read_cubin(compiled.asm["cubin"])
    shared_bytes = compiled.metadata.shared
    return compiled, Resources(registers, spill_bytes, shared_bytes, build.num_warps, build.num_stages)


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
    parser.add_argument("--once", action="store_true", help="only one specialisation of each kernel")
    parser.add_argument("--table", action="store_true", help="only the rows of the table")
    parser.add_argument("--write", action="store_true", help="write the table to its file")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("| kernel | registers | spilled bytes | shared bytes | warps | stages | programs per multiprocessor |")
        print("|---|---|---|---|---|---|---|")
    rows = {}
    for arch in args.arch:
        for case in choose_cases(arch, args):
            _, used = compile_case(case)
            row = {**asdict(used), "programs": used.programs_per_multiprocessor(GPUS[arch])}
            rows[str(case)] = list(row.values())
            if args.json:
                print(json.dumps({"case": str(case), **row}), flush=True)
            else:
                print(f"| {case} | {' | '.join(map(str, row.values()))} |", flush=True)
    if args.write:
        table_of(triton.__version__).write_text(as_text(rows), encoding="utf-8")


def choose_cases(arch: int, args: argparse.Namespace) -> Iterable[Case]:
    if args.table or args.write:
        return table_cases(arch)
    return one_of_each(arch) if args.once else all_cases(arch, args.quick)


def table_of(version: str) -> Path:
    """Return the table of a version of Triton, such as 3.9.0: the newest one's has no version in its name."""
    short = ".".join(version.split(".")[:2])
    name = "kernel-resources" if short == VERSIONS[-1] else f"kernel-resources-{short}"
    return Path(__file__).parent / "results" / f"{name}.json"


def as_text(rows: dict[str, list[int]]) -> str:
    """JSON with a line for each kernel."""
    lines = ",\n".join(f"  {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items())
    columns = json.dumps([*Resources.__dataclass_fields__, "programs"])
    return f'{{\n "triton": "{triton.__version__}",\n "columns": {columns},\n "rows": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    main()
