"""Convert errors to the form of Anthropic's API, for the paths of this API.

    {"type": "error", "error": {"type": "not_found_error", "message": "…"}, "request_id": "…"}

Clients choose their exception, and whether they try again, by the status. https://docs.anthropic.com/en/api/errors
"""

import re

from starlette.datastructures import Headers
from starlette.types import Scope

PATH = re.compile(r"/v1/messages(/|$)")
OVERLOADED = 529  # a status of this API only
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Status -> type. Others are `api_error` from 500 on, and `invalid_request_error` below."""
NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's clients see that they must send the whole conversation."""
BUSY = ("queue_full", "busy")
"""Codes of errors that tell of too many requests of all clients together, not of one client."""


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return PATH.search(path) is not None


def to_anthropic(status: int, message: str, code: str | None, request_id: str | None) -> tuple[int, dict[str, object]]:
    """Return the status and the JSON of an error. status, code: those of the error in OpenAI's form."""
    if code in BUSY:
        status = OVERLOADED
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, object] = {"type": kind, "message": message}
    if code == NO_THREADS:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return status, {"type": "error", "error": error, "request_id": request_id}


def request_id_of(scope: Scope) -> str | None:
    """Return the name of a request: the one that this process has given it, or that of the header `x-request-id`."""
    name: str | None = scope.get("state", {}).get("request_id") or Headers(scope=scope).get("x-request-id")
    return name
