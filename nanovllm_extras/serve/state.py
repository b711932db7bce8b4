"""Hold the state that all routes share: the engine, the options, and the requests in progress.

There are no global variables: `make_app` puts one `Server` into the application's state, and the routes read it there.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.embedding.pair_classifier import Classifier
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.bounds import Bounds
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.ignored_fields import IgnoredFields
from nanovllm_extras.serve.metrics_route import Metrics
from nanovllm_extras.serve.response_store import ResponseStore, StoreBounds
from nanovllm_extras.serve.served_adapters import ServedAdapters
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.serve.workers import Workers

RETRY_LATER = {"Retry-After": "5"}


@dataclass
class Server:
    """The state of one server: the engine, its limits, and the requests in progress."""

    options: ServerOptions
    metrics: Metrics
    llm: AsyncLLM | None = None
    """None until the model is loaded."""
    bounds: Bounds = field(init=False)
    """The limits of requests to this model. Set when the model is loaded."""
    token_bytes: TokenBytes = field(init=False)
    """The bytes of the tokens of this model's tokenizer. Set when the model is loaded."""
    classifier: Classifier | None = None
    """The tokens whose probability is the score of a pair; None for the cosine of embeddings. Set with the model."""
    workers: Workers = field(default_factory=Workers)
    is_draining: bool = False
    num_in_progress: int = 0
    """Requests that the engine has not finished."""
    body_bytes: Counter[str] = field(default_factory=Counter)
    """Caller -> number of bytes of its large bodies that have not been parsed."""
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    started: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(init=False)
    """The responses that later requests may continue."""
    background: set[asyncio.Task[None]] = field(default_factory=set)
    """The tasks that generate responses in the background. asyncio itself does not keep them alive."""
    num_in_background: int = 0
    """The number of these responses, with those whose requests are still being read."""

    adapters: ServedAdapters = field(init=False)
    """The LoRA adapters that requests may name as their model."""

    def __post_init__(self) -> None:
        options = self.options
        self.adapters = ServedAdapters(options.lora_modules, self._remove_adapter)
        self.responses = ResponseStore(
            StoreBounds(
                options.max_stored_responses, options.max_stored_response_bytes, options.max_stored_response_age_s
            )
        )
        self.metrics.include(self.responses.families)

    @property
    def model_name(self) -> str:
        """The name of the model in answers."""
        return self.options.model_names[0]

    def owner_of(self, request: Request) -> str:
        """Return who may read what the request stores: its key; everybody if the server has no keys."""
        return str(request.state.caller) if self.options.api_keys else ""

    @property
    def is_loading(self) -> bool:
        return self.llm is None

    def check_ready(self) -> AsyncLLM:
        """Return the engine. Raises APIError 503 while it loads or drains, EngineDeadError if it is dead."""
        if self.llm is None:
            raise APIError(503, "the model is being loaded; try again soon", code="loading", headers=RETRY_LATER)
        if self.is_draining:
            raise APIError(503, "the server is shutting down", code="draining", headers=RETRY_LATER)
        self.llm.thread.check_health()
        return self.llm

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """Return the LoRA adapter that a request names as its model, or None for the model itself.

        Raises APIError 404 if it is neither, as after an adapter has been unloaded.
        """
        self.check_model(name)
        return None if name is None else self.adapters.get(name)

    def name_in_answers(self, name: str | None) -> str:
        """Return the name that answers have for a request whose model is `name`: that of its adapter if it has one.

        The adapter may have been unloaded since the request was accepted.
        """
        return self.model_name if name is None or name in self.options.model_names else name

    def _remove_adapter(self, number: int) -> None:
        if self.llm is not None and self.llm.thread.dead is None:
            self.llm.thread.call(self.llm.engine.remove_lora, number)

    def check_model(self, name: str | None) -> None:
        """Raise APIError 404 if `name` is neither a name of the model nor of an adapter."""
        if name is not None and name not in self.options.model_names and name not in self.adapters:
            served = ", ".join([*self.options.model_names, *self.adapters])
            raise APIError(404, f"unknown model {name!r}; this server has {served}", "model", "model_not_found")


# these are coroutines because FastAPI would run plain functions in another thread, for each request


async def get_server(request: Request) -> Server:
    """Return the server of a request's application."""
    server: Server = request.app.state.server
    return server


async def get_ready_server(request: Request) -> Server:
    """Return the server. Raises APIError or EngineDeadError if its engine is not ready."""
    server = await get_server(request)
    server.check_ready()
    return server


AnyServer = Annotated[Server, Depends(get_server)]
"""The type of a route's parameter that gets the server."""
ReadyServer = Annotated[Server, Depends(get_ready_server)]
"""The type of a route's parameter that gets the server if its engine is ready."""
