"""Send each request to a prefill server, then to a decode server: prefill apart from decode, over HTTP.

    client ─request→ front ─max_tokens=1→ prefill engine ─blocks→ shared tier of the K/V store
                           ─request→ decode engine (loads the blocks) ─answer→ front ─the same bytes→ client

Both engines are `nanovllm serve` with the same model and the same shared tier (`kv_transfer_config`). The front does
not check requests, because the engines do: they check keys, sizes and fields. `disaggregation.py` decides which engine
is asked; this file has the servers as engines, and the routes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm_extras.serve.access import limited
from nanovllm_extras.serve.disaggregation import (
    GENERATING,
    Dispatcher,
    UnavailableError,
    prefill_headers,
)
from nanovllm_extras.serve.errors import APIError, install_error_handlers
from nanovllm_extras.serve.request_ids import NAME as REQUEST_ID
from nanovllm_extras.serve.response_holder import replica_of
from nanovllm_extras.serve.server_options import PREFILL_TIMEOUT_S, ServerOptions
from nanovllm_extras.serve.streaming import error_events
from nanovllm_extras.serve.workers import ClientGone, unless_client_leaves

logger = logging.getLogger(__name__)

PASSED = ("/health", "/v1/models")
POSTED = (
    *("/v1/messages/count_tokens", "/v1/embeddings", "/pooling", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
"""Paths of requests with a body that generate nothing."""
RESPONSES = (  # what is asked of the engine that stores a response
    ("/v1/responses/input_tokens", ["POST"]),
    ("/v1/responses/{response_id}", ["GET", "DELETE"]),
    ("/v1/responses/{response_id}/input_items", ["GET"]),
    ("/v1/responses/{response_id}/cancel", ["POST"]),
)
SEARCH_S = 1.0  # the engines are asked for their names at most once in this time
CONNECT_S = 5.0  # timeout of a new connection to an engine
EVENT_END = b"\n\n"
NOT_PASSED = {"connection", "content-length", "date", "expect", "host", "keep-alive", "server", "te", "trailer"}
NOT_PASSED |= {"transfer-encoding", "upgrade"}
"""Headers of one connection, not of the request or of the answer."""


@dataclass(frozen=True)
class FrontOptions:
    """The engines of a front."""

    prefill: str
    """The URL of the prefill engine."""
    decode: tuple[str, ...]
    """The URLs of the decode engines, which take turns."""
    prefill_timeout_s: float = PREFILL_TIMEOUT_S
    """The time in seconds after which a request does not wait for the prefill engine any longer."""
    max_request_bytes: int = ServerOptions.max_request_bytes


class Call(NamedTuple):
    """A client's request."""

    method: str
    path: str
    """The path, and the query if there is one."""
    headers: list[tuple[bytes, bytes]]
    """Bytes, because a key may be UTF-8."""
    body: bytes


