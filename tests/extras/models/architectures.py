"""The architectures under test, and random small checkpoints of them: made with `transformers`, which is the oracle.

To test another one, add an entry to `ARCHITECTURES`: its config and model class, a small shape, and variants of it,
of which each sets what may go wrong. `test_architectures.py` does the rest.
"""

import copy
import dataclasses
import functools
import random

import torch
import transformers

from tests.extras.models.hybrid_checkpoints import continue_all

IS_4 = transformers.__version__.startswith("4.")

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large, so that greedy outputs vary and margins are wide
}
HEADS_SHARE_THE_WIDTH = {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1}  # head_dim 32


def rope(rope_type, theta=10000.0, **parameters):
    """As the installed transformers takes it."""
    if not IS_4:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": rope_type, **parameters}}
    share = {key: parameters.pop(key) for key in ("partial_rotary_factor",) if key in parameters}
    type_key = "type" if rope_type == "longrope" else "rope_type"  # Phi-3's config knows only the older name
    scaling = None if rope_type == "default" else {type_key: rope_type, **parameters}
    return {"rope_theta": theta, "rope_scaling": scaling, **share}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "theta": rope("default", 500.0),
    "linear": rope("linear", factor=2.5),
    "dynamic": rope("dynamic", factor=4.0),
    "llama3": rope("llama3", 500.0, **LLAMA3),
    "yarn": rope("yarn", **YARN),
    "yarn that is set by hand": rope("yarn", 300.0, **YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3),
    "yarn with mscales": rope("yarn", **YARN, mscale=1.5, mscale_all_dim=0.7),
}
HEADS = {  # ratios of 1, 4 and 3
    "MHA": {"num_key_value_heads": 4, "seed": 1},
    "MQA": {"num_key_value_heads": 1},
    "GQA of 3": {"num_attention_heads": 6, "hidden_size": 96},
}
FACTORS = [1.0 + 0.2 * i for i in range(16)]


def longrope(original, share=1.0):
    factors = FACTORS[: int(16 * share)]
    both = {"short_factor": factors, "long_factor": [2 * f for f in factors], "partial_rotary_factor": share}
    return {"original_max_position_embeddings": original, **rope("longrope", **both)}


# of prompts: lengths beside multiples of the block sizes
LENS = (1, 7, 16, 33, 48, 61)
LONG_LENS = (9, 16, 33, 48, 61)
SHORT_LENS = (1, 7, 16, 33, 48, 52)
MAX_TOKENS = 9  # that follow
NO_FIELDS = ("seed", "lens", "max_model_len")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """`variants`: overrides of `shape` by name; the first ones are run by default, as many as `num_default`.

    Three of their keys are not fields of the config: `seed` of the weights, `lens` of the prompts, `max_model_len`.
    """

    kind: str  # names the classes of transformers, which take seconds to import
    shape: dict
    variants: dict
    num_default: int = 1
    bf16_error: float = 0.06
    """Relative error of logits in bfloat16 that the `cpu` backend may have."""
    bf16_ratio: float = 1.5
    """And how many times that of `transformers` this error may be."""

    @property
    def config_class(self):
        return getattr(transformers, f"{self.kind}Config")

    @property
    def class_name(self):
        return f"{self.kind.removesuffix('Text')}ForCausalLM"

    @property
    def model_class(self):
        return getattr(transformers, self.class_name)


