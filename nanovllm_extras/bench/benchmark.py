"""Run the command `nanovllm bench serve`: send the loads, and report and save the results."""

import argparse
import json
import math
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm_extras.bench.bench_options import ENDPOINTS, base_url, make_headers, make_parser
from nanovllm_extras.bench.client import Client
from nanovllm_extras.bench.load_generator import Exchange, Send, draw_departures, offer
from nanovllm_extras.bench.plot import plot
from nanovllm_extras.bench.report import Options, print_report, summarize
from nanovllm_extras.bench.results import Result, read_result
from nanovllm_extras.bench.workloads import Work, make_prefix_repetition, make_random
from nanovllm_extras.machine.event_loop import run
from nanovllm_extras.machine.machine_limits import allow_open_files
from nanovllm_extras.machine.printing import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0 if a request was answered, 1 if none was answered, 2 for a bad option."""
    args = make_parser().parse_args(argv)
    allow_open_files()
    try:
        runs = run(run_loads(args))
    except ConnectionError as error:
        print(f"nanovllm bench serve: {error}", file=sys.stderr)
        return 1
    if args.save_result or args.save_detailed:
        save(runs, args)
    if args.plot:
        plot(runs, args.percentile_metrics, args.metric_percentiles, args.plot)
    return 0 if any(run["completed"] for run in runs) else 1


async def run_loads(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Send one load for each rate, one after the other, all with the same requests. Return their reports."""
    tokenizer = load_tokenizer(args.tokenizer)
    works = make_works(args, args.num_prompts, args.seed)
    warm_up = make_works(args, args.num_warmups, args.seed + 1)  # other prompts, so that the load's are not cached
    runs = []
    async with Client(base_url(args), make_headers(args)) as client:
        args.model = await client.find_model(args.model, args.ready_check_timeout_sec)
        bodies = [make_body(work, args, tokenizer) for work in works]
        endpoint = args.endpoint or ENDPOINTS[args.backend]

        async def send(body: bytes, exchange: Exchange) -> None:
            await client.post(endpoint, body, exchange)

        if warm_up:
            note(args, f"{len(warm_up)} warm-up requests, one by one …")
        await offer(
            [make_body(work, args, tokenizer) for work in warm_up], [0.0] * len(warm_up), send, max_concurrency=1
        )
        for rate in args.request_rate:
            runs.append(await run_load(works, bodies, rate, send, args))
    return runs


def note(args: argparse.Namespace, line: str) -> None:
    """Say on stderr what is waited for, unless there is no progress bar either."""
    if not args.disable_tqdm and sys.stderr is not None:
        say(line, sys.stderr)


async def run_load(
    works: list[Work], bodies: list[bytes], rate: float, send: Send, args: argparse.Namespace
) -> dict[str, Any]:
    """Send one load, print its report, and return the report with the options, as it is saved in JSON."""
    departures = draw_departures(len(bodies), rate, args.burstiness, args.seed)
    cpu_start = time.process_time()
    with tqdm(total=len(bodies), unit="req", disable=args.disable_tqdm or sys.stderr is None or None) as bar:
        exchanges = await offer(bodies, departures, send, args.max_concurrency, bar.update)
    cpu_seconds = time.process_time() - cpu_start
    results = [read_result(one, len(work.prompt_token_ids)) for one, work in zip(exchanges, works, strict=True)]
    options = Options(args.percentile_metrics, args.metric_percentiles, dict(args.goodput))
    report = summarize(results, options)
    say(f"\n{args.label or args.model}: {len(bodies)} requests, {rate:g} per second")
    print_report(report, options)
    for error in sorted({result.error for result in results if result.error})[:5]:
        say(f"failed: {error}", sys.stderr)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "model_id": args.model,
        "dataset_name": args.dataset_name,
        "num_prompts": len(bodies),
        "request_rate": "inf" if math.isinf(rate) else rate,  # JSON has no infinity
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **dict(args.metadata),
        **report,
        "client_cpu_seconds": cpu_seconds,
        **(details(results) if args.save_detailed else {}),
    }


def make_works(args: argparse.Namespace, num_prompts: int, seed: int) -> list[Work]:
    """Return the prompts and output lengths of a load."""
    options = {"vocab_size": args.random_vocab_size, "seed": seed}
    if args.dataset_name == "random":
        lengths = (args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len)
        return make_random(num_prompts, *lengths, **options)
    prefix_len, suffix_len = args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len
    num_prefixes, output_len = args.prefix_repetition_num_prefixes, args.prefix_repetition_output_len
    return make_prefix_repetition(num_prompts, prefix_len, suffix_len, num_prefixes, output_len, **options)


def load_tokenizer(name: str | None) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer `name`; None for None. Exits if it cannot be loaded."""
    if name is None:
        return None
    from transformers import AutoTokenizer  # takes a second, and most loads do not need it

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"nanovllm bench serve: --tokenizer {name}: {error}") from None


def make_body(work: Work, args: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase | None" = None) -> bytes:
    """Return the JSON of a request. Fields without an option are omitted, because servers may refuse unknown fields."""
    is_chat = ENDPOINTS[args.backend].endswith("chat/completions")
    prompt: dict[str, object] = {"prompt": work.prompt_token_ids}
    if is_chat:
        prompt = {"messages": [{"role": "user", "content": work.text_for(tokenizer)}]}
    length = "max_completion_tokens" if is_chat else "max_tokens"
    optional = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p")}
    body = {
        "model": args.model,
        **prompt,
        length: work.output_len,
        "temperature": args.temperature,
        **{name: value for name, value in optional.items() if value is not None},
        **({"ignore_eos": True} if args.ignore_eos else {}),
        "stream": True,
        "stream_options": {"include_usage": True},
        **args.extra_body,
    }
    return json.dumps(body).encode()


def details(results: list[Result]) -> dict[str, object]:
    """Return the results of each request, in the order of the requests. Times are in seconds, as in vLLM."""
    first = min(result.sent for result in results)
    return {
        "input_lens": [result.prompt_tokens for result in results],
        "output_lens": [result.output_tokens for result in results],
        "start_times": [result.sent - first for result in results],
        "ttfts": [result.ttft if result.chunk_times else None for result in results],
        "itls": [result.itls for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error or "" for result in results],
    }


def save(runs: list[dict[str, object]], args: argparse.Namespace) -> None:
    """Write the results as JSON: an object for one load, or an object with the list `runs` for several loads."""
    rates = "-".join(f"{rate:g}qps" for rate in args.request_rate)
    model = args.model.rstrip("/").rsplit("/", 1)[-1]
    path = args.result_dir / (
        args.result_filename or f"{args.label or args.backend}-{rates}-{model}-{runs[0]['date']}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
