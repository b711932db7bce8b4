"""Which network does a config.json describe? The architectures that this engine computes, and how a config is refused.

A network is a class that is called as `model(input_ids, positions, metadata, kv_cache)`, with a static method
`read_config` from the dict of config.json to a `ModelConfig`. Its module is imported when a checkpoint asks for it.
Called by `execution/loader.py`; docs/adding_a_model.md shows how an architecture is added.
"""

import importlib
from typing import Any, Protocol

import torch

from nanovllm.layers.attention import AttentionMetadata
from nanovllm.models.config import ModelConfig

ARCHITECTURES = {  # by the name that config.json has in `architectures`: module and class in this folder
    "DeepseekV2ForCausalLM": "deepseek.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek.DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM": "gemma3.Gemma3ForCausalLM",
    "LlamaForCausalLM": "llama.LlamaForCausalLM",
    "MistralForCausalLM": "llama.MistralForCausalLM",
    "MixtralForCausalLM": "mixtral.MixtralForCausalLM",
    "Phi3ForCausalLM": "phi3.Phi3ForCausalLM",
    "Qwen2ForCausalLM": "qwen2.Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3.Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe.Qwen3MoeForCausalLM",
}


class CausalLM(Protocol):
    """What the engine asks of a network."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[num_tokens] each -> hidden states [num_tokens, hidden_size]; writes the new tokens' K and V to the cache."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""


def find_architecture(raw: dict[str, Any]) -> tuple[Any, ModelConfig]:
    """The class of the network, and its shape. ValueError if it is not one of ours, or asks for what ours cannot do."""
    refuse_quantised(raw)
    for name in raw.get("architectures") or ():
        if name in ARCHITECTURES:
            module, _, class_name = ARCHITECTURES[name].partition(".")
            model_class = getattr(importlib.import_module(f"nanovllm.models.{module}"), class_name)
            return model_class, model_class.read_config(raw)
    code = " (its code in auto_map is never run: trust_remote_code does not exist here)" if "auto_map" in raw else ""
    raise ValueError(
        f"architecture {raw.get('architectures')} is not supported{code}; supported: {', '.join(ARCHITECTURES)}"
    )


def refuse_quantised(raw: dict[str, Any]) -> None:
    """Quantised weights would be read as if they were plain ones, or not find their places."""
    for field in ("quantization_config", "compression_config"):
        if (found := raw.get(field)) is not None:
            details = found if isinstance(found, dict) else {}
            name = details.get("quant_method") or details.get("format") or found
            raise ValueError(
                f"config.json has a {field}: the weights are quantised with {name}, which is not supported; "
                f"take the same model in bfloat16, float16 or float32"
            )
