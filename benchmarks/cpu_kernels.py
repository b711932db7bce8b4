"""Compare ways to compute the two heavy parts of a decode step on a CPU: products with weights, and attention.

    python -m benchmarks.cpu_kernels
    pip install numba && python -m benchmarks.cpu_kernels      # with a kernel in Numba too

The products are those of one step of Qwen3-0.6B's shape (28 layers and the logits), for several batch sizes:
`F.linear`, which reorders bfloat16 weights at every call; oneDNN with weights reordered once; and
`nanovllm_extras/kernels/cpu/cpu.c`. Paged attention of one layer is computed by PyTorch's gather and
`scaled_dot_product_attention`, by the same under `torch.compile`, by a kernel in Numba whose blocks are head-major, and
by `nanovllm_extras/kernels/cpu/cpu.c`. They run in turns. Prints the median milliseconds of each.

Then one core multiplies each of the shapes by several numbers of rows, with weights in memory: operations per second (2
x rows x outputs x inputs), and their share of the core's own peak, which `benchmarks.peak` measures in the same run.
Few rows wait for memory: for these the GB/s of weights count, next to what the core reads at most.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import describe_machine
from benchmarks.peak import measure_peak
from benchmarks.roofline import best_time, measure_read_bandwidth
from nanovllm.layers.attention import AttentionMetadata, TorchAttention, attend_padded, softmax_attention
from nanovllm_extras.execution.cuda_memory import widest_batch
from nanovllm_extras.execution.step_graphs import StepSizes
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_layers import CpuLinear, HugePages, packed_bytes
from nanovllm_extras.kernels.cpu.cpu_quantised import CpuQuantisedLinear
from nanovllm_extras.machine.one_thread import one_thread
from nanovllm_extras.weights.quantised_linear import QuantisedLinear, quantise_weight

LAYER_SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # outputs, inputs
HEAD_SHAPE = (151_936, 1024)
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 16, 8, 128, 16
LARGER_THAN_CACHES = 256 << 20  # bytes
NUM_CACHED_LAYERS = 8  # the layers whose attention is timed

Contender = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare CPU kernels.")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="of a step (default: 1 8 32)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 3, 6, 12, 32, 126], help="for one core")
    parser.add_argument("--context-len", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    rows = []
    with torch.inference_mode():
        for kind, make in (("products", make_products), ("attention", make_attention)) if args.batch else ():
            for batch, contenders in make(args.batch, args.context_len, dtype):
                times = race(contenders, args.repeats)
                rows.append({"kind": kind, "batch": batch, "milliseconds": times})
                figures = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items())
                print(f"{kind}, batch {batch}: {figures} ms", flush=True)
        with one_thread():
            of_one_core = measure_one_core(args.rows, dtype, args.repeats) if args.rows else {}
    if args.json:
        report = {"dtype": args.dtype, "context_len": args.context_len, "rows": rows, "one_core": of_one_core}
        args.json.write_text(json.dumps({**report, "machine": describe_machine("cpu")}, indent=2) + "\n")


def race(contenders: dict[str, Contender], repeats: int) -> dict[str, float]:
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(median(values), 3) for name, values in times.items()}


def make_products(batches: list[int], _: int, dtype: torch.dtype) -> Any:
    """Return the products with all weights of a step: unpacked, packed by oneDNN, and packed for `cpu.c`."""
    shapes = LAYER_SHAPES * NUM_LAYERS + [HEAD_SHAPE]
    widths = {num_inputs for _, num_inputs in shapes}
    weights = [torch.randn(shape).mul_(0.02).to(dtype) for shape in shapes]
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, 32) for w in weights]
    except RuntimeError:  # bfloat16 on a processor with AVX2 only
        packed = []
    memory = HugePages(sum(w.nbytes + HugePages.ALIGNMENT for w in weights))
    ours = [CpuLinear(w, None, memory) for w in weights]
    linear_pointwise = torch.ops.mkldnn._linear_pointwise
    for batch in batches:
        inputs = {k: torch.randn(batch, k).to(dtype) for k in widths}
        contenders: dict[str, Contender] = {
            "F.linear": lambda xs=inputs: [F.linear(xs[w.shape[1]], w) for w in weights],  # type: ignore[misc]
            "cpu.c": lambda xs=inputs: [layer(xs[layer.in_features]) for layer in ours],  # type: ignore[misc]
        }
        if packed:
            contenders["oneDNN, packed"] = lambda xs=inputs: [  # type: ignore[misc]
                linear_pointwise(xs[w.shape[1]], p, None, "none", [], "") for w, p in zip(weights, packed, strict=True)
            ]
        yield batch, contenders


def measure_one_core(num_rows: list[int], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Print a table of each product's operations per second, and return it."""
    peak, most_read = measure_peak(dtype, 1), measure_read_bandwidth()
    name = str(dtype).removeprefix("torch.")
    print(f"\none core: {peak / 1e9:.1f} GFLOP/s in {name} at most, {most_read / 1e9:.1f} GB/s read at most\n")
    print(f"| outputs x inputs | rows | {name}, GFLOP/s | of this core's peak | GB/s | int8, GOP/s | GB/s "
          "| int4, GOP/s | GB/s |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    rows = []
    for shape in [*LAYER_SHAPES, HEAD_SHAPE]:
        layers = {name: make_layers(shape, dtype, bits) for name, bits in ((name, None), ("int8", 8), ("int4", 4))}
        for count in num_rows:
            x = torch.randn(count, shape[1]).to(dtype)
            row: dict[str, Any] = {"shape": shape, "rows": count}
            for kind, some in layers.items():
                seconds = best_time(partial(multiply_all, some, {shape[1]: x}), repeats) / len(some)
                row[kind] = {"operations_per_s": 2 * count * math.prod(shape) / seconds}
                row[kind]["read_bytes_per_s"] = some[0].packed.nbytes / seconds
            rows.append(row)
            cells = [f"{shape[0]} x {shape[1]}", str(count)]
            for kind in layers:
                cells.append(f"{row[kind]['operations_per_s'] / 1e9:.1f}")
                cells += [f"{row[kind]['operations_per_s'] / peak:.0%}"] * (kind == name)
                cells.append(f"{row[kind]['read_bytes_per_s'] / 1e9:.1f}")
            print("| " + " | ".join(cells) + " |", flush=True)
    return {"peak_per_s": peak, "read_bytes_per_s": most_read, "rows": rows}


def multiply_all(layers: list[Any], inputs: dict[int, torch.Tensor]) -> None:
    """inputs: number of inputs -> [batch, number of inputs]"""
    for layer in layers:
        layer(inputs[layer.in_features])


def make_layers(shape: tuple[int, int], dtype: torch.dtype, bits: int | None) -> list[Any]:
    """Return layers with this weight that are more than the caches hold, for `cpu.c` or for `quantised.c`."""
    weight = torch.randn(shape, dtype=torch.bfloat16).mul_(0.02).to(dtype)
    num_bytes = weight.nbytes if bits is None else weight.numel() * bits // 8
    count = -(-LARGER_THAN_CACHES // num_bytes)
    memory = HugePages(count * (packed_bytes(weight) + HugePages.ALIGNMENT))
    if bits is None:
        return [CpuLinear(weight, None, memory) for _ in range(count)]
    quantised = quantise_weight(weight, bits, 128)
    return [CpuQuantisedLinear(QuantisedLinear(quantised, None), dtype, memory) for _ in range(count)]


def make_attention(batches: list[int], context_len: int, dtype: torch.dtype) -> Any:
    """Caches of several layers, so that none is found in the processor's caches; times are of all of them."""
    for batch in batches:
        yield batch, attention_contenders(batch, context_len, dtype)


def attention_contenders(batch: int, context_len: int, dtype: torch.dtype) -> dict[str, Contender]:
    num_blocks = -(-context_len // BLOCK_SIZE)
    ids = torch.randperm(batch * num_blocks, dtype=torch.int32) + 1
    step = decode_batch(ids.view(batch, num_blocks), context_len)
    q = torch.randn(batch, NUM_HEADS, HEAD_DIM).to(dtype)
    in_torch = TorchAttention(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    in_c = CpuAttention(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)
    compiled, lens = torch.compile(attend_padded, dynamic=False), [context_len] * batch

    def attend_compiled(q: torch.Tensor, layer_cache: torch.Tensor, step: AttentionMetadata) -> torch.Tensor:
        return compiled(q[:, None], layer_cache, step.block_tables, step.seq_lens, lens, softmax_attention)[:, 0]

    torch_cache = torch.randn(in_torch.kv_cache_shape(NUM_CACHED_LAYERS, len(ids) + 1)).to(dtype)
    c_cache = torch.randn(in_c.kv_cache_shape(NUM_CACHED_LAYERS, len(ids) + 1)).to(dtype)
    contenders = {
        "PyTorch": attend_all(in_torch.attend, q, torch_cache, step),
        "torch.compile": attend_all(attend_compiled, q, torch_cache, step),
        "cpu.c": attend_all(in_c.attend, q, c_cache, step),
    }
    if numba := numba_attend(dtype):
        shape = (2, NUM_CACHED_LAYERS, len(ids) + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        contenders["Numba"] = attend_all(numba, q, torch.randn(shape).to(dtype), step)
    return contenders


def attend_all(attend: Callable[..., Any], q: torch.Tensor, cache: torch.Tensor, step: AttentionMetadata) -> Contender:
    return lambda: [attend(q, cache[:, layer], step) for layer in range(cache.shape[1])]


def decode_batch(block_tables: torch.Tensor, context_len: int) -> AttentionMetadata:
    """One new token for each row of block_tables: [batch, num_blocks]"""
    num_seqs = len(block_tables)
    batch = widest_batch(StepSizes(num_seqs, num_seqs, context_len), BLOCK_SIZE)
    seq_lens = torch.full((num_seqs,), context_len, dtype=torch.int32)
    return replace(batch.metadata, block_tables=block_tables, seq_lens=seq_lens, num_decodes=num_seqs)


def numba_attend(dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Paged attention as plain loops over blocks with an online softmax; None without Numba, or for float32."""
    try:
        import numba
        import numpy as np
    except ImportError:
        return None
    if dtype != torch.bfloat16:
        return None

    @numba.njit(parallel=True, fastmath=True)
    def kernel(q, k_cache, v_cache, block_tables, seq_lens, out, scale):
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
        for work in numba.prange(num_seqs * num_heads):
            seq, head = work // num_heads, work % num_heads
            kv_head = head // (num_heads // num_kv_heads)
            total, largest = np.float32(0), np.float32(-np.inf)
            sums = np.zeros(head_dim, np.float32)
            scores = np.empty(block_size, np.float32)
            for i in range(-(-seq_lens[seq] // block_size)):
                block = block_tables[seq, i]
                count = min(block_size, seq_lens[seq] - i * block_size)
                best = largest
                for slot in range(count):
                    k = k_cache[block, kv_head, slot]
                    score = np.float32(0)
                    for d in range(head_dim):  # a bfloat16 is the upper half of a float32
                        score += q[seq, head, d] * np.uint32(np.uint32(k[d]) << np.uint32(16)).view(np.float32)
                    scores[slot] = score * scale
                    best = max(best, scores[slot])
                correction = np.exp(largest - best)
                largest = best
                total *= correction
                for d in range(head_dim):
                    sums[d] *= correction
                for slot in range(count):
                    weight = np.exp(scores[slot] - largest)
                    total += weight
                    v = v_cache[block, kv_head, slot]
                    for d in range(head_dim):
                        sums[d] += weight * np.uint32(np.uint32(v[d]) << np.uint32(16)).view(np.float32)
            for d in range(head_dim):
                out[seq, head, d] = sums[d] / total

    def attend(q: torch.Tensor, layer_cache: torch.Tensor, step: AttentionMetadata) -> torch.Tensor:
        k, v = layer_cache.view(torch.uint16).numpy()
        out = torch.empty(q.shape)
        tables, lens = step.block_tables.numpy(), step.seq_lens.numpy()
        kernel(q.float().numpy(), k, v, tables, lens, out.numpy(), np.float32(1 / math.sqrt(HEAD_DIM)))
        return out.to(q.dtype)

    return attend


if __name__ == "__main__":
    main()
