"""The engine starts with the fastest way to compute that passes the self-check. Each that fails is said in the log.

    CUDA    fused kernels with CUDA graphs → without → the core's flash-attn with CUDA graphs → without → PyTorch
    CPU     C kernels for all layers → C kernels for attention only → PyTorch

What the user has asked for by name (`attention_backend="cpu"`) is not replaced: it raises.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.config import resolve_device
from nanovllm.extras.all_options import Config
from nanovllm.extras.dead import EngineDeadError
from nanovllm.extras.full_runner import ModelRunner
from nanovllm.extras.self_check.comparison import SelfCheckError
from nanovllm.extras.self_check.mode import mode_of

logger = logging.getLogger(__name__)

REPORT = "please report it with the output of `nanovllm check`"


class Way(NamedTuple):
    """A way to compute: what it is, the options that choose it, and the runner."""

    name: str
    options: dict[str, Any]
    kind: Callable[[Config, Path], ModelRunner] | None = None
    """None is the usual runner."""


def ways_to_compute(config: Config) -> list[Way]:
    """Return what to try, best first."""
    if resolve_device(config.device).type == "cpu":
        kernels = {"attention_backend": "cpu", "enforce_eager": True}
        ways = [Way("C kernels", {})]
        if not config.enforce_eager:
            ways.append(Way("C kernels for attention only", kernels))
    else:
        from nanovllm.extras.self_check.core_on_cuda import CoreRunner

        ways = [Way("fused kernels", {})]
        if not config.enforce_eager and config.enable_cuda_graphs is None:
            ways.append(Way("fused kernels without CUDA graphs", {"enable_cuda_graphs": False}))
        if config.tensor_parallel_size == 1 and config.kv_cache_dtype == "auto":
            ways += [
                Way("the core's flash-attn", {}, CoreRunner),
                Way("the core's flash-attn without CUDA graphs", {"enable_cuda_graphs": False}, CoreRunner),
            ]
    return [*ways, Way("PyTorch", {"attention_backend": "torch", "enforce_eager": True})]


def start(kind: Callable[[Config, Path], ModelRunner], config: Config, folder: Path) -> ModelRunner:
    """Return a runner whose way to compute has passed the self-check. SelfCheckError if it has not, and must stay."""
    ways = ways_to_compute(config)
    may_replace = mode_of(config) != "strict" and config.attention_backend == "auto"
    for way in ways:
        try:
            return (way.kind or kind)(replace(config, **way.options), folder)
        except SelfCheckError as error:
            reason = str(error)
        except EngineDeadError as error:  # of another rank
            if SelfCheckError.__name__ not in str(error):
                raise
            reason = str(error).partition(": ")[2]
        message = f"the self-check of {way.name} has failed: {reason}; {REPORT}"
        if not may_replace or way is ways[-1]:
            break
        logger.warning("%s. The next best way to compute is taken, which may be much slower", message)
    raise SelfCheckError(message)
