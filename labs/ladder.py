"""Run one workload on all programs of the ladder, from recomputing everything to the engine, and compare them.

    python -m labs.ladder                          # the bundled model, at most a minute on two cores
    python -m labs.ladder --json ladder.json --plot ladder.png
    python -m labs.ladder --dummy benchmarks/configs/qwen3-0.6b --num-requests 12     # another shape, random weights

All programs must give the same tokens. They have the same memory for K and V, `--num-slots` tokens, and the same
requests: chats with a common prefix and answers of different lengths. The first two programs are slow, and get only a
part of the requests. If there is a GPU, only nanovllm uses it.
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
    cached,
    continuous,
    engine_options,
    mixed_batches,
    on_demand,
    one_file,
    paged,
    prefix_cache,
    recompute,
    static_batch,
)
from labs.model import TINY_QWEN3, Model
from nanovllm_extras.cli.machine_report import machine_class

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16  # the CPU kernels need a multiple of 16
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
SINGLE, IN_ROWS, PAGED, COMPLETE = "KV cache, one by one", "continuous batching", "blocks on demand", "one_file.py"
CLAIMS = """
Published figures, compared with this run:
- Paging gives 2 to 4 times the throughput at equal memory (PagedAttention, Kwon et al. 2023).
  Here: {paging:.1f} times ("{paged}" compared with "{in_rows}"), in {fewer_steps:.1f} times fewer steps.
  {sequences} sequences fit at the same time instead of {rows}. With mixed batches and a prefix cache: {all:.1f} times.
- vLLM has up to 24 times the throughput of generating one request at a time (vLLM's announcement, 2023, on GPUs).
  Here: {one_by_one:.1f} times ("{complete}" compared with "{single}").
- Less than 4 % of the memory is wasted; earlier systems wasted 60 to 80 % (the same announcement).
  Here: {paged_waste:.0%} ("{paged}") and {row_waste:.0%} ("{in_rows}"). A sequence wastes half a block on
  average. With blocks of {block_size}, this is a large part of a short sequence, and a small part of 1,000 tokens.
If a step is limited by arithmetic or by PyTorch's calls, as on a few CPU cores, its time grows with the number of
sequences. On a GPU, reading the weights limits a decode. Its time hardly grows, so that fewer steps mean less time."""

NOTES = {  # why a program may be slower, or have more waste, than the program before it
    "mixed batches": "The steps are fewer and larger. On a CPU, this saves little: the tokens to compute are the same.",
    "prefix cache": "A shared block counts once, so that partly filled last blocks are a larger part.",
    COMPLETE: "Each request has one answer, and no sequence is forked: the steps are those of the prefix cache.",
    "nanovllm, PyTorch layers": """Its layers are slower than those of `model.py`. Attention clears the slots after the
  end of each sequence, because they may hold NaN. The norm takes several operations, as in `transformers`.""",
}


@dataclass(frozen=True)
class Program:
    """A program of the ladder."""

    name: str
    make: Callable[[Path, int], Any]
    """(folder, slots of the KV cache) -> engine"""
    share: float = 1.0
    """The part of the requests that the program gets."""


@dataclass(frozen=True)
class Result:
    """What one program did with its requests."""

    name: str
    num_output_tokens: int
    seconds: float
    processor_seconds: float
    """Of all threads: other programs on the machine change it less than the time that passes."""
    tokens_per_second: float
    num_steps: int
    waste: float | None
    """1 - tokens stored / slots reserved, over all steps. None if the program has no cache."""
    num_sequences: int
    """The largest number of sequences in memory at the same time."""


class Measured(NamedTuple):
    result: Result
    outputs: list[list[int]]


def programs() -> list[Program]:
    """Return the programs from the simplest to the fastest, and two more with a GPU."""

    def engine(**options: bool) -> Callable[[Path, int], Any]:
        return lambda folder, n: engine_options.Engine(folder, n // BLOCK_SIZE, BLOCK_SIZE, BUDGET, **options)

    def small(engine: Callable[..., Any]) -> Callable[[Path, int], Any]:
        return lambda folder, n: engine(folder, n // BLOCK_SIZE, BLOCK_SIZE, BUDGET)

    found = [
        Program("recompute everything", lambda folder, _: recompute.Engine(folder), 1 / 8),
        Program(SINGLE, lambda folder, _: cached.Engine(folder, MAX_MODEL_LEN), 1 / 4),
        Program("static batches", lambda folder, n: static_batch.Engine(folder, n, MAX_MODEL_LEN)),
        Program(IN_ROWS, lambda folder, n: continuous.Engine(folder, n, MAX_MODEL_LEN)),
        Program("blocks, reserved", lambda folder, n: paged.Engine(folder, n // BLOCK_SIZE, BLOCK_SIZE)),
        Program("blocks on demand", lambda folder, n: on_demand.Engine(folder, n // BLOCK_SIZE, BLOCK_SIZE)),
        Program("mixed batches", small(mixed_batches.Engine)),
        Program("prefix cache", small(prefix_cache.Engine)),
        Program(COMPLETE, small(one_file.Engine)),
        Program("nanovllm, PyTorch layers", engine()),
        Program("nanovllm, fast layers", engine(fast_layers=True)),
    ]
    if torch.cuda.is_available():
        found.append(Program("nanovllm, CUDA graphs", engine(fast_layers=True, cuda_graphs=True)))
        found.append(Program("nanovllm, overlap", engine(fast_layers=True, cuda_graphs=True, overlap=True)))
    return found


def make_requests(model: Model, num_requests: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts of token ids with a common prefix, and the `max_tokens` of each request."""
    chance = random.Random(0)
    if not model.has_tokenizer:
        beginning = [chance.randrange(1000) for _ in range(48)]
        prompts = [beginning + [chance.randrange(1000) for _ in range(12)] for _ in range(num_requests)]
    else:
        beginning = model.encode(INSTRUCTIONS)
        questions = [f"I am client {i}. {chance.choice(QUESTIONS)}" for i in range(num_requests)]
        prompts = [beginning + model.encode(question) for question in questions]
    return prompts, [chance.choice(MAX_TOKENS) for _ in range(num_requests)]


def measure(program: Program, folder: Path, num_slots: int, prompts: list[list[int]], limits: list[int]) -> Measured:
    engine = program.make(folder, num_slots)
    engine.generate([prompts[0][:2]], 2)  # warm up: start threads, choose kernels
    before = counts(engine)
    start, busy = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, limits)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - busy
    num_steps, num_stored, num_reserved = (now - then for now, then in zip(counts(engine), before, strict=True))
    num_tokens = sum(map(len, outputs))
    waste = 1 - num_stored / num_reserved if num_reserved else None
    num_sequences = getattr(engine, "max_num_running", 1)
    speed = num_tokens / seconds
    return Measured(
        Result(program.name, num_tokens, seconds, processor_seconds, speed, num_steps, waste, num_sequences), outputs
    )


