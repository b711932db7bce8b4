"""Compute how many users fit into memory, from the memory left for the KV cache and the cache of one user.

    python -m labs.calculators.users_fit                        # the free memory of this machine
    python -m labs.calculators.users_fit --memory 80GiB --model Qwen/Qwen3-30B-A3B
    python -m labs.calculators.users_fit --memory 24GiB --mean-len 1000 --max-model-len 32768 --block-size 16

    for the cache = memory - weights - activations
    weights       = parameters · bytes of a value
    activations   = max_num_batched_tokens · widest tensors of a layer · bytes of a value
                    + max_num_seqs · vocab_size · 4       (logits, in float32)
    users         = for the cache / (tokens of a user · bytes of KV cache for a token)

The widest tensors of a layer are estimated as its input and residual, and the larger of q, k and v or gate and up.
`--activations` replaces this estimate. No model runs; from the hub, only config.json is fetched.

The table has the number of users whose contexts all have the same length, by kind of attention and by dtype of the
cache. `kv_bytes.py` explains what each kind of attention keeps. The lines below the table compare two ways to allocate
the same memory to users of `--mean-len` tokens. Contiguous reservation takes `max_model_len` slots for each user.
Blocks take mean_len + (block_size - 1) / 2 slots on average.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import DTYPE_BYTES, QWEN3_06B, find_model, read_config, resolve_dtype_name
from labs.calculators.common import print_table
from labs.calculators.kv_bytes import CacheShape, shape_of_model
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.network_config import NetworkConfig

CONTEXT_LENS = (2048, 8192, 32_768, 131_072)
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Memory:
    """The memory and its parts, in bytes."""

    total: int
    weights: int
    activations: int

    @property
    def for_cache(self) -> int:
        return self.total - self.weights - self.activations


def main() -> None:
    parser = argparse.ArgumentParser(description="How many users fit into memory.")
    parser.add_argument("--model", default=str(QWEN3_06B), help="a folder with a config.json, or a hub id")
    parser.add_argument("--memory", help="such as 24GiB; by default the free memory of this machine, or of its GPU")
    parser.add_argument("--dtype", default="auto", help="of weights: auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--activations", help="such as 1GiB, instead of the estimate")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--context-len", type=int, nargs="+", default=CONTEXT_LENS, help="tokens of a user")
    parser.add_argument("--mean-len", type=int, default=1000, help="tokens of a user on average")
    parser.add_argument("--max-model-len", type=int, help="by default that of the model")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    try:
        check_positive(args)
        folder = find_model(args.model, with_weights=False)
        cache, (_, shape) = shape_of_model(args.model), find_architecture(read_config(folder))
        bytes_per_value = DTYPE_BYTES[resolve_dtype_name(args.dtype, folder)]
        activations = count_activations(shape, args.max_num_batched_tokens, args.max_num_seqs, bytes_per_value)
        memory = Memory(
            total=free_bytes() if args.memory is None else parse_bytes("--memory", args.memory),
            weights=count_parameters(folder) * bytes_per_value,
            activations=activations if args.activations is None else parse_bytes("--activations", args.activations),
        )
        max_len = args.max_model_len or shape.max_position_embeddings
        check_room(memory, args.mean_len, max_len)
    except ValueError as error:
        parser.error(str(error))
    print(f"{cache.name}: {as_gib(memory.total)} - weights {as_gib(memory.weights)} - activations "
          f"{as_gib(memory.activations)} = {as_gib(memory.for_cache)} for the KV cache\n")  # fmt: skip
    print("Users that fit, by the tokens of each:")
    header = ["attention", "dtype", "bytes of a token", *(f"{n:,} tokens" for n in args.context_len)]
    print_table(header, rows_of(cache, memory.for_cache, bytes_per_value, args.context_len))
    num_slots = memory.for_cache // (cache.values_per_token * bytes_per_value)
    in_ranges = num_slots // cache.slots_of_sequence(max_len)
    in_blocks = users_in_blocks(num_slots, args.block_size, cache.slots_of_sequence(args.mean_len))
    print(f"\n{num_slots:,} slots, users of {args.mean_len:,} tokens on average, {cache.kind}:")
    print(f"  contiguous, max_model_len of {max_len:,} reserved for each: {in_ranges:,} users")
    print(f"  in blocks of {args.block_size}: {in_blocks:,} users")


def check_positive(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, int) and number < 1 for number in numbers):
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {value}")


def check_room(memory: Memory, mean_len: int, max_len: int) -> None:
    if memory.for_cache <= 0:
        raise ValueError(
            f"no memory is left for the KV cache: of {as_gib(memory.total)}, weights take {as_gib(memory.weights)} "
            f"and activations {as_gib(memory.activations)}"
        )
    if mean_len > max_len:
        raise ValueError(f"--mean-len must be <= max_model_len, got {mean_len} and {max_len}")


def rows_of(cache: CacheShape, num_bytes: int, bytes_per_value: int, context_lens: list[int]) -> list[list[str]]:
    """Return rows of users by context length, for each kind of attention. The model's own kind also has one for fp8."""
    dtype = f"{8 * bytes_per_value} bits"
    variants = [(variant, dtype, bytes_per_value) for variant in cache.variants()]
    variants.insert(1, (cache, "8 bits", 1))
    rows = []
    for variant, name, size in variants:
        users = [f"{num_bytes // (variant.values_of_sequence(n) * size):,}" for n in context_lens]
        window = "" if variant.window is None else f", window of {variant.window:,}"
        rows.append([variant.kind + window, name, f"{variant.values_per_token * size:,}", *users])
    return rows


def users_in_blocks(num_slots: int, block_size: int, mean_slots: int) -> int:
    """Return the number of users. Each user wastes half a block on average: (block_size - 1) / 2 slots."""
    return int(num_slots // block_size * block_size // (mean_slots + (block_size - 1) / 2))


def count_parameters(folder: Path) -> int:
    """Count the parameters of the engine's network, built on the meta device. Tied embeddings count once."""
    model_class, shape = find_architecture(read_config(folder))
    backend = TorchAttention(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, block_size=16)
    with torch.device("meta"):
        model = model_class(shape, backend)
    return sum(parameter.numel() for parameter in model.parameters())


def count_activations(shape: NetworkConfig, num_tokens: int, num_seqs: int, bytes_per_value: int) -> int:
    """Estimate the bytes of the widest tensors of a step, as the module's docstring explains."""
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    width = 2 * shape.hidden_size + max(heads * shape.head_dim, 2 * shape.intermediate_size)
    return num_tokens * width * bytes_per_value + num_seqs * shape.vocab_size * 4


def parse_bytes(option: str, text: str) -> int:
    """Parse a size: `24GiB` -> 25769803776. Raise ValueError if `text` is not a size."""
    match = re.fullmatch(r"([\d.]+)\s*([KMG]i?B|)", text)
    try:
        return int(float(match[1]) * UNITS[match[2]]) if match else int(text)
    except ValueError as error:
        raise ValueError(f"{option} must be a size such as 24GiB, 500MB or 1000000, got {text!r}") from error


def free_bytes() -> int:
    """Return the free memory of the GPU if there is one, otherwise the memory that Linux reports as available."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError("this system does not report its free memory: set --memory, for example to 8GiB") from error
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def as_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


if __name__ == "__main__":
    main()
