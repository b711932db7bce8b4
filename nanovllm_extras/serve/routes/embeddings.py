"""Handle `POST /v1/embeddings`: return a vector for each text, as a list of numbers or in base64.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response

from nanovllm_extras.embedding.pair_classifier import read_raw_config
from nanovllm_extras.embedding.pooling_params import EmbeddingRequestOutput, PoolingParams
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import refuse
from nanovllm_extras.serve.messages.pooling_protocol import EmbeddingRequest
from nanovllm_extras.serve.pooling_inputs import encode_inputs
from nanovllm_extras.serve.prompts import are_many
from nanovllm_extras.serve.readings import read_prompts, usage_of_prompts
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import encode
from nanovllm_extras.serve.workers import Check, unless_client_leaves

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request, server: ReadyServer) -> Response:
    """Return one vector for each input."""
    server.check_model(body.model)
    engine = server.check_ready().engine
    if body.dimensions not in (None, engine.parts.model_config.hidden_size):
        raw = await server.workers.run(request, lambda check: read_raw_config(engine), is_long=True)
        with refuse("dimensions"):
            check_dimensions(body.dimensions, engine.parts.model_config.hidden_size, raw)
    prompts = await encode_inputs(server, request, body)
    embedding_id = new_id("embd", request)
    params = PoolingParams(body.pooling or "last", body.is_normalized)

    async def embed_and_write() -> bytes:
        outputs = await read_prompts(server, request, body, params, embedding_id, prompts, "input")
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
        length = float(np.linalg.norm(vector)) if body.is_normalized else 1.0
        embedding = [value / max(length, 1e-12) for value in vector]
    if body.encoding_format == "base64":
        embedding = base64.b64encode(np.array(embedding, dtype="<f4").tobytes()).decode("ascii")
    return {"object": "embedding", "index": index, "embedding": embedding}
