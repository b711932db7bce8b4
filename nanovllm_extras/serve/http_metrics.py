"""Count HTTP requests and measure their times, refused ones included, for Prometheus: middleware and its metrics.

The names are those of vLLM's server, which uses the package prometheus-fastapi-instrumentator: `http_requests_total`
and `http_request_duration_seconds`. Here, `status` is the exact status, so that 401 and 429 can be told apart.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
OTHER = "none"
"""The handler of unknown paths and the method of unknown methods. Clients choose them, and each label needs memory."""
GONE = 499  # the status, as of nginx, if the client has disconnected before the answer
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DURATION = "From the start of an HTTP request to the end of its answer, in seconds."


class HTTPCounts:
    """The number and the times of the HTTP requests of a server so far."""

    def __init__(self) -> None:
        self.num_requests: Counter[tuple[str, str, int]] = Counter()  # by handler, method and status
        self._buckets: dict[tuple[str, str], list[int]] = {}  # by handler and method: number up to each of BOUNDS
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def note(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has been answered."""
        self.num_requests[handler, method, status] += 1
        buckets = self._buckets.setdefault((handler, method), [0] * (len(BOUNDS) + 1))
        buckets[bisect_left(BOUNDS, seconds)] += 1
        self._seconds[handler, method] += seconds

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=["handler", "method", "status"])
        for (handler, method, status), number in sorted(self.num_requests.items()):
            requests.add_metric([handler, method, str(status)], number)
        yield requests
        durations = HistogramMetricFamily("http_request_duration_seconds", DURATION, labels=["handler", "method"])
        for labels, counts in sorted(self._buckets.items()):
            buckets = zip([*map(str, BOUNDS), "+Inf"], accumulate(counts), strict=True)
            durations.add_metric(labels, list(buckets), self._seconds[labels])
        yield durations


class HTTPMetrics:
    """Middleware that counts each request when it has been answered. It is the first, so that it sees refusals."""

    def __init__(self, app: ASGIApp, counts: HTTPCounts, paths: list[str], root_path: str) -> None:
        """paths: those of the application's routes. A path may have one parameter, as `/models/{name}`."""
        self._app = app
        self._counts = counts
        self._root_path = root_path
        self._whole = {path for path in paths if "{" not in path}
        named = [(path[: path.index("{")], path[path.index("}") + 1 :], path) for path in paths if "{" in path]
        self._named = sorted(named, key=lambda parts: -len(parts[1]))  # the longest end first; most have none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), GONE

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._counts.note(self._handler(scope["path"]), method, status, time.monotonic() - start)

    def _handler(self, path: str) -> str:
        path = path.removeprefix(self._root_path)
        if path in self._whole:
            return path
        matches = (whole for begin, end, whole in self._named if path.startswith(begin) and path.endswith(end))
        return next(matches, OTHER)
