"""What happens if what a request asks for makes a step fail: the engine's `faults` decide.

By default the error is raised, and the engine rolls the step back. `isolation.py` ends the request at fault instead.
"""

from collections.abc import Iterable
from typing import Protocol

from nanovllm.scheduler import Scheduler, Step
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens


class HasRequests(Protocol):
    """What a fault handler needs of an `LLMEngine`."""

    runner: ModelRunner
    scheduler: Scheduler
    requests: dict[str, Request]


class FaultHandler(Protocol):
    """Handles the errors of an engine's steps. Each method that takes `error` is called while it is handled."""

    def compute_again(self, engine: HasRequests, step: Step, is_built: bool, error: Exception) -> ArrivingTokens:
        """Return the tokens of a step that could not be computed, or raise.

        is_built: whether the step's tensors could be built
        """

    def end(self, engine: HasRequests, request_ids: Iterable[str], error: Exception) -> None:
        """End requests whose results cannot be read, or raise."""

    def end_without_token(self, engine: HasRequests, request_ids: Iterable[str]) -> None:
        """Called when requests have ended because no token could be sampled; their outputs say so."""

    def take_failures(self) -> dict[str, Exception]:
        """Return request id -> error of requests that have ended on their own. Each is returned once."""


class Raised:
    """The default `FaultHandler`: every error is raised, so no request ends on its own."""

    def compute_again(self, engine: HasRequests, step: Step, is_built: bool, error: Exception) -> ArrivingTokens:
        raise error

    def end(self, engine: HasRequests, request_ids: Iterable[str], error: Exception) -> None:
        raise error

    def end_without_token(self, engine: HasRequests, request_ids: Iterable[str]) -> None:
        pass

    def take_failures(self) -> dict[str, Exception]:
        return {}
