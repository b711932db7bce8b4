"""Leave out the oldest messages of a conversation that does not fit in the context (`truncation: "auto"`)."""

from collections.abc import Callable
from contextlib import suppress

from nanovllm_extras.serve.bounds import BoundedTokenizer, Bounds
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, Message
from nanovllm_extras.serve.prompts import chat_prompt

ROOM = 4  # at least this fraction (one in ROOM) of the context may stay free for the answer
LEADING = ("system", "developer")


def without_oldest(
    chat: ChatCompletionRequest, bounds: Bounds, make_tokenizer: Callable[[], BoundedTokenizer | None]
) -> ChatCompletionRequest:
    """Return `chat`, or if its prompt is too long, `chat` without its oldest messages.

    System messages at the beginning and the last message are kept. A result of a call is never kept without the call.
    The shortened prompt leaves `max_completion_tokens` tokens for the answer, but not more than a quarter of the
    context. Raises APIError 400 if even the shortest conversation is too long.

    make_tokenizer: returns a new tokenizer for each prompt, because it counts the tokens of all its prompts.
    """
    if fits(chat, bounds, make_tokenizer(), 1):
        return chat
    most = max(1, bounds.max_model_len // ROOM)
    room = min(chat.max_completion_tokens or most, most)
    head, rest = split_head(chat.messages)
    # an answer to a call must follow it, so the conversation may begin at any other message
    starts = [i for i in range(1, len(rest)) if rest[i].role != "tool"]
    low, high = 0, len(starts) - 1
    best: ChatCompletionRequest | None = None
    while low <= high:
        middle = (low + high) // 2
        shorter = chat.model_copy(update={"messages": head + rest[starts[middle] :]})
        if fits(shorter, bounds, make_tokenizer(), room):
            best, high = shorter, middle - 1
        else:
            low = middle + 1
    if best is not None:
        return best
    return chat.model_copy(update={"messages": head + rest[starts[-1] :]}) if starts else chat


def fits(chat: ChatCompletionRequest, bounds: Bounds, tokenizer: BoundedTokenizer | None, room: int) -> bool:
    """Return whether the prompt leaves `room` tokens of the context. Raises APIError 400 if it is invalid."""
    try:
        num_tokens = len(chat_prompt(tokenizer, bounds, chat)["prompt_token_ids"])
    except APIError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    with suppress(ValueError):
        bounds.check_num_tokens(num_tokens + room - 1)
        return True
    return False


def split_head(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system messages at the beginning, and the other messages."""
    num_head = next((i for i, message in enumerate(messages) if message.role not in LEADING), len(messages))
    return messages[:num_head], messages[num_head:]
