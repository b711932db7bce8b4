"""The core's path on CUDA as a fallback: flash-attn over block tables, PyTorch's layers, graphs of the forward pass."""

from typing import Any

from nanovllm import model_runner
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm_extras.cuda.startup import CudaDevice
from nanovllm_extras.device_setup import Device
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.self_check.comparison import NotAvailableError


class CoreRunner(ModelRunner):
    """Computes as `nanovllm.llm.LLM` does."""

    def make_backend(self) -> Any:
        """Return the core's flash-attn. NotAvailableError if this model or this machine cannot use it."""
        self.reasons = "attention_backend=the core's"
        backend = model_runner.ModelRunner.make_backend(self)
        if not isinstance(backend, FlashAttention) or self.shape.attention_options or self.shape.latent_rank:
            raise NotAvailableError("flash-attn cannot be used here, or not for this model")
        return backend

    def make_device(self) -> Device:
        device = CudaDevice(self.config, self.device, self.backend, self.shape, self.max_num_batched_tokens)
        device.draw = None
        has_graphs = not self.config.enforce_eager and self.config.enable_cuda_graphs is not False
        device.replayed = "forward" if has_graphs and not self.shape.num_experts else None
        device.note = ", with CUDA graphs of the forward pass" if device.replayed else ", no CUDA graphs"
        return device
