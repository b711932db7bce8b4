"""Many LoRA adapters in one batch: each row computes x W + scale · x A B, with the A and B of its own adapter.

Punica (Chen et al. 2023, https://arxiv.org/abs/2310.18547) and S-LoRA (Sheng et al. 2023,
https://arxiv.org/abs/2311.03285) serve a thousand adapters with one copy of the model. Their kernels multiply each row
by its own matrices only. Here the A of all adapters are one matrix, and so are the B: two ordinary products, with a
mask between them that keeps a row's own ranks. That is exact, has one shape for all batches (so CUDA graphs record it),
and costs MAX_ADAPTERS * MAX_RANK more rows of each weight. Each adapter has prefix blocks of its own.

    NANOVLLM_ADAPTERS=adapters nanovllm serve MODEL --enforce-eager --extension examples/extensions/multi_lora.py

The subfolders of `adapters` are adapters as PEFT saves them, and their names are those of the requests:
`SamplingParams(extra_args={"adapter": "alice"})`. All are loaded at the start. It has no DoRA, biases or embeddings.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.basic import FusedLinear, Linear
from nanovllm.loader import read_json
from nanovllm.model_runner import ModelRunner
from nanovllm.scheduler import Scheduler

MAX_ADAPTERS, MAX_RANK = 8, 16


def find_adapters() -> list[Path]:
    """Return the adapters' folders. The first has slot 1."""
    root = os.environ.get("NANOVLLM_ADAPTERS", "")
    found = sorted(file.parent for file in Path(root).glob("*/adapter_config.json")) if root else []
    if not 1 <= len(found) <= MAX_ADAPTERS:
        raise ValueError(f"the environment must set NANOVLLM_ADAPTERS to a folder of 1 to {MAX_ADAPTERS} adapters, "
                         f"got {root!r}, which has {len(found)}")  # fmt: skip
    return found


def adapter_of(seq) -> str | None:
    return (seq.sampling_params.extra_args or {}).get("adapter")


class AdapterScheduler(Scheduler):
    """Only sequences of the same adapter share blocks: their first blocks have a parent of their own."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = [folder.name for folder in find_adapters()]

    def add(self, seq) -> None:
        if (name := adapter_of(seq)) is not None:
            if name not in self.adapters:
                raise ValueError(f"extra_args['adapter'] must be one of {', '.join(self.adapters)}, got {name!r}")
            digest = blake2b(f"{seq.root_serial} {name}".encode(), digest_size=32).digest()
            for one in (seq, *seq.children):
                one.root_serial = int.from_bytes(digest, "little") | 1 << 255  # larger than any block's serial number
        super().add(seq)


@dataclass(frozen=True)
class LoraMetadata(AttentionMetadata):
    adapters: Tensor  # [num_tokens] int32, the slot of each token's adapter; 0 for none


class LoraLinear(nn.Module):
    """A linear layer with the A and B of all adapters, for each of the projections that it computes."""

    def __init__(self, base: Linear, runner: "LoraRunner") -> None:
        super().__init__()
        self.base, self.runner = base, runner
        num_ranks = MAX_ADAPTERS * MAX_RANK
        sizes = list(base.parts.values()) if isinstance(base, FusedLinear) else [len(base.weight)]
        self.a = [base.weight.new_zeros(num_ranks, base.weight.shape[1]) for _ in sizes]
        self.b = [base.weight.new_zeros(size, num_ranks) for size in sizes]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        y, is_own = self.base(x), self.runner.is_own  # is_own: [num_tokens, num_ranks]
        parts = y if isinstance(y, tuple) else (y,)
        changed = [p + F.linear(F.linear(x, a) * is_own, b) for p, a, b in zip(parts, self.a, self.b, strict=True)]
        return tuple(changed) if isinstance(y, tuple) else changed[0]


class LoraRunner(ModelRunner):
    metadata_cls = LoraMetadata

    def make_model(self):
        model = super().make_model()
        places = dict(wrap_linears(model, self))
        if not places:
            raise ValueError("the linear layers have been fused into others: multi_lora needs enforce_eager=True")
        folders = find_adapters()
        for slot, folder in enumerate(folders):
            load_adapter(folder, places, slice(slot * MAX_RANK, (slot + 1) * MAX_RANK))
        self.slots = {None: 0, **{folder.name: slot for slot, folder in enumerate(folders, start=1)}}
        self.owners = torch.arange(MAX_ADAPTERS, device=self.device).repeat_interleave(MAX_RANK) + 1  # [num_ranks]
        model.register_forward_pre_hook(self.select)
        return model

    def make_metadata(self, step, metadata):
        slots = np.repeat([self.slots[adapter_of(seq)] for seq, _, _ in step.chunks], [n for _, _, n in step.chunks])
        return LoraMetadata(**vars(metadata), adapters=torch.from_numpy(slots.astype(np.int32)))

    def select(self, model: nn.Module, inputs: tuple) -> None:
        """Note which ranks belong to each token, before the layers run. inputs: of `Qwen3ForCausalLM.forward`"""
        self.is_own = (inputs[2].adapters[:, None] == self.owners).to(self.dtype)  # [num_tokens, num_ranks]


def wrap_linears(model: nn.Module, runner: LoraRunner) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Replace the linear layers, and yield the name and the (A, B) of each projection in the checkpoint."""
    for path, layer in [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Linear)]:
        parent, _, name = path.rpartition(".")
        wrapped = LoraLinear(layer, runner)
        setattr(model.get_submodule(parent), name, wrapped)
        names = layer.parts if isinstance(layer, FusedLinear) else [name]
        yield from zip((f"{parent}.{one}" for one in names), zip(wrapped.a, wrapped.b, strict=True), strict=True)


def load_adapter(folder: Path, places: dict[str, tuple[Tensor, Tensor]], ranks: slice) -> None:
    """Copy the tensors of an adapter to its ranks, B times the scale."""
    config = read_json(folder / "adapter_config.json")
    for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise ValueError(f"{folder}: {name} of adapter_config.json must not be set, it is {config[name]!r}")
    rank = config["r"]
    if rank > MAX_RANK:
        raise ValueError(f"{folder}: r of adapter_config.json must be at most MAX_RANK {MAX_RANK}, it is {rank}")
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        path, _, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        if path not in places:
            raise ValueError(f"{folder}: the model has no place for {name}")
        a, b = places[path]
        if kind == "A":
            a[ranks][:rank] = tensor  # [rank, in_features]
        else:
            b[:, ranks][:, :rank] = tensor.to(b) * scale  # [out_features, rank]


scheduler_cls = AdapterScheduler
runner_cls = LoraRunner
extra_args = {"adapter": str}
