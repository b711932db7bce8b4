"""Route requests to the engines: the deployment `Ingress` reads a request, calls an engine, and relays the answer.

Serve's proxy cannot route by the prompt, because it chooses a replica before the body has arrived. So this deployment
is between the proxy and the engines. It checks keys, sizes and rates, and answers `/health` and `/metrics`. If there
are prefill replicas, it calls one of them before the engine that answers.
"""

import logging
from dataclasses import dataclass

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from nanovllm_extras.serve.access import AccessControl
from nanovllm_extras.serve.anthropic_errors import request_id_of
from nanovllm_extras.serve.body import JSONRequest
from nanovllm_extras.serve.disaggregation import GENERATING, Dispatcher
from nanovllm_extras.serve.errors import APIError, as_api_error
from nanovllm_extras.serve.metrics_route import Metrics
from nanovllm_extras.serve.ray.calls import Call, Part
from nanovllm_extras.serve.ray.ray_metrics import merge_texts
from nanovllm_extras.serve.ray.replicas import Begun, Replicas
from nanovllm_extras.serve.request_ids import NAME as REQUEST_ID
from nanovllm_extras.serve.response_holder import replica_of
from nanovllm_extras.serve.serve_settings import log_to_stderr
from nanovllm_extras.serve.server_options import PREFILL_TIMEOUT_S, ServerOptions
from nanovllm_extras.serve.state import RETRY_LATER, Server
from nanovllm_extras.serve.streaming import JSON, error_events
from nanovllm_extras.serve.workers import ClientGone, unless_client_leaves

logger = logging.getLogger(__name__)

MAX_DECODES = 2  # decode replicas that get a request if the first one dies; the request may be the reason


@dataclass
class IngressServer(Server):
    """The state that the middleware uses. It is always ready: Serve queues requests while no replica is ready."""

    @property
    def is_loading(self) -> bool:
        return False

    def check_ready(self) -> None:
        return None


class WholeBody(JSONRequest):
    """A request whose bytes are counted while they arrive, as in the server without Ray."""

    async def whole(self) -> bytes:
        """Return the whole body."""
        await self.body()
        self._stop_counting()
        return self._bytes


