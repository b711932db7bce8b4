"""The options of `nanovllm serve --ray`, checked before anything starts. Needs no Ray.

Names and meanings are those of Ray Serve's deployments, with `ray_` before them.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from nanovllm.checks import check_int
from nanovllm.extras.all_options import Config

ROUTINGS = ("prefix", "load")


@dataclass(frozen=True)
class RayOptions:
    """How many replicas there are, what each of them gets, and how requests find one."""

    address: str | None = None
    """A running cluster, as in `ray.init`; by default that of the variable RAY_ADDRESS, else a new one."""
    num_replicas: int | None = None
    """Engines; 1 by default. Excludes `min_replicas` and `max_replicas`."""
    min_replicas: int | None = None
    """The least that autoscaling leaves; 1 by default, 0 ends the last one when nobody asks."""
    max_replicas: int | None = None
    """The most that autoscaling starts."""
    target_ongoing_requests: int | None = None
    """Of each replica: autoscaling aims at it. Half of `max_ongoing_requests` by default."""
    max_ongoing_requests: int | None = None
    """A replica gets no more at a time; others wait in the router. `max_num_seqs` by default."""
    num_cpus: int | None = None
    """Of each replica, and its threads. By default its share of this machine's cores, and 1 with GPUs."""
    num_ingress_replicas: int = 1
    """Processes that pass requests on."""
    routing: str = "prefix"
    """`prefix`: to the replica that has seen most of the prompt's beginning; `load`: to one with few requests."""
    stream_batching_interval_ms: int = 20
    """Between two messages of a stream; tokens that come meanwhile share one."""
    health_check_period_s: int = 10
    """Serve replaces a replica after three failed checks."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "max_replicas", "target_ongoing_requests", "max_ongoing_requests", "num_cpus"):
            check_int(f"ray_{name}", getattr(self, name), 1, optional=True)
        check_int("ray_min_replicas", self.min_replicas, 0, optional=True)
        check_int("ray_num_ingress_replicas", self.num_ingress_replicas, 1)
        check_int("ray_health_check_period_s", self.health_check_period_s, 1)
        check_int("ray_stream_batching_interval_ms", self.stream_batching_interval_ms, 0)
        if self.routing not in ROUTINGS:
            raise ValueError(f"ray_routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r}")
        self._check_scaling()

    def _check_scaling(self) -> None:
        if self.num_replicas is not None and (self.min_replicas is not None or self.max_replicas is not None):
            raise ValueError("ray_num_replicas excludes ray_min_replicas and ray_max_replicas; give one or the others")
        if self.max_replicas is None:
            for name in ("min_replicas", "target_ongoing_requests"):
                if getattr(self, name) is not None:
                    raise ValueError(f"ray_{name} needs ray_max_replicas, which turns autoscaling on")
        elif (self.min_replicas or 0) > self.max_replicas:
            least, most = self.min_replicas, self.max_replicas
            raise ValueError(f"ray_min_replicas must be at most ray_max_replicas ({most}), got {least}")

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.num_replicas or 1

    def scaling(self, max_ongoing_requests: int) -> dict[str, Any]:
        """`num_replicas` or `autoscaling_config` of Serve's deployment."""
        if self.max_replicas is None:
            return {"num_replicas": self.num_replicas or 1}
        least = 1 if self.min_replicas is None else self.min_replicas
        target = self.target_ongoing_requests or max(1, max_ongoing_requests // 2)
        config = {"min_replicas": least, "max_replicas": self.max_replicas, "target_ongoing_requests": target}
        return {"autoscaling_config": config}

    def devices(self, config: Config, num_gpus_found: float) -> dict[str, float]:
        """What Ray reserves for one engine: a GPU for each of its ranks, or a share of the cores.

        Ray sets a worker's OMP_NUM_THREADS to its `num_cpus`.
        """
        if config.device.startswith("cuda") or (config.device == "auto" and num_gpus_found):
            return {"num_gpus": config.tensor_parallel_size, "num_cpus": self.num_cpus or 1}
        share = (os.cpu_count() or 1) // self.most_replicas
        return {"num_gpus": 0, "num_cpus": self.num_cpus or max(1, share)}


def add_ray_options(group: Any) -> None:
    """The flags, kept as `server_ray…`: the engine has options of its own."""
    group.add_argument("--ray", dest="server_ray", action="store_true", help="replicas of the engine, by Ray Serve")
    for field in fields(RayOptions):
        text = DESCRIPTIONS[field.name] + (f" (default: {field.default})" if field.default else "")
        how: dict[str, Any] = {"choices": ROUTINGS} if field.name == "routing" else {"metavar": "N"}
        kind = str if field.name in ("address", "routing") else int
        if field.name == "address":
            how = {"metavar": "ADDRESS"}
        flag = f"--ray-{field.name.replace('_', '-')}"
        group.add_argument(flag, dest=f"server_ray_{field.name}", type=kind, default=None, help=text, **how)


DESCRIPTIONS: Mapping[str, str] = {
    "address": "a running cluster; also from the variable RAY_ADDRESS; a new one on this machine",
    "num_replicas": "engines, each with its own devices",
    "min_replicas": "the least that autoscaling leaves; 1",
    "max_replicas": "the most that autoscaling starts; no autoscaling",
    "target_ongoing_requests": "of each replica, at which autoscaling aims; half of the most",
    "max_ongoing_requests": "the most of each replica at a time; --max-num-seqs",
    "num_cpus": "cores and threads of each replica; its share of this machine's, or 1 with a GPU",
    "num_ingress_replicas": "processes that pass requests on",
    "routing": "prefix: to the replica that has seen the prompt's beginning; load: to one with few requests",
    "stream_batching_interval_ms": "between two messages of a stream; tokens that come meanwhile share one",
    "health_check_period_s": "seconds; three failed checks replace a replica",
}


def ray_options(args: argparse.Namespace) -> RayOptions | None:
    """Of a command line; None without `--ray`. Raises ValueError or TypeError for what does not fit together."""
    names = [field.name for field in fields(RayOptions)]
    given = {name: value for name in names if (value := getattr(args, f"server_ray_{name}")) is not None}
    if not args.server_ray:
        if given:
            raise ValueError(f"--ray-{next(iter(given)).replace('_', '-')} needs --ray")
        return None
    if args.nnodes > 1:
        raise ValueError(f"--ray does not go with --nnodes {args.nnodes}: each replica is on one machine")
    for name, reason in (("ui", "page shows"), ("trace", "file records")):
        if getattr(args, f"server_{name}"):
            raise ValueError(f"--{name} does not go with --ray: the {reason} one engine")
    return RayOptions(**given)


def count_gpus() -> int:
    """Of this machine, where no cluster is known yet."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
