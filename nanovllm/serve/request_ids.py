"""`x-request-id`: the client's own name of a request is in its answer's header, its id and the log.

A request without the header gets a name in its answer all the same.
"""

import re
from uuid import uuid4

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.serve.errors import APIError

NAME = "x-request-id"
ALLOWED = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Middleware: notes the name of each request, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(NAME)
        is_allowed = given is None or ALLOWED.fullmatch(given) is not None
        name = given if given is not None and is_allowed else uuid4().hex

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[NAME] = name
            await send(message)

        if is_allowed:
            scope.setdefault("state", {})["given_id"] = given
            await self._app(scope, receive, send_with_name)
            return
        error = APIError(400, f"{NAME} must have 1 to 128 visible ASCII characters", NAME)
        await error.response()(scope, receive, send_with_name)


def new_id(prefix: str, request: Request) -> str:
    """The id of an answer: `chatcmpl-` and what the client calls the request, or a random name."""
    return f"{prefix}-{getattr(request.state, 'given_id', None) or uuid4().hex}"
