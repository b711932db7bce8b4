"""The bundled model is a genuine Qwen3: its files, its tensors, its tokenizer.

`tests/extras/test_tiny_qwen3_answers.py` asks it all that it was trained to know.
"""

import json
from pathlib import Path

import pytest
import transformers

from nanovllm import TINY_QWEN3

MODEL_DIR = Path(TINY_QWEN3)
MAX_BYTES = 8_000_000


# --- the files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def test_folder_is_small():
    num_bytes = sum(path.stat().st_size for path in MODEL_DIR.rglob("*") if path.is_file())
    assert num_bytes <= MAX_BYTES


def test_transformers_loads_it_unchanged():
    model, info = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


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


def test_chat_template(tokenizer):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    # no default system prompt
    assert tokenizer.apply_chat_template(chat[1:], tokenize=False) == "<|im_start|>user\nU<|im_end|>\n"
