"""gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925): 20b and 120b.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

Every second layer, from the first on, sees a window only. Each head of attention has a sink (`masking.py`). All
projections have biases, also those of the experts. Gates are clamped. Checkpoints hold the experts' weights in MXFP4
(`weights/mxfp4.py`), all experts of a layer in one tensor, in which the rows of gate and up alternate.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nanovllm.checks import check_number
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import RMSNorm
from nanovllm_extras.models.decoder import CausalLM, DecoderModel, LayerClass
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.llama import LlamaAttention
from nanovllm_extras.models.masking import SinkAttention
from nanovllm_extras.models.moe import Experts, MoeConfig, Router, read_experts
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, refuse_partial_rotary
from nanovllm_extras.models.window_layers import FULL, SLIDING, layer_types_of, read_windows

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
STORED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_blocks|_bias|)")


@dataclass(frozen=True)
class GptOssConfig(MoeConfig):
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


def read_gpt_oss_config(raw: RawConfig) -> GptOssConfig:
    """Read a gpt-oss config.json. `hidden_act` has no effect, neither here nor in transformers."""
    raw = {"attention_bias": True, **raw}
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw["rope_parameters"] = YARN
    common = read_common(raw, 131072, rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=raw.get("head_dim", 64))
    refuse_partial_rotary(raw)
    experts = read_experts(raw, ("num_local_experts", "num_experts"), 128, 4)
    experts["moe_intermediate_size"] = common["intermediate_size"]
    for name, default in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        experts[name] = raw.get(name, default)
        check_number(f"config.json: {name}", experts[name], 0)
    default_types = [FULL if i % 2 else SLIDING for i in range(common["num_hidden_layers"])]
    windows = read_windows(layer_types_of(raw, default_types), raw.get("sliding_window", 128))
    options = tuple(replace(one, has_sinks=True) for one in windows["attention_options"])
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"], theta=150_000.0)
    return GptOssConfig(**{**common, **experts, **windows, "attention_options": options}, rope=rope)


class OnceRoundedRMSNorm(RMSNorm):
    """A norm that rounds only the product with the weight."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalised * self.weight.float()).to(x.dtype)


class GptOssAttention(LlamaAttention):
    def __init__(self, config: GptOssConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__(config, backend, layer)
        self.attention = SinkAttention(backend, config.attention_options[layer], config.num_attention_heads)


class ClampedSwiGLU(nn.Module):
    """The gate of the experts: silu with a factor of `alpha` in its sigmoid, and inputs up to `limit`."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute gate * sigmoid(alpha * gate) * (up + 1). gate, up: [num_tokens, intermediate_size] -> as gate"""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


class GptOssExpert(GatedMLP):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config.hidden_size, config.moe_intermediate_size, bias=True)
        self.activation = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)


class GptOssBlock(nn.Module):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = Router(config.hidden_size, config.num_experts, bias=True)
        self.experts = Experts(GptOssExpert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        logits, expert_ids = self.router(x).topk(self.top_k)  # [num_tokens, top_k] each
        return self.experts(x, expert_ids, logits.softmax(-1))  # [num_tokens, hidden_size]


class GptOssDecoderLayer(nn.Module):
    def __init__(self, config: GptOssConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.input_layernorm = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GptOssAttention(config, backend, layer)
        self.post_attention_layernorm = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GptOssBlock(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class GptOssModel(DecoderModel):
    def __init__(self, config: GptOssConfig, backend: TorchAttention, layer_class: LayerClass) -> None:
        super().__init__(config, backend, layer_class)
        self.norm = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)


class GptOssForCausalLM(CausalLM):
    read_config = staticmethod(read_gpt_oss_config)
    layer_class = GptOssDecoderLayer
    model_class = GptOssModel

    def rename_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the network, by their names, that one tensor of a checkpoint holds.

        Of all experts of a layer: weights [num_experts, in, out], or [num_experts, out, in] if they were in MXFP4, and
        biases [num_experts, out].
        """
        match = STORED_EXPERTS.fullmatch(name)
        if match is None:
            yield name.replace(".self_attn.sinks", ".self_attn.attention.sinks"), tensor
            return
        path, projection, kind = match.groups()
        parameter = "bias" if kind == "_bias" else "weight"
        for i, expert in enumerate(tensor):
            rows = expert if kind else expert.T  # [out, in], or [out]
            parts = {"down": rows} if projection == "down" else {"gate": rows[0::2], "up": rows[1::2]}
            for part, one in parts.items():
                yield f"{path}.{i}.{part}_proj.{parameter}", one
