"""What becomes of bytes that are no HTTP request? uvicorn's parser refuses them before the application sees anything;
here its answer gets the form of all other errors.
"""

import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.serve.errors import APIError

REFUSAL = "this is no valid HTTP/1.1 request, or its headers are too large"


class JSONErrors:
    """Goes before one of uvicorn's protocols, of which each connection has an object: calls of the parser come here."""

    transport: Any
    cycle: Any  # the newest request of the connection, and its answer

    def send_400_response(self, msg: str) -> None:
        """Called by the protocol, whose `msg` says only that the request is invalid."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps(APIError(400, REFUSAL).body()).encode()
            head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()  # in the midst of an answer nothing else can be said


class HTTPProtocol(JSONErrors, H11Protocol):
    pass
