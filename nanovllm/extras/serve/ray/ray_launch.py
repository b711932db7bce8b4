"""`nanovllm serve --ray`: from checked options to an application that runs on a cluster, and back.

A cluster that the command has started ends with it. In one that was there before, the application is removed, and Serve
if the command has started it; nothing else is touched.
"""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from nanovllm.extras.serve.ray.build import make_application
from nanovllm.extras.serve.serve_command import Settings, attempt
from nanovllm.extras.serve.server import listen

APPLICATION = "nanovllm"


def run(settings: Settings, host: str, port: int) -> int:
    """Serve until a signal; the exit status. Raises OSError, RuntimeError or ValueError if the start fails."""
    assert settings.ray is not None
    address = settings.ray.address or os.environ.get("RAY_ADDRESS")
    with cluster(address), interrupted_by_signals():  # in this order: Ray sets a handler of its own
        print(f"loading {settings.options.model_names[0]} {settings.ray.most_replicas} times at most …", flush=True)
        serve_was_there = url_of_serve() is not None
        if serve_was_there and APPLICATION in serve.status().applications:
            raise ValueError(f"--ray-address: this cluster serves an application {APPLICATION!r} already")
        try:
            if not serve_was_there:
                start_serve(settings, host, port)
            serve.run(make_application(settings), name=APPLICATION, route_prefix="/")
            print(announcement(settings), flush=True)
            while True:
                signal.pause()
        except KeyboardInterrupt:
            print("draining …", flush=True)
        finally:
            remove(serve_was_there)
    return 0


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM interrupts as SIGINT does. The first signal begins to drain, the second ends at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """A connection to the cluster at `address`, or to one of its own, which ends with the block."""
    ray.init(address=address or "local", include_dashboard=None if address else False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def start_serve(settings: Settings, host: str, port: int) -> None:
    """Serve's proxies, with the command's address and certificates."""
    with listen(host, port) as listening:  # raises OSError for an address that cannot be had
        port = listening.getsockname()[1]
    tls = {name: value for name, value in settings.options.tls.items() if name != "ssl_cert_reqs"}
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port, **tls})


def url_of_serve() -> str | None:
    """Where Serve listens; None if the cluster has none."""
    with suppress(RayServeException):
        client = _get_global_client()
        assert client is not None  # it raises
        options = client.http_config
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
        return f"{'https' if options.ssl_certfile else 'http'}://{host}:{options.port}"
    return None


def announcement(settings: Settings) -> str:
    options, of_ray, url = settings.options, settings.ray, url_of_serve() or ""
    assert of_ray is not None
    least = of_ray.most_replicas if of_ray.max_replicas is None else of_ray.min_replicas or 0
    count = str(least) if least == of_ray.most_replicas else f"{least} to {of_ray.most_replicas}"
    return f"""\
serving          {", ".join(options.model_names)} at {url}/v1
replicas         {count}, requests routed by {of_ray.routing}
cluster          {ray.get_runtime_context().gcs_address}
{attempt(url, options, has_chat=False)}"""


def remove(serve_was_there: bool) -> None:
    """End the application; its requests have their time to finish."""
    serve.delete(APPLICATION)
    if serve_was_there:
        forget_prefixes()
    else:
        serve.shutdown()


def forget_prefixes() -> None:
    """End the actor of Ray's prefix-aware router, which Serve ends only with itself."""
    with suppress(ValueError):  # there is none
        namespace = f"serve::{APPLICATION}::Engine"
        ray.kill(ray.get_actor("LlmPrefixTreeActor", namespace=namespace))
