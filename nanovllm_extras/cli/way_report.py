"""Each way to compute, started and checked: is it right, how fast is it, and how many tokens does its cache hold?"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.kernels.cpu.library_cache import CacheError, cache_folder
from nanovllm_extras.machine.own_process import NotAvailableError, SelfCheckError
from nanovllm_extras.machine.printing import say
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.self_check.fallbacks import release_memory, ways_to_compute
from nanovllm_extras.self_check.mode import begin
from nanovllm_extras.weights.checkpoint import resolve_model

NUM_SEQS = 4
SECONDS = 1.0


class WayReport(NamedTuple):
    name: str
    result: str
    """`right`, `wrong`, or `not available`."""
    reason: str = ""
    """Why it is wrong, or not available; otherwise what computes."""
    tokens_per_s: float | None = None
    """Output tokens of `NUM_SEQS` sequences that decode together."""
    weights_gb_per_s: float | None = None
    """How fast these decodes read the weights, if a step reads all of them once (a mixture of experts reads fewer)."""
    kv_cache_tokens: int | None = None
    """With the default options."""


def forget_results() -> None:
    """Delete the stored results of self-checks, so that everything is checked again."""
    with suppress(OSError, CacheError):
        for path in cache_folder().glob("checked-*.json"):
            path.unlink()


def measure_ways(model: str, options: dict[str, Any]) -> list[WayReport]:
    """Start every way to compute of this machine, one after the other. ValueError if the model cannot be loaded."""
    resolve_model(model, options["load_format"] != "dummy")
    config = Config(model, **options)
    reports = []
    for way in ways_to_compute(config):
        say(f"checking {way.name} …", sys.stderr)
        reports.append(measure_way(way.name, {**options, **way.options}, way.kind, model))
        release_memory()
    return reports


def measure_way(name: str, options: dict[str, Any], kind: Callable[..., ModelRunner] | None, model: str) -> WayReport:
    """Start an engine, and let it generate for about a second."""
    try:
        runner_class = None if kind is None else partial(kind, begin_check=begin)
        engine = LLMEngine(Config(model, **options, self_check="strict"), runner_class=runner_class)
    except NotAvailableError as error:
        return WayReport(name, "not available", str(error))
    except SelfCheckError as error:
        return WayReport(name, "wrong", str(error))
    except (ValueError, RuntimeError, MemoryError) as error:
        return WayReport(name, "not available", str(error))
    runner = engine.runner
    if type(runner.backend) is TorchAttention and name != "PyTorch":  # `auto` has found a reason against the kernels
        return WayReport(name, "not available", runner.description)
    tokens_per_s = decode(engine)
    model_bytes = sum(tensor.nbytes for tensor in (*runner.model.parameters(), *runner.model.buffers()))
    return WayReport(
        name,
        "right",
        runner.description.split("; ")[-1],
        tokens_per_s,
        model_bytes * tokens_per_s / NUM_SEQS / 1e9,
        runner.kv_cache.num_blocks * runner.backend.block_size,
    )


def decode(engine: LLMEngine) -> float:
    """Return the output tokens per second of some sequences that decode together, without the first steps."""
    num_tokens = min(256, engine.runner.max_model_len // 2)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [1] * min(32, num_tokens)}
    for i in range(NUM_SEQS):
        engine.add_request(f"check-{i}", prompt, params, stream=False)
    for _ in range(3):
        engine.step()
    start, num_steps = time.perf_counter(), 0
    while engine.has_unfinished_requests() and time.perf_counter() - start < SECONDS:
        engine.step()
        num_steps += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    for i in range(NUM_SEQS):
        engine.abort_request(f"check-{i}")
    return NUM_SEQS * num_steps / elapsed
