"""Send each request to a prefill engine, then to a decode engine: prefill apart from decode.

    client ─request→ front ─max_tokens=1→ prefill engine ─blocks→ shared tier of the K/V store
                           ─request→ decode engine (loads the blocks) ─answer→ front ─the same bytes→ client

Both engines are `nanovllm serve` with the same model and the same shared tier (`kv_transfer_config`). The front does
not check requests, because the engines do: they check keys, sizes and fields. It does not know which blocks are in the
store. A block that is missing is computed by the decode engine, so the answer is correct in any case.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.extras.serve.access import limited
from nanovllm.extras.serve.body import SHORT_BODY, parse
from nanovllm.extras.serve.errors import APIError, install_error_handlers
from nanovllm.extras.serve.state import RETRY_LATER, ServerOptions
from nanovllm.extras.serve.streaming import DONE, to_event
from nanovllm.extras.serve.workers import ClientGone, unless_client_leaves

logger = logging.getLogger(__name__)

GENERATING = ("/v1/completions", "/v1/chat/completions")
PASSED = ("/health", "/v1/models")
CONNECT_S = 5.0  # timeout of a new connection to an engine
EVENT_END = b"\n\n"
NOT_PASSED = {"connection", "content-length", "date", "expect", "host", "keep-alive", "server", "te", "trailer"}
NOT_PASSED |= {"transfer-encoding", "upgrade"}
"""Headers of one connection, not of the request or of the answer."""
NOT_PREFILLED = {"stream_options", "max_completion_tokens", "min_tokens", "best_of", "logprobs", "top_logprobs"}
NOT_PREFILLED |= {"echo", "response_format", "structured_outputs", "return_token_ids"}
"""Fields that shape the answer and not the prompt. The prefill engine does not get them."""


@dataclass(frozen=True)
class FrontOptions:
    """The engines of a front."""

    prefill: str
    """The URL of the prefill engine."""
    decode: tuple[str, ...]
    """The URLs of the decode engines, which take turns."""
    prefill_timeout_s: float = 60.0
    """The time in seconds after which a request does not wait for the prefill engine any longer."""
    max_request_bytes: int = ServerOptions.max_request_bytes


class Call(NamedTuple):
    """A client's request."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    """Bytes, because a key may be UTF-8."""
    body: bytes


class UnavailableError(Exception):
    """Raised if an engine answers that it is loading, shutting down or dead."""


