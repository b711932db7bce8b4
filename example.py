"""A few questions, answered all at once, and what that cost.

    python example.py                                    # the bundled model answers a few questions
    python example.py --prompt "What is a block table?"  # ask it yourself; may be given several times
    python example.py --stream                           # see the answers grow
    python example.py --model ~/models/Qwen3-0.6B        # a folder; with --extras also a hub id
    python example.py --attention-backend torch          # only the code in nanovllm/, without faster kernels
    python example.py --extras                           # the engine with all options, of nanovllm_extras
    python example.py --trace run.jsonl --view           # record this run, and replay it step by step in a browser
    python example.py --view                             # replay a run that is recorded already

All questions are answered in one batch, which changes at every step. The table shows by what a serving engine is
judged: how soon the first token came (TTFT), the pace after it (TPOT), how often a prefix was in the cache, and how
much of the reserved memory was empty (waste).
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm import LLM, TINY_QWEN3, SamplingParams

QUESTIONS = [
    "What is paged attention?",
    "Why does an LLM server use continuous batching?",
    "What is the KV cache?",
    "What is chunked prefill?",
    "What is 27 + 58?",
    "Who are you?",
]


def ask() -> None:
    llm = LLM(TINY_QWEN3)
    prompts = llm.render_chat([[{"role": "user", "content": question}] for question in QUESTIONS])
    costs = Costs(llm)
    latest = {}  # request id -> its newest output
    for output in costs.watch(llm.stream(prompts, SamplingParams(temperature=0, max_tokens=320))):
        latest[output.request_id] = output
    for question, request_id in zip(QUESTIONS, sorted(latest, key=int), strict=True):
        print_answer(question, latest[request_id].outputs[0])
    costs.print()


# ---- the same with options


def main() -> None:
    if len(sys.argv) == 1:
        return ask()
    parser = argparse.ArgumentParser(description="Ask a model a few questions at once.")
    parser.add_argument("--model", default=TINY_QWEN3, help="folder, or with --extras a hub id (default: bundled)")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the most likely token (default)")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="print answers as they grow, one line each")
    parser.add_argument("--attention-backend", default="auto", help="auto (default), torch, flash_attn, cpu, triton")
    parser.add_argument("--extras", action="store_true", help="run the engine of nanovllm_extras")
    extras = parser.add_argument_group("options that imply --extras")
    extras.add_argument("--tensor-parallel-size", type=int, metavar="N", help="ranks that share each step")
    extras.add_argument("--trace", type=Path, metavar="JSONL", help="record each step of the run in this file")
    parser.add_argument("--view", action="store_true", help="then replay the run of --trace, or a recorded one")
    args = parser.parse_args()
    try:
        ask_with_options(args)
    except (TypeError, ValueError) as error:  # a bad argument: the engine's message says enough
        parser.error(str(error))


def ask_with_options(args: argparse.Namespace) -> None:
    more = {"tensor_parallel_size": args.tensor_parallel_size, "trace": args.trace}
    options = {name: value for name, value in more.items() if value is not None}
    make: Any = LLM
    if args.extras or options:
        from nanovllm_extras import LLM as make
    llm = make(args.model, attention_backend=args.attention_backend, **options)
    questions = args.prompt or QUESTIONS
    prompts = make_prompts(llm, questions)
    costs = Costs(llm)
    outputs = costs.watch(llm.stream(prompts, SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)))
    if args.stream:
        print_while_growing(questions, outputs)
    else:
        latest = {output.request_id: output for output in outputs}
        for question, request_id in zip(questions, sorted(latest, key=int), strict=True):
            print_answer(question, latest[request_id].outputs[0])
    costs.print()
    if hasattr(llm, "shutdown"):
        llm.shutdown()
    if args.view:
        from nanovllm_extras.trace.view import STORY, open_page

        open_page([args.trace or STORY])


def make_prompts(llm: Any, questions: list[str]) -> list:
    """Return the questions as prompts: with the chat template, or as they are if the model has none."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError("the model's folder holds no tokenizer, and this example needs one for its questions")
    if tokenizer.chat_template is None:
        print("This model has no chat template: it continues the texts.")
        return list(questions)
    return llm.render_chat([[{"role": "user", "content": question}] for question in questions])


