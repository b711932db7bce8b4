"""Run the command `nanovllm serve --ray`: start the application on a cluster, and remove it at a signal.

If the command has started the cluster, it also ends it. Otherwise it removes the application, and ends Serve if it has
started Serve; it changes nothing else in the cluster.
"""

import logging
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from nanovllm_extras.machine.printing import say
from nanovllm_extras.serve.ray.build import make_application
from nanovllm_extras.serve.ray_options import count_gpus
from nanovllm_extras.serve.routes.server import listen
from nanovllm_extras.serve.serve_settings import Settings, attempt

APPLICATION = "nanovllm"


def run(settings: Settings, host: str, port: int) -> int:
    """Serve until a signal, and return the exit status. Raises OSError, RuntimeError, ValueError if the start fails."""
    assert settings.ray is not None
    address = settings.ray.address or os.environ.get("RAY_ADDRESS")
    with cluster(address, num_cpus_of(settings)), interrupted_by_signals():  # in this order: Ray sets a handler
        say(f"loading {settings.options.model_names[0]} at most {settings.ray.num_engines} times …")
        serve_was_there = url_of_serve() is not None
        if serve_was_there and APPLICATION in serve.status().applications:
            raise ValueError(f"--ray-address: this cluster already serves an application {APPLICATION!r}")
        try:
            if not serve_was_there:
                start_serve(settings, host, port)
            serve.run(make_application(settings), name=APPLICATION, route_prefix="/")
            say(announcement(settings))
            while True:
                signal.pause()
        except KeyboardInterrupt:
            say("draining …")
        finally:
            remove(serve_was_there)
    return 0


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM interrupt the block as SIGINT does: the first signal starts to drain, the second ends immediately."""

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
def cluster(address: str | None, num_cpus: int) -> Iterator[None]:
    """Connect to the cluster at `address`, or start a cluster that ends with the block.

    num_cpus: the number of CPUs that a new cluster has at least. If this machine has fewer, replicas share its cores.
    """
    new: dict[str, Any] = {"include_dashboard": False, "num_cpus": max(num_cpus, os.cpu_count() or 1)}
    ray.init(address=address or "local", logging_level=logging.WARNING, **({} if address else new))
    try:
        yield
    finally:
        ray.shutdown()


def num_cpus_of(settings: Settings) -> int:
    """Return the number of CPUs that all replicas reserve."""
    of_ray = settings.ray
    assert of_ray is not None
    devices = of_ray.devices(settings.engine_args.create_engine_config(), count_gpus())
    return int(devices["num_cpus"]) * of_ray.num_engines


def start_serve(settings: Settings, host: str, port: int) -> None:
    """Start Serve's proxies with the command's address and certificates. Raises OSError if the address is in use."""
    with listen(host, port) as listening:  # raises OSError if the address is not available
        port = listening.getsockname()[1]
    tls = {name: value for name, value in settings.options.tls.items() if name != "ssl_cert_reqs"}
    http: dict[str, Any] = {"keep_alive_timeout_s": math.ceil(settings.options.timeout_keep_alive_s)}
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port, **http, **tls})


def url_of_serve() -> str | None:
    """Return the URL at which Serve listens; None if Serve does not run on the cluster."""
    with suppress(RayServeException):
        client = _get_global_client()
        assert client is not None  # it raises RayServeException instead
        options = client.http_config
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
        return f"{'https' if options.ssl_certfile else 'http'}://{host}:{options.port}"
    return None


def announcement(settings: Settings) -> str:
    """Return the text that is printed when the application is ready."""
    options, of_ray, url = settings.options, settings.ray, url_of_serve() or ""
    assert of_ray is not None
    least = of_ray.most_replicas if of_ray.max_replicas is None else of_ray.min_replicas or 0
    count = str(least) if least == of_ray.most_replicas else f"{least} to {of_ray.most_replicas}"
    if of_ray.num_prefill_replicas is not None:
        count = f"{of_ray.num_prefill_replicas} for prefill, {count} for decode"
    return f"""\
serving          {", ".join(options.model_names)} at {url}/v1
replicas         {count}, requests routed by {of_ray.routing}
cluster          {ray.get_runtime_context().gcs_address}
{attempt(url, options, has_chat=False)}"""


def remove(serve_was_there: bool) -> None:
    """End the application. Its requests have `drain_timeout_s` to finish."""
    serve.delete(APPLICATION)
    if serve_was_there:
        forget_prefixes()
    else:
        serve.shutdown()


def forget_prefixes() -> None:
    """End the actors of Ray's prefix-aware routers. Otherwise they live as long as Serve."""
    for deployment in ("Engine", "Prefill", "Decode"):
        with suppress(ValueError):  # there is no such actor
            ray.kill(ray.get_actor("LlmPrefixTreeActor", namespace=f"serve::{APPLICATION}::{deployment}"))
