"""The ladder: one workload on every rung, from recomputing everything to the engine. Each must give the same tokens.

    python -m labs.ladder                          # the bundled model, at most a minute on two cores
    python -m labs.ladder --json ladder.json --plot ladder.png
    python -m labs.ladder --dummy benchmarks/configs/qwen3-0.6b --num-requests 12     # another shape, random weights

All rungs have the same memory for K and V, `--num-slots` tokens, and the same requests: chats that begin alike, with
answers of different lengths. The first two rungs take so long that they get a part of the requests. On a card, rungs 1
to 6 still run on the processor.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import describe_machine
from labs import (
    one_file,
    rung_1_recompute,
    rung_2_kv_cache,
    rung_3_static_batch,
    rung_4_continuous,
    rung_5_paged,
    rung_7_engine,
    rung_8_fast_layers,
    rung_9_cuda_graphs,
    rung_10_overlap,
)
from labs.model import TINY_QWEN3, Model

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16  # the kernels on CPU want a multiple of 16
BUDGET = 256  # max_num_batched_tokens
INSTRUCTIONS = (
    "You answer questions about the way in which large language models are served. Answer in one or two short "
    "sentences. Say so if you do not know."
)
QUESTIONS = (
    "What is paged attention?",
    "What is a block table?",
    "What is the KV cache?",
    "What is chunked prefill?",
    "What is preemption?",
    "Why does an LLM server use continuous batching?",
    "What is 27 + 58?",
    "Who are you?",
)
MAX_TOKENS = (16, 32, 64, 128)
CLAIMS = """
What the field says, beside what this machine measured:
- Paging gives 2 to 4 times the throughput at equal memory (PagedAttention, Kwon et al. 2023).
  Here: {paging:.1f} times, rung 6 over rung 4, in {fewer_steps:.1f} times fewer steps.
  {sequences} sequences fit, not {rows}.