class Upstream:
    """A server that the front calls: an engine of the dispatcher. Its name is its URL."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.name = url
        self._client = client

    async def prefill(self, call: Call, body: bytes) -> int:
        """Send `call` with another body, and return the status of the whole answer. Raises UnavailableError."""
        headers = prefill_headers(call.headers)
        try:
            return (await self._client.post(self.name + call.path, content=body, headers=headers)).status_code
        except httpx.TransportError as error:
            raise UnavailableError(repr(error)) from error

    async def replica(self) -> str | None:
        """Return the name of the server in the ids of responses; None if it does not answer."""
        try:
            values = (await self._client.get(self.name + "/version", timeout=CONNECT_S)).json()
        except (httpx.TransportError, ValueError):
            return None
        name = values.get("replica") if isinstance(values, dict) else None
        return name if isinstance(name, str) else None

    async def answer(self, call: Call) -> Response:
        """Return the server's answer. Raises UnavailableError before its first byte.

        An answer that is not a stream is read whole, so that another engine can still be asked.
        """
        try:
            return await self._ask(call)
        except httpx.TransportError as error:
            raise UnavailableError(repr(error)) from error

    async def _ask(self, call: Call) -> Response:
        client, url = self._client, self.name + call.path
        request = client.build_request(call.method, url, content=call.body, headers=call.headers)
        upstream = await client.send(request, stream=True)
        relay = None
        try:
            if upstream.status_code == 503:
                raise UnavailableError("status 503")
            chunks, headers = upstream.aiter_raw(), passed(upstream)
            if not headers.get("content-type", "").startswith("text/event-stream"):
                return Response(b"".join([chunk async for chunk in chunks]), upstream.status_code, headers)
            relay = Relay(upstream, chunks, await anext(chunks, b""))
            return relay
        finally:
            if relay is None:
                await upstream.aclose()


class Holders:
    """Knows which of the engines stores which responses. An engine has another name after each start."""

    def __init__(self, engines: Sequence[Upstream]) -> None:
        self._engines = engines
        self._names: dict[str, str] = {}  # name in ids -> URL
        self._next_search = 0.0
        self._searching = asyncio.Lock()

    async def find(self, replica: str) -> str | None:
        """Return the URL of the engine with this name in ids; None if there is none."""
        async with self._searching:
            now = asyncio.get_running_loop().time()
            if replica not in self._names and now >= self._next_search:
                self._next_search = now + SEARCH_S
                names = await asyncio.gather(*(engine.replica() for engine in self._engines))
                self._names = {
                    name: engine.name for name, engine in zip(names, self._engines, strict=True) if name is not None
                }
        return self._names.get(replica)


class Relay(StreamingResponse):
    """Sends an engine's stream of events unchanged, until the client disconnects.

    first: the first bytes of the stream; `chunks` has the others.
    """

    def __init__(self, upstream: httpx.Response, chunks: AsyncIterator[bytes], first: bytes) -> None:
        super().__init__(self._events(first, chunks), upstream.status_code, passed(upstream))
        self._upstream = upstream
        self._num_events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self.stream_response(send))
        except ClientGone:
            pass
        finally:
            await self._upstream.aclose()  # the engine sees that its client has left

    async def _events(self, tail: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield whole events, so that the event of an error does not follow a half one."""
        try:
            while True:
                events, end, tail = tail.rpartition(EVENT_END)
                if end:
                    self._num_events += events.count(EVENT_END) + 1
                    yield events + end
                chunk = await anext(chunks, None)
                if chunk is None:
                    break
                tail += chunk
        except httpx.TransportError as error:
            logger.warning("decode engine %s: %r in the middle of a stream", self._upstream.url, error)
            message = "the engine that served this request has died; send the request again"
            failure, request_id = APIError(503, message, code="engine_died"), self._upstream.headers.get(REQUEST_ID)
            tail = error_events(failure, self._upstream.url.path, self._num_events, request_id)
        if tail:
            yield tail


def passed(upstream: httpx.Response) -> dict[str, str]:
    """Return the headers of an answer that do not belong to one connection."""
    return {name: value for name, value in upstream.headers.items() if name not in NOT_PASSED}


async def read(request: Request, max_bytes: int) -> Call:
    """Read a client's request. Raises APIError 413 if its body has more than `max_bytes`."""
    body = await Request(request.scope, limited(request.receive, max_bytes)).body()
    headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in NOT_PASSED]
    if request.client is not None:
        headers.append((b"x-forwarded-for", request.client.host.encode()))
    query = f"?{request.url.query}" if request.url.query else ""
    return Call(request.method, request.url.path + query, headers, body)


def make_client() -> httpx.AsyncClient:
    """Return the client of the servers. It has no read timeout: an engine may compute for minutes before it answers."""
    return httpx.AsyncClient(
        headers={"accept-encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


def make_front(options: FrontOptions) -> FastAPI:
    """Return the application of a front. It needs no model."""
    client = make_client()
    prefill, decode = Upstream(options.prefill, client), [Upstream(url, client) for url in options.decode]
    dispatcher = Dispatcher(prefill, decode, options.prefill_timeout_s)
    holders = Holders(decode)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    async def generate(request: Request) -> Response:
        call = await read(request, options.max_request_bytes)
        response: Response = await unless_client_leaves(request.receive, answer(request, call))
        return response

    async def answer(request: Request, call: Call) -> Response:
        replica = replica_of(request.url.path, call.body)
        if replica is not None:  # only the engine that stores the response can compute the prompt
            return await dispatcher.answer(call, await holders.find(replica))
        return await (dispatcher.generate(call) if request.url.path in GENERATING else dispatcher.answer(call))

    async def pass_on(request: Request) -> Response:
        return await answer(request, await read(request, options.max_request_bytes))

    app = FastAPI(title="nanovllm front", openapi_url=None, lifespan=lifespan)
    for path in GENERATING:
        app.add_route(path, generate, methods=["POST"])
    for path in PASSED:
        app.add_route(path, pass_on, methods=["GET"])
    for path in POSTED:
        app.add_route(path, pass_on, methods=["POST"])
    for path, methods in RESPONSES:
        app.add_route(path, pass_on, methods=methods)
    install_error_handlers(app)
    return app
