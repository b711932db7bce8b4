"""A few layers of a network, or its attention, run step by step: before the layers are replaced, and afterwards.

The layers that are left out are replaced by `Skipped` for the time of a run. They are not copied, so a check takes the
time and the memory of a few layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch, to_device
from nanovllm.extras.self_check.steps import draw_vectors
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import Embedding

MAX_PARAMETERS = 1 << 26  # of the layers that are run; one layer may have more
MAX_QUERIES = 300  # tokens of a step from which attention is computed
UNKNOWN = 1000.0  # in slots that no token has been written to; attention must not see it
LARGEST_FP8 = 0x7E  # the bits of 448, for the same


class Skipped(nn.Module):
    """In place of a layer: returns its input."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class LayerCaches:
    """KV caches of some layers only: indexed as the cache of all layers is, by `[:, layer]`."""

    def __init__(self, caches: dict[int, Tensor]) -> None:
        self.caches = caches

    def __getitem__(self, place: tuple[slice, int]) -> Tensor | None:
        return self.caches.get(place[1])


def choose_layers(layers: nn.ModuleList) -> list[int]:
    """Return the first layer of each kind and the last layer, as long as they are not too large together."""
    kinds: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        options = tuple(getattr(module, "options", ()) for module in layer.modules() if isinstance(module, Attention))
        kinds.setdefault((*(type(module) for module in layer.modules()), options), i)
    chosen: list[int] = []
    num_parameters = 0
    for i in dict.fromkeys([*kinds.values(), len(layers) - 1]):
        num_parameters += sum(parameter.numel() for parameter in layers[i].parameters())
        if not chosen or num_parameters <= MAX_PARAMETERS:
            chosen.append(i)
    return sorted(chosen)


@contextmanager
def only_layers(model: Any, chosen: list[int]) -> Iterator[None]:
    """Leave out all other layers of the network within the context."""
    layers = model.model.layers
    left_out = {i: layer for i, layer in enumerate(layers) if i not in chosen}
    for i in left_out:
        layers[i] = Skipped()
    try:
        yield
    finally:
        for i, layer in left_out.items():
            layers[i] = layer


@contextmanager
def attending_with(model: nn.Module, backend: Any) -> Iterator[None]:
    """Let all attention layers of the network use another attention backend within the context."""
    own = {module: module.backend for module in model.modules() if isinstance(module, Attention)}
    for module in own:
        module.backend = backend
    try:
        yield
    finally:
        for module, before in own.items():
            module.backend = before


def in_wider_dtype(model: Any, backend: Any, used: list[int], dtype: torch.dtype) -> Any:
    """Return a copy of the network in `dtype`, with another backend. Its token i is token `used[i]` of the network.

    Layers that are left out, and the rows of other tokens, are not copied.
    """
    replaced: dict[int, Any] = {
        id(module.backend): backend for module in model.modules() if isinstance(module, Attention)
    }
    for table in (model.model.embed_tokens, model.lm_head):
        replaced.setdefault(id(table), few_rows(table, used))
    return deepcopy(model, replaced).to(dtype)


@torch.no_grad()
def few_rows(table: Any, used: list[int]) -> Embedding:
    """Return a table with some rows of another one, which may be quantised."""
    few = Embedding(0, 0)
    device = next(iter([*table.parameters(), *table.buffers()]), torch.empty(0)).device
    few.weight = nn.Parameter(table(torch.tensor(used, device=device)), requires_grad=False)
    return few


@torch.inference_mode()
def run_network(
    model: Any,
    batches: list[Batch],
    backend: Any,
    chosen: list[int],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Run the batches one after the other over a small cache of their own.

    Returns the hidden states of all tokens, [num_tokens, hidden_size], and the logits of the last batch's sequences.
    """
    caches = {i: new_cache(backend, num_blocks, dtype, device)[:, 0] for i in chosen}
    hidden = []
    for batch in batches:
        sent = send(batch, device)
        found = model(sent.input_ids, sent.positions, sent.metadata, LayerCaches(caches))
        hidden.append(found.clone())  # the next step may overwrite it
    return torch.cat(hidden), model.compute_logits(hidden[-1][sent.logits_indices])


@torch.inference_mode()
def run_attention(
    backend: Any,
    batches: list[Batch],
    num_blocks: int,
    dtype: torch.dtype,
    drawn_in: torch.dtype,
    device: torch.device,
    options: tuple[Any, ...] = (),
) -> Tensor:
    """Store and attend to random queries, keys and values, in the steps of `batches`, over a small cache.

    The numbers are rounded to the dtype `drawn_in`, so that backends of other dtypes get the same. A long prompt only
    fills the cache, because PyTorch takes too long to attend from all of its tokens. Returns the outputs of all other
    steps: [num_tokens, num_heads, head_dim]
    """
    cache = new_cache(backend, num_blocks, dtype, device)[:, 0]
    heads = (backend.num_heads, backend.num_kv_heads, backend.num_kv_heads)
    outputs = []
    for i, batch in enumerate(batches):
        metadata = send(batch.metadata, device)
        drawn = draw_vectors(i, len(batch.input_ids), sum(heads), backend.head_dim).to(drawn_in)
        q, k, v = (part.contiguous() for part in drawn.to(device, dtype).split(heads, dim=1))
        backend.store_kv(k, v, cache, metadata.slot_mapping)
        if len(q) <= MAX_QUERIES:
            outputs.append(backend.attend(q, cache, metadata, *options))
    return torch.cat(outputs)


def send(record: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch, or of a part of it, to the device."""
    return record if device.type == "cpu" else to_device(record, device)


def new_cache(backend: Any, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a KV cache of one layer, [2, 1, num_blocks, …], with old contents everywhere, as after other requests.

    A cache of int8 has zeros, because some of its bytes are parts of scales.
    """
    cache_dtype = getattr(backend, "kv_cache_dtype", None) or dtype
    cache = torch.zeros(backend.kv_cache_shape(1, num_blocks), dtype=cache_dtype, device=device)
    if cache_dtype == dtype:
        cache.fill_(UNKNOWN)
    elif cache_dtype == torch.float8_e4m3fn:
        cache.view(torch.uint8).fill_(LARGEST_FP8)
    return cache
