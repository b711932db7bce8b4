"""What is to differ from a checkpoint: fields of config.json, the tokenizer, the default sampling parameters.

`hf_overrides`, `tokenizer`, `generation_config` and `override_generation_config` of `Config`. Called by
`checkpoint.py`, if one of them is given.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.extras.all_options import Config
from nanovllm.extras.checkpoint import resolve_folder
from nanovllm.loader import has_tokenizer, read_json


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


def find_tokenizer(config: Config, name: str | Path) -> Path:
    """The folder of another tokenizer than the model's own."""
    folder = resolve_folder("tokenizer", name, config.tokenizer_revision or config.revision)
    if not has_tokenizer(folder):
        raise ValueError(f"tokenizer folder {str(name)!r} holds no tokenizer")
    return folder


def read_generation_config(config: Config, folder: Path) -> dict[str, Any]:
    """generation_config.json of the folder that `config` names: `auto` is the model's, `folder`, and `vllm` none."""
    chosen = config.generation_config
    if chosen not in ("auto", "vllm"):
        folder = resolve_folder("generation_config", chosen)
    file = folder / "generation_config.json"
    raw = read_json(file) if chosen != "vllm" and (file.is_file() or chosen != "auto") else {}
    return raw | dict(config.override_generation_config or {})
