"""The network of all programs: Qwen3 on one page, in plain PyTorch and float32, with its tokenizer.

    token ids → embedding → layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

The network keeps no K and V, and does not depend on sequences. All tokens of a step are in one row, one sequence after
the other. Each layer calls the program's function `attend(layer, q, k, v)`. The programs differ only in this function,
and in how they choose the tokens of a step. nanovllm's own Qwen3 computes the same (`nanovllm/models/qwen3.py`).
"""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

TINY_QWEN3 = Path(__file__).parents[1] / "nanovllm" / "assets" / "tiny-qwen3"  # the bundled model


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q: [num_tokens, num_heads, head_dim], k and v: [num_tokens, num_kv_heads, head_dim]) -> shaped like q"""


class Model:
    """A Qwen3 model, read from a folder with config.json, *.safetensors and, to encode and decode, tokenizer.json."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config
        others = [config.get(name) for name in ("rope_scaling", "use_sliding_window", "attention_bias")]
        if config["model_type"] != "qwen3" or rope.get("rope_type", "default") != "default" or any(others):
            raise ValueError(
                f"labs/ reads only plain Qwen3 models, got model_type {config['model_type']!r} in {folder}; "
                "rope scaling, sliding windows and attention biases are not supported"
            )
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.max_model_len: int = config["max_position_embeddings"]
        self.vocab_size: int = config["vocab_size"]
        self.eps: float = config["rms_norm_eps"]
        self.frequencies = rope["rope_theta"] ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)  # [head_dim / 2]
        self.end_token_ids = read_end_token_ids(folder, config)
        # all tensors by their names in the checkpoint, as float32
        files = sorted(folder.glob("*.safetensors"))
        self.weights = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
        self.folder = folder

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer.json").exists()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states: [num_tokens, hidden_size].

        input_ids, positions: [num_tokens], of one sequence or of many
        """
        x = self.weights["model.embed_tokens.weight"][input_ids]  # [num_tokens, hidden_size]
        angles = positions[:, None, None] * self.frequencies  # [num_tokens, 1, head_dim / 2]; the 1 is for the heads
        cos, sin = angles.cos(), angles.sin()
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            y = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self.linear(y, f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, self.head_dim)) for part in "qkv"
            )  # [num_tokens, num_heads or num_kv_heads, head_dim]
            q = rotate(self.norm(q, f"{name}.self_attn.q_norm"), cos, sin)
            k = rotate(self.norm(k, f"{name}.self_attn.k_norm"), cos, sin)
            x = x + self.linear(attend(layer, q, k, v).flatten(1), f"{name}.self_attn.o_proj")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = self.linear(y, f"{name}.mlp.gate_proj"), self.linear(y, f"{name}.mlp.up_proj")
            x = x + self.linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        return self.norm(x, "model.norm")

    @torch.inference_mode()
    def next_tokens(self, hidden: Tensor) -> list[int]:
        """Return the most likely next token of each row of hidden states: [num_rows, hidden_size]."""
        return self.logits(hidden).argmax(dim=-1).tolist()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return a score for each token of the vocabulary: [..., hidden_size] -> [..., vocab_size]"""
        return F.linear(hidden, self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]))

    def encode(self, question: str) -> list[int]:
        """Return the token ids of a conversation's first question, in Qwen's chat format."""
        return self.tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) of a head by the angle position * frequency[i]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def read_end_token_ids(folder: Path, config: dict) -> set[int]:
    file = folder / "generation_config.json"
    ids = (json.loads(file.read_text()) if file.exists() else config).get("eos_token_id")
    return set(ids if isinstance(ids, list) else [] if ids is None else [ids])
