"""Qwen2 and Qwen2.5, dense (Yang et al. 2024, https://arxiv.org/abs/2407.10671): Llama's network, in which queries,
keys and values have biases, and the output of attention has none.

`llama.py` is the network. Qwen3 has dropped the biases, and normalises queries and keys.
"""

from dataclasses import replace

from nanovllm_extras.models.llama import LlamaForCausalLM
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.qwen3_variants import read_qwen3_config
from nanovllm_extras.models.raw_config import RawConfig


def read_qwen2_config(raw: RawConfig) -> NetworkConfig:
    config = read_qwen3_config(raw, head_dim=None)
    return replace(config, qkv_bias=True, o_bias=False)  # always so, the file does not say it


class Qwen2ForCausalLM(LlamaForCausalLM):
    read_config = staticmethod(read_qwen2_config)
