"""From `speculative_config` to a `Drafter`: who proposes, and how many tokens a step should have.

`assembly.py` calls `make_drafter`. What takes time is done once for an engine: loading a draft model, and measuring.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from nanovllm.batch import build_batch
from nanovllm.scheduler import Chunk, Step
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.options.speculation_options import MAX_DRAFTED_ROWS, Speculation, read_options
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.scheduling.drafter import Drafter, Proposer
from nanovllm_extras.speculation.draft_model import DraftModel, StartDraft, load_draft_model
from nanovllm_extras.speculation.mtp_drafts import MtpDrafts
from nanovllm_extras.speculation.ngram import NGrams

logger = logging.getLogger(__name__)

NEARLY_FREE = 4 / 3  # the greatest ratio of times that twice the tokens may have
MAX_MEASURED_ROWS = MAX_DRAFTED_ROWS
MIN_RUNS, MIN_SECONDS = 3, 0.1  # of each number of rows


class Ready(NamedTuple):
    """What an engine keeps beside its runner, since `make_scheduler` may be called again."""

    options: Speculation
    make_proposer: Callable[[BlockManager], Proposer]  # of a new scheduler, whose block manager this is
    max_rows: int


def make_drafter(
    parts: Parts, blocks: BlockManager, requests: Mapping[str, Request], start_draft: StartDraft
) -> Drafter:
    """Return the drafter of a new scheduler over `blocks`.

    requests: the engine's; start_draft: returns a runner of the draft model
    """
    keeper: Any = parts.runner
    ready: Ready | None = getattr(keeper, "speculation", None)
    if ready is None:
        ready = keeper.speculation = get_ready(parts, start_draft)
    config, max_num_batched_tokens = parts.config, parts.max_num_batched_tokens
    max_chunk_len = config.long_prefill_token_threshold or max_num_batched_tokens
    return Drafter(
        ready.make_proposer(blocks),
        max_drafts=min(ready.options.num_speculative_tokens, max_chunk_len - 1),
        max_rows=min(ready.max_rows, max_num_batched_tokens),
        max_seqs=ready.options.disable_by_batch_size or config.max_num_seqs,
        vocab_size=parts.model_config.vocab_size,
        requests=requests,
    )


def get_ready(parts: Parts, start_draft: StartDraft) -> Ready:
    assert parts.config.speculative_config is not None
    options = read_options(parts.config.speculative_config)
    make_proposer = load_proposer(
        parts, options, start_draft
    )  # first: what a draft model computes along is part of a step
    if options.disable_by_batch_size is not None:
        max_rows = options.disable_by_batch_size * (1 + options.num_speculative_tokens)
        if parts.model_config.state_shape is not None:  # on a GPU, its kernels for steps with drafts are compiled
            run(parts.runner, make_measured_step(parts.runner, 2))
    else:
        max_rows = measure_rows(parts.runner, min(MAX_MEASURED_ROWS, parts.max_num_batched_tokens))
        logger.info("speculation: up to %d tokens a step are nearly free, drafts included", max_rows)
    return Ready(options, make_proposer, max_rows)


def load_proposer(parts: Parts, options: Speculation, start_draft: StartDraft) -> Callable[[BlockManager], Proposer]:
    """Load what proposes drafts, and return a function that makes the proposer for a block manager."""
    if options.method == "ngram":
        return lambda _: NGrams(*options.lookup)
    if options.method == "draft_model":
        draft = load_draft_model(parts.runner, options, start_draft)
        if parts.kv_store is not None:
            parts.kv_store.add_draft(draft)
        return partial(DraftModel, draft)
    if options.method == "mtp":
        runner: Any = parts.runner
        return partial(MtpDrafts, runner)
    proposer = options.method
    if isinstance(proposer, type):  # `proposer_cls`
        runner = parts.runner
        proposer = proposer(runner)
        if hasattr(proposer, "follow"):
            runner.followers = (*runner.followers, proposer)
    return lambda _: proposer


# ---- how many tokens


def measure_rows(runner: ModelRunner, most: int) -> int:
    """Return the most rows of decodes that are nearly free: each doubling up to it takes at most a third longer.

    A step that waits for memory, or for Python, takes hardly longer with more rows. One that computes takes twice as
    long with twice the rows, and then a draft costs as much as the token that it may save.
    """
    num_rows = 1
    while 2 * num_rows <= most and cost_of_doubling(runner, num_rows) <= NEARLY_FREE:
        num_rows *= 2
    return num_rows


def cost_of_doubling(runner: ModelRunner, num_rows: int) -> float:
    """Return the time of a step with `2 * num_rows` rows divided by that with `num_rows`, from the fastest runs."""
    steps = [make_measured_step(runner, count) for count in (num_rows, 2 * num_rows)]
    for step in steps:
        run(runner, step)  # kernels may be compiled, memory touched
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < MIN_RUNS or sum(times[0]) < MIN_SECONDS:
        for step, taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            run(runner, step)
            taken.append(time.perf_counter() - start)
    return min(times[1]) / min(times[0])


def run(runner: ModelRunner, step: Step) -> None:
    runner.run(build_batch(step, runner.backend.block_size, runner.make_metadata)).wait()


def make_measured_step(runner: ModelRunner, num_rows: int) -> Step:
    """Return a step with `num_rows` decodes, which read and write only the null block.

    The rows of a model with recurrent states are decodes with as many drafts as the options allow: each draft waits for
    the row before it, which plain decodes do not. Their states are in slots that no sequence owns yet.
    """
    step = decodes_of_nobody(num_rows)
    pool = runner.layout.pool
    if pool is None:
        return step
    assert runner.config.speculative_config is not None
    most_drafts = read_options(runner.config.speculative_config).num_speculative_tokens
    moves = drafts_of_nobody(num_rows, most_drafts, pool.num_slots)
    for slot in moves.slots:
        pool.copy(0, slot)  # zeros of the null slot: memory that nobody has written may slow arithmetic down
    return replace(step, copies=moves)


def decodes_of_nobody(num_rows: int) -> Step:
    """Return a step with `num_rows` decodes over the null block. None of them begins a sequence."""
    seq = Sequence("measured", [0] * (num_rows + 1), SamplingParams(temperature=0))
    chunks: list[Chunk] = [(seq, max(1, row), 1) for row in range(num_rows)]
    return Step(chunks, num_rows, num_rows, [seq] * num_rows, [*range(num_rows)])


def drafts_of_nobody(num_rows: int, most_drafts: int, num_slots: int) -> Moves:
    """Return the slots of a step that is only measured: of decodes with `most_drafts` drafts each, or fewer at the end.

    6 rows, most_drafts 3 -> slots [1, 2, 3, 4, 5, 6], sources [1, 1, 2, 3, 5, 5]

    If the pool has fewer slots than the step has rows, rows share them: the states mean nothing.
    """
    slots = [1 + row % num_slots for row in range(num_rows)]
    sources = [slots[row - (row % (1 + most_drafts) > 0)] for row in range(num_rows)]
    return Moves(slots=slots, sources=sources)
