"""Predict time to first token and time per output token, by the budget of a step (`max_num_batched_tokens`).

    python -m labs.calculators.chunk_size
    python -m labs.calculators.chunk_size --cost 5 20 5                  # ms, us, ns of another machine; no model runs
    python -m labs.calculators.chunk_size --measure 128 2048             # also run the engine itself
    python -m labs.calculators.chunk_size --plot chunk_size.png

While the answers of some users are decoded, long prompts of other users arrive. With a large budget, one step computes
such a prompt, and all decodes wait for that step. A small budget cuts the prompt into chunks, and every decode gets its
token in each step.

    seconds of a step = fixed + per token · tokens + per pair · attended pairs

A token at position p attends to p + 1 tokens: a chunk of n tokens from position s on has n · s + n · (n + 1) / 2 pairs.
`--cost` gives this cost. Otherwise it is fitted to steps of the engine with the bundled model on this machine. The real
scheduler then serves the workload. No forward pass runs: the clock advances by the cost of each step, so all times are
*modelled*.

Each of `--num-users` users sends the next request when the last one is answered. Every fourth prompt is long. TTFT is
the time from a request to its first token. TPOT is the mean time of a request's other tokens. ITL is the time between
two tokens of a request. The table has TTFT and TPOT over all requests, and ITL over all tokens.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.common import Workload, make_workload
from labs.calculators.common import Panel, draw, print_table
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence
from nanovllm_extras import TINY_QWEN3, Config, LLMEngine, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048  # the bundled model's
VOCAB_SIZE = 2000
Add = Callable[[str, list[int], SamplingParams], None]
RunStep = Callable[[], tuple[float, list[int]]]
"""Run one step. Return its seconds, and the numbers of the requests that got a token."""


@dataclass(frozen=True)
class Cost:
    """The cost of a step, in seconds."""

    fixed: float
    per_token: float
    per_pair: float

    def of(self, num_tokens: int, num_pairs: int) -> float:
        return self.fixed + self.per_token * num_tokens + self.per_pair * num_pairs


@dataclass(frozen=True)
class Latencies:
    """The latencies of one run in seconds, and its throughput in output tokens per second."""

    ttfts: list[float]
    tpots: list[float]
    itls: list[float]
    throughput: float


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT and TPOT by max_num_batched_tokens.")
    parser.add_argument("--budget", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--cost", type=float, nargs=3, metavar=("MS", "US", "NS"), help="fixed, per token, per pair")
    parser.add_argument("--num-users", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--long-len", type=int, default=1500, help="tokens of the long prompts")
    parser.add_argument("--measure", type=int, nargs="*", default=[], help="budgets of runs of the engine itself")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file (needs matplotlib)")
    args = parser.parse_args()
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    workload = make_requests(args.num_requests, args.long_len)
    if args.cost:
        cost, how = Cost(args.cost[0] / 1e3, args.cost[1] / 1e6, args.cost[2] / 1e9), "as given"
    else:
        points = measure_steps()
        cost = fit(points)
        worst = max(abs(cost.of(tokens, pairs) / seconds - 1) for tokens, pairs, seconds in points)
        how = f"fitted to {len(points)} steps of the engine here, within {worst:.0%}"
    print(f"modelled: a step takes {1e3 * cost.fixed:.2f} ms + {1e6 * cost.per_token:.1f} us · tokens + "
          f"{1e9 * cost.per_pair:.2f} ns · attended pairs\n({how})\n")  # fmt: skip
    modelled = {budget: model(workload, args.num_users, budget, cost) for budget in args.budget}
    rows = [[str(budget), *cells(one)] for budget, one in modelled.items()]
    rows += [[f"{budget} measured", *cells(measure(workload, args.num_users, budget))] for budget in args.measure]
    print_table(["budget", "TTFT ms, median", "p95", "TPOT ms, median", "ITL ms, p99", "output tokens/s"], rows)
    if args.plot:
        names = ("TTFT, median", "TTFT, p95", "TPOT, median", "ITL, p99")
        columns = zip(*(summary(one) for one in modelled.values()), strict=True)
        lines = dict(zip(names, map(list, columns), strict=False))  # all but the throughput
        groups = [{name: lines[name] for name in group} for group in (names[:2], names[2:])]
        panels = [Panel("max_num_batched_tokens", "milliseconds, modelled", args.budget, one) for one in groups]
        draw(args.plot, f"{args.num_users} users; every fourth prompt has {args.long_len:,} tokens", panels)


def check(args: argparse.Namespace) -> None:
    if min(*args.budget, *args.measure, args.num_users, args.num_requests) < 1:
        raise ValueError("--budget, --measure, --num-users and --num-requests must be >= 1")
    if args.cost and (min(args.cost) < 0 or args.cost[0] + args.cost[1] == 0):
        raise ValueError(f"--cost must be >= 0, and fixed or per token > 0, got {args.cost}")
    if not 1 <= args.long_len <= MAX_MODEL_LEN - 96:
        raise ValueError(f"--long-len must be in 1 … {MAX_MODEL_LEN - 96}, got {args.long_len}")


def make_requests(num_requests: int, long_len: int) -> Workload:
    """Make requests with prompts of 32 … 128 tokens, every fourth with `long_len`, and outputs of 32 … 96 tokens."""
    rng = random.Random(0)
    prompt_lens = [long_len if i % 4 == 3 else rng.randint(32, 128) for i in range(num_requests)]
    output_lens = [rng.randint(32, 96) for _ in range(num_requests)]
    return make_workload("long prompts among decodes", prompt_lens, output_lens, VOCAB_SIZE, shared_len=0)


def serve(workload: Workload, num_users: int, add: Add, step: RunStep) -> Latencies:
    """Serve the workload. A user sends a request when the last is answered. The clock sums the steps' seconds."""
    clock, num_free, num_left = 0.0, num_users, len(workload.prompts)
    sent_at: list[float] = []
    token_times: list[list[float]] = [[] for _ in workload.prompts]
    while num_left:
        while num_free and (i := len(sent_at)) < len(workload.prompts):
            params = SamplingParams(temperature=0, max_tokens=workload.output_lens[i], ignore_eos=True)
            add(str(i), workload.prompts[i], params)
            sent_at.append(clock)
            num_free -= 1
        seconds, advanced = step()
        clock += seconds
        for i in advanced:
            token_times[i].append(clock)
            if len(token_times[i]) == workload.output_lens[i]:
                num_left, num_free = num_left - 1, num_free + 1
    return Latencies(
        ttfts=[times[0] - sent for times, sent in zip(token_times, sent_at, strict=True)],
        tpots=[(times[-1] - times[0]) / (len(times) - 1) for times in token_times if len(times) > 1],
        itls=[after - before for times in token_times for before, after in zip(times, times[1:], strict=False)],
        throughput=sum(map(len, token_times)) / clock,
    )


