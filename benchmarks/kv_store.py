"""Measure an engine with a K/V store: TTFT of a prompt whose blocks are there, and what the store costs otherwise.

    python -m benchmarks.kv_store ttft                            # host memory, disk (warm and cold), shared memory
    python -m benchmarks.kv_store costs --workload W              # everything is saved to host memory
    python -m benchmarks.kv_store costs --workload W --tiers disk
    python -m benchmarks.kv_store --layers 4 --rounds 1           # both, short

ttft     of a prompt that is computed, and of the same prompt when its blocks are loaded. "cold" means that the files
         were dropped from the page cache by `posix_fadvise`; the host of a virtual machine may still have them
costs    each block is saved and nothing is found, against an engine without a store, in turns: the time of the engine's
         own thread for it over the time of the steps, the time of the whole run, and the processor time of all threads

The default model has the shape of Qwen3-0.6B and random weights. `--layers` keeps only some of its 28 layers: the time
of a prompt and the bytes of a block are both nearly proportional to the layers, so the ratio of TTFT hardly changes.
Servers are measured by `kv_servers.py`, tiers without an engine by `kv_tiers.py`.
"""

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench import WORKLOADS
from benchmarks.common import MAX_TOKEN_ID, QWEN3_06B, Workload, describe_machine, make_workload, read_config
from benchmarks.kv_tiers import drop_from_page_cache
from nanovllm_extras import Config, LLMEngine, SamplingParams
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description="An engine with a K/V store.")
    parser.add_argument("what", nargs="?", choices=["ttft", "costs", "both"], default="both")
    parser.add_argument("--tiers", nargs="+", choices=["memory", "disk", "shared"], help="default: all; costs: memory")
    parser.add_argument("--model", default=str(QWEN3_06B), help="folder (default: Qwen3-0.6B's shape)")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default a temporary one")
    parser.add_argument("--tier-gib", type=float, default=4.0, help="size of a tier")
    parser.add_argument("--prompt-len", type=int, default=2000, help="of ttft")
    parser.add_argument("--workload", choices=WORKLOADS, help="of costs; by default requests of these sizes:")
    parser.add_argument("--num-requests", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.vocab_size = min(MAX_TOKEN_ID, read_config(Path(args.model))["vocab_size"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.what != "costs":
            for tier in args.tiers or ("memory", "disk", "shared"):
                rows += measure_ttft(tier, Path(folder), args)
        if args.what != "ttft":
            for tier in args.tiers or ("memory",):
                rows.append(measure_costs(tier, Path(folder), args))
    machine = describe_machine("cpu")
    print(machine)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=2) + "\n", encoding="utf-8")


def make_engine(args: argparse.Namespace, num_tokens: int, **options: Any) -> LLMEngine:
    """num_tokens: the K and V that the pool holds, and the longest sequence."""
    config = Config(
        model=args.model,
        load_format=args.load_format,
        hf_overrides=None if args.layers is None else {"num_hidden_layers": args.layers},
        skip_tokenizer_init=True,
        max_model_len=num_tokens,
        max_num_batched_tokens=2048,
        num_kv_blocks=num_tokens // 16 + 40,
        self_check="off",
        **options,
    )
    return LLMEngine(config)


def options_of(tier: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an engine whose store has this tier."""
    if tier == "memory":
        return {"kv_offloading_size": args.tier_gib}
    extra: dict[str, Any] = {"max_bytes": int(args.tier_gib * GIB)}
    if tier == "disk":
        extra["shared_storage_path"] = str(folder / "store")
    else:
        extra["name"] = f"benchmark-{os.getpid()}"
    connector = {"disk": "SharedStorageConnector", "shared": "SharedMemoryConnector"}[tier]
    return {"kv_transfer_config": {"kv_connector": connector, "kv_connector_extra_config": extra}}


# ---- TTFT


def measure_ttft(tier: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    engine = make_engine(args, args.prompt_len + 1, **options_of(tier, folder, args))
    rng, store = random.Random(0), engine.parts.kv_store
    assert store is not None
    times: dict[str, list[float]] = {"computed": [], tier: []}
    if tier == "disk":
        times["disk, cold"] = []
    for _ in range(args.rounds):
        prompt = [rng.randrange(args.vocab_size) for _ in range(args.prompt_len)]
        times["computed"].append(ttft(engine, prompt))
        store.saver.wait()
        for what in list(times)[1:]:
            reset_prefix_cache(engine.scheduler)  # of the pool only
            if what == "disk, cold":
                drop_from_page_cache((folder / "store").glob("*.kv"))
            before = store.stats.loaded_tokens
            times[what].append(ttft(engine, prompt))
            assert store.stats.loaded_tokens - before >= args.prompt_len - engine.parts.block_size
        reset_prefix_cache(engine.scheduler)
    stats, mib = store.get_stats().tiers[tier], store.bytes_per_block / 2**20
    print(f"prompt of {args.prompt_len} tokens, {mib:.2f} MiB a block, medians of {args.rounds}")
    rows = []
    for what, seconds in times.items():
        ratio = median(before / after for before, after in zip(times["computed"], seconds, strict=True))
        rows.append({"what": f"ttft, {what}", "ms": median(seconds) * 1e3, "times_as_fast": ratio})
        print(f"  {what:<12}{median(seconds) * 1e3:9.1f} ms" + ("" if ratio == 1 else f"{ratio:8.1f} times as fast"))
    print(f"  loading from the tier: {stats.loaded_bytes / stats.load_time_s / GIB:.2f} GiB/s")
    end(engine)
    return rows


def ttft(engine: LLMEngine, prompt: list[int]) -> float:
    """Return the seconds from the request's arrival to its first token."""
    start = time.perf_counter()
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def end(engine: LLMEngine) -> None:
    """Wait for the thread of the store, which removes what the engine has in shared memory."""
    assert engine.parts.kv_store is not None
    engine.parts.kv_store.saver.stop()
    gc.collect()


# ---- costs


def measure_costs(tier: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    first = make_requests(args, 0)
    num_tokens = first.num_prompt_tokens + first.num_output_tokens
    engine = make_engine(args, num_tokens, **options_of(tier, folder, args))
    plain = make_engine(args, num_tokens)
    calls, store = Timed(), engine.parts.kv_store
    assert store is not None
    for owner, name in ((store, "names"), (store, "match"), (store.saver, "save")):
        setattr(owner, name, calls.wrap(name, getattr(owner, name)))
    rounds: dict[str, list[float]] = {name: [] for name in ("asking", "saving", "time", "processor time")}
    for i in range(args.rounds + 1):
        work = make_requests(args, i)
        calls.seconds.clear()
        pair = {one: run_workload(one, work) for one in ((engine, plain) if i % 2 else (plain, engine))}
        (wall, processor), (plain_wall, plain_processor) = pair[engine], pair[plain]
        if i:  # the first round warms up
            rounds["asking"].append((calls.seconds["names"] + calls.seconds["match"]) / wall)
            rounds["saving"].append((calls.seconds["names"] + calls.seconds["save"]) / wall)
            rounds["time"].append(wall / plain_wall - 1)
            rounds["processor time"].append(processor / plain_processor - 1)
    stats = store.get_stats()
    saved = stats.tiers[tier].saved_bytes / GIB / (args.rounds + 1)
    row = {name: 100 * median(shares) for name, shares in rounds.items()}
    print(
        f"{first.name}: nothing is found, and everything is saved to {tier}: {saved:.2f} GiB in each of {args.rounds}"
    )
    print(f"  keys and asking the store     {row['asking']:7.3f} % of the time of the steps")
    print(f"  keys and copies for saving    {row['saving']:7.3f} %, in the engine's thread")
    for name in ("time", "processor time"):
        print(f"  {name + ' of the whole run':<30}{row[name]:+7.2f} %, against an engine without a store")
    print(f"  {stats.num_dropped_blocks} blocks were dropped, because too many waited to be saved")
    end(engine)
    return {"what": f"costs, {tier}", "workload": first.name, "dropped": stats.num_dropped_blocks, **row}


def make_requests(args: argparse.Namespace, seed: int) -> Workload:
    sizes = [args.input_len] * args.num_requests, [args.output_len] * args.num_requests
    if args.workload:
        sizes = WORKLOADS[args.workload]
    name = args.workload or f"{args.num_requests} requests of {args.input_len} tokens, {args.output_len} new ones each"
    return make_workload(name, *sizes, args.vocab_size, shared_len=0, seed=seed)


class Timed:
    """Sums up the seconds of calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed


def run_workload(engine: LLMEngine, work: Workload) -> tuple[float, float]:
    """Return seconds of the clock, and of the processor in all threads until everything is saved."""
    start, start_processor = time.perf_counter(), time.process_time()
    for i, (prompt, output_len) in enumerate(zip(work.prompts, work.output_lens, strict=True)):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    wall = time.perf_counter() - start
    if engine.parts.kv_store is not None:
        engine.parts.kv_store.saver.wait()
    return wall, time.process_time() - start_processor


if __name__ == "__main__":
    main()
