"""`Detokenizer`: text as tokens come, whole characters only, and the stop strings in it.

Oracles: the tokenizer's own decode of all tokens at once, over random token sequences (`hypothesis`); for stop strings
a naive search that decodes all tokens again after each one. The tokenizers: the byte-level BPE of the bundled model, a
SentencePiece-style one that spells in bytes what it has no piece for, and one with the metaspace decoder.

Seen to fail when broken: the newest token decoded by itself; no context of the prompt; half a character shown; what was
held back forgotten; a stop string searched in the newest text only; nothing held back, or too little; the cut one
character off; the stop string that begins first taken instead of the one that is complete first.
"""

import copy
import random
import re
from os.path import commonprefix

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nanovllm
from nanovllm.detokenizer import MAX_PENDING, NUM_OPEN, Detokenizer
from tests import tiny_tokenizers
from tests.conftest import examples

REPLACEMENT = "\ufffd"
BUNDLED = transformers.AutoTokenizer.from_pretrained(nanovllm.TINY_QWEN3)
SENTENCEPIECE = tiny_tokenizers.sentencepiece()
METASPACE = tiny_tokenizers.metaspace()
TOKENIZERS = {"byte-level": BUNDLED, "sentencepiece": SENTENCEPIECE, "metaspace": METASPACE}

thorough = settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)


