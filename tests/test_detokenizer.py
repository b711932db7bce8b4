"""`Detokenizer`: text as tokens come, whole characters only, and the stop strings in it.

Oracles: the tokenizer's own decode of all tokens at once, over random token sequences (`hypothesis`); for stop strings
a naive search that decodes everything anew after each token. The tokenizers: the byte-level BPE of the bundled model, a
SentencePiece-style one that spells in bytes what it has no piece for, and one with the metaspace decoder.

Seen to fail when broken: the newest token decoded by itself; a context of one token; half a character shown; what was
held back forgotten; a stop string searched in the newest text only; nothing held back, or too little; the cut one
character off; the stop string that begins first taken instead of the one that is complete first; `min_tokens` ignored.
"""

import copy
import random

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nanovllm
from nanovllm import SamplingParams
from nanovllm.extras.full_detokenizer import TokenDecoder
from nanovllm.detokenizer import is_context_free, make_detokenizer
from tests import tiny_tokenizers
from tests.conftest import examples

REPLACEMENT = "\ufffd"
BUNDLED = transformers.AutoTokenizer.from_pretrained(nanovllm.TINY_QWEN3)
SENTENCEPIECE = tiny_tokenizers.sentencepiece()
METASPACE = tiny_tokenizers.metaspace()
TOKENIZERS = {"byte-level": BUNDLED, "sentencepiece": SENTENCEPIECE, "metaspace": METASPACE}

thorough = settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)


def decode(tokenizer, token_ids, **fields):
    skip_special_tokens = fields.get("skip_special_tokens", True)
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def stream(tokenizer, chunks, **fields):
    """What is shown after each chunk of tokens; the last chunk is the end. And the detokenizer."""
    detokenizer = make_detokenizer(tokenizer and TokenDecoder(tokenizer), SamplingParams(**fields))
    shown = []
    for i, chunk in enumerate(chunks):
        is_last = i == len(chunks) - 1
        detokenizer.append(chunk, is_last)
        shown.append(detokenizer.text(is_last or detokenizer.stop_string is not None))
    return shown, detokenizer


def one_by_one(token_ids):
    return [[token_id] for token_id in token_ids]


