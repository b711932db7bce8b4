"""Compare an engine that has parts of one's own with the naive engine, token for token."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.observer import Stats
from nanovllm.request import RequestOutput, make_seed
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Step
from nanovllm.sequence import Sequence
from nanovllm_testing.fake_kv_cache import check_owners, table_of
from nanovllm_testing.naive import NaiveModel
from nanovllm_testing.played_run import Played, describe_error, time_limit
from nanovllm_testing.progress import MAX_IDLE_STEPS, Progress
from nanovllm_testing.timetable import Row, draw_state, draw_timetable, make_row
from nanovllm_testing.traffic import ExtraArgs, letter, no_extra_args
from nanovllm_testing.violation import Violation

NUM_TOKENS = 88  # in the pool: so few that sequences are preempted
MAX_MODEL_LEN = 80
MAX_SEQS, MAX_TOKENS = 5, 13  # in a step
TIME_LIMIT = 120  # seconds of the processor for a few requests
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_batched_tokens": MAX_TOKENS,
    "max_num_seqs": MAX_SEQS,
    "max_model_len": MAX_MODEL_LEN,
}


@dataclass(frozen=True)
class Ask:
    """A request to the engine."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    arrival: int = 0
    extra_args: Mapping[str, Any] | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            extra_args=self.extra_args,
        )


