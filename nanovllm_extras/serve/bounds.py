"""Limit the size of requests, depending on the model and the options. Counts are checked before contents.

`body.py` limits the number of values of a body. `protocol.py` limits the lists and texts whose limits are the same for
every model. This file limits prompts, messages and token ids, and counts values. Each check raises a ValueError with
the size and the limit.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.prompts import Prompt
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.serve.messages.protocol import MAX_FORM, GenerationRequest
from nanovllm_extras.serve.workers import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 15  # characters that are encoded at a time while the tokens of a long text are counted
SHORT = 1000  # characters; shorter texts are counted without an array
BLOCK = 1 << 18  # bytes that are examined at a time
COSTS: Mapping[str, int] = {",": 1, ":": 7, "[": 8, "{": 32}
"""JSON character -> number of values that it counts as, by the memory that it needs: the next value, a key, a list, and
an object, which may become a pydantic model."""

QUOTE, BACKSLASH = b'"', b"\\"


class TooLong(ValueError):
    """Raised for a prompt that is longer than the model's context.

    Clients recognise its message, and then shorten their conversation: most of them the first sentence, which is
    OpenAI's, LangChain the words "prompt is too long", which are Anthropic's.
    """

    code = "context_length_exceeded"

    def __init__(self, max_tokens: int, reason: str) -> None:
        limit = f"This model's maximum context length is {max_tokens} tokens."
        super().__init__(f"{limit} However, the prompt is too long: {reason}.")


@dataclass(frozen=True)
class Bounds:
    """The limits of requests to one model."""

    max_values: int
    """The maximum number of numbers, texts, lists and objects of a body, and of tokens of all its prompts together."""
    max_model_len: int
    max_prompt_len: int
    """A prompt must have fewer tokens than this: max_model_len, or max_values if only the prompt's end is kept."""
    max_choices: int
    vocab_size: int
    longest_token: int
    """The length in characters of the vocabulary's longest token. For tokens of bytes this is an upper bound."""
    capacity: int = sys.maxsize
    """The maximum number of tokens of one sequence in the whole KV cache."""

    @classmethod
    def of(cls, engine: LLMEngine, max_values: int, max_choices: int) -> "Bounds":
        """Return the limits for an engine.

        `max_values` is raised where needed, so that a request can always have a prompt that fills the context, together
        with a list of the whole vocabulary.
        """
        tokenizer, vocab_size = engine.tokenizer, engine.input_processor.vocab_size
        max_model_len = engine.parts.max_model_len
        return cls(
            max_values=max(max_values, vocab_size + max_model_len),
            max_model_len=max_model_len,
            max_prompt_len=max_model_len,
            max_choices=max_choices,
            vocab_size=vocab_size,
            longest_token=1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1),
            capacity=engine.input_processor.capacity,
        )

    def of_prompts(self, body: GenerationRequest) -> "Bounds":
        """Return the limits for the prompts of a request. If it truncates its prompts, they may be longer."""
        return self if body.truncate_prompt_tokens is None else self.of_truncated()

    def of_truncated(self) -> "Bounds":
        """Return the limits for prompts that will be truncated."""
        return replace(self, max_prompt_len=self.max_values)

    @property
    def max_chars(self) -> int:
        """The maximum number of characters of a text. A longer text has more tokens than a prompt may have."""
        return self.max_prompt_len * self.longest_token

    def check_text(self, num_chars: int) -> None:
        """Raise TooLong if a text has too many characters to fit in a prompt."""
        if num_chars > self.max_chars:
            raise TooLong(
                self.max_model_len,
                f"its text has {num_chars} characters; at most {self.max_chars} are allowed "
                f"({self.max_prompt_len} tokens times {self.longest_token}, the characters of the longest token)",
            )

    def check_prompts(self, prompts: Sequence[Prompt], max_inputs: int | None = None) -> None:
        """Check prompts: texts or lists of token ids. With `max_inputs`, they are the inputs of embeddings."""
        if max_inputs is None:
            self.check_count(prompts, self.max_choices, "prompts (--max-choices)")
        else:
            self.check_count(prompts, max_inputs, "inputs")
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_text(len(prompt))
            else:
                self.check_num_tokens(len(prompt))

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raise TooLong if a prompt with `num_tokens` tokens does not fit in the context or in the KV cache."""
        if num_tokens >= self.max_prompt_len:
            raise TooLong(
                self.max_model_len,
                f"it has {num_tokens} tokens; at most {self.max_prompt_len - 1} are allowed "
                f"(max_model_len {self.max_model_len}, less one for the output)",
            )
        is_whole = self.max_prompt_len <= self.max_model_len  # otherwise the prompt will be truncated
        if is_whole and num_tokens > self.capacity:
            raise TooLong(self.capacity, f"it has {num_tokens} tokens; the KV cache holds {self.capacity}")

    def check_turns(self, turns: Sized, field: str) -> None:
        """Raise TooLong if a conversation has more messages or items than the context has tokens."""
        if len(turns) > self.max_model_len:
            raise TooLong(
                self.max_model_len, f"{field} has a length of {len(turns)}; at most {self.max_model_len} is allowed"
            )

    def check_messages(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Check messages: dicts with all fields that the template may write."""
        self.check_turns(messages, "messages")
        self.check_text(sum(map(count_chars, messages)))
        calls = [call for message in messages for call in as_list(message.get("tool_calls"))]
        num_values = 0
        for call in calls:
            if (num_chars := count_chars(call)) > MAX_FORM:
                raise ValueError(f"a call of tool_calls may have {MAX_FORM} characters, got {num_chars}")
            num_values += sum(self._values_within(text) for text in texts_of(call))
        if num_values > self.max_values:  # arguments are JSON within JSON
            raise ValueError(f"arguments of tool_calls may have {self.max_values} values (--max-request-values)")

    def _values_within(self, text: str) -> int:
        """Return the number of values of JSON within a text.

        For a short text, characters within its strings are counted too. This is faster, and there may be many texts.
        """
        if len(text) > SHORT:
            return count_values(text.encode("utf-8", "replace"), self.max_values)
        return sum(cost * text.count(sign) for sign, cost in COSTS.items())

    def tokenizer(self, tokenizer: "PreTrainedTokenizerBase | None", check: Check) -> "BoundedTokenizer | None":
        """Return the tokenizer for one request; None if the model has no tokenizer."""
        return None if tokenizer is None else BoundedTokenizer(tokenizer, self, check)

    def check_count(self, values: Sized, most: int, what: str) -> None:
        """Raise ValueError if there are more than `most` values. what: their name in the message."""
        if len(values) > most:
            raise ValueError(f"at most {most} {what} are allowed, got {len(values)}")


