"""What llama.cpp changes in the tensors of an architecture when it writes a GGUF file, and how to change it back.

    llama                rotates neighbours instead of halves: the rows of q and k are in another order
    qwen35, qwen35moe    repeats heads of keys as a whole: heads of values that share a key are apart. Norms are stored
                         as factors, not as their differences from one, and decays as −exp(A_log)
    lfm2, gemma4         have other names
    qwen35moe, gemma4    have the weights of all experts in one tensor

    heads of values that share the keys a and b    here a0 a1 b0 b1    in the file a0 b0 a1 b1

`gguf.py` reads the files. Its names come from the tables of the package `gguf`.
"""

import re
from typing import Any

import torch
from torch import Tensor

EXPERT = re.compile(r"((?:model|mtp)\.layers\.\d+)\.(?:mlp\.)?experts\.(\d+)\.(gate|up|down)_proj")
OF_VALUES = ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")  # rows are heads of values


class Tensors:
    """The tensors of an architecture that llama.cpp does not change. config: the shape of the whole network"""

    changed_names: tuple[tuple[str, str], ...] = ()
    """Ends of names here, and ends of names that the tables of `gguf` have."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def table_name(self, name: str) -> str:
        """Return the name of a tensor in the tables."""
        for ours, theirs in self.changed_names:
            if name.endswith(ours):
                return name.removesuffix(ours) + theirs
        return name

    def unused(self) -> list[str]:
        """Return names of tensors that files may have and the network does not need."""
        return []

    def is_unused(self, stored_name: str) -> bool:
        """Return whether a tensor of the file belongs to a part of the model that is not computed."""
        return False

    def row_order(self, path: str, num_rows: int) -> Tensor | None:
        """Return which rows of the file are the rows of a projection here, or None if they are the same."""
        return None

    def input_order(self, path: str, num_inputs: int) -> Tensor | None:
        """Return which columns of the file are the columns of a projection here, or None if they are the same."""
        return None

    def values(self, name: str, tensor: Tensor) -> Tensor:
        """Return the values of a tensor in floats here."""
        return tensor


class LlamaTensors(Tensors):
    def row_order(self, path: str, num_rows: int) -> Tensor | None:
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        num_heads = heads.get(path.rpartition(".")[2])
        if num_heads is None:
            return None
        pairs = torch.arange(num_rows).view(num_heads, -1, 2)  # [num_heads, head_dim / 2, 2]
        return pairs.transpose(1, 2).flatten()


class Qwen35Tensors(Tensors):
    changed_names = ((".dt_bias", ".dt_proj.bias"),)

    def is_unused(self, stored_name: str) -> bool:  # a head for multi-token prediction is a layer behind the others
        return stored_name.startswith(f"blk.{self.config.num_hidden_layers}.")

    def row_order(self, path: str, num_rows: int) -> Tensor | None:
        config, name = self.config, path.rpartition(".")[2]
        if name in OF_VALUES:
            return self.heads_of_values(num_rows)
        if name in ("in_proj_qkv", "conv1d"):  # the values are behind queries and keys
            num_values = config.linear_num_value_heads * config.linear_value_head_dim
            before = num_rows - num_values
            return torch.cat((torch.arange(before), before + self.heads_of_values(num_values)))
        return None

    def input_order(self, path: str, num_inputs: int) -> Tensor | None:
        return self.heads_of_values(num_inputs) if path.endswith("linear_attn.out_proj") else None

    def heads_of_values(self, num_rows: int) -> Tensor:
        """Return the places in the file of rows that belong to heads of values: [num_rows]"""
        rows = torch.arange(num_rows).view(-1, self.config.linear_num_key_heads, num_rows // self.num_value_heads)
        return rows.transpose(0, 1).flatten()

    @property
    def num_value_heads(self) -> int:
        return int(self.config.linear_num_value_heads)

    def values(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".A_log"):
            return (-tensor).log()
        is_norm = name.endswith("norm.weight") or name.startswith("mtp.pre_fc_norm")
        is_offset = is_norm and not name.endswith("linear_attn.norm.weight")
        return tensor - 1 if is_offset else tensor


class Lfm2Tensors(Tensors):
    changed_names = (("model.norm.weight", "model.embedding_norm.weight"),)


class Gemma4Tensors(Tensors):
    changed_names = ((".layer_scalar", ".layer_scalar.weight"),)

    def unused(self) -> list[str]:
        """Return the K and V of layers that share those of others."""
        sharing = [i for i, place in enumerate(self.config.kv_places) if not place.is_owner]
        names = ("k_proj", "v_proj", "k_norm")
        return [f"model.layers.{i}.self_attn.{name}.weight" for i in sharing for name in names]


ARCHITECTURES: dict[str, type[Tensors]] = {  # by the name in a file
    "llama": LlamaTensors,
    "qwen2": Tensors,
    "qwen3": Tensors,
    "qwen35": Qwen35Tensors,
    "qwen35moe": Qwen35Tensors,
    "lfm2": Lfm2Tensors,
    "gemma4": Gemma4Tensors,
}
