"""From a request's messages or prompt to the prompts of the engine: text and token ids.

Long texts are encoded in a thread, so the event loop goes on meanwhile.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nanovllm.engine.chat import render_conversation
from nanovllm.engine.input_processor import Prompt
from nanovllm.extras.chat_options import ChatOptions
from nanovllm.serve.async_llm import LONG_TEXT
from nanovllm.serve.errors import APIError, refuse
from nanovllm.serve.protocol import ChatCompletionRequest, TokenizeRequest


async def chat_prompt(tokenizer: Any, body: ChatCompletionRequest | TokenizeRequest) -> Prompt:
    """The messages as the chat template writes them. Raises APIError 400 if it does not take them."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages or []]
    for message in messages:
        message["content"] = message.get("content") or ""  # None beside calls of tools; templates add it to a text
    told = body.told_tools if isinstance(body, ChatCompletionRequest) else []
    tools = [tool.model_dump(exclude_unset=True) for tool in told] or None
    is_continued, add_prompt = bool(body.continue_final_message), body.add_generation_prompt
    with refuse("messages"):
        options = ChatOptions(
            add_generation_prompt=not is_continued if add_prompt is None else add_prompt,
            continue_final_message=is_continued,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=tools,
        )
        is_long = sum(len(str(message.get("content"))) for message in messages) > LONG_TEXT
        render = partial(render_conversation, tokenizer, messages, options)
        try:
            return await asyncio.to_thread(render) if is_long else render()
        except RecursionError as error:
            raise ValueError("messages are nested too deeply for the chat template") from error


async def encode_prompts(tokenizer: Any, field: str, given: Any, add_special_tokens: bool) -> list[Prompt]:
    """What `field` gives: one prompt, or several; a list of integers is the token ids of one."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Any] = [given] if is_one else list(given)
    if not prompts:
        raise APIError(400, f"{field} must not be an empty list", field)
    if all(isinstance(one, list) for one in prompts):
        return prompts
    if tokenizer is None:
        raise APIError(400, f"this model has no tokenizer, so {field} must be token ids, got text", field)
    with refuse(field):
        return [await encode_text(tokenizer, text, add_special_tokens) for text in prompts]


async def encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> Prompt:
    """Text and token ids."""
    encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return {"prompt": text, "prompt_token_ids": await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()}


@contextmanager
def refuse_prompts(prompts: list[Any], field: str, max_model_len: int) -> Iterator[None]:
    """As `refuse`, for encoded prompts. One that is too long for the context has a code that clients know."""
    lengths = [len(one["prompt_token_ids"] if isinstance(one, dict) else one) for one in prompts]
    with refuse(field, "context_length_exceeded" if max(lengths) >= max_model_len else None):
        yield
