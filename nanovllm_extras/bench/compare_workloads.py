"""Create the requests of `nanovllm bench compare`: prompts, numbers of tokens to generate, and times of arrival.

All token ids are random, as in `workloads.py`, so each workload is a pattern of lengths, shared prefixes and arrivals.
Both sides of a comparison serve the same requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from nanovllm_extras.bench.load_generator import draw_departures
from nanovllm_extras.bench.trace_file import HASH_BLOCK_LEN, TraceRequest
from nanovllm_extras.bench.workloads import Work, draw, make_prefix_repetition

WORKLOADS: Mapping[str, tuple[int, str]] = {
    "w": (32, "W of the benchmarks: prompts of 58-249 tokens, outputs of 35-128"),
    "w2": (1, "W2 of the benchmarks: one request of 64 tokens in and 64 out"),
    "prefixes": (24, "prompts of 288 tokens, of which 256 are one of 4 shared prefixes"),
    "conversations": (24, "conversations of 4 turns, each prompt repeats the conversation so far"),
    "long": (24, "every sixth prompt has 1,000 tokens, the others 48"),
    "burst": (24, "4 requests in a quiet second, then all others at once"),
}
"""Name -> the default number of requests, and a description."""

# tokens of the prompts and outputs of W, as in `bench.py` of the repository
W_INPUT_LENS = (
    248, 246, 105, 84, 208, 58, 64, 162, 227, 163, 168, 72, 199, 219, 89, 98,
    142, 206, 65, 140, 249, 230, 83, 137, 135, 191, 104, 169, 119, 117, 178, 132,
)  # fmt: skip
W_OUTPUT_LENS = (
    81, 91, 125, 116, 51, 109, 67, 41, 99, 78, 38, 70, 122, 57, 64, 124,
    46, 94, 61, 65, 100, 52, 112, 128, 83, 119, 35, 39, 61, 110, 104, 32,
)  # fmt: skip
NUM_TURNS = 4  # of a conversation
NUM_QUIET = 4  # requests before the burst
VOCAB_SIZE = 1000  # token ids are below this number, so that every model has them


@dataclass(frozen=True)
class TimedWork(Work):
    """One request with its time of arrival, in seconds after the start of the load."""

    arrival: float = 0.0
    after: int | None = None
    """The request that has to end first: the earlier turn of the conversation. Then `arrival` counts from its end."""


def make_load(name: str, num_prompts: int, rate: float, seed: int, vocab_size: int = VOCAB_SIZE) -> list[TimedWork]:
    """Return the requests of a workload of `WORKLOADS`.

    rate: requests per second, as a Poisson process, or `inf` for all at once. In `conversations`, this is the rate of
        first turns; a later turn arrives when the turn before it has ended. `burst` has its own times.
    """
    rng = np.random.default_rng(seed)
    if name == "conversations":
        return make_conversations(rng, num_prompts, rate, seed, vocab_size)
    if name == "prefixes":
        works: Sequence[Work] = make_prefix_repetition(num_prompts, 256, 32, 4, 32, vocab_size, seed)
    elif name == "w":
        works = make_works(rng, num_prompts, W_INPUT_LENS, W_OUTPUT_LENS, vocab_size)
    elif name == "w2":
        works = make_works(rng, num_prompts, (64,), (64,), vocab_size)
    elif name == "long":
        works = make_works(rng, num_prompts, (1000, *[48] * 5), (32,), vocab_size)
    elif name == "burst":
        works = make_works(rng, num_prompts, (64, 192, 128, 96), (48,), vocab_size)
    else:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    arrivals = draw_departures(num_prompts, rate, seed=seed)
    if name == "burst":
        arrivals = [min(i, NUM_QUIET) / NUM_QUIET for i in range(num_prompts)]
    return [TimedWork(one.prompt_token_ids, one.output_len, at) for one, at in zip(works, arrivals, strict=True)]


def make_works(
    rng: np.random.Generator, num_prompts: int, input_lens: Sequence[int], output_lens: Sequence[int], vocab_size: int
) -> list[Work]:
    """Return requests with these lengths in turn, and random tokens."""
    lens = islice(zip(cycle(input_lens), cycle(output_lens), strict=False), num_prompts)
    return [Work(draw(rng, input_len, vocab_size), output_len) for input_len, output_len in lens]


def make_conversations(
    rng: np.random.Generator, num_prompts: int, rate: float, seed: int, vocab_size: int
) -> list[TimedWork]:
    """Return all first turns, then all second turns, and so on.

    The prompt of a later turn has only its new tokens, until `with_history` adds the conversation so far.
    """
    num_conversations = -(-num_prompts // NUM_TURNS)
    starts = draw_departures(num_conversations, rate, seed=seed)
    works = [TimedWork(draw(rng, 96, vocab_size), 32, at) for at in starts]
    for i in range(num_conversations, num_prompts):
        works.append(TimedWork(draw(rng, 32, vocab_size), 32, 0.0, i - num_conversations))
    return works


def with_history(load: Sequence[TimedWork], answers: Mapping[int, list[int]]) -> list[TimedWork]:
    """Return the load with complete prompts: those of the request before, its answer, and the new tokens.

    answers: index of a request -> tokens of its answer. A request is left as it is if it follows on a request without
    an answer here.
    """
    completed: list[TimedWork] = []
    for work in load:
        if work.after is not None and work.after in answers:
            history = completed[work.after].prompt_token_ids + answers[work.after]
            work = replace(work, prompt_token_ids=history + work.prompt_token_ids)
        completed.append(work)
    return completed


def rounds_of(load: Sequence[TimedWork]) -> list[list[int]]:
    """Return the indices of the requests by turn: each follows on requests of the round before."""
    depths: list[int] = []
    for work in load:
        depths.append(0 if work.after is None else depths[work.after] + 1)
    return [[i for i, depth in enumerate(depths) if depth == one] for one in range(max(depths, default=-1) + 1)]


def load_of_trace(
    trace: Sequence[TraceRequest], speed: float, scale: float, seed: int, vocab_size: int = VOCAB_SIZE
) -> list[TimedWork]:
    """Return the requests of a trace.

    speed: divides the times between requests. scale: multiplies the numbers of tokens, also those of a block.
    """
    block_len = max(1, round(HASH_BLOCK_LEN * scale))
    blocks: dict[int, list[int]] = {}
    load = []
    for row, one in enumerate(trace):
        for hash_id in one.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = draw(np.random.default_rng([seed, 0, hash_id]), block_len, vocab_size)
        input_len, output_len = (max(1, round(n * scale)) for n in (one.input_len, one.output_len))
        named = [token_id for hash_id in one.hash_ids for token_id in blocks[hash_id]][:input_len]
        rest = draw(np.random.default_rng([seed, 1, row]), input_len - len(named), vocab_size)
        load.append(TimedWork(named + rest, output_len, one.arrival_s / speed))
    return load
