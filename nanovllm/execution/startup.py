"""From a configuration to a model that is ready to run: what happens once, and how long each part of it takes.

    choose a backend → load the weights → put fast layers in place → size and allocate the KV cache → record CUDA graphs

Called by `assembly.py`, which has read the model's folder before, and makes the scheduler afterwards.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import Config, resolve_device, resolve_dtype
from nanovllm.execution.cache_size import StepSizes, count_swap_blocks, num_blocks_that_fit
from nanovllm.execution.choices import choose_draw, choose_graphs, make_backend
from nanovllm.execution.cuda_graph import ReplayedDecodes, record_graphs
from nanovllm.execution.loader import load_model
from nanovllm.execution.memory_advice import advice_on_start_memory
from nanovllm.execution.model_runner import ModelRunner
from nanovllm.execution.threads import limit_threads
from nanovllm.layers.backends import pytorch_layers
from nanovllm.models.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Startup:
    """A runner that is ready, and how it was made."""

    runner: ModelRunner
    num_kv_blocks: int
    num_swap_blocks: int
    description: str
    """What was chosen, and why."""
    seconds: dict[str, float]
    """How long each part took, in order."""


def start_runner(
    config: Config,
    folder: Path,
    model_class: Any,
    shape: ModelConfig,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> Startup:
    """Raises ValueError if the model, the config and this machine do not go together, or memory does not suffice."""
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, shape.dtype)
    sizes = StepSizes(max_num_batched_tokens, config.max_num_seqs, max_model_len)
    clock = PartsClock()
    with clock.part("backend"):
        if device.type == "cpu":
            limit_threads()
        backend, description = make_backend(config, device, dtype, shape)
        draw = choose_draw(config, device, backend)
        has_graphs, graphs = choose_graphs(config, backend, draw, device, shape.num_experts)
    with clock.part("weights"):
        seed = config.seed if config.load_format == "dummy" else None
        model = load_model(model_class, shape, backend, dtype, device, folder, seed)
    with clock.part("layers"):
        if not config.enforce_eager:
            backend.replace_layers(model)
        description += f", in PyTorch: {', '.join(sorted(pytorch_layers(model))) or 'nothing'}{graphs}"
        logger.info(description)
        runner = ModelRunner(model, backend, shape.num_hidden_layers, dtype, device, draw)
    with clock.part("memory"), advice_on_start_memory():
        num_kv_blocks = num_blocks_that_fit(runner, config, sizes, has_graphs)
        num_swap_blocks = count_swap_blocks(config.swap_space_bytes, runner.kv_cache.bytes_per_block)
        runner.kv_cache.allocate(num_kv_blocks, num_swap_blocks)
    with clock.part("graphs"), advice_on_start_memory():
        if has_graphs:
            table_width = -(-max_model_len // backend.block_size)
            recorded = record_graphs(model, runner.kv_cache.tensor, draw, sizes.max_decodes, table_width)
            runner.compute = ReplayedDecodes(recorded)
    logger.info("started in " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in clock.seconds.items()))
    return Startup(runner, num_kv_blocks, num_swap_blocks, description, clock.seconds)


class PartsClock:
    """Seconds that each part takes, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
