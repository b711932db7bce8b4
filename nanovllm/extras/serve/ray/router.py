"""Serve's prefix-aware router, with what keeps it going.

`PrefixCacheAffinityRouter` is public as `ray.serve.llm.request_router.PrefixCacheAffinityRouter`, but `ray.serve.llm`
cannot be imported without vLLM or SGLang (Ray 2.60). The class's own file needs neither.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

logger = logging.getLogger(__name__)

MAX_KEYS = 400_000  # characters of all keys: 25 million of prompts


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """`import ray.llm` makes the process log JSON."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


with root_logger_kept():
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


def router_options(max_num_seqs: int) -> dict[str, Any]:
    """Arguments of `initialize_state`. Prefixes count while queues differ by at most a sixteenth of a batch.

    Ray's own default is infinity: then one system prompt that all requests share keeps all of them on one replica.
    """
    return {
        "imbalanced_threshold": max(2, max_num_seqs // 16),
        "do_eviction": True,
        "eviction_threshold_chars": MAX_KEYS,
        "eviction_target_chars": MAX_KEYS * 9 // 10,
    }


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router, which routes by load when its tree cannot say, and sends a request before it routes the next.

    Where Ray's own raises, its request waits for ever: for a replica that the tree knows and this process does not yet,
    or when the tree's actor has died. And it chooses for all that have come together before it sends the first: one
    replica may get all of them, since its queue is empty still.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._one_at_a_time = asyncio.Lock()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> Any:
        async with self._one_at_a_time:
            await asyncio.sleep(0)  # the request before this one is sent meanwhile, and its queue counts it
            try:
                return await super().choose_replicas(candidate_replicas, pending_request)
            except (KeyError, RayError) as error:
                logger.warning("routed by load: %r", error)
                return await self._by_load(candidate_replicas, pending_request)

    _by_load: Any = PowerOfTwoChoicesRequestRouter.choose_replicas

    def on_request_routed(self, *arguments: Any) -> None:
        try:
            super().on_request_routed(*arguments)
        except RayError as error:
            logger.warning("not in the tree of prefixes: %r", error)

    def on_replica_actor_died(self, *arguments: Any) -> None:
        try:
            super().on_replica_actor_died(*arguments)
        except RayError as error:
            logger.warning("still in the tree of prefixes: %r", error)

    def update_replicas(self, replicas: list[Any]) -> None:
        try:
            super().update_replicas(replicas)  # what concerns the tree comes last
        except RayError as error:
            logger.warning("the tree of prefixes does not know the replicas: %r", error)
