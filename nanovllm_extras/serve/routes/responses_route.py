"""Handle `POST /v1/responses`: answer a request, and return the response whole or as a stream of events.

Responses are not stored: a client sends the whole conversation each time, and `previous_response_id` is refused.
https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestOutput
from nanovllm_extras.serve.answer import Answer
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import as_api_error, renamed_fields
from nanovllm_extras.serve.generation import Generation
from nanovllm_extras.serve.messages.responses_protocol import ResponsesRequest
from nanovllm_extras.serve.miss_causes import misses_field
from nanovllm_extras.serve.openai_logprobs import chat_logprobs
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.routes.chat_route import prepare_chat
from nanovllm_extras.serve.routes.responses_conversation import FIELDS, to_chat
from nanovllm_extras.serve.routes.responses_items import Event, OutputItems
from nanovllm_extras.serve.state import ReadyServer
from nanovllm_extras.serve.streaming import EventStream, Written, answer_whole, named_event
from nanovllm_extras.serve.workers import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

router = APIRouter(route_class=JSONRoute)

TOLD = ("instructions", "max_output_tokens", "metadata", "text", "reasoning", "tool_choice")
DEFAULTS = {"metadata": {}, "text": {"format": {"type": "text"}}, "tool_choice": "auto"}
ABORTED = "the request was aborted before its end"


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, server: ReadyServer) -> Response:
    """Answer a conversation of items."""
    server.check_model(body.model)
    engine = server.check_ready().engine
    with renamed_fields(FIELDS):
        chat = await server.workers.run(request, lambda check: to_chat(body, server.bounds))
        prompt, params = await prepare_chat(server, request, chat)
        generation = Generation(server, new_id("resp", request).replace("-", "_", 1), [prompt], params)
        await generation.start(request, chat, "messages")
    answer = Answer(chat, prompt, server.options.parsers, server.token_bytes)
    growing = GrowingResponse(body, answer, generation, server.model_name, engine.tokenizer, server.token_bytes)
    if body.stream:
        return ResponseStream(generation, growing)
    return await answer_whole(request, generation, growing.whole)


class GrowingResponse:
    """One response while it is generated."""

    def __init__(
        self,
        body: ResponsesRequest,
        answer: Answer,
        generation: Generation,
        model_name: str,
        tokenizer: "PreTrainedTokenizerBase | None",
        token_bytes: TokenBytes,
    ) -> None:
        self._body = body
        self._generation = generation
        self._params = generation.params
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._answer = answer
        self._num_top = (body.top_logprobs or 0) if body.wants_logprobs else None
        self._token_bytes = token_bytes
        self._items = OutputItems({one.chat_name: one.names for one in body.functions})
        self._num_chars = self._num_tokens = 0

    def whole(self) -> dict[str, object]:
        """Return the JSON of the whole response."""
        (output,) = self._generation.latest.values()
        self._grow(output.outputs[0])
        return self._describe(output)

    async def events(self) -> AsyncIterator[Iterable[dict[str, object]]]:
        """Yield the events of the stream, several at a time."""
        started = self._describe(None)
        yield [{"type": f"response.{state}", "response": started} for state in ("created", "in_progress")]
        async for outputs in self._generation.outputs():
            for output in outputs:
                yield self._events_of(output)

    def _events_of(self, output: RequestOutput) -> Iterator[dict[str, object]]:
        yield from self._grow(output.outputs[0])
        if output.finished:
            response = self._describe(output)
            yield {"type": f"response.{response['status']}", "response": response}

    def failed(self, error: Exception) -> dict[str, object]:
        """Return the last event of a response that has failed."""
        told = as_api_error(error)
        failure = {"code": "server_error", "message": told.detail}
        return {"type": "response.failed", "response": self._describe(None, "failed") | {"error": failure}}

    def _grow(self, completion: CompletionOutput) -> list[Event]:
        """Add the new text and tokens to the items, and return the events for them."""
        reason = completion.finish_reason
        token_ids = completion.token_ids[self._num_tokens :]
        deltas = self._answer.feed(completion.text[self._num_chars :], token_ids, reason is not None)
        logprobs: list[Written] = []
        if self._num_top is not None and completion.logprobs is not None:
            new = slice(self._num_tokens, None)
            logprobs = chat_logprobs(completion.logprobs[new], token_ids, self._num_top, self._token_bytes)["content"]
        self._num_chars, self._num_tokens = len(completion.text), len(completion.token_ids)
        events = self._items.feed(deltas, logprobs)
        if reason is not None:
            is_complete = reason == "stop" and not self._answer.is_cut_off
            events += self._items.finish("completed" if is_complete else "incomplete")
        return events

    def _describe(self, output: RequestOutput | None, status: str = "in_progress") -> dict[str, object]:
        """Return the JSON of the response in its current state. output: that of the finished request, else None."""
        given = self._body.model_dump(include=set(TOLD), exclude_none=True, by_alias=True)
        response = {
            "id": self._generation.request_id,
            "object": "response",
            "created_at": self._generation.created,
            "model": self._model_name,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._items.items),
            "usage": None,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "tools": self._body.usable_tools,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "background": False,
            **{name: given.get(name, DEFAULTS.get(name)) for name in TOLD},
        }
        return response if output is None else response | self._end(output) | misses_field(self._body, output)

    def _end(self, output: RequestOutput) -> dict[str, object]:
        """Return the status and the usage of a finished request."""
        (completion,) = output.outputs
        usage = self._usage(output)
        if completion.finish_reason == "stop" and self._answer.is_cut_off:
            return {"status": "incomplete", "incomplete_details": {"reason": "stop"}, "usage": usage}
        if completion.finish_reason == "stop":
            return {"status": "completed", "usage": usage}
        if completion.finish_reason == "length":
            return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": usage}
        message = str(completion.stop_reason or ABORTED)
        return {"status": "failed", "error": {"code": "server_error", "message": message}, "usage": usage}

    def _usage(self, output: RequestOutput) -> dict[str, object]:
        num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        thoughts = self._items.reasoning
        num_thoughts = 0
        if thoughts and self._tokenizer is not None:
            num_thoughts = len(self._tokenizer.encode(thoughts, add_special_tokens=False))
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_thoughts, num_output)},
            "total_tokens": num_input + num_output,
        }


class ResponseStream(EventStream):
    """Sends events with a name and a number. The last event contains the status of the response."""

    repeats = True

    def __init__(self, generation: Generation, growing: GrowingResponse) -> None:
        super().__init__(generation, growing.events())
        self._growing = growing
        self._num_events = 0

    def encode(self, value: dict[str, object], check: Check | None = None) -> bytes:
        numbered = value | {"sequence_number": self._num_events}
        self._num_events += 1
        return named_event(str(value["type"]), numbered, check)

    def encode_end(self, error: Exception | None) -> bytes:
        return b"" if error is None else self.encode(self._growing.failed(error))
