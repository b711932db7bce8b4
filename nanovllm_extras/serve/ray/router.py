"""Route requests with Serve's prefix-aware router, and fall back to routing by load if it fails.

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

from nanovllm_extras.serve.ray.load_router import holders, needs_holder

logger = logging.getLogger(__name__)

MAX_KEYS = 400_000  # characters of all keys: 25 million characters of prompts


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Restore the root logger after the block: `import ray.llm` makes the process log JSON."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


with root_logger_kept():
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


def router_options(max_num_seqs: int) -> dict[str, object]:
    """Return the arguments of `initialize_state`.

    Requests are routed by prefix while the queues differ by at most a sixteenth of a batch. Ray's default is infinity:
    then a system prompt that all requests share would keep all of them on one replica.
    """
    return {
        "imbalanced_threshold": max(2, max_num_seqs // 16),
        "do_eviction": True,
        "eviction_threshold_chars": MAX_KEYS,
        "eviction_target_chars": MAX_KEYS * 9 // 10,
    }


class PrefixRouter(PrefixCacheAffinityRouter):
    """Ray's router with three changes: it falls back to routing by load, routes requests one at a time, and sends
    requests that need a stored response to the replica that stores it.

    If Ray's router raises, the request waits forever. It raises if the tree contains a replica that this process does
    not know yet, or if the tree's actor has died. Ray's router also chooses replicas for all waiting requests before it
    sends the first one. Then one replica may get all of them, because its queue is still empty.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._one_at_a_time = asyncio.Lock()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> Any:
        if needs_holder(pending_request):
            return holders(pending_request, candidate_replicas)
        async with self._one_at_a_time:
            await asyncio.sleep(0)  # now the previous request is sent, and its replica's queue counts it
            try:
                return await super().choose_replicas(candidate_replicas, pending_request)
            except (KeyError, RayError) as error:
                logger.warning("routed by load: %r", error)
                return await self._by_load(candidate_replicas, pending_request)

    _by_load: Any = PowerOfTwoChoicesRequestRouter.choose_replicas

    def on_request_routed(self, *arguments: Any) -> None:
        if needs_holder(arguments[0]):
            return  # it has no key for the tree
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
            super().update_replicas(replicas)  # Ray's method updates the tree last
        except RayError as error:
            logger.warning("the replicas are not in the tree of prefixes: %r", error)
