"""Measure servers with a K/V store: one that is killed and restarted, and prefill apart from decode.

    python -m benchmarks.kv_servers restart                                           # --cold: from the disk itself
    python -m benchmarks.kv_servers apart
    python -m benchmarks.kv_servers apart --layers 4 --prompt-len 1000 --rounds 1     # short

restart    a server computes a prompt, and is killed (SIGKILL) when its blocks are in a folder. TTFT of the same prompt,
           the first request of the next server: with the folder, and without a store
apart      TPOT of running decodes while a long prompt arrives, on two engines with a core each:
             together      both engines take turns; the prompt is one chunk
             chunks        the same, and chunks of 256 tokens (`--chunk`)
             apart         `nanovllm front`: one engine computes prompts, the other one has all decodes

TPOT is the time from a stream's last token before the prompt arrives to its first token after the prompt's own first
token, for each token in between. Together, the prompt only slows the streams of its own engine, so these are printed
apart. The client, and the front, share the two cores with the engines.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import MAX_TOKEN_ID, QWEN3_06B, describe_machine, read_config
from benchmarks.kv_tiers import drop_from_page_cache
from benchmarks.started_server import Running, running

BLOCK_SIZE = 16
STREAM_PROMPT_LEN = 64
WARM_TOKENS = 8  # of a stream, before it is measured
STORE_BYTES = 8 << 30
Report = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Servers with a K/V store.")
    parser.add_argument("what", choices=["restart", "apart"])
    parser.add_argument("--model", default=str(QWEN3_06B), help="folder (default: Qwen3-0.6B's shape)")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, help="default: 2000 for restart, 8000 for apart")
    parser.add_argument("--folder", type=Path, help="of restart: on the disk to measure; by default a temporary one")
    parser.add_argument("--cold", action="store_true", help="of restart: drop the folder from the page cache")
    parser.add_argument("--streams", type=int, default=4, help="of apart: running decodes")
    parser.add_argument("--quiet-tokens", type=int, default=32, help="of apart: of each stream before the prompt")
    parser.add_argument("--output-len", type=int, default=4000, help="of apart: most tokens of a stream")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.prompt_len = args.prompt_len or {"restart": 2000, "apart": 8000}[args.what]
    args.vocab_size = min(MAX_TOKEN_ID, read_config(Path(args.model))["vocab_size"])
    rows = measure_restart(args) if args.what == "restart" else measure_apart(args)
    machine = describe_machine("cpu")
    print(machine)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=2) + "\n", encoding="utf-8")


# ---- servers


def serve_words(args: argparse.Namespace, num_tokens: int, *more: str) -> list[str]:
    """num_tokens: the K and V that the pool holds."""
    words = ["serve", args.model, "--load-format", args.load_format, "--device", "cpu", "--self-check", "off"]
    words += ["--skip-tokenizer-init", "--max-model-len", str(args.prompt_len + args.output_len)]
    words += ["--num-kv-blocks", str(num_tokens // BLOCK_SIZE + 64), "--disable-log-requests", *more]
    if args.layers is not None:
        words += ["--hf-overrides", json.dumps({"num_hidden_layers": args.layers})]
    return words


def transfer_words(connector: str, role: str, **extra: Any) -> list[str]:
    config = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]


class Stream(threading.Thread):
    """Reads the answer to a request, until it ends or `stop` is set. `times` has the time of each token."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        self.times: list[float] = []
        self.num_cached_tokens = 0
        self.stop = threading.Event()
        self.begin = time.perf_counter()
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request) as answer:
            for line in answer:
                if self.stop.is_set():
                    return
                if not line.startswith(b"data: {"):
                    continue
                now, value = time.perf_counter(), json.loads(line[6:])
                for choice in value["choices"]:
                    self.times += [now] * len(choice.get("token_ids") or [])
                if value.get("usage"):
                    self.num_cached_tokens = value["usage"]["prompt_tokens_details"]["cached_tokens"]

    def wait_for(self, num_tokens: int) -> None:
        while len(self.times) < num_tokens:
            if not self.is_alive():
                raise RuntimeError(f"a stream has ended after {len(self.times)} tokens: raise --output-len")
            time.sleep(0.005)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begin


def random_prompt(args: argparse.Namespace, seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(args.vocab_size) for _ in range(num_tokens)]


# ---- a server that is killed


def measure_restart(args: argparse.Namespace) -> list[Report]:
    args.output_len = BLOCK_SIZE
    times: dict[str, list[float]] = {"with the folder": [], "without a store": []}
    for i in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder, prompt = Path(name) / "store", random_prompt(args, i, args.prompt_len)
            where = {"shared_storage_path": str(folder), "max_bytes": STORE_BYTES}
            stored = transfer_words("SharedStorageConnector", "kv_both", **where)
            with running(*serve_words(args, args.prompt_len, *stored)) as server:
                ask(server, prompt)
                while len(list(folder.glob("*.kv"))) < args.prompt_len // BLOCK_SIZE:
                    time.sleep(0.05)  # saved in the background
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
            if args.cold:
                drop_from_page_cache(folder.glob("*.kv"))
            for what in list(times)[:: 1 if i % 2 else -1]:
                words = serve_words(args, args.prompt_len, *(stored if what == "with the folder" else ()))
                with running(*words) as server:
                    first = ask(server, prompt)
                times[what].append(first.ttft)
                print(f"round {i}, {what}: {first.ttft * 1e3:.1f} ms, {first.num_cached_tokens} tokens were found")
    slow, fast = times["without a store"], times["with the folder"]
    ratio = median(before / after for before, after in zip(slow, fast, strict=True))
    print(f"first request after SIGKILL and a restart, {args.prompt_len} tokens, medians of {args.rounds}")
    for what, seconds in times.items():
        print(f"  {what:<16}{median(seconds) * 1e3:9.1f} ms")
    print(f"  {ratio:.1f} times as fast")
    return [{"what": what, "ms": median(seconds) * 1e3} for what, seconds in times.items()] + [{"times_as_fast": ratio}]


