"""The runner: what requests may ask for, kernels, other devices, quantised weights, tokens that are computed ahead.

`run` is all that a step does, in order. What varies is an object that the runner holds: the device, the other ranks,
CUDA graphs, what the layers keep, a draft model, a K/V store. The defaults of these objects do nothing. `assembly.py`
passes others if an option or the model needs more than the core's parts (`is_plain` in `plain_parts.py`).
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanovllm import model_runner
from nanovllm.batch import Batch, SamplingBatch
from nanovllm.config import resolve_device
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers.attention import Attention, AttentionMetadata, LoadedModel, TorchAttention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampler import sample_tokens
from nanovllm.scheduler import Step
from nanovllm_extras.execution.alone import Alone, Whole
from nanovllm_extras.execution.chooser import Chooser
from nanovllm_extras.execution.device_setup import Device, Unchecked, sample_with
from nanovllm_extras.execution.forward_graphs import ForwardGraphs
from nanovllm_extras.execution.graph_inputs import MoreInputs
from nanovllm_extras.execution.layout import Layout, Network
from nanovllm_extras.execution.runner_protocol import Record
from nanovllm_extras.machine.one_thread import on_one_thread
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.speculation_options import MAX_DRAFTED_ROWS
from nanovllm_extras.records.adapter_metadata import adapters_of
from nanovllm_extras.sampling.logprobs import Logprobs
from nanovllm_extras.sampling.runner_hooks import (
    ArrivingTokens,
    Computed,
    Draw,
    LapClock,
    SampledTokens,
    fill_in,
    has_placeholders,
    sample,
    wants_only_tokens,
)
from nanovllm_extras.weights.checkpoint import read_model_config
from nanovllm_extras.weights.headless import with_stored_head
from nanovllm_extras.weights.load_model import Wanted, load_model

if TYPE_CHECKING:
    from nanovllm_extras.kv_store.share import Share
    from nanovllm_extras.lora.adapters import Adapters

logger = logging.getLogger(__name__)


class Follower(Protocol):
    """What runs after the model in each step."""

    def follow(self, batch: Batch, computed: Computed, newest_ids: Tensor) -> None:
        """Compute the tokens of a step.

        batch: on the host; computed: the same step after the model's forward pass; newest_ids: [num_samples], sampled
        by the step before, which placeholders of `batch` stand for
        """


class StepGraphs(Protocol):
    """CUDA graphs of whole steps (`step_graphs.py`)."""

    def can_replay(self, batch: Batch, newest_ids: Tensor) -> bool: ...

    def replay(self, batch: Batch, newest_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token ids of the samples, and the hidden states of the step."""


class DraftNeeds(NamedTuple):
    """The memory that a draft model will need."""

    weight_bytes: int = 0
    bytes_per_block: int = 0


MeasureDraft = Callable[["ModelRunner"], DraftNeeds]
BeginCheck = Callable[["ModelRunner", Device], Unchecked]


