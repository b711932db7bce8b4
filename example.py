"""Offline generation, and what it cost.

    python example.py                                    # the bundled model answers a few questions
    python example.py --prompt "What is a block table?"  # ask it yourself; may be given several times
    python example.py --stream                           # see the answers grow
    python example.py --model Qwen/Qwen3-0.6B            # a local folder, or a hub id
    python example.py --view                             # replay every step of this run in a browser
    python example.py --trace run.jsonl                  # record the run; `nanovllm view run.jsonl` replays it

All prompts are answered at once, in one continuously batched engine. The table shows what a serving engine is judged
by: how soon the first token came (TTFT), the pace after it (TPOT), and how little of the KV cache was wasted.
"""

import argparse
import tempfile
import textwrap
from pathlib import Path
from statistics import median

from nanovllm import LLM, TINY_QWEN3, EngineStats, RequestOutput, SamplingParams
from nanovllm.trace.view import open_page

PROMPTS = [
    "What is paged attention?",
    "Why does an LLM server use continuous batching?",
    "What is the KV cache?",
    "What is chunked prefill?",
    "What is 27 + 58?",
    "Who are you?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model a few questions at once.")
    parser.add_argument("--model", default=TINY_QWEN3, help="folder or hub id (default: the bundled model)")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token (default)")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="print answers as they grow, one line each")
    parser.add_argument("--trace", type=Path, metavar="JSONL", help="record each step of the run in this file")
    parser.add_argument("--view", action="store_true", help="replay the run in a browser when it is over")
    args = parser.parse_args()
    try:
        run(args)
    except (TypeError, ValueError) as error:  # a bad argument: what the engine says of it is enough
        parser.error(str(error))


def run(args: argparse.Namespace) -> None:
    trace = args.trace
    if args.view and trace is None:
        trace = Path(tempfile.mkdtemp(prefix="nanovllm-")) / "example.jsonl"
    prompts = args.prompt or PROMPTS
    sampling_params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(model=args.model, trace=trace) as llm:
        asked = as_questions(llm, prompts)
        if args.stream:
            outputs = stream_answers(llm, prompts, asked, sampling_params)
        else:
            outputs = llm.generate(asked, sampling_params)
            print_answers(prompts, outputs)
        stats = llm.get_stats()
        computed_by = llm.engine.description.split("; ")[-1]
    print_costs(outputs, stats, computed_by)
    if args.view:
        open_page([trace])


def as_questions(llm: LLM, prompts: list[str]) -> list:
    """What the model is given: a question of a user, or the text alone, where a model was taught no conversations."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ValueError("there is no tokenizer in the model's folder, and this example asks in words")
    if tokenizer.chat_template is None:
        print("This model has no chat template: it continues the texts.")
        return list(prompts)
    return llm.render_chat([[{"role": "user", "content": prompt}] for prompt in prompts])


def stream_answers(llm: LLM, prompts: list[str], asked: list, sampling_params: SamplingParams) -> list[RequestOutput]:
    """Print what each step adds to the answer that is being shown; the others grow unseen until it is their turn."""
    latest: dict[str, RequestOutput] = {}
    shown: dict[str, int] = {}
    for output in llm.stream(asked, sampling_params):
        latest[output.request_id] = output
        for request_id in sorted(latest, key=int):  # in the order of the prompts
            one = latest[request_id]
            if request_id not in shown:
                print(f"\n> {prompts[len(shown)]}\n  ", end="")
            text = one.outputs[0].text
            print(text[shown.get(request_id, 0) :], end="", flush=True)
            shown[request_id] = len(text)
            if not one.finished:
                break
    print()
    return [latest[request_id] for request_id in sorted(latest, key=int)]


def print_answers(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        answer = textwrap.fill(completion.text.strip(), width=100, initial_indent="  ", subsequent_indent="  ")
        cut = " [cut at --max-tokens]" if completion.finish_reason == "length" else ""
        print(f"\n> {prompt}\n{answer}{cut}")


def print_costs(outputs: list[RequestOutput], stats: EngineStats, computed_by: str) -> None:
    ttfts = [output.metrics.ttft for output in outputs if output.metrics.ttft is not None]
    tpots = [output.metrics.tpot for output in outputs if output.metrics.tpot is not None]
    rows = [
        ("computed by", computed_by),
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
