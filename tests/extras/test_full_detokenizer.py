"""The detokenizer's options: `min_tokens`, `include_stop_str_in_output`, `detokenize`, special tokens; copies of it.

`tests/test_detokenizer.py` has the text as it grows, and the stop strings of the core.

Seen to fail when broken: `min_tokens` ignored; the cut before the stop string where it is to be kept; a copy that
changes the text that it was made of; a text looked up of the beginning of a character, or behind tokens without text;
a stream that goes on without the tokens whose texts were looked up.
"""

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from nanovllm_extras import SamplingParams
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.requests.full_request import make_detokenizer
from tests import test_detokenizer as core
from tests.test_detokenizer import (
    BUNDLED,
    BYTES,
    EMOJI_BYTES,
    TOKENIZERS,
    A,
    assert_agrees,
    decode,
    decode_after,
    thorough,
    token_ids,
    tokens_and_stops,
    whole_text,
)
from tests.test_detokenizer import name as name


def make(tokenizer, prompt=(), **fields):
    return make_detokenizer(TokenDecoder(tokenizer), SamplingParams(max_tokens=None, **fields), list(prompt))


def stream(tokenizer, chunks, prompt=(), **fields):
    """What is shown after each chunk of tokens; the last chunk is the end. And the detokenizer."""
    detokenizer = make(tokenizer, prompt, **fields)
    shown = []
    for i, chunk in enumerate(chunks):
        is_last = i == len(chunks) - 1
        detokenizer.extend(chunk)
        if is_last:
            detokenizer.finish()
        shown.append(detokenizer.text(is_last or detokenizer.stop_string is not None))
    return shown, detokenizer


def one_by_one(token_ids):
    return [[token_id] for token_id in token_ids]


# --- several tokens at a time ----------------------------------------------------------------------------------------


@pytest.mark.examples
def test_any_number_of_tokens_at_a_time(name):
    tokenizer = TOKENIZERS[name]

    @thorough
    @given(st.lists(token_ids(name), max_size=6))
    def check(chunks):
        ids = [token_id for chunk in chunks for token_id in chunk]
        shown, _ = stream(tokenizer, [*chunks, []])
        assert_agrees(shown[-1], decode(tokenizer, ids), name, len(ids))
        assert all(shown[-1].startswith(one) for one in shown)

    check()


@pytest.mark.parametrize("split", [1, 3, 7, 11])
@pytest.mark.parametrize("kind", BYTES)
def test_a_copy_continues_the_text_and_does_not_change_it(kind, split):
    """Also within a character, and before anything was added."""
    tokenizer = TOKENIZERS[kind]
    ids = [BYTES[kind][byte] for byte in [*EMOJI_BYTES, *b" b"]]
    prompt = core.words(kind, "b", "a")
    detokenizer = make(tokenizer, prompt, stop=["zz"])
    detokenizer.extend(ids[:split])
    before = detokenizer.text(False)
    for _ in range(2):
        copied = detokenizer.copy()
        assert copied.text(False) == before
        copied.extend(ids[split:])
        copied.finish()
        assert copied.text(True) == decode_after(tokenizer, prompt, ids)
    assert detokenizer.text(False) == before
    detokenizer.extend(core.words(kind, "a"))
    copied = detokenizer.copy()
    for one in (detokenizer, copied):
        one.finish()
    assert detokenizer.text(True) == copied.text(True)
    assert copied.text(True).endswith("a")


# --- texts that are looked up ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.examples
def test_texts_that_are_looked_up_are_those_of_the_librarys_stream(name, skip_special_tokens):
    """After each token, whatever tokens came before it. The core's detokenizer asks the stream for every token."""
    tokenizer = TOKENIZERS[name]

    @thorough
    @given(token_ids(name), token_ids(name), st.lists(st.text(alphabet="ab€😀 \ufffd", min_size=1), max_size=2))
    def check(prompt, ids, stop):
        plain = core.make_detokenizer(tokenizer, prompt, stop, skip_special_tokens)
        full = make(tokenizer, prompt, stop=stop or None, skip_special_tokens=skip_special_tokens)
        for token_id in ids:
            plain.append(token_id)
            full.append(token_id)
            assert (full.text(False), full.stop_string) == (plain.text(False), plain.stop_string)
        plain.finish()
        full.finish()
        assert full.text(True) == plain.text(True)

    check()


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_each_token_adds_the_text_that_is_looked_up(skip_special_tokens):
    """All tokens of the bundled vocabulary, behind a letter, and behind a special token."""
    decoder, num_found = TokenDecoder(BUNDLED), 0
    for token_id in range(len(BUNDLED)):
        if text := decoder.own_texts[skip_special_tokens](token_id):
            num_found += 1
            for before in ([A], [A, 0]):
                library = DecodeStream(before, skip_special_tokens=skip_special_tokens)
                assert library.step(decoder.backend, token_id) == text
    assert num_found > len(BUNDLED) // 2


# --- no text ---------------------------------------------------------------------------------------------------------


def test_no_text_is_made_where_none_is_wanted_or_can_be():
    assert make(BUNDLED, detokenize=False) is None
    assert make_detokenizer(None, SamplingParams(), [1]) is None


