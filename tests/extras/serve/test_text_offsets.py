"""`text_offset` of completions: where each token begins in the text that the client gets.

The oracles: the decoded text of the tokens before a token, and the text of a whole token at its offset.
"""

import random
from itertools import accumulate

import pytest
from transformers import AutoTokenizer

from nanovllm import TINY_QWEN3
from nanovllm_extras.answer_parts.text_offsets import DecodedOffsets, offsets_of_text
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from tests.tiny_tokenizers import byte_level, metaspace, sentencepiece

PATH = "/v1/completions"
TEXTS = ["Hello there", "naïve café ☕ b", "é", "  a\nb", "日本 ☃ 🙂!", " Hello 🙂🙂 lo"]


def decoded_offsets(tokenizer, ids):
    """Return the number of whole characters of the tokens before each token. The text must be valid.

    SentencePiece's decoders replace all bytes before an incomplete character, so a shorter prefix may have more.
    """
    return list(accumulate((len(tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))), max))


def bundled():
    return AutoTokenizer.from_pretrained(TINY_QWEN3)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, bundled])
def test_offsets_are_those_of_the_decoded_text(make):
    tokenizer = make()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = decoded_offsets(tokenizer, ids)
        assert DecodedOffsets(TokenBytes(tokenizer), True).read_prompt(ids, tokenizer.decode(ids)) == expected
        if make is not sentencepiece or not text.startswith(" "):  # decoders omit one of several spaces
            assert offsets_of_text(tokenizer, text, ids, False) == expected
        for split in range(1, len(ids) + 1):  # the prompt may end within a character
            offsets, prompt = DecodedOffsets(TokenBytes(tokenizer), True), tokenizer.decode(ids[:split])
            if make is sentencepiece and prompt.endswith("\ufffd"):
                continue
            told = offsets.read_prompt(ids[:split], prompt)
            more = len(prompt) - len(prompt.rstrip("\ufffd"))  # the incomplete character stays in the text
            output = [one + more for one in expected[split:]]
            assert told + offsets.read_output(ids[split:]) == expected[:split] + output
            unseen = DecodedOffsets(TokenBytes(tokenizer), True)
            unseen.skip_prompt(ids[:split])
            whole = len(prompt.rstrip("\ufffd"))
            assert unseen.read_output(ids[split:]) == [one - whole for one in expected[split:]]


def test_offsets_of_bytes_that_are_no_characters():
    """Each whole token is in the text where its offset says, whatever bytes are before it."""
    tokenizer, rng = byte_level(), random.Random(0)
    token_bytes = TokenBytes(tokenizer)
    likely = tokenizer.encode("é☃🙂a", add_special_tokens=False)
    num_found = 0
    for _ in range(300):
        ids = [rng.choice([*likely, rng.randrange(3, 270)]) for _ in range(12)]
        split = rng.randrange(13)
        offsets, prompt = DecodedOffsets(token_bytes, True), tokenizer.decode(ids[:split])
        told = offsets.read_prompt(ids[:split], prompt) + offsets.read_output(ids[split:])
        text = tokenizer.decode(ids)
        for token_id, offset in zip(ids[:split], told[:split], strict=True):
            own = tokenizer.decode([token_id])
            if "\ufffd" not in own:
                num_found += 1
                assert prompt[offset : offset + len(own)] == own
        if not prompt.endswith("\ufffd"):
            for token_id, offset in zip(ids, told, strict=True):
                own = tokenizer.decode([token_id])
                assert "\ufffd" in own or text[offset : offset + len(own)] == own
    assert num_found > 200


def test_special_tokens_and_normalised_characters():
    tokenizer = bundled()
    text = "<|im_start|>e\u0301 é x<|im_end|>"
    ids = tokenizer.encode(text)
    offsets = offsets_of_text(tokenizer, text, ids, True)
    assert text[offsets[1] :].startswith("e\u0301 ")
    assert text[offsets[-1] :] == "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (x,) = tokenizer.encode(" x")
    assert DecodedOffsets(TokenBytes(tokenizer), True).read_output([x, end, x]) == [0, 2, 2]
    assert DecodedOffsets(TokenBytes(tokenizer), False).read_output([x, end, x]) == [0, 2, 2 + len("<|im_end|>")]
    assert offsets_of_text(tokenizer, text, ids[1:], True) is None
    assert offsets_of_text(None, text, ids, True) is None
    pieces = metaspace()
    assert pieces.convert_ids_to_tokens(pieces.encode("a b")) == ["▁", "a", "▁", "b"]
    assert offsets_of_text(pieces, "a b", pieces.encode("a b"), True) == [0, 0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_text_offset_of_completions(client, llm, stream):
    """Each token of these texts is a byte, so many begin within a character."""
    tokenizer, told, script = llm.engine.tokenizer, "b→é<|end|>🙂x", "ü☃b"
    ids = tokenizer.encode(told)
    body = {"structured_outputs": {"grammar": f'start: "{script}"'}, "logprobs": 1, "max_tokens": 20}
    cases = [
        ({"prompt": told, "echo": True}, told + script, ids),
        ({"prompt": ids, "echo": True}, told + script, ids),
        ({"prompt": told, "echo": True, "truncate_prompt_tokens": 5}, "🙂x" + script, ids[-5:]),
        ({"prompt": told}, script, []),
    ]
    for fields, text, prompt_ids in cases:
        if stream:
            choices = [choice for event in client.events(PATH, **body, **fields) for choice in event["choices"]]
        else:
            choices = client.ask(PATH, **body, **fields)["choices"]
        assert "".join(choice["text"] for choice in choices) == text
        offsets = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["text_offset"]]
        all_ids = [*prompt_ids, *tokenizer.encode(script)]
        assert offsets[: len(all_ids)] == decoded_offsets(tokenizer, all_ids)
