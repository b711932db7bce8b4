"""Route requests by load, except those that need the replica which stores a response."""

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from nanovllm_extras.serve.ray.prefix import Holder


def needs_holder(pending_request: Any) -> bool:
    """Return whether a request needs the replica that stores a response."""
    return pending_request is not None and any(isinstance(one, Holder) for one in pending_request.args)


def holders(pending_request: Any, candidate_replicas: list[Any]) -> list[list[Any]]:
    """Return the choice of replicas for a request that needs the replica which stores a response.

    If this replica is gone, any replica answers that the response is not stored: all are candidates.
    """
    (name,) = [one.replica for one in pending_request.args if isinstance(one, Holder)]
    found = [one for one in candidate_replicas if one.replica_id.unique_id == name]
    return [found or candidate_replicas]


class LoadRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's default router, except for requests that need the replica which stores a response."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> Any:
        if needs_holder(pending_request):
            return holders(pending_request, candidate_replicas)
        return await super().choose_replicas(candidate_replicas, pending_request)
