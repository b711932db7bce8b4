"""The model and its KV cache on one device: Batch → token ids. The engine makes one runner and calls `run` each step.

start    choose an attention backend → load the weights → allocate the KV cache → record CUDA graphs
step     copy blocks → send the batch to the device → forward pass → logits of the last tokens → sample
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch, largest_batch, to_device
from nanovllm.config import Config, resolve_device, resolve_dtype
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata, BackendError, LoadedModel, TorchAttention
from nanovllm.loader import allocate, init_dummy_weights, load_weights, read_json
from nanovllm.models.qwen3 import ModelConfig, Qwen3ForCausalLM
from nanovllm.plugins import choose_backends, find_architecture
from nanovllm.sampler import sample_tokens
from nanovllm.scheduler import Step

logger = logging.getLogger(__name__)
CPU_KV_CACHE_BYTES = 1 << 30


class ModelRunner:
    """The model, its KV cache and its CUDA graphs. ValueError if this machine cannot run them with these options."""

    metadata_cls: type[AttentionMetadata] = AttentionMetadata
    """What `make_metadata` returns. A subclass may have more fields, each with a number for each token."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.sample_tokens = config.sampler_cls or sample_tokens
        self.model_class, self.shape = self.find_network()
        longest = self.shape.max_position_embeddings
        self.max_model_len = config.max_model_len or longest
        if self.max_model_len > longest:
            raise ValueError(f"max_model_len must be at most {longest}, the model's max_position_embeddings, "
                             f"got {self.max_model_len}")  # fmt: skip
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.shape.dtype, self.device)
        self.max_num_batched_tokens = config.max_num_batched_tokens or (8192 if self.device.type == "cuda" else 2048)
        self.start()

    def start(self) -> None:
        """Make the model, the KV cache and the graphs."""
        with torch.cuda.device_of(torch.empty(0, device=self.device)):
            self.load()
        self.description = self.describe()
        logger.info(self.description)
        self.kv_cache = KVCache(self.backend, self.shape.num_hidden_layers, self.dtype, self.device)
        self.graphs: CudaGraphs | None = None
        with torch.cuda.device_of(self.kv_cache.tensor):
            self.kv_cache.allocate(self.config.num_kv_blocks or self.num_blocks_that_fit())
            self.graphs = self.make_graphs()
            if self.graphs is not None:
                self.graphs.record_all()

    def load(self) -> None:
        """Make the model with the best backend whose layers compute correctly on this machine."""
        config, shape = self.config, self.shape
        kinds, self.rejected = choose_backends(
            config.attention_backend, self.device, self.dtype, shape, config.block_size
        )
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        for kind in kinds:
            self.backend: TorchAttention = kind(*heads, config.block_size, self.dtype)
            try:
                self.model = self.make_model()
                return
            except BackendError as error:
                if kind is kinds[-1]:
                    raise
                name = kind.__name__
                logger.warning("%s is not used: %s. The next backend may be much slower", name, error)
                self.rejected.append(f"not {name}: {error}")

    # ---- a step

    def make_metadata(self, step: Step, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata of a step, which a subclass may extend (`metadata_cls`) by numbers for each token.

        They are int32 tensors on the host: [num_tokens]. CUDA graphs copy them, too, and pad them with 0, so 0 should
        mean none.
        """
        return metadata

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Compute a batch and sample a token for each of its samples: [num_samples] int64 on the device"""
        with torch.cuda.device_of(self.kv_cache.tensor):
            self.kv_cache.copy_blocks(batch.copies)
            batch = self.send(batch)
            with self.backend.step_context():
                hidden = self.forward(batch)  # [num_tokens, hidden_size]
                return self.sample(hidden[batch.logits_indices], batch)

    def send(self, batch: Batch) -> Batch:
        """Copy the batch's tensors to the device."""
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    def forward(self, batch: Batch) -> Tensor:
        """Run the model, or replay a CUDA graph of it -> [num_tokens, hidden_size]"""
        if self.graphs is not None and self.graphs.can_replay(batch):
            return self.graphs.replay(batch)
        return self.model(batch.input_ids, batch.positions, batch.metadata, self.kv_cache.tensor)

    def sample(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [num_samples, hidden_size] -> token ids [num_samples] int64"""
        logits = self.model.compute_logits(hidden)  # [num_samples, vocab_size]
        return self.sample_tokens(
            logits, **vars(batch.sampling), argmax=self.backend.argmax
        )  # the fields are arguments

    # ---- the start

    def find_network(self) -> tuple[Any, ModelConfig]:
        """Return the class of the network that config.json describes, and its shape."""
        raw = read_json(self.folder / "config.json")
        model_class = find_architecture(raw, self.config.models)
        return model_class, model_class.read_config(raw)

    def make_model(self) -> Qwen3ForCausalLM:
        """Make the network on the device, load its weights, and let the backend replace layers by faster ones."""
        with torch.device("meta"):
            model = self.model_class(self.shape, self.backend)
        model = allocate(model, self.dtype, self.device)
        if self.config.load_format == "dummy":
            init_dummy_weights(model, self.config.seed, std=0.02)
        else:  # a network of another package may have checkpoints that are read otherwise
            getattr(self.model_class, "load_weights", load_weights)(model, self.folder)
        is_eager = self.config.enforce_eager
        loaded = LoadedModel(model, self.shape, self.dtype, self.device, self.max_model_len, is_eager)
        self.backend.replace_layers(loaded)
        return model

    def describe(self) -> str:
        """Return which classes compute, and why not others."""
        kind = type(self.backend)
        instructions = getattr(self.backend, "instructions", "PyTorch")
        where = f"{self.device}, {self.dtype}, blocks of {self.backend.block_size}"
        return "; ".join([*self.rejected, f"{kind.__module__}.{kind.__name__} ({instructions}) on {where}"])

    def make_graphs(self) -> CudaGraphs | None:
        """Return graphs for decodes, on CUDA, if backend and network can be recorded."""
        is_recordable = self.device.type == "cuda" and self.backend.supports_graphs and self.shape.supports_graphs
        if self.config.enforce_eager or not is_recordable:
            return None
        max_num_seqs = min(self.config.max_num_seqs, self.max_num_batched_tokens)
        max_num_blocks = -(-self.max_model_len // self.backend.block_size)
        return CudaGraphs(self.model, self.kv_cache.tensor, max_num_seqs, max_num_blocks, self.metadata_cls)

    def num_blocks_that_fit(self) -> int:
        """Return the number of blocks for which there is memory, but not more than running sequences can fill."""
        num_bytes = CPU_KV_CACHE_BYTES if self.device.type == "cpu" else self.measure_free_bytes()
        num_blocks = num_bytes // self.kv_cache.bytes_per_block - 1  # one is the null block
        if num_blocks < 1:
            raise ValueError(f"{num_bytes} bytes are left for the KV cache, but two blocks take "
                             f"{2 * self.kv_cache.bytes_per_block}: raise gpu_memory_utilization, or lower "
                             f"max_num_batched_tokens or block_size")  # fmt: skip
        return min(num_blocks, self.config.max_num_seqs * -(-self.max_model_len // self.backend.block_size))

    def measure_free_bytes(self) -> int:
        """Return the GPU memory that weights, the largest forward pass and CUDA graphs leave for the KV cache."""
        sizes = self.max_num_batched_tokens, self.config.max_num_seqs, self.max_model_len, self.backend.block_size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.run(largest_batch(*sizes, self.make_metadata))
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        graphs = self.make_graphs()  # the cache has only the null block yet, and recording needs no other
        num_graph_bytes = 0 if graphs is None else graphs.measure_bytes()
        del graphs
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used_by_others = total - free - torch.cuda.memory_reserved()
        return int(total * self.config.gpu_memory_utilization) - peak - num_graph_bytes - used_by_others
