"""Call the replicas of one deployment. To a dispatcher, a deployment is one engine: Serve chooses the replica."""

import asyncio
from contextlib import suppress
from typing import Any, NamedTuple

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponseGenerator

from nanovllm_extras.serve.disaggregation import UnavailableError, prefill_headers
from nanovllm_extras.serve.ray.calls import Call, Part
from nanovllm_extras.serve.ray.prefix import Holder, Prefix, prefix_of
from nanovllm_extras.serve.response_holder import replica_of

HEALTH_S = 5.0  # timeout for the answers of the replicas
HEALTH_AGE_S = 1.0  # time for which the result of a health check is cached
START_S = 60.0  # timeout for the start of the router


class Begun(NamedTuple):
    """An answer whose first part has arrived. `parts` has the others, and must be cancelled in the end."""

    first: Part
    parts: DeploymentResponseGenerator[Part]


class Replicas:
    """The replicas of a deployment. handle: that of the deployment."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)
        self._health: tuple[float, asyncio.Future[list[Any]] | None] = (0.0, None)  # start of the last check, and check
        self._is_routing = False

    async def begin(self, call: Call, needs_body: bool = False) -> Begun:
        """Return an answer that has begun. Raises Ray's exceptions.

        needs_body: wait for a byte of the body. A stream's status and headers may arrive earlier.
        """
        replica = replica_of(call.path, call.body)
        key: Prefix | Holder | None = None if replica is None else Holder(replica)
        if key is None and call.method == "POST":
            key = prefix_of(call.body)
        parts = self._answers.remote(*([] if key is None else [key]), call=call)
        try:
            first = await anext(parts)
            while needs_body and not (first.body or first.is_last):
                first = (await anext(parts))._replace(status=first.status, headers=first.headers)
            return Begun(first, parts)
        except BaseException:  # CancelledError, too
            parts.cancel()
            raise

    async def answer(self, call: Call) -> Begun:
        """Return an answer that has begun. Raises UnavailableError if the replica dies before, or answers 503."""
        try:
            begun = await self.begin(call, needs_body=True)
        except RayActorError as error:
            raise UnavailableError(repr(error)) from error
        if begun.first.status == 503:
            begun.parts.cancel()
            raise UnavailableError("status 503")
        return begun

    async def prefill(self, call: Call, body: bytes) -> int:
        """Send `call` with another body, and return the status of the answer. Raises UnavailableError.

        Serve lets a call wait until a replica runs. So the replicas' health is checked while the call waits.
        """
        prompt = call._replace(body=body, headers=prefill_headers(call.headers))
        calling, failing = asyncio.ensure_future(self._status(prompt)), asyncio.ensure_future(self._until_unhealthy())
        try:
            await asyncio.wait((calling, failing), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise UnavailableError("no replica is healthy")
            return calling.result()
        finally:
            calling.cancel()
            failing.cancel()

    async def _status(self, call: Call) -> int:
        """Return the status of an answer that has one part, because it is not a stream. Raises UnavailableError."""
        try:
            first, parts = await self.begin(call)
        except BackPressureError:
            return 429
        except (RayError, DeploymentUnavailableError) as error:
            raise UnavailableError(repr(error)) from error
        parts.cancel()  # this has no effect if the answer is complete
        return first.status

    async def _until_unhealthy(self) -> None:
        """Return when no replica is healthy."""
        while await self.is_healthy():
            await asyncio.sleep(HEALTH_AGE_S)

    async def is_healthy(self) -> bool:
        """Return whether a replica is healthy. Callers share one check until it is `HEALTH_AGE_S` old."""
        now, (begin, check) = asyncio.get_running_loop().time(), self._health
        if check is None or now - begin >= HEALTH_AGE_S:
            check = asyncio.ensure_future(self.ask_all("check_health"))
            self._health = now, check
        return bool(await asyncio.shield(check))

    async def ask_all(self, method: str) -> list[Any]:
        """Call a method of all replicas, and return the results of those that answer in time without an error."""
        try:
            answers = await self._handle.broadcast(method).results_async(timeout_s=HEALTH_S, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return [one for one in answers if not isinstance(one, BaseException)]

    async def wait_for_router(self) -> None:
        """Wait until requests can be routed: the router's actor may start slowly."""
        if not self._is_routing:
            with suppress(DeploymentUnavailableError):  # the router works, but no replica runs yet
                await self._handle.broadcast("check_health").results_async(timeout_s=START_S, return_exceptions=True)
            self._is_routing = True
