"""Are the core's scheduler and block manager enough, and the runner's default parts? `full_engine.py` asks `is_plain`.

If they are not, the engine takes the parts that `assembly.py` makes, with all that options choose.
"""

from pathlib import Path

from nanovllm.config import resolve_device
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.weights.checkpoint import read_model_config

BEYOND_THE_CORE = (
    *("kv_cache_dtype", "load_format", "quantization", "enable_cuda_graphs", "enable_overlap", "speculative_config"),
    *("scheduling_policy", "long_prefill_token_threshold", "preemption_mode", "kv_offloading_size"),
    *("kv_transfer_config", "tensor_parallel_size", "nnodes", "node_rank"),
    *("scheduler_cls", "block_manager_cls", "prefix_cache_cls", "runner_cls", "models", "enable_lora"),
)
"""Options that need more than the core's parts, unless they have their default values."""


def is_plain(config: Config, folder: Path) -> bool:
    """Return whether scheduler and block manager can be the core's, and the parts of the runner its defaults."""
    if config.attention_backend != "torch" or not config.enforce_eager:
        return False
    if any(getattr(config, name) != getattr(Config, name) for name in BEYOND_THE_CORE):
        return False
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    is_plain_model = shape.quantization_config is None and shape.latent_rank is None and shape.widest_window is None
    is_plain_model = is_plain_model and shape.state_shape is None and not shape.kv_groups
    is_plain_model = is_plain_model and len(set(shape.attention_options)) < 2  # layers with and without a window
    return is_plain_model and resolve_device(config.device).type == "cpu"
