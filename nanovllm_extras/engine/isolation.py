"""`Isolation`: a request that makes its step fail ends with an error, and the other requests continue.

What a request asks for is done in the steps of all: its logits processors, biases, penalties, grammar, text. If one of
these raises, an engine rolls the step back and raises. A server cannot do so: one client could fail everybody's
requests, again and again. With `LLMEngine(config, faults=Isolation())`, the request that is at fault is found:

    step of A, B, C      the model has run, and a draw raises: the hidden states of A, B and C are known, and their K
                         and V are in the cache. If the model itself raises, no request is at fault: the step fails
    a draw for each      A and C draw, B raises: B is at fault
    a draw for all       once more, and B asks for nothing. A and C get their tokens, B ends with its error

If the step cannot even be built, the model first runs without anything that requests ask for. Tokens do not depend on
other rows of the batch, and random numbers do not depend on earlier draws. So A and C get the tokens that they get
without B. All requests of the step that have readers end only if the readers' results cannot be returned.
`serve/engine_thread.py` gives each error to its request.
"""

import logging
from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.batch import Batch, offsets
from nanovllm.scheduler import Step
from nanovllm_extras.engine.faults import HasRequests
from nanovllm_extras.engine.no_token import NO_TOKEN_REASON, NoTokenError
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence, own_chunks, own_sequences
from nanovllm_extras.sampling.logits_processors import ReaderResult, build_readers
from nanovllm_extras.sampling.processed_batch import build_batch, build_sampling
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens, Computed, SampledTokens

logger = logging.getLogger(__name__)


class Isolation:
    """The `FaultHandler` of one engine that ends the request at fault."""

    def __init__(self) -> None:
        self._failures: dict[str, Exception] = {}

    def take_failures(self) -> dict[str, Exception]:
        failures, self._failures = self._failures, {}
        return failures

    def compute_again(self, engine: HasRequests, step: Step, is_built: bool, error: Exception) -> ArrivingTokens:
        """Return the tokens of the step without what the guilty requests ask for. Raise if no request is at fault."""
        runner = engine.runner
        computed = runner.unsampled if is_built else None  # else it is of an earlier step that failed
        if isinstance(error, EngineDeadError) or (is_built and computed is None):  # the model has failed
            raise error
        if computed is None:
            everybody = {seq.request_id for seq, _, _ in step.chunks}
            computed = runner.compute_hidden(build(engine, neutralise(step, everybody)))
        errors = find_guilty(runner, step, computed.hidden)
        if not errors:
            raise error
        logger.warning("%d requests end, because their step has failed by them: %r", len(errors), error)
        tokens = sample_without(errors.keys(), engine, step, computed.hidden)
        for request_id, own_error in errors.items():
            self.end(engine, [request_id], own_error)
        return tokens

    def end(self, engine: HasRequests, request_ids: Iterable[str], error: Exception) -> None:
        """End those of the requests that are unfinished. Raise if the engine is dead: no request is at fault."""
        if isinstance(error, EngineDeadError):
            raise error
        for request_id in request_ids:
            request = engine.requests.pop(request_id, None)
            if request is None:  # it was aborted during the step, or has failed already
                continue
            self._failures[request_id] = error
            for seq in request.seqs:
                if seq.finish_reason is None:
                    engine.scheduler.finish(seq, "abort")

    def end_without_token(self, engine: HasRequests, request_ids: Iterable[str]) -> None:
        self.end(engine, request_ids, NoTokenError(NO_TOKEN_REASON))


def build(engine: HasRequests, step: Step) -> Batch:
    return build_batch(step, engine.scheduler.block_manager.block_size, engine.runner.make_metadata)


