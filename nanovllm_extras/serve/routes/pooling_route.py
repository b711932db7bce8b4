"""Handle `POST /pooling`: return the embedding of each prompt, or of each token of the prompts, as in vLLM."""

import base64
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.pooling_params import PoolingParams
from nanovllm_extras.embedding.reading_params import TokenStatesParams
from nanovllm_extras.engine.input_processor import OtherParams
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.messages.pooling_protocol import PoolingRequest
from nanovllm_extras.serve.pooling_inputs import encode_inputs
from nanovllm_extras.serve.readings import read_prompts, usage_of_prompts
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import PIECE, encode
from nanovllm_extras.serve.workers import Check, unless_client_leaves

router = APIRouter(route_class=JSONRoute)
MAX_NUMBERS = 2**21
"""The maximum number of numbers of an answer with one vector for each token: 8 MiB as float32, and about 45 MB of JSON,
for 2,048 tokens of a model with 1,024 numbers in a vector."""


@router.post("/pooling")
async def pool(body: PoolingRequest, request: Request, server: ReadyServer) -> Response:
    """Return one vector for each input, or one for each token of each input."""
    server.check_model(body.model)
    by_token = body.task == "token_embed"
    if by_token and body.pooling is not None:
        raise APIError(400, "pooling needs the task embed: token_embed returns all vectors", "pooling")
    prompts = await encode_inputs(server, request, body)
    if by_token:
        check_numbers(server, prompts)
    pooling_id = new_id("pool", request)
    params: OtherParams = TokenStatesParams(body.is_normalized)
    if not by_token:
        params = PoolingParams(body.pooling or "last", body.is_normalized)

    async def read_and_write() -> bytes:
        outputs = await read_prompts(server, request, body, params, pooling_id, prompts, "input")
        return await server.workers.write(request.state.caller, partial(write, server, body, pooling_id, outputs))

    return Response(await unless_client_leaves(request.receive, read_and_write()), media_type="application/json")


def check_numbers(server: Server, prompts: list[Prompt]) -> None:
    """Raise APIError 400 if the answer would have too many numbers."""
    size = server.check_ready().engine.parts.model_config.hidden_size
    num_tokens = sum(len(one["prompt_token_ids"] if isinstance(one, dict) else one) for one in prompts)
    if num_tokens * size > MAX_NUMBERS:
        message = f"with token_embed, at most {MAX_NUMBERS // size} tokens of all inputs are allowed, got {num_tokens}"
        raise APIError(400, f"{message}; send them in several requests", "input")


def write(server: Server, body: PoolingRequest, pooling_id: str, outputs: list[Any], check: Check) -> bytes:
    """Return the JSON of the answer. `check` is called before each piece."""
    head = {
        "id": pooling_id,
        "object": "list",
        "created": int(time.time()),
        "model": server.name_in_answers(body.model),
    }
    pieces = [encode(head | {"usage": usage_of_prompts(outputs)})[:-1], b',"data":[']
    for i, output in enumerate(outputs):
        check()
        values = output.outputs.embedding if body.task != "token_embed" else output.data
        pieces += [b"," if i else b"", encode({"index": i, "object": "pooling"})[:-1], b',"data":']
        pieces += json_of(np.array(values, dtype="<f4"), body.encoding_format == "base64", check)
        pieces.append(b"}")
    return b"".join([*pieces, b"]}"])


def json_of(values: np.ndarray, in_base64: bool, check: Check) -> Iterator[bytes]:
    """Yield the JSON of values: [num_tokens, hidden_size] or [hidden_size], as numbers or in base64."""
    if in_base64:
        yield b'"' + base64.b64encode(values.tobytes()) + b'"'
    elif values.ndim == 1:
        yield encode(values.tolist())
    else:
        num_rows = max(PIECE // values.shape[1], 1)  # the encoder blocks other threads
        for start in range(0, len(values), num_rows):
            check()
            yield (b"," if start else b"[") + encode(values[start : start + num_rows].tolist())[1:-1]
        yield b"]"