def test_a_tokenizer_that_is_not_a_fast_one_is_refused():
    class Slow:
        pass

    with pytest.raises(ValueError, match="the tokenizer must be a fast one, with a tokenizer.json, got a Slow"):
        TokenDecoder(Slow())


def test_the_text_of_one_token_by_itself():
    decoder = TokenDecoder(BUNDLED)
    (block,) = BUNDLED.encode(" block")
    assert decoder.text_of(block) == " block"
    assert decoder.added_texts[BUNDLED.eos_token_id] == BUNDLED.eos_token


# --- stop strings ----------------------------------------------------------------------------------------------------


def naive_stop(tokenizer, ids, stops, min_tokens, include):
    """(number of tokens, text, stop string) of a search in all of the text after each token; the third may be None.

    As in vLLM, a stop string counts if it is complete only after the first `min_tokens` tokens.
    """
    ignored = len(whole_text(tokenizer, ids[:min_tokens]))
    for num_tokens in range(min_tokens + 1, len(ids) + 1):
        text = whole_text(tokenizer, ids[:num_tokens])
        ends = [
            (end, end - len(stop), stop)
            for stop in stops
            for end in range(max(ignored + 1, len(stop)), len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, start, stop = min(ends)
            return num_tokens, text[: end if include else start], stop
    return len(ids), decode(tokenizer, ids), None


def stream_until_stop(tokenizer, ids, **fields):
    """(what is shown after each token up to the one that stops, the stop string)"""
    detokenizer = make(tokenizer, **fields)
    shown = []
    for i, token_id in enumerate(ids):
        is_last = i == len(ids) - 1
        detokenizer.append(token_id)
        if is_last:
            detokenizer.finish()
        shown.append(detokenizer.text(is_last or detokenizer.stop_string is not None))
        if detokenizer.stop_string is not None:
            break
    return shown, detokenizer.stop_string


@pytest.mark.parametrize(("include", "min_tokens"), [(True, 0), (False, 1), (True, 4)])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.examples
def test_stop_strings_are_found_as_by_a_naive_search(kind, include, min_tokens):
    tokenizer = TOKENIZERS[kind]

    @thorough
    @given(tokens_and_stops(kind))
    def check(case):
        ids, stops = case
        fields = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
        shown, stop = stream_until_stop(tokenizer, ids, **fields)
        num_tokens, text, expected = naive_stop(tokenizer, ids, stops, min_tokens, include)
        assert (len(shown), shown[-1], stop) == (num_tokens, text, expected)
        for i, one in enumerate(shown[:-1]):
            assert text.startswith(one), "what is shown stays"
            so_far = whole_text(tokenizer, ids[: i + 1])
            assert so_far.startswith(one)
            if min_tokens == 0:  # exactly what may become a stop string is held back, and nothing else
                assert len(so_far) - len(one) == core.undecided(so_far, stops)

    check()


INCLUDED = ["aaab", "aabaab", "aabaaabaab", "abababac", "abc", "abc", "abc", "abca", "abc", "a ", "a\n\n", "aaa"]


def test_stop_strings_across_token_borders_included():
    for (text, stops, num_tokens, _, which), included in zip(core.EXAMPLES, INCLUDED, strict=True):
        ids = [BYTES["byte-level"][byte] for byte in text.encode()]
        shown, stop = stream_until_stop(BUNDLED, ids, stop=stops, include_stop_str_in_output=True)
        assert (len(shown), shown[-1], stop) == (num_tokens, included, which)


# --- spaces between special tokens -----------------------------------------------------------------------------------


def spaced():
    """A tokenizer without a decoder: all tokens are written with spaces between them."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "<x>": 2, "<y>": 3, "?": 4}, unk_token="?")
    )
    tokenizer.add_special_tokens(["<x>", "<y>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="<x>")


@pytest.mark.parametrize("at_once", [False, True])
def test_spaces_between_special_tokens(at_once):
    ids = [0, 2, 3, 2, 1, 3, 0, 1, 2, 2]
    chunks = [ids] if at_once else [*one_by_one(ids), []]
    fields = {"skip_special_tokens": False}
    assert stream(spaced(), chunks, **fields)[0][-1] == "a <x> <y> <x> b <y> a b <x> <x>"
    without = stream(spaced(), chunks, spaces_between_special_tokens=False, **fields)[0][-1]
    assert without == "a <x><y><x> b <y> a b <x><x>"
    assert stream(spaced(), chunks, spaces_between_special_tokens=False)[0][-1] == decode(spaced(), ids)
    for prompt, spaceless in (([0, 2], "<y> b"), ([2, 0], " <y> b")):
        assert stream(spaced(), [[3], [1]], prompt, **fields)[0][-1] == " <y> b"
        assert stream(spaced(), [[3], [1]], prompt, spaces_between_special_tokens=False, **fields)[0][-1] == spaceless


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_tokenizers_that_write_no_spaces_are_not_changed(name, skip_special_tokens):
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("a b", add_special_tokens=False), eos, eos, *tokenizer.encode("a b"), eos]
    fields = {"skip_special_tokens": skip_special_tokens}
    shown, _ = stream(tokenizer, [*one_by_one(ids), []], spaces_between_special_tokens=False, **fields)
    assert shown[-1] == decode(tokenizer, ids, **fields)
