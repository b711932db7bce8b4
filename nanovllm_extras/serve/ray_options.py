"""Define and check the options of `nanovllm serve --ray`. This file does not import Ray.

The options have the names and meanings of the options of Ray Serve's deployments, with the prefix `ray_`.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from nanovllm.checks import check_int
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.argument_types import filled
from nanovllm_extras.options.store_options import is_private

ROUTINGS = ("prefix", "load")
POSITIVE = (
    *("num_replicas", "max_replicas", "target_ongoing_requests", "max_ongoing_requests", "num_cpus"),
    *("num_prefill_replicas", "prefill_timeout_s"),
)


@dataclass(frozen=True)
class RayOptions:
    """The number of replicas, the resources of each replica, and the routing of requests."""

    address: str | None = None
    """A running cluster, as in `ray.init`. Default: that of the variable RAY_ADDRESS, else a new cluster."""
    num_replicas: int | None = None
    """The number of engines; 1 by default. Excludes `min_replicas` and `max_replicas`."""
    min_replicas: int | None = None
    """The minimum for autoscaling; 1 by default. With 0, the last replica ends when there are no requests."""
    max_replicas: int | None = None
    """The maximum for autoscaling. Setting it enables autoscaling."""
    target_ongoing_requests: int | None = None
    """The number of requests per replica that autoscaling aims at. Half of `max_ongoing_requests` by default."""
    max_ongoing_requests: int | None = None
    """The maximum number of concurrent requests of a replica; others wait in the router. Default: `max_num_seqs`."""
    num_prefill_replicas: int | None = None
    """The number of further engines, which compute prompts for the others. None: each engine computes its prompts."""
    prefill_timeout_s: int | None = None
    """The time after which a request does not wait for a prefill engine any longer; 60 s by default."""
    num_cpus: int | None = None
    """The number of CPUs and threads of each replica. Default: its share of this machine's cores, or 1 with GPUs."""
    num_ingress_replicas: int = 1
    """The number of processes that relay requests."""
    routing: str = "prefix"
    """`prefix`: to the replica that has seen most of the prompt's beginning; `load`: to one with few requests."""
    stream_batching_interval_ms: int = 20
    """The time between two messages of a stream. Tokens that are computed meanwhile share a message."""
    health_check_period_s: int = 10
    """The interval of health checks. Serve replaces a replica after three failed checks."""

    def __post_init__(self) -> None:
        for name in POSITIVE:
            check_int(f"ray_{name}", getattr(self, name), 1, optional=True)
        check_int("ray_min_replicas", self.min_replicas, 0, optional=True)
        check_int("ray_num_ingress_replicas", self.num_ingress_replicas, 1)
        check_int("ray_health_check_period_s", self.health_check_period_s, 1)
        check_int("ray_stream_batching_interval_ms", self.stream_batching_interval_ms, 0)
        if self.routing not in ROUTINGS:
            raise ValueError(f"ray_routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r}")
        if self.prefill_timeout_s is not None and self.num_prefill_replicas is None:
            raise ValueError("ray_prefill_timeout_s needs ray_num_prefill_replicas")
        self._check_scaling()

    def _check_scaling(self) -> None:
        if self.num_replicas is not None and (self.min_replicas is not None or self.max_replicas is not None):
            raise ValueError("ray_num_replicas cannot be combined with ray_min_replicas and ray_max_replicas")
        if self.max_replicas is None:
            for name in ("min_replicas", "target_ongoing_requests"):
                if getattr(self, name) is not None:
                    raise ValueError(f"ray_{name} needs ray_max_replicas, which enables autoscaling")
        elif (self.min_replicas or 0) > self.max_replicas:
            least, most = self.min_replicas, self.max_replicas
            raise ValueError(f"ray_min_replicas must be at most ray_max_replicas ({most}), got {least}")

    @property
    def most_replicas(self) -> int:
        """The maximum number of replicas."""
        return self.max_replicas or self.num_replicas or 1

    @property
    def num_engines(self) -> int:
        """The maximum number of replicas, including those that compute prompts."""
        return self.most_replicas + (self.num_prefill_replicas or 0)

    def check_transfer(self, config: Config) -> None:
        """Raise ValueError if decode replicas could not load the blocks of the prefill replicas."""
        if self.num_prefill_replicas is None:
            return
        if is_private(config):
            raise ValueError(
                "ray_num_prefill_replicas needs kv_transfer_config with the kv_connector 'SharedMemoryConnector' or "
                "'SharedStorageConnector': decode replicas load the blocks that prefill replicas have saved there"
            )
        if "kv_role" in (config.kv_transfer_config or ()):
            raise ValueError(
                "kv_transfer_config cannot have 'kv_role' with ray_num_prefill_replicas: prefill replicas are "
                "'kv_producer', and decode replicas are 'kv_consumer'. Remove it"
            )

    def scaling(self, max_ongoing_requests: int) -> dict[str, Any]:
        """Return `num_replicas` or `autoscaling_config` for Serve's deployment."""
        if self.max_replicas is None:
            return {"num_replicas": self.num_replicas or 1}
        least = 1 if self.min_replicas is None else self.min_replicas
        target = self.target_ongoing_requests or max(1, max_ongoing_requests // 2)
        config = {"min_replicas": least, "max_replicas": self.max_replicas, "target_ongoing_requests": target}
        return {"autoscaling_config": config}

    def devices(self, config: Config, num_gpus_found: float) -> dict[str, float]:
        """Return the resources that Ray reserves for one engine: a GPU for each of its ranks, or a share of the cores.

        Ray sets a worker's OMP_NUM_THREADS to its `num_cpus`.
        """
        if config.device.startswith("cuda") or (config.device == "auto" and num_gpus_found):
            return {"num_gpus": config.tensor_parallel_size, "num_cpus": self.num_cpus or 1}
        share = (os.cpu_count() or 1) // self.num_engines
        return {"num_gpus": 0, "num_cpus": self.num_cpus or max(1, share)}


def add_ray_options(group: argparse._ArgumentGroup) -> None:
    """Add the options. They are stored as `server_ray…`, as the server's other options."""
    group.add_argument("--ray", dest="server_ray", action="store_true", help="serve with replicas, by Ray Serve")
    kinds: Mapping[str, Callable[[str], object]] = {"address": filled, "routing": str}
    for field in fields(RayOptions):
        text = DESCRIPTIONS[field.name] + (f" (default: {field.default})" if field.default else "")
        kind = kinds.get(field.name, int)
        metavar = {"address": "ADDRESS", "routing": None}.get(field.name, "N")
        choices = ROUTINGS if field.name == "routing" else None
        flag = f"--ray-{field.name.replace('_', '-')}"
        group.add_argument(
            flag, dest=f"server_ray_{field.name}", type=kind, help=text, metavar=metavar, choices=choices
        )


DESCRIPTIONS: Mapping[str, str] = {
    "address": "a running cluster (default: the variable RAY_ADDRESS, else a new cluster on this machine)",
    "num_replicas": "number of engines, each with its own devices (default: 1)",
    "min_replicas": "minimum for autoscaling (default: 1)",
    "max_replicas": "maximum for autoscaling (default: no autoscaling)",
    "target_ongoing_requests": "requests per replica that autoscaling aims at (default: half of the maximum)",
    "max_ongoing_requests": "maximum number of concurrent requests per replica (default: --max-num-seqs)",
    "num_prefill_replicas": "number of further engines that compute prompts; needs --kv-transfer-config (default: 0)",
    "prefill_timeout_s": "time in seconds after which a decode engine computes the prompt (default: 60)",
    "num_cpus": "cores and threads of each replica (default: its share of this machine's, or 1 with a GPU)",
    "num_ingress_replicas": "number of processes that relay requests",
    "routing": "prefix: to the replica that has seen the prompt's beginning; load: to one with few requests",
    "stream_batching_interval_ms": "time between two messages of a stream; tokens computed meanwhile share one",
    "health_check_period_s": "interval in seconds; Serve replaces a replica after three failed checks",
}


def ray_options(args: argparse.Namespace, config: Config) -> RayOptions | None:
    """Return the options of a command line; None without `--ray`. Raises ValueError or TypeError if they conflict.

    config: the checked options of the engines.
    """
    names = [field.name for field in fields(RayOptions)]
    given = {name: value for name in names if (value := getattr(args, f"server_ray_{name}")) is not None}
    if not args.server_ray:
        if given:
            raise ValueError(f"--ray-{next(iter(given)).replace('_', '-')} needs --ray")
        return None
    if args.nnodes > 1:
        raise ValueError(f"--ray cannot be used with --nnodes {args.nnodes}: each replica runs on one machine")
    for name, reason in (("ui", "page shows"), ("trace", "file records")):
        if getattr(args, f"server_{name}"):
            raise ValueError(f"--{name} cannot be used with --ray: the {reason} one engine")
    options = RayOptions(**given)
    options.check_transfer(config)
    return options


def count_gpus() -> int:
    """Return the number of GPUs of this machine, used while there is no cluster."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
