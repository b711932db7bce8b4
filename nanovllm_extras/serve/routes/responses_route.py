"""Handle `POST /v1/responses`: answer a request, and return the response whole or as a stream of events.

A response continues the one of `previous_response_id`, and is stored for later requests (`response_store.py`).
https://platform.openai.com/docs/api-reference/responses
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from nanovllm_extras.serve.answer import Answer
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError, renamed_fields
from nanovllm_extras.serve.generation import Generation
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest
from nanovllm_extras.serve.messages.responses_protocol import ResponsesRequest
from nanovllm_extras.serve.prompts import chat_prompt
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.response_store import Turn
from nanovllm_extras.serve.routes.chat_route import prepare_chat
from nanovllm_extras.serve.routes.growing_response import Destination, GrowingResponse
from nanovllm_extras.serve.routes.responses_conversation import FIELDS, to_chat
from nanovllm_extras.serve.routes.responses_history import (
    Conversation,
    History,
    find_history,
    read_conversation,
)
from nanovllm_extras.serve.routes.responses_truncation import without_oldest
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import (
    JSON,
    EventStream,
    answer_whole,
    named_event,
    read_log,
)
from nanovllm_extras.serve.workers import Check

router = APIRouter(route_class=JSONRoute)

SOON = {"Retry-After": "1"}


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, server: ReadyServer) -> Response:
    """Answer a conversation of items."""
    server.check_model(body.model)
    if body.background:
        with ExitStack() as held:
            held.enter_context(background_place(server))
            generation, growing = await begin(body, request, server)
            held.enter_context(growing.listed())
            stream = ResponseStream(generation, growing)
            return start_background(server, growing, stream.parts(str(request.state.caller)), held.pop_all())
    generation, growing = await begin(body, request, server)
    if body.stream:
        return ResponseStream(generation, growing)
    with growing.listed():
        response = await answer_whole(request, generation, growing.whole)
        growing.keep(bytes(response.body))
    return response


async def begin(body: ResponsesRequest, request: Request, server: Server) -> tuple[Generation, GrowingResponse]:
    """Queue the request at the engine, and return its generation and its response."""
    is_stored = body.store is not False and server.responses.bounds.is_on
    with renamed_fields(FIELDS):
        history, conversation, chat = await read_request(body, request, server)
        prompt, params = await prepare_chat(server, request, chat)
        own_id = server.responses.new_id("resp")
        name = new_id("resp", request).replace("-", "_", 1) if request.state.given_id else own_id
        generation = Generation(server, name, [prompt], params)
        await generation.start(request, chat, "messages")
    answer = Answer(chat, prompt, server.options.parsers, server.token_bytes)
    destination = None
    if is_stored:
        destination = Destination(server.owner_of(request), Turn(conversation.input, [], history.parent))
    # a name that a client has chosen could be guessed
    return generation, GrowingResponse(body, answer, generation, server, own_id if is_stored else name, destination)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponsesRequest, request: Request, server: ReadyServer) -> Response:
    """Return the number of tokens of the prompt that a request would have."""
    server.check_model(body.model)
    engine = server.check_ready().engine
    with renamed_fields(FIELDS):
        chat = (await read_request(body, request, server))[2]
        bounds = server.bounds.of_prompts(chat)
        prompt = await server.workers.run(
            request, lambda check: chat_prompt(bounds.tokenizer(engine.tokenizer, check), bounds, chat)
        )
    return JSON({"object": "response.input_tokens", "input_tokens": len(prompt["prompt_token_ids"])})


async def read_request(
    body: ResponsesRequest, request: Request, server: Server
) -> tuple[History, Conversation, ChatCompletionRequest]:
    """Return what a request needs of the store, all its items, and the request for a chat. Raises APIError."""
    store, bounds, engine = server.responses, server.bounds, server.check_ready().engine
    history = find_history(store, server.owner_of(request), body, bounds)
    request.state.num_bytes += history.num_bytes  # they decide whether the work runs in a thread

    def read(check: Check) -> tuple[Conversation, ChatCompletionRequest]:
        conversation = read_conversation(body, history, bounds, store.new_id)
        chat = to_chat(body, conversation.items)
        if body.truncation == "auto":
            chat = without_oldest(chat, bounds, lambda: bounds.tokenizer(engine.tokenizer, check))
        return conversation, chat

    return history, *(await server.workers.run(request, read))


@contextmanager
def background_place(server: Server) -> Iterator[None]:
    """Hold one of the places for responses in the background. Raises APIError if there is none."""
    most = server.responses.bounds.max_responses
    if not server.responses.bounds.is_on:
        raise APIError(400, "background cannot be used: this server stores no responses", "background")
    if server.num_in_background >= most:
        message = f"{most} responses are already generated in the background; try again later"
        raise APIError(429, message, code="queue_full", headers=SOON)
    server.num_in_background += 1
    try:
        yield
    finally:
        server.num_in_background -= 1


def start_background(
    server: Server, growing: GrowingResponse, events: AsyncIterator[bytes], held: ExitStack
) -> Response:
    """Start to generate a response, and return what the client gets: its events, or its first state."""
    first = Response(growing.answer, media_type="application/json") if growing.log is None else read_log(growing.log)
    task = asyncio.create_task(generate(growing, events, held))
    server.background.add(task)
    task.add_done_callback(server.background.discard)
    return first


async def generate(growing: GrowingResponse, events: AsyncIterator[bytes], held: ExitStack) -> None:
    """Generate a response to its end. held: is closed at the end."""
    with held:
        try:
            async for part in events:
                if growing.log is not None:
                    growing.log.add(part)
        finally:
            growing.close()


class ResponseStream(EventStream):
    """Sends events with a name and a number. The last event contains the status of the response."""

    repeats = True

    def __init__(self, generation: Generation, growing: GrowingResponse) -> None:
        super().__init__(generation, growing.events())
        self._growing = growing
        self._num_events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._growing.listed():
            await super().__call__(scope, receive, send)

    def encode(self, value: dict[str, object], check: Check | None = None) -> bytes:
        numbered = value | {"sequence_number": self._num_events}
        self._num_events += 1
        return named_event(str(value["type"]), numbered, check)

    def encode_end(self, error: Exception | None) -> bytes:
        return b"" if error is None else self.encode(self._growing.failed(error))
