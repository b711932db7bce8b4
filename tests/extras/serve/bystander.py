"""A client beside an attack: polls `/health`, reads a stream, and says how long it had to wait for either.

    python -S bystander.py PORT     each line on its input is answered with the longest waits, in ms, since the last one

When the stream ends, it starts again. `start` is how long its first token took: it queues behind what came before.

A process of its own, with nothing but sockets: what a test does meanwhile does not disturb its clock.
"""

import json
import socket
import sys
import threading
import time

PAUSE_S = 0.005
# Only the token "a", so that each step sends text: a free model writes up to 22 tokens that are parts of a character.
STREAM = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "allowed_token_ids": [67], "stream": True}


class Waits:
    """The longest wait, the one that goes on included."""

    def __init__(self):
        self._lock = threading.Lock()
        self._since, self._longest = None, 0.0

    def note(self):
        """What was waited for has come, and the next is waited for."""
        with self._lock:
            now = time.perf_counter()
            self._longest, self._since = max(self._longest, now - self._since), now

    def begin(self):
        with self._lock:
            self._since = time.perf_counter()

    def stop(self):
        """Nothing is waited for."""
        with self._lock:
            self._since = None

    def take(self):
        """In ms; the next one counts from now."""
        with self._lock:
            now, longest = time.perf_counter(), self._longest
            if self._since is not None:
                longest = max(longest, now - self._since)
                self._since = now
            self._longest = 0.0
            return 1000 * longest


def request(path, method="GET", body=b""):
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def connect(port):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def poll(port, waits):
    with connect(port) as connection:
        while True:
            waits.begin()
            connection.sendall(request("/health"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            waits.note()
            time.sleep(PAUSE_S)


def stream(port, waits, starts):
    content = request("/v1/completions", "POST", json.dumps(STREAM).encode())
    with connect(port) as connection:
        while True:
            waits.stop()
            starts.begin()
            connection.sendall(content)
            received, is_begun = b"", False
            while b"data: [DONE]" not in received:
                piece = connection.recv(65536)
                assert piece
                received = received[-30:] + piece
                if is_begun:
                    waits.note()
                elif b"data: " in received:  # headers come before the first token
                    is_begun = True
                    starts.note()
                    starts.stop()
                    waits.begin()


def main(port):
    health, text, starts = Waits(), Waits(), Waits()
    threading.Thread(target=poll, args=[port, health], daemon=True).start()
    threading.Thread(target=stream, args=[port, text, starts], daemon=True).start()
    for _ in sys.stdin:
        taken = {"health": health.take(), "stream": text.take(), "start": starts.take()}
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
