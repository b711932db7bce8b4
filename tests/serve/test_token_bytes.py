"""The bytes of tokens: of every kind of vocabulary, together they are the text that was encoded."""

import pytest

from nanovllm.serve.token_bytes import TokenBytes
from tests.tiny_tokenizers import byte_level, metaspace, sentencepiece

TEXTS = ["Hello there", "naïve café ☕", "é", "  a\nb", "日本 ☃ 🙂"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_add_up(make, text):
    tokenizer = make()
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = b"".join(token_bytes.of(i, tokenizer.decode([i])) for i in ids)
    assert whole.removeprefix(b" " if make is sentencepiece else b"") == text.encode()


@pytest.mark.parametrize(("make", "pieces"), [(byte_level, ["Ã", "©"]), (sentencepiece, ["<0xC3>", "<0xA9>"])])
def test_half_a_character(make, pieces):
    tokenizer = make()
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert tokenizer.decode(ids) == "é"
    assert [list(TokenBytes(tokenizer).of(i, tokenizer.decode([i]))) for i in ids] == [[195], [169]]


def test_other_tokens():
    tokenizer = byte_level()
    assert TokenBytes(tokenizer).of(2, "<|im_end|>") == b"<|im_end|>"
    assert TokenBytes(tokenizer).of(10**6, "") == b""
    assert TokenBytes(None).of(5, "") == b""
    tokenizer = metaspace()
    assert TokenBytes(tokenizer).of(tokenizer.convert_tokens_to_ids("▁a"), "a") == b" a"
