"""Send one request over HTTP, and record the bytes of the answer with their times.

The client may share the machine with the server that it measures, so it does little work during the load: bodies are
encoded before the load, and answers are stored as raw bytes with their times. `results.py` parses them afterwards.
`aiohttp` parses HTTP in C. For 100 streams with together 4,000 chunks per second, it used 26 µs of processor time per
chunk, and 18 µs with `uvloop`. `httpx` used 88 µs and was too slow: half of its chunks arrived in bursts.
"""

import asyncio
import json
import sys
import time

import aiohttp

from nanovllm_extras.bench.load_generator import Exchange
from nanovllm_extras.machine.printing import say

TIMEOUT_S = 6 * 60 * 60
READY_S = 600.0  # default limit for a server that answers, but is not ready
REACHABLE_S = 5.0  # default limit for a server that does not answer
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

    async def find_model(self, name: str | None, timeout_s: float | None) -> str:
        """Wait until the server answers, and return `name`, or without a name that of the first model that it lists.

        A model that is being loaded (status 5xx) is waited for. Raises ConnectionError after `timeout_s`, or
        immediately if the status is 4xx, because another try would not change it. Without `timeout_s`, it is `READY_S`,
        or `REACHABLE_S` while there is no answer at all: then the address is probably wrong.
        """
        start, has_told = time.perf_counter(), False
        while True:
            try:
                found = await self._first_model()
                return found if name is None else name
            except (*FAILURES, ValueError) as error:
                has_status, is_other = isinstance(error, aiohttp.ClientResponseError), not isinstance(error, FAILURES)
                is_refused = isinstance(error, aiohttp.ClientResponseError) and error.status < 500
                if name is not None and (is_refused or is_other):
                    return name  # a server may list no models
                limit = (READY_S if has_status or is_other else REACHABLE_S) if timeout_s is None else timeout_s
                if is_refused or time.perf_counter() - start > limit:
                    raise ConnectionError(f"{self._base_url}/v1/models does not list a model: {error}") from error
                if not has_told:
                    say(f"waiting for {self._base_url}: {error}", sys.stderr)
                    has_told = True
                await asyncio.sleep(0.2)

    async def _first_model(self) -> str:
        async with self._session.get(self._base_url + "/v1/models") as response:
            response.raise_for_status()
            answer = json.loads(await response.read())
        try:
            return answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the answer is {answer!r}") from None