def byte_ids(tokenizer):
    """The token of each byte, by byte."""
    if tokenizer is SENTENCEPIECE:
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    assert tokenizer is BUNDLED
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others are written as 256 + their number
    others = [byte for byte in range(256) if byte not in visible]
    chars = {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    return tokenizer.convert_tokens_to_ids([chars[byte] for byte in range(256)])


BYTES = {"byte-level": byte_ids(BUNDLED), "sentencepiece": byte_ids(SENTENCEPIECE)}
EMOJI_BYTES = [*"😀".encode(), *"€".encode(), *"é".encode(), 0x41]


def words(kind, *pieces):
    return TOKENIZERS[kind].convert_tokens_to_ids(list(pieces))


def token_ids(name):
    """Any tokens, special ones and unknown ids among them; many bytes, and many that fit together."""
    tokenizer = TOKENIZERS[name]
    one = [
        st.integers(0, len(tokenizer) - 1),
        st.integers(len(tokenizer), 2 * len(tokenizer)),
        st.sampled_from([0, 1, 2]),
    ]
    if name in BYTES:
        one += [st.sampled_from(BYTES[name]), st.sampled_from([BYTES[name][byte] for byte in EMOJI_BYTES])]
    return st.lists(st.one_of(one), max_size=40)


@pytest.fixture(params=TOKENIZERS)
def name(request):
    return request.param


# --- the text adds up ------------------------------------------------------------------------------------------------


def test_the_byte_tokens_are_what_they_seem():
    for name, ids in BYTES.items():
        assert len(set(ids)) == 256
        assert decode(TOKENIZERS[name], [ids[byte] for byte in "a😀€".encode()]) == "a😀€"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.examples
def test_streamed_pieces_add_up_to_the_whole_text(name, skip_special_tokens):
    """For any tokens, be they text or not."""
    tokenizer = TOKENIZERS[name]

    @thorough
    @given(token_ids(name))
    def check(ids):
        shown, _ = stream(tokenizer, [*one_by_one(ids), []], skip_special_tokens=skip_special_tokens)
        assert shown[-1] == decode(tokenizer, ids, skip_special_tokens=skip_special_tokens)
        for earlier, later in zip(shown, shown[1:], strict=False):
            assert later.startswith(earlier)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.examples
def test_texts_stream_without_half_characters(name):
    """Tokens of a text, one by one: at no time is there a replacement character in what is shown."""
    tokenizer = TOKENIZERS[name]
    alphabet = "ab c.\n" if name == "metaspace" else st.characters(codec="utf-8", exclude_characters=REPLACEMENT)

    @thorough
    @given(st.text(alphabet, max_size=20))
    @example("ab a.b")
    @example("a b" if name == "metaspace" else "naïve 😀😀😀😀 — 東京都 a")
    @example("a b" if name == "metaspace" else "é€😀é€😀é€😀 né")
    def check(text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = decode(tokenizer, ids)
        shown, _ = stream(tokenizer, [*one_by_one(ids), []])
        assert shown[-1] == whole
        assert not any(REPLACEMENT in one for one in shown)
        assert all(whole.startswith(one) for one in shown)

    check()


def test_what_is_whole_is_shown_at_once(name):
    """Nothing is held back but the bytes of an unfinished character."""
    tokenizer = TOKENIZERS[name]
    text = "Hello world.\nab a b c" if name == "metaspace" else "Hello wörld 東京 a é\n😀."
    ids = tokenizer.encode(text, add_special_tokens=False)
    is_byte = set(BYTES["sentencepiece"]) if name == "sentencepiece" else ()
    shown, _ = stream(tokenizer, [*one_by_one(ids), []])
    for i, token_id in enumerate(ids):
        so_far = decode(tokenizer, ids[: i + 1])
        if not so_far.endswith(REPLACEMENT) and token_id not in is_byte:
            assert shown[i] == so_far


@pytest.mark.examples
def test_any_number_of_tokens_at_a_time(name):
    tokenizer = TOKENIZERS[name]

    @thorough
    @given(st.lists(token_ids(name), max_size=6))
    def check(chunks):
        whole = decode(tokenizer, [token_id for chunk in chunks for token_id in chunk])
        shown, _ = stream(tokenizer, [*chunks, []])
        assert shown[-1] == whole
        assert all(whole.startswith(one) for one in shown)

    check()


def test_everything_at_once_is_a_plain_decode(name):
    ids = [5, 9, 1, 13, 2, 4, 10**6, 7] * 3
    shown, _ = stream(TOKENIZERS[name], [ids])
    assert shown == [decode(TOKENIZERS[name], ids)]


@pytest.mark.parametrize("character", ["é", "€", "😀"], ids=["2 bytes", "3 bytes", "4 bytes"])
@pytest.mark.parametrize("kind", BYTES)
def test_half_a_character_is_shown_at_the_end_only(kind, character):
    ids = [*words(kind, "a"), *[BYTES[kind][byte] for byte in character.encode()]]
    for num_bytes in range(1, len(ids)):
        shown, _ = stream(TOKENIZERS[kind], [*one_by_one(ids[:num_bytes]), []])
        assert set(shown[:-1]) <= {"", "a"}
        assert shown[-1] == decode(TOKENIZERS[kind], ids[:num_bytes])


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("character", ["é", "€", "😀", "👩‍👩‍👧‍👦"], ids=["2 bytes", "3 bytes", "4 bytes", "25 bytes"])
def test_long_runs_of_characters_in_bytes(kind, character):
    """Longer than any context: where it is cut in the middle of a character, nothing changes."""
    text = character * 20 + "a" + character + "a"
    run = [BYTES[kind][byte] for byte in character.encode()]
    ids = [*run * 20, *words(kind, "a"), *run, *words(kind, "a")]
    shown, _ = stream(TOKENIZERS[kind], [*one_by_one(ids), []])
    assert shown[-1] == text
    assert not any(REPLACEMENT in one for one in shown)


@pytest.mark.examples
def test_bytes_that_never_become_characters_are_shown_and_not_decoded_for_ever():
    """Lone and cut-off bytes of all kinds, as no model should write them: nothing is decoded more than a few times."""
    lengths = []

    class Counting(TokenDecoder):
        def decode(self, token_ids, skip_special_tokens):
            lengths.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    decoder = Counting(BUNDLED)
    lone = st.builds(
        lambda byte, n: bytes([byte] * n), st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF]), st.integers(1, 30)
    )
    cut = st.builds(lambda char, n: char.encode()[:n], st.sampled_from("é€😀"), st.integers(1, 4))

    @settings(max_examples=examples(600), deadline=None, derandomize=True, database=None)
    @given(st.lists(lone | cut, max_size=8), st.integers(1, 5))
    def check(pieces, num_at_a_time):
        ids = [BYTES["byte-level"][byte] for byte in b"".join(pieces)]
        detokenizer = make_detokenizer(decoder, SamplingParams())
        lengths.clear()
        shown = [""]
        for i in range(0, len(ids), num_at_a_time):
            detokenizer.append(ids[i : i + num_at_a_time], False)
            shown.append(detokenizer.text(False))
            assert shown[-1].startswith(shown[-2])
        assert max(lengths, default=0) < 50
        detokenizer.append([], True)
        text = decode(BUNDLED, ids)
        assert detokenizer.text(True) == text
        assert text.startswith(shown[-1])
        assert len(text) - len(shown[-1]) <= 16 + num_at_a_time, "they are shown, if late"

    check()


