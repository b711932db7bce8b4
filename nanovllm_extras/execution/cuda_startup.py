"""What CUDA adds to the start: a kernel that samples, pinned buffers, free memory, a warm-up, CUDA graphs.

`full_runner.py` makes it and calls its methods in their order here.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.execution.cuda_memory import advice_on_start_memory, measure_free_bytes
from nanovllm_extras.execution.cuda_warm_up import warm_up
from nanovllm_extras.execution.device_setup import Device, Record
from nanovllm_extras.execution.input_buffer import InputBuffer
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.execution.step_graphs import StepSizes, choose_graphs, record_graphs
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.sampling.runner_hooks import Draw


class CudaDevice(Device):
    """The device setup. Raises ValueError if `enable_cuda_graphs=True` is not possible, for example on a CPU."""

    memory_knob = "gpu_memory_utilization"

    def __init__(
        self,
        config: Config,
        device: torch.device,
        backend: TorchAttention,
        shape: NetworkConfig,
        max_num_batched_tokens: int,
        max_rows: int | None = None,
        *,
        has_kernel: bool = True,
    ) -> None:
        """has_kernel: whether a kernel may draw tokens. Without it, graphs have the forward pass only"""
        self.config, self.device, self.backend = config, device, backend
        self.sizes = StepSizes(max_num_batched_tokens, max_rows or config.max_num_seqs, shape.max_position_embeddings)
        self.draw = choose_draw(config, device) if has_kernel else None
        has_draw = self.draw is not None
        self.replayed, self.note = choose_graphs(config, backend, has_draw, device, shape.num_experts)

    def prepare(self, runner: Runner) -> None:
        self.buffer = InputBuffer(self.device, 1 << 16)

    def send(self, record: Record) -> Record:
        return self.buffer.send_record(record)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run on this device, with advice in a torch.OutOfMemoryError. The engine continues with other steps."""
        with torch.cuda.device_of(self.buffer.device_bytes):
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    "the GPU's memory does not suffice for this step: lower gpu_memory_utilization, which leaves it "
                    f"more, or max_num_batched_tokens or max_num_seqs; {error}"
                ) from error

    def advice(self) -> AbstractContextManager[None]:
        return advice_on_start_memory()

    def free_bytes(self, runner: Runner) -> int:
        return measure_free_bytes(runner, self.config, self.sizes, self.replayed)

    def allocate(self, caches: list[KVCache], num_blocks: int) -> None:
        for cache in caches:
            cache.allocate(num_blocks)

    def record(self, runner: Runner) -> None:
        """Compile what requests will run, and record CUDA graphs."""
        warm_up(runner, self.sizes)
        if self.replayed == "step":
            table_width = -(-self.sizes.max_model_len // runner.backend.block_size)
            recorded = (runner.network, runner.kv_cache.tensor, runner.draw, self.sizes.max_decodes, table_width)
            runner.step_graphs = record_graphs(*recorded, runner.more_inputs)
        elif self.replayed == "forward":
            with torch.cuda.device_of(runner.kv_cache.tensor):
                graphs = runner.make_graphs()
                graphs.record_all()
            runner.graphs = graphs


def choose_draw(config: Config, device: torch.device) -> Draw | None:
    """Return Triton's sampling kernel on CUDA, which neither sorts nor makes the host wait; None if unavailable."""
    if config.enforce_eager or device.type != "cuda":
        return None
    with suppress(ImportError):  # the folder of kernels has been deleted, or triton is of another torch
        requirements = importlib.import_module("nanovllm_extras.kernels.cuda.requirements")
        if requirements.why_no_triton() is None:
            return importlib.import_module("nanovllm_extras.kernels.cuda.sample").sample_tokens
    return None
