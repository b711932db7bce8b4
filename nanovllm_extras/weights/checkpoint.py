"""A checkpoint on this machine or on the hub: its folder, its config, its tokenizer, its default parameters.

`load_model.py` reads the weights. No code of a checkpoint is run. Called by `full_engine.py` and `full_runner.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm import loader
from nanovllm.checks import check_list
from nanovllm.loader import read_json
from nanovllm.models.qwen3 import Qwen3ForCausalLM, read_qwen3_config
from nanovllm_extras.models.architectures import find_architecture, text_fields
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.own_network import OwnNetwork
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.weights.checkpoint_options import check_has_tokenizer, overridden, read_generation_config
from nanovllm_extras.weights.hub import download


def resolve_model(model: str | Path, with_weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of `model`. ValueError if there is none."""
    folder = resolve_folder("model", model, revision, with_weights)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {str(model)!r} holds no config.json")
    return folder


def resolve_folder(option: str, name: str | Path, revision: str | None = None, with_weights: bool = False) -> Path:
    """Return a folder on this machine, or that of a hub id after downloading its files. ValueError if it is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    return download(option, name, revision, with_weights)


def read_model_config(
    folder: Path, overrides: Any = None, max_model_len: int | None = None, models: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Return the class of the network that config.json describes, and its shape. ValueError if it is not supported.

    models: networks of one's own, by their names in `architectures`
    """
    raw = read_json(folder / "config.json")
    try:
        if overrides:
            raw = overridden(raw, overrides)
        if (own := find_own(raw, models or {})) is not None:
            return own, own.shape
        if (plain := read_plain_qwen3(raw)) is not None:
            return Qwen3ForCausalLM, plain
        check_stored_weights(raw)
        return find_architecture(raw, max_model_len)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the model in {folder} cannot be served: {error}") from error


def find_own(raw: dict[str, Any], models: Mapping[str, Any]) -> OwnNetwork | None:
    """Return the user's own network that config.json names, or None."""
    named = check_list("config.json: architectures", raw.get("architectures"), "strings") if models else ()
    return next((OwnNetwork(models[name], raw) for name in named if name in models), None)


def check_stored_weights(raw: Mapping[str, Any]) -> None:
    """Raise ValueError if the weights are quantised in a way that is not known. raw: the contents of config.json"""
    fields = text_fields(dict(raw))
    for field in ("quantization_config", "compression_config"):
        if fields.get(field) is not None:
            from nanovllm_extras.weights.stored_format import read_format  # here: few models

            read_format(field, fields[field])


def read_plain_qwen3(raw: Mapping[str, Any]) -> NetworkConfig | None:
    """Return the shape of a network that the core computes, or None for any other network."""
    if raw.get("architectures") != ["Qwen3ForCausalLM"] or raw.get("compression_config") is not None:
        return None
    try:
        shape = read_qwen3_config(dict(raw))
    except (TypeError, ValueError, AttributeError):  # what is wrong is found, and said, by `models/architectures.py`
        return None
    biases: dict[str, Any] = {"qkv_bias": shape.attention_bias, "o_bias": shape.attention_bias}
    return NetworkConfig(**vars(shape), **biases, initializer_range=raw.get("initializer_range") or 0.02)


def read_default_sampling_params(config: Config, folder: Path) -> SamplingParams:
    """Return the parameters of requests without any: vLLM's defaults, except for what generation_config.json sets."""
    if config.generation_config == "auto" and not config.override_generation_config:
        file = folder / "generation_config.json"
        raw = read_json(file) if file.is_file() else {}
    else:
        if config.generation_config not in ("auto", "vllm"):
            folder = resolve_folder("generation_config", config.generation_config)
        raw = read_generation_config(config, folder)
    raw |= {"temperature": 0.0} if raw.get("do_sample") is False else {}  # what transformers makes of it
    names = {"max_new_tokens": "max_tokens"}
    names |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    try:
        return SamplingParams(**{ours: raw[theirs] for theirs, ours in names.items() if raw.get(theirs) is not None})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the default sampling parameters, from generation_config.json of {folder}: {error}"
        ) from error


def load_tokenizer(config: Config, folder: Path) -> Any:
    """Return the tokenizer of `folder`, unless `config` names another one. None if there is none."""
    if config.tokenizer is not None:
        folder = resolve_folder("tokenizer", config.tokenizer, config.tokenizer_revision or config.revision)
        check_has_tokenizer(folder, config.tokenizer)
    return loader.load_tokenizer(folder)
