"""What choosing tokens costs, and that a feature costs nothing where no request uses it.

    python -m benchmarks.sampling
    python -m benchmarks.sampling --num-rows 256 --device cuda

Each line samples the same logits for requests with other parameters; in the last, one with top_p is among greedy
ones. Medians, measured alternately, beside the cost of `argmax` alone.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.common import describe_machine
from nanovllm import SamplingParams
from nanovllm.config import resolve_device
from nanovllm.sampler import sample
from nanovllm.sampling_batch import build_sampling_batch
from nanovllm.sequence import Sequence

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_k 50 and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties, greedy": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
    "5 logprobs, greedy": SamplingParams(temperature=0, logprobs=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the sampler.")
    parser.add_argument("--num-rows", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = resolve_device(args.device)
    print(describe_machine(str(device)))
    logits = torch.randn(args.num_rows, args.vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    calls: dict[str, Callable[[], object]] = {"argmax alone": lambda: logits.argmax(dim=-1)}
    for name, params in CASES.items():
        calls[name] = make_call(logits, [params] * args.num_rows)
    calls["one top_p, others greedy"] = make_call(logits, [CASES["top_p"]] + [CASES["greedy"]] * (args.num_rows - 1))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(args.rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_:  # the first warms up
                times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        print(f"{name:<26} {median(values) * 1e3:>9.2f} ms")


def make_call(logits: torch.Tensor, params: list[SamplingParams]) -> Callable[[], object]:
    """Building the step's sampling tensors, and sampling: what a step pays."""
    seqs = [Sequence(str(i), list(range(100)), one, seed=i) for i, one in enumerate(params)]
    return lambda: sample(logits, build_sampling_batch(seqs).to(logits.device))


if __name__ == "__main__":
    main()