def decode(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def decode_after(tokenizer, prompt, token_ids, skip_special_tokens=True):
    """What `token_ids` add to the text of the prompt. They may complete a character that the prompt has begun."""
    before = decode(tokenizer, prompt, skip_special_tokens)
    whole = decode(tokenizer, [*prompt, *token_ids], skip_special_tokens)
    return whole[len(commonprefix([before, whole])) :]


class WithSpecialTokens(Detokenizer):
    _skip_special_tokens = False


def make_detokenizer(tokenizer, prompt, stop, skip_special_tokens):
    kind = Detokenizer if skip_special_tokens else WithSpecialTokens
    return kind(tokenizer.backend_tokenizer, list(prompt), stop)


def stream(tokenizer, token_ids, prompt=(), stop=(), skip_special_tokens=True):
    """What is shown after each token, and at the end. And the detokenizer."""
    detokenizer = make_detokenizer(tokenizer, prompt, stop, skip_special_tokens)
    shown = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        shown.append(detokenizer.text(False))
    detokenizer.finish()
    return [*shown, detokenizer.text(True)], detokenizer


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


def assert_agrees(text, expected, name, num_tokens=0):
    """Equal, except where bytes are no characters. What is shown of them before the text goes on does not depend on
    what follows, so a decoder of all tokens at once may count them differently: after more than `MAX_PENDING` tokens,
    and for SentencePiece, whose decoder drops the valid bytes next to them.
    """
    if name == "sentencepiece" and REPLACEMENT in expected:
        assert REPLACEMENT in text
        rest = iter(text.replace(REPLACEMENT, ""))
        assert all(character in rest for character in expected.replace(REPLACEMENT, "")), "in this order"
    elif num_tokens > MAX_PENDING:
        assert re.sub(f"{REPLACEMENT}+", REPLACEMENT, text) == re.sub(f"{REPLACEMENT}+", REPLACEMENT, expected)
    else:
        assert text == expected


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.examples
def test_streamed_pieces_add_up_to_the_whole_text(name, skip_special_tokens):
    """For any tokens, be they text or not."""
    tokenizer = TOKENIZERS[name]

    @thorough
    @given(token_ids(name))
    def check(ids):
        shown, _ = stream(tokenizer, ids, skip_special_tokens=skip_special_tokens)
        assert_agrees(shown[-1], decode(tokenizer, ids, skip_special_tokens), name, len(ids))
        for earlier, later in zip(shown, shown[1:], strict=False):
            assert later.startswith(earlier)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
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
        shown, _ = stream(tokenizer, ids)
        assert shown[-1] == whole
        assert not any(REPLACEMENT in one for one in shown)
        assert all(whole.startswith(one) for one in shown)

    check()


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("character", ["é", "€", "😀", "👩‍👩‍👧‍👦"], ids=["2 bytes", "3 bytes", "4 bytes", "25 bytes"])
def test_long_runs_of_characters_in_bytes(kind, character):
    """Longer than any context: each character is shown with its last byte."""
    text = character * 20 + "a" + character + "a"
    run = [BYTES[kind][byte] for byte in character.encode()]
    a = words(kind, "a")
    ids = [*run * 20, *a, *run, *a]
    shown, _ = stream(TOKENIZERS[kind], ids)
    assert shown[-1] == text
    data = (character * 20).encode()
    for i in range(len(data)):
        assert shown[i] == data[: i + 1].decode(errors="ignore")
    assert shown[len(data)] == character * 20 + "a"


@pytest.mark.parametrize("kind", BYTES)
def test_a_stop_string_in_a_long_run_of_bytes_is_found_at_once(kind):
    """As soon as its last character is complete."""
    text = "你好吗" * 12 + "。" + "你好" * 9
    ids = [BYTES[kind][byte] for byte in text.encode()]
    for stop in ("。", "吗。", "好吗。你", "你"):
        before = text[: text.index(stop)]
        num_tokens = len((before + stop).encode())
        shown, found = stream_until_stop(TOKENIZERS[kind], ids, stop=[stop])
        assert (len(shown), shown[-1], found) == (num_tokens, before, stop)


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_that_never_become_characters_are_shown_and_not_decoded_for_ever(kind):
    """Lone and cut-off bytes of all kinds, as no model should write them: nothing is held back for long."""
    lone = st.builds(
        lambda byte, n: bytes([byte] * n), st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF]), st.integers(1, 30)
    )
    cut = st.builds(lambda char, n: char.encode()[:n], st.sampled_from("é€😀"), st.integers(1, 4))

    @settings(max_examples=75, deadline=None, derandomize=True, database=None)
    @given(st.lists(lone | cut, max_size=8))
    def check(pieces):
        ids = [BYTES[kind][byte] for byte in b"".join(pieces)]
        detokenizer = Detokenizer(TOKENIZERS[kind].backend_tokenizer, [])
        shown = [""]
        for token_id in ids:
            detokenizer.append(token_id)
            shown.append(detokenizer.text(False))
            assert shown[-1].startswith(shown[-2])
            assert len(detokenizer._context) + len(detokenizer._pending) < 50, "these are decoded"
            assert len(detokenizer._pending) <= MAX_PENDING, "they are shown, if late"
        detokenizer.finish()
        assert detokenizer.text(True).startswith(shown[-1])
        assert_agrees(detokenizer.text(True), decode(TOKENIZERS[kind], ids), kind, len(ids))

    check()


def test_a_space_comes_with_the_word_after_it():
    """A tokenizer that drops the first space must not drop that of the newest word."""
    for tokenizer in (SENTENCEPIECE, METASPACE):
        ids = tokenizer.convert_tokens_to_ids(["▁Hel", "lo", "▁wor", "ld", "▁a", "▁", "b"])
        assert decode(tokenizer, ids) == "Hello world a b"
        assert stream(tokenizer, ids)[0][:-1] == [
            "Hel",
            "Hello",
            "Hello wor",
            "Hello world",
            "Hello world a",
            "Hello world a ",
            "Hello world a b",
        ]


