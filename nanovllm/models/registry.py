"""The network that a config.json describes: the architectures that this engine computes, and how a config is refused.

The module of an architecture is imported when a checkpoint asks for it: all but Qwen3's may be deleted.
Called by `checkpoint.py`; docs/adding_a_model.md shows how an architecture is added.
"""

import importlib
from typing import Any

from nanovllm.checks import extra, import_extra
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM

ARCHITECTURES = {  # by the name that config.json has in `architectures`: module and class in this folder
    "DeepseekV2ForCausalLM": "extras.models.deepseek.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "extras.models.deepseek.DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM": "extras.models.gemma3.Gemma3ForCausalLM",
    "LlamaForCausalLM": "extras.models.llama.LlamaForCausalLM",
    "MistralForCausalLM": "extras.models.llama.MistralForCausalLM",
    "MixtralForCausalLM": "extras.models.mixtral.MixtralForCausalLM",
    "Phi3ForCausalLM": "extras.models.phi3.Phi3ForCausalLM",
    "Qwen2ForCausalLM": "extras.models.qwen2.Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "models.qwen3.Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "extras.models.qwen3_moe.Qwen3MoeForCausalLM",
}


def find_architecture(raw: dict[str, Any]) -> tuple[type[CausalLM], ModelConfig]:
    """The class of the network, and its shape. ValueError for an architecture or a field that is not computed here."""
    check_stored_weights(raw)
    for name in raw.get("architectures") or ():
        if name in ARCHITECTURES:
            module, _, class_name = ARCHITECTURES[name].rpartition(".")
            with extra(module.replace(".", "/") + ".py", name):
                model_class = getattr(importlib.import_module(f"nanovllm.{module}"), class_name)
            return model_class, model_class.read_config(raw)
    code = " (its code in auto_map is never run: trust_remote_code does not exist here)" if "auto_map" in raw else ""
    raise ValueError(
        f"architecture {raw.get('architectures')} is not supported{code}; supported: {', '.join(ARCHITECTURES)}"
    )


def check_stored_weights(raw: dict[str, Any]) -> None:
    """ValueError if the checkpoint's weights are quantised in a way that is not known."""
    for field in ("quantization_config", "compression_config"):
        if raw.get(field) is not None:
            import_extra("quantization/stored", f"config.json's {field}").read_format(field, raw[field])
