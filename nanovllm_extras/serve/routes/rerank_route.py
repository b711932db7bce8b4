"""Handle `POST /rerank` and `/score`: sort documents by their relevance to a query, and score pairs of texts.

`/rerank`, `/v1/rerank` and `/v2/rerank` answer in one form, with the fields of Jina, Cohere and vLLM. `scoring.py`
computes the scores.
"""

import time
from functools import partial

from fastapi import APIRouter, Request, Response

from nanovllm_extras.embedding.pairs import Sides
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.messages.pooling_protocol import RerankRequest, ScoreRequest, text_in
from nanovllm_extras.serve.request_ids import new_id
from nanovllm_extras.serve.scoring import Scores, score_pairs
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import JSON, encode
from nanovllm_extras.serve.workers import LONG_BODY, unless_client_leaves

router = APIRouter(route_class=JSONRoute)
COHERE = "/v2/rerank"  # its clients do not expect documents in the answer


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post(COHERE)
async def rerank(body: RerankRequest, request: Request, server: ReadyServer) -> Response:
    """Return the documents with their relevance to the query, the most relevant first."""
    server.check_model(body.model)
    rerank_id = new_id("rerank", request)
    documents = [text_in(one) for one in body.documents]
    sides = Sides("query", [text_in(body.query)], "documents", documents)
    scores = await unless_client_leaves(request.receive, score_pairs(server, request, body, rerank_id, sides))
    is_cohere = request.url.path.endswith(COHERE)
    has_documents = not is_cohere if body.return_documents is None else body.return_documents
    order = sorted(range(len(documents)), key=lambda i: -scores.values[i])[: body.top_n or None]
    results: list[dict[str, object]] = []
    for i in order:
        result: dict[str, object] = {"index": i, "relevance_score": scores.values[i]}
        results.append(result | ({"document": {"text": documents[i]}} if has_documents else {}))
    meta = {"api_version": {"version": "2" if is_cohere else "1"}, "tokens": {"input_tokens": num_tokens_of(scores)}}
    answer = {"id": rerank_id, "object": "list", "model": server.name_in_answers(body.model), "results": results}
    return await as_json(server, request, answer | {"usage": scores.usage, "meta": meta})


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request, server: ReadyServer) -> Response:
    """Return the score of each pair of texts."""
    server.check_model(body.model)
    score_id = new_id("score", request)
    scores = await unless_client_leaves(request.receive, score_pairs(server, request, body, score_id, body.sides))
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)]
    answer = {
        "id": score_id,
        "object": "list",
        "created": int(time.time()),
        "model": server.name_in_answers(body.model),
    }
    return await as_json(server, request, answer | {"data": data, "usage": scores.usage})


async def as_json(server: Server, request: Request, answer: dict[str, object]) -> Response:
    """Return the response. The answer to a long request may be long, too, so it is encoded in a thread."""
    if request.state.num_bytes <= LONG_BODY:
        return JSON(answer)
    content = await server.workers.write(request.state.caller, partial(encode, answer))
    return Response(content, media_type="application/json")


def num_tokens_of(scores: Scores) -> object:
    """Return the number of tokens of all prompts."""
    return scores.usage["prompt_tokens"]
