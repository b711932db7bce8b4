"""The roofline: the highest speed at which a machine could serve a workload.

    python -m benchmarks.roofline                # this machine's rates, and the rooflines of W, W2 and W3
    python -m benchmarks.roofline --dtype float32
    python -m benchmarks.roofline --device cuda  # those of a GPU, and the roofline of the offline workload

The roofline is a lower bound on the time, computed from two rates that this file measures. It assumes that arithmetic
runs at the processor's peak (on a GPU, at the rate of the best matrix product), that memory is read at the rate of the
best streaming read, that the two overlap perfectly, and that all requests are in every step from the first on. Only
work that every exact engine must do is counted: a prefix that all prompts share is computed once and read once per
step, logits are computed only for positions that are sampled, and norms, activations, sampling and the writing of
results cost nothing. A recurrent state is read and written once per step.

The counting depends only on its arguments, not on a device. On a GPU the rate of memory is that of a copy, which counts
the bytes read and the bytes written. `benchmarks.offline` reports the fraction reached.
"""

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import DTYPE_BYTES, QWEN3_06B, ModelShape, Workload, named_workload, resolve_dtype_name
from benchmarks.peak import measure_peak

READ_BYTES = 512 << 20  # far more than any cache holds
GEMM_SHAPES = [(1024, 3072, 1024), (2048, 1024, 6144), (2048, 4096, 4096)]  # tokens, inputs, outputs
CUDA_COPY_BYTES = 1 << 30
CUDA_GEMM_SHAPES = [(8192, 4096, 4096), (8192, 8192, 8192)]


Kinds = tuple[str, Any, str]
"""dtype, quantization, kv_cache_dtype: options of nanovllm"""


@dataclass(frozen=True)
class Rates:
    """The rates of a machine, measured or given."""

    read_bytes_per_s: float
    gemm_flops_per_s: float


@dataclass(frozen=True)
class Roofline:
    """The minimum time of a workload, and its parts."""

    prefill_s: float
    decode_s: float
    prefill_flops: int
    decode_flops: int
    decode_bytes: int
    num_decode_steps: int
    memory_bound_steps: int
    output_tokens_per_second: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def roofline(
    shape: ModelShape,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    shared_len: int,
    bytes_per_value: int,
    rates: Rates,
    bytes_per_kv_value: int | None = None,
    quantization: Any = None,
) -> Roofline:
    """The bound for requests that all start together and whose prompts agree in their first `shared_len` tokens.

    `bytes_per_kv_value` is given where the KV cache is in another dtype than the weights, such as fp8. `quantization`
    is nanovllm's option: fewer bytes for each weight, and the same rate of arithmetic.
    """
    check_lens(prompt_lens, output_lens, shared_len)
    kv_token_bytes = shape.kv_values_per_token * (bytes_per_kv_value or bytes_per_value)
    weight_bytes = count_weight_bytes(shape, bytes_per_value, quantization)
    prefill_flops = count_prefill_flops(shape, prompt_lens, shared_len)
    prefill_s = max(prefill_flops / rates.gemm_flops_per_s, weight_bytes / rates.read_bytes_per_s)
    decode_s, decode_flops, decode_bytes, memory_bound_steps = 0.0, 0, 0, 0
    num_steps = max(output_lens) - 1  # prefill has made each request's first token
    for step in range(1, num_steps + 1):
        # In step 1 a request's first generated token is computed, and sees its prompt and itself.
        contexts = [p + step for p, n in zip(prompt_lens, output_lens, strict=True) if n > step]
        flops = sum(token_flops(shape, context) + 2 * shape.head_params for context in contexts)
        kv_tokens = shared_len + sum(context - shared_len for context in contexts)
        read_bytes = weight_bytes + kv_tokens * kv_token_bytes + len(contexts) * shape.state_bytes_per_step
        compute_s, read_s = flops / rates.gemm_flops_per_s, read_bytes / rates.read_bytes_per_s
        decode_s += max(compute_s, read_s)
        memory_bound_steps += read_s > compute_s
        decode_flops += flops
        decode_bytes += read_bytes
    speed = sum(output_lens) / (prefill_s + decode_s)
    return Roofline(
        prefill_s, decode_s, prefill_flops, decode_flops, decode_bytes, num_steps, memory_bound_steps, speed
    )


