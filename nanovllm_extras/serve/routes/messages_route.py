"""Handle `POST /v1/messages`: answer a conversation in Anthropic's form, whole or as a stream of events.

The route translates: `messages_conversation.py` converts the request to a chat, and `messages_blocks.py` converts the
chat's answer to blocks and events. https://docs.anthropic.com/en/api/messages
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

from fastapi import APIRouter, Request, Response

from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestOutput
from nanovllm_extras.serve.answer import Answer
from nanovllm_extras.serve.anthropic_errors import request_id_of
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError, as_api_error, renamed_fields
from nanovllm_extras.serve.generation import Generation
from nanovllm_extras.serve.messages.anthropic_protocol import AnthropicErrorBody, CountTokensRequest, MessagesRequest
from nanovllm_extras.serve.miss_causes import misses_field
from nanovllm_extras.serve.prompts import chat_prompt
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.routes.chat_route import prepare_chat
from nanovllm_extras.serve.routes.messages_blocks import ContentBlocks, Event
from nanovllm_extras.serve.routes.messages_conversation import FIELDS, to_chat, to_tokenize
from nanovllm_extras.serve.state import ReadyServer
from nanovllm_extras.serve.streaming import JSON, EventStream, answer_whole, named_event
from nanovllm_extras.serve.workers import Check

ERRORS: dict[int | str, dict[str, object]] = {
    "4XX": {"model": AnthropicErrorBody, "description": "The request is invalid"},
    "5XX": {"model": AnthropicErrorBody, "description": "The server is not ready, or has failed"},
}
router = APIRouter(route_class=JSONRoute, responses=ERRORS)

PING: Event = {"type": "ping"}
PING_S = 10.0
"""The time in seconds after which a stream that waits for its first token sends a ping."""
ABORTED = "the request was aborted before its end; send it again"


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request, server: ReadyServer) -> Response:
    """Answer a conversation of blocks."""
    server.check_model(body.model)
    with renamed_fields(FIELDS):
        engine = server.check_ready().engine
        limits_thinking = engine.input_processor.limits_thinking and not server.options.parsers.is_harmony
        chat = await server.workers.run(request, lambda check: to_chat(body, server.bounds, limits_thinking))
        prompt, params = await prepare_chat(server, request, chat)
        generation = Generation(server, new_id("msg", request).replace("-", "_", 1), [prompt], params)
        await generation.start(request, chat, "messages")
    answer = Answer(chat, prompt, server.options.parsers, server.token_bytes)
    growing = GrowingMessage(
        body, answer, generation, server.name_in_answers(body.model), len(prompt["prompt_token_ids"])
    )
    if body.stream:
        return MessageStream(generation, growing, request_id_of(request.scope))
    return await answer_whole(request, generation, growing.whole)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request, server: ReadyServer) -> Response:
    """Return the number of tokens of the prompt that a message with these fields would have."""
    server.check_model(body.model)
    tokenizer, bounds = server.check_ready().engine.tokenizer, server.bounds

    def count(check: Check) -> int:
        prompt = chat_prompt(bounds.tokenizer(tokenizer, check), bounds, to_tokenize(body, bounds))
        return len(prompt["prompt_token_ids"])

    return JSON({"input_tokens": await server.workers.run(request, count)})


class GrowingMessage:
    """One message while it is generated."""

    def __init__(
        self, body: MessagesRequest, answer: Answer, generation: Generation, model_name: str, num_prompt_tokens: int
    ) -> None:
        self._body = body
        self._answer = answer
        self._generation = generation
        self._model_name = model_name
        self._num_prompt_tokens = num_prompt_tokens
        self._content = ContentBlocks()
        self._is_started = False
        self._num_chars = self._num_tokens = 0

    def whole(self) -> dict[str, object]:
        """Return the JSON of the whole message. Raises APIError if it was aborted."""
        (output,) = self._generation.latest.values()
        self._grow(output.outputs[0])
        head = self._head() | {"content": self._content.blocks} | self._stop(output.outputs[0])
        return head | {"usage": self._usage(output)} | misses_field(self._body, output)

    async def events(self) -> AsyncIterator[Iterable[Event]]:
        """Yield the events of the stream, several at a time. Raises APIError if the request is aborted."""
        generating = self._generation.outputs()
        first = asyncio.ensure_future(anext(generating))
        try:
            while not (await asyncio.wait((first,), timeout=PING_S))[0]:
                yield [PING] if self._is_started else self._start(None)
        finally:  # this has no effect if it is done
            first.cancel()
        yield self._events_of(first.result())
        async for outputs in generating:
            yield self._events_of(outputs)

    def _events_of(self, outputs: list[RequestOutput]) -> Iterator[Event]:
        for output in outputs:
            if not self._is_started:
                yield from self._start(output)
            yield from self._grow(output.outputs[0])
            if output.finished:
                stop, usage = self._stop(output.outputs[0]), self._usage(output)
                yield {"type": "message_delta", "delta": stop, "usage": usage} | misses_field(self._body, output)
                yield {"type": "message_stop"}

    def _start(self, output: RequestOutput | None) -> list[Event]:
        """Return the first events. output: None before the first token, when the prefix cache's hits are unknown."""
        self._is_started = True
        usage = usage_of(self._num_prompt_tokens, 0, 0) if output is None else self._usage(output)
        stop = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": self._head() | {"content": [], **stop, "usage": usage}}, PING]

    def _grow(self, completion: CompletionOutput) -> list[Event]:
        """Add the new text and tokens to the blocks, and return the events for them."""
        is_last = completion.finish_reason is not None
        token_ids = completion.token_ids[self._num_tokens :]
        deltas = self._answer.feed(completion.text[self._num_chars :], token_ids, is_last)
        self._num_chars, self._num_tokens = len(completion.text), len(completion.token_ids)
        return self._content.feed(deltas) + (self._content.finish() if is_last else [])

    def _head(self) -> dict[str, object]:
        request_id = self._generation.request_id
        return {"id": request_id, "type": "message", "role": "assistant", "model": self._model_name}

    def _stop(self, completion: CompletionOutput) -> dict[str, object]:
        """Return why a finished message has ended. Raises APIError if it was aborted."""
        reason, sequence = completion.finish_reason, completion.stop_reason
        if reason == "length":
            is_told = len(completion.token_ids) >= self._body.max_tokens
            return {"stop_reason": "max_tokens" if is_told else "model_context_window_exceeded", "stop_sequence": None}
        if reason != "stop":
            raise APIError(503, str(sequence or ABORTED))
        if self._answer.finish_reason("stop") == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if sequence in (self._body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, output: RequestOutput) -> dict[str, int]:
        num_output = len(output.outputs[0].token_ids)
        return usage_of(len(output.prompt_token_ids), output.num_cached_tokens, num_output)


def usage_of(num_prompt: int, num_cached: int, num_output: int) -> dict[str, int]:
    """Return Anthropic's usage, whose `input_tokens` do not include the tokens of the prefix cache's hits."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


class MessageStream(EventStream):
    """Sends events with a name. The last event is `message_stop`, or an error."""

    def __init__(self, generation: Generation, growing: GrowingMessage, request_id: str | None) -> None:
        super().__init__(generation, growing.events())
        self._request_id = request_id

    def encode(self, value: dict[str, object], check: Check | None = None) -> bytes:
        return named_event(str(value["type"]), value, check)

    def encode_end(self, error: Exception | None) -> bytes:
        return b"" if error is None else self.encode(as_api_error(error).anthropic_body(self._request_id))
