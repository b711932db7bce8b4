"""The core's runner with what requests may ask for: log-probabilities, other logits, readers of their prompts.

`run` returns a handle, because on CUDA the tokens have not arrived on the host when it returns. `full_runner.py` has
the runner with kernels, quantised weights and other devices.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanovllm import model_runner
from nanovllm.batch import Batch, SamplingBatch
from nanovllm.config import resolve_device
from nanovllm.sampler import sample_tokens
from nanovllm_extras.all_options import Config
from nanovllm_extras.alone import Alone
from nanovllm_extras.checkpoint import read_model_config
from nanovllm_extras.runner_hooks import (
    ArrivingTokens,
    Computed,
    Draw,
    LapClock,
    SampledTokens,
    sample,
    untouched_zeros,
)
from nanovllm_extras.weights import load_model

if TYPE_CHECKING:
    from nanovllm_extras.logprobs import Logprobs

logger = logging.getLogger(__name__)
BEYOND_THE_CORE = (
    *("kv_cache_dtype", "load_format", "quantization", "enable_cuda_graphs", "enable_overlap", "speculative_config"),
    *("scheduling_policy", "long_prefill_token_threshold", "preemption_mode", "kv_offloading_size"),
    *("kv_transfer_config", "tensor_parallel_size", "nnodes", "node_rank"),
)
"""Options that need more than the core's parts, unless they have their default values."""