def as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def count_chars(value: object) -> int:
    """Return the total number of characters of all texts within a JSON value."""
    return sum(map(len, texts_of(value)))


def texts_of(value: object) -> Iterator[str]:
    """Yield all texts within a JSON value, including the keys of its objects."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, Iterable):
            left += one


def count_values(body: bytes, enough: int) -> int:
    """Count the values in a JSON text by the characters of `COSTS`. Stop when there are more than `enough`.

    Each value except the first follows a comma, or is the first of a list or object. So it suffices to count these
    characters outside strings, and the count is at most one too low. In invalid JSON, the count is right up to the
    first error.
    """
    num_values, is_inside, left = 0, False, b""
    for start in range(0, len(body), BLOCK):
        block = left + body[start : start + BLOCK]
        if BACKSLASH in block:
            num_last = len(block) - len(block.rstrip(BACKSLASH))
            left = BACKSLASH * (num_last % 2)  # it escapes the first byte of the next block
            block = block[: len(block) - len(left)].replace(BACKSLASH * 2, b"").replace(BACKSLASH + QUOTE, b"")
        else:
            left = b""
        codes = np.frombuffer(block, np.uint8)  # [num_bytes]; escaped quotes have been removed
        # odd within a string; overflow does not change whether a number is odd
        num_quotes = np.cumsum(codes == ord(QUOTE), dtype=np.uint8) + np.uint8(is_inside)
        is_outside = (num_quotes & 1) == 0
        for sign, cost in COSTS.items():
            num_values += cost * int(np.count_nonzero((codes == ord(sign)) & is_outside))
        is_inside = bool(num_quotes[-1] & 1) if len(codes) else is_inside
        if num_values > enough:
            break
    return num_values


class BoundedTokenizer:
    """The engine's tokenizer for the prompts of one request. `encode` raises TooLong if they have too many tokens.

    A long text is first encoded in pieces, to count its tokens. Only the words at the cuts can differ, so the pieces
    have about as many tokens as the text. The text is refused if the pieces have twice as many tokens as a prompt may
    have. The pieces need little memory, and between two pieces `check` stops the work if the client has gone.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", bounds: Bounds, check: Check) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._check = check
        self._num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises TooLong, or ClientGone if the client has gone."""
        self._check()
        self.check_text(text)
        if len(text) > PIECE:
            self._count(text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._num_tokens += len(token_ids)
        if self._num_tokens > self._bounds.max_values:
            raise TooLong(
                self._bounds.max_model_len,
                f"a request's prompts may have {self._bounds.max_values} tokens together (--max-request-values)",
            )
        return token_ids

    def check_text(self, text: str) -> None:
        """Raise TooLong if a text has too many characters."""
        self._bounds.check_text(len(text))

    def _count(self, text: str) -> None:
        num_tokens, most = 0, 2 * self._bounds.max_prompt_len
        for start in range(0, len(text), PIECE):
            self._check()
            num_tokens += len(self._tokenizer.encode(text[start : start + PIECE], add_special_tokens=False))
            if num_tokens > most:
                raise TooLong(
                    self._bounds.max_model_len,
                    f"the text has more than {most} tokens; at most {self._bounds.max_prompt_len - 1} are allowed",
                )