def counts(engine: Any) -> list[int]:
    return [getattr(engine, name, 0) for name in ("num_steps", "num_stored", "num_reserved")]


def compare_programs(folder: Path, num_slots: int, num_requests: int) -> list[Result]:
    """Run all programs and print a row for each. Raise RuntimeError if a program gives other tokens than the engine."""
    prompts, limits = make_requests(Model(folder), num_requests)
    roomy = engine_options.Engine(folder, num_requests * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, BUDGET)
    expected = roomy.generate(prompts, limits)
    print(f"{num_requests} requests, {sum(map(len, prompts))} tokens in, {sum(map(len, expected))} out; ", end="")
    print(f"memory for K and V of {num_slots} tokens")
    print(f"{machine_class()}\n")
    print("program                     tokens/s    steps    waste    sequences at the same time")
    results = []
    for program in programs():
        num = max(1, round(num_requests * program.share))
        print(f"{program.name:<26}", end="", flush=True)  # the first ones take a minute on a busy machine
        result, outputs = measure(program, folder, num_slots, prompts[:num], limits[:num])
        if outputs != expected[:num]:
            raise RuntimeError(f"{program.name!r} gives other tokens than the engine")
        results.append(result)
        waste = "" if result.waste is None else f"{result.waste:.0%}"
        note = "" if num == num_requests else f"    ({num} of the requests)"
        print(
            f"{result.tokens_per_second:>10.0f}{result.num_steps:>9}{waste:>9}{result.num_sequences:>6}{note}",
            flush=True,
        )
    print("\n" + "\n".join(f"- {name}: {note}" for name, note in NOTES.items()))
    return results


def compare_with_claims(results: list[Result]) -> str:
    by_name = {result.name: result for result in results}
    single, in_rows, paged, complete = (by_name[name] for name in (SINGLE, IN_ROWS, PAGED, COMPLETE))
    return CLAIMS.format(
        single=SINGLE,
        in_rows=IN_ROWS,
        paged=PAGED,
        complete=COMPLETE,
        paging=paged.tokens_per_second / in_rows.tokens_per_second,
        all=complete.tokens_per_second / in_rows.tokens_per_second,
        one_by_one=complete.tokens_per_second / single.tokens_per_second,
        fewer_steps=in_rows.num_steps / paged.num_steps,
        sequences=paged.num_sequences,
        rows=in_rows.num_sequences,
        paged_waste=paged.waste,
        row_waste=in_rows.waste,
        block_size=BLOCK_SIZE,
    )


def plot(results: list[Result], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.35 * len(results)), layout="constrained")
    names = [result.name for result in results]
    bars = axes.barh(names, [result.tokens_per_second for result in results], color="#4878a8")
    axes.bar_label(bars, [f"{result.tokens_per_second:,.0f}" for result in results], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second, equal memory for K and V")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def write_dummy(config: Path, folder: Path) -> None:
    """Write a checkpoint with the shape of `config` and random weights. Only its tokens are meaningless."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one workload on all programs of the ladder.")
    parser.add_argument("--model", type=Path, default=TINY_QWEN3, help="a folder with a Qwen3 checkpoint")
    parser.add_argument("--dummy", type=Path, help="a folder with config.json; the weights are random")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-slots", type=int, default=1024, help="tokens of K and V that fit into memory")
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
        results = compare_programs(folder, args.num_slots, args.num_requests)
    print(compare_with_claims(results))
    if args.json:
        about = {
            "machine": describe_machine("cuda" if torch.cuda.is_available() else "cpu"),
            "programs": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(about, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
