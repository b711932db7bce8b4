"""Generate load in an open loop: requests are sent at times drawn in advance, and do not wait for earlier answers.

The users of a server behave like this. A closed loop (a fixed number of users, each waiting for an answer) slows down
when the server slows down, and so hides the queue that it should measure. `max_concurrency` closes the loop.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Exchange:
    """One request and its answer as bytes. Times are in seconds, from `time.perf_counter()`."""

    due: float
    """The time at which the request should be sent."""
    sent: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """The arrival time and the bytes of each piece of the answer's body."""
    ended: float = 0.0
    status: int | None = None
    """The HTTP status; None without an answer."""
    error: str | None = None


Send = Callable[[bytes, Exchange], Awaitable[None]]
"""A function that sends the body, and stores the answer in the exchange."""


def draw_departures(num_requests: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return the departure times of the requests, in seconds after the first request.

    request_rate: requests per second; `inf`: all at once.
    burstiness: shape of the gamma distribution of the gaps, whose mean is 1 / request_rate. With 1 the gaps are
        exponential, that is, the requests are a Poisson process; smaller values are burstier, larger ones more even.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), num_requests)
    gaps[:1] = 0.0
    return np.cumsum(gaps).tolist()


async def offer(
    bodies: list[bytes],
    departures: list[float],
    send: Send,
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> list[Exchange]:
    """Send each body at its departure time, and return the exchanges in the order of the bodies.

    on_end: called after each exchange.
    """
    free_slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def exchange_one(body: bytes, due: float) -> Exchange:
        exchange = Exchange(due)
        async with free_slots:
            exchange.sent = time.perf_counter()
            await send(body, exchange)
            exchange.ended = time.perf_counter()
        on_end()
        return exchange

    start = time.perf_counter()
    tasks: list[asyncio.Task[Exchange]] = []
    with cancelling(tasks):
        for body, departure in zip(bodies, departures, strict=True):
            if (wait := start + departure - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(exchange_one(body, start + departure)))
        return await asyncio.gather(*tasks)


@contextlib.contextmanager
def cancelling(tasks: list[asyncio.Task]) -> Iterator[None]:
    """Cancel all tasks at the end of the block, also if the block fails or is interrupted."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
