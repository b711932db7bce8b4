"""Handle the header `x-request-id`: the client's name of a request is used in the answer's header, its id and the log.

A request without the header, or with a value that is not allowed, gets a random name.
"""

import re
from uuid import uuid4

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm_extras.serve.anthropic_errors import is_messages_path

NAME = "x-request-id"
ANTHROPIC_NAME = "request-id"  # the header that Anthropic's clients read
ALLOWED = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Middleware that stores the name of each request, and sends it in the answer's header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(NAME)
        if given is not None and not ALLOWED.fullmatch(given):
            given = None
        name = given or uuid4().hex

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[NAME] = name
                if is_messages_path(scope["path"]):
                    headers[ANTHROPIC_NAME] = name
            await send(message)

        scope.setdefault("state", {}).update(given_id=given, request_id=name)
        await self._app(scope, receive, send_with_name)


def new_id(prefix: str, request: Request) -> str:
    """Return the id of an answer: `prefix`, for example `chatcmpl`, and the client's id or a random name."""
    return f"{prefix}-{getattr(request.state, 'given_id', None) or uuid4().hex}"
