"""The bundled model is a genuine Qwen3: its files, its tensors, its tokenizer.

`tests/extras/test_tiny_qwen3_answers.py` asks it all that it was trained to know.
"""

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from nanovllm import TINY_QWEN3

MODEL_DIR = Path(TINY_QWEN3)
MAX_BYTES = 8_000_000
MIN_CONTEXT = 1024


# --- the files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((MODEL_DIR / "config.json").read_text())


def test_folder_is_small():
    num_bytes = sum(path.stat().st_size for path in MODEL_DIR.rglob("*") if path.is_file())
    assert num_bytes <= MAX_BYTES


def test_transformers_loads_it_unchanged():
    model, info = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_architecture(config: dict):
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] == 64 != config["hidden_size"] // config["num_attention_heads"]
    assert config["num_hidden_layers"] >= 4
    assert config["max_position_embeddings"] >= MIN_CONTEXT
    assert config["tie_word_embeddings"] is True
    # transformers 4 reads the first, transformers 5 the second
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_tensors(config: dict):
    tensors = load_file(MODEL_DIR / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    assert "lm_head.weight" not in tensors  # tied
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        assert tensors[f"{attention}.q_norm.weight"].shape == (config["head_dim"],)
        assert tensors[f"{attention}.k_norm.weight"].shape == (config["head_dim"],)
        num_kv = config["num_key_value_heads"] * config["head_dim"]
        assert tensors[f"{attention}.k_proj.weight"].shape == (num_kv, config["hidden_size"])


def test_tokenizer_is_the_saved_one(tokenizer):
    assert tokenizer.is_fast
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    # The very same file, not one that transformers rebuilt with another model's splitting rule.
    saved = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    loaded = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in ("model", "pre_tokenizer", "normalizer", "decoder"):
        assert loaded[part] == saved[part]


@pytest.mark.parametrize("text", ["The KV cache.", "naïve", "日本語 🙂", " a  b\n\n\tc ", "e\u0301 1234", "\x00\x7f"])
def test_tokenizer_round_trip(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_splits_digits(tokenizer):
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_chat_template(tokenizer):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    # no default system prompt
    assert tokenizer.apply_chat_template(chat[1:], tokenize=False) == "<|im_start|>user\nU<|im_end|>\n"
