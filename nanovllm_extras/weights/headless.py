"""Find out which output layer a checkpoint has, whatever its config.json says: none, the embeddings, or one of its own.

`full_runner.py` calls `with_stored_head`. Without an output layer, as Qwen3-Embedding-8B, a model computes embeddings,
but no logits.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.loader import checkpoint_files
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.weights.load_model import BARE

logger = logging.getLogger(__name__)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_stored_head(shape: NetworkConfig, folder: Path) -> NetworkConfig:
    """Return `shape`, whose embeddings are tied only if the checkpoint has no output layer that differs from them."""
    names = names_in(folder)
    own = {name for name in names if name.startswith("lm_head.")}
    if not shape.tie_word_embeddings:
        return without_head(shape) if "embed_tokens.weight" in names and not own else shape
    embeddings = [name for name in names if BARE.sub("model.", name) == EMBEDDINGS]
    if not own or not embeddings or (own == {HEAD} and are_equal(folder, HEAD, embeddings[0])):
        return shape
    logger.warning("config.json in %s ties the embeddings, but the file has an lm_head of its own, which is used, as "
                   "in transformers", folder)  # fmt: skip
    return replace(shape, tie_word_embeddings=False)


def without_head(shape: NetworkConfig) -> NetworkConfig:
    """Return `shape` with `has_head` False: of a network that was saved without its output layer.

    In such a checkpoint no name begins with `model.`. The engine samples a token in every step, which nobody sees after
    the prompt of an embedding. The embeddings serve as its output layer, so they are tied.
    """
    return replace(shape, tie_word_embeddings=True, has_head=False)


def are_equal(folder: Path, *names: str) -> bool:
    """Return whether tensors of a checkpoint have the same values."""
    found = []
    for file, indexed in checkpoint_files(folder).items():
        with safe_open(file, framework="pt") as tensors:
            present = set(tensors.keys()) & (set(names) if indexed is None else set(names) & indexed)
            found += [tensors.get_tensor(name) for name in present]
    return all(torch.equal(found[0], one) for one in found)


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