def print_while_growing(questions: list[str], outputs: Iterable[Any]) -> None:
    """Print what each step adds to the answer that is shown. The others grow unseen until it is their turn."""
    latest: dict[str, Any] = {}
    shown: dict[str, int] = {}
    for output in outputs:
        latest[output.request_id] = output
        for request_id in sorted(latest, key=int):  # in the order of the questions
            one = latest[request_id]
            if request_id not in shown:
                print(f"\n> {questions[len(shown)]}\n  ", end="")
            text = one.outputs[0].text
            print(text[shown.get(request_id, 0) :], end="", flush=True)
            shown[request_id] = len(text)
            if not one.finished:
                break
    print()


# ---- what is printed


def print_answer(question: str, completion: Any) -> None:
    answer = textwrap.fill(completion.text.strip(), width=100, initial_indent="  ", subsequent_indent="  ")
    cut = " [cut at --max-tokens]" if completion.finish_reason == "length" else ""
    print(f"\n> {question}\n{answer}{cut}")


class Costs:
    """Measures a run from outside of the engine: when the tokens came, and how full the reserved blocks were."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.engine
        self.start = time.perf_counter()
        self.times: dict[str, list[float]] = {}  # request id -> seconds until its first and its last output
        self.num_tokens: dict[str, int] = {}  # request id -> tokens of its answer
        self.num_stored = self.num_slots = 0  # tokens stored and slots reserved, summed over the steps

    def watch(self, outputs: Iterable[Any]) -> Iterator[Any]:
        """Yield the outputs of `LLM.stream`, and measure when each comes."""
        for output in outputs:
            now = time.perf_counter() - self.start
            first, _ = self.times.get(output.request_id, (now, now))
            self.times[output.request_id] = [first, now]
            self.num_tokens[output.request_id] = len(output.outputs[0].token_ids)
            self.count_slots()
            yield output

    def count_slots(self) -> None:
        """Add the slots of the blocks that are in use, and the tokens in them; sequences share full blocks."""
        scheduler = self.engine.scheduler
        size = scheduler.block_manager.block_size
        stored: dict[int, int] = {}  # block id -> tokens in it
        for seq in scheduler.running:
            for i, block_id in enumerate(seq.block_table):
                stored[block_id] = max(0, min(size, seq.num_computed_tokens - i * size))
        self.num_stored += sum(stored.values())
        self.num_slots += size * len(stored)

    def print(self) -> None:
        """Print a table: what was measured here, and what the engine counts."""
        engine, stats = self.engine, self.engine.stats
        ttfts = [first for first, _ in self.times.values()]
        tpots = [(last - first) / (self.num_tokens[i] - 1) for i, (first, last) in self.times.items()
                 if self.num_tokens[i] > 1]  # fmt: skip
        elapsed_s = max(last for _, last in self.times.values())
        rows = [
            ("engine", f"{type(engine).__module__}.{type(engine).__name__}"),
            ("computed by", engine.description.split("; ")[-1]),
            ("requests", f"{len(self.times)}"),
            ("tokens", f"{stats.prompt_tokens} in, {stats.generation_tokens} out, {stats.steps} steps"),
            ("time to first token", f"{1000 * median(ttfts):.1f} ms (median)"),
            ("time per output token", f"{1000 * median(tpots):.1f} ms (median)" if tpots else "-"),
            ("output", f"{sum(self.num_tokens.values()) / elapsed_s:,.0f} tokens/s"),
            ("prefix-cache hit rate", f"{stats.prefix_cache_hit_rate:.0%} of the prompt tokens"),
            (
                "KV blocks",
                f"{engine.runner.kv_cache.num_blocks}, up to {stats.peak_used_blocks} of them used at a time",
            ),
            ("KV waste", f"{1 - self.num_stored / max(1, self.num_slots):.1%} of the reserved slots held no token"),
        ]
        print()
        for name, value in rows:
            print(f"{name:<22} {value}")


if __name__ == "__main__":
    main()
