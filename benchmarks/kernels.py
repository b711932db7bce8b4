"""Measure the parts of a layer on this GPU: prefill in operations per second, all others in bytes per second.

    python -m benchmarks.kernels [--parts attention states layers] [--output results.json] [--fp8] [--sweep]

A decode reads all K and V once and computes little, so its limit is the speed of memory, which is measured first, as a
copy. The limit of a prefill is the speed of the tensor cores. The output of each kernel is checked against a float32
reference before it is timed. Each call is recorded in a CUDA graph, so that the host's launches cost nothing, and
replayed with a cold L2 cache. `--sweep` tries alternatives to the choices of
`nanovllm_extras/kernels/cuda/kernel_launch.py`. `kernel_layers.py` measures the rest of a layer, and `kernel_states.py`
layers with recurrent states.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import describe_machine
from benchmarks.kernel_layers import Shape, measure_kernels, measure_products
from benchmarks.kernel_states import StateSizes, measure_states
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention

DEVICE = "cuda"
BATCHES, CONTEXTS = (1, 8, 32, 256), (128, 1024, 4096, 32768)
# (new tokens, tokens computed before) of each chunk
PREFILLS = {
    "1 x 8192": [(8192, 0)],
    "8 x 1024": [(1024, 0)] * 8,
    "1 x 32768": [(32768, 0)],
    "2048 after 30720": [(2048, 30720)],
    "1 x 4096 and 64 x 64": [(4096, 0)] + [(64, 0)] * 64,
}
STORES = (1, 32, 256, 8192)
SWEPT_DECODES, SWEPT_PREFILLS = ((1, 4096), (1, 32768), (32, 1024), (256, 1024)), ("1 x 8192", "2048 after 30720")


def make_step(backend: AttentionBackend, lens: list[tuple[int, int]], is_decode: bool, dtype: torch.dtype) -> Any:
    """Return q, the cache and the metadata for sequences of (new, computed) tokens whose blocks are in random order."""
    size = backend.block_size
    seq_lens = [new + computed for new, computed in lens]
    num_blocks = [-(-seq_len // size) for seq_len in seq_lens]
    ids = torch.randperm(sum(num_blocks), device=DEVICE, dtype=torch.int32) + 1
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(ids.split(num_blocks)):
        tables[row, : len(part)] = part
    cache_dtype = backend.kv_cache_dtype or dtype
    shape = backend.kv_cache_shape(1, len(ids) + 1)
    cache = torch.empty(shape, dtype=cache_dtype, device=DEVICE)
    for block in cache.flatten(0, 2).split(4096):  # in pieces: random numbers are drawn in a wider dtype
        block.copy_(torch.randn(block.shape, dtype=dtype, device=DEVICE))

    def offsets(of: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(of)], dtype=torch.int32, device=DEVICE)

    new = [n for n, _ in lens]
    slots = [  # of the new tokens
        tables[row, positions // size] * size + positions % size
        for row, (n, computed) in enumerate(lens)
        for positions in [torch.arange(computed, computed + n, device=DEVICE)]
    ]
    return SimpleNamespace(
        q=torch.randn(sum(new), backend.num_heads, backend.head_dim, dtype=dtype, device=DEVICE),
        layer_cache=cache[:, 0],
        lens=lens,
        slot_mapping=torch.cat(slots).int(),
        block_tables=tables,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        prefill_cu_seqlens_q=offsets([] if is_decode else new),
        prefill_cu_seqlens_k=offsets([] if is_decode else seq_lens),
        num_decodes=len(lens) if is_decode else 0,
        max_seqlen_q=0 if is_decode else max(new),
        max_seqlen_k=0 if is_decode else max(seq_lens),
        num_prefix_tokens=0 if is_decode else sum(computed for _, computed in lens),
    )


def check(backend: AttentionBackend, step: Any, out: torch.Tensor) -> None:
    """Compute the last token of the first and of the last sequence in float32."""
    group = backend.num_heads // backend.num_kv_heads
    last_rows = list(itertools.accumulate(new for new, _ in step.lens))
    for i in {0, len(step.lens) - 1}:
        seq_len = sum(step.lens[i])
        blocks = step.block_tables[i, : -(-seq_len // backend.block_size)].long()
        cached = step.layer_cache.view(torch.uint8)[:, blocks].view(step.layer_cache.dtype)
        k, v = cached.flatten(1, 2)[:, :seq_len].float().repeat_interleave(group, dim=2)  # [seq_len, num_heads, …] each
        scores = torch.einsum("hd,khd->hk", step.q[last_rows[i] - 1].float(), k) / math.sqrt(backend.head_dim)
        expected = torch.einsum("hk,khd->hd", scores.softmax(1), v)
        error = (out[last_rows[i] - 1].float() - expected).norm() / expected.norm()
        assert error < 0.015, f"sequence {i} of {len(step.lens)}: the output is off by {error:.1%}"


def seconds(function: Callable[[], object]) -> float:
    """Return the median time of one call, replayed as a graph with none of its data in the L2 cache."""
    from triton.testing import do_bench

    function()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return do_bench(graph.replay, warmup=20, rep=80, return_mode="median") / 1e3


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a copy that does not fit the L2 cache."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def make_backends(args: argparse.Namespace) -> dict[str, AttentionBackend]:
    from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention

    shape = (args.heads, args.kv_heads, args.head_dim)
    backends: dict[str, AttentionBackend] = {}
    for size in args.block_size:
        backends[f"triton, blocks of {size}"] = TritonAttention(*shape, size)
        if args.fp8 and TritonAttention.why_no_kv_cache("fp8", shape[2]) is None:
            backends[f"triton, fp8, blocks of {size}"] = TritonAttention(*shape, size, kv_cache_dtype="fp8")
    for size in args.block_size:
        if FlashAttention.why_not(torch.device(DEVICE), args.dtype, args.head_dim, size) is None:
            flash_attention = FlashAttention(*shape, size)
            backends[f"{flash_attention.instructions}, blocks of {size}"] = flash_attention
    return backends


def measure_decode(backend: AttentionBackend, args: argparse.Namespace, bandwidth: float) -> Iterator[dict[str, Any]]:
    for batch_size, context in itertools.product(args.batch, args.context):
        itemsize = (backend.kv_cache_dtype or args.dtype).itemsize
        num_bytes = 2 * batch_size * context * backend.num_kv_heads * backend.head_dim * itemsize
        step = None  # frees the last one
        torch.cuda.empty_cache()
        if torch.cuda.is_available() and num_bytes > 0.8 * torch.cuda.mem_get_info()[0]:
            continue
        step = make_step(backend, [(1, context - 1)] * batch_size, True, args.dtype)
        check(backend, step, backend.attend(step.q, step.layer_cache, step))
        time_s = seconds(partial(backend.attend, step.q, step.layer_cache, step))
        yield {
            "batch": batch_size,
            "context": context,
            "us": round(time_s * 1e6, 2),
            "GB/s": round(num_bytes / time_s / 1e9, 1),
            "of copy": f"{num_bytes / time_s / bandwidth:.0%}",
        }


def measure_prefill(backend: AttentionBackend, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, lens in PREFILLS.items():
        step = make_step(backend, lens, False, args.dtype)
        check(backend, step, backend.attend(step.q, step.layer_cache, step))
        time_s = seconds(partial(backend.attend, step.q, step.layer_cache, step))
        num_pairs = sum(new * computed + new * (new + 1) // 2 for new, computed in lens)  # of a query and a key
        operations = 4 * num_pairs * backend.num_heads * backend.head_dim  # two products, each multiplies and adds
        yield {"prefill": name, "us": round(time_s * 1e6, 1), "TFLOP/s": round(operations / time_s / 1e12, 1)}


def measure_store(backend: AttentionBackend, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for num_tokens in STORES:
        num_blocks = -(-num_tokens // backend.block_size)
        shape = backend.kv_cache_shape(1, num_blocks)
        cache = torch.zeros(shape, device=DEVICE).to(backend.kv_cache_dtype or args.dtype)[:, 0]
        heads = backend.num_heads + 2 * backend.num_kv_heads
        qkv = torch.randn(num_tokens, heads, backend.head_dim, dtype=args.dtype, device=DEVICE)
        k, v = qkv[:, backend.num_heads :].split(backend.num_kv_heads, dim=1)
        slots = torch.randperm(num_blocks * backend.block_size, device=DEVICE, dtype=torch.int32)[:num_tokens]
        backend.store_kv(k, v, cache, slots)
        stored = cache.view(torch.uint8).view(2, -1, k[0].numel() * cache.itemsize)[:, slots.long()]
        for part, x in zip(stored, (k, v), strict=True):
            assert torch.equal(part, x.to(cache.dtype).flatten(1).view(torch.uint8))
        time_s = seconds(partial(backend.store_kv, k, v, cache, slots))
        num_bytes = 2 * k.numel() * (k.itemsize + cache.itemsize)
        yield {"store_kv": num_tokens, "us": round(time_s * 1e6, 2), "GB/s": round(num_bytes / time_s / 1e9, 1)}


def sweep(backend: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every launch that fits, best first, for a few decodes and prefills; the chosen one is marked."""
    from triton.runtime.errors import OutOfResources

    from nanovllm_extras.kernels.cuda.kernel_launch import Launch, decode_launch, describe_gpu, prefill_launch

    gpu = describe_gpu(torch.device(DEVICE))
    decodes = [(f"decode {b} x {c}", [(1, c - 1)] * b, True) for b, c in SWEPT_DECODES]
    prefills = [(f"prefill {name}", PREFILLS[name], False) for name in SWEPT_PREFILLS]
    for name, lens, is_decode in decodes + prefills:
        choose = decode_launch if is_decode else prefill_launch
        chosen = choose(backend.group, backend.head_dim, args.dtype, backend.kv_cache_dtype or args.dtype, gpu)
        rows = [chosen.rows] if is_decode else [64, 128]
        grid = itertools.product(rows, (32, 64, 128), (2, 4, 8) if is_decode else (4, 8), (1, 3, 5, 7))
        step = make_step(backend, lens, is_decode, args.dtype)
        tried = []
        for launch in dict.fromkeys([chosen, *itertools.starmap(Launch, grid)]):
            out = torch.empty_like(step.q)

            def call(launch: Launch = launch, out: torch.Tensor = out, step: Any = step, is_decode: bool = is_decode):
                paged = (out, step.q, step.layer_cache, step.block_tables, step.seq_lens)
                if is_decode:
                    backend.decode(*paged, launch=launch)
                else:
                    backend.prefill(*paged, step.prefill_cu_seqlens_q, launch=launch)

            try:
                time_s = seconds(call)
            except OutOfResources:
                continue
            check(backend, step, out)
            is_chosen = "chosen" if launch == chosen else ""
            tried.append({"work": name, **asdict(launch), "us": round(time_s * 1e6, 2), "": is_chosen})
        tried.sort(key=lambda row: row["us"])
        yield from [row for i, row in enumerate(tried) if i < 6 or row[""]]