class Ingress:
    """A deployment of Serve. engine, prefill: the handles of the deployments that answer, and that compute prompts."""

    def __init__(
        self,
        engine: DeploymentHandle,
        options: ServerOptions,
        log_level: str,
        prefill: DeploymentHandle | None = None,
        prefill_timeout_s: float = PREFILL_TIMEOUT_S,
    ) -> None:
        log_to_stderr(log_level)
        self._options = options
        self._server = IngressServer(options, Metrics(options.model_names[0]))
        self._engine = Replicas("Engine" if prefill is None else "Decode", engine)
        self._deployments = [self._engine]
        self._dispatcher: Dispatcher[Call, Begun] | None = None
        if prefill is not None:
            first, decode = Replicas("Prefill", prefill), [self._engine] * MAX_DECODES
            self._deployments.append(first)
            self._dispatcher = Dispatcher(first, decode, prefill_timeout_s, options.max_request_values)

    async def check_health(self) -> None:
        """Wait until the routers work. Serve calls this, and sends requests only after the first call has returned."""
        for deployment in self._deployments:
            await deployment.wait_for_router()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application: the middleware before the replicas' routes, in the order of `app.py`."""
        app: ASGIApp = AccessControl(self._forward, self._server)
        if origins := self._options.allowed_origins:
            app = CORSMiddleware(app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
        if proxies := self._options.forwarded_allow_ips:
            app = ProxyHeadersMiddleware(app, trusted_hosts=list(proxies))  # type: ignore[arg-type, assignment]
        return under_prefix(app)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none; closing one before it is accepted is answered with 403
            await receive()
            await send({"type": "websocket.close", "code": 1000, "reason": ""})  # Serve's proxy needs the code
        if scope["type"] != "http":  # the application's start and end need no action
            return
        answer = Answer(scope, send)
        scope["state"].setdefault("caller", "")  # paths that need no key have none
        try:
            body = await WholeBody(scope, receive, self._server).whole()
            await unless_client_leaves(receive, self._answer(scope, body, answer))
        except ClientGone:
            logger.info("%s %s: the client has disconnected", scope["method"], scope["path"])
        except Exception as error:
            logger.warning("%s %s: %r", scope["method"], scope["path"], error)
            await answer.fail(told(error))

    async def _answer(self, scope: Scope, body: bytes, answer: "Answer") -> None:
        path = scope["path"].removeprefix(self._options.root_path)
        if path in ("/health", "/ping"):
            await self._check_health()
            await answer.send_whole(Response(), scope)
        elif path == "/metrics":
            texts = [text for one in self._deployments for text in await one.ask_all("metrics")]
            text = Response(merge_texts(texts), media_type="text/plain; version=0.0.4; charset=utf-8")
            await answer.send_whole(text, scope)
        elif path == "/load":
            loads = [load for one in self._deployments for load in await one.ask_all("load")]
            await answer.send_whole(JSON({"server_load": sum(loads)}), scope)
        else:
            await relay(await self._begin(path, Call.of(scope, scope["path"], body)), answer)

    async def _begin(self, path: str, call: Call) -> Begun:
        """Return the answer of an engine, which has begun."""
        if self._dispatcher is not None and call.method == "POST" and path in GENERATING:
            is_held = replica_of(path, call.body) is not None  # only that replica can compute the prompt
            return await (self._dispatcher.answer(call) if is_held else self._dispatcher.generate(call))
        return await self._engine.begin(call)

    async def _check_health(self) -> None:
        """Raise APIError 503 if no replica that answers is healthy."""
        if not await self._engine.is_healthy():
            raise APIError(503, "no replica is ready; try again soon", code="loading", headers=RETRY_LATER)


async def relay(begun: Begun, answer: "Answer") -> None:
    """Send the parts of an answer to the client."""
    try:
        await answer.add(begun.first)
        if begun.first.is_last:
            return  # the client may disconnect now
        async for part in begun.parts:
            await answer.add(part)
            if part.is_last:
                return
    finally:  # this has no effect if the answer is complete
        begun.parts.cancel()


class Answer:
    """Sends an answer, and keeps track of what has been sent, so that an error can be sent in the right form."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._is_started = False
        self._is_stream = False
        self._num_events = 0

    async def add(self, part: Part) -> None:
        """Send a part of the answer. The first one has the status and the headers."""
        if part.status:
            await self._start(part.status, part.headers)
        await self._grow(part.body, part.is_last)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers, without `x-request-id`, which Serve's proxy adds itself."""
        self._is_started = True
        self._is_stream = any(value.startswith(b"text/event-stream") for name, value in headers)
        headers = [one for one in headers if one[0].lower() != REQUEST_ID.encode()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _grow(self, body: bytes, is_last: bool) -> None:
        """Send a part of the body."""
        self._num_events += body.count(b"\n\n")  # JSON has no bare line feeds
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def send_whole(self, response: Response, scope: Scope) -> None:
        """Send a complete response."""

        async def send(message: Message) -> None:
            self._is_started = True
            await self._send(message)

        await response(scope, None, send)  # type: ignore[arg-type]

    async def fail(self, error: APIError) -> None:
        """Send an error: as a response if nothing has been sent, or as an event of a stream that has begun."""
        if not self._is_started:
            await self.send_whole(error.response(self._scope), self._scope)
        elif self._is_stream:
            path, request_id = self._scope["path"], request_id_of(self._scope)
            await self._grow(error_events(error, path, self._num_events, request_id), is_last=True)
        else:
            raise error  # this closes the connection, so the client sees that the answer is incomplete


def told(error: Exception) -> APIError:
    """Return the error that a client gets for an exception, including Ray's exceptions."""
    if isinstance(error, RayActorError):
        message = "the replica that served this request has died; send the request again"
        return APIError(503, message, code="replica_died", headers=RETRY_LATER)
    if isinstance(error, BackPressureError):
        message = f"{error.args[0]} requests are already waiting; try again later"
        return APIError(429, message, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, DeploymentUnavailableError):
        return APIError(503, "no replica can be started; try again later", code="unavailable", headers=RETRY_LATER)
    return as_api_error(error)


def under_prefix(app: ASGIApp) -> ASGIApp:
    """Return an application that removes Serve's route prefix from the path, and calls `app`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if scope["type"] in ("http", "websocket") and root:
            scope = {**scope, "path": scope["path"].removeprefix(root), "root_path": ""}
        await app(scope, receive, send)

    return call


IngressDeployment = serve.ingress()(Ingress)
