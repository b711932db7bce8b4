"""The end-of-sequence tokens that a config.json nests in `text_config`, as those of models with images do."""

from pathlib import Path

from nanovllm.checks import check_token_ids
from nanovllm.loader import read_json


def read_eos_of_text(folder: Path, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens that config.json nests in `text_config`.

    They count only if neither generation_config.json nor config.json itself names any. The core reads those.
    """
    raw, file = read_json(folder / "config.json"), folder / "generation_config.json"
    nested = raw.get("text_config")
    eos = nested.get("eos_token_id") if isinstance(nested, dict) else None
    generation = read_json(file) if file.is_file() else {}
    if eos is None or any(one.get("eos_token_id") is not None for one in (generation, raw)):
        return frozenset()
    eos = eos if isinstance(eos, list) else [eos]
    check_token_ids(f"{folder / 'config.json'}: text_config: eos_token_id", [one for one in eos if one != -1])
    return frozenset(token_id for token_id in eos if 0 <= token_id < vocab_size)
