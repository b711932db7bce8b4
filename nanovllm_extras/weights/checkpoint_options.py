"""Override parts of a checkpoint: fields of config.json, the tokenizer, the default sampling parameters.

The options are `hf_overrides`, `tokenizer`, `generation_config` and `override_generation_config` of `Config`.
`checkpoint.py` calls this module if one of them is set.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.loader import read_json
from nanovllm_extras.models.architectures import check_kinds, find_class, text_fields
from nanovllm_extras.models.classifier import decoder_fields
from nanovllm_extras.models.rope_overrides import DICTS, POSITIONS, override_positions
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.option_checks import check_dict


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text network in config.json, with `overrides` in their places.

    Overrides may be nested in `text_config` or not, whether or not the file nests these fields. A value replaces that
    of the file, also if it is a dict, and None means what null means in the file.
    """
    check_dict("hf_overrides: text_config", overrides.get("text_config"))
    is_dropped = overrides.get("text_config", raw) is None
    merged = text_fields({**raw, "text_config": None} if is_dropped else dict(raw))
    flat = {name: value for name, value in overrides.items() if name != "text_config"}
    given = {**(overrides.get("text_config") or {}), **flat}
    merged = decoder_fields(merged | {name: value for name, value in given.items() if name not in POSITIONS})
    positions = {name: value for name, value in given.items() if name in POSITIONS}
    model_class = find_class(merged) if positions else None
    if model_class is None:  # an architecture that is not supported is refused later, by its name
        return merged
    check_kinds(merged)
    for name in DICTS:
        check_dict(f"hf_overrides: {name}", positions.get(name))
    return getattr(model_class, "override_positions", override_positions)(merged, positions)


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
