"""The runner with kernels, other devices' start, quantised weights, and tokens that are computed ahead.

`run` is all that a step does, in order. What varies is an object that the runner holds: the device, the other ranks,
CUDA graphs, a draft model, a K/V store. `assembly.py` makes this runner, or a subclass, if an option or the model needs
more than `PlainRunner` has.
"""

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.config import resolve_device
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import Attention, TorchAttention
from nanovllm.sampler import sample_tokens
from nanovllm_extras.all_options import Config
from nanovllm_extras.device_setup import Device, Unchecked, sample_with
from nanovllm_extras.kernels.cpu.threads import on_one_thread
from nanovllm_extras.layer_inputs import LayerInputs, Network
from nanovllm_extras.plain_runner import PlainRunner
from nanovllm_extras.runner_hooks import (
    ArrivingTokens,
    Computed,
    LapClock,
    SampledTokens,
    fill_in,
    has_placeholders,
    wants_only_tokens,
)
from nanovllm_extras.transfers import Transfers
from nanovllm_extras.weights import load_model

if TYPE_CHECKING:
    from nanovllm_extras.cuda.graphs import CudaGraphs as CudaGraphsOfSteps

logger = logging.getLogger(__name__)
MAX_DRAFTED_ROWS = 64  # of a step with drafts, each of which is a row


class Follower(Protocol):
    """What runs after the model in each step."""

    def follow(self, batch: Batch, computed: Computed) -> None:
        """Compute the tokens of a step. batch: on the host; computed: the same step after the model's forward pass"""


