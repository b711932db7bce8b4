"""`MtpHead`: computes the model's own head for multi-token prediction, which makes drafts (`models/mtp.py`).

The head needs its K and V of all tokens. So each step computes the head for the same tokens as the model, with the
hidden states that the model has just computed:

    tokens of the step        t4        t5   t6            positions 4, 5 and 6 of a sequence
    model                     h4        h5   h6
    head                      (h3, t4)  (h4, t5)  (h5, t6)      h3 is of an earlier step

The hidden state of a sequence's newest computed token is kept in its slot, as a part of its state (`memory/slots.py`).
So it is there after a prefix hit, a fork and a rejected draft, without further bookkeeping. The K and V of the head
are in blocks of their own, with the same ids as those of the model.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kv_cache import KVCache
from nanovllm.loader import checkpoint_files
from nanovllm_extras.execution.state_pool import StatePool
from nanovllm_extras.models.gated_delta import read_states
from nanovllm_extras.models.layer_inputs import StateMetadata
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.sampling.runner_hooks import Computed

METHOD = "speculative_config['method'] 'mtp'"


class MtpHead:
    """The head of a model, which computes each step after the model."""

    def __init__(self, model: Any, kv_cache: KVCache, pool: StatePool) -> None:
        """kv_cache: of the head; pool: with a hidden state in each slot"""
        self._model, self._kv_cache, self._pool = model, kv_cache, pool

    def follow(self, batch: Batch, computed: Computed, newest_ids: Tensor) -> None:
        """Run the head, and keep the model's hidden state of the last token of each chunk."""
        hidden, sent, _ = computed
        metadata = sent.metadata
        assert isinstance(metadata, StateMetadata)
        self.run(sent, hidden_before(hidden, self._pool.hidden[0], metadata))
        last = (metadata.cu_seqlens_q[1:] - 1).long()  # [num_seqs]
        self._pool.hidden[0, metadata.state_slots] = hidden[last]

    def run(self, batch: Batch, previous: Tensor) -> Tensor:
        """Return the head's hidden states: [num_tokens, hidden_size]. previous: those of the tokens before, as shape"""
        inputs = (batch.input_ids, batch.positions, previous, self._kv_cache.tensor, batch.metadata)
        return self._model.predict(*inputs)


def hidden_before(hidden: Tensor, kept: Tensor, metadata: StateMetadata) -> Tensor:
    """Return the hidden state of the token before each token of a step, and zeros where a sequence begins.

    hidden: [num_tokens, hidden_size], of the step's tokens; kept: [num_slots + 1, hidden_size] -> as hidden
    """
    before = torch.cat((hidden[:1], hidden[:-1]))  # [num_tokens, hidden_size]: right except for the first of each chunk
    is_own = metadata.state_sources == metadata.state_slots  # [num_seqs]: a draft follows the row before it
    slots, is_first = metadata.state_slots[is_own], metadata.is_first[is_own]
    before[metadata.cu_seqlens_q[:-1][is_own].long()] = read_states(kept, slots, is_first)
    return before


# ---- which models have a head


def check_head(config: Config, folder: Path, shape: NetworkConfig) -> None:
    """Raise ValueError if the model has no head for multi-token prediction, or if its checkpoint has none."""
    if not hasattr(shape, "has_mtp"):
        raise ValueError(f"{METHOD} needs a model of the kind of Qwen3.5, whose head for multi-token prediction can be "
                         f"computed; take the method 'ngram'")  # fmt: skip
    if config.load_format in ("dummy", "gguf"):  # the loader looks for it in a GGUF file
        return
    names = {name for name in names_of_tensors(folder) if name.startswith("mtp.")}
    if not names:
        raise ValueError(f"{METHOD} needs a head for multi-token prediction, but {folder} has no tensors mtp.*; take "
                         f"the method 'ngram'")  # fmt: skip
    if any(name.startswith("mtp.layers.") and not name.startswith("mtp.layers.0.") for name in names):
        raise ValueError(f"{METHOD} works with a head of one layer, but {folder} has tensors mtp.layers.1.*; take the "
                         f"method 'ngram'")  # fmt: skip


def names_of_tensors(folder: Path) -> set[str]:
    """Return the names of all tensors of a checkpoint."""
    found: set[str] = set()
    for file, names in checkpoint_files(folder).items():
        if names is None:
            with safe_open(file, framework="pt") as tensors:
                names = set(tensors.keys())
        found |= names
    return found
