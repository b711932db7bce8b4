"""What all routes share: the engine, once it is loaded, the names it is served by, and what is in progress.

Nothing is global: `make_app` puts one `Server` into the application's state, and routes take it from there.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from nanovllm.extras.serve.async_llm import AsyncLLM
from nanovllm.extras.serve.bounds import Bounds
from nanovllm.extras.serve.errors import APIError
from nanovllm.extras.serve.metrics_route import Metrics
from nanovllm.extras.serve.parsers.parser_registry import Parsers
from nanovllm.extras.serve.token_bytes import TokenBytes
from nanovllm.extras.serve.workers import Workers

RETRY_LATER = {"Retry-After": "5"}


@dataclass(frozen=True)
class ServerOptions:
    """The server's options of `nanovllm serve`, beside the engine's."""

    model_names: tuple[str, ...]
    """The first is the name in answers; requests may use any."""
    api_keys: tuple[str, ...] = ()
    """Without keys every request is let in."""
    max_request_bytes: int = 16 * 2**20
    max_requests_per_minute: int | None = None
    """Of each key, or of each address where there are no keys: for IPv6, of each /64."""
    max_choices: int = 1024
    """Completions of one request: its prompts times `n`."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server (CORS)."""
    drain_timeout_s: float = 60.0
    """After SIGTERM, requests in progress have this long to finish."""
    root_path: str = ""
    """The path under which a proxy serves all of this."""
    log_requests: bool = True
    """Whether the log has a line for each request."""
    parsers: Parsers = Parsers()
    """How the model writes thoughts and calls."""
    tls: Mapping[str, Any] = field(default_factory=dict)
    """uvicorn's `ssl_keyfile`, `ssl_certfile`, `ssl_ca_certs`, `ssl_cert_reqs`; empty for plain HTTP."""
    max_request_values: int = 2**19
    """Numbers, texts, lists and objects of a body, and tokens of its prompts."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses or networks of proxies: what they say of a client's address is believed."""


@dataclass
class Server:
    options: ServerOptions
    metrics: Metrics
    llm: AsyncLLM | None = None
    """None until the model is loaded."""
    bounds: Bounds = field(init=False)
    """Of requests to this model; there are none until it is loaded."""
    token_bytes: TokenBytes = field(init=False)
    """Of this model's tokenizer."""
    workers: Workers = field(default_factory=Workers)
    is_draining: bool = False
    num_in_progress: int = 0
    """Requests that the engine has not finished."""
    body_bytes: Counter[str] = field(default_factory=Counter)
    """By caller, of the large bodies that have not been parsed."""
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.options.model_names[0]

    @property
    def is_loading(self) -> bool:
        return self.llm is None

    def check_ready(self) -> AsyncLLM:
        """The engine; raises APIError 503 while it is loading or draining, EngineDeadError if it is dead."""
        if self.llm is None:
            raise APIError(503, "the model is being loaded; try again soon", code="loading", headers=RETRY_LATER)
        if self.is_draining:
            raise APIError(503, "the server is shutting down", code="draining", headers=RETRY_LATER)
        self.llm.thread.check_health()
        return self.llm

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.model_names:
            served = ", ".join(self.options.model_names)
            raise APIError(404, f"there is no model {name!r}; this server has {served}", "model", "model_not_found")


# coroutines, because FastAPI runs plain functions in another thread, at each request


async def get_server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def get_ready_server(request: Request) -> Server:
    server = await get_server(request)
    server.check_ready()
    return server


AnyServer = Annotated[Server, Depends(get_server)]
"""A route's parameter of this type is the server."""
ReadyServer = Annotated[Server, Depends(get_ready_server)]
"""The same, and its engine is ready."""
