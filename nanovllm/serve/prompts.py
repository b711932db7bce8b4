"""From a request's messages or prompt to the prompts of the engine: text and token ids.

What takes long is done in a thread, so that the event loop need not wait for it.
"""

import asyncio
from functools import partial
from typing import Any

from nanovllm.engine.chat import ChatOptions, render_conversation
from nanovllm.engine.intake import Prompt
from nanovllm.serve.async_llm import LONG_TEXT
from nanovllm.serve.errors import APIError, refuse
from nanovllm.serve.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest


async def chat_prompt(tokenizer: Any, body: ChatCompletionRequest | TokenizeRequest) -> Prompt:
    """The messages as the chat template writes them. Raises APIError 400 if it does not take them."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages or []]
    is_continued, add_prompt = bool(body.continue_final_message), body.add_generation_prompt
    with refuse(type(body).model_fields, "messages"):
        options = ChatOptions(
            add_generation_prompt=not is_continued if add_prompt is None else add_prompt,
            continue_final_message=is_continued,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        is_long = sum(len(str(message.get("content"))) for message in messages) > LONG_TEXT
        render = partial(render_conversation, tokenizer, messages, options)
        try:
            return await asyncio.to_thread(render) if is_long else render()
        except RecursionError as error:
            raise ValueError("messages are nested too deeply for the chat template") from error


async def completion_prompts(tokenizer: Any, body: CompletionRequest) -> list[Prompt]:
    """One prompt, or several: a list of integers is the token ids of one."""
    prompt: Any = body.prompt
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts: list[Any] = [prompt] if is_one else list(prompt)
    if not prompts:
        raise APIError(400, "prompt must not be an empty list", "prompt")
    if all(isinstance(one, list) for one in prompts):
        return prompts
    if tokenizer is None:
        raise APIError(400, "this model has no tokenizer, so a prompt must be token ids, got text", "prompt")
    with refuse(["prompt"], "prompt"):
        return [await encode_text(tokenizer, text, body.add_special_tokens is not False) for text in prompts]


async def encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> Prompt:
    """Text and token ids."""
    encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return {"prompt": text, "prompt_token_ids": await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()}
