"""A few layers of a network, or its attention, run step by step: before the layers are replaced, and afterwards.

The layers that are left out are replaced by `Skipped` for the time of a run. They are not copied, so a check takes the
time and the memory of a few layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanovllm.batch import Batch, to_device
from nanovllm.layers.attention import Attention, TorchAttention
from nanovllm.layers.basic import Embedding
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.models.layer_inputs import LayerCaches
from nanovllm_extras.models.masking import AttentionOptions, options_of
from nanovllm_extras.self_check.steps import draw_vectors

Record = TypeVar("Record")

MAX_PARAMETERS = 1 << 26  # of layers that are run together; one layer may have more
MAX_QUERIES = 300  # tokens of a step from which attention is computed
LARGE, LARGEST_FP8 = 1000.0, 0x7E  # in slots that no token has been written to, for libraries that spread NaN
NAN_FP8 = 0x7F


class Skipped(nn.Module):
    """In place of a layer: returns its input."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


def choose_layers(layers: nn.ModuleList) -> list[list[int]]:
    """Return groups of layers to run together: the first layer of each kind, and the last layer if it is small enough.

    A check needs memory for a copy of one group in a wider dtype.
    """
    kinds: dict[tuple[object, ...], int] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(kind_of(layer), i)
    groups: list[list[int]] = []
    num_left = 0
    for i in sorted({*kinds.values(), len(layers) - 1}):
        size = num_weights(layers[i])
        if size <= num_left:
            groups[-1].append(i)
            num_left -= size
        elif i in kinds.values():
            groups.append([i])
            num_left = MAX_PARAMETERS - size
    return groups


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Return what decides which kernels compute a layer: the classes, shapes and options of its modules."""
    kind: list[object] = []
    for module in layer.modules():
        options = options_of(module) if isinstance(module, Attention) else ()
        kind.append((type(module), options, *(parameter.shape for parameter in module.parameters(recurse=False))))
        if (weight := quantised_weight_of(module)) is not None:
            kind.append((weight.q.shape, weight.bits, weight.group_size))
    return tuple(kind)


def num_weights(layer: nn.Module) -> int:
    """Return the number of the layer's weights, with those of 8 or 4 bits."""
    quantised = [quantised_weight_of(module) for module in layer.modules()]
    num_quantised = sum(weight.q.numel() for weight in quantised if weight is not None)
    return num_quantised + sum(parameter.numel() for parameter in layer.parameters())


def quantised_weight_of(module: nn.Module) -> Any:
    """Return the weight of a quantised layer, which may be packed for a kernel, or None."""
    return getattr(module, "quantised", None) or getattr(module, "weight_of_groups", None)


class Choices(TorchFunctionMode):
    """Records which experts the network chooses within the context, and the scores: [num_tokens, num_choices] each.

    With `like`, the same experts are chosen as within that context. Otherwise rounding could let a token have other
    experts, where two have almost equal scores, and the results could not be compared.
    """

    def __init__(self, like: "Choices | None" = None) -> None:
        super().__init__()
        self.like = like
        self.scores: list[Tensor] = []
        self.chosen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.topk or args[0].dim() != 2:
            return result
        chosen = result.indices if self.like is None else self.like.chosen[len(self.chosen)]
        self.scores.append(args[0])
        self.chosen.append(chosen)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


@contextmanager
def only_layers(model: Qwen3ForCausalLM, chosen: list[int]) -> Iterator[None]:
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
def unpacked(
    model: Qwen3ForCausalLM, chosen: list[int], backend: TorchAttention
) -> Iterator[list[tuple[nn.Module, nn.Module]]]:
    """Let the tables of tokens and the chosen layers multiply in PyTorch within the context.

    A backend may have packed quantised layers while they were loaded, before PyTorch could compute with them. The value
    of the context has these layers, each with PyTorch's version.
    """
    unpack = getattr(backend, "unpack_quantised", lambda layer: layer)
    parents = [model, model.model, *(module for i in chosen for module in model.model.layers[i].modules())]
    plain: dict[nn.Module, nn.Module] = {}  # a table may have two places
    packed: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in parents:
        for name, child in parent._modules.items():
            if child is not None:
                plain[child] = plain.get(child) or unpack(child)
                packed.append((parent, name, child))
    for parent, name, child in packed:
        parent._modules[name] = plain[child]
    try:
        yield [(child, one) for child, one in plain.items() if one is not child]
    finally:
        for parent, name, child in packed:
            parent._modules[name] = child


