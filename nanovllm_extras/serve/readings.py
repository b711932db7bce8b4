"""Run the engine's requests for what is read of prompts: embeddings, states of tokens, logits.

Each prompt logs a line when it ends:

    embd-5f2…-0 stop: 24 tokens in (16 cached), embedded after 3.1 ms
"""

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from fastapi import Request

from nanovllm.prompts import Prompt
from nanovllm_extras.engine.input_processor import OtherParams
from nanovllm_extras.serve.engine_thread import NewRequest
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.generation import engine_ids, told_name
from nanovllm_extras.serve.messages.pooling_protocol import PoolingFields
from nanovllm_extras.serve.prompts import salted
from nanovllm_extras.serve.state import RETRY_LATER, Server

logger = logging.getLogger(__name__)


async def read_prompts(
    server: Server,
    request: Request,
    body: PoolingFields,
    params: OtherParams,
    request_id: str,
    prompts: list[Prompt],
    field: str,
) -> list[Any]:
    """Return the outputs of all prompts, in their order. If cancelled, it aborts the unfinished requests.

    Raises APIError 503 if a request was aborted, because the server shuts down. params: what is read, such as
    `PoolingParams`. field: the request's field with the prompts, for errors
    """
    arrival_time, llm, adapter = time.monotonic(), server.check_ready(), server.adapter_of(body.model)
    requests = [
        NewRequest(name, salted(prompt, body.cache_salt), params, body.priority or 0, False, adapter)
        for name, prompt in zip(engine_ids(request_id, len(prompts)), prompts, strict=True)
    ]
    server.adapters.hold(adapter)
    try:
        with refuse(field):
            inbox = await llm.submit(requests, partial(server.workers.run_long, request))
    except BaseException:
        server.adapters.release(adapter)
        raise
    server.num_in_progress += 1
    outputs: dict[str, Any] = {}
    try:
        while inbox.unfinished:
            for output in await inbox.take():
                outputs[output.request_id] = output
                note_end(server, output, arrival_time)
    finally:
        llm.close(inbox)
        server.num_in_progress -= 1
        server.adapters.release(adapter)
        for unfinished in sorted(inbox.unfinished):
            server.metrics.note_abort()
            if server.options.log_requests:
                logger.info("%s abort: before it was embedded", told_name(unfinished))
    if any(map(is_aborted, outputs.values())):
        raise APIError(503, "the server is shutting down", code="draining", headers=RETRY_LATER)
    return [outputs[request.request_id] for request in requests]


def note_end(server: Server, output: Any, arrival_time: float) -> None:
    """Count and log the end of a request."""
    num_tokens, reason = len(output.prompt_token_ids), "abort" if is_aborted(output) else "stop"
    server.metrics.note_end(output.metrics, arrival_time, num_tokens, [], reason)
    after = 1000 * (output.metrics.finished_time - arrival_time)
    if not server.options.log_requests:
        return
    message = "%s %s: %d tokens in (%d cached), embedded after %.1f ms"
    logger.info(message, told_name(output.request_id), reason, num_tokens, output.num_cached_tokens, after)


def is_aborted(output: Any) -> bool:
    """Return whether a request has ended before its prompt was computed."""
    return output.metrics.first_token_time is None


def usage_of_prompts(outputs: Iterable[Any]) -> dict[str, object]:
    """Return OpenAI's usage of requests without generated tokens."""
    outputs = list(outputs)
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
