"""Measure the cost of sampling, and show that a feature costs nothing if no request uses it.

    python -m benchmarks.sampling
    python -m benchmarks.sampling --num-rows 256 --dtype bfloat16 --device cuda --json

Each line samples the same logits for requests with other parameters; in the last line, one request with top_p is among
greedy ones. Prints medians, measured alternately, and the cost of `argmax` by itself.

On CUDA the Triton kernels are measured too, as the GPU's own time: recorded in a CUDA graph and replayed with a cold L2
cache. Every sampler must read the logits once; the share is that minimum time, at the speed of a copy, divided by the
measured time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import describe_machine
from nanovllm.batch import SamplingBatch
from nanovllm.config import resolve_device
from nanovllm.sampler import sample_tokens as draw_in_torch
from nanovllm_extras import SamplingParams
from nanovllm_extras.execution.input_buffer import map_tensors
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.logits import processors_of
from nanovllm_extras.sampling.processed_batch import build_sampling
from nanovllm_extras.sampling.runner_hooks import draw_arguments, sample, wants_only_tokens

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_k 50 and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top_k 20 and top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top_k 1000": SamplingParams(temperature=0.8, top_k=1000),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties, greedy": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
    "5 logprobs, greedy": SamplingParams(temperature=0, logprobs=5),
}
ONE_TOP_P = "one top_p, others greedy"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the sampler.")
    parser.add_argument("--num-rows", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--scale", type=float, default=1.0, help="standard deviation of the logits: larger is surer")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = resolve_device(args.device)
    logits = torch.randn(args.num_rows, args.vocab_size, generator=torch.Generator().manual_seed(0)) * args.scale
    logits = logits.to(device, getattr(torch, args.dtype))
    rows = {name: [params] * args.num_rows for name, params in CASES.items()}
    rows[ONE_TOP_P] = [CASES["top_p"]] + [CASES["greedy"]] * (args.num_rows - 1)
    times = measure_calls(logits, rows, args.rounds)
    kernels = dict(measure_kernels(logits, rows)) if device.type == "cuda" else {}
    if args.json:
        results = {name: {"ms": value * 1e3, **kernels.get(name, {})} for name, value in times.items()}
        print(json.dumps({"machine": describe_machine(str(device)), **vars(args), "results": results}))
        return
    print(describe_machine(str(device)))
    for name, value in times.items():
        kernel = " ".join(f"{key} {number:.3g}" for key, number in kernels.get(name, {}).items())
        print(f"{name:<26} {value * 1e3:>9.2f} ms  {kernel}")


def measure_calls(logits: torch.Tensor, rows: dict[str, list[SamplingParams]], rounds: int) -> dict[str, float]:
    """Return the seconds that the host waits for PyTorch, for each kind of rows."""
    calls: dict[str, Callable[[], object]] = {"argmax alone": lambda: logits.argmax(dim=-1)}
    calls |= {name: make_call(logits, params) for name, params in rows.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in tqdm(range(rounds + 1), desc="measuring", unit="round", disable=None):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if logits.is_cuda:
                torch.cuda.synchronize()
            if round_:  # the first warms up
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def make_batch(logits: torch.Tensor, params: list[SamplingParams]) -> SamplingBatch:
    prompt = list(range(100))
    seqs = [
        Sequence(str(i), prompt, one, seed=i, processors=processors_of(one, None, logits.shape[1]))
        for i, one in enumerate(params)
    ]
    return map_tensors(
        build_sampling(seqs, [seq.num_known_tokens for seq in seqs]),
        lambda tensor: tensor.to(logits.device),
    )


def make_call(logits: torch.Tensor, params: list[SamplingParams]) -> Callable[[], object]:
    """Return a call that builds the step's sampling tensors and samples, as a step does."""
    return lambda: sample(logits, make_batch(logits, params), draw_in_torch)


def measure_kernels(
    logits: torch.Tensor, rows: dict[str, list[SamplingParams]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the same for the Triton kernels, without building the tensors, and its ratio to one read of the logits."""
    from benchmarks.kernels import copy_bandwidth, seconds
    from nanovllm_extras.kernels.cuda.sample import sample_tokens

    read_s = logits.numel() * logits.element_size() / copy_bandwidth()
    for name, params in rows.items():
        batch = make_batch(logits, params)
        if not wants_only_tokens(batch):
            continue  # these stay in PyTorch
        arguments: Any = (logits, *draw_arguments(batch))
        is_equal = sample_tokens(*arguments) == draw_in_torch(*arguments)
        time_s = seconds(partial(sample_tokens, *arguments))
        yield (
            name,
            {
                "triton ms": time_s * 1e3,
                "share of one read": read_s / time_s,
                "tokens as in PyTorch": float(is_equal.float().mean()),
            },
        )


if __name__ == "__main__":
    main()
