"""Compute the bytes of KV cache for each token, for MHA, GQA, MQA and MLA.

    python -m labs.calculators.kv_bytes                                  # the shapes of some published models
    python -m labs.calculators.kv_bytes --model Qwen/Qwen3-0.6B benchmarks/configs/llama-3.2-1b
    python -m labs.calculators.kv_bytes --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --window 4096
    python -m labs.calculators.kv_bytes --context-len 8192 65536         # lengths of the sequences
    python -m labs.calculators.kv_bytes --layers 61 --heads 128 --head-dim 128 --latent-rank 512 --rope-dim 64

A model is a folder with a config.json, or a hub id; from the hub, only config.json is fetched. A model has one row for
its own attention, and one row for each other kind of attention with the same layers. For each token, a layer keeps
2 · heads · head_dim values with MHA, 2 · kv_heads · head_dim with GQA, 2 · head_dim with MQA, and
latent_rank + rope_dim with MLA. If every layer has a window, the widest window limits the tokens that a sequence keeps.
If some layers have no window, all layers are counted with all tokens; with groups of layers, an engine keeps fewer. The
last columns are for whole sequences. No model runs.
Models whose layers keep states are refused: `state_bytes.py` is for them.
`tests/labs/test_kv_bytes.py` compares these figures with the caches that engines allocate.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import DTYPE_BYTES, find_model, read_config
from nanovllm_extras.models.architectures import find_architecture

CONTEXT_LENS = (4096, 32_768, 131_072)  # of the sequences in the last columns
MLA_RANK, MLA_ROPE_DIM = 512, 64  # those of DeepSeek-V2 and V3, for models without a latent


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a network that determine the size of its cache."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_values: int
    """Values of K and V of one head, 2 · head_dim. With latents: those of the decompressed K and V of a head."""
    latent_rank: int | None = None
    rope_dim: int = 0
    window: int | None = None
    """The widest window if every layer has one. None if a layer attends to all tokens."""

    @property
    def values_per_token(self) -> int:
        if self.latent_rank is not None:
            return self.num_layers * (self.latent_rank + self.rope_dim)
        return self.num_layers * self.num_kv_heads * self.head_values

    @property
    def kind(self) -> str:
        if self.latent_rank is not None:
            return f"MLA of {self.latent_rank} + {self.rope_dim}"
        if self.num_kv_heads in (1, self.num_heads):
            return "MQA" if self.num_kv_heads == 1 else "MHA"
        return f"GQA of {self.num_kv_heads}"

    def slots_of_sequence(self, num_tokens: int) -> int:
        """Return the number of tokens that a sequence keeps, without the rest of a block behind a window."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def values_of_sequence(self, num_tokens: int) -> int:
        return self.values_per_token * self.slots_of_sequence(num_tokens)

    def variants(self) -> list["CacheShape"]:
        """Return the same layers with each kind of attention, this kind first."""
        full = replace(self, latent_rank=None, rope_dim=0)
        rank, rope_dim = (MLA_RANK, MLA_ROPE_DIM) if self.latent_rank is None else (self.latent_rank, self.rope_dim)
        others = [replace(full, num_kv_heads=self.num_heads), replace(full, num_kv_heads=max(1, self.num_heads // 8))]
        others += [replace(full, num_kv_heads=1), replace(full, latent_rank=rank, rope_dim=rope_dim)]
        found = {self.kind: self}
        for other in others:
            found.setdefault(other.kind, other)
        if self.window is not None:
            found["without the window"] = replace(self, window=None)
        return list(found.values())


PUBLISHED = [
    CacheShape("Llama 2 7B", 32, 32, 32, 256),
    CacheShape("Llama 3.1 8B", 32, 32, 8, 256),
    CacheShape("Mistral 7B v0.1", 32, 32, 8, 256, window=4096),
    CacheShape("Qwen3-0.6B", 28, 16, 8, 256),
    CacheShape("Qwen3-30B-A3B", 48, 32, 4, 256),
    CacheShape("Mixtral 8x7B", 32, 32, 8, 256),
    CacheShape("DeepSeek-V2-Lite", 27, 16, 16, 320, latent_rank=512, rope_dim=64),
    CacheShape("DeepSeek-V3", 61, 128, 128, 320, latent_rank=512, rope_dim=64),
]


def shape_of_model(name: str) -> CacheShape:
    """Return the cache's shape of a folder or hub id. Raise ValueError if it does not exist, or is not supported."""
    folder = find_model(name, with_weights=False)
    return shape_of_config(folder, folder.resolve().name if Path(name).is_dir() else name)


def shape_of_config(folder: Path, name: str) -> CacheShape:
    """Return the cache's shape of a config.json. Raise ValueError if the engine does not support the architecture."""
    raw = read_config(folder)
    _, shape = find_architecture(raw)
    if shape.state_shape is not None:
        raise ValueError(f"{name} has layers that keep states instead of K and V: use `labs.calculators.state_bytes`")
    window, num_layers, heads = shape.widest_window, shape.num_hidden_layers, shape.num_attention_heads
    if shape.latent_rank is None:
        return CacheShape(name, num_layers, heads, shape.num_key_value_heads, 2 * shape.head_dim, window=window)
    return latent_shape(name, shape, window)


def latent_shape(name: str, shape: Any, window: int | None) -> CacheShape:
    """Return the cache's shape of a `DeepseekConfig`. Keys and values of its heads have different lengths."""
    return CacheShape(
        name,
        shape.num_hidden_layers,
        shape.num_attention_heads,
        shape.num_attention_heads,
        shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim,
        shape.kv_lora_rank,
        shape.qk_rope_head_dim,
        window,
    )


def rows_of(
    shape: CacheShape, bytes_per_value: int, context_lens: Sequence[int] = CONTEXT_LENS, num_kept: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each of the first `num_kept` variants: bytes of a token, their share of MHA's, sequences."""
    mha = replace(shape, latent_rank=None, rope_dim=0, num_kv_heads=shape.num_heads).values_per_token
    rows = []
    for variant in shape.variants()[:num_kept]:
        window = "" if variant.window is None else f", window of {variant.window:,}"
        rows.append(
            {
                "model": shape.name,
                "attention": variant.kind + window,
                "bytes_per_token": variant.values_per_token * bytes_per_value,
                "share_of_mha": variant.values_per_token / mha,
                "bytes_of_sequence": {n: variant.values_of_sequence(n) * bytes_per_value for n in context_lens},
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    sizes = rows[0]["bytes_of_sequence"]
    lengths = " | ".join(f"{n:,} tokens" for n in sizes)
    lines = [f"| model | attention | bytes of a token | of MHA's | {lengths} |", f"|{'---|' * (4 + len(sizes))}"]
    for row in rows:
        sequences = " | ".join(f"{size / 2**20:,.0f} MiB" for size in row["bytes_of_sequence"].values())
        lines.append(
            f"| {row['model']} | {row['attention']} | {row['bytes_per_token']:,} | {row['share_of_mha']:.1%} | "
            f"{sequences} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of KV cache for each token, by kind of attention.")
    parser.add_argument("--model", nargs="+", help="folders with a config.json, or hub ids such as Qwen/Qwen3-0.6B")
    for name in ("layers", "heads", "kv-heads", "head-dim", "latent-rank", "rope-dim", "window"):
        parser.add_argument(f"--{name}", type=int, help="of a shape without a config.json")
    lengths: Any = {"type": int, "nargs": "+", "metavar": "N", "default": CONTEXT_LENS}
    parser.add_argument("--context-len", **lengths, help="tokens of the sequences in the last columns")
    parser.add_argument("--dtype", default="bfloat16", choices=[*DTYPE_BYTES, "fp8"], help="of the cache")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if min(args.context_len) < 1:
        parser.error(f"--context-len must be >= 1, got {min(args.context_len)}")
    bytes_per_value = 1 if args.dtype == "fp8" else DTYPE_BYTES[args.dtype]
    try:
        given = [shape_of_model(name) for name in args.model or []] + shape_of_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    shapes, num_kept = (given, None) if given else (PUBLISHED, 1)
    rows = [row for shape in shapes for row in rows_of(shape, bytes_per_value, args.context_len, num_kept)]
    print(json.dumps(rows) if args.json else as_table(rows))


def shape_of_arguments(args: argparse.Namespace) -> list[CacheShape]:
    """Return the shape that the options give, if any. Raise ValueError if they are incomplete or do not fit."""
    numbers = (args.layers, args.heads, args.kv_heads, args.head_dim, args.latent_rank, args.rope_dim, args.window)
    if not any(number is not None for number in numbers):
        return []
    if any(number is not None and number < 1 for number in numbers):
        raise ValueError("the numbers of a shape must be >= 1")
    if None in (args.layers, args.heads, args.head_dim) or (args.latent_rank is None) != (args.rope_dim is None):
        raise ValueError("a shape needs --layers, --heads and --head-dim; --latent-rank and --rope-dim go together")
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {args.heads} and {kv_heads}")
    shape = CacheShape("the shape given", args.layers, args.heads, kv_heads, 2 * args.head_dim, window=args.window)
    return [replace(shape, latent_rank=args.latent_rank, rope_dim=args.rope_dim or 0)]


if __name__ == "__main__":
    main()
