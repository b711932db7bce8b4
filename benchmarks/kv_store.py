"""Measure the K/V store in host memory: what a prompt costs whose blocks are there, and what the store costs otherwise.

    python -m benchmarks.kv_store
    python -m benchmarks.kv_store --layers 4 --rounds 3

Three figures:

    TTFT       of a prompt that is computed, and of the same prompt when its blocks are loaded
    nothing    an empty store is asked at each admission: the time of these calls, over the time of the steps
    all        each block is saved: the time of the engine's own thread for it, over the time of the steps, and the
               processor time of the whole run with and without a store

The default model has the shape of Qwen3-0.6B and random weights. `--layers` keeps only some of its 28 layers: the time
of a prompt and the bytes of a block are both nearly proportional to the layers, so the ratio of TTFT hardly changes.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.common import QWEN3_06B, describe_machine
from nanovllm import Config, LLMEngine, SamplingParams
from nanovllm.extras.roll_back import reset_prefix_cache

STORE_GIB = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description="The K/V store in host memory.")
    parser.add_argument("--model", default=str(QWEN3_06B), help="folder or hub id (default: Qwen3-0.6B's shape)")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--layers", type=int, default=None, help="keep only the first layers")
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=8, help="of the workload that everything is saved of")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    engine = make_engine(args, kv_offloading_size=STORE_GIB)
    print(describe_machine(str(engine.runner.device)))
    print(engine.description)
    measure_ttft(engine, args)
    measure_costs(engine, args)


def make_engine(args: argparse.Namespace, **options: Any) -> LLMEngine:
    overrides = None if args.layers is None else {"num_hidden_layers": args.layers}
    num_tokens = args.prompt_len + args.num_requests * (args.input_len + args.output_len)
    config = Config(
        model=args.model,
        load_format=args.load_format,
        hf_overrides=overrides,
        skip_tokenizer_init=True,
        max_model_len=max(args.prompt_len + 1, args.input_len + args.output_len),
        max_num_batched_tokens=2048,
        num_kv_blocks=num_tokens // 16 + args.num_requests + 2,
        self_check="off",
        **options,
    )
    return LLMEngine(config)


# ---- TTFT


def measure_ttft(engine: LLMEngine, args: argparse.Namespace) -> None:
    rng, store = random.Random(0), engine.parts.kv_store
    computed, loaded = [], []
    for _ in range(args.rounds):
        prompt = random_prompt(engine, rng, args.prompt_len)
        computed.append(ttft(engine, prompt))
        store.saver.wait()
        reset_prefix_cache(engine.scheduler)  # of the pool only
        before = store.stats.loaded_tokens
        loaded.append(ttft(engine, prompt))
        assert store.stats.loaded_tokens - before >= args.prompt_len - engine.parts.block_size
        reset_prefix_cache(engine.scheduler)
    tier = engine.get_stats().kv_store.tiers["memory"]
    print(
        f"prompt of {args.prompt_len} tokens, {store.bytes_per_block / 2**20:.2f} MiB a block, medians of {args.rounds}"
    )
    print(f"  computed {median(computed) * 1e3:9.1f} ms")
    print(f"  loaded   {median(loaded) * 1e3:9.1f} ms    {median(computed) / median(loaded):.1f} times as fast")
    print(f"  the tier's own copies: {tier.loaded_bytes / tier.load_time_s / 2**30:.2f} GiB/s")


def ttft(engine: LLMEngine, prompt: list[int]) -> float:
    """Return the seconds from the request's arrival to its first token."""
    start = time.perf_counter()
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def random_prompt(engine: LLMEngine, rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(engine.runner.shape.vocab_size) for _ in range(num_tokens)]


# ---- costs


def measure_costs(engine: LLMEngine, args: argparse.Namespace) -> None:
    plain = make_engine(args)
    calls = Timed()
    store = engine.parts.kv_store
    for name in ("names", "match"):
        setattr(store, name, calls.wrap(name, getattr(store, name)))
    store.saver.save_blocks = calls.wrap("save_blocks", store.saver.save_blocks)
    shares, saving, with_store, without = [], [], [], []
    for i in range(args.rounds + 1):
        calls.seconds.clear()
        wall, processor = run_workload(engine, args, seed=i)
        store.saver.wait()
        plain_processor = run_workload(plain, args, seed=i)[1]
        if i:  # the first round warms up
            asked = calls.seconds["names"] + calls.seconds["match"]
            shares.append(asked / wall)
            saving.append((calls.seconds["names"] + calls.seconds["save_blocks"]) / wall)
            with_store.append(processor)
            without.append(plain_processor)
    what = f"{args.num_requests} requests of {args.input_len} tokens, {args.output_len} new ones each"
    stats = store.get_stats()
    print(f"{what}: nothing is found, and everything is saved ({stats.num_dropped_blocks} blocks dropped)")
    print(f"  keys and asking the store     {100 * median(shares):6.3f} % of the time of the steps")
    print(f"  keys and copies for saving    {100 * median(saving):6.3f} %, in the engine's thread")
    more = median(with_store) / median(without) - 1
    print(f"  processor time of all threads {100 * more:+6.2f} %, against an engine without a store")


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


def run_workload(engine: LLMEngine, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return seconds of the clock, and of the processor in all threads."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    start, start_processor = time.perf_counter(), time.process_time()
    for i in range(args.num_requests):
        engine.add_request(str(i), random_prompt(engine, rng, args.input_len), params)
    while engine.has_unfinished_requests():
        engine.step()
    wall = time.perf_counter() - start
    if engine.parts.kv_store is not None:
        engine.parts.kv_store.saver.wait()
    return wall, time.process_time() - start_processor


if __name__ == "__main__":
    main()
