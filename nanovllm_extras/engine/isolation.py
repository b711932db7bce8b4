"""`IsolatingEngine`: a request that makes its step fail ends with an error, and the other requests continue.

What a request asks for is done in the steps of all: its logits processors, biases, penalties, grammar, text. If one of
these raises, the plain engine rolls the step back and raises. A server cannot do so: one client could fail everybody's
requests, again and again. This engine looks for the request that is at fault:

    step of A, B, C      the model has run, and a draw raises: the hidden states of A, B and C are known, and their K
                         and V are in the cache. If the model itself raises, no request is at fault: the step fails
    a draw for each      A and C draw, B raises: B is at fault
    a draw for all       once more, and B asks for nothing. A and C get their tokens, B ends with its error

If the step cannot even be built, the model first runs without anything that requests ask for. Tokens do not depend on
other rows of the batch, and random numbers do not depend on earlier draws. So A and C get the tokens that they get
without B. All requests of the step that have readers end only if the readers' results cannot be returned.
`serve/engine_thread.py` drives this engine, and gives each error to its request.
"""

import logging
from collections.abc import Collection
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.batch import Batch, offsets
from nanovllm.scheduler import Step
from nanovllm.sequence import Sequence
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.engine.no_token import NO_TOKEN_REASON, NoTokenError
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.logits_processors import ReaderResult, build_readers
from nanovllm_extras.sampling.processed_batch import build_batch, build_sampling
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens, Computed, SampledTokens, StepTokens

logger = logging.getLogger(__name__)


class IsolatingEngine(LLMEngine):
    """`take_failures()` after a step returns the errors of requests that have ended on their own."""

    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        super().__init__(config, observer)
        self._failures: dict[str, Exception] = {}

    def take_failures(self) -> dict[str, Exception]:
        """Return request id -> error, each only once."""
        failures, self._failures = self._failures, {}
        return failures

    # ---- while a step is built and computed

    def build(self, step: Step) -> Batch:
        self._is_built = False
        batch = super().build(step)
        self._is_built = True
        return batch

    def compute(self, step: Step) -> ArrivingTokens:
        try:
            return super().compute(step)
        except EngineDeadError:
            raise
        except Exception as error:
            computed = self.runner.unsampled
            if computed is None and self._is_built:
                raise  # the model has failed
            if computed is None:
                everybody = {seq.request_id for seq, _, _ in step.chunks}
                computed = self.runner.compute_hidden(self._build(neutralise(step, everybody)))
            hidden = computed.hidden
            errors = self._find_guilty(step, hidden)
            if not errors:
                raise
            logger.warning("%d requests end, because their step has failed by them: %r", len(errors), error)
            tokens = self._sample_without(errors.keys(), step, hidden)
            for request_id, own_error in errors.items():
                self._end_failed(request_id, own_error)
            return tokens

    def _build(self, step: Step) -> Batch:
        return build_batch(step, self.scheduler.block_manager.block_tables)

    @torch.inference_mode()
    def _find_guilty(self, step: Step, hidden: torch.Tensor) -> dict[str, Exception]:
        """Return the requests whose own part of the step raises. hidden: [num_tokens, hidden_size]"""
        runner = self.runner
        starts = offsets(np.array([num_new_tokens for _, _, num_new_tokens in step.chunks], dtype=np.int32))
        errors: dict[str, Exception] = {}
        with runner.step_context():
            for i, (seq, start, num_new_tokens) in enumerate(step.chunks):
                rows = hidden[int(starts[i]) : int(starts[i + 1])]  # [num_new_tokens, hidden_size]
                try:
                    read_alone(runner, replace(step, chunks=[step.chunks[i]]), rows)
                except Exception as error:
                    errors.setdefault(seq.request_id, error)
                for sample, place in zip(step.samples, step.sampled_chunks, strict=True):
                    if place == i:
                        try:
                            sample_alone(runner, sample, start + num_new_tokens, rows[-1:])
                        except Exception as error:
                            errors.setdefault(sample.request_id, error)
        return errors

    def _sample_without(self, guilty: Collection[str], step: Step, hidden: torch.Tensor) -> ArrivingTokens:
        """Sample the step, in which the guilty requests ask for nothing."""
        neutral = neutralise(step, guilty)
        batch = self._build(neutral)
        with self.runner.step_context():
            sent = self.runner.send(batch)
        tokens = self.runner.finish(Computed(hidden, sent))
        tokens.readings = tuple(ReadingsOf(neutral, result) for result in tokens.readings)
        return tokens

    # ---- while its tokens are read

    def end_without_token(self, seqs: list[Sequence]) -> None:
        super().end_without_token(seqs)
        for seq in seqs:
            self._end_failed(seq.request_id, NoTokenError(NO_TOKEN_REASON))

    def read_outputs(self, step: Step, advanced: list[tuple[int, Any]], tokens: StepTokens, now: float) -> list[Any]:
        """Return the outputs as the parent does, but read one request after the other."""
        for result in tokens.readings:
            try:
                result.deliver(step)
            except EngineDeadError:  # no request is at fault
                raise
            except Exception as error:  # the texts of tokens cannot be made
                chunks: list[Any] = step.chunks
                for request_id in {seq.request_id for seq, _, _ in chunks if seq.readers}:
                    self._end_failed(request_id, error)
        advanced_requests: dict[str, Request] = {}
        for row, seq in advanced:
            request = self.requests.get(seq.request_id)
            if request is not None:
                try:
                    request.read_token(seq, tokens, row)
                    advanced_requests[seq.request_id] = request
                except Exception as error:
                    self._end(request, error)
                    advanced_requests.pop(seq.request_id, None)  # another sample may have been read before
        outputs = []
        for request in advanced_requests.values():
            try:
                request.finish_step(self.scheduler, now)
                outputs += self.deliver([request], now)
            except Exception as error:
                self._end(request, error)
        return outputs

    def _end_failed(self, request_id: str, error: Exception) -> None:
        request = self.requests.get(request_id)
        if request is not None:  # else it was aborted during the step, or has failed already
            self._end(request, error)

    def _end(self, request: Request, error: Exception) -> None:
        self.requests.pop(request.request_id, None)
        self._failures[request.request_id] = error
        for seq in request.seqs:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")