class PlainRunner(model_runner.ModelRunner):
    """Computes on a CPU with the core's layers. Raises ValueError if the model and the options do not go together."""

    config: Config
    shape: Any  # a `NetworkConfig`
    has_overlap = False
    num_swap_blocks = 0
    ranks = Alone()
    """The ranks that share each step: here there are no others. `parallel/driver.py` has those of `start_ranks`."""
    store: Any = None
    """What saves blocks that a step has filled: a `Share` (`kv_store/share.py`)."""
    memory_knob = "kv_cache_memory_bytes"

    def __init__(self, config: Config, folder: Path, clock: LapClock | None = None) -> None:
        self.clock = clock or LapClock()
        self.stop: Callable[[], object] = lambda: None  # stops the other ranks
        self.draw: Draw = sample_tokens
        self.unsampled: Computed | None = None  # the newest step, once the model has run
        super().__init__(config, folder)

    def start(self) -> None:
        """Load the weights and allocate the KV cache."""
        self.shape = replace(self.shape, max_position_embeddings=self.max_model_len)  # longer ones are never computed
        self.backend = self.make_backend()
        self.clock.lap("backend")
        self.model = self.make_model()
        self.clock.lap("weights")
        self.description = (
            f"attention_backend=torch; PyTorch on {self.device}, {torch.get_num_threads()} threads, {self.dtype}, "
            f"blocks of {self.backend.block_size}"
        )
        logger.info(self.description)
        self.kv_cache = self.make_kv_cache()
        self.graphs = None
        self.kv_cache.tensor = untouched_zeros(self.kv_cache.tensor, self.num_blocks_that_fit() + 1)
        self.clock.lap("memory")

    # ---- a step

    @torch.inference_mode()
    def run(self, batch: Batch) -> Any:
        """Compute a batch and sample a token for each of its samples. Returns `ArrivingTokens`."""
        return self.end_step(batch, self.sample_step(self.advance(batch)))

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch) -> Computed:
        """Do all of a step that changes the KV cache, and sample nothing."""
        return self.advance(batch)

    @torch.inference_mode()
    def finish(self, computed: Computed) -> Any:
        """Sample the tokens of a step that is computed. Returns `ArrivingTokens`.

        If a request makes `run` fail, `unsampled` is such a step. With another batch, it can be sampled without what
        this request asks for.
        """
        return self.end_step(computed.batch, self.sample_step(computed))

    def advance(self, batch: Batch) -> Computed:
        """Copy blocks, and run the model."""
        self.unsampled = None
        self.kv_cache.copy_blocks(batch.copies)
        self.unsampled = Computed(self.forward(batch), batch)
        return self.unsampled

    def sample_step(self, computed: Computed) -> SampledTokens:
        """Sample a token for each of the step's samples, and let its readers read."""
        hidden, batch, _ = computed
        token_ids, logprobs = self.choose_tokens(self.take_rows(hidden, batch.logits_indices), batch.sampling)
        readers = getattr(batch, "readers", ())
        readings = tuple(one.compute(hidden, self.compute_logits) for one in readers)
        return SampledTokens(token_ids, logprobs, readings)

    def end_step(self, batch: Batch, sampled: SampledTokens) -> ArrivingTokens:
        """Send the tokens of a step to the host."""
        self.unsampled = None
        return ArrivingTokens(sampled)

    def step_context(self) -> AbstractContextManager[None]:
        """Return a context for what computes."""
        return nullcontext()

    def send(self, batch: Any) -> Any:
        return batch

    def take_rows(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return hidden[indices]  # [num_samples, hidden_size]

    def choose_tokens(self, hidden: Tensor, sampling: SamplingBatch) -> "tuple[Tensor, Logprobs | None]":
        """Sample tokens. hidden: [num_samples, hidden_size] -> token ids [num_samples] int64, and log-probabilities."""
        return sample(self.compute_logits(hidden), sampling, self.draw)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] -> [num_rows, vocab_size]"""
        return self.model.compute_logits(hidden)  # type: ignore[operator, no-any-return]

    # ---- the start

    def find_network(self) -> tuple[Any, Any]:
        model_class, shape = read_model_config(self.folder, self.config.hf_overrides, self.config.max_model_len)
        if self.config.load_format in ("gguf", "dummy"):
            return model_class, shape
        from nanovllm_extras.headless import with_stored_head

        return model_class, with_stored_head(shape, self.folder)

    def make_model(self) -> nn.Module:
        return load_model(self.model_class, self.shape, self.backend, self.dtype, self.device, self.folder)

    def num_blocks_that_fit(self) -> int:
        return self.count_blocks()

    def count_blocks(self) -> int:
        """Return the number of blocks as configured, or as many as memory allows and running sequences can fill."""
        config = self.config
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        num_bytes, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if num_bytes is None:
            num_bytes, knob = self.free_bytes(), self.memory_knob
        num_blocks = num_bytes // self.bytes_per_block - 1  # one is the null block
        if num_blocks < 1:
            raise ValueError(
                f"{max(num_bytes, 0)} bytes are left for the KV cache, but its least size, two blocks, takes "
                f"{2 * self.bytes_per_block}: raise {knob}, or lower block_size or max_num_batched_tokens"
            )
        if config.kv_cache_memory_bytes is not None:  # the prefix cache may keep more than what runs
            return num_blocks
        return min(num_blocks, config.max_num_seqs * -(-self.max_model_len // self.backend.block_size))

    @property
    def bytes_per_block(self) -> int:
        """The size of one block, in all models that have a KV cache."""
        return self.kv_cache.bytes_per_block

    def free_bytes(self) -> int:
        """Return the memory for the KV cache, if the options do not set it: 1 GiB, or half of the free memory.

        The smaller of the two is taken. The other half is for activations and for other programs.
        """
        from nanovllm_extras.machine_limits import free_bytes

        num_ranks = max(1, self.config.tensor_parallel_size // self.config.nnodes)  # on this machine
        free = free_bytes()
        most = model_runner.CPU_KV_CACHE_BYTES
        return most if free is None else min(most, free // 2 // num_ranks)


def is_plain(config: Config, folder: Path) -> bool:
    """Return whether runner, scheduler and block manager can be the core's, apart from what requests ask for."""
    if config.attention_backend != "torch" or not config.enforce_eager:
        return False
    if any(getattr(config, name) != getattr(Config, name) for name in BEYOND_THE_CORE):
        return False
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    is_plain_model = shape.quantization_config is None and shape.latent_rank is None and shape.widest_window is None
    is_plain_model = is_plain_model and shape.state_shape is None and not shape.kv_groups
    is_plain_model = is_plain_model and len(set(shape.attention_options)) < 2  # layers with and without a window
    return is_plain_model and resolve_device(config.device).type == "cpu"
