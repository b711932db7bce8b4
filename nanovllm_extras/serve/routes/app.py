"""Create the application: its routes and the middleware before them.

socket ─uvicorn→ RequestPaths → HTTPMetrics → RequestIds → CORS → AccessControl → JSONRequest → route
       ─Generation→ AsyncLLM
"""

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.embedding.pair_classifier import find_classifier
from nanovllm_extras.serve.access import AccessControl
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.bounds import Bounds
from nanovllm_extras.serve.errors import install_error_handlers
from nanovllm_extras.serve.http_metrics import HTTPMetrics
from nanovllm_extras.serve.messages.protocol import ErrorBody
from nanovllm_extras.serve.metrics_route import Metrics
from nanovllm_extras.serve.request_ids import RequestIds
from nanovllm_extras.serve.request_paths import RequestPaths
from nanovllm_extras.serve.routes import (
    adapters_route,
    completions,
    embeddings,
    info,
    pooling_route,
    rerank_route,
    slots_route,
    stored_responses,
    ui,
)
from nanovllm_extras.serve.routes import chat_route as chat
from nanovllm_extras.serve.routes import messages_route as messages
from nanovllm_extras.serve.routes import responses_route as responses
from nanovllm_extras.serve.routes.ui import LiveLines
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.serve.state import Server


def make_app(options: ServerOptions, llm: AsyncLLM | None = None, live: LiveLines | None = None) -> FastAPI:
    """Return an application that serves `llm`. Without `llm` it answers 503 until `set_engine` is called.

    live: the lines of `/ui`; None leaves this page out.
    """
    app = FastAPI(
        title="nanovllm",
        docs_url=None,
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request is invalid"},
            "5XX": {"model": ErrorBody, "description": "The server is not ready, or has failed"},
        },
    )
    app.root_path = options.root_path
    app.state.server = Server(options, Metrics(options.model_names[0]))
    for routes in (
        chat,
        completions,
        responses,
        stored_responses,
        messages,
        embeddings,
        rerank_route,
        pooling_route,
        info,
    ):
        app.include_router(routes.router)
    if options.enable_tokenizer_info:
        app.include_router(info.tokenizer_router)
    if options.allow_runtime_lora_updating:
        app.include_router(adapters_route.router)
    if options.enable_kv_slots:
        app.include_router(slots_route.router)
    if live is not None:
        app.include_router(ui.make_router(live))
    install_error_handlers(app)
    app.openapi_schema = without_422(app.openapi())
    app.add_middleware(AccessControl, server=app.state.server)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestIds)
    paths = [*app.openapi_schema["paths"], "/openapi.json", *(("/ui", "/ui/events") if live is not None else ())]
    counts = app.state.server.metrics.http
    app.add_middleware(HTTPMetrics, counts=counts, paths=paths, root_path=options.root_path)
    app.add_middleware(RequestPaths)
    if llm is not None:
        set_engine(app, llm)
    return app


def set_engine(app: FastAPI, llm: AsyncLLM) -> None:
    """Set the engine. From now on the application serves requests.

    Raises ValueError or TypeError if the tokens of `classifier_from_token` cannot be used.
    """
    server: Server = app.state.server
    load_adapters(llm, server.options)
    server.bounds = Bounds.of(llm.engine, server.options.max_request_values, server.options.max_choices)
    server.token_bytes = TokenBytes(llm.engine.tokenizer)
    server.classifier = find_classifier(llm.engine)
    server.llm = llm
    engine = llm.engine
    info = {"description": engine.description, "tensor_parallel_size": str(engine.config.tensor_parallel_size)}
    server.metrics.watch(llm.get_stats, info)


def load_adapters(llm: AsyncLLM, options: ServerOptions) -> None:
    """Load the LoRA adapters of the options, unless they are. Raises ValueError if one cannot be loaded."""
    for adapter in options.lora_modules:
        llm.thread.call(llm.engine.add_lora, adapter).result()


def without_422(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove status 422, which FastAPI documents for bad requests: this server answers them with 400."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return schema
