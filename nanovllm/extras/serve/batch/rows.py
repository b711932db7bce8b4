"""One row of a batch: from a line or a record to the request that a route answers, or to the reason why it is none.

`inputs.py` reads rows with a `Form`, `replica.py` sends them to the routes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class Row(NamedTuple):
    """What is asked, or why it cannot be; all texts, so that it can be a row of a table."""

    custom_id: str
    """Of no other row: the key of the input and of the answers."""
    url: str
    body: str
    """JSON."""
    code: str = ""
    """Of the error; empty for a row that can be asked."""
    message: str = ""


class Refused(ValueError):
    """A row that is no request. `code` is the error's in the answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Form:
    """How the rows of the input are written."""

    prompt_column: str | None = None
    """Where a row has its prompt: a text, token ids, or messages. None: rows are OpenAI's, with `url` and `body`."""
    id_column: str | None = "custom_id"
    """Where a row has its name. A row without one is named by its file and number."""
    chat: bool = False
    """A prompt that is a text becomes a user's message."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request that has a prompt: `{"temperature": 0}`."""
    body_columns: tuple[str, ...] = ()
    """Columns whose values are fields of the row's request."""

    @property
    def columns(self) -> list[str]:
        """Of a file with a prompt column, those that are read."""
        named = (self.prompt_column, self.id_column, *self.body_columns)
        return list(dict.fromkeys(name for name in named if name is not None))

    def name_of(self, value: Any) -> str | None:
        """The row's own name; None if it has none that can be a key."""
        name = value.get(self.id_column) if isinstance(value, Mapping) and self.id_column is not None else None
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        return name if isinstance(name, str) and name and is_utf8(name) else None

    def request(self, value: Any) -> tuple[str, str]:
        """URL and body of a row. Raises Refused."""
        if not isinstance(value, Mapping):
            raise Refused("invalid_row", f"a row must be a JSON object, got {type(value).__name__}")
        url, body = self._openai(value) if self.prompt_column is None else self._prompt(value, self.prompt_column)
        try:
            return url, json.dumps(body)
        except (TypeError, ValueError) as error:
            raise Refused("invalid_row", f"the request cannot be written as JSON: {error}") from error

    def _openai(self, value: Mapping[str, Any]) -> tuple[str, Any]:
        if self.name_of(value) is None:
            raise Refused("invalid_custom_id", f"custom_id must be a text, got {value.get('custom_id')!r:.100}")
        if value.get("method") != "POST":
            raise Refused("invalid_method", f"method must be 'POST', got {value.get('method')!r:.100}")
        url, body = value.get("url"), value.get("body")
        if url not in URLS:
            raise Refused("invalid_url", f"url must be one of {', '.join(URLS)}, got {url!r:.100}")
        if not isinstance(body, dict):
            raise Refused("invalid_body", f"body must be a JSON object, got {type(body).__name__}")
        if body.get("stream"):
            raise Refused("invalid_body", "body must not ask for a stream: an answer of a batch is whole")
        return url, body

    def _prompt(self, value: Mapping[str, Any], column: str) -> tuple[str, Any]:
        prompt = value.get(column)
        if not isinstance(prompt, str | list) or not prompt:
            raise Refused("invalid_prompt", f"{column} must be a text, messages or token ids, got {prompt!r:.100}")
        own = {name: value[name] for name in self.body_columns if value.get(name) is not None}
        if isinstance(prompt, str) and self.chat:
            prompt = [{"role": "user", "content": prompt}]
        is_conversation = isinstance(prompt, list) and isinstance(prompt[0], Mapping)
        url, name = (URLS[0], "messages") if is_conversation else (URLS[1], "prompt")
        return url, {**self.body, **own, name: prompt}


def is_utf8(text: str) -> bool:
    """Whether it can be written: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def writable(text: str) -> str:
    """With an escape in the place of half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()
