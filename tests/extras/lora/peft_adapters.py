"""Adapters of the bundled model, made by PEFT, which is the oracle too."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from nanovllm import TINY_QWEN3

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(folder, seed=0, base=TINY_QWEN3, scale=0.2, **options):
    """Save a random adapter to `folder`, and return PEFT's model with it in float32, unmerged.

    scale: of the random numbers, large enough to change answers. options: the fields of `LoraConfig`
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": ALL, **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model
