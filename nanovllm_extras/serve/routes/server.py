"""Run the server's process: load the model while the socket already listens, serve, and shut down gracefully.

At SIGTERM or SIGINT the server drains: it refuses new requests with 503, requests in progress finish, and the process
exits with status 0. After `drain_timeout_s`, or at a second signal, unfinished requests are aborted, and their clients
get the tokens computed so far.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm_extras.serve.access import LINGER_S
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.http_metrics import OTHER
from nanovllm_extras.serve.routes.app import set_engine
from nanovllm_extras.serve.state import Server

logger = logging.getLogger(__name__)

NUM_ACCEPTED = 32  # connections in one turn of the event loop; each takes about 0.5 ms until its request is read
CLOSE_S = 5  # time after draining for open connections to send their last bytes
SILENCE_S = 30  # idle time after which the kernel sends a keepalive probe to the client
PATIENCE_S = 60  # a client that acknowledges nothing for this long is considered gone
HEAD_S = 10  # limit from the request's first byte to the end of the headers
BODY_S = 60  # limit from the end of the headers to the end of the body
REFUSAL = "this is not a valid HTTP/1.1 request, or its headers are too large"
TOO_SLOW = "the request has not arrived within {} s"


class HTTPProtocol(H11Protocol):
    """One connection. It refuses bytes that are not HTTP, and requests that arrive too slowly, with an error in JSON.

    uvicorn's parser refuses invalid bytes itself, before the application sees them, and in another form. uvicorn has a
    time limit only between two requests.
    """

    timer: asyncio.TimerHandle | None = None
    timed: object = None
    """The parser's state that the timer limits. Arriving bytes do not restart the timer."""
    is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # a connection that sends nothing is closed without an answer, as one between two requests: a client could take
        # an answer that it has not asked for as that of its next request
        patience = max(self.timeout_keep_alive, HEAD_S)
        self.timeout_keep_alive_task = self.loop.call_later(patience, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if not self.is_refused:
            super().data_received(data)
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse the request. The parser calls this; its `msg` says only that the request is invalid."""
        self._refuse(APIError(400, REFUSAL))

    def _set_timer(self) -> None:
        state = self.conn.their_state
        if state is not self.timed and not self.is_refused:
            self._cancel_timer()
            self.timed = state
            limit = {h11.IDLE: HEAD_S, h11.SEND_BODY: BODY_S}.get(state)
            if limit is not None:
                error = APIError(408, TOO_SLOW.format(limit), code="request_timeout")
                self.timer = self.loop.call_later(limit, self._refuse, error)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _refuse(self, error: APIError) -> None:
        """Send the error, read the client's remaining bytes for a while, and close the connection.

        If the connection were closed while bytes arrive, it would be reset, and the client could lose the answer.
        """
        self._cancel_timer()
        self._unset_keepalive_if_required()
        self.is_refused = True
        if self.transport.is_closing():
            return
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.server.metrics.http.note(OTHER, OTHER, error.status_code, 0.0)  # the middleware did not see it
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun, so an error can no longer be sent
            return
        scope: Scope = {"path": ""}
        if self.conn.their_state is h11.SEND_BODY:  # otherwise `self.scope` is that of the connection's last request
            scope = {**self.scope}
        body = bytes(error.response(scope).body)
        head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        if self.cycle is not None:  # end the task that waits for the rest of the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.timer = self.loop.call_later(LINGER_S, self.transport.close)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which loads the model after it has started, and drains at a signal."""

    def __init__(self, app: FastAPI) -> None:
        proxies = list(app.state.server.options.forwarded_allow_ips)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                http=HTTPProtocol,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=proxies,
                timeout_graceful_shutdown=CLOSE_S,
                timeout_keep_alive=app.state.server.options.timeout_keep_alive_s,
                **app.state.server.options.tls,
            )
        )
        self.state: Server = app.state.server
        self._app = app
        self._must_end = asyncio.Event()
        self._must_hurry = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first starts to drain, the second ends the server immediately."""
        (self._must_hurry if self._must_end.is_set() else self._must_end).set()

    async def run_until_signal(
        self,
        listening: socket.socket,
        load: Callable[[], AsyncLLM],
        announce: Callable[[AsyncLLM], None],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until a signal arrives, then drain. Raises the errors of `load`.

        load: loads the engine; it runs in a thread while the socket already listens.
        announce: called when the engine is loaded.
        abandon: called at a signal while `load` runs. If it does not end the process, the server waits for `load`.
        """
        serving = asyncio.create_task(self.serve(with_copies(listening)))
        ending = asyncio.create_task(self._must_end.wait())
        loading = asyncio.create_task(asyncio.to_thread(load))
        try:
            await asyncio.wait((serving, ending, loading), return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and not loading.done():
                abandon()
            llm = await loading  # a thread cannot be stopped
            set_engine(self._app, llm)
            announce(llm)
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
            await self._drain(llm)
            llm.shutdown()
        finally:
            self.should_exit = True
            await serving
            ending.cancel()

    async def _drain(self, llm: AsyncLLM) -> None:
        """Refuse new requests, wait for those in progress, and abort those that take too long."""
        self.state.is_draining = True
        logger.info("draining: %d requests in progress", self.state.num_in_progress)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self.state.options.drain_timeout_s
        while self.state.num_in_progress and loop.time() < give_up and not self._must_hurry.is_set():
            await asyncio.sleep(0.02)
        if self.state.num_in_progress:
            logger.warning("%d requests are aborted", self.state.num_in_progress)
            await llm.abort_all()
            await asyncio.sleep(0.2)  # so that their clients get the tokens computed so far


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Port 0 selects a free port.

    Raises OSError with host and port if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # accepted connections inherit these options, which detect clients that vanish without closing
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PATIENCE_S)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a name that can be looked up
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OSError(f"cannot listen on --host {host} --port {port}: {reason}") from error
    return listening


def with_copies(listening: socket.socket) -> list[socket.socket]:
    """Return a listening socket and copies of it, which accept `NUM_ACCEPTED` connections in each turn of the loop.

    uvloop accepts one connection of a socket in each turn. In a burst, a new connection would wait for as many turns as
    there are connections before it. Each copy accepts one of the connections that wait.
    """
    return [listening, *(listening.dup() for _ in range(NUM_ACCEPTED - 1))]
