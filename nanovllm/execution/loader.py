"""A name → a folder → a model with its weights, strictly.

Reads Hugging Face's layout: config.json, and safetensors (`safetensors_files.py`). Each tensor is copied straight into
its place on the device, so the weights are never in memory twice. A tensor that is missing, unexpected or of another
shape is an error that names it. No code from a checkpoint is run. Called by `assembly.py`, which has the configuration
read, and by `startup.py`, which has the weights loaded.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.execution.safetensors_files import INDEX_FILE, iterate_checkpoint, read_json
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.linear import FusedLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import find_architecture
from nanovllm.sampling_params import SamplingParams

TOKENIZER_FILES = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OF_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|input_scale)$")  # GPTQ, AWQ, FP8


def resolve_model(model: str | Path, with_weights: bool = True, revision: str | None = None) -> Path:
    """The folder of `model`; a hub id is downloaded first, or found in the hub's cache. ValueError if there is none."""
    weights = ["*.safetensors", INDEX_FILE] if with_weights else []
    folder = resolve_folder(
        "model", model, ["config.json", "generation_config.json", *TOKENIZER_FILES, *weights], revision
    )
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {str(model)!r} holds no config.json")
    return folder


def resolve_folder(option: str, name: str | Path, files: list[str], revision: str | None) -> Path:
    """A folder on this machine, or the folder of these files of a hub id; ValueError if `name` is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(name, Path) or not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(
            f"{option} {str(name)!r} is not a folder on this machine, nor a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Mistral's repositories hold all weights once more, under names of their own
        ignored = ["consolidated*"]
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=ignored, revision=revision))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{option} {name!r} is neither a folder on this machine nor to be had from the hub: {error}"
        ) from error


def read_model_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Any, ModelConfig]:
    """Which network config.json describes, and its shape. ValueError if it is not one of ours."""
    raw = overridden(read_json(folder / "config.json"), overrides or {})
    try:
        return find_architecture(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the model in {folder} cannot be served: {error}") from error


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with other values; of a dict in it, only the keys that the override has.

    transformers 5 writes `rope_theta` and `rope_scaling` into `rope_parameters`, where an override by the older name
    must take effect too.
    """
    merged = dict(raw)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = overridden(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    if isinstance(raw.get("rope_parameters"), Mapping) and "rope_parameters" not in overrides:
        rope = {"rope_theta": overrides["rope_theta"]} if "rope_theta" in overrides else {}
        merged["rope_parameters"] = {**raw["rope_parameters"], **rope, **(overrides.get("rope_scaling") or {})}
    return merged


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """The model's end-of-sequence tokens: generation_config.json's, else config.json's."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        eos = read_json(file).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def read_default_sampling_params(config: Config, folder: Path) -> SamplingParams:
    """The parameters of requests that bring none: vLLM's defaults, except for what generation_config.json sets.

    `config.generation_config` names the folder that has it, `auto` being the model's, and `vllm` none at all.
    """
    chosen = config.generation_config
    if chosen not in ("auto", "vllm"):
        folder = resolve_folder("generation_config", chosen, ["generation_config.json"], None)
    file = folder / "generation_config.json"
    raw = read_json(file) if chosen != "vllm" and (file.is_file() or chosen != "auto") else {}
    raw |= config.override_generation_config or {}
    if raw.get("do_sample") is False:
        raw["temperature"] = 0.0  # what transformers makes of it
    names = {"max_new_tokens": "max_tokens"}
    names |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    return SamplingParams(**{ours: raw[theirs] for theirs, ours in names.items() if raw.get(theirs) is not None})


def resolve_tokenizer(config: Config, model_folder: Path) -> Path:
    """The folder of `config.tokenizer`, which is that of the model unless another is named."""
    if config.tokenizer is None:
        return model_folder
    revision = config.tokenizer_revision or config.revision
    folder = resolve_folder("tokenizer", config.tokenizer, ["config.json", *TOKENIZER_FILES], revision)
    if not has_tokenizer(folder):
        raise ValueError(f"tokenizer folder {str(config.tokenizer)!r} holds no tokenizer")
    return folder


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def load_tokenizer(folder: Path) -> Any:
    """The `transformers` tokenizer of `folder`, or None if there is none: prompts must be token ids then."""
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer  # imported late: it takes longer than the rest of the engine together

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_model(
    model_class: Any,
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    dummy_seed: int | None = None,
) -> Any:
    """The network on `device`, with the weights of `folder`, or with random ones of seed `dummy_seed`."""
    with torch.device("meta"):  # without memory, which is then allocated once, in the right dtype on the right device
        model = model_class(config, backend)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if dummy_seed is None:
        load_weights(model, folder)
    else:
        init_dummy_weights(model, dummy_seed, config.initializer_range)
    return model


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy each tensor of the checkpoint into its place; ValueError if checkpoint and model don't match exactly."""
    places = checkpoint_places(model)
    is_unused = getattr(model, "is_unused", lambda name: False)  # a network has it whose checkpoints hold more
    filled: dict[int, str] = {}
    for name, tensor in iterate_checkpoint(folder):
        if tensor.dtype not in PLAIN_DTYPES or OF_QUANTISED.search(name):
            raise ValueError(
                f"tensor {name} in {folder} is {str(tensor.dtype).removeprefix('torch.')}, and part of quantised "
                f"weights, though config.json names no format: take the same model in bfloat16, float16 or float32"
            )
        if name not in places:
            if is_unused(name) or name.endswith("rotary_emb.inv_freq"):  # Llama 2's, which config.json says too
                continue
            raise ValueError(
                f"unexpected tensor {name} {list(tensor.shape)} in {folder}: the model has no place for it"
            )
        place = places[name]
        if tensor.shape != place.shape:
            raise ValueError(f"tensor {name} in {folder} is {list(tensor.shape)}, the model needs {list(place.shape)}")
        twin = filled.get(id(place))  # tied embeddings have two names for one place
        if twin is not None and not torch.equal(place, tensor.to(place)):
            raise ValueError(f"tensors {twin} and {name} in {folder} differ, but config.json ties them together")
        place.copy_(tensor)
        filled[id(place)] = name
    if missing := [name for name, place in places.items() if id(place) not in filled]:
        raise ValueError(f"{len(missing)} tensors are missing in {folder}: {', '.join(missing[:5])}")


def checkpoint_places(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name, and where it goes: a parameter, or the rows of one in a fused layer."""
    places: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear) and not module.is_stored_fused:
                parent = path.rpartition(".")[0]
                rows = parameter.split(tuple(module.parts.values()))
                places |= {f"{parent}.{part}.{name}": view for part, view in zip(module.parts, rows, strict=True)}
            else:
                places[f"{path}.{name}"] = parameter
    return places


def init_dummy_weights(model: nn.Module, seed: int, std: float) -> None:
    """Normal weights of standard deviation `std`, norms that scale nothing, biases of zero; the same for a seed."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(module.neutral_weight)
            elif name == "bias":
                parameter.zero_()
            else:
                parameter.normal_(0, std, generator=generator)
