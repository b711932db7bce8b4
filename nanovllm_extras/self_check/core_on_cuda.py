"""The core's path on CUDA as a fallback: flash-attn over block tables, PyTorch's layers, graphs of the forward pass."""

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm_extras.execution.cuda_startup import CudaDevice
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.layouts import Layout
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.machine.own_process import NotAvailableError


class CoreLayout(Layout):
    """Computes as `nanovllm.llm.LLM` does."""

    def make_backends(self, device: torch.device, dtype: torch.dtype) -> tuple[tuple[TorchAttention, ...], str]:
        """Return the core's flash-attn. NotAvailableError if this model or this machine cannot use it."""
        backend = self.make_cores_backend(device, dtype)
        if not isinstance(backend, FlashAttention) or self.shape.attention_options or self.shape.latent_rank:
            raise NotAvailableError("flash-attn cannot be used here, or not for this model")
        return (backend,), "attention_backend=the core's"

    def make_device(self, runner: Runner) -> Device:
        config, shape = self.config, self.shape
        most = runner.max_num_batched_tokens
        device = CudaDevice(config, runner.device, runner.backend, shape, most, has_kernel=False)
        has_graphs = not config.enforce_eager and config.enable_cuda_graphs is not False
        device.replayed = "forward" if has_graphs and not shape.num_experts else None
        device.note = ", with CUDA graphs of the forward pass" if device.replayed else ", no CUDA graphs"
        return device