def test_a_space_comes_with_the_word_after_it():
    """A tokenizer that drops the first space must not drop that of the newest word."""
    for tokenizer in (SENTENCEPIECE, METASPACE):
        ids = tokenizer.convert_tokens_to_ids(["▁Hel", "lo", "▁wor", "ld", "▁a", "▁", "b"])
        assert decode(tokenizer, ids) == "Hello world a b"
        assert stream(tokenizer, one_by_one(ids))[0] == [
            "Hel",
            "Hello",
            "Hello wor",
            "Hello world",
            "Hello world a",
            "Hello world a ",
            "Hello world a b",
        ]


# --- what gives no text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1, 5, 6, 7, 30])
def test_ids_beyond_the_vocabulary_give_nothing(name, gap):
    """However many there are in a row, the words around them stay as they are."""
    tokenizer = TOKENIZERS[name]
    text = tokenizer.encode("a b a", add_special_tokens=False)
    ids = [*text[:-1], *[len(tokenizer) + i for i in range(gap)], text[-1]]
    shown, _ = stream(tokenizer, one_by_one(ids))
    assert shown[-1] == decode(tokenizer, text)
    assert shown[-2] == shown[len(text) - 2]


@pytest.mark.parametrize("gap", [1, 5, 6, 7, 30])
def test_special_tokens_are_left_out_or_written(name, gap):
    tokenizer = TOKENIZERS[name]
    text = tokenizer.encode("a b a", add_special_tokens=False)
    ids = [*text[:-1], *[tokenizer.eos_token_id] * gap, text[-1]]
    assert stream(tokenizer, one_by_one(ids))[0][-1] == decode(tokenizer, text)
    written = stream(tokenizer, one_by_one(ids), skip_special_tokens=False)[0][-1]
    assert written == decode(tokenizer, ids, skip_special_tokens=False)
    assert written.count(tokenizer.eos_token) == gap


def test_no_text_is_made_where_none_is_wanted_or_can_be():
    for tokenizer, fields in ((BUNDLED, {"detokenize": False}), (None, {})):
        shown, detokenizer = stream(tokenizer, [[5], [6, 7], []], **fields)
        assert shown == ["", "", ""]
        assert detokenizer.stop_string is None


# --- stop strings ----------------------------------------------------------------------------------------------------

A, B, C = (BUNDLED.convert_tokens_to_ids(letter) for letter in "abc")
SPACE, NEWLINE = BYTES["byte-level"][32], BYTES["byte-level"][10]
E_ACUTE = [BYTES["byte-level"][byte] for byte in "é".encode()]
# pieces of text as tokens: single letters, a character in two tokens, and no text at all
BYTE_PIECES = [[A], [A], [B], [B], [C], [SPACE], E_ACUTE, [BUNDLED.eos_token_id]]
SPIECES = [
    [SENTENCEPIECE.convert_tokens_to_ids(piece)] for piece in ("a", "b", "c", "▁a", "▁b", "▁", "é", "ée", "</s>")
]


@st.composite
def tokens_and_stops(draw, kind):
    """Tokens, and stop strings of which most occur in their text."""
    pieces = draw(st.lists(st.sampled_from(BYTE_PIECES if kind == "byte-level" else SPIECES), min_size=1, max_size=20))
    ids = [token_id for piece in pieces for token_id in piece]
    text = decode(TOKENIZERS[kind], ids)
    starts = st.integers(0, max(0, len(text) - 1))
    parts = st.builds(lambda start, length: text[start : start + length], starts, st.integers(1, 5))
    stops = draw(st.lists(st.one_of(parts, st.text("ab", min_size=2, max_size=4)), min_size=1, max_size=3))
    return ids, [stop for stop in stops if stop] or ["ab"]


def whole_text(tokenizer, ids):
    return decode(tokenizer, ids).rstrip(REPLACEMENT)


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
    detokenizer = make_detokenizer(tokenizer and TokenDecoder(tokenizer), SamplingParams(max_tokens=None, **fields))
    shown = []
    for i, token_id in enumerate(ids):
        is_last = i == len(ids) - 1
        detokenizer.append([token_id], is_last)
        shown.append(detokenizer.text(is_last or detokenizer.stop_string is not None))
        if detokenizer.stop_string is not None:
            break
    return shown, detokenizer.stop_string


