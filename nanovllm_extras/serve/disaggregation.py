"""Send each request to a prefill engine, then to a decode engine: prefill apart from decode.

    request ─max_tokens=1→ prefill engine ─blocks→ shared tier of the K/V store
            ─unchanged───→ decode engine (loads the blocks) ─→ answer

Both engines have the same model and the same shared tier (`kv_transfer_config`). They check requests, the dispatcher
does not. The dispatcher does not know which blocks are in the store. If a block is missing, the decode engine computes
it, so the answer is correct in any case.

An engine is anything that can be called: `front.py` calls servers over HTTP, `ray/replicas.py` calls deployments of Ray
Serve.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from nanovllm_extras.serve.anthropic_errors import OVERLOADED
from nanovllm_extras.serve.body import SHORT_BODY, parse
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.server_options import PREFILL_TIMEOUT_S, ServerOptions
from nanovllm_extras.serve.state import RETRY_LATER

logger = logging.getLogger(__name__)

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""The paths of the requests that a prefill engine gets."""
NOT_PREFILLED = {"stream_options", "max_completion_tokens", "min_tokens", "best_of", "logprobs", "top_logprobs"}
NOT_PREFILLED |= {"echo", "response_format", "structured_outputs", "return_token_ids", "return_prefix_misses"}
NOT_PREFILLED |= {"include", "max_output_tokens", "metadata", "text"}  # of responses
"""Fields that shape the answer and not the prompt. The prefill engine does not get them."""


class UnavailableError(Exception):
    """Raised if an engine fails before the first byte of its answer, so that another engine can be asked."""


class HasBody(Protocol):
    """A client's request."""

    @property
    def body(self) -> bytes: ...


Call = TypeVar("Call", bound=HasBody)
CallOf = TypeVar("CallOf", bound=HasBody, contravariant=True)
Answer = TypeVar("Answer")
AnswerOf = TypeVar("AnswerOf", covariant=True)


class Engine(Protocol[CallOf, AnswerOf]):
    """What a dispatcher calls."""

    @property
    def name(self) -> str:
        """The engine's name in the log."""
        ...

    async def prefill(self, call: CallOf, body: bytes) -> int:
        """Send `call` with another body, and return the status of the whole answer. Raises UnavailableError."""
        ...

    async def answer(self, call: CallOf) -> AnswerOf:
        """Return an answer that has begun. Raises UnavailableError."""
        ...


class Dispatcher(Generic[Call, Answer]):
    """Calls the engines for the clients' requests. decode: these engines take turns.

    max_values: the maximum number of JSON values of a request for the prefill engine.
    """

    def __init__(
        self,
        prefill: Engine[Call, object],
        decode: Sequence[Engine[Call, Answer]],
        prefill_timeout_s: float = PREFILL_TIMEOUT_S,
        max_values: int = ServerOptions.max_request_values,
    ) -> None:
        self._prefill_engine = prefill
        self._decode_engines = decode
        self._prefill_timeout_s = prefill_timeout_s
        self._max_values = max_values
        self._turn = 0
        self._down: set[str] = set()  # names of engines whose last call failed

    async def generate(self, call: Call) -> Answer:
        """Return the answer to a request that generates tokens. Raises APIError 503 if no decode engine is ready."""
        await self._prefill(call)
        return await self.answer(call)

    async def answer(self, call: Call, first_name: str | None = None) -> Answer:
        """Return the answer of the first decode engine that begins one. Raises APIError 503 if there is none.

        first_name: the name of the engine that is asked first; by default they take turns.
        """
        engines = self._decode_engines
        first = next((i for i, engine in enumerate(engines) if engine.name == first_name), None)
        if first is None:
            first = self._turn
            self._turn = (first + 1) % len(engines)
        for i in range(len(engines)):
            engine = engines[(first + i) % len(engines)]
            try:
                answer = await engine.answer(call)
            except UnavailableError as error:
                self._note(engine.name, str(error))
                continue
            self._note(engine.name, None)
            return answer
        raise APIError(503, "no decode engine is ready; try again later", code="unavailable", headers=RETRY_LATER)

    async def _prefill(self, call: Call) -> None:
        """Wait until the prefill engine has computed the prompt and saved its blocks.

        Its answer is not used. If it fails, the decode engine computes the prompt. If the request is invalid, the
        client gets the error of the decode engine.
        """
        body = await prefill_body(call.body, self._max_values)
        if body is None:
            return
        engine = self._prefill_engine
        try:
            status = await asyncio.wait_for(engine.prefill(call, body), self._prefill_timeout_s)
        except (UnavailableError, asyncio.TimeoutError) as error:
            self._note(engine.name, str(error) or f"no answer after {self._prefill_timeout_s} s")
            return
        has_failed = status >= 500 and status != OVERLOADED
        self._note(engine.name, f"status {status}" if has_failed else None)
        if status >= 400 and not has_failed:
            logger.info("prefill engine %s: status %d", engine.name, status)

    def _note(self, name: str, failure: str | None) -> None:
        """Log that an engine has begun to fail, or that it works again: once, not for each request."""
        if failure is not None and name not in self._down:
            logger.warning("engine %s has failed: %s; requests go on without it", name, failure)
            self._down.add(name)
        elif failure is None and name in self._down:
            logger.warning("engine %s works again", name)
            self._down.remove(name)


async def prefill_body(body: bytes, max_values: int = ServerOptions.max_request_values) -> bytes | None:
    """Return the request that computes the prompt of the request `body` and one token, or None if there is none."""
    try:
        is_short = len(body) <= SHORT_BODY
        value = parse(body, max_values) if is_short else await asyncio.to_thread(parse, body, max_values)
    except APIError:
        return None
    if not isinstance(value, dict) or value.get("truncate_prompt_tokens") == -1 or value.get("truncation") == "auto":
        return None  # the prompt depends on max_tokens
    kept: dict[str, object] = {name: one for name, one in value.items() if name not in NOT_PREFILLED}
    limits = {"max_output_tokens": 1, "store": False, "background": False} if "input" in value else {"max_tokens": 1}
    return json.dumps(kept | {**limits, "n": 1, "stream": False}).encode()


def prefill_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a client's request for `prefill_body`, which is another body in JSON."""
    kept = [(name, value) for name, value in headers if not name.startswith(b"content-")]
    return [*kept, (b"content-type", b"application/json")]
