"""Define what parsers return while an answer grows: pieces of its reasoning, of its content, and of its calls."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a call: its name is known."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | CallArguments
