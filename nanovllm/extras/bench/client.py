"""Send one request over HTTP, and record the bytes of the answer with their times.

The client may share the machine with the server that it measures, so it does little work during the load: bodies are
encoded before the load, and answers are stored as raw bytes with their times. `results.py` parses them afterwards.
`aiohttp` parses HTTP in C. For 100 streams with together 4,000 chunks per second, it used 26 µs of processor time per
chunk, and 18 µs with `uvloop`. `httpx` used 88 µs and was too slow: half of its chunks arrived in bursts.
"""

import asyncio
import json
import time
from typing import Any

import aiohttp

from nanovllm.extras.bench.load_generator import Exchange

TIMEOUT_S = 6 * 60 * 60
FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class Client:
    """A client of one server, without a limit of connections: `async with Client(base_url, headers) as client`."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **headers}

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: bytes, exchange: Exchange) -> None:
        """Send a body, and store the status and the bytes of the answer, or the error, in `exchange`."""
        reads = exchange.reads
        try:
            async with self._session.post(self._base_url + path, data=body) as response:
                exchange.status = response.status
                async for data in response.content.iter_any():
                    reads.append((time.perf_counter(), data))
        except FAILURES as error:
            exchange.error = f"{type(error).__name__}: {error}"

    async def find_model(self, timeout_s: float) -> str:
        """Return the name of the first model that the server lists.

        Repeats the request until a model is listed. Raises ConnectionError after `timeout_s`, or immediately if the
        status is 4xx, because another try would not change it.
        """
        deadline = time.perf_counter() + timeout_s
        while True:
            try:
                return await self._first_model()
            except (*FAILURES, ValueError) as error:
                is_refused = isinstance(error, aiohttp.ClientResponseError) and error.status < 500
                if is_refused or time.perf_counter() > deadline:
                    raise ConnectionError(f"{self._base_url}/v1/models does not list a model: {error}") from error
                await asyncio.sleep(0.2)

    async def _first_model(self) -> str:
        async with self._session.get(self._base_url + "/v1/models") as response:
            response.raise_for_status()
            answer: Any = json.loads(await response.read())
        try:
            return answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the answer is {answer!r}") from None
