"""Parse the answers of gpt-oss: messages in the Harmony format, between special tokens.

The header of a message says what it is. `<|call|>` and `<|return|>` end the answer:

    <|channel|>analysis<|message|>It depends on the weather.<|end|>                       reasoning
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json
        <|message|>{"city": "Oslo"}<|call|>                                               a call
    <|start|>assistant<|channel|>final<|message|>It is cold.<|return|>                    content

The prompt ends with `<|start|>assistant`, or within a message that the answer continues. Only special tokens separate
messages. The same characters in ordinary tokens are text, so a quoted `<|call|>` calls nothing. That is why this parser
reads token ids. Malformed messages become content. https://github.com/openai/harmony
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm_extras.answer_parts.events import CallArguments, CallStart, Content, Event, Reasoning
from nanovllm_extras.answer_parts.text_offsets import DecodedOffsets
from nanovllm_extras.answer_parts.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = frozenset((START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN))
ASSISTANT, FUNCTIONS, RECIPIENT = "assistant", "functions.", "to="
ROLES = (ASSISTANT, "user", "system", "developer", "tool")
CHANNELS = ("analysis", "commentary", "final")
NAME_AND_TEXT = re.compile(rf"\s*({'|'.join(CHANNELS)})?\s*(.*)", re.DOTALL)  # after `<|channel|>`
MAX_HEADER = 256  # characters
BREAK = "\n"  # between two messages of the reasoning, or of the content


class Kind(Enum):
    """What a message is."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class Harmony:
    """Parses one answer from its text without special tokens, and from its token ids.

    names: the functions that the answer may call.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int], names: Iterable[str] = ()) -> None:
        self.num_calls = 0
        self._token_bytes = token_bytes
        self._offsets = DecodedOffsets(token_bytes, skip_special_tokens=True)
        self._offsets.skip_prompt(prompt_token_ids)
        self._markers: deque[tuple[int, str]] = deque()  # offset in the text, and special token, not yet read
        self._held = ""  # text that has not been read
        self._num_read = 0  # characters
        self._names = frozenset(names)
        self._kind: Kind | None = None  # of the message; None within its header
        self._has_start = False  # whether the header began with `<|start|>`, so that a role follows
        self._role = ""  # text of the header before `<|channel|>`
        self._channel: str | None = None  # text of the header after `<|channel|>`
        self._has_arguments = False  # whether the call has any
        self._needs_break = False
        self._shown: set[Kind] = set()  # the kinds of the messages that had text
        self._events = self._continue(prompt_token_ids)

    def feed(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[Event]:
        """Read the next piece of the answer, and return the new events.

        The text may be shorter than that of the tokens: incomplete characters and possible stop strings are held back.
        """
        events, self._events = self._events, []
        for token_id, offset in zip(token_ids, self._offsets.read_output(token_ids), strict=True):
            if marker := self._marker(token_id):
                self._markers.append((offset, marker))
        self._held += text
        while self._markers and self._markers[0][0] <= self._num_read + len(self._held):
            offset, marker = self._markers.popleft()
            events += self._read_text(self._take(offset))
            events += self._read_marker(marker)
        offset = self._markers[0][0] if self._markers else self._num_read + len(self._held)
        events += self._read_text(self._take(offset))
        if is_last and self._kind is None and not self._may_be_channel():
            events += self._show_header()  # words that could have been a header
        return events

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun, and its end has not been read."""
        return self._kind is Kind.CALL

    def _take(self, end: int) -> str:
        """Return the held text up to the offset `end`."""
        num_chars = max(0, end - self._num_read)
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_read += len(text)
        return text

    def _marker(self, token_id: int) -> str | None:
        if not self._token_bytes.is_special(token_id):
            return None
        text = self._token_bytes.text_of(token_id)
        return text if text in MARKERS else None

    def _continue(self, prompt_token_ids: Sequence[int]) -> list[Event]:
        """Read the last message of the prompt, which the answer continues. Return the events of an unfinished call."""
        start = len(prompt_token_ids)
        while start > 0 and self._marker(prompt_token_ids[start - 1]) != START:
            start -= 1
        self._has_start = start > 0
        events: list[Event] = []
        for token_id in prompt_token_ids[start:] if start else ():
            marker = self._marker(token_id)
            events += self._read_marker(marker) if marker else self._read_text(self._token_bytes.text_of(token_id))
        self._shown.clear()
        if self.is_within_call:
            return events
        self.num_calls = 0
        return []

    # ---- headers

    def _read_text(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._kind is not None:
            return self._show(text)
        header = self._role if self._channel is None else self._channel
        if not header:  # the text of an incomplete character comes after the special token that follows it
            text = text.lstrip("\ufffd")
        num_chars = max(0, MAX_HEADER - len(header))
        header, rest = header + text[:num_chars], text[num_chars:]
        if self._channel is None:
            self._role, may_continue = header, may_be_role(header)
        else:
            self._channel, may_continue = header, True
        return [] if may_continue and not rest else self._show_header() + self._read_text(rest)

    def _read_marker(self, marker: str) -> list[Event]:
        if marker == MESSAGE:
            return self._begin_message() if self._kind is None else []
        if marker == CONSTRAIN:
            if self._kind is None and self._channel is not None:
                self._channel += " "
            return []
        if marker == CHANNEL and self._kind is None and self._channel is None:
            self._channel = ""
            return []
        events = self._end()
        self._kind, self._role, self._channel = None, "", "" if marker == CHANNEL else None
        self._has_start = marker == START
        return events

    def _begin_message(self) -> list[Event]:
        recipient = self._recipient()
        name = recipient.removeprefix(FUNCTIONS)
        if not name or not self._names or (name == recipient and name not in self._names):
            self._begin(self._kind_of_channel())
            return []
        self._begin(Kind.CALL)
        self._has_arguments = False
        self.num_calls += 1
        return [CallStart(self.num_calls - 1, name)]

    def _recipient(self) -> str:
        """Return whom the message is for; "" for the user. Models may omit `to=` after the channel."""
        after = (self._channel or "").split()
        for word in (*self._role.split(), *after):
            if word.startswith(RECIPIENT):
                return word.removeprefix(RECIPIENT)
        return next((word for word in after if word.startswith(FUNCTIONS)), "")

    def _kind_of_channel(self) -> Kind:
        return Kind.REASONING if self._name_and_text()[0] == "analysis" else Kind.CONTENT

    def _name_and_text(self) -> tuple[str, str]:
        """Return the name of the channel, and the text after it."""
        found = NAME_AND_TEXT.match(self._channel or "")
        assert found is not None
        return found[1] or "", found[2]

    def _may_be_channel(self) -> bool:
        """Return whether an answer that ends here may have been cut off within the header after `<|channel|>`."""
        if self._channel is None:
            return False
        name, text = self._name_and_text()
        words = (RECIPIENT, FUNCTIONS) if name else CHANNELS
        return bool(self._recipient()) or any(word.startswith(text) for word in words)

    def _show_header(self) -> list[Event]:
        """Begin a message whose header is not well-formed. Return its text, without the role and the channel."""
        role = self._role.lstrip()
        if self._has_start or self._channel is not None:
            role = role.removeprefix(ASSISTANT).lstrip()
        text = " ".join(part for part in (role, self._name_and_text()[1]) if part)
        self._begin(self._kind_of_channel())
        return self._show(text) if text else []

    # ---- messages

    def _begin(self, kind: Kind) -> None:
        self._kind = kind
        self._needs_break = kind in self._shown

    def _show(self, text: str) -> list[Event]:
        """Return the event of a piece of the message."""
        if self._kind is Kind.CALL:
            self._has_arguments = self._has_arguments or not text.isspace()
            return [CallArguments(self.num_calls - 1, text)]
        assert self._kind is not None
        text, self._needs_break = (BREAK if self._needs_break else "") + text, False
        self._shown.add(self._kind)
        return [Reasoning(text) if self._kind is Kind.REASONING else Content(text)]

    def _end(self) -> list[Event]:
        """Return the last events of the message."""
        if self._kind is None:
            return self._show_header()
        if self._kind is Kind.CALL and not self._has_arguments:
            self._has_arguments = True
            return [CallArguments(self.num_calls - 1, "{}")]
        return []


def find_end_tokens(tokenizer: "PreTrainedTokenizerBase | None") -> frozenset[int]:
    """Return the ids of the tokens that end an answer. The first checkpoints of gpt-oss did not list `<|call|>`."""
    known = getattr(tokenizer, "added_tokens_encoder", {})
    return frozenset(known[token] for token in (CALL, RETURN) if token in known)


def may_be_role(text: str) -> bool:
    """Return whether a text may be the beginning of a header: a role, and a recipient."""
    words = text.split()
    for i, word in enumerate(words):
        if word.startswith(RECIPIENT):
            return True
        is_cut = i == len(words) - 1 and not text[-1].isspace()
        allowed = (*ROLES, FUNCTIONS, RECIPIENT)
        if word not in ROLES and not word.startswith(FUNCTIONS):
            return is_cut and any(one.startswith(word) for one in allowed)
    return True
