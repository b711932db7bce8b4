"""A checkpoint in Hugging Face's layout: its folder, its config, its tokenizer. `weights.py` reads the weights.

No code from a checkpoint is run. Called by `assembly.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.checks import extra
from nanovllm.config import Config
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import find_architecture
from nanovllm.sampling_params import SamplingParams


def resolve_model(model: str | Path, with_weights: bool = True, revision: str | None = None) -> Path:
    """The folder of `model`. ValueError if there is none."""
    folder = resolve_folder("model", model, revision, with_weights)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {str(model)!r} holds no config.json")
    return folder


def resolve_folder(option: str, name: str | Path, revision: str | None = None, with_weights: bool = False) -> Path:
    """A folder on this machine, or that of a hub id, whose files are downloaded first; ValueError if it is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    with extra("extras/hub.py", f"{option} {str(name)!r} is not a folder on this machine: a download from the hub"):
        from nanovllm.extras.hub import download
    return download(option, name, revision, with_weights)


def read_model_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Any, ModelConfig]:
    """Which network config.json describes, and its shape. ValueError if it is not one of ours."""
    raw = read_json(folder / "config.json")
    if overrides:
        with extra("extras/checkpoint_options.py", "hf_overrides"):
            from nanovllm.extras.checkpoint_options import overridden
        raw = overridden(raw, overrides)
    try:
        return find_architecture(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the model in {folder} cannot be served: {error}") from error


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """The model's end-of-sequence tokens: generation_config.json's, else config.json's."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        eos = read_json(file).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def read_default_sampling_params(config: Config, folder: Path) -> SamplingParams:
    """The parameters of requests that bring none: vLLM's defaults, except for what generation_config.json sets."""
    if config.generation_config == "auto" and not config.override_generation_config:
        file = folder / "generation_config.json"
        raw = read_json(file) if file.is_file() else {}
    else:
        with extra("extras/checkpoint_options.py", "generation_config or override_generation_config"):
            from nanovllm.extras.checkpoint_options import read_generation_config
        raw = read_generation_config(config, folder)
    if raw.get("do_sample") is False:
        raw["temperature"] = 0.0  # what transformers makes of it
    names = {"max_new_tokens": "max_tokens"}
    names |= {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    return SamplingParams(**{ours: raw[theirs] for theirs, ours in names.items() if raw.get(theirs) is not None})


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def load_tokenizer(config: Config, folder: Path) -> Any:
    """The `transformers` tokenizer of `folder`, the model's, unless `config` names another; None if there is none."""
    if config.tokenizer is not None:
        with extra("extras/checkpoint_options.py", "tokenizer"):
            from nanovllm.extras.checkpoint_options import find_tokenizer
        folder = find_tokenizer(config, config.tokenizer)
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer  # imported late: it takes longer than the rest of the engine together

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
