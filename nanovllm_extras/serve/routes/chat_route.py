"""Handle `POST /v1/chat/completions`: answer a conversation, and return the message whole or as a stream.

Read `create_chat_completion` for the life of a request. The rest converts outputs to OpenAI's format.
https://platform.openai.com/docs/api-reference/chat
"""

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from nanovllm.prompts import ChatPrompt
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestOutput
from nanovllm_extras.serve.answer import Answer, merge
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.generation import Generation, usage_of
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest
from nanovllm_extras.serve.miss_causes import misses_field
from nanovllm_extras.serve.openai_logprobs import chat_logprobs
from nanovllm_extras.serve.prompts import chat_prompt
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.sampling import chat_params
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import EventStream, Written, answer_whole
from nanovllm_extras.serve.structured_outputs import compile_structured_outputs

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request, server: ReadyServer) -> Response:
    """Answer a conversation."""
    server.check_model(body.model)
    parsers = server.options.parsers
    prompt, params = await prepare_chat(server, request, body)
    generation = Generation(server, new_id("chatcmpl", request), [prompt], params)
    await generation.start(request, body, "messages")
    answers = [Answer(body, prompt, parsers, server.token_bytes) for _ in range(body.n or 1)]
    chat = Chat(body, generation, server.name_in_answers(body.model), answers, server.token_bytes)
    if body.stream:
        return EventStream(generation, chat.chunks())
    return await answer_whole(request, generation, chat.whole)


async def prepare_chat(
    server: Server, request: Request, body: ChatCompletionRequest
) -> tuple[ChatPrompt, SamplingParams]:
    """Return the prompt, a dict with text and token ids, and its sampling parameters. Raises APIError."""
    engine, parsers, run = server.check_ready().engine, server.options.parsers, partial(server.workers.run, request)
    bounds = server.bounds.of_prompts(body)
    prompt = await run(lambda check: chat_prompt(bounds.tokenizer(engine.tokenizer, check), bounds, body))
    form = await compile_structured_outputs(run, engine, body, parsers)
    return prompt, await run(lambda check: chat_params(body, engine, parsers, form))


class Chat:
    """The answer to a request: `body.n` choices, each with its `Answer`."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        generation: Generation,
        model_name: str,
        answers: list[Answer],
        token_bytes: TokenBytes,
    ) -> None:
        self._body = body
        self._generation = generation
        self._model_name = model_name
        self._choices = [Choice(body, i, answer, token_bytes) for i, answer in enumerate(answers)]
        self._shows_prompt = True  # in the next chunk

    def whole(self) -> dict[str, object]:
        """Return the JSON of the whole answer."""
        (output,) = self._generation.latest.values()
        choices = [self._choices[completion.index].whole(completion) for completion in output.outputs]
        return self._head("chat.completion", choices) | {"usage": usage_of([output])} | self._prompt_fields(output)

    async def chunks(self) -> AsyncIterator[Iterable[dict[str, object]]]:
        """Yield the JSON of the stream's chunks, several at a time."""
        options = self._body.stream_options
        extra: dict[str, object] = {"usage": None} if options and options.include_usage else {}
        async for outputs in self._generation.outputs():
            if options and options.continuous_usage_stats:
                extra = {"usage": usage_of(outputs)}
            yield (
                self._head("chat.completion.chunk", [choice]) | extra | self._prompt_fields(output)
                for output in outputs
                for completion in output.outputs
                for choice in self._choices[completion.index].grow(completion)
            )
        if options and options.include_usage:
            usage = usage_of(list(self._generation.latest.values()))
            yield [self._head("chat.completion.chunk", []) | {"usage": usage}]

    def _prompt_fields(self, output: RequestOutput) -> dict[str, object]:
        """Return the requested fields about the prompt, if the answer does not have them yet."""
        if not self._shows_prompt:
            return {}
        self._shows_prompt = False
        ids = {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}
        return ids | misses_field(self._body, output)

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, object]:
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": self._generation.created,
            "model": self._model_name,
            "choices": choices,
        }


class Choice:
    """One choice of the answer, and how much of it has been sent."""

    def __init__(self, body: ChatCompletionRequest, index: int, answer: Answer, token_bytes: TokenBytes) -> None:
        self._index = index
        self._answer = answer
        self._token_bytes = token_bytes
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._shows_ids = body.return_token_ids
        self._num_chars = 0
        self._num_tokens = 0
        self._is_finished = False

    def whole(self, completion: CompletionOutput) -> dict[str, object]:
        """Return the JSON of the whole choice."""
        deltas = self._answer.feed(completion.text, completion.token_ids, is_last=True)
        choice: dict[str, object] = {
            "index": self._index,
            "message": merge(deltas),
            "logprobs": self._logprobs(completion),
        }
        return choice | self._token_ids(completion) | self._end(completion)

    def grow(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the choices of the next chunks. The first contains the role, the last the finish reason."""
        if self._is_finished:
            return []
        is_first, self._is_finished = self._num_tokens == 0, completion.finish_reason is not None
        new = completion.token_ids[self._num_tokens :]
        deltas = self._answer.feed(completion.text[self._num_chars :], new, self._is_finished)
        logprobs, token_ids = self._logprobs(completion), self._token_ids(completion)
        if is_first:
            deltas.insert(0, {"role": "assistant", "content": ""})
        if not deltas and (self._is_finished or logprobs or token_ids.get("token_ids")):
            deltas = [{}]
        choices: list[dict[str, object]] = [
            {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices:
            choices[-1] |= {"logprobs": logprobs, **token_ids, **self._end(completion)}
        if logprobs and self._is_finished and self._token_bytes.is_special(completion.token_ids[-1]):
            choices += split_end(choices.pop())
        self._num_chars, self._num_tokens = len(completion.text), len(completion.token_ids)
        return choices

    def _end(self, completion: CompletionOutput) -> dict[str, object]:
        reason = completion.finish_reason
        if reason is None:
            return {"finish_reason": None}
        return {"finish_reason": self._answer.finish_reason(reason), "stop_reason": completion.stop_reason}

    def _token_ids(self, completion: CompletionOutput) -> dict[str, list[int]]:
        """Return the field with the token ids that have not been sent, if the answer must contain it."""
        return {"token_ids": list(completion.token_ids[self._num_tokens :])} if self._shows_ids else {}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, list[Written]] | None:
        """Return the log-probabilities of the tokens that have not been sent; None if not requested."""
        if self._num_top is None or completion.logprobs is None or len(completion.token_ids) == self._num_tokens:
            return None
        new = slice(self._num_tokens, None)
        return chat_logprobs(completion.logprobs[new], completion.token_ids[new], self._num_top, self._token_bytes)


def split_end(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last choice of a stream as two if it has text: the second one has only the end, and the end token.

    An end token has no text. Clients such as guidance take all tokens of a choice for its text.
    """
    if not choice["delta"]:
        return [choice]
    *shown, end_token = choice["logprobs"]["content"]
    text = {"delta": choice["delta"], "logprobs": {"content": shown} if shown else None, "finish_reason": None}
    end = {"delta": {}, "logprobs": {"content": [end_token]}}
    if "token_ids" in choice:  # `return_token_ids`
        text["token_ids"], end["token_ids"] = choice["token_ids"][:-1], choice["token_ids"][-1:]
    return [{"index": choice["index"], **text}, choice | end]
