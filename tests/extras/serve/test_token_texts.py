"""The bytes of tokens, and `text_offset` of completions: where each token begins in the text that the client gets.

The oracles: the text that was encoded, the decoded text of the tokens before a token, and the text of a whole token at
its offset.
"""

import math
import random
from itertools import accumulate

import pytest
from transformers import AutoTokenizer

from nanovllm import TINY_QWEN3
from nanovllm_extras import Logprob
from nanovllm_extras.answer_parts.text_offsets import DecodedOffsets, offsets_of_text
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.sampling.logprobs import PositionLogprobs
from nanovllm_extras.serve.openai_logprobs import chat_logprobs, completion_logprobs
from nanovllm_extras.serve.streaming import Written, encode, go_on
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
    for _ in range(100):
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
    assert num_found > 60


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


# ---- bytes


@pytest.mark.parametrize(("make", "pieces"), [(byte_level, ["Ã", "©"]), (sentencepiece, ["<0xC3>", "<0xA9>"])])
def test_bytes_add_up(make, pieces):
    tokenizer = make()
    token_bytes = TokenBytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = b"".join(token_bytes.of(i, tokenizer.decode([i])) for i in ids)
        assert whole.removeprefix(b" " if make is sentencepiece else b"") == text.encode()
    ids = tokenizer.convert_tokens_to_ids(pieces)  # half of a character each
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


def test_what_can_never_be_drawn_is_finite():
    """JSON has no infinity; chats are in the test above."""
    positions = [{5: Logprob(float("-inf"), 1, "x")}]
    assert completion_logprobs(positions, [5], [0], TokenBytes(None))["token_logprobs"] == [-9999.0]


def test_what_is_written_already_is_never_written_as_a_text():
    with pytest.raises(TypeError):
        encode({"a": [Written(b"{}")]})
    assert encode({"a": [Written(b"{}"), 1], "b": Written(b"[2]")}, go_on) == b'{"a":[{},1],"b":[2]}'
