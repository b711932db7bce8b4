"""Create the application, two or three deployments of Ray Serve, from the options of `nanovllm serve`."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from nanovllm_extras.options.all_options import Config
from nanovllm_extras.serve.ray.ingress import IngressDeployment
from nanovllm_extras.serve.ray.load_router import LoadRouter
from nanovllm_extras.serve.ray.ray_engine import Engine
from nanovllm_extras.serve.ray.router import PrefixRouter, router_options
from nanovllm_extras.serve.ray_options import RayOptions, count_gpus
from nanovllm_extras.serve.serve_settings import Settings, make_parser, settings_of
from nanovllm_extras.serve.server_options import PREFILL_TIMEOUT_S

OF_SERVE = ("ray", "ray_address", "host", "port", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
WAIT_LOOP_S = 0.2  # interval at which Serve checks whether a replica that shall end has requests left
NO_LIMIT = 1_000_000  # concurrent requests of one ingress; the engines limit them


def build_app(args: Mapping[str, object]) -> Application:
    """Return the application for `serve run` and Serve's config files.

    Each argument is an option of `nanovllm serve`, written with _ or -:

        serve run nanovllm_extras.serve.ray:build_app model=Qwen/Qwen3-0.6B ray_num_replicas=2 max_num_seqs=64

    Raises ValueError or TypeError for an invalid option, before anything starts.
    """
    names = {name.replace("-", "_"): value for name, value in args.items()}
    if taken := [name for name in names if name in OF_SERVE]:
        raise ValueError(f"{taken[0]} is an option of Serve here: use `serve run`, `serve start` or a config file")
    parser = make_parser(RaisingParser)
    settings = settings_of(parser.parse_args(["--ray", *words_of(names)]))
    return make_application(settings)


class RaisingParser(argparse.ArgumentParser):
    """A parser that raises ValueError for an invalid command line instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def words_of(options: Mapping[str, object]) -> list[str]:
    """Return options as a command line: `{"block_size": 8, "ui": True}` gives `--block-size=8 --ui`."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        is_true, is_false = value is True or value in ("true", "True"), value is False or value in ("false", "False")
        if name == "model":
            words.insert(0, str(value))
        elif is_true:
            words.append(flag)
        elif is_false:
            words.append(f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def make_application(settings: Settings) -> Application:
    """Return the application for checked options, which include `settings.ray`.

    With prefill replicas, the deployments `Prefill` and `Decode` replace the deployment `Engine`.
    """
    options, of_ray, config = settings.options, settings.ray, settings.engine_args.create_engine_config()
    assert of_ray is not None
    scaling, prefill = of_ray.scaling(max_ongoing_requests(of_ray, config)), None
    if of_ray.num_prefill_replicas is None:
        engine = make_engines(settings, "Engine", config, scaling)
    else:
        num_replicas = {"num_replicas": of_ray.num_prefill_replicas}
        prefill = make_engines(settings, "Prefill", with_role(config, "kv_producer"), num_replicas)
        engine = make_engines(settings, "Decode", with_role(config, "kv_consumer"), scaling)
    return serve.deployment(
        name="Ingress",
        num_replicas=of_ray.num_ingress_replicas,
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.drain_timeout_s + 1,  # it sends errors for unfinished answers of engines
        graceful_shutdown_wait_loop_s=WAIT_LOOP_S,
        logging_config={"enable_access_log": False},
    )(IngressDeployment).bind(
        engine, options, settings.log_level, prefill, of_ray.prefill_timeout_s or PREFILL_TIMEOUT_S
    )


def make_engines(settings: Settings, name: str, config: Config, scaling: Mapping[str, Any]) -> Application:
    """Return a deployment of engines. scaling: the number of replicas."""
    options, of_ray, most = settings.options, settings.ray, settings.max_queued_requests
    assert of_ray is not None
    return serve.deployment(
        name=name,
        **scaling,
        max_ongoing_requests=max_ongoing_requests(of_ray, config),
        max_queued_requests=-1 if most is None else most,
        ray_actor_options=of_ray.devices(config, num_gpus()),
        request_router_config=router_config(of_ray, config),
        health_check_period_s=of_ray.health_check_period_s,
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        graceful_shutdown_wait_loop_s=WAIT_LOOP_S,
        logging_config={"enable_access_log": False},
    )(Engine).bind(
        asdict(config),
        replace(options, max_requests_per_minute=None, allowed_origins=(), tls={}),  # the ingress handles these
        most,
        of_ray.stream_batching_interval_ms / 1000,
        settings.log_level,
    )


def max_ongoing_requests(of_ray: RayOptions, config: Config) -> int:
    """Return the maximum number of concurrent requests of a replica."""
    return of_ray.max_ongoing_requests or config.max_num_seqs


def with_role(config: Config, role: str) -> Config:
    """Return the options of an engine that only saves blocks (`kv_producer`), or only loads them (`kv_consumer`)."""
    transfer = config.kv_transfer_config
    assert transfer is not None  # `RayOptions.check_transfer`
    return replace(config, kv_transfer_config={**transfer, "kv_role": role})


def router_config(of_ray: RayOptions, config: Config) -> RequestRouterConfig:
    """Return the configuration of the router: by load, or by prefix."""
    if of_ray.routing == "load":
        by_load: Any = LoadRouter
        return RequestRouterConfig(request_router_class=by_load)
    router: Any = PrefixRouter
    return RequestRouterConfig(request_router_class=router, request_router_kwargs=router_options(config.max_num_seqs))


def num_gpus() -> float:
    """Return the number of GPUs of the cluster, or of this machine if there is no cluster yet."""
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else count_gpus()
