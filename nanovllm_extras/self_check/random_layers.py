"""A model's layers with random weights, for the crash test on CUDA: one layer of each kind, and a small vocabulary.

The layers get the fast versions that the engine's layers get. They take at most a fiftieth of the device's memory,
because the engine loads its weights meanwhile.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.layers.basic import Embedding
from nanovllm.loader import allocate, init_dummy_weights
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.self_check.networks import Skipped, choose_layers, num_weights, run_network
from nanovllm_extras.self_check.steps import make_steps
from nanovllm_extras.weights.checkpoint import read_model_config

NUM_TOKEN_IDS = 64
SHARE_OF_MEMORY = 50
MAX_MODEL_LEN = 256  # tokens; the steps have fewer


class RandomLayers:
    """The layers of one rank, on the device, with fast versions in place. `chosen` are their numbers."""

    def __init__(
        self, backend: AttentionBackend, dtype: torch.dtype, device: torch.device, model: dict[str, Any], max_bytes: int
    ) -> None:
        """`model` is what `describe_model` returns."""
        self.backend, self.dtype, self.device = backend, dtype, device
        model_class, shape = read_model_config(Path(model["folder"]), model["hf_overrides"], model["max_model_len"])
        if model["num_ranks"] > 1:
            from nanovllm_extras.weights.cut import share_of

            shape = share_of(shape, model["num_ranks"])
        shape = replace(shape, max_position_embeddings=MAX_MODEL_LEN)
        with torch.device("meta"):
            network = model_class(shape, backend)
            network.model.embed_tokens = network.lm_head = Embedding(NUM_TOKEN_IDS, shape.hidden_size)
        layers, self.chosen = network.model.layers, list[int]()
        for i in (i for group in choose_layers(layers) for i in group):
            max_bytes -= num_weights(layers[i]) * dtype.itemsize
            if max_bytes >= 0:
                self.chosen.append(i)
        for i in range(len(layers)):
            if i not in self.chosen:
                layers[i] = Skipped()
        self.network = allocate(network, dtype, device)
        init_dummy_weights(self.network, 0, shape.initializer_range)
        if model["quantization"] is not None:
            from nanovllm_extras.weights.quantise import quantise

            quantise(self.network, model["quantization"], shape, backend.pack_quantised)
        backend.make_fast(self.network, MAX_MODEL_LEN)

    def run(self, wait: Callable[[], object]) -> None:
        """Run the steps of a comparison. `wait` is called after each, and after the logits."""
        steps = make_steps(self.backend.block_size, MAX_MODEL_LEN, list(range(NUM_TOKEN_IDS)))
        args = (self.backend, self.chosen, steps[1], self.dtype, self.device)
        hidden = run_network(self.network, steps[0], *args, wait=wait)
        with torch.inference_mode():
            self.network.compute_logits(hidden[-1:])
        wait()


def describe_model(runner: Runner) -> dict[str, Any]:
    """Return what another process needs to make a runner's layers, as JSON can hold it.

    Weights that are stored in 4 or 8 bits are represented by ones of 4 bits.
    """
    config, stored = runner.config, runner.shape.quantization_config
    is_stored = config.load_format == "gguf" or (stored is not None and stored.get("quant_method") != "fp8")
    return {
        "folder": str(runner.folder),
        "hf_overrides": config.hf_overrides and dict(config.hf_overrides),
        "max_model_len": config.max_model_len,
        "num_ranks": config.tensor_parallel_size,
        "quantization": "int4" if is_stored else None if stored is not None else config.quantization,
    }
