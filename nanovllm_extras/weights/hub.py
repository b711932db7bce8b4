"""Find a model by its name: in the package, in the cache of the Hugging Face hub on this machine, or on the hub.

`checkpoint.py` calls this for a name that is not a folder. Only data is downloaded, no code.
"""

import re
from pathlib import Path

from nanovllm_extras.weights.bundled import BUNDLED

TOKENIZER_FILES = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
FILES = {  # the option that names the folder -> the files that it needs
    "model": ("config.json", "generation_config.json", *TOKENIZER_FILES),
    "tokenizer": ("config.json", *TOKENIZER_FILES),
    "generation_config": ("generation_config.json",),
}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def download(option: str, name: str | Path, revision: str | None, with_weights: bool) -> Path:
    """Return the folder of the bundled model `name`, or the local folder with the files of hub id `name`.

    option: the option that has this value; it selects the files. Raises ValueError if `name` is neither, or if the
    files are not available.
    """
    if name in BUNDLED:
        return BUNDLED[str(name)]
    if isinstance(name, Path) or not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(
            f"{option} {str(name)!r} is not a folder on this machine, nor a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = [*FILES[option], *(WEIGHT_FILES if with_weights else ())]
    try:
        # Mistral's repositories contain all weights a second time, under these names
        ignored = ["consolidated*"]
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=ignored, revision=revision))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{option} {name!r} is neither a folder on this machine nor available on the hub: {error}"
        ) from error
