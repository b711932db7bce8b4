"""From a request's messages or prompt to the prompts of the engine: text and token ids.

Called by `Workers.run`: for a long body in a thread, so the event loop goes on meanwhile.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nanovllm.prompts import ChatPrompt, Prompt
from nanovllm_extras.options.chat_options import ChatOptions, render_chat, text_of
from nanovllm_extras.serve.bounds import BoundedTokenizer, Bounds, count_chars
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, SlotRequest, TokenizeRequest

MANY = 16  # prompts
Tokenizer = TypeVar("Tokenizer")


def chat_prompt(
    tokenizer: BoundedTokenizer | None, bounds: Bounds, body: ChatCompletionRequest | TokenizeRequest | SlotRequest
) -> ChatPrompt:
    """The messages as the chat template writes them. Raises APIError 400 if it does not take them."""
    with refuse("messages"):
        bounds.check_turns(body.messages or [], "messages")
        messages = [message.model_dump(exclude_unset=True) for message in body.messages or []]
        bounds.check_messages(messages)
    template = str(getattr(tokenizer, "chat_template", None))
    for message in messages:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
        # it may be None next to tool calls or a refusal; templates concatenate it with other text
        message["content"] = message.get("content") or message.get("refusal") or ""
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)  # clients send null, but templates ask whether there is such a field
        elif "message.thinking" in template:
            join_thinking(message)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.told_tools] or None
    is_continued, add_prompt = bool(body.continue_final_message), body.add_generation_prompt
    with refuse("tools"):
        bounds.check_text(count_chars(tools))
    with refuse("documents"):
        bounds.check_text(count_chars(body.documents))
    with refuse("messages"):
        options = ChatOptions(
            add_generation_prompt=not is_continued if add_prompt is None else add_prompt,
            continue_final_message=is_continued,
            chat_template_kwargs=template_variables(body.reasoning_effort, body.documents, body.chat_template_kwargs),
            tools=tools,
        )
        try:
            return render_chat(tokenizer, messages, options)
        except RecursionError as error:
            raise ValueError("messages are nested too deeply for the chat template") from error


def join_thinking(message: dict[str, object]) -> None:
    """Join the reasoning and the content of a message with calls, for the chat template of gpt-oss.

    This template writes either of them into the channel of the reasoning, and refuses both together.
    """
    reasoning = message.get("thinking") or message.get("reasoning_content") or message.get("reasoning")
    if reasoning and message["content"]:
        reasoning = f"{reasoning}\n{text_of(message['content'])}"
    if reasoning:
        message |= {"thinking": reasoning, "content": ""}


def template_variables(
    reasoning_effort: str | None, documents: object, given: Mapping[str, object] | None
) -> dict[str, object] | None:
    """Return the variables for the chat template; None if there are none. Those of `given` come first."""
    variables: dict[str, object] = {} if documents is None else {"documents": documents}
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
    if reasoning_effort == "none":
        variables["enable_thinking"] = False
    return variables | dict(given or {}) or None


def are_many(given: object) -> bool:
    """Return whether a body has more than `MANY` prompts, which take long to encode even if the body is short."""
    return isinstance(given, list) and len(given) > MANY and not isinstance(given[0], int)  # token ids are one prompt


def encode_prompts(
    tokenizer: BoundedTokenizer | None,
    bounds: Bounds,
    field: str,
    given: Any,
    add_special_tokens: bool,
    max_inputs: int | None = None,
) -> list[Prompt]:
    """What `field` gives: one prompt, or several; a list of integers is the token ids of one."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Any] = [given] if is_one else list(given)
    if not prompts:
        raise APIError(400, f"{field} must not be an empty list", field)
    with refuse(field):
        bounds.check_prompts(prompts, max_inputs)
    if all(isinstance(one, list) for one in prompts):
        return prompts
    if tokenizer is None:
        raise APIError(400, f"this model has no tokenizer, so {field} must be token ids, got text", field)
    with refuse(field):
        return [encode_text(tokenizer, text, add_special_tokens) for text in prompts]


def encode_text(tokenizer: BoundedTokenizer, text: str, add_special_tokens: bool) -> ChatPrompt:
    """Text and token ids."""
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=add_special_tokens)}


def check_lengths(prompts: Sequence[Prompt], field: str, bounds: Bounds) -> None:
    """Raise APIError 400 if an encoded prompt is too long."""
    with refuse(field):
        for one in prompts:
            bounds.check_num_tokens(len(one["prompt_token_ids"] if isinstance(one, dict) else one))


def salted(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """Return an encoded prompt with the `cache_salt` of its request, if there is one."""
    if cache_salt is None:
        return prompt
    return {**(prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}), "cache_salt": cache_salt}


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises APIError 400 if it is None."""
    if tokenizer is None:
        raise APIError(400, "this model has no tokenizer")
    return tokenizer
