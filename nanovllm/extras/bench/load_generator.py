"""An open loop: requests leave at moments that were drawn in advance, and wait for no earlier answer.

The users of a server behave like this. A closed loop (a fixed number of users, each waiting for an answer) slows down
together with the server, and so hides the queue that it is to measure. `max_concurrency` closes the loop.
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
    """One request, as it went over the wire; times in seconds of `time.perf_counter()`."""

    due: float
    """When the request was to leave."""
    sent: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """When each piece of the body arrived, and its bytes."""
    ended: float = 0.0
    status: int | None = None
    """HTTP's status; None without an answer."""
    error: str | None = None


Send = Callable[[bytes, Exchange], Awaitable[None]]
"""Sends the body, and notes in the exchange what happens."""


def draw_departures(num_requests: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """When the requests leave, in seconds after the first, which leaves at once.

    request_rate: requests per second; `inf`: all at once.
    burstiness: shape of the gamma distribution of the gaps, whose mean is 1 / request_rate. With 1 the gaps are
        exponential, that is, requests are a Poisson process; smaller is burstier, larger more even.
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
    """Send each body at its moment; exchanges come in the order of the bodies. `on_end` is called after each."""
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
    """No task outlives the block, also when it fails or is interrupted."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
