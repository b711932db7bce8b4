"""Handle `POST /v1/embeddings`: return a vector for each text, as a list of numbers or in base64.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
from functools import partial
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.pair_classifier import read_raw_config
from nanovllm_extras.embedding.pooling_params import EmbeddingRequestOutput, PoolingParams
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import refuse
from nanovllm_extras.serve.messages.pooling_protocol import MAX_INPUTS
from nanovllm_extras.serve.messages.protocol import Name, Salt, StrictModel, Text, Texts, TokenIds, Whole
from nanovllm_extras.serve.prompts import are_many, check_lengths, encode_prompts
from nanovllm_extras.serve.readings import read_prompts, usage_of_prompts
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import encode
from nanovllm_extras.serve.workers import Check, unless_client_leaves

router = APIRouter(route_class=JSONRoute)


class EmbeddingRequest(StrictModel):
    model: Name | None = None
    input: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """One text or several texts, or the token ids of one prompt or of several prompts."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` encodes float32 numbers in little-endian order."""
    dimensions: Whole | None = Field(None, ge=1)
    """The length to which vectors are cut, for models that were trained for this (Matryoshka embeddings).

    Any model has vectors of its own length.
    """
    # nanovllm's additions
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: Whole | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Salt | None = None


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request, server: ReadyServer) -> Response:
    """Return one vector for each input."""
    server.check_model(body.model)
    engine = server.check_ready().engine
    if body.dimensions not in (None, engine.parts.model_config.hidden_size):
        raw = await server.workers.run(request, lambda check: read_raw_config(engine), is_long=True)
        with refuse("dimensions"):
            check_dimensions(body.dimensions, engine.parts.model_config.hidden_size, raw)
    bounds, adds = server.bounds, body.add_special_tokens is not False
    prompts = await server.workers.run(
        request,
        lambda check: encode_prompts(
            bounds.tokenizer(engine.tokenizer, check), bounds, "input", body.input, adds, MAX_INPUTS
        ),
        is_long=are_many(body.input) or None,
    )
    embedding_id = new_id("embd", request)

    async def embed_and_write() -> bytes:
        outputs = await embed(server, request, body, embedding_id, prompts)
        write = partial(write_answer, server, body, embedding_id, outputs)
        return await server.workers.write(request.state.caller, write) if are_many(outputs) else write(lambda: None)

    content = await unless_client_leaves(request.receive, embed_and_write())
    return Response(content, media_type="application/json")


def write_answer(
    server: Server, body: EmbeddingRequest, embedding_id: str, outputs: list[EmbeddingRequestOutput], check: Check
) -> bytes:
    """Return the JSON of the answer. `check` is called before each vector."""
    usage = usage_of_prompts(outputs)
    whole = encode({"id": embedding_id, "object": "list", "model": server.name_in_answers(body.model), "usage": usage})
    vectors = []
    for i, one in enumerate(outputs):
        check()
        vectors.append(encode(describe(i, one, body)))
    return whole[:-1] + b',"data":[' + b",".join(vectors) + b"]}"


async def embed(
    server: Server, request: Request, body: EmbeddingRequest, embedding_id: str, prompts: list[Prompt]
) -> list[EmbeddingRequestOutput]:
    """Return the embeddings of all prompts, in their order. If cancelled, it aborts the unfinished requests."""
    params = PoolingParams(body.pooling or "last", True if body.normalize is None else body.normalize)
    check_lengths(prompts, "input", server.bounds)
    own = body.priority, body.cache_salt, body.model
    return await read_prompts(server, request, params, embedding_id, prompts, "input", *own)


def check_dimensions(dimensions: int, size: int, raw: dict[str, object]) -> None:
    """Raise ValueError unless config.json allows shorter vectors, by the fields that vLLM reads."""
    sizes = raw.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        if dimensions not in sizes:
            raise ValueError(f"dimensions must be one of {sorted({*sizes, size})}, got {dimensions}")
    elif not raw.get("is_matryoshka"):
        raise ValueError(
            f"dimensions must be {size}, the length of the model's vectors, got {dimensions}. If the model was trained "
            "for shorter vectors, set is_matryoshka in hf_overrides"
        )
    elif dimensions > size:
        raise ValueError(f"dimensions must be at most {size}, got {dimensions}")


def describe(index: int, output: EmbeddingRequestOutput, body: EmbeddingRequest) -> dict[str, object]:
    """Return the JSON of one embedding, cut to `body.dimensions`."""
    embedding: list[float] | str = output.outputs.embedding
    if body.dimensions is not None and body.dimensions < len(embedding):
        vector = output.outputs.embedding[: body.dimensions]
        length = float(np.linalg.norm(vector)) if body.normalize is not False else 1.0
        embedding = [value / max(length, 1e-12) for value in vector]
    if body.encoding_format == "base64":
        embedding = base64.b64encode(np.array(embedding, dtype="<f4").tobytes()).decode("ascii")
    return {"object": "embedding", "index": index, "embedding": embedding}
