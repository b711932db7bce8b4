"""Answer rows with one engine: a replica calls the server's application directly, without a socket.

    rows of a chunk ─ask→ app (the same checks and answers as over HTTP) ─→ AsyncLLM ─→ answers of the chunk

The number of rows in flight is limited. Rows of the next chunk start before the last rows of this chunk are done, so
that the engine's batch stays full. `one_machine.py` has one replica, `ray_data.py` has one in each actor.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from starlette.types import ASGIApp, Message

from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.batch.attempts import Attempt, count_engine
from nanovllm_extras.serve.batch.rows import Row, writable
from nanovllm_extras.serve.engine_thread import EngineDeadError
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions

logger = logging.getLogger(__name__)

MAX_TRIES = 3  # for a row whose step has failed; during the last try, no other row is computed
BUSY_S = 0.05  # delay before the next try, while the server reads too many large bodies


class Reply(NamedTuple):
    """The response that a client of the server would get."""

    status: int
    request_id: str
    body: dict[str, Any]

    @property
    def code(self) -> str | None:
        """The code of the error; None if there is no error."""
        error = self.body.get("error")
        return error.get("code") if isinstance(error, dict) else None


@dataclass(frozen=True)
class ReplicaSpec:
    """The parameters of a replica. It can be sent to another process."""

    load: Callable[[], AsyncLLM]
    options: ServerOptions
    attempts: Path
    """The folder of attempts, on a disk that all processes share."""
    run: str
    """The random name of this run."""
    max_in_flight: int
    """The maximum number of rows that are computed at the same time."""
    num_replicas: int = 1

    def start(self) -> "Replica":
        """Load the engine."""
        return Replica(self)


class Replica:
    """One engine that answers rows, used from one event loop. `shutdown` ends the engine."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        count_engine(spec.attempts, spec.run, spec.num_replicas)
        self.llm = spec.load()
        self._app = make_app(spec.options, self.llm)
        self._places = Places(spec.max_in_flight)

    async def answer(self, rows: list[Row]) -> list[dict[str, object]]:
        """Return the answers in the format of `parts.SCHEMA`, in the order of `rows`. Raises EngineDeadError."""
        self.llm.thread.check_health()  # if the engine is already dead, this is not an attempt
        attempt = Attempt(self._spec.attempts, self._spec.run, [row.custom_id for row in rows])
        answering = [asyncio.ensure_future(self._answer_one(row, attempt)) for row in rows]
        try:
            answers = await asyncio.gather(*answering)
        finally:
            for one in answering:
                one.cancel()
        attempt.end()
        return answers

    async def _answer_one(self, row: Row, attempt: Attempt) -> dict[str, object]:
        if row.code:
            return refused(row, row.code, row.message)
        if row.custom_id in attempt.given_up:
            return refused(row, "engine_dead", "the engine has died each time that it computed this row")
        for i in range(MAX_TRIES):
            async with self._places.taken(attempt.is_alone or i == MAX_TRIES - 1):
                if attempt.is_alone:
                    self.llm.thread.check_health()  # do not blame this row if the previous one killed the engine
                    attempt.note(row.custom_id)
                reply = await self._ask(row)
                if attempt.is_alone:
                    attempt.note(None)
            if reply.code != "internal_error":
                break
        return answered(row, reply)

    async def _ask(self, row: Row) -> Reply:
        try:
            while (reply := await post(self._app, row.url, row.body.encode())).code == "busy":
                await asyncio.sleep(BUSY_S)
        except Exception as error:  # a bug in the application; like uvicorn, log it and continue with other requests
            logger.exception("%s: the application has failed", row.custom_id)
            error_body = {"message": f"the application has failed: {error!r}", "code": "internal_error"}
            return Reply(500, "", {"error": error_body})
        if reply.code == "engine_dead":
            self.llm.thread.check_health()
            raise EngineDeadError("the engine is dead")
        return reply

    def shutdown(self) -> None:
        """End the engine."""
        self.llm.shutdown()


class Places:
    """A semaphore for `num` rows, first come, first served. A row can also acquire all places."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._free = asyncio.Semaphore(num)
        self._turn = asyncio.Lock()  # one row at a time collects all places

    @asynccontextmanager
    async def taken(self, all_of_them: bool) -> AsyncIterator[None]:
        """Hold one place, or all places, within the context."""
        num_taken = 0
        try:
            if all_of_them:
                async with self._turn:
                    while num_taken < self._num:
                        await self._free.acquire()
                        num_taken += 1
                    yield
            else:
                await self._free.acquire()
                num_taken = 1
                yield
        finally:
            for _ in range(num_taken):
                self._free.release()


# ---- requests


async def post(app: ASGIApp, path: str, body: bytes) -> Reply:
    """Send a POST request with JSON to an application of this process, through ASGI (https://asgi.readthedocs.io).

    `httpx.ASGITransport` does the same but takes three times the processor time.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    unread = [body]
    chunks: list[bytes] = []
    start: Message = {}

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.Future()  # never resolves: this client does not disconnect

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    names = {name.lower(): value for name, value in start["headers"]}
    request_id = names.get(b"x-request-id", b"").decode()
    return Reply(start["status"], request_id, json.loads(b"".join(chunks)))


# ---- answers


def refused(row: Row, code: str, message: str) -> dict[str, object]:
    """Return the error of a row that was not sent to the application."""
    return with_error(row, None, code, message)


def answered(row: Row, reply: Reply) -> dict[str, object]:
    """Return the answer of a row from the application's response."""
    body = json.dumps(reply.body, separators=(",", ":"))
    response: dict[str, object] = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    if reply.status != 200:
        error = reply.body.get("error") or {}
        return with_error(row, response, error.get("code") or error.get("type") or "error", error.get("message") or "")
    usage = reply.body.get("usage") or {}
    return {
        **with_error(row, response, None, ""),
        "text": text_of(reply.body),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
    }


def with_error(row: Row, response: dict[str, object] | None, code: str | None, message: str) -> dict[str, object]:
    """Return a row of OpenAI's batch output. Its `error` is null if `code` is None."""
    return {
        "custom_id": row.custom_id,
        "id": f"batch_req_{uuid4().hex}",
        "response": response,
        "error": None if code is None else {"code": code, "message": writable(message)},
    }


def text_of(body: dict[str, Any]) -> str | None:
    """Return the text of the first choice; None if the response has no choices, such as embeddings."""
    with suppress(KeyError, IndexError, TypeError):
        choice = body["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return None if text is None else writable(text)
    return None
