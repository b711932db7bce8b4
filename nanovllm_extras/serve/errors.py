"""Convert exceptions to the errors that clients get: OpenAI's JSON, with the status that OpenAI's clients expect.
On the paths of Anthropic's API, errors have the form of `anthropic_errors.py`.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "temperature", "code": null}}

`param` is the invalid field of the request. Errors contain no traceback. OpenAI documents the JSON and the statuses:
https://platform.openai.com/docs/guides/error-codes
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from nanovllm_extras.engine.no_token import NoTokenError
from nanovllm_extras.serve.anthropic_errors import is_messages_path, request_id_of, to_anthropic
from nanovllm_extras.serve.async_llm import QueueFullError
from nanovllm_extras.serve.engine_thread import EngineDeadError
from nanovllm_extras.serve.messages.protocol import CONFLICT
from nanovllm_extras.serve.workers import Busy, ClientGone

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters: a message quotes the bad value, which can be as long as the request
BRANCH = re.compile(r"\[|^(str|int|float|bool|dict|constrained-str)$|^function-|^[A-Z]\w*$")
NO_PATH = "Not Found"  # what Starlette says of a path that no route has
TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}


class APIError(HTTPException):
    """An error that becomes the answer if a route, or one of its dependencies, raises it."""

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

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON of the error. A long message is cut."""
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.shown, "type": kind, "param": self.param, "code": self.code}}

    @property
    def shown(self) -> str:
        """The message. A long one is cut."""
        return self.detail if len(self.detail) <= MAX_MESSAGE else self.detail[:MAX_MESSAGE] + "…"

    def anthropic_body(self, request_id: str | None) -> dict[str, object]:
        """Return the JSON of the error in the form of Anthropic's API."""
        return to_anthropic(self.status_code, self.shown, self.code, request_id)[1]

    def response(self, scope: Scope) -> Response:
        """Return the response with the error, in the form of the API that the request's path belongs to."""
        status, body = self.status_code, dict[str, object](self.body())
        if is_messages_path(scope["path"]):
            status, body = to_anthropic(self.status_code, self.shown, self.code, request_id_of(scope))
        # pure ASCII: a message may quote characters that UTF-8 cannot encode
        return Response(json.dumps(body), status, self.headers, "application/json")


def as_api_error(error: Exception) -> APIError:
    """Return the error that a client gets for an exception."""
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
        return APIError(499, "the client has closed the connection")
    if isinstance(error, NoTokenError):
        return APIError(400, str(error), code="no_token")
    if isinstance(error, EngineDeadError):
        return APIError(503, "the engine has failed; the server must be restarted", code="engine_dead")
    return APIError(500, "the server failed to process the request; its log has the reason", code="internal_error")


def from_validation(error: RequestValidationError) -> APIError:
    """Return the error for a body that `protocol.py` refuses.

    If a value matches none of several types, take the error with the longest path: that type was the nearest match.
    """
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    # the path to the field, without the names of a union's branches: types, validators and models
    path = [str(part) for part in first["loc"][1:] if not BRANCH.search(str(part))]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first['ctx']['error']} at character {path[0]}")
    if not path and first["type"] in ("missing", "model_attributes_type", "dict_type"):
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "none_required":
        message = "must be absent or null: other values are not supported"
    if first["type"] == CONFLICT:
        return APIError(400, message, param=first["ctx"]["field"])
    return APIError(400, f"{'.'.join(path) or 'the body'}: {message}", param=path[0] if path else None)


@contextmanager
def refuse(field: str) -> Iterator[None]:
    """Convert a ValueError or TypeError, raised by the checks of one field, to an APIError 400 that names the field.

    An attribute `code` of the error is the code of the APIError.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise APIError(400, str(error), field, getattr(error, "code", None)) from error


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors of the block. names: name of a chat's field -> name of the request's field."""
    try:
        yield
    except APIError as error:
        name = names.get(error.param or "", error.param)
        message = error.detail.replace(str(error.param), str(name), 1) if name != error.param else error.detail
        raise APIError(error.status_code, message, name, error.code, dict(error.headers or {})) from error


async def answer(request: Request, error: Exception) -> Response:
    """Log an exception, and return the response with the error."""
    told = as_api_error(error)
    if told.status_code == 404 and told.detail == NO_PATH:
        hint = "the base URL of OpenAI's clients ends with /v1, that of Anthropic's clients is without /v1"
        told = APIError(404, f"there is no {request.scope['path']}; {hint}")
    elif told.status_code == 405:
        message = f"{request.scope['path']} does not take {request.method}; use another method"
        told = APIError(405, message, headers=dict(told.headers or {}))
    if told.status_code == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    else:
        logger.info("%s %s %d %s", request.method, request.url.path, told.status_code, told.detail[:200])
    return told.response(request.scope)


def install_error_handlers(app: FastAPI) -> None:
    """Answer all exceptions of the application's routes with `answer`."""
    known = (RequestValidationError, HTTPException, QueueFullError, Busy, ClientGone, EngineDeadError)
    for kind in (*known, Exception):
        app.add_exception_handler(kind, answer)