def undecided(text, stops):
    """Length of the longest end of `text` with which a stop string begins."""
    return max(
        n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) and s != text[-n:] for s in stops)
    )


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("include", [False, True])
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
                assert len(so_far) - len(one) == undecided(so_far, stops)

    check()


EXAMPLES = [
    # (text, a token a letter; stops; tokens; text; text with include_stop_str_in_output; which)
    ("aaab", ["aab"], 4, "a", "aaab", "aab"),
    ("aabaab", ["aabaab"], 6, "", "aabaab", "aabaab"),
    ("aabaaabaab", ["aabaab"], 10, "aaba", "aabaaabaab", "aabaab"),
    ("abababac", ["abac"], 8, "abab", "abababac", "abac"),
    ("abcabc", ["c"], 3, "ab", "abc", "c"),
    ("abcabc", ["abcd", "bc"], 3, "a", "abc", "bc"),
    ("abcabc", ["bc", "abc"], 3, "", "abc", "abc"),  # complete with the same letter: the one that began first
    ("abcabc", ["abcab", "ca"], 4, "ab", "abca", "ca"),  # complete first, though it began later
    ("abc", ["abcd", "cb", "x"], 3, "abc", "abc", None),
    ("a b", [" "], 2, "a", "a ", " "),
    ("a\n\nb", ["\n\n"], 3, "a", "a\n\n", "\n\n"),
    ("aaaa", ["aaa"], 3, "", "aaa", "aaa"),
]


@pytest.mark.parametrize(("text", "stops", "num_tokens", "cut", "included", "which"), EXAMPLES)
def test_stop_strings_across_token_borders(text, stops, num_tokens, cut, included, which):
    ids = [BYTES["byte-level"][byte] for byte in text.encode()]
    for include, expected in ((False, cut), (True, included)):
        shown, stop = stream_until_stop(BUNDLED, ids, stop=stops, include_stop_str_in_output=include)
        assert (len(shown), shown[-1], stop) == (num_tokens, expected, which)


def test_a_stop_string_inside_one_token():
    """One token, text before and after the stop string."""
    (token_id,) = BUNDLED.encode(" block")
    for include, expected in ((False, "a bl"), (True, "a blo")):
        shown, stop = stream_until_stop(BUNDLED, [A, token_id, B], stop="o", include_stop_str_in_output=include)
        assert (shown, stop) == (["a", expected], "o")


def test_what_may_become_a_stop_string_is_shown_when_it_cannot_any_more():
    ids = [BYTES["byte-level"][byte] for byte in b"abacab"]
    shown, stop = stream_until_stop(BUNDLED, ids, stop=["abad", "cc"])
    assert (shown, stop) == (["", "", "", "aba", "abac", "abacab"], None)


def test_the_end_decides_what_was_held_back():
    """The text is cut short in the middle of a stop string: it was none."""
    shown, stop = stream_until_stop(BUNDLED, [A, B, C], stop="bcd")
    assert (shown, stop) == (["a", "a", "abc"], None)


def test_stop_strings_of_half_characters_wait_for_the_whole():
    ids = [A, *E_ACUTE, B]
    shown, stop = stream_until_stop(BUNDLED, ids, stop="é")
    assert (shown, stop) == (["a", "a", "a"], "é")


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens", "text"),
    [
        (0, 2, ""),
        (1, 2, ""),  # complete with the second token, which is the first that may end it
        (2, 4, "ab"),
        (3, 4, "ab"),
        (4, 6, "abab"),
        (5, 6, "abab"),
        (6, 6, "ababab"),
    ],
)
def test_min_tokens_and_stop_strings(min_tokens, num_tokens, text):
    """As in vLLM: it is where a stop string is complete that counts, not where it begins."""
    shown, _ = stream_until_stop(BUNDLED, [A, B] * 3, stop="ab", min_tokens=min_tokens)
    assert (len(shown), shown[-1]) == (num_tokens, text)


def test_special_tokens_as_stop_strings():
    ids = [A, BUNDLED.eos_token_id, B]
    shown, stop = stream_until_stop(BUNDLED, ids, stop=BUNDLED.eos_token, skip_special_tokens=False)
    assert (shown, stop) == (["a", "a"], BUNDLED.eos_token)
    shown, stop = stream_until_stop(BUNDLED, ids, stop=BUNDLED.eos_token)
    assert (shown, stop) == (["a", "a", "ab"], None)