class Front:
    """Calls the engines for the clients' requests."""

    def __init__(self, options: FrontOptions) -> None:
        self.options = options
        # no read timeout: an engine may compute for minutes before it sends anything
        self.client = httpx.AsyncClient(
            headers={"accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._turns = itertools.count()
        self._down: set[str] = set()  # engines whose last call failed

    async def generate(self, call: Call) -> Response:
        """Return the answer to a request that generates tokens. Raises APIError 503 if no decode engine is ready."""
        await self._prefill(call)
        return await self.answer(call)

    async def answer(self, call: Call) -> Response:
        """Return the answer of the first decode engine that begins one. Raises APIError 503 if there is none."""
        urls, first = self.options.decode, next(self._turns)
        for i in range(len(urls)):
            url = urls[(first + i) % len(urls)]
            try:
                answer = await self._ask(url, call)
            except (httpx.TransportError, UnavailableError) as error:
                self._note(url, repr(error))
                continue
            self._note(url, None)
            return answer
        raise APIError(503, "no decode engine is ready; try again later", code="unavailable", headers=RETRY_LATER)

    async def _prefill(self, call: Call) -> None:
        """Wait until the prefill engine has computed the prompt and saved its blocks.

        Its answer is not used. If it fails, the decode engine computes the prompt. If the request is invalid, the
        client gets the error of the decode engine.
        """
        body = await prefill_body(call.body)
        if body is None:
            return
        url = self.options.prefill
        headers = [(name, value) for name, value in call.headers if not name.startswith(b"content-")]
        headers.append((b"content-type", b"application/json"))
        sending = self.client.post(url + call.path, content=body, headers=headers)
        try:
            status = (await asyncio.wait_for(sending, self.options.prefill_timeout_s)).status_code
        except (httpx.TransportError, asyncio.TimeoutError) as error:
            self._note(url, repr(error))
            return
        self._note(url, f"status {status}" if status >= 500 else None)
        if 400 <= status < 500:
            logger.info("prefill engine %s: status %d", url, status)

    def _note(self, url: str, failure: str | None) -> None:
        """Log that an engine has begun to fail, or that it works again: once, not for each request."""
        if failure is not None and url not in self._down:
            logger.warning("engine %s has failed: %s; requests go on without it", url, failure)
            self._down.add(url)
        elif failure is None and url in self._down:
            logger.warning("engine %s works again", url)
            self._down.remove(url)

    async def _ask(self, url: str, call: Call) -> Response:
        """Return the answer of one engine. Raises TransportError, UnavailableError before its first byte.

        An answer that is not a stream is read whole, so that another engine can still be asked.
        """
        request = self.client.build_request(call.method, url + call.path, content=call.body, headers=call.headers)
        upstream = await self.client.send(request, stream=True)
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


class Relay(StreamingResponse):
    """Sends an engine's stream of events unchanged, until the client disconnects.

    first: the first bytes of the stream; `chunks` has the others.
    """

    def __init__(self, upstream: httpx.Response, chunks: AsyncIterator[bytes], first: bytes) -> None:
        super().__init__(self._events(first, chunks), upstream.status_code, passed(upstream))
        self._upstream = upstream

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
                    yield events + end
                chunk = await anext(chunks, None)
                if chunk is None:
                    break
                tail += chunk
        except httpx.TransportError as error:
            logger.warning("decode engine %s: %r in the middle of a stream", self._upstream.url, error)
            message = "the engine that served this request has died; send the request again"
            tail = to_event(APIError(503, message, code="engine_died").body()) + DONE
        if tail:
            yield tail


async def prefill_body(body: bytes) -> bytes | None:
    """Return the request that computes the prompt of the request `body` and one token, or None if there is none."""
    try:
        most = ServerOptions.max_request_values
        value = parse(body, most) if len(body) <= SHORT_BODY else await asyncio.to_thread(parse, body, most)
    except APIError:
        return None
    if not isinstance(value, dict) or value.get("truncate_prompt_tokens") == -1:
        return None  # -1: the prompt depends on max_tokens
    kept: dict[str, Any] = {name: one for name, one in value.items() if name not in NOT_PREFILLED}
    return json.dumps(kept | {"max_tokens": 1, "n": 1, "stream": False}).encode()


def passed(upstream: httpx.Response) -> dict[str, str]:
    """Return the headers of an answer that do not belong to one connection."""
    return {name: value for name, value in upstream.headers.items() if name not in NOT_PASSED}


async def read(request: Request, max_bytes: int) -> Call:
    """Read a client's request. Raises APIError 413 if its body has more than `max_bytes`."""
    body = await Request(request.scope, limited(request.receive, max_bytes)).body()
    headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in NOT_PASSED]
    if request.client is not None:
        headers.append((b"x-forwarded-for", request.client.host.encode()))
    return Call(request.method, request.url.path, headers, body)


def make_front(options: FrontOptions) -> FastAPI:
    """Return the application of a front. It needs no model."""
    front = Front(options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with front.client:
            yield

    async def generate(request: Request) -> Response:
        call = await read(request, options.max_request_bytes)
        response: Response = await unless_client_leaves(request.receive, front.generate(call))
        return response

    async def pass_on(request: Request) -> Response:
        return await front.answer(await read(request, options.max_request_bytes))

    app = FastAPI(title="nanovllm front", openapi_url=None, lifespan=lifespan)
    for path in GENERATING:
        app.add_route(path, generate, methods=["POST"])
    for path in PASSED:
        app.add_route(path, pass_on, methods=["GET"])
    install_error_handlers(app)
    return app