def neutralise(scheduled: Step, request_ids: Collection[str]) -> Step:
    """Return the same step, in which these requests only ask for greedy tokens.

    Stand-ins replace their sequences, which stay unchanged for other steps in flight.
    """
    seqs = dict.fromkeys([*(seq for seq, _, _ in scheduled.chunks), *scheduled.samples])
    places = {seq: stand_in(seq) if seq.request_id in request_ids else seq for seq in seqs}
    return replace(
        scheduled,
        chunks=[(places[seq], start, num_new_tokens) for seq, start, num_new_tokens in scheduled.chunks],
        samples=[places[seq] for seq in scheduled.samples],
    )


def stand_in(seq: Any) -> Any:
    """Return a greedy copy of `seq` without processors and readers. It shares token ids and the block table."""
    stand = copy(seq)
    stand.sampling_params, stand.processors, stand.readers = SamplingParams(temperature=0), (), ()
    stand.is_plain = True
    return stand


def sample_alone(runner: ModelRunner, seq: Any, position: int, row: torch.Tensor) -> None:
    """Sample the token of one sequence. row: [1, hidden_size], its hidden state"""
    sampling = runner.send(build_sampling([seq], [position]))
    token_ids, logprobs = runner.choose_tokens(row, sampling)
    ArrivingTokens(SampledTokens(token_ids, logprobs)).wait()


def read_alone(runner: ModelRunner, step: Step, rows: torch.Tensor) -> None:
    """Read the hidden states of the step's only chunk, `rows`: [num_new_tokens, hidden_size], by its readers."""
    for reader in build_readers(step, np.array([0, len(rows)], dtype=np.int32)):
        runner.send(reader).compute(rows, runner.compute_logits).to_host()


class ReadingsOf(NamedTuple):
    """What the readers of a step have read. It belongs to this step's sequences, whichever step asks for it."""

    scheduled: Step
    result: ReaderResult

    def to_host(self) -> "ReadingsOf":
        return ReadingsOf(self.scheduled, self.result.to_host())

    def deliver(self, _: Step) -> None:
        self.result.deliver(self.scheduled)