def ask(server: Running, prompt: list[int]) -> Stream:
    stream = Stream(server.url, prompt, 1)
    stream.join()
    return stream


# ---- prefill apart from decode


def measure_apart(args: argparse.Namespace) -> list[Report]:
    ways = {
        "together": lambda: together(args),
        "chunks": lambda: together(args, "--long-prefill-token-threshold", str(args.chunk)),
        "apart": lambda: apart(args),
    }
    reports: dict[str, list[Report]] = {way: [] for way in ways}
    for i in range(args.rounds):
        for way in list(ways)[:: -1 if i % 2 else 1]:
            with ways[way]() as urls:
                reports[way].append(measure_arrival(urls, args, seed=i))
            print(f"round {i}, {way}: {json.dumps(reports[way][-1])}", flush=True)
    rows = []
    print(
        f"a prompt of {args.prompt_len} tokens arrives; {args.streams} streams; milliseconds, medians of {args.rounds}"
    )
    print(f"{'':<10}{'TTFT':>10}{'TPOT before':>13}{'TPOT meanwhile':>16}{'longest gap':>13}{'TPOT, other engine':>20}")
    for way, found in reports.items():
        row = {name: median(report[name] for report in found) for name in found[0]}
        rows.append({"what": way, **row})
        print(
            f"{way:<10}{row['ttft']:>10.0f}{row['before']:>13.1f}{row['meanwhile']:>16.1f}{row['longest_gap']:>13.0f}",
            end="",
        )
        print(f"{row['other']:>20.1f}" if "other" in row else "")
    return rows


@contextlib.contextmanager
def together(args: argparse.Namespace, *more: str) -> Iterator[list[str]]:
    """Two engines that compute prompts and decode. Yields their URLs."""
    with contextlib.ExitStack() as stack:
        words = serve_words(args, num_tokens_of(args), "--max-num-batched-tokens", str(args.prompt_len + 256), *more)
        yield [stack.enter_context(running(*words, cores={core})).url for core in two_cores()]


@contextlib.contextmanager
def apart(args: argparse.Namespace) -> Iterator[list[str]]:
    """A front with a prefill engine and a decode engine. Yields the URL of the front."""
    with contextlib.ExitStack() as stack:
        name = f"benchmark-{os.getpid()}"
        words = serve_words(args, num_tokens_of(args), "--max-num-batched-tokens", str(args.prompt_len + 256))
        urls = []
        for core, role in zip(two_cores(), ("kv_producer", "kv_consumer"), strict=True):
            stored = transfer_words("SharedMemoryConnector", role, name=name, max_bytes=STORE_BYTES)
            urls.append(stack.enter_context(running(*words, *stored, cores={core})).url)
        front = ["front", "--prefill", urls[0], "--decode", urls[1], "--prefill-timeout", "3600"]
        yield [stack.enter_context(running(*front)).url]


def two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("two cores are needed, one for each engine")
    return cores[:2]


def num_tokens_of(args: argparse.Namespace) -> int:
    return args.prompt_len + args.streams * (STREAM_PROMPT_LEN + args.output_len)


def measure_arrival(urls: list[str], args: argparse.Namespace, seed: int) -> Report:
    """Start streams at all URLs in turns, and send the long prompt to the first URL. Times are in milliseconds."""
    prompts = [random_prompt(args, 100 + i, STREAM_PROMPT_LEN) for i in range(args.streams)]
    streams = [Stream(urls[i % len(urls)], prompt, args.output_len) for i, prompt in enumerate(prompts)]
    for stream in streams:
        stream.wait_for(WARM_TOKENS)
    starts = [len(stream.times) for stream in streams]
    for stream, start in zip(streams, starts, strict=True):
        stream.wait_for(start + args.quiet_tokens)
    arrival = time.perf_counter()
    first = Stream(urls[0], random_prompt(args, seed, args.prompt_len), 1)
    first.wait_for(1)
    for stream in streams:
        stream.wait_for(sum(one <= first.times[0] for one in stream.times) + 1)
        stream.stop.set()
    gaps = [gaps_between(stream.times, arrival, first.times[0]) for stream in streams]
    before = [
        gaps_between(stream.times, stream.times[start], arrival) for stream, start in zip(streams, starts, strict=True)
    ]
    tpots, own = [sum(one) / len(one) for one in gaps], slice(0, None, len(urls))
    report = {
        "ttft": first.ttft,
        "before": median(sum(one) / len(one) for one in before),
        "meanwhile": median(tpots[own]),
        "longest_gap": max(max(one) for one in gaps[own]),
    }
    if len(urls) > 1:
        report["other"] = median(tpots[1 :: len(urls)])
    return {name: 1e3 * seconds for name, seconds in report.items()}


def gaps_between(times: list[float], begin: float, end: float) -> list[float]:
    """Return the gaps between tokens from the last one before `begin` to the first one after `end`."""
    first = max(0, sum(one <= begin for one in times) - 1)
    last = sum(one <= end for one in times)
    kept = times[first : last + 1]
    return [after - before for before, after in zip(kept, kept[1:], strict=False)]


if __name__ == "__main__":
    main()
