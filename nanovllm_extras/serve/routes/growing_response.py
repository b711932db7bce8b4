"""Describe a response while it is generated: its JSON, the events of its stream, and what is stored at its end."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from nanovllm_extras.answer_parts.text_offsets import TokenPieces
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestOutput
from nanovllm_extras.serve.answer import Answer
from nanovllm_extras.serve.errors import as_api_error
from nanovllm_extras.serve.event_log import EventLog
from nanovllm_extras.serve.generation import Generation
from nanovllm_extras.serve.messages.responses_protocol import ResponsesRequest
from nanovllm_extras.serve.miss_causes import misses_field
from nanovllm_extras.serve.openai_logprobs import chat_logprobs
from nanovllm_extras.serve.response_store import StoredResponse, Turn
from nanovllm_extras.serve.routes.responses_history import stored_output
from nanovllm_extras.serve.routes.responses_items import Event, OutputItems
from nanovllm_extras.serve.state import Server
from nanovllm_extras.serve.streaming import LONG_ANSWER, encode, go_on

TOLD = ("instructions", "max_output_tokens", "metadata", "text", "reasoning", "tool_choice", "previous_response_id")
DEFAULTS = {"metadata": {}, "text": {"format": {"type": "text"}}, "tool_choice": "auto"}
CUT_OFF = "max_output_tokens"
"""The reason of a response that a stop string has ended within a call: OpenAI's schema has none that fits better."""
ABORTED = "the request was aborted before its end"


class Destination(NamedTuple):
    """How a response is stored. turn: gets the output at the end."""

    owner: str
    turn: Turn


