"""Random small checkpoints of Gemma 4, made with `transformers`, and its own continuations."""

import functools
import random

import torch
import transformers

from tests.extras.models.hybrid_checkpoints import LENS, continue_all

WINDOW, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "vocab_size": 200,
    "vocab_size_per_layer_input": 210,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "layer_types": [WINDOW, FULL, WINDOW, WINDOW, WINDOW, FULL],
    "num_kv_shared_layers": 2,  # of layers 3 and 1
    "sliding_window": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large, so that greedy outputs vary and margins are wide
}
NOT_SHARED = {"num_kv_shared_layers": 0}
K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}
VARIANTS = {
    "plain": {},
    "capped and tied": {"final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "keys are values": {**K_IS_V, **NOT_SHARED, "hidden_size_per_layer_input": 0},  # as 31B
    "keys are shared values": K_IS_V,
    "experts": {**EXPERTS, **NOT_SHARED, **K_IS_V, "hidden_size_per_layer_input": 0},  # as 26B-A4B
    "experts, shared keys": EXPERTS,
    "wide layers": {"use_double_wide_mlp": True},
    "nothing shared": NOT_SHARED,
    "biases": {"attention_bias": True},
    "long window": {"sliding_window": 100},
    "window of one": {"sliding_window": 1},
    "heads of one size": {"global_head_dim": 32},
    "no windows": {"layer_types": [FULL] * 6},
    "silu": {"hidden_activation": "silu"},
    "the usual layers": {"layer_types": None, **NOT_SHARED},
    "other angles": {
        "rope_parameters": {
            WINDOW: {"rope_type": "default", "rope_theta": 300.0},
            FULL: {"rope_type": "proportional", "rope_theta": 77.0, "partial_rotary_factor": 0.4, "factor": 2.0},
        }
    },
    "all pairs rotate": {
        "rope_parameters": {
            WINDOW: {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            FULL: {"rope_type": "default", "rope_theta": 77.0},
        }
    },
}


def make_config(**fields):
    return transformers.Gemma4TextConfig(**{**GEMMA4, **fields}, bos_token_id=None, eos_token_id=None)


def set_weights_that_matter(model):
    """Give an effect to weights that `transformers` starts without any."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "norm.weight", "norm_1.weight", "norm_2.weight", ".scale", "expert_scale")):
            tensor.data += 0.3 * torch.randn_like(tensor)
        if name.endswith("q_norm.weight"):  # scores have no other scale
            tensor.data *= 0.3
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.6, 1.4)


def make_gemma4(folder, **fields):
    """(folder, transformers model in float32)"""
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(make_config(**fields)).eval()
    set_weights_that_matter(model)
    model.save_pretrained(folder)
    return folder, model


class Gemma4Checkpoints:
    """Each variant is made once, as are the continuations that `transformers` computes without a cache."""

    def __init__(self, root):
        self._root = root

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def make(self, variant="plain"):
        """(folder, transformers model in float32)"""
        return make_gemma4(self._root / f"gemma4-{len(list(self._root.iterdir()))}", **VARIANTS[variant])

    def prompts(self):
        """Random tokens; the last two prompts begin with the same 40."""
        rng = random.Random(0)
        prompts = [[rng.randrange(GEMMA4["vocab_size"]) for _ in range(n)] for n in LENS]
        prompts[-1][:40] = prompts[-2][:40]
        return prompts

    @functools.cache  # noqa: B019
    def greedy(self, variant="plain"):
        """For each prompt: its continuation, and the log-probability of each of its tokens."""
        _, model = self.make(variant)
        return continue_all(model, self.prompts())
