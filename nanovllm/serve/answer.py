"""What the text of a chat's answer means, as it grows: by default it is the message's content, and nothing else."""

from typing import Any, Protocol


class Answer(Protocol):
    """Reads one answer. Made for each choice of a request by `make_answer`."""

    def feed(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """What `text`, the next piece of the answer, adds to the message: deltas of OpenAI's streams.

        `is_last`: nothing comes after it, so nothing may be held back.
        """

    def finish_reason(self, reason: str) -> str:
        """`reason` is the engine's."""


class PlainAnswer:
    def feed(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str) -> str:
        return reason


def merge(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that these deltas add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in deltas:
        for name, value in delta.items():
            message[name] = (message.get(name) or "") + value
    return message