- vLLM serves up to 24 times as fast as generation one by one (vLLM's announcement, 2023, on cards).
  Here: {one_by_one:.1f} times, rung 6 over rung 2.
- Less than 4 % of the memory is wasted, where earlier systems wasted 60 to 80 % (the same announcement).
  Here: {paged_waste:.0%} in rung 6, {row_waste:.0%} in rung 4. A sequence wastes half a block on average:
  with blocks of {block_size} much of a short sequence, and little of one of 1,000 tokens.
The time of a step grows with its sequences where it waits for arithmetic or for PyTorch's calls, as on two cores. On a
card a decode waits for the weights: its time hardly grows, and most of the steps that are saved are time saved."""


@dataclass(frozen=True)
class Rung:
    number: int
    name: str
    make: Callable[[Path, int], Any]
    """(folder, slots of the KV cache) -> engine"""
    share: float = 1.0
    """Of the requests."""


@dataclass(frozen=True)
class Result:
    rung: int
    name: str
    num_output_tokens: int
    seconds: float
    tokens_per_second: float
    num_steps: int
    waste: float | None
    """1 - tokens stored / slots reserved, over all steps; None: keeps nothing."""
    num_sequences: int
    """That fitted into the memory at the same time."""


class Measured(NamedTuple):
    result: Result
    outputs: list[list[int]]


def rungs() -> list[Rung]:
    def paged(engine: type) -> Callable[[Path, int], Any]:
        return lambda folder, num_slots: engine(folder, num_slots // BLOCK_SIZE, BLOCK_SIZE, BUDGET)

    found = [
        Rung(1, "recompute everything", lambda folder, _: rung_1_recompute.Engine(folder), 1 / 8),
        Rung(2, "KV cache, one by one", lambda folder, _: rung_2_kv_cache.Engine(folder, MAX_MODEL_LEN), 1 / 4),
        Rung(3, "static batches", lambda folder, n: rung_3_static_batch.Engine(folder, n, MAX_MODEL_LEN)),
        Rung(4, "continuous batching", lambda folder, n: rung_4_continuous.Engine(folder, n, MAX_MODEL_LEN)),
        Rung(5, "blocks", lambda folder, n: rung_5_paged.Engine(folder, n // BLOCK_SIZE, BLOCK_SIZE)),
        Rung(6, "one_file.py", paged(one_file.Engine)),
        Rung(7, "nanovllm, PyTorch", paged(rung_7_engine.Engine)),
        Rung(8, "nanovllm, fast layers", paged(rung_8_fast_layers.Engine)),
    ]
    if torch.cuda.is_available():
        found.append(Rung(9, "nanovllm, CUDA graphs", paged(rung_9_cuda_graphs.Engine)))
        found.append(Rung(10, "nanovllm, overlap", paged(rung_10_overlap.Engine)))
    return found


def make_requests(model: Model, num_requests: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of token ids that begin alike, and for each the most tokens that its client wants."""
    chance = random.Random(0)
    if not model.has_tokenizer:
        beginning = [chance.randrange(1000) for _ in range(48)]
        prompts = [beginning + [chance.randrange(1000) for _ in range(12)] for _ in range(num_requests)]
    else:
        beginning = model.encode(INSTRUCTIONS)
        questions = [f"I am client {i}. {chance.choice(QUESTIONS)}" for i in range(num_requests)]
        prompts = [beginning + model.encode(question) for question in questions]
    return prompts, [chance.choice(MAX_TOKENS) for _ in range(num_requests)]


def measure(rung: Rung, folder: Path, num_slots: int, prompts: list[list[int]], limits: list[int]) -> Measured:
    engine = rung.make(folder, num_slots)
    engine.generate([prompts[0][:2]], 2)  # threads start, kernels are chosen
    before = counts(engine)
    start = time.perf_counter()
    outputs = engine.generate(prompts, limits)
    seconds = time.perf_counter() - start
    num_steps, num_stored, num_reserved = (now - then for now, then in zip(counts(engine), before, strict=True))
    num_tokens = sum(map(len, outputs))
    waste = 1 - num_stored / num_reserved if num_reserved else None
    num_sequences = getattr(engine, "max_num_running", 1)
    return Measured(
        Result(rung.number, rung.name, num_tokens, seconds, num_tokens / seconds, num_steps, waste, num_sequences),
        outputs,
    )


def counts(engine: Any) -> list[int]:
    return [getattr(engine, name, 0) for name in ("num_steps", "num_stored", "num_reserved")]


def climb(folder: Path, num_slots: int, num_requests: int) -> list[Result]:
    """All rungs, printed as they come. Raises RuntimeError if the tokens of one are not the engine's own."""
    prompts, limits = make_requests(Model(folder), num_requests)
    roomy = rung_7_engine.Engine(folder, num_requests * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, BUDGET)
    expected = roomy.generate(prompts, limits)
    print(f"{num_requests} requests, {sum(map(len, prompts))} tokens in, {sum(map(len, expected))} out; ", end="")
    print(f"memory for K and V of {num_slots} tokens\n")
    print("rung                          tokens/s    steps    waste    sequences at the same time")
    results = []
    for rung in rungs():
        num = max(1, round(num_requests * rung.share))
        result, outputs = measure(rung, folder, num_slots, prompts[:num], limits[:num])
        if outputs != expected[:num]:
            raise RuntimeError(f"rung {rung.number} gives other tokens than the engine")
        results.append(result)
        waste = "" if result.waste is None else f"{result.waste:.0%}"
        note = "" if num == num_requests else f"    ({num} of the requests)"
        print(
            f"{rung.number:>2}  {rung.name:<24}{result.tokens_per_second:>10.0f}{result.num_steps:>9}{waste:>9}"
            f"{result.num_sequences:>6}{note}",
            flush=True,
        )
    return results


def compare_with_claims(results: list[Result]) -> str:
    by_rung = {result.rung: result for result in results}
    one_by_one, rows, paged = by_rung[2], by_rung[4], by_rung[6]
    return CLAIMS.format(
        paging=paged.tokens_per_second / rows.tokens_per_second,
        one_by_one=paged.tokens_per_second / one_by_one.tokens_per_second,
        fewer_steps=rows.num_steps / paged.num_steps,
        sequences=paged.num_sequences,
        rows=rows.num_sequences,
        paged_waste=paged.waste,
        row_waste=rows.waste,
        block_size=BLOCK_SIZE,
    )


def plot(results: list[Result], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    names = [f"{result.rung}  {result.name}" for result in results]
    bars = axes.barh(names, [result.tokens_per_second for result in results], color="#4878a8")
    axes.bar_label(bars, [f"{result.tokens_per_second:,.0f}" for result in results], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second, equal memory for K and V")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def write_dummy(config: Path, folder: Path) -> None:
    """A checkpoint of the shape of `config`, with random weights: nonsense that takes as long as sense."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one workload on every rung of the ladder.")
    parser.add_argument("--model", type=Path, default=TINY_QWEN3, help="a folder with a Qwen3 checkpoint")
    parser.add_argument("--dummy", type=Path, help="a folder with config.json: its shape with random weights")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-slots", type=int, default=1024, help="tokens whose K and V fit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a bar chart, as .png or .svg")
    args = parser.parse_args()
    if args.num_requests < 1 or args.num_slots < MAX_MODEL_LEN:
        parser.error(f"--num-requests must be >= 1 and --num-slots >= {MAX_MODEL_LEN}")
    with tempfile.TemporaryDirectory() as work:
        folder = args.model
        if args.dummy is not None:
            folder = Path(work)
            write_dummy(args.dummy, folder)
        results = climb(folder, args.num_slots, args.num_requests)
    print(compare_with_claims(results))
    if args.json:
        about = {
            "machine": describe_machine("cuda" if torch.cuda.is_available() else "cpu"),
            "rungs": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(about, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
