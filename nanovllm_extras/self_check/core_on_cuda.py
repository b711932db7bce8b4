"""The core's path on CUDA as a fallback: flash-attn over block tables, PyTorch's layers, graphs of the forward pass."""

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm_extras.execution.chooser import Chooser, cuda_device, make_cores_backend
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.machine.own_process import NotAvailableError
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config


class CoreChooser(Chooser):
    """Lets a runner compute as `nanovllm.llm.LLM` does where Triton does not work."""

    def make_backends(
        self, config: Config, shape: NetworkConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[tuple[TorchAttention, ...], str]:
        """Return the core's flash-attn. NotAvailableError if this model or this machine cannot use it."""
        backend = make_cores_backend(config, shape, device, dtype)
        is_other_model = shape.attention_options or shape.latent_rank or shape.state_shape
        if not isinstance(backend, FlashAttention) or is_other_model:
            raise NotAvailableError("flash-attn cannot be used here, or not for this model")
        return (backend,), "attention_backend=the core's"

    def make_device(self, runner: Runner) -> Device:
        config, shape = runner.config, runner.shape
        most = runner.max_num_batched_tokens
        device = cuda_device()(config, runner.device, runner.backend, shape, most, has_kernel=False)
        has_graphs = not config.enforce_eager and config.enable_cuda_graphs is not False
        device.replayed = "forward" if has_graphs and not shape.num_experts else None
        device.note = ", with CUDA graphs of the forward pass" if device.replayed else ", no CUDA graphs"
        return device