class ModelRunner(PlainRunner):
    """Runs steps. Raises ValueError if the model, the options and this machine do not go together.

    With `has_overlap`, placeholders among the input ids become the tokens of the step before. `max_rows` is the most
    decodes for which CUDA graphs are recorded: by default one for each sequence, and with speculation some drafts.
    """

    layer_inputs = LayerInputs()
    followers: tuple[Follower, ...] = ()
    """What computes the tokens of each step, too, for its own K and V: a draft model, or a head of the model."""
    step_graphs: "CudaGraphsOfSteps | None" = None  # if there are any, they replace `graphs`
    more_inputs: Any = None
    """What rows of decodes have beside one slot and one block table: a `MoreInputs` (`cuda/graphs.py`)."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        has_overlap: bool | None = None,
        clock: LapClock | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.max_rows = max_rows or most_rows(config)
        self.has_overlap = has_overlap_by_default(config) if has_overlap is None else has_overlap
        super().__init__(config, folder, clock)

    def start(self) -> None:
        """Choose a backend, load the weights, put fast layers in place, allocate the KV cache, record CUDA graphs."""
        clock, config = self.clock, self.config
        self.shape = replace(self.shape, max_position_embeddings=self.max_model_len)  # longer ones are never computed
        self.backend: Any = self.make_backend()
        self.device_setup = self.make_device()
        check = self.begin_self_check(self.device_setup)
        clock.lap("backend")
        with self.device_setup.advice():
            self.model = self.make_model()
        clock.lap("weights")
        with check.layers():
            if not config.enforce_eager and hasattr(self.backend, "make_fast"):
                self.backend.make_fast(self.model, self.max_model_len)
        self.description = self.describe()
        logger.info(self.description)
        self.kv_cache = self.make_kv_cache()
        self.transfers = Transfers(self.kv_cache, config.swap_space_bytes, config.max_num_seqs)
        self.graphs = None
        self.newest_ids = torch.empty(0, dtype=torch.int64, device=self.device)  # sampled by the step before
        has_argmax = getattr(type(self.backend), "argmax", TorchAttention.argmax) is not TorchAttention.argmax
        self.draw = self.device_setup.choose_draw(
            partial(sample_with, self.backend.argmax) if has_argmax else sample_tokens
        )
        self.device_setup.prepare(self)
        self.layer_inputs = self.make_layer_inputs()
        self.followers = self.make_followers()
        clock.lap("layers")
        with self.device_setup.advice():
            self.device_setup.allocate(self.kv_cache, self.num_blocks_that_fit())
            self.transfers.allocate()
        clock.lap("memory")
        with self.device_setup.advice(), check.steps():
            self.device_setup.record(self)
        clock.lap("graphs")

    def describe(self) -> str:
        """Return why the way to compute was chosen, and after the last semicolon, what computes."""
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        instructions = getattr(self.backend, "instructions", "PyTorch")
        where = f"{self.device}{threads}, {self.dtype}, blocks of {self.backend.block_size}{self.device_setup.note}"
        names = ", ".join(sorted(pytorch_layers(self.model)))
        return f"{self.reasons}; {instructions} on {where}" + f", in PyTorch: {names}" * bool(names)

    # ---- a step

    @torch.inference_mode()
    def run(self, batch: Batch, is_replayed: bool | None = None) -> ArrivingTokens:
        """Compute a batch, and sample a token for each of its samples.

        is_replayed: whether a CUDA graph computes it. By default it does if it can.
        """
        if is_replayed is None:
            is_replayed = self.can_replay(batch)
        with self.step_context(), self.ranks.step(batch, is_replayed=is_replayed):
            computed = self.advance(batch, is_replayed)
            sampled = self.sample_step(computed)
        return self.end_step(batch, sampled)

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch, is_replayed: bool = False) -> Computed:
        with self.step_context(), self.ranks.step(batch, has_logits=False, is_replayed=is_replayed):
            return self.advance(batch, is_replayed)

    @torch.inference_mode()
    def finish(self, computed: Computed) -> ArrivingTokens:
        with self.step_context():
            return self.end_step(computed.batch, self.sample_step(computed))

    def can_replay(self, batch: Batch) -> bool:
        """Return whether a CUDA graph can compute a batch, which is on the host."""
        if self.step_graphs is not None:
            return self.step_graphs.can_replay(batch, self.newest_ids)
        return self.graphs is not None and self.graphs.can_replay(batch)

    def advance(self, batch: Batch, is_replayed: bool = False) -> Computed:
        """Copy blocks, and run the model."""
        self.unsampled = None
        self.transfers.before(batch.copies)
        if is_replayed and self.step_graphs is not None:
            token_ids, hidden = self.step_graphs.replay(batch, self.newest_ids)
            computed = Computed(hidden, batch, token_ids)
        else:
            sent = self.send_batch(batch)
            hidden = self.graphs.replay(sent) if is_replayed and self.graphs is not None else self.forward(sent)
            computed = Computed(hidden, sent)
        self.ranks.end_forward()
        for follower in self.followers:
            follower.follow(batch, computed)
        self.unsampled = computed
        return computed

    def forward(self, batch: Batch) -> Tensor:
        """Run the model on a batch, which is on the device -> [num_tokens, hidden_size]"""
        inputs = self.layer_inputs.of(batch.metadata, self.kv_cache.tensor)
        return self.model(batch.input_ids, batch.positions, *inputs)

    def sample_step(self, computed: Computed) -> SampledTokens:
        hidden, batch, token_ids = computed
        if token_ids is None:
            return super().sample_step(computed)
        if wants_only_tokens(batch.sampling):
            return SampledTokens(token_ids)
        return SampledTokens(*self.choose_tokens(hidden, self.send(batch.sampling)))

    def end_step(self, batch: Batch, sampled: SampledTokens) -> ArrivingTokens:
        """Let the next step read the tokens, save blocks that are full, and send the tokens to the host."""
        self.unsampled = None
        self.newest_ids = sampled.token_ids
        if self.store is not None:
            self.store.save_step(batch.copies)
        return ArrivingTokens(sampled._replace(readings=(*sampled.readings, *self.ranks.readings)))

    def step_context(self) -> AbstractContextManager[None]:
        return self.device_setup.step()

    def send(self, record: Any) -> Any:
        return self.device_setup.send(record)

    def send_batch(self, batch: Batch) -> Batch:
        """Send a batch. Placeholders among its input ids become the tokens of the step before."""
        sent: Batch = self.send(self.complete(batch))
        if self.has_overlap and has_placeholders(batch):
            sent = replace(sent, input_ids=fill_in(sent.input_ids, self.newest_ids))
        return sent

    def complete(self, batch: Batch) -> Batch:
        """Return a batch with all that the layers read beside blocks, which here is nothing."""
        return batch

    def take_rows(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return hidden[indices] if hidden.is_cuda else on_one_thread(hidden.__getitem__, indices)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        with self.ranks.logits(hidden):
            return super().compute_logits(hidden)

    # ---- the start

    def make_backend(self) -> TorchAttention:
        """Choose the attention backend. `torch` and eager is the core's."""
        config, shape = self.config, self.shape
        is_plain = config.kv_cache_dtype == "auto" and shape.latent_rank is None
        if config.attention_backend == "torch" and config.enforce_eager and is_plain:
            self.reasons = "attention_backend=torch"
            return super().make_backend()
        from nanovllm_extras.kernels.choices import choose

        backend, self.reasons = choose(config, self.device, self.dtype, shape)
        return backend

    def make_device(self) -> Device:
        """Return the device setup. Raises ValueError if `enable_cuda_graphs=True` and the device is not CUDA."""
        if self.device.type != "cuda" and not self.config.enable_cuda_graphs:
            return Device()
        from nanovllm_extras.cuda.startup import CudaDevice

        return CudaDevice(
            self.config, self.device, self.slowest_backend, self.shape, self.max_num_batched_tokens, self.max_rows
        )

    @property
    def slowest_backend(self) -> Any:
        """The attention backend that decides whether CUDA graphs are possible, if layers have several."""
        return self.backend

    @property
    def backend_of_layers(self) -> Any:
        """What the network is made with: the attention backend, or one for each shape of K and V (`kv_groups/`)."""
        return self.backend

    def begin_self_check(self, kind: Device) -> Unchecked:
        """Return the comparison of what computes with PyTorch's layers, which need none."""
        if type(self.backend) is TorchAttention and kind.draw is None:
            return Unchecked()
        from nanovllm_extras.self_check.mode import begin

        return begin(self, kind)

    def make_model(self) -> nn.Module:
        """Load the network, and keep its weights in fewer bits if the option `quantization` asks for that."""
        model = self.load_network()
        if self.config.quantization is not None:
            from nanovllm_extras.quantization.quantise import quantise

            quantise(model, self.config.quantization, self.shape, self.pack_quantised)
        return model

    def pack_quantised(self, layer: nn.Module) -> nn.Module:
        """Return the backend's version of a quantised layer. Called for each one before the next is loaded."""
        pack = getattr(self.backend, "pack_quantised", None)
        return layer if pack is None or self.config.enforce_eager else pack(layer)

    def load_network(self) -> nn.Module:
        """Return the network on the device, with its weights."""
        config, load = self.config, load_model
        if self.shape.quantization_config is not None or config.load_format == "gguf":
            from nanovllm_extras.quantization.choose_loader import choose_loader

            load = choose_loader(self.shape, config, self.pack_quantised)
        seed = config.seed if config.load_format == "dummy" else None
        backend = self.backend_of_layers
        return load(self.model_class, self.shape, backend, self.dtype, self.device, self.folder, seed)

    @property
    def num_cached_layers(self) -> int:
        """The layers for which a block of the KV cache has room."""
        return self.shape.num_hidden_layers  # type: ignore[no-any-return]

    def make_kv_cache(self) -> KVCache:
        dtype = getattr(self.backend, "kv_cache_dtype", None) or self.dtype
        return KVCache(self.backend, self.num_cached_layers, dtype, self.device)

    def make_layer_inputs(self) -> LayerInputs:
        """Return what gives the layers what they read. From now on, no layer is replaced by a faster version."""
        return LayerInputs()

    def make_followers(self) -> tuple[Follower, ...]:
        return ()

    @property
    def network(self) -> Any:
        """The model, for CUDA graphs."""
        return Network(self.model, self.layer_inputs)

    def make_graphs(self) -> CudaGraphs:
        """Return the core's graphs of the forward pass of decodes; `choose_graphs` has decided that there are some."""
        return CudaGraphs(self.network, self.kv_cache.tensor, *self.largest_decode)

    @property
    def num_swap_blocks(self) -> int:  # type: ignore[override]  # a constant of the parent
        """The blocks in host memory, for preempted sequences."""
        return self.transfers.num_swap_blocks

    @property
    def largest_decode(self) -> tuple[int, int]:
        """The most sequences that a step of decodes has, and the most blocks of one of them."""
        max_rows = min(self.max_rows, self.max_num_batched_tokens)
        return max_rows, -(-self.max_model_len // self.backend.block_size)

    @property
    def memory_knob(self) -> str:  # type: ignore[override]  # a constant of the parent
        return self.device_setup.memory_knob

    def free_bytes(self) -> int:
        return self.device_setup.free_bytes(self)

    def bytes_to_leave(self, num_graph_bytes: int) -> int:
        """Return the device memory for what is loaded after the KV cache. num_graph_bytes: of this runner's graphs"""
        return 0


def has_overlap_by_default(config: Config) -> bool:
    """Return whether steps overlap: as configured, otherwise on CUDA without speculation."""
    if config.enable_overlap is not None:
        return config.enable_overlap
    return config.speculative_config is None and resolve_device(config.device).type == "cuda"


def most_rows(config: Config) -> int:
    """Return the most decodes of a step, for which CUDA graphs are recorded. Drafts are decodes."""
    return max(config.max_num_seqs, 0 if config.speculative_config is None else MAX_DRAFTED_ROWS)


def pytorch_layers(module: nn.Module) -> set[str]:
    """Return the classes of single layers that compute in PyTorch, because no fast version replaced them."""
    path = type(module).__module__
    if path.startswith("nanovllm_extras.kernels."):
        return set()  # what a fast version keeps of the layer that it has replaced
    folders = ("nanovllm.layers.", "nanovllm.models.", "nanovllm_extras.models.", "nanovllm_extras.quantization.")
    is_single = path.startswith(folders) and not list(module.children()) and not isinstance(module, Attention)
    own = {type(module).__name__} if is_single else set()
    return own.union(*(pytorch_layers(child) for child in module.children()))
