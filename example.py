"""A few questions, answered all at once, and what that cost.

    python example.py                                    # the bundled model answers a few questions
    python example.py --prompt "What is a block table?"  # ask it yourself; may be given several times
    python example.py --stream                           # see the answers grow
    python example.py --model Qwen/Qwen3-0.6B            # a local folder, or a hub id
    python example.py --tensor-parallel-size 2           # two processes share each step
    python example.py --view                             # then see, step by step, a run in which everything happens
    python example.py --trace run.jsonl --view           # record this run, and replay it in a browser

All questions are answered in one batch, which changes at every step. The table shows what a serving engine is judged
by: how soon the first token came (TTFT), the pace after it (TPOT), and how little of the KV cache was wasted.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from statistics import median

from nanovllm import LLM, TINY_QWEN3, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.checks import MissingExtra, extra

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
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token (default)")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that share each step")
    parser.add_argument("--stream", action="store_true", help="print answers as they grow, one line each")
    parser.add_argument("--trace", type=Path, metavar="JSONL", help="record each step of the run in this file")
    parser.add_argument(
        "--view",
        action="store_true",
        help="then replay a run in a browser: that of --trace, or one made to be instructive",
    )
    args = parser.parse_args()
    try:
        ask_with_options(args)
    except (TypeError, ValueError, MissingExtra) as error:  # a bad argument: what the engine says of it is enough
        parser.error(str(error))


def ask_with_options(args: argparse.Namespace) -> None:
    if args.view:  # before the work, so that a missing extra is named at once
        with extra("trace", "--view"):
            from nanovllm.extras.trace.view import STORY, open_page
    questions = args.prompt or QUESTIONS
    sampling_params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(args.model, trace=args.trace, tensor_parallel_size=args.tensor_parallel_size) as llm:
        prompts = make_prompts(llm, questions)
        if args.stream:
            outputs = stream_answers(llm, questions, prompts, sampling_params)
        else:
            outputs = llm.generate(prompts, sampling_params)
            for question, output in zip(questions, outputs, strict=True):
                print_answer(question, output.outputs[0])
        print_costs(llm, outputs)
    if args.view:
        open_page([args.trace or STORY])


def make_prompts(llm: LLM, questions: list[str]) -> list:
    """The questions of a user; the texts as they are, if the model was taught no conversations."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ValueError("there is no tokenizer in the model's folder, and this example asks in words")
    if tokenizer.chat_template is None:
        print("This model has no chat template: it continues the texts.")
        return list(questions)
    return llm.render_chat([[{"role": "user", "content": question}] for question in questions])


def stream_answers(
    llm: LLM, questions: list[str], prompts: list, sampling_params: SamplingParams
) -> list[RequestOutput]:
    """Print what each step adds to the answer that is being shown; the others grow unseen until it is their turn."""
    latest: dict[str, RequestOutput] = {}
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


def print_answer(question: str, completion: CompletionOutput) -> None:
    answer = textwrap.fill(completion.text.strip(), width=100, initial_indent="  ", subsequent_indent="  ")
    cut = " [cut at --max-tokens]" if completion.finish_reason == "length" else ""
    print(f"\n> {question}\n{answer}{cut}")


def print_costs(llm: LLM, outputs: list[RequestOutput]) -> None:
    stats = llm.get_stats()
    ttfts = [output.metrics.ttft for output in outputs if output.metrics.ttft is not None]
    tpots = [output.metrics.tpot for output in outputs if output.metrics.tpot is not None]
    *reasons, computed_by = llm.engine.description.split("; ")
    missing = [reason for reason in reasons if reason.endswith("is not there")]  # an extra that has been deleted
    rows = [
        ("computed by", "; ".join([computed_by, *missing])),
        ("requests", f"{len(outputs)}"),
        ("tokens", f"{stats.prompt_tokens} in, {stats.generation_tokens} out, {stats.steps} steps"),
        ("time to first token", f"{1000 * median(ttfts):.1f} ms (median)"),
        ("time per output token", f"{1000 * median(tpots):.1f} ms (median)" if tpots else "-"),
        ("prefill throughput", rate(stats.prefill_step_tokens, stats.prefill_step_time_s)),
        ("decode throughput", rate(stats.decode_step_tokens, stats.decode_step_time_s)),
        ("prefix-cache hit rate", f"{stats.prefix_cache_hit_rate:.0%} of the prompt tokens"),
        ("KV blocks", f"{stats.num_kv_blocks}, up to {stats.peak_used_blocks} of them used at a time"),
        ("KV waste", f"{stats.waste:.1%} of the reserved slots held no token"),
    ]
    print()
    for name, value in rows:
        print(f"{name:<22} {value}")


def rate(num_tokens: int, time_s: float) -> str:
    return f"{num_tokens / time_s:,.0f} tokens/s" if time_s else "-"


if __name__ == "__main__":
    main()
