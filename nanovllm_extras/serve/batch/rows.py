"""Convert a line or a record of the input to a request for a route, or to an error.

`batch_inputs.py` reads rows with a `Form`, and `replica.py` sends them to the routes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm_extras.options.surrogates import is_utf8

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RERANK, SCORE = ("/v1/rerank", "/rerank", "/v2/rerank"), ("/v1/score", "/score")
URLS = (CHAT, COMPLETION, "/v1/embeddings", *SCORE, *RERANK)


class Row(NamedTuple):
    """A request, or the error of a row that cannot be a request. All fields are strings: a table of them is sent."""

    custom_id: str
    """The row's unique name: the key of the input and of the answers."""
    url: str
    body: str
    """JSON."""
    code: str = ""
    """The code of the error; empty if the row is a request."""
    message: str = ""


class Refused(ValueError):
    """Raised for a row that cannot be a request. The answer's error has this `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Form:
    """The format of the input's rows."""

    prompt_column: str | None = None
    """The column of the prompt: a text, token ids, or messages. None: OpenAI's batch format, with `url` and `body`."""
    id_column: str | None = "custom_id"
    """The column of the row's name. A row without a name is named by its file and number."""
    chat: bool = False
    """Whether to send a prompt that is a text as a user's message."""
    body: Mapping[str, object] = field(default_factory=dict)
    """Fields that every request gets, if there is a prompt column: `{"temperature": 0}`."""
    body_columns: tuple[str, ...] = ()
    """Columns whose values become fields of the row's request. They override `body`."""

    @property
    def columns(self) -> list[str]:
        """The columns to read from a file with a prompt column."""
        named = (self.prompt_column, self.id_column, *self.body_columns)
        return list(dict.fromkeys(name for name in named if name is not None))

    def name_of(self, value: object) -> str | None:
        """Return the row's name; None if it is missing, empty, or neither a string nor an integer."""
        name = value.get(self.id_column) if isinstance(value, Mapping) and self.id_column is not None else None
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        return name if isinstance(name, str) and name and is_utf8(name) else None

    def request(self, value: object) -> tuple[str, str]:
        """Return the URL and the body (JSON) of a row's request. Raises Refused if the row cannot be a request."""
        if not isinstance(value, Mapping):
            raise Refused("invalid_row", f"a row must be a JSON object, got {type(value).__name__}")
        url, body = self._openai(value) if self.prompt_column is None else self._prompt(value, self.prompt_column)
        try:
            return url, json.dumps(body)
        except (TypeError, ValueError) as error:
            raise Refused("invalid_row", f"the request cannot be written as JSON: {error}") from error

    def _openai(self, value: Mapping[str, object]) -> tuple[str, object]:
        if self.name_of(value) is None:
            raise Refused("invalid_custom_id", f"custom_id must be a text, got {value.get('custom_id')!r:.100}")
        if value.get("method") != "POST":
            raise Refused("invalid_method", f"method must be 'POST', got {value.get('method')!r:.100}")
        url, body = value.get("url"), value.get("body")
        if not isinstance(url, str) or url not in URLS:
            raise Refused("invalid_url", f"url must be one of {', '.join(URLS)}, got {url!r:.100}")
        if not isinstance(body, dict):
            raise Refused("invalid_body", f"body must be a JSON object, got {type(body).__name__}")
        if body.get("stream"):
            raise Refused("invalid_body", "body must not set stream: run-batch does not stream answers")
        return url, body

    def _prompt(self, value: Mapping[str, object], column: str) -> tuple[str, object]:
        prompt = value.get(column)
        if not isinstance(prompt, str | list) or not prompt:
            raise Refused("invalid_prompt", f"{column} must be a text, messages or token ids, got {prompt!r:.100}")
        own = {name: value[name] for name in self.body_columns if value.get(name) is not None}
        if isinstance(prompt, str) and self.chat:
            prompt = [{"role": "user", "content": prompt}]
        is_conversation = isinstance(prompt, list) and isinstance(prompt[0], Mapping)
        url, name = (CHAT, "messages") if is_conversation else (COMPLETION, "prompt")
        return url, {**self.body, **own, name: prompt}


def writable(text: str) -> str:
    """Return `text` with each lone surrogate replaced by an escape sequence."""
    return text.encode("utf-8", "backslashreplace").decode()
