"""Loading a model folder's tokenizer. Called by `LLMEngine` at start."""

from pathlib import Path
from typing import Any


def load_tokenizer(folder: Path) -> Any:
    """The `transformers` tokenizer of `folder`, or None if it holds none: prompts are token ids then."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import AutoTokenizer  # imported late: it takes longer than the rest of the engine together

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
