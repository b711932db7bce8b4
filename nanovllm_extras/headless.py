"""Find out that a checkpoint has no output layer, such as Qwen3-Embedding-8B: it computes embeddings, but no logits.

`full_runner.py` calls `without_head` for a config whose embeddings are not tied.
"""

from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nanovllm.loader import checkpoint_files
from nanovllm_extras.models.network_config import NetworkConfig


def without_head(shape: NetworkConfig, folder: Path) -> NetworkConfig:
    """Return `shape` with `has_head` False if the checkpoint is of a network that was saved without its output layer.

    In such a checkpoint no name begins with `model.`. The engine samples a token in every step, which nobody sees after
    the prompt of an embedding. The embeddings serve as its output layer, so they are tied.
    """
    names = names_in(folder)
    if "embed_tokens.weight" not in names or any(name.startswith("lm_head.") for name in names):
        return shape
    return replace(shape, tie_word_embeddings=True, has_head=False)


def names_in(folder: Path) -> set[str]:
    """Return the names of all tensors; none for a folder without readable weights, which the loader refuses."""
    names: set[str] = set()
    try:
        for file, indexed in checkpoint_files(folder).items():
            if indexed is None:
                with safe_open(file, framework="pt") as tensors:
                    names |= set(tensors.keys())
            else:
                names |= indexed
    except (ValueError, SafetensorError):
        return set()
    return names
