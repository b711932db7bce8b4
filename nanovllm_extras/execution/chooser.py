"""`Chooser`: chooses what computes, the attention backends and the device setup.

`self_check/core_on_cuda.py` has a subclass, with which a runner computes as the core does.
"""

from collections.abc import Callable

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.plugins import choose_backends
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config


class Chooser:
    """Chooses by the options, the network and the machine. shape: that of the model, or of a rank's share of it"""

    def make_backends(
        self, config: Config, shape: NetworkConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[tuple[TorchAttention, ...], str]:
        """Return an attention backend for each shape of K and V, and why. `torch` and eager is the core's."""
        if config.has_own_backend:
            return (make_cores_backend(config, shape, device, dtype),), "attention_backend=your own"
        is_plain = config.kv_cache_dtype == "auto" and shape.latent_rank is None and not shape.kv_groups
        if config.attention_backend == "torch" and config.enforce_eager and is_plain:
            return (make_cores_backend(config, shape, device, dtype),), "attention_backend=torch"
        from nanovllm_extras.execution.choices import choose_all  # here: the core's attention needs no kernels

        return choose_all(config, device, dtype, shape)

    def make_device(self, runner: Runner) -> Device:
        """Return the device setup. Raises ValueError if `enable_cuda_graphs=True` and the device is not CUDA."""
        config, device = runner.config, runner.device
        if device.type != "cuda" and not config.enable_cuda_graphs:
            return Device()
        sizes = (runner.max_num_batched_tokens, runner.max_rows)
        setup = cuda_device()(config, device, runner.slowest_backend, runner.shape, *sizes)
        if setup.replayed == "step" and (reason := runner.why_no_steps):
            setup.replayed, setup.note = "forward", f"{setup.note} of the forward pass only ({reason})"
        return setup


def cuda_device() -> Callable[..., Device]:
    """Import `CudaDevice`, whose modules are large: only CUDA needs them."""
    from nanovllm_extras.execution.cuda_startup import CudaDevice

    return CudaDevice


def make_cores_backend(
    config: Config, shape: NetworkConfig, device: torch.device, dtype: torch.dtype
) -> TorchAttention:
    """Return the attention backend that the core would take."""
    kinds, _ = choose_backends(config.attention_backend, device, dtype, shape, config.block_size)
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, config.block_size)
    return kinds[0](*sizes, dtype)