def model(workload: Workload, num_users: int, budget: int, cost: Cost) -> Latencies:
    """Serve the workload by the real scheduler, with enough blocks for all users. `cost` gives each step's time."""
    blocks = BlockManager(num_users * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(blocks, num_users, budget, MAX_MODEL_LEN)

    def add(request_id: str, prompt: list[int], params: SamplingParams) -> None:
        scheduler.add(Sequence(request_id, prompt, params))

    def step() -> tuple[float, list[int]]:
        scheduled = scheduler.schedule()
        seconds = cost.of(scheduled.num_scheduled_tokens, count_pairs(scheduled))
        advanced = scheduler.update(scheduled, [0] * len(scheduled.samples))
        return seconds, [int(seq.request_id) for _, seq in advanced]

    return serve(workload, num_users, add, step)


def count_pairs(step: Step) -> int:
    return sum([n * start + n * (n + 1) // 2 for _, start, n in step.chunks])


def measure(workload: Workload, num_users: int, budget: int) -> Latencies:
    """Serve the workload by the engine with the bundled model, and measure the time."""
    engine = make_engine(num_users, budget)

    def step() -> tuple[float, list[int]]:
        start = time.perf_counter()
        outputs = engine.step().outputs
        return time.perf_counter() - start, [int(output.request_id) for output in outputs]

    serve(workload.first(num_users), num_users, engine.add_request, step)  # warm up
    return serve(workload, num_users, engine.add_request, step)


def make_engine(num_seqs: int, budget: int) -> LLMEngine:
    return LLMEngine(
        Config(
            model=TINY_QWEN3,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            num_kv_blocks=num_seqs * MAX_MODEL_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            enable_overlap=False,
        )
    )


def measure_steps(rounds: int = 5) -> list[tuple[int, int, float]]:
    """Measure steps of the engine, of whole prompts and of decodes. Return (tokens, attended pairs, seconds) of each.

    The seconds are the minimum over several rounds, because other work on the machine only adds time.
    """
    engine, points = make_engine(16, MAX_MODEL_LEN), []
    shapes = [(1, 16), (16, 16), (1, 128), (16, 120), (1, 500), (4, 500), (1, 1000), (1, 2000)]
    for num_seqs, length in tqdm(shapes, desc="measuring steps", unit="shape", disable=None):
        prefills, decodes = [], []
        for _ in range(rounds):
            for i in range(num_seqs):
                prompt = [(7 * i + j) % VOCAB_SIZE for j in range(length)]
                engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
            times = []
            while engine.has_unfinished_requests():
                start = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - start)
            prefills.append(times[0])
            decodes += times[1:]
        points.append((num_seqs * length, num_seqs * length * (length + 1) // 2, min(prefills)))
        points.append((num_seqs, num_seqs * (length + 1), min(decodes)))
    return points


def fit(points: list[tuple[int, int, float]]) -> Cost:
    """Return the cost with the least squared relative errors. A part that would be negative is noise, and set to 0."""
    seconds = np.array([point[2] for point in points])  # [num_points]
    work = np.array([(1.0, *point[:2]) for point in points]) / seconds[:, None]  # [num_points, 3]
    parts, kept = np.zeros(3), [0, 1, 2]
    while kept:
        found = np.linalg.lstsq(work[:, kept], np.ones(len(points)), rcond=None)[0]  # [len(kept)]
        if found.min() >= 0:
            parts[kept] = found
            break
        kept.pop(int(found.argmin()))
    return Cost(*parts.tolist())


def summary(one: Latencies) -> list[float]:
    """Return TTFT median and p95, TPOT median and ITL p99 in milliseconds, and tokens per second."""
    times = [np.median(one.ttfts), np.percentile(one.ttfts, 95), np.median(one.tpots), np.percentile(one.itls, 99)]
    return [*(1e3 * float(seconds) for seconds in times), one.throughput]


def cells(one: Latencies) -> list[str]:
    *times, throughput = summary(one)
    return [*(f"{ms:,.1f}" for ms in times), f"{throughput:,.0f}"]


if __name__ == "__main__":
    main()
