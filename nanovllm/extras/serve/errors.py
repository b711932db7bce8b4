"""Errors as a client sees them: OpenAI's JSON shape, the status that OpenAI's clients expect, and no traceback.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "temperature", "code": null}}

Shape and statuses: https://platform.openai.com/docs/guides/error-codes. `param` is the field of the request at fault.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from nanovllm.extras.serve.async_llm import QueueFullError
from nanovllm.extras.serve.engine_thread import EngineDeadError
from nanovllm.extras.serve.protocol import CONFLICT
from nanovllm.extras.serve.workers import Busy, ClientGone

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters: a message quotes the bad value, which can be as long as the request
TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}


class APIError(HTTPException):
    """Raised anywhere in a route or its dependencies; becomes the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        message = self.detail if len(self.detail) <= MAX_MESSAGE else self.detail[:MAX_MESSAGE] + "…"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # pure ASCII: a message may quote characters that UTF-8 cannot encode
        return Response(json.dumps(self.body()), self.status_code, self.headers, "application/json")


def as_api_error(error: Exception) -> APIError:
    """What a client is told of an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return from_validation(error)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, Busy):
        return APIError(429, str(error), code="busy", headers={"Retry-After": "1"})
    if isinstance(error, ClientGone):
        return APIError(499, "the client has gone")
    if isinstance(error, EngineDeadError):
        return APIError(503, "the engine has failed and must be started anew", code="engine_dead")
    return APIError(500, "the server has failed at this request; its log says why", code="internal_error")


def from_validation(error: RequestValidationError) -> APIError:
    """What `protocol.py` does not allow: of a value that fits none of several types, the error nearest to one."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    # where it stands, without the names of a union's branches
    path = [str(part) for part in first["loc"][1:] if not re.search(r"\[|^str$|^constrained-str$|^function", str(part))]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first['ctx']['error']} at character {path[0]}")
    if not path and first["type"] in ("missing", "model_attributes_type", "dict_type"):
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == CONFLICT:
        return APIError(400, message, param=first["ctx"]["field"])
    return APIError(400, f"{'.'.join(path) or 'the body'}: {message}", param=path[0] if path else None)


@contextmanager
def refuse(field: str, code: str | None = None) -> Iterator[None]:
    """Around checks of one field: a ValueError or TypeError becomes a 400 that names the field.

    An error may bring a `code` of its own.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise APIError(400, str(error), field, getattr(error, "code", code)) from error


async def answer(request: Request, error: Exception) -> Response:
    """Log an exception, and tell the client of it."""
    told = as_api_error(error)
    if told.status_code == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    else:
        logger.info("%s %s %d %s", request.method, request.url.path, told.status_code, told.detail[:200])
    return told.response()


def install_error_handlers(app: FastAPI) -> None:
    known = (RequestValidationError, HTTPException, QueueFullError, Busy, ClientGone, EngineDeadError)
    for kind in (*known, Exception):
        app.add_exception_handler(kind, answer)