def measure(args: argparse.Namespace, bandwidth: float) -> Iterator[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """Return the measurements and their tables."""
    for name, backend in make_backends(args).items() if "attention" in args.parts else ():
        if args.sweep and name.startswith("triton"):
            yield name, {"sweep": list(sweep(backend, args))}
        elif not args.sweep:
            yield (
                name,
                {
                    "decode": list(measure_decode(backend, args, bandwidth)),
                    "prefill": list(measure_prefill(backend, args)),
                    "store_kv": list(measure_store(backend, args)),
                },
            )
    if "states" in args.parts:
        states = measure_states(StateSizes(), args.dtype, torch.device(DEVICE), seconds, bandwidth)
        yield "recurrent states", {"Gated DeltaNet": list(states)}
    if "layers" in args.parts:  # last, as torch.compile takes its time
        shape = Shape(args.hidden_size, args.intermediate_size, args.heads, args.kv_heads, args.head_dim)
        layers = (shape, args.dtype, torch.device(DEVICE), seconds)
        yield (
            "layers",
            {
                "kernels": list(measure_kernels(*layers)),
                "products": list(measure_products(*layers, bandwidth=bandwidth)),
            },
        )


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        print(f"\n**{title}**\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
        for row in rows:
            print(f"| {' | '.join(map(str, row.values()))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=3072)
    kinds = ("attention", "states", "layers")
    parser.add_argument("--parts", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 256], help="flash-attn 2 takes only 256")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--fp8", action="store_true", help="an fp8 cache too")
    parser.add_argument("--sweep", action="store_true", help="try other launch parameters instead")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs a CUDA device, and this machine has none")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    machine = describe_machine("cuda")
    print(json.dumps(machine), f"\ncopy: {bandwidth / 1e9:.0f} GB/s, read and written")
    results: dict[str, Any] = {"machine": machine, "copy_bandwidth": bandwidth}
    with torch.inference_mode():
        for name, parts in measure(args, bandwidth):
            for part, rows in parts.items():
                print_table(f"{name}: {part}", rows)
            results[name] = parts
            if args.output:  # after each, so that what is done is kept
                args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