def count_weight_bytes(shape: ModelShape, bytes_per_value: int, quantization: Any = None) -> int:
    """Of a step. Scales of groups count, those of whole outputs (a thousandth) do not."""
    options: dict[str, Any] = {"method": quantization} if isinstance(quantization, str) else dict(quantization or {})
    sizes = {"int8": 1.0, "int4": 0.5 + 4 / options.get("group_size", 128), True: 1.0}
    body = sizes.get(options.get("method"), bytes_per_value)
    head = sizes.get(options.get("embeddings", True), bytes_per_value) if options else bytes_per_value
    return round(shape.body_params * body + shape.head_params * head)


def check_lens(prompt_lens: Sequence[int], output_lens: Sequence[int], shared_len: int) -> None:
    if not prompt_lens or len(prompt_lens) != len(output_lens):
        raise ValueError(f"need a prompt and an output length per request, got {len(prompt_lens)}, {len(output_lens)}")
    if min(*prompt_lens, *output_lens) < 1:
        raise ValueError("prompt and output lengths must be >= 1")
    if not 0 <= shared_len <= min(prompt_lens):
        raise ValueError(f"shared_len must be in 0 … {min(prompt_lens)}, the shortest prompt, got {shared_len}")


def count_prefill_flops(shape: ModelShape, prompt_lens: Sequence[int], shared_len: int) -> int:
    """Each token of each prompt, the shared ones once; scores for one row per request."""
    shared = range_flops(shape, 0, shared_len)
    return shared + sum(range_flops(shape, shared_len, n) + 2 * shape.head_params for n in prompt_lens)


def range_flops(shape: ModelShape, start: int, end: int) -> int:
    """The tokens at positions start … end - 1; the one at position p attends to p + 1 tokens."""
    num_pairs = (end * (end + 1) - start * (start + 1)) // 2
    return (end - start) * token_flops(shape, 0) + num_pairs * shape.attention_flops_per_pair


def token_flops(shape: ModelShape, context: int) -> int:
    """One token through the layers, attending to `context` tokens, itself among them."""
    return 2 * shape.body_params + shape.state_flops_per_token + context * shape.attention_flops_per_pair


