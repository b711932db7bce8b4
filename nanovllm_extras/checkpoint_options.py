"""Override parts of a checkpoint: fields of config.json, the tokenizer, the default sampling parameters.

The options are `hf_overrides`, `tokenizer`, `generation_config` and `override_generation_config` of `Config`.
`checkpoint.py` calls this module if one of them is set.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.loader import read_json
from nanovllm_extras.all_options import Config


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with `overrides` merged into it. Nested dicts are merged key by key.

    transformers 5 writes `rope_theta` and `rope_scaling` into `rope_parameters`. So an override of the older names
    changes `rope_parameters` too.
    """
    merged = dict(raw)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = overridden(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    if isinstance(raw.get("rope_parameters"), Mapping) and "rope_parameters" not in overrides:
        rope = {"rope_theta": overrides["rope_theta"]} if "rope_theta" in overrides else {}
        merged["rope_parameters"] = {**raw["rope_parameters"], **rope, **(overrides.get("rope_scaling") or {})}
    return merged


def check_has_tokenizer(folder: Path, name: str | Path) -> None:
    """Raise ValueError unless `folder`, which the option `tokenizer` has named, holds a tokenizer."""
    if not (folder / "vocab.json").is_file() and not any(folder.glob("tokenizer[._]*")):
        raise ValueError(f"tokenizer folder {str(name)!r} holds no tokenizer")


def read_generation_config(config: Config, folder: Path) -> dict[str, Any]:
    """Return the values of generation_config.json, with the overrides of `config`.

    folder: the one that `config.generation_config` selects; `auto` is the model's, and `vllm` reads no file
    """
    chosen = config.generation_config
    file = folder / "generation_config.json"
    raw = read_json(file) if chosen != "vllm" and (file.is_file() or chosen != "auto") else {}
    return raw | dict(config.override_generation_config or {})
