"""How much memory a draft model will need, before it is loaded: it shares the memory for the KV cache with the model.

The draft model is loaded when the KV cache has been allocated, and needs as many blocks of its own. So before that:

    number of blocks = (free memory - the draft model's weights and graphs) / (bytes of a block in both models)

If the large model has recurrent states, their slots are allocated from this memory first (`execution/state_pool.py`).
"""

import torch

from nanovllm.config import resolve_dtype
from nanovllm_extras.execution.chooser import Chooser
from nanovllm_extras.execution.full_runner import DraftNeeds, ModelRunner
from nanovllm_extras.execution.layout import Layout
from nanovllm_extras.options.speculation_options import read_options
from nanovllm_extras.speculation.draft_model import find_draft_model
from nanovllm_extras.weights.checkpoint import read_model_config


def measure_draft(runner: ModelRunner) -> DraftNeeds:
    """Return what the draft model of `speculative_config` needs. runner: the large model's"""
    assert runner.config.speculative_config is not None
    options = read_options(runner.config.speculative_config)
    config, folder = find_draft_model(runner, options, num_kv_blocks=1)
    model_class, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    dtype = resolve_dtype(config.dtype, shape.dtype, runner.device)
    backends, _ = Chooser().make_backends(config, shape, runner.device, dtype)
    with torch.device("meta"):
        model = model_class(shape, backends[0])
    num_weights = sum([weight.numel() for weight in model.parameters()])
    caches = Layout(config, shape, dtype, runner.device).make_kv_caches(backends)
    return DraftNeeds(num_weights * dtype.itemsize, sum([cache.bytes_per_block for cache in caches]))