@dataclass(frozen=True)
class EngineCase:
    """Requests that an engine serves together."""

    asks: tuple[Ask, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return len(self.asks), sum(len(one.prompt) + one.n * one.max_tokens + one.arrival for one in self.asks)

    def is_valid(self) -> bool:
        return bool(self.asks)

    def simpler(self) -> Iterator["EngineCase"]:
        """Yield variants with fewer and shorter requests."""
        for i, one in reversed(list(enumerate(self.asks))):
            yield EngineCase((*self.asks[:i], *self.asks[i + 1 :]))
            half, most = one.prompt[: len(one.prompt) // 2], one.prompt[:-1]
            changes: list[dict[str, Any]] = [{"prompt": half}, {"prompt": most}]
            changes += [{"max_tokens": one.max_tokens // 2}, {"max_tokens": one.max_tokens - 1}]
            changes += [{"arrival": 0}, {"n": 1}]
            for change in changes:
                if all(change.values()) or change == {"arrival": 0}:
                    yield EngineCase((*self.asks[:i], replace(one, **change), *self.asks[i + 1 :]))

    def describe(self) -> list[str]:
        lines = []
        for i, one in enumerate(self.asks):
            sampled = f", temperature {one.temperature}, seed {one.seed}" if one.temperature else ""
            samples = f", {one.n} samples" * (one.n > 1)
            arrival = f", arrives before step {one.arrival + 1}" * (one.arrival > 0)
            extra = f", extra_args {dict(one.extra_args)}" if one.extra_args else ""
            lines.append(
                f"{letter(i)}: prompt {list(one.prompt)}, max_tokens {one.max_tokens}{sampled}{samples}{arrival}{extra}"
            )
        return lines


def random_case(rng: Random, vocab_size: int, has_samples: bool, extra_args: ExtraArgs = no_extra_args) -> EngineCase:
    """Return six requests whose prompts share prefixes. `has_samples`: some are sampled, with up to three samples."""
    base = [rng.randrange(3, vocab_size) for _ in range(24)]
    asks = []
    for i in range(6):
        prompt = base[: rng.randrange(0, 24)] + [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 12))]
        is_sampled = has_samples and i % 3 == 2
        asks.append(
            Ask(
                tuple(prompt),
                max_tokens=rng.randrange(1, 14),
                temperature=0.8 if is_sampled else 0.0,
                seed=rng.randrange(100),
                n=rng.randrange(1, 4) if is_sampled else 1,
                arrival=rng.randrange(0, 8),
                extra_args=extra_args(rng),
            )
        )
    return EngineCase(tuple(asks))


class RowStats(Stats):
    """Keeps each step as a row of a timetable."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.waiting: list[Sequence] = []

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        super().on_schedule(step, running, blocks)
        self.rows.append(make_row(step, self.waiting, blocks))


class CheckedEngine(LLMEngine):
    """The core's engine, which records its steps."""

    stats: RowStats

    def make_stats(self) -> RowStats:
        return RowStats()


class EngineCheck:
    """An engine with parts of one's own, and the oracle of its tokens.

    options: of `Config`; is_exact: whether the tokens must be those of the naive engine; patience_s: of `Progress`
    """

    def __init__(
        self, folder: str | Path, options: Mapping[str, Any], is_exact: bool = True, patience_s: float = 0.0
    ) -> None:
        self.patience_s = patience_s
        block_size = usable_block_size(options.get("attention_backend"))
        size = block_size or 16
        pool = {"block_size": block_size, "num_kv_blocks": -(-NUM_TOKENS // size)}
        backend = {"attention_backend": options.get("attention_backend") or "torch"}
        self.engine = CheckedEngine(Config(folder, **{**LIMITS, **pool, **options, **backend}))
        self.is_exact = is_exact
        self.has_samples = options.get("sampler_cls") is None  # else only greedy tokens are known
        self.naive = NaiveModel(self.engine.find_folder(), options.get("models")) if is_exact else None
        self.expected: dict[tuple[Any, ...], list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return int(self.engine.runner.shape.vocab_size)

    def play(self, case: EngineCase) -> Played:
        """Serve the requests of a case, and return its steps and the error, if something is wrong."""
        engine = self.engine
        engine.stats = engine.make_stats()
        engine.reset()  # a new pool, and a new scheduler
        played = Played(engine.stats.rows)
        try:
            with time_limit(TIME_LIMIT):
                outputs = self.serve(case)
                self.check_outputs(case, outputs)
        except Exception as error:  # the code under test raises any kind
            played.error = error
        return played

    def serve(self, case: EngineCase) -> dict[str, RequestOutput]:
        """Return the last output of each request. Each step is followed by a check of the owners of all blocks."""
        engine, outputs, num_steps, progress = self.engine, {}, 0, Progress(self.patience_s)
        last = max(one.arrival for one in case.asks)
        while num_steps <= last or engine.has_unfinished_requests():
            for i, one in enumerate(case.asks):
                if one.arrival == num_steps:
                    engine.add_request(letter(i), list(one.prompt), one.params, stream=False)
            engine.stats.waiting = engine.scheduler.waiting
            num_rows = len(engine.stats.rows)
            for output in engine.step():
                outputs[output.request_id] = output
            has_computed = len(engine.stats.rows) > num_rows
            progress.note(has_computed, ", ".join(engine.requests), max(last, MAX_IDLE_STEPS))
            scheduler = engine.scheduler
            check_owners(scheduler.block_manager, [table_of(seq) for seq in [*scheduler.running, *scheduler.waiting]])
            num_steps += 1
        return outputs

    def check_outputs(self, case: EngineCase, outputs: Mapping[str, RequestOutput]) -> None:
        for i, one in enumerate(case.asks):
            output = outputs.get(letter(i))
            if output is None:
                raise Violation(f"{letter(i)} has no output")
            for k, sample in enumerate(output.outputs):
                name, found = letter(i) + f".{k}" * (k > 0), list(sample.token_ids)
                if len(found) != self.num_expected(one):
                    raise Violation(f"{name} has {len(found)} tokens, and must have {self.num_expected(one)}")
                if not all(0 <= token < self.vocab_size for token in found):
                    raise Violation(f"{name} has a token that is not in the vocabulary: {found}")
                if self.naive is not None:
                    self.compare(self.naive, name, one, k, found)

    def num_expected(self, one: Ask) -> int:
        capacity = self.engine.scheduler.block_manager.capacity
        return min(one.max_tokens, MAX_MODEL_LEN - len(one.prompt), capacity + 1 - len(one.prompt))

    def compare(self, naive: NaiveModel, name: str, one: Ask, sample_index: int, found: list[int]) -> None:
        """Raise unless `found` are the tokens of the naive engine, up to the first that rounding may decide."""
        key = (one.prompt, one.params.temperature, one.seed, sample_index)
        right = self.expected.get(key, [])
        if len(right) < len(found):
            right = naive.generate(self.make_seq(one, sample_index, []), len(one.prompt) + len(found))[: len(found)]
            self.expected[key] = right
        right = right[: len(found)]
        for i, (token, wrong) in enumerate(zip(right, found, strict=True)):
            if token != wrong:
                if naive.is_near_tie(self.make_seq(one, sample_index, right[:i]), wrong):
                    return
                raise Violation(
                    f"{name} must get token {token} at position {len(one.prompt) + i}, as an engine that computes each "
                    f"request by itself and without a cache, but gets {wrong}. The tokens before are the same: "
                    f"{right[:i]}"
                )

    def make_seq(self, one: Ask, sample_index: int, output: list[int]) -> Sequence:
        """Return the sequence of a sample, as the engine makes it."""
        params = replace(one.params, max_tokens=None)
        seed = make_seed(one.seed, 0, 0, list(one.prompt))
        seq = Sequence(letter(0), list(one.prompt), params, frozenset(), seed, sample_index)
        for token in output:
            seq.append_token(token)
        return seq

    def explain(self, case: EngineCase, played: Played) -> list[str]:
        """Return lines: the pool, the requests, the steps as a timetable, and what is wrong."""
        assert played.error is not None
        blocks = self.engine.scheduler.block_manager
        pool = f"{blocks.num_blocks} blocks of {blocks.block_size} tokens"
        limits = f"{pool}; at most {MAX_SEQS} sequences and {MAX_TOKENS} tokens in a step"
        rows = draw_timetable(played.rows) if played.rows else ["(no step)"]
        state = draw_state(self.engine.scheduler.running)
        return [limits, *case.describe(), "", *rows, *state, "", f"wrong: {describe_error(played.error)}"]


def usable_block_size(backend: Any) -> int | None:
    """Return a small block size that a backend can have; None is its default, or a backend that is not a class."""
    if not isinstance(backend, type):
        return 4
    why_not: Callable[..., str | None] | None = getattr(backend, "why_not", None)
    if why_not is None:
        return 4
    return 4 if why_not(torch.device("cpu"), torch.float32, 32, 4) is None else None
