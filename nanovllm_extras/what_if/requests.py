"""A request whose answers are known: no model has to answer it."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN_TOKEN = 2**31 - 1
"""A token id that is in no vocabulary: the token is not known."""


@dataclass(slots=True)
class Answer:
    """The tokens of one sample, and how it ended. Without `token_ids`, `filler` is each of its `num_tokens` tokens."""

    num_tokens: int
    token_ids: "array[int] | None" = None
    filler: int = UNKNOWN_TOKEN
    """A token that no prompt and no other answer has."""
    finish_reason: str | None = "length"
    """As in `Sequence`. `abort` or None (the recording ends before): how it would go on is not known."""
    stop_reason: int | str | None = None
    aborted_s: float | None = None
    """When it was aborted, if it was."""

    def token(self, i: int) -> int:
        """Return its token `i`."""
        return self.filler if self.token_ids is None or i >= len(self.token_ids) else self.token_ids[i]

    @property
    def is_whole(self) -> bool:
        """Return whether the answer would end here in any run: it is not cut by an abort, the pool or the file."""
        return self.finish_reason in ("stop", "length") and self.stop_reason != "kv_cache"


@dataclass(slots=True)
class PlannedRequest:
    """A prompt, when it arrives, and its answers, one for each sample."""

    request_id: str
    prompt: "array[int]"
    answers: list[Answer]
    arrival_s: float = 0.0
    visible_s: float = 0.0
    """When the scheduler first sees it. A program that adds many requests before a step lets it see all at once."""
    max_tokens: int | None = None
    root_serial: int = 0
    """Only requests with the same one share blocks."""
    extra_args: Mapping[str, Any] | None = field(default=None)
