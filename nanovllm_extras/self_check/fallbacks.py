"""The engine starts with the fastest way to compute that passes the self-check. Each that fails is logged.

    CUDA    fused kernels with CUDA graphs → without → the core's flash-attn with CUDA graphs → without → PyTorch
    CPU     C kernels for all layers → C kernels for attention only → PyTorch

What the user has asked for (`attention_backend="cpu"`, `enable_cuda_graphs=True`) is not replaced: it raises. With
ranks on several machines nothing is replaced, because all of them would have to start again.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.config import resolve_device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.machine.own_process import LoadError, NotAvailableError, SelfCheckError
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.self_check.core_on_cuda import CoreChooser
from nanovllm_extras.self_check.mode import begin, mode_of

logger = logging.getLogger(__name__)

REPORT = "please report it with the output of `nanovllm check`"


class Way(NamedTuple):
    """A way to compute: what it is, the options that choose it, and the runner."""

    name: str
    options: dict[str, Any]
    kind: Callable[..., ModelRunner] | None = None
    """None is the usual runner."""


def ways_to_compute(config: Config) -> list[Way]:
    """Return what to try, best first."""
    plain = Way("PyTorch", {"attention_backend": "torch", "enforce_eager": True})
    is_on_cpu = resolve_device(config.device).type == "cpu"
    if config.attention_backend == "torch":  # on CUDA a kernel draws the tokens
        has_kernel = not is_on_cpu and not config.enforce_eager
        return (
            [Way("PyTorch with a kernel that draws tokens", {}), plain] if has_kernel else [plain._replace(options={})]
        )
    if is_on_cpu:
        kernels = {"attention_backend": "cpu", "enforce_eager": True}
        ways = [Way("C kernels", {})]
        if not config.enforce_eager:
            ways.append(Way("C kernels for attention only", kernels))
    else:
        core = partial(ModelRunner, chooser=CoreChooser())
        ways = [Way("fused kernels", {})]
        may_have_graphs = not config.enforce_eager and config.enable_cuda_graphs is None
        if may_have_graphs:
            ways.append(Way("fused kernels without CUDA graphs", {"enable_cuda_graphs": False}))
        if config.tensor_parallel_size == 1 and config.kv_cache_dtype == "auto":
            if may_have_graphs:
                ways.append(Way("the core's flash-attn", {}, core))
            ways.append(Way("the core's flash-attn without CUDA graphs", {"enable_cuda_graphs": False}, core))
    return [*ways, plain]


def start(kind: Callable[..., ModelRunner], config: Config, folder: Path) -> ModelRunner:
    """Return a runner whose way to compute has passed the self-check. SelfCheckError if none has."""
    # a runner of another class cannot replace one for ranks or drafts
    ways = [way for way in ways_to_compute(config) if way.kind is None or kind is ModelRunner]
    is_free = config.attention_backend in ("auto", "torch") and config.enable_cuda_graphs is not True
    is_free = is_free and config.nnodes == 1
    may_replace = is_free and mode_of(config) != "strict"
    failed = reason = ""
    for way in ways:
        try:
            runner = (way.kind or kind)(replace(config, **way.options), folder, begin_check=begin)
            runner.description = failed + runner.description
            return runner
        except NotAvailableError as error:
            logger.info("not %s: %s", way.name, error)
            continue
        except SelfCheckError as error:
            if isinstance(error, LoadError) and str(error) == reason:  # another way needs the same library
                continue
            reason = str(error)
        except EngineDeadError as error:  # of another rank
            if SelfCheckError.__name__ not in str(error):
                raise
            reason = str(error).partition(": ")[2]
        message = f"the self-check of {way.name} has failed: {reason}; {REPORT}"
        if not may_replace or way is ways[-1]:
            break
        failed += f"not {way.name}: the self-check has failed: {in_few_words(reason)}; "
        release_memory()
        logger.warning("%s. The next best way to compute is taken, which may be much slower", message)
    raise SelfCheckError(message)


def in_few_words(reason: str) -> str:
    """Return the first line of a reason up to its first semicolon, which separates the parts of a description."""
    return reason.split("\n")[0].split("; ")[0]


def release_memory() -> None:
    """Free the weights and graphs of a runner that is not used any more, before the next one loads its own."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
