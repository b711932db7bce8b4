"""From a request's messages or prompt to the prompts of the engine: text and token ids.

Raises APIError 400 for messages that the chat template does not take, which is a program of the model's makers.
"""

import asyncio
from functools import partial
from typing import Any

from jinja2 import TemplateError

from nanovllm.engine.intake import Prompt
from nanovllm.serve.async_llm import LONG_TEXT
from nanovllm.serve.errors import APIError, refuse
from nanovllm.serve.protocol import ChatCompletionRequest, CompletionRequest, Message, TokenizeRequest


async def chat_prompt(tokenizer: Any, template: str | None, body: ChatCompletionRequest | TokenizeRequest) -> Prompt:
    """The messages as the model's chat template writes them, or `template`, which the server was started with."""
    if tokenizer is None or (template or getattr(tokenizer, "chat_template", None)) is None:
        raise APIError(400, "this model has no chat template; use /v1/completions, or start with --chat-template")
    is_continued = bool(body.continue_final_message)
    variables = {
        **(body.chat_template_kwargs or {}),
        "tokenize": False,
        "chat_template": template,
        "continue_final_message": is_continued,
        "add_generation_prompt": not is_continued if body.add_generation_prompt is None else body.add_generation_prompt,
    }
    messages = [to_dict(message) for message in body.messages or []]
    try:
        text = tokenizer.apply_chat_template(messages, **variables)
        return await encode_text(tokenizer, text, add_special_tokens=False)  # the template has written those
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise APIError(400, f"the chat template does not take these messages: {error}", "messages") from error


def to_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: the texts of its parts are one text."""
    fields = message.model_dump(exclude_unset=True)
    content = message.content
    fields["content"] = content if isinstance(content, str) else "\n".join(part.text for part in content or [])
    return fields


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
    """Text and token ids; long texts are encoded in a thread, so that the event loop need not wait for them."""
    encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return {"prompt": text, "prompt_token_ids": await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()}
