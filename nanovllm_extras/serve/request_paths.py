"""Read the paths of requests as clients write them: with slashes too many, or with the server's address before them.

Clients join a base URL and a route, and `http://host/v1/` + `/completions` has two slashes. A redirect would not help:
many clients do not follow it or drop their key, and behind a proxy of HTTPS it would name the wrong scheme.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

ADDRESS = re.compile(r"https?://[^/]*")  # of a client that takes the server for its proxy
NAMED = re.compile(r"(.*/v1/+models/)(.+)")  # the name of a model may be a path, with any slashes


class RequestPaths:
    """Middleware that corrects the path. It is the first, so that all others see the path of a route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = corrected(scope["path"])
        await self._app(scope, receive, send)


def corrected(path: str) -> str:
    """Return the path without an address, repeated slashes, and a slash at its end."""
    path = ADDRESS.sub("", path, count=1) if ADDRESS.match(path) else path
    named = NAMED.fullmatch(path)
    route, name = named.groups() if named else (path.rstrip("/") or "/", "")
    return re.sub("/+", "/", route) + name
