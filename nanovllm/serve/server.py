"""The process: a socket, uvicorn, a model that loads while the socket listens, and an orderly end.

SIGTERM or SIGINT drains: new requests are refused with 503, those in progress finish, and the process exits with 0.
After `drain_timeout_s`, or at a second signal, what is unfinished is aborted: its clients get what there is.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from nanovllm.serve.app import set_engine
from nanovllm.serve.async_llm import AsyncLLM
from nanovllm.serve.state import Server

logger = logging.getLogger(__name__)

CLOSE_S = 5  # after draining, open connections have so long to take their last bytes
MAX_HEADER_BYTES = 64 * 2**10


class DrainingServer(uvicorn.Server):
    """uvicorn's server, but for what a signal does."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                http="h11",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.must_end = asyncio.Event()
        self.must_hurry = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal: the first begins to drain, the second ends at once."""
        if self.must_end.is_set():
            self.must_hurry.set()
        self.must_end.set()


async def serve(
    app: FastAPI, listening: socket.socket, load: Callable[[], AsyncLLM], announce: Callable[[AsyncLLM], None]
) -> int:
    """Serve until a signal comes; the exit status. `load` takes its time in a thread, and `announce` is called then.

    Raises what `load` raises: ValueError or TypeError for a model or options that cannot be served.
    """
    server = DrainingServer(app)
    serving = asyncio.create_task(server.serve([listening]))
    ending = asyncio.create_task(server.must_end.wait())
    loading = asyncio.create_task(asyncio.to_thread(load))
    try:
        await asyncio.wait((serving, ending, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            llm = loading.result()
            set_engine(app, llm)
            announce(llm)
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
            await drain(app.state.server, server.must_hurry)
            llm.shutdown()
    finally:
        server.should_exit = True
        await serving
        ending.cancel()
    return 0


async def drain(state: Server, must_hurry: asyncio.Event) -> None:
    """Refuse what is new, and wait for what is in progress; in the end abort the rest."""
    state.is_draining = True
    logger.info("draining: %d requests in progress", state.num_in_progress)
    loop = asyncio.get_running_loop()
    give_up = loop.time() + state.options.drain_timeout_s
    while state.num_in_progress and loop.time() < give_up and not must_hurry.is_set():
        await asyncio.sleep(0.02)
    if state.num_in_progress and state.llm is not None:
        logger.warning("%d requests are aborted", state.num_in_progress)
        await state.llm.abort_all()
        await asyncio.sleep(0.1)


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; port 0 is any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # accepted connections take this over: a client that has vanished without a word is noticed in the end
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
    listening.bind((host, port))
    listening.listen(2048)
    return listening
