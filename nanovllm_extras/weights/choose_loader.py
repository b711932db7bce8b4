"""Choose the function that loads a checkpoint which is quantised already.

`full_runner.py` calls it for one rank, `parallel/start_ranks.py` for each of several.
"""

from collections.abc import Callable
from functools import partial

from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.weights.load_model import Wanted
from nanovllm_extras.weights.quantise import Finish
from nanovllm_extras.weights.shares import Share
from nanovllm_extras.weights.stored import load_stored
from nanovllm_extras.weights.stored_format import read_format


def choose_loader(
    shape: NetworkConfig, config: Config, finish: Finish, share: Share | None = None
) -> Callable[[Wanted], Qwen3ForCausalLM]:
    """Return the loader for the format that config.json names, or for a GGUF file.

    shape: that of the whole network; share: the rank's part of it, None for all
    """
    share = share or Share()
    if config.load_format == "gguf":
        from nanovllm_extras.weights.gguf import load_gguf  # whose library may be missing

        return partial(load_gguf, finish, share, shape)
    return partial(load_stored, read_format("quantization_config", shape.quantization_config), finish, share)
