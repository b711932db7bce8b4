"""A few questions, answered all at once, and what that cost.

    python example.py                                    # the bundled model answers a few questions
    python example.py --prompt "What is a block table?"  # ask it yourself; may be given several times
    python example.py --stream                           # see the answers grow
    python example.py --model Qwen/Qwen3-0.6B            # a local folder, or a hub id
    python example.py --core                             # only the core's own code, without faster kernels
    python example.py --view                             # then replay, step by step, a recorded run in a browser
    python example.py --trace run.jsonl --view           # record this run, and replay it

All questions are answered in one batch, which changes at every step. The table shows by what a serving engine is
judged: how soon the first token came (TTFT), the pace after it (TPOT), and how often a prefix was in the cache.
"""

import argparse
import sys
import textwrap
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
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=320))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print_answer(question, output.outputs[0])
    print_costs(llm, outputs)


# ---- the same with options


def main() -> None:
    if len(sys.argv) == 1:
        return ask()
    parser = argparse.ArgumentParser(description="Ask a model a few questions at once.")
    parser.add_argument("--model", default=TINY_QWEN3, help="folder or hub id (default: the bundled model)")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the most likely token (default)")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="print answers as they grow, one line each")
    parser.add_argument("--core", action="store_true", help="run only the core's own code")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N", help="ranks that share each step")
    parser.add_argument("--trace", type=Path, metavar="JSONL", help="record each step of the run in this file")
    parser.add_argument("--view", action="store_true", help="then replay the run of --trace, or a recorded one")
    args = parser.parse_args()
    try:
        ask_with_options(args)
    except (TypeError, ValueError) as error:  # a bad argument: the engine's message says enough
        parser.error(str(error))


def ask_with_options(args: argparse.Namespace) -> None:
    kind: Any = LLM
    params: Any = SamplingParams
    if args.core:
        from nanovllm.llm import LLM as kind
        from nanovllm.sampling_params import SamplingParams as params
    options = {"tensor_parallel_size": args.tensor_parallel_size, "trace": args.trace}
    llm = kind(args.model, **{name: value for name, value in options.items() if value is not None})
    questions = args.prompt or QUESTIONS
    prompts = make_prompts(llm, questions)
    sampling_params = params(temperature=args.temperature, max_tokens=args.max_tokens)
    if args.stream:
        outputs = stream_answers(llm, questions, prompts, sampling_params)
    else:
        outputs = llm.generate(prompts, sampling_params)
        for question, output in zip(questions, outputs, strict=True):
            print_answer(question, output.outputs[0])
    print_costs(llm, outputs)
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


def stream_answers(llm: Any, questions: list[str], prompts: list, sampling_params: Any) -> list[Any]:
    """Print what each step adds to the answer that is shown. The others grow unseen until it is their turn."""
    latest: dict[str, Any] = {}
    shown: dict[str, int] = {}
    for output in llm.stream(prompts, sampling_params):
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
    return [latest[request_id] for request_id in sorted(latest, key=int)]


# ---- what is printed


def print_answer(question: str, completion: Any) -> None:
    answer = textwrap.fill(completion.text.strip(), width=100, initial_indent="  ", subsequent_indent="  ")
    cut = " [cut at --max-tokens]" if completion.finish_reason == "length" else ""
    print(f"\n> {question}\n{answer}{cut}")


def print_costs(llm: Any, outputs: list[Any]) -> None:
    """Print a table. The core counts less than the whole package, which also has times and a description."""
    engine = llm.engine
    stats = llm.get_stats() if hasattr(llm, "get_stats") else engine.stats
    metrics = [output.metrics for output in outputs if hasattr(output, "metrics")]
    ttfts = [one.ttft for one in metrics if one.ttft is not None]
    tpots = [one.tpot for one in metrics if one.tpot is not None]
    computed_by = getattr(engine, "description", f"PyTorch on {engine.runner.device}, {engine.runner.dtype}")
    rows = [
        ("computed by", computed_by.split("; ")[-1]),
        ("requests", f"{len(outputs)}"),
        ("tokens", f"{stats.prompt_tokens} in, {stats.generation_tokens} out, {stats.steps} steps"),
        ("prefix-cache hit rate", f"{stats.prefix_cache_hit_rate:.0%} of the prompt tokens"),
        ("KV blocks", f"{engine.runner.kv_cache.num_blocks}, up to {stats.peak_used_blocks} of them used at a time"),
    ]
    if ttfts:
        rows.insert(3, ("time to first token", f"{1000 * median(ttfts):.1f} ms (median)"))
        rows.insert(4, ("time per output token", f"{1000 * median(tpots):.1f} ms (median)" if tpots else "-"))
    if hasattr(stats, "waste"):
        rows += [
            ("prefill throughput", rate(stats.prefill_step_tokens, stats.prefill_step_time_s)),
            ("decode throughput", rate(stats.decode_step_tokens, stats.decode_step_time_s)),
            ("KV waste", f"{stats.waste:.1%} of the reserved slots held no token"),
        ]
    print()
    for name, value in rows:
        print(f"{name:<22} {value}")


def rate(num_tokens: int, time_s: float) -> str:
    return f"{num_tokens / time_s:,.0f} tokens/s" if time_s else "-"


if __name__ == "__main__":
    main()
