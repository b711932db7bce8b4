"""Hold the state that all routes share: the engine, the options, and the requests in progress.

There are no global variables: `make_app` puts one `Server` into the application's state, and the routes read it there.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.bounds import Bounds
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.ignored_fields import IgnoredFields
from nanovllm_extras.serve.metrics_route import Metrics
from nanovllm_extras.serve.parsers.parser_registry import Parsers
from nanovllm_extras.serve.response_store import ResponseStore, StoreBounds
from nanovllm_extras.serve.serve_checks import (
    check_api_keys,
    check_names,
    check_origins,
    check_proxies,
    check_root_path,
)
from nanovllm_extras.serve.workers import Workers

RETRY_LATER = {"Retry-After": "5"}


@dataclass(frozen=True)
class ServerOptions:
    """The options of `nanovllm serve` that are not the engine's. Raises ValueError if one of them is invalid."""

    model_names: tuple[str, ...]
    """The names that requests may use. Answers have the first one."""
    api_keys: tuple[str, ...] = ()
    """The allowed keys. If empty, requests need no key."""
    max_request_bytes: int = 16 * 2**20
    max_requests_per_minute: int | None = None
    """The limit for each key, or for each address if there are no keys (for IPv6, for each /64)."""
    max_choices: int = 1024
    """The maximum number of completions of one request: its prompts times `n`."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server (CORS)."""
    drain_timeout_s: float = 60.0
    """The time in seconds that requests in progress have to finish after SIGTERM."""
    root_path: str = ""
    """The path under which a proxy serves this application."""
    log_requests: bool = True
    """Whether the log has a line for each request."""
    parsers: Parsers = Parsers()
    """The parsers of the model's reasoning and tool calls."""
    tls: Mapping[str, Any] = field(default_factory=dict)
    """uvicorn's `ssl_keyfile`, `ssl_certfile`, `ssl_ca_certs`, `ssl_cert_reqs`; empty for plain HTTP."""
    max_request_values: int = 2**19
    """The maximum number of JSON values (numbers, texts, lists, objects) of a body, and of tokens of its prompts."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses or networks of proxies whose headers about the client's address are trusted."""

    enable_kv_slots: bool = False
    """Whether prompts can be saved and restored by name, at `/slots`."""
    enable_tokenizer_info: bool = False
    """Whether `/tokenizer_info` returns the configuration of the tokenizer, which has the chat template."""
    timeout_keep_alive_s: float = 75.0
    """The time in seconds after which a connection without a request is closed. Longer than that of proxies (60 s)."""

    max_stored_responses: int = 10_000
    """The number of responses that are stored. 0 stores none."""
    max_stored_response_bytes: int = 256 * 2**20
    """The memory of stored responses. 0 stores none."""
    max_stored_response_age_s: float = 86_400.0
    """The time in seconds for which a response is stored. 0 stores none."""

    @property
    def store_bounds(self) -> StoreBounds:
        """The limits of stored responses."""
        return StoreBounds(self.max_stored_responses, self.max_stored_response_bytes, self.max_stored_response_age_s)

    def __post_init__(self) -> None:
        check_names(self.model_names)
        check_api_keys(self.api_keys)
        check_origins(self.allowed_origins)
        check_root_path(self.root_path)
        check_proxies(self.forwarded_allow_ips)


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

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.options.store_bounds)
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

    def check_model(self, name: str | None) -> None:
        """Raise APIError 404 if `name` is not a name of the model."""
        if name is not None and name not in self.options.model_names:
            served = ", ".join(self.options.model_names)
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
