"""The architectures that this engine computes beyond the core's, and how a config.json is refused.

The module of an architecture is imported when a checkpoint asks for it. Called by `checkpoint.py`;
docs/adding_a_model.md shows how an architecture is added.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.checks import check_list
from nanovllm_extras.models.classifier import decoder_fields
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.network_config import NetworkConfig

ARCHITECTURES = {  # by the name that config.json has in `architectures`: module and class in this folder
    "DeepseekV2ForCausalLM": "deepseek.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek.DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM": "gemma3.Gemma3ForCausalLM",
    "Gemma4ForCausalLM": "gemma4.Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "gemma4.Gemma4ForConditionalGeneration",
    "GptOssForCausalLM": "gpt_oss.GptOssForCausalLM",
    "GraniteForCausalLM": "granite.GraniteForCausalLM",
    "Lfm2ForCausalLM": "lfm2.Lfm2ForCausalLM",
    "LlamaForCausalLM": "llama.LlamaForCausalLM",
    "MistralForCausalLM": "llama.MistralForCausalLM",
    "MixtralForCausalLM": "mixtral.MixtralForCausalLM",
    "Phi3ForCausalLM": "phi3.Phi3ForCausalLM",
    "Qwen2ForCausalLM": "qwen2.Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3_variants.Qwen3VariantForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe.Qwen3MoeForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5.Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_5.Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe.Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe.Qwen3_5MoeForConditionalGeneration",
    "SmolLM3ForCausalLM": "smollm3.SmolLM3ForCausalLM",
}


def find_architecture(raw: dict[str, Any], max_model_len: int | None = None) -> tuple[type[CausalLM], NetworkConfig]:
    """Return the class of the network, and its shape. ValueError for an architecture or field that is not computed.

    `max_position_embeddings` of the shape is the longest sequence that the network takes, with what rotary positions
    for longer contexts add. `max_model_len` is the engine's option of this name.
    """
    raw = decoder_fields(text_fields(raw))
    check_kinds(raw)
    model_class = find_class(raw)
    if model_class is None:
        code = " (its code in auto_map is never run: trust_remote_code does not exist here)" * ("auto_map" in raw)
        raise ValueError(
            f"architecture {raw.get('architectures')} is not supported{code}; supported: {', '.join(ARCHITECTURES)}"
        )
    shape = model_class.read_config(raw)
    if not model_class.is_length_scaled:
        longest = shape.rope.longest(shape.max_position_embeddings, max_model_len)
        shape = replace(shape, max_position_embeddings=longest)
    choose = getattr(model_class, "choose", None)
    return (choose(shape) if choose else model_class), shape


def find_class(raw: dict[str, Any]) -> Any:
    """Return the class that reads this config.json, or None if the architecture is not supported."""
    for given in raw.get("architectures") or ():
        name = re.sub("Model$", "ForCausalLM", str(given))  # the network without its output layer is called Qwen3Model
        if name in ARCHITECTURES:
            module, _, class_name = ARCHITECTURES[name].rpartition(".")
            return getattr(importlib.import_module(f"nanovllm_extras.models.{module}"), class_name)
    return None


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text network, which a checkpoint with a vision part nests in `text_config`.

    A field beside `text_config` replaces the same field in it.
    """
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, dict):
        raise TypeError(f"config.json: text_config must be an object, got {nested!r}")
    return {**nested, **{name: value for name, value in raw.items() if name != "text_config" and value is not None}}


def check_kinds(raw: Mapping[str, object]) -> None:
    """Raise TypeError unless the fields that hold other values are objects, or lists, or null."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(name), dict | None):
            raise TypeError(f"config.json: {name} must be an object such as {{'rope_type': 'linear', 'factor': 2.0}}, "
                            f"got {raw[name]!r}")  # fmt: skip
    for name in ("architectures", "layer_types", "mlp_only_layers", "no_rope_layers", "full_attn_idxs"):
        check_list(f"config.json: {name}", raw.get(name), "values")
