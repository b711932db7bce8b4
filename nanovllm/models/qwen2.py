"""Qwen2 and Qwen2.5, dense (Yang et al. 2024, https://arxiv.org/abs/2407.10671): Llama's network, in which queries,
keys and values have biases, and the output of attention has none.

`llama.py` is the network; `qwen_config.py` sets the biases. Qwen3 has dropped them, and normalises queries and keys.
"""

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen_config import read_qwen2_config


class Qwen2ForCausalLM(LlamaForCausalLM):
    read_config = staticmethod(read_qwen2_config)
