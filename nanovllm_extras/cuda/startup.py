"""What CUDA adds to the start: a kernel that samples, pinned buffers, free memory, a warm-up, CUDA graphs.

`full_runner.py` makes it and calls its methods in their order here.
"""

import importlib
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.batch import Batch
from nanovllm.kv_cache import KVCache
from nanovllm_extras.all_options import Config
from nanovllm_extras.cuda.graphs import StepSizes, choose_graphs, replay_decodes
from nanovllm_extras.cuda.input_buffer import InputBuffer
from nanovllm_extras.cuda.memory import Compute, advice_on_start_memory, advised, measure_free_bytes
from nanovllm_extras.cuda.warm_up import warm_up
from nanovllm_extras.device_setup import Device
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.overlap import NewestTokens
from nanovllm_extras.runner_hooks import Draw, SampledTokens

if TYPE_CHECKING:
    from nanovllm_extras.full_runner import ModelRunner


class CudaDevice(Device):
    """The device setup. Raises ValueError if `enable_cuda_graphs=True` is not possible, for example on a CPU."""

    memory_knob = "gpu_memory_utilization"

    def __init__(
        self,
        config: Config,
        device: torch.device,
        backend: Any,
        shape: NetworkConfig,
        max_num_batched_tokens: int,
        max_rows: int | None = None,
    ) -> None:
        self.config, self.device, self.backend = config, device, backend
        self.sizes = StepSizes(max_num_batched_tokens, max_rows or config.max_num_seqs, shape.max_position_embeddings)
        self.draw = choose_draw(config, device)
        has_kernel = self.draw is not None
        self.replayed, self.note = choose_graphs(config, backend, has_kernel, device, shape.num_experts)

    def prepare(self, runner: "ModelRunner") -> None:
        runner.draw = self.draw or runner.draw
        if not isinstance(self.backend, KernelBackend):  # PyTorch's
            runner.compute = without_plans(runner.compute)
        runner.transfer = InputBuffer(self.device, 1 << 16).send_record

    def advice(self) -> AbstractContextManager[None]:
        return advice_on_start_memory()

    def free_bytes(self, runner: "ModelRunner") -> int:
        return measure_free_bytes(runner, self.config, self.sizes, self.replayed)

    def allocate(self, kv_cache: KVCache, num_blocks: int) -> None:
        kv_cache.allocate(num_blocks)

    def wrap(self, runner: "ModelRunner", newest: NewestTokens | None) -> None:
        """Compile what requests will run, and wrap `compute`.

        Graphs read the newest tokens on the device, with or without overlap.
        """
        warm_up(runner, self.sizes)
        if self.replayed == "step":
            replay_decodes(runner, newest or NewestTokens(runner), self.sizes)
        elif self.replayed == "forward":
            with torch.cuda.device_of(runner.kv_cache.tensor):
                runner.graphs = runner.make_graphs()
                runner.graphs.record_all()
                runner.is_replayed = runner.graphs.can_replay
        runner.compute = advised(runner.compute)


def without_plans(compute: Compute) -> Compute:
    """Return `compute` without cuDNN's attention, which makes a new plan for each shape; steps differ in shape."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def compute_without_plans(runner: "ModelRunner", batch: Batch) -> SampledTokens:
        with sdpa_kernel(kernels):
            return compute(runner, batch)

    return compute_without_plans


def choose_draw(config: Config, device: torch.device) -> Draw | None:
    """Return Triton's sampling kernel on CUDA, which neither sorts nor makes the host wait; None if unavailable."""
    if config.enforce_eager or device.type != "cuda":
        return None
    with suppress(ImportError):  # the folder of kernels has been deleted, or triton is of another torch
        requirements = importlib.import_module("nanovllm_extras.kernels.cuda.requirements")
        if requirements.why_no_triton() is None:
            return importlib.import_module("nanovllm_extras.kernels.cuda.sample").sample_tokens
    return None
