"""Add the causes of computed prompt tokens to answers, for requests with `return_prefix_misses`.

    "prefix_misses": [{"start": 0, "end": 96, "cause": "never_seen"}, {"start": 96, "end": 99, "cause": …}]

`prefix_misses.py` finds the causes. An answer must not reveal the prompts of other clients: a client that learns
at which token its prompt differs from a cached one can guess that prompt token by token. So positions and tokens inside
a block are only sent for a request with a `cache_salt`, which is compared only with prompts of the same salt.
"""

from nanovllm_extras.engine.prefix_misses import PrefixMiss
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.messages.protocol import GenerationRequest

FIELD = "return_prefix_misses"


def check_misses(body: GenerationRequest, is_explained: bool) -> None:
    """Raise APIError 400 if the answer must contain causes, and the engine does not look for them."""
    if body.return_prefix_misses and not is_explained:
        raise APIError(400, f"{FIELD} must be false: the server runs without --explain-prefix-misses", FIELD)


def misses_field(body: GenerationRequest, output: RequestOutput) -> dict[str, object]:
    """Return the field `prefix_misses` of an answer, or nothing if the request does not have `return_prefix_misses`.

    Its value is None if the request ended before it was admitted.
    """
    if not body.return_prefix_misses:
        return {}
    misses = output.metrics.prefix_misses
    if misses is None:
        return {"prefix_misses": None}
    return {"prefix_misses": [to_json(miss) for miss in (misses if body.cache_salt else whole_blocks(misses))]}


def whole_blocks(misses: list[PrefixMiss]) -> list[PrefixMiss]:
    """Return the misses without what they reveal of a cached prompt inside a block: `differs` is the whole block.

    In the first block, `differs` would reveal that a cached prompt has the same first token: it is `never_seen`.
    """
    told: list[PrefixMiss] = []
    for miss in misses:
        if miss.cause == "differs":
            start = told.pop().start if told and told[-1].cause == "partial_block" else miss.start
            miss = PrefixMiss(start, miss.end, miss.cause if start else "never_seen")
        told.append(miss)
    return told


def to_json(miss: PrefixMiss) -> dict[str, object]:
    """Return a miss as JSON. The request that evicted a block is not named, because it may be another client's."""
    details: dict[str, object] = {
        "cached_token_ids": list(miss.cached_token_ids),
        "prompt_token_ids": list(miss.prompt_token_ids),
        "step": miss.step,
    }
    about: dict[str, object] = {"start": miss.start, "end": miss.end, "cause": miss.cause}
    return about | {name: value for name, value in details.items() if value}
