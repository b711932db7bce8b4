"""The end-of-sequence tokens of a model with options: another generation_config.json, overrides, nested fields."""

from pathlib import Path
from typing import Any

from nanovllm.loader import find_eos_token_ids, read_json
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.weights.checkpoint import resolve_folder
from nanovllm_extras.weights.checkpoint_options import overridden


def read_end_tokens(config: Config, folder: Path, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens of generation_config.json, else those of config.json, and the tokenizer's.

    The former is in the folder that `config.generation_config` names. With `vllm`, which is about default parameters
    only, it is the model's. config.json may nest its own in `text_config`.
    """
    chosen, given = config.generation_config, config.override_generation_config or {}
    found = folder if chosen in ("auto", "vllm") else resolve_folder("generation_config", chosen)
    file = found / "generation_config.json"
    name = "override_generation_config" if "eos_token_id" in given else str(file)
    generation = {**(read_json(file) if file.is_file() else {}), **given}
    raw = read_json(folder / "config.json")
    place = "config.json" if raw.get("eos_token_id") is not None else "config.json: text_config"
    fields = overridden(raw, config.hf_overrides or {})
    return find_eos_token_ids({name: generation, str(folder / place): fields}, tokenizer, vocab_size)