OF_GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 20}
LAYERS_OF_GEMMA = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES = {
    "llama": Architecture(
        "Llama",
        SHAPE,
        {
            "llama3": ROPES["llama3"],
            "plain": {},
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "width shared": HEADS_SHARE_THE_WIDTH,
            "gelu": {"hidden_act": "gelu_pytorch_tanh"},
            **HEADS,
            **ROPES,
        },
    ),
    "mistral": Architecture(
        "Mistral",
        SHAPE,
        {
            "short window": {"sliding_window": 9},
            "long window": {"sliding_window": 100},
            "window of one": {"sliding_window": 1},
            "no window": {"sliding_window": None, "tie_word_embeddings": True},
            "window and yarn": {"sliding_window": 20, **ROPES["yarn"]},
        },
    ),
    "qwen2": Architecture(
        "Qwen2",
        {**SHAPE, **HEADS_SHARE_THE_WIDTH},
        {
            "plain": {},
            "tied": {"tie_word_embeddings": True},
            "window in the upper layer": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            "yarn": ROPES["yarn"],
        },
    ),
    "qwen3": Architecture(
        "Qwen3",
        SHAPE,
        {
            "yarn": ROPES["yarn"],
            "window in the upper layer": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "biases": {"attention_bias": True},
            **HEADS,
        },
    ),
    "gemma3": Architecture(
        "Gemma3Text",
        {
            **SHAPE,
            "num_hidden_layers": 3,
            "layer_types": LAYERS_OF_GEMMA,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
        },
        {
            "capped": {"final_logit_softcapping": 5.0, "tie_word_embeddings": True},
            "plain": {},
            "long window": {"sliding_window": 100},
            "all windows": {"layer_types": ["sliding_attention"] * 3, "attention_bias": True},
            "no windows": {"layer_types": ["full_attention"] * 3},
        },
    ),
    "phi3": Architecture(
        "Phi3",
        {**SHAPE, **HEADS_SHARE_THE_WIDTH, "pad_token_id": None},
        {
            "partial": rope("default", partial_rotary_factor=0.75),
            "plain": {},
            "window": {"sliding_window": 9, "tie_word_embeddings": True},
            # all sequences of an engine have the long factors, or all have the short ones
            "longrope": {**longrope(8), "lens": LONG_LENS},
            "partial longrope": {**longrope(8, share=0.75), "lens": LONG_LENS},
            "short longrope": {**longrope(64), "lens": SHORT_LENS, "max_model_len": 64},
            "longrope of the model's length": longrope(256),
        },
    ),
}


