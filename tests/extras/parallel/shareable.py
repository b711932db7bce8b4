"""Checkpoints of all architectures whose sizes 2 and 3 divide, but for the vocabulary, and a tokenizer for all."""

import functools

import torch

from tests.extras.models.architectures import ARCHITECTURES, Checkpoints
from tests.tiny_tokenizers import byte_level

VOCAB_SIZE = 271  # a prime, and just what the tokenizer has
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,  # where six heads share the width, each has 32
    "intermediate_size": 96,
}
LATENT = ("deepseek_v2", "deepseek_v3")


class ShareableCheckpoints:
    def __init__(self, root):
        self._checkpoints = Checkpoints(root)

    @functools.cache  # noqa: B019 (lives as long as the tests)
    def make(self, name, variant, num_kv_heads, num_heads=6):
        """(folder with a tokenizer, transformers model in float32)"""
        fields = {**SIZES, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
        if name in LATENT:
            fields["num_key_value_heads"] = num_heads
        if "moe_intermediate_size" in ARCHITECTURES[name].shape:
            fields["moe_intermediate_size"] = 48
        folder, model = self._checkpoints.make(name, variant, **fields)
        byte_level().save_pretrained(folder)
        return folder, model

    def options(self, name, variant):
        """Of an engine."""
        return {"dtype": "float32", "device": "cpu", **self._checkpoints.engine_options(name, variant)}


def likeliest(model, prompt, output):
    """The token that `transformers` finds likeliest behind the prompt and each part of the output."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0]  # [num_tokens, vocab_size]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