# --- after a prompt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_a_prompt_without_text_is_none(name, length):
    """An answer to a prompt of only special tokens begins as any text does."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a b a", add_special_tokens=False)
    shown, _ = stream(tokenizer, ids, [tokenizer.eos_token_id] * length)
    assert shown[-1] == decode(tokenizer, ids)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.examples
def test_an_answer_continues_the_text_of_its_prompt(name, skip_special_tokens):
    """Any text, split between any two of its tokens, also within a character."""
    tokenizer = TOKENIZERS[name]
    alphabet = "ab c.\n" if name == "metaspace" else st.sampled_from("ab é€😀你好 .")

    @thorough
    @given(st.text(alphabet, min_size=1, max_size=30), st.integers(0, 100))
    @example("a b" if name == "metaspace" else "a你好你好你好你好a", 60)
    @example("a b" if name == "metaspace" else "你好你好你好你好你好", 50)
    @example("a b" if name == "metaspace" else "a b 😀", 90)
    def check(text, percent):
        ids = tokenizer.encode(text, add_special_tokens=False)
        num_prompt = len(ids) * percent // 100
        while name == "sentencepiece" and decode(tokenizer, ids[:num_prompt]).endswith(REPLACEMENT):
            num_prompt -= 1  # in a long run of bytes the last few may not tell where characters begin
        prompt, answer = ids[:num_prompt], ids[num_prompt:]
        shown, _ = stream(tokenizer, answer, prompt, skip_special_tokens=skip_special_tokens)
        assert shown[-1] == decode_after(tokenizer, prompt, answer, skip_special_tokens)
        for earlier, later in zip(shown, shown[1:], strict=False):
            assert later.startswith(earlier)
            assert REPLACEMENT not in later

    check()


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_emoji_that_is_split_between_prompt_and_answer(kind, num_bytes):
    tokenizer, emoji = TOKENIZERS[kind], [BYTES[kind][byte] for byte in "😀".encode()]
    prompt = [*words(kind, "b", "a"), *emoji[:num_bytes]]
    shown, _ = stream(tokenizer, [*emoji[num_bytes:], *words(kind, "a")], prompt)
    assert shown == [""] * (3 - num_bytes) + ["😀", "😀a", "😀a"]
    shown, _ = stream(tokenizer, words(kind, "a", "b"), prompt)
    assert shown == ["a", "ab", "ab"], "what is left of it belongs to the prompt"
    shown, _ = stream(tokenizer, [], prompt)
    assert shown == [""]


@pytest.mark.parametrize("num_prompt", [1, 4, 7, 12])
def test_a_prompt_that_ends_in_a_long_run_of_bytes(num_prompt):
    """Where the end of the prompt is cut in the middle of a character, it tells nothing about the next ones."""
    for character in ("é", "你", "😀"):
        prompt = words("sentencepiece", "▁a") + [BYTES["sentencepiece"][b] for b in (character * num_prompt).encode()]
        answer = [BYTES["sentencepiece"][byte] for byte in (character * 9).encode()] + words("sentencepiece", "▁b")
        shown, _ = stream(SENTENCEPIECE, answer, prompt)
        assert shown[-1] == character * 9 + " b"
        assert not any(REPLACEMENT in one for one in shown)


def test_any_prompt_and_any_answer():
    """Byte-level, where the text of a token does not depend on the tokens before it: the sum is always exact."""

    @thorough
    @given(token_ids("byte-level"), token_ids("byte-level"))
    def check(prompt, ids):
        shown, _ = stream(BUNDLED, ids, prompt)
        before, whole = (
            BUNDLED.backend_tokenizer.decode(some, skip_special_tokens=True) for some in (prompt, [*prompt, *ids])
        )
        assert_agrees(shown[-1], whole[len(commonprefix([before, whole])) :], "byte-level", len(ids))

    check()


# --- what gives no text ----------------------------------------------------------------------------------------------

GAPS = [1, 7, MAX_PENDING, MAX_PENDING + NUM_OPEN, 60]


def three_words(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["a", "Ġb", "Ġa"] if tokenizer is BUNDLED else ["▁a", "▁b", "▁a"])
    assert decode(tokenizer, ids) == "a b a"
    return ids


@pytest.mark.parametrize("gap", GAPS)
def test_ids_beyond_the_vocabulary_give_nothing(name, gap):
    """However many there are in a row, the words around them stay as they are."""
    tokenizer = TOKENIZERS[name]
    text = three_words(tokenizer)
    ids = [*text[:-1], *[len(tokenizer) + i for i in range(gap)], text[-1]]
    shown, _ = stream(tokenizer, ids)
    assert shown[-1] == decode(tokenizer, text)
    assert shown[-3] == shown[len(text) - 2]


@pytest.mark.parametrize("gap", [1, 6, 20])
def test_ids_above_the_length_of_a_vocabulary_with_holes_are_text(gap):
    """`len(tokenizer)` counts tokens: with holes, tokens have ids above it, and the holes none."""
    vocab = {"<end>": 0, "▁a": 1, "▁b": 2, "c": 30, "▁d": 31}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<end>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<end>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    assert len(fast) == 5
    ids = [30, 31, *range(3, 3 + gap), 30, 2, 31]
    shown, _ = stream(fast, ids, prompt=[1])
    assert (shown[0], shown[1]) == ("c", "c d")
    assert shown[-1] == "c dc b d" == decode_after(fast, [1], ids)
    shown, found = stream_until_stop(fast, ids, stop=["c b"])
    assert (len(shown), shown[-1], found) == (4 + gap, "c d", "c b")


@pytest.mark.parametrize("gap", GAPS)
def test_special_tokens_are_left_out_or_written(name, gap):
    tokenizer = TOKENIZERS[name]
    text = three_words(tokenizer)
    ids = [*text[:-1], *[tokenizer.eos_token_id] * gap, text[-1]]
    assert stream(tokenizer, ids)[0][-1] == decode(tokenizer, text)
    written = stream(tokenizer, ids, skip_special_tokens=False)[0][-1]
    assert written == decode(tokenizer, ids, skip_special_tokens=False)
    assert written.count(tokenizer.eos_token) == gap


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


def naive_stop(tokenizer, ids, stops):
    """(number of tokens, text, stop string) of a search in all of the text after each token; the third may be None."""
    for num_tokens in range(1, len(ids) + 1):
        text = whole_text(tokenizer, ids[:num_tokens])
        ends = [
            (end, end - len(stop), stop)
            for stop in stops
            for end in range(len(stop), len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            _, start, stop = min(ends)
            return num_tokens, text[:start], stop
    return len(ids), decode(tokenizer, ids), None


def stream_until_stop(tokenizer, ids, stop, skip_special_tokens=True):
    """(what is shown after each token up to the one that stops, the stop string)"""
    detokenizer = make_detokenizer(tokenizer, [], stop, skip_special_tokens)
    shown = []
    for i, token_id in enumerate(ids):
        detokenizer.append(token_id)
        is_last = i == len(ids) - 1
        if is_last:
            detokenizer.finish()
        shown.append(detokenizer.text(is_last or detokenizer.stop_string is not None))
        if detokenizer.stop_string is not None:
            break
    return shown, detokenizer.stop_string


def undecided(text, stops):
    """Length of the longest end of `text` with which a stop string begins."""
    return max(
        n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) and s != text[-n:] for s in stops)
    )


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_stop_strings_are_found_as_by_a_naive_search(kind):
    tokenizer = TOKENIZERS[kind]

    @thorough
    @given(tokens_and_stops(kind))
    def check(case):
        ids, stops = case
        shown, stop = stream_until_stop(tokenizer, ids, stops)
        num_tokens, text, expected = naive_stop(tokenizer, ids, stops)
        assert (len(shown), shown[-1], stop) == (num_tokens, text, expected)
        for i, one in enumerate(shown[:-1]):
            assert text.startswith(one), "what is shown stays"
            so_far = whole_text(tokenizer, ids[: i + 1])
            assert so_far.startswith(one)
            # exactly what may become a stop string is held back, and nothing else
            assert len(so_far) - len(one) == undecided(so_far, stops)

    check()


EXAMPLES = [
    # (text, a token a letter; stops; tokens; text; which)
    ("aaab", ["aab"], 4, "a", "aab"),
    ("aabaab", ["aabaab"], 6, "", "aabaab"),
    ("aabaaabaab", ["aabaab"], 10, "aaba", "aabaab"),
    ("abababac", ["abac"], 8, "abab", "abac"),
    ("abcabc", ["c"], 3, "ab", "c"),
    ("abcabc", ["abcd", "bc"], 3, "a", "bc"),
    ("abcabc", ["bc", "abc"], 3, "", "abc"),  # complete with the same letter: the one that began first
    ("abcabc", ["abcab", "ca"], 4, "ab", "ca"),  # complete first, though it began later
    ("abc", ["abcd", "cb", "x"], 3, "abc", None),
    ("a b", [" "], 2, "a", " "),
    ("a\n\nb", ["\n\n"], 3, "a", "\n\n"),
    ("aaaa", ["aaa"], 3, "", "aaa"),
]


def test_stop_strings_across_token_borders():
    for text, stops, num_tokens, cut, which in EXAMPLES:
        ids = [BYTES["byte-level"][byte] for byte in text.encode()]
        shown, stop = stream_until_stop(BUNDLED, ids, stops)
        assert (len(shown), shown[-1], stop) == (num_tokens, cut, which)


def test_a_stop_string_is_not_found_in_the_prompt():
    """All letters of a stop string must be in the output."""
    shown, detokenizer = stream(BUNDLED, [B, C, A, B], prompt=[A], stop=["ab"])
    assert (shown[-1], detokenizer.stop_string) == ("bc", "ab")


def test_special_tokens_as_stop_strings():
    ids = [A, BUNDLED.eos_token_id, B]
    shown, stop = stream_until_stop(BUNDLED, ids, [BUNDLED.eos_token], skip_special_tokens=False)
    assert (shown, stop) == (["a", "a"], BUNDLED.eos_token)
    shown, stop = stream_until_stop(BUNDLED, ids, [BUNDLED.eos_token])
    assert (shown, stop) == (["a", "a", "ab"], None)


def test_after_a_stop_string_nothing_is_added():
    """As after a step that brought several tokens: those behind the stop string are ignored."""
    shown, detokenizer = stream(BUNDLED, [A, B, C, A], stop=["b"])
    assert shown == ["a"] * 5
    assert detokenizer.stop_string == "b"


# --- other decoders --------------------------------------------------------------------------------------------------


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
        shown, _ = stream(tokenizer, token_ids)
        assert_agrees(shown[-1], tokenizer.decode(token_ids), "sentencepiece")


def shrinking():
    """A tokenizer in which a token changes the text of the tokens before it: "a" and "b" together are "x"."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def test_a_token_that_changes_the_text_of_tokens_before_it():
    """The library raises "Invalid prefix encountered". What has been shown stays; what comes after it is shown too."""
    tokenizer = shrinking()
    assert decode(tokenizer, [3, 1, 2, 3]) == "cxyzc"
    raw = tokenizers.decoders.DecodeStream()
    raw.step(tokenizer.backend_tokenizer, 1)
    with pytest.raises(Exception, match="Invalid prefix"):
        raw.step(tokenizer.backend_tokenizer, 2)
    shown, _ = stream(tokenizer, [3, 1, 2, 3, 3])
    assert shown == ["c", "ca", "cayz", "cayzc", "cayzcc", "cayzcc"]
    shown, detokenizer = stream(tokenizer, [3, 1, 2, 3, 3], stop=["zc"])
    assert (shown[-1], detokenizer.stop_string) == ("cay", "zc")
    shown, _ = stream(tokenizer, [3, 3], prompt=[3, 1, 2])
    assert shown == ["c", "cc", "cc"], "in the prompt too"


def test_bytes_that_change_the_text_of_characters_before_them():
    """An invalid byte, and then text: the valid characters beside it have been shown."""
    run = [BYTES["sentencepiece"][byte] for byte in "你".encode()]
    ids = [*words("sentencepiece", "▁a"), *run, run[0], *words("sentencepiece", "▁b", "▁a")]
    shown, _ = stream(SENTENCEPIECE, ids)
    assert shown[3] == "a你"
    assert shown[-1].startswith("a你" + REPLACEMENT)
    assert shown[-1].endswith(REPLACEMENT + " b a")
    assert shown[-3] == shown[-1][:-2]
