"""Find out whether a model scores a pair of texts by two of its tokens, or by embeddings.

`models/classifier.py` explains the field `classifier_from_token`, which decides this. Without it, a score is the cosine
of two embeddings.
"""

import re
from dataclasses import dataclass

from nanovllm.loader import read_json
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.models.classifier import TOKENS, classifier_tokens
from nanovllm_extras.weights.checkpoint_options import overridden

OWN_ROLES = tuple(re.compile(rf"""["']{role}["']""") for role in ("query", "document"))


@dataclass(frozen=True)
class Classifier:
    """A decoder whose answer, "no" or "yes", is the score of a pair of texts."""

    token_ids: tuple[int, int]
    """Those of no and yes."""
    has_template: bool
    """Whether the tokenizer's chat template writes messages of the roles `query` and `document`."""


def find_classifier(engine: LLMEngine) -> Classifier | None:
    """Return how the model scores pairs by its tokens; None if it scores them by embeddings.

    Raises ValueError or TypeError if the tokens cannot be used.
    """
    tokens = classifier_tokens(read_raw_config(engine))
    if tokens is None:
        return None
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"{TOKENS} needs a tokenizer, but this model has none; leave it out")
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        raise ValueError(f"{TOKENS} must have two tokens of the vocabulary, got {unknown[0]!r}, which is none")
    if not engine.parts.model_config.has_head:
        raise ValueError(f"{TOKENS} needs an output layer, but the checkpoint has no lm_head; leave it out")
    template = getattr(tokenizer, "chat_template", None) or ""
    has_template = all(role.search(str(template)) for role in OWN_ROLES)
    return Classifier((vocabulary[tokens[0]], vocabulary[tokens[1]]), has_template)


def read_raw_config(engine: LLMEngine) -> dict[str, object]:
    """Return the values of config.json, with the engine's overrides."""
    return overridden(read_json(engine.runner.folder / "config.json"), engine.config.hf_overrides or {})
