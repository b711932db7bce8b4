"""How much a request may hold, as it follows from the model and the options. Counts are checked before contents.

`body.py` bounds the values of a body, `protocol.py` the lists and texts whose bounds are the same for every model; here
are prompts, messages and token ids, and how values are counted. Each check raises a ValueError that names the size and
what is allowed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanovllm.extras.full_engine import LLMEngine
from nanovllm.extras.serve.protocol import MAX_FORM, GenerationRequest
from nanovllm.extras.serve.workers import Check

PIECE = 1 << 15  # characters that are encoded together while the tokens of a long text are counted
SHORT = 1000  # characters of a text that is not worth an array
BLOCK = 1 << 18  # bytes that are looked at together
COSTS: Mapping[str, int] = {",": 1, ":": 7, "[": 8, "{": 32}
"""How many values each sign of JSON counts for: a number, a key, a list, and an object, which may become a model."""

QUOTE, BACKSLASH = b'"', b"\\"


class TooLong(ValueError):
    """More text than the model's context holds."""

    code = "context_length_exceeded"


@dataclass(frozen=True)
class Bounds:
    max_values: int
    """Numbers, texts, lists and objects of a body; also tokens of all of its prompts together."""
    max_model_len: int
    max_prompt_len: int
    """A prompt must have fewer tokens: max_model_len, or max_values if only the prompt's end is kept."""
    max_choices: int
    vocab_size: int
    longest_token: int
    """Characters of the vocabulary's longest token. A token of bytes may have fewer characters than this says."""

    @classmethod
    def of(cls, engine: LLMEngine, max_values: int, max_choices: int) -> "Bounds":
        """A list of the whole vocabulary beside a prompt that fills the context is always allowed."""
        tokenizer, vocab_size = engine.tokenizer, engine.input_processor.vocab_size
        max_model_len = engine.parts.max_model_len
        return cls(
            max_values=max(max_values, vocab_size + max_model_len),
            max_model_len=max_model_len,
            max_prompt_len=max_model_len,
            max_choices=max_choices,
            vocab_size=vocab_size,
            longest_token=1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1),
        )

    def of_prompts(self, body: GenerationRequest) -> "Bounds":
        """As they hold for the prompts of a request."""
        return self if body.truncate_prompt_tokens is None else replace(self, max_prompt_len=self.max_values)

    @property
    def max_chars(self) -> int:
        return self.max_prompt_len * self.longest_token

    def check_text(self, num_chars: int) -> None:
        """Whether a text may have as few tokens as a prompt may."""
        if num_chars > self.max_chars:
            raise TooLong(
                f"the text has {num_chars} characters; at most {self.max_chars} are allowed "
                f"({self.max_prompt_len} tokens times {self.longest_token}, the characters of the longest token)"
            )

    def check_prompts(self, prompts: list[Any], max_inputs: int | None = None) -> None:
        """Texts or lists of token ids; with `max_inputs`, they are embedded."""
        if max_inputs is None:
            self.check_count(prompts, self.max_choices, "prompts (--max-choices)")
        else:
            self.check_count(prompts, max_inputs, "inputs")
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_text(len(prompt))
            elif len(prompt) >= self.max_prompt_len:
                raise TooLong(
                    f"the prompt has {len(prompt)} tokens; at most {self.max_prompt_len - 1} are allowed "
                    f"(max_model_len {self.max_model_len}, less one for the output)"
                )

    def check_messages(self, messages: list[dict[str, Any]]) -> None:
        """Messages as dicts, with all fields that the template may write."""
        self.check_count(messages, self.max_model_len, "messages (max_model_len)")
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
        """Of JSON within a text. In a short one, what stands in its strings counts too: there may be many of them."""
        if len(text) > SHORT:
            return count_values(text.encode("utf-8", "replace"), self.max_values)
        return sum(cost * text.count(sign) for sign, cost in COSTS.items())

    def tokenizer(self, tokenizer: Any, check: Check) -> "BoundedTokenizer | None":
        """Of one request; None if the model has none."""
        return None if tokenizer is None else BoundedTokenizer(tokenizer, self, check)

    def check_count(self, values: Sized, most: int, what: str) -> None:
        if len(values) > most:
            raise ValueError(f"at most {most} {what} are allowed, got {len(values)}")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def count_chars(value: Any) -> int:
    """Of all texts within a JSON value."""
    return sum(map(len, texts_of(value)))


def texts_of(value: Any) -> Iterator[str]:
    """All texts within a JSON value, with the keys of its objects."""
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
    """Values in a JSON text, at most one too few; it stops where there are more than `enough`.

    Each value but the first stands behind a comma, or is the first of a list or object. So the signs of `COSTS` are
    counted, where they stand outside of strings. In a text that is not JSON, the count is right up to the first error.
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
        codes = np.frombuffer(block, np.uint8)  # [num_bytes], with no quotes but those of strings
        # 1 behind an odd number of quotes; overflow keeps what is odd
        num_quotes = np.cumsum(codes == ord(QUOTE), dtype=np.uint8) + np.uint8(is_inside)
        is_outside = (num_quotes & 1) == 0
        for sign, cost in COSTS.items():
            num_values += cost * int(np.count_nonzero((codes == ord(sign)) & is_outside))
        is_inside = bool(num_quotes[-1] & 1) if len(codes) else is_inside
        if num_values > enough:
            break
    return num_values


class BoundedTokenizer:
    """The engine's tokenizer for the prompts of one request; `encode` refuses what cannot fit, or has become too much.

    A long text is first encoded in pieces. Its tokens are about those of the pieces, for only words at the cuts differ;
    so it is refused when the pieces have twice as many as a prompt may. The pieces take little memory, and between two
    of them `check` may say that the client has gone.
    """

    def __init__(self, tokenizer: Any, bounds: Bounds, check: Check) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._check = check
        self._num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._check()
        self._bounds.check_text(len(text))
        if len(text) > PIECE:
            self._count(text)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._num_tokens += len(token_ids)
        if self._num_tokens > self._bounds.max_values:
            raise TooLong(f"a request's prompts may have {self._bounds.max_values} tokens (--max-request-values)")
        return token_ids

    def _count(self, text: str) -> None:
        num_tokens, most = 0, 2 * self._bounds.max_prompt_len
        for start in range(0, len(text), PIECE):
            self._check()
            num_tokens += len(self._tokenizer.encode(text[start : start + PIECE], add_special_tokens=False))
            if num_tokens > most:
                raise TooLong(f"the text has more than {most} tokens, and may have {self._bounds.max_prompt_len}")