def shared_prefix_len(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with alike; of a single prompt, or of equal ones, none or all but the last.

    The last token of a prompt always has to be computed, because its scores are needed.
    """
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)  # whatever these two agree in, those between them agree in as well
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def workload_roofline(shape: ModelShape, workload: Workload, kinds: Kinds, rates: Rates) -> Roofline:
    prompt_lens = [len(prompt) for prompt in workload.prompts]
    shared = shared_prefix_len(workload.prompts)
    dtype, quantization, kv_cache_dtype = kinds
    kv_bytes = 1 if kv_cache_dtype in ("fp8", "int8") else None
    return roofline(shape, prompt_lens, workload.output_lens, shared, DTYPE_BYTES[dtype], rates, kv_bytes, quantization)


def report_roofline(
    shape: ModelShape, workload: Workload, kinds: Kinds, rates: Rates, elapsed_s: float
) -> dict[str, object]:
    """Return figures for the report: the fraction reached, and the parts of the bound."""
    bound = workload_roofline(shape, workload, kinds, rates)
    figures = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(bound).items()}
    return {
        "roofline_fraction": round(bound.total_s / elapsed_s, 4),
        "roofline": {**figures, "total_s": round(bound.total_s, 4), **{k: round(v) for k, v in asdict(rates).items()}},
    }


def measure_rates(dtype: str, device: str = "cpu", is_quantised: bool = False) -> Rates:
    """Measure the CPU, with as many threads as torch uses, or the GPU, in less than three seconds.

    is_quantised: a CPU may multiply whole numbers, which is faster.
    """
    if device.startswith("cuda"):
        return Rates(measure_cuda_copy_bandwidth(device), measure_cuda_gemm_rate(dtype, device))
    of_bytes = measure_peak(torch.int8) if is_quantised else 0.0
    return Rates(measure_read_bandwidth(), max(of_bytes, measure_gemm_rate(dtype)))


def measure_rates_apart(dtype: str, device: str = "cpu", is_quantised: bool = False) -> Rates:
    """`measure_rates` in a process of its own, so that its buffers and threads do not count among an engine's."""
    command = [sys.executable, "-m", "benchmarks.roofline", "--rates-only", "--dtype", dtype, "--device", device]
    command += ["--quantised"] * is_quantised
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if result.returncode:
        raise RuntimeError(f"measuring the machine's rates failed:\n{result.stderr}")
    return Rates(**json.loads(result.stdout.splitlines()[-1]))


def best_rates(rates: Sequence[Rates]) -> Rates:
    return Rates(max(r.read_bytes_per_s for r in rates), max(r.gemm_flops_per_s for r in rates))


def measure_read_bandwidth() -> float:
    """The best of several streaming reads by all threads, in bytes per second."""
    reads: list[Callable[[], Any]] = []  # which one is fastest depends on the machine
    for values in (torch.ones(READ_BYTES // 4), huge_page_ones(READ_BYTES // 4)):
        reads += [values.sum, values.view(torch.int32).amax]
    return READ_BYTES / min(best_time(read, 6) for read in reads)


def huge_page_ones(num_values: int) -> torch.Tensor:
    """In pages of 2 MiB where the system gives them on request: with small ones, a virtual machine may read at half
    the speed, for looking up addresses."""
    memory = mmap.mmap(-1, num_values * 4)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def measure_gemm_rate(dtype: str) -> float:
    """The best of multiply-adds without memory and of several large products y = x·Wᵀ, in FLOP/s.

    The products are in `dtype`, with weights packed in advance where oneDNN offers it, and in float32: a processor
    without instructions for bfloat16 widens it, which PyTorch does slowly.
    """
    rates = [measure_peak(getattr(torch, dtype))]
    for torch_dtype in {getattr(torch, dtype), torch.float32}:
        for num_tokens, num_inputs, num_outputs in GEMM_SHAPES:
            x = torch.rand(num_tokens, num_inputs).to(torch_dtype)
            weight = torch.rand(num_outputs, num_inputs).to(torch_dtype)
            products: list[Callable[[], torch.Tensor]] = [partial(F.linear, x, weight)]
            if (packed := packed_linear(x, weight)) is not None:
                products.append(packed)
            rates += [2 * num_tokens * num_inputs * num_outputs / best_time(product, 5) for product in products]
    return max(rates)


def packed_linear(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The product with weights in oneDNN's own layout; None where this torch or dtype has none."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def measure_cuda_copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy that is far larger than the L2 cache."""
    source = torch.zeros(CUDA_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * CUDA_COPY_BYTES / best_cuda_time(lambda: target.copy_(source), 20)


def measure_cuda_gemm_rate(dtype: str, device: str) -> float:
    """The best of several large products y = x·Wᵀ of random numbers, in FLOP/s: zeros would run faster."""
    rates = []
    for num_tokens, num_inputs, num_outputs in CUDA_GEMM_SHAPES:
        x = torch.randn(num_tokens, num_inputs, device=device).to(getattr(torch, dtype))
        weight = torch.randn(num_outputs, num_inputs, device=device).to(x.dtype)
        time_s = best_cuda_time(partial(F.linear, x, weight), 20)
        rates.append(2 * num_tokens * num_inputs * num_outputs / time_s)
    return max(rates)


def best_cuda_time(work: Callable[[], Any], rounds: int) -> float:
    """Seconds of one call by the device's own clock, the best of `rounds`."""
    for _ in range(3):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in events) / 1e3


def best_time(work: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="The rooflines of the named workloads on this machine.")
    parser.add_argument("--dtype", default="auto", help="auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--model", type=Path, default=QWEN3_06B)
    parser.add_argument("--rates-only", action="store_true", help="print the measured rates as JSON, and nothing else")
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda for a GPU's rates")
    parser.add_argument("--quantised", action="store_true", help="a CPU may multiply whole numbers")
    args = parser.parse_args()
    dtype = resolve_dtype_name(args.dtype, args.model)
    if not args.rates_only:
        print("measuring how fast this machine reads and multiplies …", file=sys.stderr, flush=True)
    rates = measure_rates(dtype, args.device, args.quantised)
    if args.rates_only:
        print(json.dumps(asdict(rates)))
        return
    verb = "read" if args.device == "cpu" else "copied"
    print(f"{rates.read_bytes_per_s / 1e9:.1f} GB/s {verb}, {rates.gemm_flops_per_s / 1e9:.0f} GFLOP/s {dtype}")
    shape = ModelShape.from_folder(args.model)
    for name in ("W", "W2", "W3") if args.device == "cpu" else ("offline",):
        bound = workload_roofline(shape, named_workload(name, shape.vocab_size), (dtype, None, "auto"), rates)
        print(
            f"{name:<7} {bound.output_tokens_per_second:6.1f} tokens/s at most: prefill {bound.prefill_s:.2f} s, "
            f"decode {bound.decode_s:.2f} s ({bound.memory_bound_steps} of {bound.num_decode_steps} steps memory-bound)"
        )


if __name__ == "__main__":
    main()
