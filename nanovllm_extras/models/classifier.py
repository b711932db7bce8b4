"""Decoders that classify by two of their tokens, and checkpoints whose classifier is a layer of its own.

A reranker such as Qwen3-Reranker is a decoder: the logits of "no" and "yes" after a prompt are its judgement. As in
vLLM, the field `classifier_from_token` of config.json, or of `hf_overrides`, names the two tokens:

    {"classifier_from_token": ["no", "yes"]}

vLLM's users also set `architectures` to the name of a classifier (`Qwen3ForSequenceClassification`). The network is the
same decoder here. Without the two tokens, such a name means a cross-encoder, whose layer of scores is not computed.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.checks import check_list

CROSS_ENCODER = "ForSequenceClassification"
TOKENS = "classifier_from_token"


def decoder_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json, with the decoder's architecture if two of its tokens are the classifier.

    Raises ValueError for a cross-encoder, TypeError or ValueError for bad names of tokens.
    """
    names = check_list("config.json: architectures", raw.get("architectures"), "values")
    if not any(str(name).endswith(CROSS_ENCODER) for name in names):
        return raw
    if classifier_tokens(raw) is None:
        raise ValueError(
            f"architecture {list(names)} is a cross-encoder, whose layer of scores is not computed. A decoder that "
            f'answers with one of two tokens, such as Qwen3-Reranker, needs hf_overrides={{"{TOKENS}": ["no", "yes"]}}'
        )
    return {**raw, "architectures": [str(name).replace(CROSS_ENCODER, "ForCausalLM") for name in names]}


def classifier_tokens(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the tokens of the answers no and yes, in this order; None if the model does not classify."""
    given = raw.get(TOKENS)
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(isinstance(token, str) for token in given):
        raise TypeError(f'{TOKENS} must be a list of two tokens such as ["no", "yes"], got {given!r}')
    if len(given) != 2 or given[0] == given[1]:
        raise ValueError(f'{TOKENS} must have two different tokens, such as ["no", "yes"], got {list(given)}')
    return given[0], given[1]
