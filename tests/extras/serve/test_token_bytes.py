"""The bytes of tokens: of every kind of vocabulary, together they are the text that was encoded."""

import math
import random

import pytest
from transformers import AutoTokenizer

from nanovllm import TINY_QWEN3
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.sampling.logprobs import PositionLogprobs
from nanovllm_extras.serve.openai_logprobs import chat_logprobs
from nanovllm_extras.serve.streaming import Written, encode, go_on
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


def test_log_probabilities_are_written_as_their_values_would_be():
    """Oracle: the objects that a user of the engine reads, as `json` writes them."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_QWEN3)
    token_bytes, rng = TokenBytes(tokenizer), random.Random(0)
    # the last is a token that the tokenizer does not know
    chosen = [
        *tokenizer.encode('é "\\" \n'),
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        len(tokenizer) + 5,
    ]  # and one that the tokenizer does not know
    positions = [
        PositionLogprobs(
            (value, rng.randrange(1, 9), [-rng.random() for _ in range(5)], rng.sample(range(len(tokenizer)), 5)),
            token_id,
            rng.randrange(6),
            TokenDecoder(tokenizer),
        )
        for token_id, value in zip(chosen, [-math.inf, 0.0, *(-1e-7 * i for i in range(len(chosen)))], strict=False)
    ]

    def entry(token_id, one):
        value = max(one.logprob, -9999.0)
        token = one.decoded_token
        return {"token": token, "logprob": value, "bytes": list(token_bytes.of(token_id, token))}

    for num_top in (0, 2, 5):
        expected = []
        for position, token_id in zip(positions, chosen, strict=True):
            likeliest = sorted(position, key=lambda i, one=position: one[i].rank)[:num_top]
            top = [entry(i, position[i]) for i in likeliest]
            expected.append({**entry(token_id, position[token_id]), "top_logprobs": top})
        for given in (positions, list(map(dict, positions))):
            written = chat_logprobs(given, chosen, num_top, token_bytes)
            answer = [{"index": 0, "logprobs": written}] * 2
            text = encode(answer, go_on)
            assert text == encode([{"index": 0, "logprobs": {"content": expected}}] * 2)


def test_what_is_written_already_is_never_written_as_a_text():
    with pytest.raises(TypeError):
        encode({"a": [Written(b"{}")]})
    assert encode({"a": [Written(b"{}"), 1], "b": Written(b"[2]")}, go_on) == b'{"a":[{},1],"b":[2]}'