@torch.inference_mode()
def find_guilty(runner: ModelRunner, step: Step, hidden: torch.Tensor) -> dict[str, Exception]:
    """Return the requests whose own part of the step raises. hidden: [num_tokens, hidden_size]"""
    starts = offsets(np.array([num_new_tokens for _, _, num_new_tokens in step.chunks], dtype=np.int32))
    errors: dict[str, Exception] = {}
    with runner.step_context():
        for i, (seq, start, num_new_tokens) in enumerate(step.chunks):
            rows = hidden[int(starts[i]) : int(starts[i + 1])]  # [num_new_tokens, hidden_size]
            try:
                read_alone(runner, replace(step, chunks=[step.chunks[i]]), rows)
            except Exception as error:
                errors.setdefault(seq.request_id, error)
            for sample, place in zip(own_sequences(step.samples), step.sampled_chunks, strict=True):
                if place == i:
                    try:
                        sample_alone(runner, sample, start + num_new_tokens, rows[-1:])
                    except Exception as error:
                        errors.setdefault(sample.request_id, error)
    return errors


def sample_without(guilty: Collection[str], engine: HasRequests, step: Step, hidden: torch.Tensor) -> ArrivingTokens:
    """Sample the step, in which the guilty requests ask for nothing. hidden: [num_tokens, hidden_size]"""
    runner, neutral = engine.runner, neutralise(step, guilty)
    batch = build(engine, neutral)
    with runner.step_context():
        sent = runner.send(batch)
    tokens = runner.finish(Computed(hidden, sent))
    tokens.readings = tuple(ReadingsOf(neutral, result) for result in tokens.readings)
    return tokens


def neutralise(scheduled: Step, request_ids: Collection[str]) -> Step:
    """Return the same step, in which these requests only ask for greedy tokens.

    Stand-ins replace their sequences, which stay unchanged for other steps in flight.
    """
    chunks, samples = own_chunks(scheduled.chunks), own_sequences(scheduled.samples)
    seqs = dict.fromkeys([*(seq for seq, _, _ in chunks), *samples])
    places = {seq: stand_in(seq) if seq.request_id in request_ids else seq for seq in seqs}
    return replace(
        scheduled,
        chunks=[(places[seq], start, num_new_tokens) for seq, start, num_new_tokens in chunks],
        samples=[places[seq] for seq in samples],
    )


def stand_in(seq: Sequence) -> Sequence:
    """Return a greedy copy of `seq` without processors and readers. It shares token ids and the block table."""
    stand = copy(seq)
    stand.sampling_params, stand.processors, stand.readers = SamplingParams(temperature=0), (), ()
    stand.is_plain = True
    return stand


def sample_alone(runner: ModelRunner, seq: Sequence, position: int, row: torch.Tensor) -> None:
    """Sample the token of one sequence. row: [1, hidden_size], its hidden state"""
    sampling = runner.send(build_sampling([seq], [position]))
    token_ids, logprobs = runner.choose_tokens(row, sampling, slots_of(seq, row))
    ArrivingTokens(SampledTokens(token_ids, logprobs)).wait()


def read_alone(runner: ModelRunner, step: Step, rows: torch.Tensor) -> None:
    """Read the hidden states of the step's only chunk, `rows`: [num_new_tokens, hidden_size], by its readers."""
    for reader in build_readers(step, np.array([0, len(rows)], dtype=np.int32)):
        slots = slots_of(step.chunks[0][0], rows)
        runner.send(reader).compute(rows, partial(runner.logits_of, slots=slots)).to_host()


def slots_of(seq: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the slots of the LoRA adapters of rows of one sequence: [num_rows] int32, or None if it has no adapter."""
    slot = getattr(seq, "adapter_slot", 0)
    return torch.full((len(rows),), slot, dtype=torch.int32, device=rows.device) if slot else None


class ReadingsOf(NamedTuple):
    """What the readers of a step have read. It belongs to this step's sequences, whichever step asks for it."""

    scheduled: Step
    result: ReaderResult

    def to_host(self) -> "ReadingsOf":
        return ReadingsOf(self.scheduled, self.result.to_host())

    def deliver(self, _: Step) -> None:
        self.result.deliver(self.scheduled)
