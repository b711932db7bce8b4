"""Run one replica: the deployment `Engine` is a complete server without a socket. `ingress.py` sends its requests."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve

from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.ray.calls import Call, Part, run
from nanovllm_extras.serve.ray.prefix import Holder, Prefix
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.serve_settings import keep_from_collector, log_to_stderr
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.serve.state import Server

logger = logging.getLogger(__name__)

PACE_S = 1e-3  # minimum interval, times the number of streams: a replica sends at most 1,000 messages per second
EXIT_S = 1.0  # time to send the remaining answers before the process ends


class Engine:
    """A deployment of Serve. engine_options: the fields of `Config`.

    If the engine is dead, the replica fails its health checks, and Serve replaces it after three failed checks. If a
    request arrives before that, it ends the process: otherwise Serve's router would prefer this replica, because it
    answers so quickly.
    """

    def __init__(
        self,
        engine_options: Mapping[str, Any],
        options: ServerOptions,
        max_queued_requests: int | None,
        interval_s: float,
        log_level: str,
    ) -> None:
        log_to_stderr(log_level)
        self._llm = AsyncLLM(**engine_options, max_queued_requests=max_queued_requests)
        keep_from_collector()
        self._app = make_app(options, self._llm)
        self._app.state.server.responses.tag = serve.get_replica_context().replica_id.unique_id
        self._interval_s = interval_s
        self._num_answers = 0  # answers in progress

    async def answer(self, key: Prefix | Holder | None = None, *, call: Call) -> AsyncGenerator[Part, None]:
        """Yield the parts of the answer. key: read only by the router."""
        if self._llm.thread.dead is not None:
            logger.error("this process ends, because its engine is dead")
            asyncio.get_running_loop().call_later(EXIT_S, os._exit, 1)
        parts = run(self._app, call, lambda: max(self._interval_s, PACE_S * self._num_answers))
        self._num_answers += 1
        try:
            async for part in parts:
                yield part
        finally:
            self._num_answers -= 1
            await parts.aclose()

    async def metrics(self) -> tuple[dict[str, str], bytes]:
        """Return labels with the names of the deployment and the replica, and metrics in Prometheus' text format."""
        server: Server = self._app.state.server
        context = serve.get_replica_context()
        labels = {"deployment": context.deployment, "replica": context.replica_id.unique_id}
        return labels, server.metrics.as_text()

    async def load(self) -> int:
        """Return the number of requests in progress."""
        server: Server = self._app.state.server
        return server.num_in_progress

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead. Serve calls this regularly."""
        await self._llm.check_health()

    def __del__(self) -> None:  # Serve calls this when a replica that ends has no requests left
        if hasattr(self, "_llm"):
            self._llm.shutdown()
