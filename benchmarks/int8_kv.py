"""Compare attention of one decode step on a CPU with K and V in 16 and in 8 bits.

    python -m benchmarks.int8_kv [--contexts 1024 8192 32768] [--batch 1] [--json out.json]

All 28 layers of Qwen3-0.6B's shape have a cache. Each layer stores the new token's K and V, and its queries attend to
all tokens. The two formats run in turns. Prints the median milliseconds of each, and the GB/s that it reads.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import QWEN3_06B, ModelShape, describe_machine
from benchmarks.cpu_kernels import race
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention

BLOCK_SIZE = 16
KINDS = {"bfloat16": "auto", "int8": "int8"}  # kv_cache_dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = ModelShape.from_folder(QWEN3_06B)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    rows = []
    for context in args.contexts:
        metadata = decodes(args.batch, context)
        contenders: dict[str, Any] = {}
        num_bytes = {}
        for name, kind in KINDS.items():
            backend = CpuAttention(*heads, BLOCK_SIZE, torch.bfloat16, kv_cache_dtype=kind)
            cache = filled_cache(backend, shape.num_layers, metadata.block_tables.numel() + 1)
            num_bytes[name] = cache[:, :, 1:].nbytes
            contenders[name] = partial(run_step, backend, cache, metadata)
        times = race(contenders, args.repeats)
        rows.append({"context": context, "batch": args.batch, "milliseconds": times, "bytes": num_bytes})
        for name, ms in times.items():
            per_token = num_bytes[name] // (args.batch * context)
            ratio, rate = times["bfloat16"] / ms, num_bytes[name] / ms / 1e6
            print(
                f"{context:6d} tokens  {name:<10} {per_token:7,} bytes each {ms:9.2f} ms {rate:5.1f} GB/s {ratio:5.2f}x"
            )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "machine": describe_machine("cpu")}, indent=2) + "\n")


def decodes(batch: int, context: int) -> AttentionMetadata:
    """Return `batch` sequences that decode token number `context`, with blocks in random order after the null block."""
    num_blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(batch * num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    tables = order.view(batch, num_blocks).int()
    last = context - 1
    return AttentionMetadata.of_decodes(
        tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        tables,
        torch.full((batch,), context, dtype=torch.int32),
        torch.arange(batch + 1, dtype=torch.int32),
    )


def filled_cache(backend: CpuAttention, num_layers: int, num_blocks: int) -> torch.Tensor:
    cache = torch.zeros(backend.kv_cache_shape(num_layers, num_blocks), dtype=backend.kv_cache_dtype or torch.bfloat16)
    slots = torch.arange(BLOCK_SIZE, num_blocks * BLOCK_SIZE, dtype=torch.int32)
    k, v = torch.randn(2, len(slots), backend.num_kv_heads, backend.head_dim).bfloat16()
    for layer in range(num_layers):
        backend.store_kv(k, v, cache[:, layer], slots)
    return cache


def run_step(backend: CpuAttention, cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = len(metadata.slot_mapping)
    q = torch.randn(num_tokens, backend.num_heads, backend.head_dim, generator=generator).bfloat16()
    k = torch.randn(num_tokens, backend.num_kv_heads, backend.head_dim, generator=generator).bfloat16()
    for layer in range(cache.shape[1]):
        backend.store_kv(k, k, cache[:, layer], metadata.slot_mapping)
        backend.attend(q, cache[:, layer], metadata)


if __name__ == "__main__":
    main()