# In bfloat16 a rounded hidden state may lead to another expert, in transformers as often as here, but not in the same
# place: errors are larger, and their ratio says little.
OF_EXPERTS = {"bf16_ratio": 8.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENT = {
    **SHAPE,
    "rms_norm_eps": 1e-2,  # far from that of the latents' norms, which is always 1e-6
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
WITH_MSCALES = {**YARN, "mscale": 0.9, "mscale_all_dim": 1.2}
ARCHITECTURES |= {
    "qwen3_moe": Architecture(
        "Qwen3Moe",
        {**SHAPE, **EXPERTS},
        {
            "normalised": {"norm_topk_prob": True},
            "plain": {},
            "a dense layer": {"mlp_only_layers": [0], "tie_word_embeddings": True},
            "every second layer": {"decoder_sparse_step": 2, "attention_bias": True},
            "all experts": {"num_experts_per_tok": 8},
            "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
            "window": {"use_sliding_window": True, "sliding_window": 9},
            "yarn": ROPES["yarn"],
            **HEADS,
        },
        bf16_error=0.25,
        **OF_EXPERTS,
    ),
    "mixtral": Architecture(
        "Mixtral",
        {**SHAPE, "num_local_experts": 4},
        {
            "plain": {},
            "window": {"sliding_window": 9, "tie_word_embeddings": True},
            "all experts": {"num_experts_per_tok": 4},
            "width shared": HEADS_SHARE_THE_WIDTH,
            **HEADS,
        },
        bf16_error=0.25,
        **OF_EXPERTS,
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2",
        {**LATENT, "n_shared_experts": 2, "topk_method": "greedy"},
        {
            "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "plain": {},
            "queries without a latent": {"q_lora_rank": None, "routed_scaling_factor": 1.7},
            "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "all layers with experts": {"first_k_dense_replace": 0},
            "no experts": {"first_k_dense_replace": 2},
            "yarn": ROPES["yarn"],
            "yarn with mscales": rope("yarn", **WITH_MSCALES),
            "long latent": {"kv_lora_rank": 112, "v_head_dim": 8},
            "latent of odd length": {"kv_lora_rank": 40, "qk_rope_head_dim": 24},
        },
        bf16_error=0.06,
        **OF_EXPERTS,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3",
        {**LATENT, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
        {
            "yarn with mscales": rope("yarn", **WITH_MSCALES),
            "plain": {},
            "one group": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
            "not normalised": {"norm_topk_prob": False},
            "halves rotated": {"rope_interleave": False, "q_lora_rank": None},
            "yarn": ROPES["yarn"],
            "linear": ROPES["linear"],
        },
        bf16_error=0.25,
        **OF_EXPERTS,
    ),
    "gpt_oss": Architecture(
        "GptOss",
        {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
        {
            "clamped": {"swiglu_limit": 0.7, "swiglu_alpha": 1.3, **rope("yarn", **YARN, truncate=False)},
            "plain": {},
            "tied, no biases": {"attention_bias": False, "tie_word_embeddings": True, **ROPES["yarn"]},
            "all windows": {"layer_types": ["sliding_attention"] * 2, **ROPES["linear"]},
            "no windows": {"layer_types": ["full_attention"] * 2},
            "all experts": {"num_experts_per_tok": 4},
            **HEADS,
        },
        bf16_error=0.25,
        **OF_EXPERTS,
    ),
    "granite": Architecture(
        "Granite",
        {**SHAPE, **HEADS_SHARE_THE_WIDTH, "pad_token_id": None},
        {
            "factors": {
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.6,
                "attention_multiplier": 0.3,
                "logits_scaling": 1.7,
            },
            "plain": {},
            "biases": {"attention_bias": True, "mlp_bias": True, "logits_scaling": 4},
            "tied, yarn": {"tie_word_embeddings": True, "attention_multiplier": 0.2, **ROPES["yarn"]},
        },
        bf16_error=0.08,
    ),
    "smollm3": Architecture(
        "SmolLM3",
        {**SHAPE, **HEADS_SHARE_THE_WIDTH, "num_hidden_layers": 3, "pad_token_id": None},
        {
            "every second layer is not rotated": {"no_rope_layer_interval": 2},
            "listed layers, yarn": {"no_rope_layers": [0, 1, 0], **ROPES["yarn"]},
            "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "windows": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9},
            "no layer is rotated": {"no_rope_layer_interval": 1},
        },
    ),
}
if IS_4:  # there DeepSeek-V2's experts have biases as well, and its scores lack the scale of yarn's `mscale_all_dim`
    for variant in ("biases", "yarn with mscales"):
        del ARCHITECTURES["deepseek_v2"].variants[variant]
    for name in ("swiglu_limit", "swiglu_alpha"):  # fields that came later
        del ARCHITECTURES["gpt_oss"].variants["clamped"][name]


class Checkpoints:
    """Made once for each architecture and variant, and what `transformers` makes of the prompts."""

    def __init__(self, root):
        self._root = root

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def make(self, name, variant, **others):
        """(folder, transformers model in float32); `others` are fields of the config too."""
        architecture = ARCHITECTURES[name]
        fields = {**architecture.shape, **architecture.variants[variant], **others}
        fields = {
            key: fields[key] for key in fields if key not in NO_FIELDS and (key, fields[key]) != ("head_dim", None)
        }
        torch.manual_seed(architecture.variants[variant].get("seed", 0))
        config = architecture.config_class(**fields, bos_token_id=None, eos_token_id=None)
        model = architecture.model_class(config).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "norm.weight", "sinks")):  # transformers starts them without effect
                parameter.data += 0.3 * torch.randn_like(parameter)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer += 0.3 * torch.randn_like(buffer)
        folder = self._root / f"{name}-{len(list(self._root.iterdir()))}"
        model.save_pretrained(folder, max_shard_size="60KB")
        return folder, model

    def prompts(self, name, variant):
        """Random tokens; the last two prompts begin with the same 40."""
        settings = {**ARCHITECTURES[name].shape, **ARCHITECTURES[name].variants[variant]}
        rng = random.Random(0)
        prompts = [[rng.randrange(settings["vocab_size"]) for _ in range(n)] for n in settings.get("lens", LENS)]
        prompts[-1][:40] = prompts[-2][:40]
        return prompts

    def engine_options(self, name, variant):
        return {key: value for key, value in ARCHITECTURES[name].variants[variant].items() if key == "max_model_len"}

    @functools.cache  # noqa: B019
    def greedy(self, name, variant):
        """Return `transformers`' continuation of each prompt, without a cache: each token recomputes all others."""
        _, model = self.make(name, variant)
        return [tokens for tokens, _ in continue_all(model, self.prompts(name, variant), MAX_TOKENS)]

    @functools.cache  # noqa: B019
    def logits(self, name, variant, dtype=torch.float32):
        """Of each position of the last prompt: [len, vocab_size]"""
        model = copy.deepcopy(self.make(name, variant)[1]).to(dtype)
        with torch.no_grad():
            return model(torch.tensor([self.prompts(name, variant)[-1]]), use_cache=False).logits[0].float()