class GrowingResponse:
    """One response while it is generated. destination: None if it is not stored."""

    def __init__(
        self,
        body: ResponsesRequest,
        answer: Answer,
        generation: Generation,
        server: Server,
        response_id: str,
        destination: Destination | None,
    ) -> None:
        engine = server.check_ready().engine
        self._body = body
        self._generation = generation
        self._params = generation.params
        self._model_name = server.name_in_answers(body.model)
        self._engine = engine
        self._id = response_id
        self._destination = destination
        self._store = server.responses
        self._answer = answer
        self._num_top = (body.top_logprobs or 0) if body.wants_logprobs else None
        self._token_bytes = server.token_bytes
        self._items = OutputItems({one.chat_name: one.names for one in body.functions}, self._store.new_id)
        self._status = "queued" if body.background else "in_progress"
        self.log = EventLog() if body.background and body.stream else None
        self._pieces: TokenPieces | None = None
        self._num_chars = self._num_tokens = 0
        self._is_cancelled = False
        self._has_ended = asyncio.Event()

    @contextmanager
    def listed(self) -> Iterator[None]:
        """While the block runs, the response can be read and cancelled."""
        if self._destination is not None:
            self._store.begin(self._destination.owner, self._id, self)
        try:
            yield
        finally:
            self._store.end(self._id)
            self._has_ended.set()

    @property
    def turn(self) -> Turn:
        """The input, and the turns before it, of a response that will be stored."""
        assert self._destination is not None
        return self._destination.turn

    @property
    def answer(self) -> bytes:
        """The JSON of the response in its current state."""
        return encode(self._describe(None), go_on)

    async def cancel(self) -> None:
        """Abort the generation, and return when the response has ended."""
        self._is_cancelled = True
        await self._generation.cancel()
        await self._has_ended.wait()

    def keep(self, answer: bytes) -> None:
        """Store the response, if it shall be stored. answer: its JSON."""
        if self._destination is not None:
            owner, turn = self._destination
            turn.output = [stored_output(item) for item in self._items.items]
            log_bytes = 0 if self.log is None else self.log.num_bytes + len(answer)  # the last event has the answer
            is_background = bool(self._body.background)
            self._store.put(StoredResponse(self._id, owner, answer, turn, is_background, self.log, log_bytes))

    def close(self) -> None:
        """End the generation, and the log."""
        self._generation.close()
        if self.log is not None:
            self.log.end()

    def whole(self) -> dict[str, object]:
        """Return the JSON of the whole response."""
        (output,) = self._generation.latest.values()
        self._grow(output)
        return self._describe(output)

    async def events(self) -> AsyncIterator[Iterable[dict[str, object]]]:
        """Yield the events of the stream, several at a time."""
        started = self._describe(None)
        yield [{"type": f"response.{state}", "response": started} for state in ("created", self._status)]
        async for outputs in self._generation.outputs():
            if self._status == "queued":
                self._status = "in_progress"
                yield [{"type": "response.in_progress", "response": self._describe(None)}]
            for output in outputs:
                events = self._grow(output)
                if output.finished:
                    events.append(await self._end_event(output))
                yield events

    async def _end_event(self, output: RequestOutput) -> Event:
        """Return the last event. It is sent when the response has been stored, so that it can be continued."""
        response = self._describe(output)
        if self._destination is not None:
            is_long = self._num_tokens * (1 + (self._params.logprobs or 0)) > LONG_ANSWER
            write, owner = self._generation.workers.write, self._destination.owner
            self.keep(await write(owner, partial(encode, response)) if is_long else encode(response, go_on))
        kind = "incomplete" if response["status"] == "cancelled" else response["status"]
        return {"type": f"response.{kind}", "response": response}

    def failed(self, error: Exception) -> dict[str, object]:
        """Return the last event of a response that has failed."""
        told = as_api_error(error)
        failure = {"code": "server_error", "message": told.detail}
        response = self._describe(None, "failed") | {"error": failure}
        if self._body.background:  # no other answer has the error
            self.keep(encode(response, go_on))
        return {"type": "response.failed", "response": response}

    def _grow(self, output: RequestOutput) -> list[Event]:
        """Add the new text and tokens to the items, and return the events for them."""
        (completion,) = output.outputs
        reason = completion.finish_reason
        if self._num_top is not None and completion.logprobs is not None and completion.token_ids:
            events = self._grow_by_token(output, completion, self._num_top)
        else:
            token_ids = completion.token_ids[self._num_tokens :]
            deltas = self._answer.feed(completion.text[self._num_chars :], token_ids, reason is not None)
            events = self._items.feed(deltas, [])
        self._num_chars, self._num_tokens = len(completion.text), len(completion.token_ids)
        if reason is not None:
            is_complete = reason == "stop" and not self._answer.is_cut_off
            events += self._items.finish("completed" if is_complete else "incomplete")
        return events

    def _grow_by_token(self, output: RequestOutput, completion: CompletionOutput, num_top: int) -> list[Event]:
        """Add the new tokens one by one, so that each item gets the log-probabilities of its own tokens."""
        if self._pieces is None:
            skips = self._params.skip_special_tokens
            self._pieces = TokenPieces(self._token_bytes, skips, output.prompt_token_ids)
        is_last, positions = completion.finish_reason is not None, completion.logprobs or []
        events: list[Event] = []
        for text, i in self._pieces.read(completion.text, completion.token_ids, is_last):
            token_ids = completion.token_ids[i : i + 1]
            told = chat_logprobs(positions[i : i + 1], token_ids, num_top, self._token_bytes)["content"]
            deltas = self._answer.feed(text, token_ids, is_last and i == len(completion.token_ids))
            events += self._items.feed(deltas, told)
        return events

    def _describe(self, output: RequestOutput | None, status: str | None = None) -> dict[str, object]:
        """Return the JSON of the response in its current state. output: that of the finished request, else None."""
        given = self._body.model_dump(include=set(TOLD), exclude_none=True, by_alias=True)
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._generation.created,
            "model": self._model_name,
            "status": status or self._status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._items.items),
            "usage": None,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "tools": self._body.usable_tools,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "store": self._destination is not None,
            "truncation": self._body.truncation or "disabled",
            "background": bool(self._body.background),
            "completed_at": None,
            **{name: given.get(name, DEFAULTS.get(name)) for name in TOLD},
        }
        return response if output is None else response | self._end(output) | misses_field(self._body, output)

    def _end(self, output: RequestOutput) -> dict[str, object]:
        """Return the status and the usage of a finished request."""
        (completion,) = output.outputs
        usage = self._usage(output)
        if completion.finish_reason == "stop" and self._answer.is_cut_off:
            return {"status": "incomplete", "incomplete_details": {"reason": CUT_OFF}, "usage": usage}
        if completion.finish_reason == "stop":
            return {"status": "completed", "completed_at": int(time.time()), "usage": usage}
        if completion.finish_reason == "length":
            return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": usage}
        if self._is_cancelled:
            return {"status": "cancelled", "usage": usage}
        message = str(completion.stop_reason or ABORTED)
        return {"status": "failed", "error": {"code": "server_error", "message": message}, "usage": usage}

    def _usage(self, output: RequestOutput) -> dict[str, object]:
        num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        thoughts = self._items.reasoning
        num_thoughts = 0
        if thoughts and self._engine.tokenizer is not None:
            num_thoughts = len(self._engine.tokenizer.encode(thoughts, add_special_tokens=False))
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": output.num_cached_tokens,
                "cache_write_tokens": num_cacheable(self._engine, num_input, output.num_cached_tokens),
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_thoughts, num_output)},
            "total_tokens": num_input + num_output,
        }


def num_cacheable(engine: LLMEngine, num_tokens: int, num_cached: int) -> int:
    """Return the number of tokens of a prompt that were added to the prefix cache: those of its new full blocks."""
    if not engine.config.enable_prefix_caching:
        return 0
    return max(0, num_tokens - num_tokens % engine.parts.block_size - num_cached)
