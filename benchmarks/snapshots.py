"""Measure what snapshots of recurrent states cost and what they save, by `state_snapshot_interval`.

    python -m benchmarks.snapshots
    python -m benchmarks.snapshots --intervals 16 64 0 --prompt-len 1024 --json out.json

The first table is measured with the shape of Qwen3.5-0.8B and random weights: the copy of one state, a decode step of
one sequence, and a prompt by interval. A prompt with more snapshots is cut into more chunks, and each state is copied.

The second table is counted by the scheduler and the block manager, without a model. Two workloads run request by
request, with as many slots as 1 GiB of memory gives: conversations, whose answers become part of the next prompt, and
questions after one of three common texts. Its seconds are an estimate for all prompts together: tokens that were
computed, and states that were copied, by the times of the first table. Cuts of chunks are not part of it.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import describe_machine
from benchmarks.hybrids import QWEN35_08B
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_BLOCKS = 20_000  # of the simulated pool: none is evicted
NUM_IDS = 10_000  # token ids of the simulated prompts
NUM_COPIES = 20
WARM_UP_LEN = 32

Workload = Callable[[Scheduler, random.Random, int], int]


def main() -> None:
    args = parse_args()
    times = measure(args)
    print_times(times, args)
    counts = {name: {i: simulate(make, i, args) for i in args.intervals} for name, make in WORKLOADS.items()}
    for name, rows in counts.items():
        for row in rows.values():
            row["seconds"] = estimate(row, times, args)
        print_counts(name, rows)
    if args.json:
        report = {"times_ms": times, "workloads": counts, "machine": describe_machine("cpu")}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the costs and the use of snapshots of recurrent states.")
    parser.add_argument("--intervals", type=int, nargs="+", default=[4, 16, 64, 256, 0], metavar="BLOCKS",
                        help="state_snapshot_interval; 0 takes none at intervals (default: 4 16 64 256 0)")  # fmt: skip
    parser.add_argument("--prompt-len", type=int, default=2048, help="tokens of the measured prompt (default: 2048)")
    parser.add_argument("--repeats", type=int, default=3, help="prompts by interval, of which the median counts")
    parser.add_argument("--steps", type=int, default=12, help="decode steps, of which the median counts")
    parser.add_argument("--num-slots", type=int, default=26, help="of the simulated pool (default: 26)")
    parser.add_argument("--rounds", type=int, default=6, help="questions of each conversation (default: 6)")
    parser.add_argument("--model", type=Path, default=QWEN35_08B, help="another folder with a config.json")
    parser.add_argument("--attention-backend", default="auto", help="of the measured engine (default: auto)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if min(args.intervals) < 0:
        parser.error(f"--intervals must be >= 0, got {min(args.intervals)}")
    for name, least in {"prompt_len": 1, "repeats": 1, "steps": 1, "num_slots": 2, "rounds": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


# ---- times


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the median milliseconds of a copy, of a decode step, and of a prompt by interval."""
    longest = max(args.prompt_len, WARM_UP_LEN + args.steps) + 4
    num_blocks = 2 * -(-longest // BLOCK_SIZE)
    llm = LLM(args.model, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=2,
              max_model_len=longest, max_num_batched_tokens=args.prompt_len, num_kv_blocks=num_blocks,
              block_size=BLOCK_SIZE, attention_backend=args.attention_backend)  # fmt: skip
    print(llm.engine.description)
    run_prompt(llm, WARM_UP_LEN)
    prompts: dict[int, list[float]] = {interval: [] for interval in args.intervals}
    for _ in range(args.repeats):  # the intervals take turns, so that a disturbance slows all of them
        for interval, found in prompts.items():
            llm.engine.scheduler.block_manager.states.snapshot_interval = interval  # type: ignore[attr-defined]
            found.append(run_prompt(llm, args.prompt_len))
    medians = {interval: median(found) for interval, found in prompts.items()}
    return {"copy": time_copies(llm), "decode": time_decodes(llm, args.steps), "prompt": medians}


def run_prompt(llm: LLM, num_tokens: int) -> float:
    """Compute a prompt that no other begins like. Returns the milliseconds until its first token is sampled."""
    prompt = random.choices(range(llm.engine.parts.model_config.vocab_size), k=num_tokens)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return 1e3 * (time.perf_counter() - start)


def time_copies(llm: LLM) -> float:
    """Return the median milliseconds of the copy of one state. The slots take turns, as they do in an engine."""
    runner: Any = llm.engine.runner
    times = []
    for i in range(NUM_COPIES):
        source, destination = (1 + (i + j) % runner.layout.pool.num_slots for j in range(2))
        start = time.perf_counter()
        runner.transfers.before(Moves(state_copies=[(source, destination)]))
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def time_decodes(llm: LLM, num_steps: int) -> float:
    """Return the median milliseconds of a decode step of one sequence, without snapshots."""
    engine: Any = llm.engine
    engine.scheduler.block_manager.states.snapshot_interval = 0
    params = SamplingParams(temperature=0, max_tokens=num_steps + 3, ignore_eos=True, detokenize=False)
    engine.add_request("decode", [1] * WARM_UP_LEN, params)
    while engine.step().num_prefill_tokens:
        pass
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    engine.abort_request("decode")
    return median(times)


def print_times(times: dict[str, Any], args: argparse.Namespace) -> None:
    copy, decode = times["copy"], times["decode"]
    print("\n| | milliseconds |\n|---|---:|")
    print(f"| copy of a state | {copy:.2f} |")
    print(f"| decode step of one sequence | {decode:.2f} |")
    for interval, prompt in times["prompt"].items():
        print(f"| prompt of {args.prompt_len} tokens, {title(interval)} | {prompt:.1f} |")
    print(f"\nA copy takes {copy / decode:.1%} of a decode step.")


def title(interval: int) -> str:
    return f"a snapshot every {interval} blocks" if interval else "no snapshots at intervals"


# ---- counts


def simulate(make: Workload, interval: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the hit rate of a workload, the prompt tokens that were computed, and the states that were copied."""
    stats = SchedulingStats()
    states = Slots(args.num_slots, BLOCK_SIZE, stats, snapshot_interval=interval)
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, observer=stats, states=states)
    stats.on_start(blocks)
    scheduler = Scheduler(blocks, args.num_slots // 2, 2048, 32_768)
    num_copies = make(scheduler, random.Random(0), args.rounds)
    num_tokens, num_found = stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens
    return {"hit_rate": num_found / num_tokens, "computed": num_tokens - num_found, "copied": num_copies}


def answer(scheduler: Scheduler, rng: random.Random, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Run one request with random outputs. Returns the prompt with the output, and the number of states copied."""
    seq = Sequence("", prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    scheduler.add(seq)
    num_copies = 0
    while seq.finish_reason is None:
        step = scheduler.schedule()
        num_copies += len(step.copies.state_copies)  # type: ignore[attr-defined]
        scheduler.update(step, [rng.randrange(NUM_IDS) for _ in step.samples])
    return seq.token_ids.tolist(), num_copies


def conversations(scheduler: Scheduler, rng: random.Random, num_rounds: int) -> int:
    """Let 8 users, in turn, ask questions of 20 to 200 tokens, with answers of 50 to 800 tokens."""
    texts: list[list[int]] = [[] for _ in range(8)]
    total = 0
    for _ in range(num_rounds):
        for i, text in enumerate(texts):
            question = rng.choices(range(NUM_IDS), k=rng.randint(20, 200))
            texts[i], num_copies = answer(scheduler, rng, [*text, *question], rng.randint(50, 800))
            total += num_copies
    return total


def common_texts(scheduler: Scheduler, rng: random.Random, num_rounds: int) -> int:
    """Ask 10 questions in each round, of 20 to 200 tokens, after one of 3 texts of 500 to 3,000 tokens."""
    texts = [rng.choices(range(NUM_IDS), k=n) for n in (500, 1700, 3000)]
    total = 0
    for i in range(10 * num_rounds):
        question = rng.choices(range(NUM_IDS), k=rng.randint(20, 200))
        total += answer(scheduler, rng, [*texts[i % 3], *question], 20)[1]
    return total


WORKLOADS: dict[str, Workload] = {"conversations": conversations, "questions after common texts": common_texts}


def estimate(row: dict[str, float], times: dict[str, Any], args: argparse.Namespace) -> float:
    """Return the seconds of all prompts of a workload: tokens that were computed, and states that were copied."""
    ms_per_token = min(times["prompt"].values()) / args.prompt_len
    return (row["computed"] * ms_per_token + row["copied"] * times["copy"]) / 1e3


def print_counts(name: str, rows: dict[int, dict[str, float]]) -> None:
    print(f"\n| {name} | hit rate | prompt tokens computed | states copied | seconds |\n|---|---:|---:|---:|---:|")
    for interval, row in rows.items():
        cells = f"{row['hit_rate']:.1%} | {row['computed']:,} | {row['copied']:,} | {row['seconds']:.1f}"
        print(f"| {title(interval)} | {cells} |")


if __name__ == "__main__":
    main()