class ModelRunner(model_runner.ModelRunner):
    """Runs steps. Raises ValueError if the model, the options and this machine do not go together.

    With `has_overlap`, placeholders among the input ids become the tokens of the step before. `max_rows` is the most
    decodes for which CUDA graphs are recorded: by default one for each sequence, and with speculation some drafts.

    chooser: chooses what computes; part: the part of the network that this rank has; measure_draft: returns what a
    draft model will need, which is loaded later; begin_check: begins the self-check, if there is one
    """

    config: Config
    shape: NetworkConfig
    has_overlap = False
    ranks = Alone()
    """The ranks that share each step: by default there are no others. `start_ranks` sets a `Driver`."""
    store: "Share | None" = None
    """What saves blocks that a step has filled."""
    step_graphs: StepGraphs | None = None  # if there are any, they replace `graphs`
    adapters: "Adapters | None" = None
    """The LoRA adapters that rows may have (`lora/`)."""
    followers: tuple[Follower, ...] = ()
    """What computes the tokens of each step, too, for its own K and V: a draft model, or a head of the model."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        has_overlap: bool | None = None,
        clock: LapClock | None = None,
        max_rows: int | None = None,
        *,
        chooser: Chooser | None = None,
        part: Whole | None = None,
        measure_draft: MeasureDraft | None = None,
        begin_check: BeginCheck | None = None,
    ) -> None:
        self.clock = clock or LapClock()
        self.max_rows = max_rows or most_rows(config)
        self.has_overlap = has_overlap_by_default(config) if has_overlap is None else has_overlap
        self.chooser, self.part = chooser or Chooser(), part or Whole()
        self.measure_draft, self.draft_needs = measure_draft, DraftNeeds()
        self.begin_check = begin_check
        self.draw: Draw = sample_tokens
        self.unsampled: Computed | None = None  # the newest step, once the model has run
        super().__init__(config, folder)

    def start(self) -> None:
        """Choose a backend, load the weights, put fast layers in place, allocate the KV cache, record CUDA graphs."""
        clock, config = self.clock, self.config
        # longer sequences are never computed
        self.whole_shape = replace(self.shape, max_position_embeddings=self.max_model_len)
        self.shape = self.part.share_of(self.whole_shape)
        self.layout = Layout(config, self.shape, self.dtype, self.device)
        self.backends, self.reasons = self.chooser.make_backends(config, self.shape, self.device, self.dtype)
        self.backend = self.backends[0]
        self.device_setup = self.part.wrap(self.make_device(), self.whole_shape.vocab_size)
        check = self.begin_self_check(self.device_setup)
        clock.lap("backend")
        with self.device_setup.advice():
            self.model = self.make_model()
        if config.enable_lora:
            from nanovllm_extras.lora.make_adapters import make_adapters

            self.adapters = make_adapters(self)
            self.layout.adapter_rows = self.adapters.rows
        clock.lap("weights")
        with check.layers():
            if config.has_own_backend:
                sizes = self.dtype, self.device, self.max_model_len, config.enforce_eager
                self.backend.replace_layers(LoadedModel(self.model, self.shape, *sizes))
            elif not config.enforce_eager and hasattr(self.backend, "make_fast"):
                self.backend.make_fast(self.model, self.max_model_len)
        self.description = self.describe()
        logger.info(self.description)
        self.kv_caches = self.layout.make_kv_caches(self.backends)
        self.kv_cache = self.kv_caches[0]  # blocks are the same in all of them
        if self.measure_draft is not None:
            self.draft_needs = self.measure_draft(self)
        of_draft = self.draft_needs.bytes_per_block
        self.transfers = self.layout.make_transfers(self.kv_caches, of_draft)
        self.graphs = None
        self.newest_ids = torch.empty(0, dtype=torch.int64, device=self.device)  # sampled by the step before
        has_argmax = type(self.backend).argmax is not TorchAttention.argmax
        self.draw = self.device_setup.choose_draw(
            partial(sample_with, self.backend.argmax) if has_argmax else sample_tokens
        )
        if config.sampler_cls is not None:
            self.draw = config.sampler_cls
        self.device_setup.prepare(self)
        if self.adapters is not None:
            self.adapters.wrap_vocabulary(self.model, self.device, self.part.rank)
        # from now on, no layer is replaced by a faster version
        self.followers = self.layout.make_followers(self.model, self.kv_caches)
        clock.lap("layers")
        with self.device_setup.advice():
            self.device_setup.allocate(self.kv_caches, self.num_blocks_that_fit())
            if self.layout.pool is not None:
                self.layout.pool.allocate()
            self.transfers.allocate()
        clock.lap("memory")
        with self.device_setup.advice(), check.steps():
            self.device_setup.record(self)
        clock.lap("graphs")
        if self.layout.pool is not None:
            self.description = f"{self.layout.pool.describe()}; {self.description}"
        self.shape = self.whole_shape  # requests are checked against it

    def describe(self) -> str:
        """Return why the way to compute was chosen, and after the last semicolon, what computes."""
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        instructions = getattr(self.backend, "instructions", "PyTorch")
        where = f"{self.device}{threads}, {self.dtype}, blocks of {self.backend.block_size}{self.device_setup.note}"
        names = ", ".join(sorted(pytorch_layers(self.model)))
        layers = f", in PyTorch: {names}" * bool(names)
        return f"{self.layout.describe(self.whole_shape)}{self.reasons}; {instructions} on {where}{layers}"

    # ---- a step

    def make_metadata(self, step: Step, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata of a step, with the LoRA adapter of each row if one has any."""
        return metadata if self.adapters is None else self.adapters.add_to(self.ranks, step, metadata)

    @torch.inference_mode()
    def run(self, batch: Batch, is_replayed: bool | None = None) -> ArrivingTokens:
        """Compute a batch, and sample a token for each of its samples.

        On CUDA, the tokens have not arrived on the host when this method returns.

        is_replayed: whether a CUDA graph computes it. By default it does if it can.
        """
        if is_replayed is None:
            is_replayed = self.can_replay(batch)
        with self.step_context():
            with self.ranks.step(batch, is_replayed=is_replayed):
                computed = self.advance(batch, is_replayed)
                sampled = self.sample_step(computed)
            return self.end_step(batch, sampled)

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch, is_replayed: bool = False) -> Computed:
        """Do all of a step that changes the KV cache, and sample nothing."""
        with self.step_context(), self.ranks.step(batch, has_logits=False, is_replayed=is_replayed):
            return self.advance(batch, is_replayed)

    @torch.inference_mode()
    def finish(self, computed: Computed) -> ArrivingTokens:
        """Sample the tokens of a step that is computed.

        If a request makes `run` fail, `unsampled` is such a step. With another batch, it can be sampled without what
        this request asks for.
        """
        with self.step_context():
            return self.end_step(computed.batch, self.sample_step(computed))

    def can_replay(self, batch: Batch) -> bool:
        """Return whether a CUDA graph can compute a batch, which is on the host."""
        if self.adapters is not None and self.adapters.changes_vocabulary(batch.metadata):
            return False
        if self.step_graphs is not None:
            return self.step_graphs.can_replay(batch, self.newest_ids)
        return self.graphs is not None and self.graphs.can_replay(batch)

    def advance(self, batch: Batch, is_replayed: bool = False) -> Computed:
        """Copy blocks, and run the model."""
        self.unsampled = None
        self.transfers.before(batch.copies)
        newest_ids = self.newest_ids
        if is_replayed and self.step_graphs is not None:
            if self.followers and has_placeholders(batch):
                newest_ids = newest_ids.clone()  # the graph may write its tokens to the same memory
            token_ids, hidden = self.step_graphs.replay(batch, self.newest_ids)
            computed = Computed(hidden, batch, token_ids)
        else:
            sent = self.send_batch(batch)
            hidden = self.graphs.replay(sent) if is_replayed and self.graphs is not None else self.forward(sent)
            computed = Computed(hidden, sent)
        for follower in self.followers:
            follower.follow(batch, computed, newest_ids)
        self.ranks.end_forward()
        self.unsampled = computed
        return computed

    def forward(self, batch: Batch) -> Tensor:
        """Run the model on a batch, which is on the device -> [num_tokens, hidden_size]"""
        inputs = self.layout.inputs_of(batch.metadata, self.kv_cache.tensor)
        return self.model(batch.input_ids, batch.positions, *inputs)

    def sample_step(self, computed: Computed) -> SampledTokens:
        """Sample a token for each of the step's samples, and let its readers read."""
        hidden, batch, token_ids = computed
        if token_ids is None:
            slots, indices = adapters_of(batch.metadata), batch.logits_indices
            of_samples = None if slots is None else slots[indices]
            token_ids, logprobs = self.choose_tokens(self.take_rows(hidden, indices), batch.sampling, of_samples)
            readers = getattr(batch, "readers", ())
            logits_of = partial(self.logits_of, slots=slots)
            return SampledTokens(token_ids, logprobs, tuple(one.compute(hidden, logits_of) for one in readers))
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
        """Return a context for what computes."""
        return self.device_setup.step()

    def send(self, record: Record) -> Record:
        return self.device_setup.send(record)

    def send_batch(self, batch: Batch) -> Batch:
        """Send a batch. Placeholders among its input ids become the tokens of the step before."""
        sent: Batch = self.send(self.layout.complete(batch))
        if self.has_overlap and has_placeholders(batch):
            sent = replace(sent, input_ids=fill_in(sent.input_ids, self.newest_ids))
        return sent

    def take_rows(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Return the rows of samples: [num_samples, hidden_size]"""
        return hidden[indices] if hidden.is_cuda else on_one_thread(hidden.__getitem__, indices)

    def choose_tokens(
        self, hidden: Tensor, sampling: SamplingBatch, slots: Tensor | None = None
    ) -> tuple[Tensor, Logprobs | None]:
        """Sample tokens. hidden: [num_samples, hidden_size] -> token ids [num_samples] int64, and log-probabilities.

        slots: as those of `compute_logits`
        """
        return sample(self.compute_logits(hidden, slots), sampling, self.draw)

    def logits_of(self, hidden: Tensor, rows: Tensor, slots: Tensor | None) -> Tensor:
        """Compute the logits of some rows of hidden: [num_tokens, hidden_size] -> [len(rows), vocab_size]

        slots: [num_tokens] int32, the slots of the adapters of all rows, or None
        """
        return self.compute_logits(hidden[rows], None if slots is None else slots[rows])

    def compute_logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """hidden: [num_rows, hidden_size] -> [num_rows, vocab_size]

        slots: [num_rows] int32, the slots of the rows' LoRA adapters; None if no row has one
        """
        if self.adapters is not None:
            self.adapters.logits_rows.slots = slots
        with self.ranks.logits(hidden):
            return self.model.compute_logits(hidden)

    # ---- the start

    def find_network(self) -> tuple[type[Qwen3ForCausalLM], NetworkConfig]:
        config = self.config
        model_class, shape = read_model_config(self.folder, config.hf_overrides, config.max_model_len, config.models)
        if self.config.load_format not in ("gguf", "dummy"):
            shape = with_stored_head(shape, self.folder)
        return model_class, replace(shape, has_mtp=True) if self.config.has_mtp_head else shape

    def make_device(self) -> Device:
        """Return the device setup. Raises ValueError if `enable_cuda_graphs=True` and the device is not CUDA."""
        return self.chooser.make_device(self)

    @property
    def slowest_backend(self) -> TorchAttention:
        """The first backend that CUDA graphs cannot record, such as PyTorch's for heads that no kernel takes."""
        return next((one for one in self.backends if not one.supports_graphs), self.backend)

    def begin_self_check(self, kind: Device) -> Unchecked:
        """Return the comparison of what computes with PyTorch's layers, which need none."""
        is_plain = type(self.backend) is TorchAttention and kind.draw is None
        if self.begin_check is None or self.shape.kv_groups or is_plain:
            return Unchecked()
        return self.begin_check(self, kind)

    def make_model(self) -> Qwen3ForCausalLM:
        """Load the network, and keep its weights in fewer bits if the option `quantization` asks for that."""
        model = self.part.load_network(self)
        if self.config.quantization is not None:
            from nanovllm_extras.weights.quantise import quantise

            quantise(model, self.config.quantization, self.shape, self.pack_quantised)
        return model

    def pack_quantised(self, layer: nn.Module) -> nn.Module:
        """Return the backend's version of a quantised layer. Called for each one before the next is loaded."""
        pack = getattr(self.backend, "pack_quantised", None)
        return layer if pack is None or self.config.enforce_eager else pack(layer)

    @property
    def backend_of_layers(self) -> Any:
        """What the network is made with: the attention backend, or one for each shape of K and V."""
        return self.backends if self.shape.kv_groups else self.backend

    def load_network(self) -> Qwen3ForCausalLM:
        """Return the whole network on the device, with its weights."""
        config = self.config
        wanted = self.wanted(config.seed if config.load_format == "dummy" else None)
        if self.shape.quantization_config is not None or config.load_format == "gguf":
            from nanovllm_extras.weights.choose_loader import choose_loader

            return choose_loader(self.shape, config, self.pack_quantised)(wanted)
        return load_model(wanted)

    def wanted(self, seed: int | None = None) -> Wanted:
        """Return what a loader needs to know of the network. seed: of random weights, if it gets those"""
        where = self.dtype, self.device, self.folder
        return Wanted(self.model_class, self.shape, self.backend_of_layers, *where, seed)

    @property
    def network(self) -> Network:
        """The model, for CUDA graphs."""
        return Network(self.model, self.layout)

    @property
    def why_no_steps(self) -> str | None:
        """Why CUDA graphs have only the model's forward pass, and not whole steps, if that is so."""
        if self.metadata_cls is not AttentionMetadata:
            return "with more numbers for each token"
        return "with a sampler of your own" if self.config.sampler_cls is not None else self.layout.why_no_steps

    @property
    def more_inputs(self) -> MoreInputs | None:
        """What rows of decodes have in CUDA graphs beside one slot and one block table, or None."""
        return self.layout.more_inputs(self.model)

    def make_graphs(self) -> CudaGraphs:
        """Return the core's graphs of the forward pass of decodes; `choose_graphs` has decided that there are some."""
        network: Any = self.network
        arguments, more = (network, self.kv_cache.tensor, *self.largest_decode), self.more_inputs
        if more is None:
            return CudaGraphs(*arguments, self.metadata_cls)
        return ForwardGraphs(*arguments, more=more)

    @property
    def num_swap_blocks(self) -> int:
        """The blocks in host memory, for preempted sequences."""
        return self.transfers.num_swap_blocks

    @property
    def largest_decode(self) -> tuple[int, int]:
        """The most sequences that a step of decodes has, and the most blocks of one of them."""
        max_rows = min(self.max_rows, self.max_num_batched_tokens)
        return max_rows, -(-self.max_model_len // self.backend.block_size)

    def num_blocks_that_fit(self) -> int:
        """Return the number of blocks in the pool."""
        return self.device_setup.num_common_blocks(self.layout.divide_memory(self), self.device)

    def count_blocks(self) -> int:
        """Return the number of blocks as configured, or as many as memory allows and running sequences can fill."""
        config = self.config
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        num_bytes, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if num_bytes is None:
            num_bytes, knob = self.free_bytes(), self.device_setup.memory_knob
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
        """The size of one block, in each group of layers, and in the draft model."""
        of_model = sum([cache.bytes_per_block for cache in self.kv_caches])
        return of_model * self.layout.layers.num_tables + self.draft_needs.bytes_per_block

    @property
    def memory_knob(self) -> str:
        """The option to raise if there is not enough memory."""
        return self.device_setup.memory_knob

    def free_bytes(self) -> int:
        """Return the memory for the KV cache, if the options do not set it."""
        return self.device_setup.free_bytes(self)

    def bytes_to_leave(self, num_graph_bytes: int) -> int:
        """Return the memory for the draft model's weights, and for its graphs, which need less than this model's.

        Its forward pass needs no more: it runs after that of this model, which takes more memory. num_graph_bytes: of
        this runner's graphs
        """
        return self.draft_needs.weight_bytes + num_graph_bytes if self.measure_draft is not None else 0


def has_overlap_by_default(config: Config) -> bool:
    """Return whether steps overlap: as configured, otherwise on CUDA without speculation."""
    if config.enable_overlap is not None:
        return config.enable_overlap
    if config.has_own_scheduling:  # which extends the core's scheduler
        return False
    return config.speculative_config is None and resolve_device(config.device).type == "cuda"


def most_rows(config: Config) -> int:
    """Return the most decodes of a step, for which CUDA graphs are recorded. Drafts are decodes."""
    if config.speculative_config is None:
        return config.max_num_seqs
    return max(config.max_num_seqs, MAX_DRAFTED_ROWS)


def pytorch_layers(module: nn.Module) -> set[str]:
    """Return the classes of single layers that compute in PyTorch, because no fast version replaced them."""
    path = type(module).__module__
    if path.startswith("nanovllm_extras.kernels."):
        return set()  # what a fast version keeps of the layer that it has replaced
    folders = ("nanovllm.layers.", "nanovllm.models.", "nanovllm_extras.models.", "nanovllm_extras.weights.")
    is_single = path.startswith(folders) and not list(module.children()) and not isinstance(module, Attention)
    own = {type(module).__name__} if is_single else set()
    return own.union(*(pytorch_layers(child) for child in module.children()))
