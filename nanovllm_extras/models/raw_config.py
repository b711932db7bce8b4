"""The fields of config.json that the readers in this folder read, with the types that a valid file has.

Nothing has checked them yet: each reader checks what it reads.
"""

from typing import Any, TypedDict


class RopeParameters(TypedDict, total=False):
    """The numbers of a scaled RoPE (`rope_types.py`), by the names of config.json."""

    factor: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool | None
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    short_factor: list[float]
    long_factor: list[float]


class RawConfig(TypedDict, total=False):
    # what all networks have
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    rms_norm_eps: float | None
    tie_word_embeddings: bool | None
    attention_bias: bool | None
    mlp_bias: bool | None
    hidden_act: str
    initializer_range: float
    dtype: str
    torch_dtype: str
    quantization_config: dict[str, Any] | None
    # positions
    rope_theta: float | None
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    rope_local_base_freq: float | None
    partial_rotary_factor: float | None
    original_max_position_embeddings: int
    # how layers attend
    layer_types: list[str]
    use_sliding_window: bool
    sliding_window: int | None
    sliding_window_pattern: int
    max_window_layers: int
    no_rope_layers: list[int]
    no_rope_layer_interval: int
    use_bidirectional_attention: bool | str | None
    query_pre_attn_scalar: float
    # experts
    norm_topk_prob: bool | None
    mlp_only_layers: list[int] | None
    moe_layer_freq: int
    q_lora_rank: int | None
    routed_scaling_factor: float | None
    scoring_func: str
    topk_method: str
    # Gemma
    hidden_activation: str
    final_logit_softcapping: float | None
    attention_k_eq_v: bool
    global_head_dim: int
    num_global_key_value_heads: int | None
    num_kv_shared_layers: int
    per_layer_config: dict[str, dict[str, int]] | None
    hidden_size_per_layer_input: int | None
    vocab_size_per_layer_input: int
    # LFM2 and Qwen3.5
    attn_output_gate: bool | None
    mamba_ssm_dtype: str | None
    full_attn_idxs: list[int] | None
    tie_embedding: bool | None
    norm_eps: float | None
    conv_L_cache: int | None
    conv_bias: bool | None
    block_ff_dim: int | None
    block_auto_adjust_ff_dim: bool | None
    block_ffn_dim_multiplier: float | None
    block_multiple_of: int | None
