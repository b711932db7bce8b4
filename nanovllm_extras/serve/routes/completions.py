"""Handle `POST /v1/completions`: continue one or several prompts, and return the texts whole or as a stream.

This is the older of OpenAI's two interfaces. It has no conversations and no chat template; prompts may be token ids.
https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from nanovllm_extras.answer_parts.text_offsets import DecodedOffsets, offsets_of_text
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestOutput
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.generation import Generation, usage_of
from nanovllm_extras.serve.messages.protocol import CompletionRequest
from nanovllm_extras.serve.miss_causes import misses_field
from nanovllm_extras.serve.openai_logprobs import completion_logprobs
from nanovllm_extras.serve.prompts import are_many, encode_prompts
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.sampling import completion_params
from nanovllm_extras.serve.state import ReadyServer
from nanovllm_extras.serve.streaming import EventStream, answer_whole
from nanovllm_extras.serve.structured_outputs import compile_structured_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, server: ReadyServer) -> Response:
    """Continue one or several prompts."""
    server.check_model(body.model)
    engine = server.check_ready().engine
    bounds, run = server.bounds.of_prompts(body), partial(server.workers.run, request)
    adds = body.add_special_tokens is not False
    prompts = await run(
        lambda check: encode_prompts(bounds.tokenizer(engine.tokenizer, check), bounds, "prompt", body.prompt, adds),
        is_long=are_many(body.prompt) or None,
    )
    form = await compile_structured_outputs(run, engine, body, server.options.parsers)
    params = await run(lambda check: completion_params(body, engine, form))
    generation = Generation(server, new_id("cmpl", request), prompts, params)
    await generation.start(request, body, "prompt")
    completions = Completions(
        body, generation, server.name_in_answers(body.model), engine.tokenizer, server.token_bytes
    )
    if body.stream:
        return EventStream(generation, completions.chunks())
    return await answer_whole(request, generation, completions.whole)


class Completions:
    """The answer to a request: `n` choices for each prompt, numbered prompt by prompt."""

    def __init__(
        self,
        body: CompletionRequest,
        generation: Generation,
        model_name: str,
        tokenizer: "PreTrainedTokenizerBase | None",
        token_bytes: TokenBytes,
    ) -> None:
        self._body = body
        self._generation = generation
        self._model_name = model_name
        self._n = body.n or 1
        num_choices = len(generation.indices) * self._n
        skips = generation.params.skip_special_tokens
        self._choices = [Choice(body, i, tokenizer, token_bytes, skips) for i in range(num_choices)]

    def whole(self) -> dict[str, object]:
        """Return the JSON of the whole answer."""
        outputs = [self._generation.latest[request_id] for request_id in self._generation.indices]
        choices = [choice for output in outputs for choice in self._grown(output)]
        return self._head(choices) | {"usage": self._usage(outputs)}

    async def chunks(self) -> AsyncIterator[Iterable[dict[str, object]]]:
        """Yield the JSON of the stream's chunks, several at a time."""
        options = self._body.stream_options
        extra: dict[str, object] = {"usage": None} if options and options.include_usage else {}
        async for outputs in self._generation.outputs():
            if options and options.continuous_usage_stats:
                extra = {"usage": self._usage(list(self._generation.latest.values()))}
            yield (self._head([choice]) | extra for output in outputs for choice in self._grown(output))
        if options and options.include_usage:
            yield [self._head([]) | {"usage": self._usage(list(self._generation.latest.values()))}]

    def _grown(self, output: RequestOutput) -> list[dict[str, object]]:
        first = self._generation.indices[output.request_id] * self._n
        grown = [self._choices[first + completion.index].grow(output, completion) for completion in output.outputs]
        return [choice for choice in grown if choice is not None]

    def _usage(self, outputs: list[RequestOutput]) -> dict[str, object]:
        return usage_of(outputs, with_output=self._body.max_tokens != 0)

    def _head(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._generation.request_id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._model_name,
            "choices": choices,
        }


class Choice:
    """One completion, and how much of it has been sent. With `echo`, its text begins with the prompt."""

    def __init__(
        self,
        body: CompletionRequest,
        index: int,
        tokenizer: "PreTrainedTokenizerBase | None",
        token_bytes: TokenBytes,
        skip_special_tokens: bool,
    ) -> None:
        self._body = body
        self._index = index
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._is_begun = False
        self._is_finished = False
        self._num_chars = 0  # of the completion
        self._num_tokens = 0
        self._offsets = DecodedOffsets(token_bytes, skip_special_tokens)

    def grow(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, object] | None:
        """Return the JSON of the text, tokens and end that have not been sent; None if there is nothing new."""
        if self._is_finished:
            return None
        text, token_ids, logprobs, offsets = "", [], [], []
        asked = self._asked_fields(output, completion)
        has_logprobs = self._body.logprobs is not None
        if self._body.echo and not self._is_begun:
            text += self._prompt_text(output)
            token_ids += output.prompt_token_ids
            logprobs += output.prompt_logprobs or []
            offsets += self._prompt_offsets(output, text) if has_logprobs else []
        elif has_logprobs and not self._is_begun:
            self._offsets.skip_prompt(output.prompt_token_ids)
        if self._body.max_tokens != 0:
            new_ids = completion.token_ids[self._num_tokens :]
            text += completion.text[self._num_chars :]
            token_ids += new_ids
            logprobs += (completion.logprobs or [])[self._num_tokens :]
            offsets += self._offsets.read_output(new_ids) if has_logprobs else []
        self._num_chars, self._num_tokens = len(completion.text), len(completion.token_ids)
        self._is_begun, self._is_finished = True, completion.finish_reason is not None
        shows_logprobs = has_logprobs and bool(token_ids)
        if not (text or shows_logprobs or any(asked.values()) or self._is_finished):
            return None
        told = completion_logprobs(logprobs, token_ids, offsets, self._token_bytes) if shows_logprobs else None
        return {
            "index": self._index,
            "text": text,
            "logprobs": told,
            **asked,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _asked_fields(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, object]:
        """Return the requested fields with the new token ids and, in the first chunk, about the prompt."""
        fields: dict[str, object] = {} if self._is_begun else misses_field(self._body, output)
        if self._body.return_token_ids:
            fields["token_ids"] = list(completion.token_ids[self._num_tokens :]) if self._body.max_tokens != 0 else []
            fields |= {} if self._is_begun else {"prompt_token_ids": output.prompt_token_ids}
        return fields

    def _prompt_text(self, output: RequestOutput) -> str:
        is_whole = self._body.truncate_prompt_tokens is None
        if (output.prompt is not None and is_whole) or self._tokenizer is None:
            return output.prompt or ""
        return str(self._tokenizer.decode(output.prompt_token_ids))

    def _prompt_offsets(self, output: RequestOutput, text: str) -> list[int]:
        token_ids, adds = output.prompt_token_ids, self._body.add_special_tokens is not False
        is_text = output.prompt is not None
        offsets = offsets_of_text(self._tokenizer, text, token_ids, adds) if is_text else None
        if offsets is None:
            return self._offsets.read_prompt(token_ids, text)
        self._offsets.num_chars = len(text)
        return offsets
