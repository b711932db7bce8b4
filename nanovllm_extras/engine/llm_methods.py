"""What the methods of `LLM` need of it that are in files of their own, such as `LLM.embed`.

`full_llm.py` imports these files, so they cannot import `LLM`.
"""

from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.llm import Requests
from nanovllm_extras.engine.engine_stats import EngineStats
from nanovllm_extras.engine.observations import Observations


class CallsEngine(Protocol):
    """An `LLM` that checks prompts and computes requests."""

    def _check(
        self, prompts: object, params: object, priority: object, name: str, kind: type, lora_request: Any
    ) -> Requests:
        """Return the requests of prompts and their parameters, or raise before anything is queued."""

    def _complete(self, requests: Requests, use_tqdm: bool | Callable[..., object]) -> list[Any]:
        """Compute the requests, and return their outputs in order."""


class EngineWithStats(Protocol):
    """An engine that counts what it does."""

    observed: Observations

    def get_stats(self) -> EngineStats:
        """Return all counters."""


class HasStats(Protocol):
    """An `LLM` whose engine counts what it does."""

    @property
    def engine(self) -> EngineWithStats:
        """Return the engine."""