def test_ids_beyond_the_vocabulary_do_not_hide_a_stop_string():
    shown, stop = stream_until_stop(BUNDLED, [A, B, len(BUNDLED) + 5, C, A], stop="bc")
    assert (shown, stop) == (["a", "a", "a", "a"], "bc")


def test_after_a_stop_string_nothing_is_added():
    """Several tokens at once, as after a step that brought them: those behind the stop string are ignored."""
    detokenizer = make_detokenizer(TokenDecoder(BUNDLED), SamplingParams(stop="b"))
    detokenizer.append([A, B, C, A], is_last=True)
    assert (detokenizer.text(True), detokenizer.stop_string) == ("a", "b")


# --- texts that are looked up ----------------------------------------------------------------------------------------


def test_which_decoders_are_known_to_be_free_of_context():
    for tokenizer in (BUNDLED, SENTENCEPIECE, METASPACE):
        assert is_context_free(tokenizer.backend_tokenizer)
    strip, fuse = tokenizers.decoders.Strip, tokenizers.decoders.Fuse()
    replace, fallback = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()
    unknown = [
        tokenizers.decoders.WordPiece(),
        tokenizers.decoders.CTC(),
        tokenizers.decoders.Sequence([fuse, replace]),  # replaces across the borders of tokens
        tokenizers.decoders.Sequence([replace, fallback, fuse, strip(" ", 2, 0)]),
        tokenizers.decoders.Sequence([replace, fallback, fuse, strip(" ", 1, 1)]),
        tokenizers.decoders.Sequence([replace, fallback, strip(" ", 1, 0), fuse]),
        tokenizers.decoders.Sequence([replace, fallback]),
        tokenizers.decoders.Sequence([replace, fallback, strip(" ", 1, 0)]),  # takes a space from each token
        tokenizers.decoders.Sequence([fuse, replace, fuse]),
        replace,
        fallback,
    ]
    for decoder in unknown:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.decoder = decoder
        assert not is_context_free(tokenizer)
    assert not is_context_free(tokenizers.Tokenizer(tokenizers.models.BPE()))
    assert not is_context_free(object()), "a tokenizer that is not in Rust"


@pytest.mark.parametrize("has_strip", [False, True])
def test_decoder_that_never_joins_its_pieces(has_strip):
    """Without `Fuse`, bytes of one character are still joined, and `Strip` takes a space from every token."""
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), *([decoders.Strip(" ", 1, 0)] if has_strip else [])]
    tokenizer = copy.deepcopy(SENTENCEPIECE)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    rng = random.Random(3)
    for _ in range(40):
        token_ids = [rng.randrange(3, len(tokenizer)) for _ in range(rng.randrange(1, 12))]
        detokenizer = make_detokenizer(TokenDecoder(tokenizer), SamplingParams(max_tokens=20))
        for i, token_id in enumerate(token_ids):
            detokenizer.append([token_id], i == len(token_ids) - 1)
        assert detokenizer.text(True) == tokenizer.decode(token_ids)


def test_a_decoder_that_is_not_known_is_asked_about_every_token():
    """WordPiece writes a space before each word but the first, and none before a full stop."""
    vocab = {"[UNK]": 0, "a": 1, "##b": 2, "c": 3, ".": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    ids = [1, 2, 3, 4, 1, 3, 2, 4]
    shown, _ = stream(fast, [*one_by_one(ids), []])
    assert shown[-1] == tokenizer.decode(ids)


def test_a_text_that_is_looked_up_costs_no_decoding(name):
    decoded = []

    class Counting(TokenDecoder):
        def decode(self, token_ids, skip_special_tokens):
            decoded.append(token_ids)
            return super().decode(token_ids, skip_special_tokens)

    tokenizer = TOKENIZERS[name]
    decoder = Counting(tokenizer)
    ids = tokenizer.encode("a b a b a b", add_special_tokens=False)
    for _ in range(2):
        decoded.clear()
        detokenizer = make_detokenizer(decoder, SamplingParams())
        for token_id in ids:
            detokenizer.append([token_id], False)
        assert detokenizer.text(False) == decode(tokenizer, ids)
    assert len(decoded) <= 3, "only the first text, whose space the decoder may drop"


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


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_tokenizers_that_write_no_spaces_are_not_changed(name, skip_special_tokens):
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("a b", add_special_tokens=False), eos, eos, *tokenizer.encode("a b"), eos]
    fields = {"skip_special_tokens": skip_special_tokens}
    shown, _ = stream(tokenizer, [*one_by_one(ids), []], spaces_between_special_tokens=False, **fields)
    assert shown[-1] == decode(tokenizer, ids, **fields)
