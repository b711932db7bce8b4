"""Handle the routes that do not generate: health, version, metrics, models, and the tokenizer."""

import math
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request, Response

from nanovllm.prompts import ChatPrompt
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.protocol import DetokenizeRequest, TokenizeRequest
from nanovllm_extras.serve.prompts import chat_prompt, encode_text, require_tokenizer
from nanovllm_extras.serve.state import AnyServer, ReadyServer, Server
from nanovllm_extras.serve.streaming import JSON
from nanovllm_extras.serve.workers import Check

router = APIRouter(route_class=JSONRoute)
tokenizer_router = APIRouter(route_class=JSONRoute)
"""The route that an operator must enable, because chat templates may be private."""


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ping")
@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(server: ReadyServer) -> Response:
    """Return 200 if the server is ready, 503 while it loads or shuts down, or if the engine has died."""
    return Response()


@router.get("/version")
@router.head("/version", include_in_schema=False)
async def show_version(server: AnyServer) -> dict[str, str]:
    """Return the version of nanovllm, and the name of this replica in the ids of responses."""
    try:
        number = version("nanovllm")
    except PackageNotFoundError:  # run from a folder that was not installed
        number = "unknown"
    return {"version": number, "replica": server.responses.tag}


@router.get("/metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(server: AnyServer) -> Response:
    """Return the metrics for Prometheus."""
    return Response(server.metrics.as_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/load")
@router.head("/load", include_in_schema=False)
async def load(server: AnyServer) -> dict[str, int]:
    """Return the number of requests in progress, for load balancers."""
    return {"server_load": server.num_in_progress}


@tokenizer_router.get("/tokenizer_info")
@tokenizer_router.head("/tokenizer_info", include_in_schema=False)
async def tokenizer_info(server: ReadyServer) -> Response:
    """Return the configuration of the tokenizer, with the chat template."""
    tokenizer = require_tokenizer(server.check_ready().engine.tokenizer)
    values = {name: as_json(value) for name, value in tokenizer.init_kwargs.items()}
    name = {"tokenizer_class": type(tokenizer).__name__}
    return JSON(values | name | {"chat_template": as_json(tokenizer.chat_template)})


def as_json(value: object) -> object:
    """Return a value of a tokenizer's configuration as JSON. Objects such as tokens become texts."""
    if isinstance(value, dict):
        return {str(name): as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


@router.get("/v1/models")
@router.head("/v1/models", include_in_schema=False)
async def list_models(server: ReadyServer) -> dict[str, object]:
    """Return all names of the model, and its LoRA adapters."""
    names = [*server.options.model_names, *server.adapters]
    return {"object": "list", "data": [describe(server, name) for name in names]}


@router.get("/v1/models/{name:path}")
@router.head("/v1/models/{name:path}", include_in_schema=False)
async def show_model(name: str, server: ReadyServer) -> dict[str, object]:
    """Return one name of the model, or one adapter."""
    server.check_model(name)
    return describe(server, name)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, server: ReadyServer) -> Response:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    server.check_model(body.model)
    engine = server.check_ready().engine

    def encode(check: Check) -> ChatPrompt:
        tokenizer = server.bounds.tokenizer(engine.tokenizer, check)
        if body.messages is not None:
            return chat_prompt(tokenizer, server.bounds, body)
        with refuse("prompt"):
            return encode_text(require_tokenizer(tokenizer), body.prompt or "", body.add_special_tokens is not False)

    prompt = await server.workers.run(request, encode)
    tokens = prompt["prompt_token_ids"]
    strings = engine.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return JSON(
        {"count": len(tokens), "max_model_len": engine.parts.max_model_len, "tokens": tokens, "token_strs": strings}
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, server: ReadyServer) -> Response:
    """Return the text of token ids."""
    server.check_model(body.model)
    tokenizer, bounds = require_tokenizer(server.check_ready().engine.tokenizer), server.bounds
    with refuse("tokens"):
        bounds.check_count(body.tokens, bounds.max_model_len, "tokens (max_model_len)")
    most = bounds.vocab_size - 1
    if body.tokens and max(body.tokens) > most:
        raise APIError(400, f"tokens must be token ids from 0 to {most}, got {max(body.tokens)}", "tokens")
    return JSON({"prompt": await server.workers.run(request, lambda check: tokenizer.decode(body.tokens))})


def describe(server: Server, name: str) -> dict[str, object]:
    """Return OpenAI's JSON of the model under one of its names, or of an adapter."""
    engine, adapter = server.check_ready().engine, server.adapter_of(name)
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "nanovllm",
        "root": str(engine.config.model) if adapter is None else adapter.path,
        "parent": None if adapter is None else server.model_name,
        "max_model_len": engine.parts.max_model_len,
    }
