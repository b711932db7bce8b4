"""Serve the page of one recording on this machine, and answer its "what if" by the core's scheduler.

Other web pages in the same browser must not be able to use the server, and neither must other users of the machine.
So the server listens on the loopback address only, and its paths begin with a random word. It refuses requests with
another `Host` (a foreign name that resolves to this machine) and questions with another `Origin`. One run is computed
at a time, and it is stopped when it takes too long (`answer.py`).
"""

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from nanovllm_extras.trace.page import make_page
from nanovllm_extras.what_if.answer import MAX_SECONDS, answer
from nanovllm_extras.what_if.recorded_run import RecordedRun

ADDRESS = "127.0.0.1"
MAX_BODY = 100_000
"""Bytes of a question."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Refusal(Exception):
    """A request that the server refuses with an HTTP status."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class WhatIfServer(ThreadingHTTPServer):
    """Serves the page of the recording at `path`, and answers questions about its `run`, on a port that is free."""

    daemon_threads = True

    def __init__(
        self, path: Path, run: RecordedRun, texts: Mapping[str, str], max_seconds: float = MAX_SECONDS
    ) -> None:
        super().__init__((ADDRESS, 0), Handler)
        self.name, self.run, self.texts, self.max_seconds = path.name, run, texts, max_seconds
        self.page = make_page([path], can_ask=True).encode()
        self.root = f"/{secrets.token_urlsafe(16)}/"
        self.host = f"{ADDRESS}:{self.server_port}"
        self._is_computing = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{self.host}{self.root}"

    def answer(self, question: object) -> dict[str, Any]:
        """Return the answer to a question, which names the recording."""
        if not isinstance(question, dict):
            raise Refusal(HTTPStatus.BAD_REQUEST, "a question must be a JSON object")
        request = dict(question)
        if request.pop("recording", None) != self.name:
            return {"error": f"this server answers questions about {self.name} only; run nanovllm view with the file"}
        with self._is_computing:
            return answer(self.run, self.texts, request, self.max_seconds)


class Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds in which a request must arrive
    server_version = "nanovllm"

    def do_GET(self) -> None:  # http.server chooses this name
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def _respond(self, make: Callable[[], tuple[str, bytes]]) -> None:
        kind, content = "text/plain; charset=utf-8", b""
        try:
            self._check_host()
            kind, content = make()
            status = HTTPStatus.OK
        except Refusal as refusal:
            status, content = refusal.status, str(refusal).encode()
        self.close_connection = True  # a refused question's body is not read
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    @property
    def _server(self) -> WhatIfServer:
        return cast("WhatIfServer", self.server)

    def _check_host(self) -> None:
        if self.headers.get("Host") != self._server.host:
            raise Refusal(HTTPStatus.FORBIDDEN, f"the page is at {self._server.host}, not at this name")

    def _get(self) -> tuple[str, bytes]:
        if self.path != self._server.root:
            raise Refusal(HTTPStatus.NOT_FOUND, "nothing is at this path; use the address that nanovllm view prints")
        return "text/html; charset=utf-8", self._server.page

    def _post(self) -> tuple[str, bytes]:
        if self.path != f"{self._server.root}ask":
            raise Refusal(HTTPStatus.NOT_FOUND, "nothing is at this path; use the address that nanovllm view prints")
        if self.headers.get("Origin") != f"http://{self._server.host}":
            raise Refusal(HTTPStatus.FORBIDDEN, "only the page that this server shows may ask")
        if self.headers.get("Content-Type") != "application/json":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a question has the type application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a question has a Content-Length")
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MAX_BODY} bytes")
        try:
            question = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"a question is JSON: {error}") from None
        return "application/json", json.dumps(self._server.answer(question)).encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""