@contextmanager
def attending_with(model: nn.Module, backend: TorchAttention) -> Iterator[None]:
    """Let all attention layers of the network use another attention backend within the context."""
    own = {module: module.backend for module in model.modules() if isinstance(module, Attention)}
    for module in own:
        module.backend = backend
    try:
        yield
    finally:
        for module, before in own.items():
            module.backend = before


def in_wider_dtype(
    model: Qwen3ForCausalLM, backend: TorchAttention, used: list[int], dtype: torch.dtype
) -> Qwen3ForCausalLM:
    """Return a copy of the network in `dtype`, with another backend. Its token i is token `used[i]` of the network.

    Layers that are left out, and the rows of other tokens, are not copied.
    """
    replaced: dict[int, object] = {
        id(module.backend): backend for module in model.modules() if isinstance(module, Attention)
    }
    for table in (model.model.embed_tokens, model.lm_head):
        replaced.setdefault(id(table), few_rows(table, used))
    return deepcopy(model, replaced).to(dtype)


@torch.no_grad()
def few_rows(table: nn.Module, used: list[int]) -> Embedding:
    """Return a table with some rows of another one, which may be quantised."""
    few = Embedding(0, 0)
    device = next(iter([*table.parameters(), *table.buffers()]), torch.empty(0)).device
    few.weight = nn.Parameter(table(torch.tensor(used, device=device)), requires_grad=False)
    return few


@torch.inference_mode()
def run_network(
    model: Qwen3ForCausalLM,
    batches: list[Batch],
    backend: TorchAttention,
    chosen: list[int],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    wait: Callable[[], object] = lambda: None,
) -> Tensor:
    """Run the batches one after the other over a small cache of their own. `wait` is called after each.

    Returns the hidden states of all tokens: [num_tokens, hidden_size]
    """
    caches = {i: new_cache(backend, num_blocks, dtype, device)[:, 0] for i in chosen}
    hidden = []
    for batch in batches:
        sent = send(batch, device)
        found = model(sent.input_ids, sent.positions, sent.metadata, LayerCaches(caches))
        hidden.append(found.clone())  # the next step may overwrite it
        wait()
    return torch.cat(hidden)


@torch.inference_mode()
def run_attention(
    backend: TorchAttention,
    batches: list[Batch],
    num_blocks: int,
    dtype: torch.dtype,
    drawn_in: torch.dtype,
    device: torch.device,
    options: tuple[AttentionOptions, ...] = (),
    wait: Callable[[], object] = lambda: None,
) -> Tensor:
    """Store and attend to random queries, keys and values, in the steps of `batches`, over a small cache.

    The numbers are rounded to the dtype `drawn_in`, so that backends of other dtypes get the same. A long prompt only
    fills the cache, because PyTorch takes too long to attend from all of its tokens. `wait` is called after each step.
    Returns the outputs of all other steps: [num_tokens, num_heads, head_dim]
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
        wait()
    return torch.cat(outputs)


def send(record: Record, device: torch.device) -> Record:
    """Copy the tensors of a batch, or of a part of it, to the device."""
    return record if device.type == "cpu" else to_device(record, device)


def new_cache(backend: TorchAttention, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a KV cache of one layer, [2, 1, num_blocks, …], full of NaN, which overflows of other requests leave.

    A library that computes 0 · NaN for slots behind a sequence gets large numbers (`spreads_nan`).
    """
    cache_dtype, spreads_nan = getattr(backend, "kv_cache_dtype", None) or dtype, getattr(backend, "spreads_nan", False)
    cache = torch.empty(backend.kv_cache_shape(1, num_blocks), dtype=cache_dtype, device=device)
    if cache_dtype == torch.float8_e4m3fn:
        cache.view(torch.uint8).fill_(LARGEST_FP8 if spreads_nan else NAN_FP8)
    elif cache_dtype == torch.int8:
        cache.fill_(-1)  # four of these bytes are a scale that is NaN
    else:
        cache.fill_(LARGE if spreads_nan else torch.nan)
    return cache
