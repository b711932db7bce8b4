"""Write GGUF files of random weights in the shapes of Qwen3 and Qwen3.5, for llama.cpp. It needs gguf.

The files are like those of converted checkpoints: matrices in the model's dtype, norms in float32, a tied head, no
tokenizer. `llamacpp.py` calls `dummy_gguf`.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.common import ModelShape, read_config
from benchmarks.layer_shapes import DeltaShape

WEIGHT_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}


def dummy_gguf(folder: Path, dtype: str, seed: int) -> Path:
    """Return a GGUF file of the model's shape with random weights, written at the first call and kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "nanovllm-dummy-gguf"
    path = cache / f"{folder.name}-{dtype}-{seed}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")  # an interrupted run must not look finished
        write_dummy_gguf(part, folder, dtype, seed)
        part.replace(path)
    return path


def architecture_of(folder: Path) -> str:
    """Return llama.cpp's name of the architecture."""
    return "qwen3" if ModelShape.from_folder(folder).delta is None else "qwen35"


def write_dummy_gguf(path: Path, folder: Path, dtype: str, seed: int) -> None:
    write_gguf(path, folder, dtype, random_weights(folder, seed))


def random_weights(folder: Path, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Draw the matrices of a model. Norms are neutral, and the states of a hybrid decay."""
    rng = np.random.default_rng(seed)
    std = np.float32(read_config(folder)["initializer_range"])
    for name, size in tensor_shapes(ModelShape.from_folder(folder)).items():
        if len(size) == 1:
            yield name, np.full(size, -1 if name.endswith("ssm_a") else 1, dtype=np.float32)
        else:
            yield name, rng.standard_normal(size, dtype=np.float32) * std


def write_gguf(path: Path, folder: Path, dtype: str, weights: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write float32 weights with their GGUF names, and the sizes in the folder's config.json.

    `ssm_a` is the negative factor of a head's decay, -exp(A_log). Weights of norms are factors, not differences from
    one. If several value heads use one key head, the heads `i` and `i + num_key_heads` use the same one.
    """
    shape, raw = ModelShape.from_folder(folder), read_config(folder)
    if not raw.get("tie_word_embeddings"):
        raise ValueError("--engine llamacpp writes dummy weights for models with tied embeddings only")
    writer = gguf.GGUFWriter(path, architecture_of(folder))
    add_sizes(writer, shape, raw)
    for name, weight in weights:
        kind = WEIGHT_TYPES["float32" if weight.ndim == 1 or "conv1d" in name else dtype]
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, shape: ModelShape, raw: dict[str, Any]) -> None:
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    rope = raw.get("rope_parameters") or raw
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    if shape.delta is not None:
        add_hybrid_sizes(writer, shape, shape.delta, raw)


def add_hybrid_sizes(writer: gguf.GGUFWriter, shape: ModelShape, delta: DeltaShape, raw: dict[str, Any]) -> None:
    rope = raw.get("rope_parameters") or raw
    half = int(shape.head_dim * rope["partial_rotary_factor"]) // 2
    writer.add_rope_dimension_count(2 * half)
    sections = [(half + 2) // 3, (half + 1) // 3, half // 3, 0]  # time, height, width of images
    writer.add_rope_dimension_sections(sections)
    writer.add_ssm_conv_kernel(delta.conv_width)
    writer.add_ssm_inner_size(delta.value_size)
    writer.add_ssm_state_size(delta.key_dim)  # of values too
    writer.add_ssm_time_step_rank(delta.num_value_heads)
    writer.add_ssm_group_count(delta.num_key_heads)
    interval = delta.attends.index(True) + 1
    writer.add_full_attention_interval(interval)
    if delta.attends != tuple((i + 1) % interval == 0 for i in range(shape.num_layers)):
        raise ValueError(f"--engine llamacpp needs every n-th layer to attend, got {raw['layer_types']}")
    if delta.key_dim != delta.value_dim:
        raise ValueError("--engine llamacpp needs linear_key_head_dim and linear_value_head_dim to be equal, got "
                         f"{delta.key_dim} and {delta.value_dim}")  # fmt: skip


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by their GGUF names; rows are outputs."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab_size, shape.hidden_size)}
    for i in range(shape.num_layers):
        attends = shape.delta is None or shape.delta.attends[i]
        layer = attention_shapes(shape) if attends else delta_shapes(shape)
        shapes |= {f"blk.{i}.{name}": size for name, size in (layer | mlp_shapes(shape)).items()}
    return shapes | {"output_norm.weight": (shape.hidden_size,)}


def attention_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, q_size, kv_size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "attn_q.weight": (q_size if shape.delta is None else 2 * q_size, hidden),  # with the gates of a hybrid
        "attn_k.weight": (kv_size, hidden),
        "attn_v.weight": (kv_size, hidden),
        "attn_q_norm.weight": (shape.head_dim,),
        "attn_k_norm.weight": (shape.head_dim,),
        "attn_output.weight": (hidden, q_size),
    }


def delta_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    delta, hidden = shape.delta, shape.hidden_size
    assert delta is not None
    return {
        "attn_qkv.weight": (delta.conv_channels, hidden),
        "attn_gate.weight": (delta.value_size, hidden),
        "ssm_conv1d.weight": (delta.conv_channels, delta.conv_width),
        "ssm_dt.bias": (delta.num_value_heads,),
        "ssm_a": (delta.num_value_heads,),
        "ssm_beta.weight": (delta.num_value_heads, hidden),
        "ssm_alpha.weight": (delta.num_value_heads, hidden),
        "ssm_norm.weight": (delta.value_dim,),
        "ssm_out.weight": (hidden, delta.value_size),
    }


def mlp_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    second_norm = "ffn_norm.weight" if shape.delta is None else "post_attention_norm.weight"
    return {
        "attn_norm.weight": (hidden,),
        second_norm: (hidden,),
        "ffn_gate.weight": (wide, hidden),
        "ffn_up.weight": (wide, hidden),
        "ffn_down.weight": (hidden, wide),
    }
