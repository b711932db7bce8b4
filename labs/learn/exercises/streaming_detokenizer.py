"""Chapter 10: streamed text has only whole characters; the bytes of an incomplete one are held back."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

SOLUTION = '''
class Detokenizer:
    """The text of one growing output."""

    def __init__(self, vocab):
        self.vocab = vocab  # token id -> bytes
        self.held = b""  # bytes that are not text yet

    def append(self, token_id):
        """Add a token, and return the characters that are complete now: perhaps none."""
        self.held += self.vocab[token_id]
        for num_held in range(4):
            end = len(self.held) - num_held
            try:
                text = self.held[:end].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[end:]
            return text
        return ""

    def finish(self):
        """Return the text of the bytes that are still held back. No token follows."""
        return self.held.decode(errors="replace")
'''


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Append the tokens, given by their bytes, and finish."""
    vocab = sorted(set(case))
    detokenizer = answer.Detokenizer(list(vocab))
    for token in case:
        name = f"token {show_bytes(token)}"
        yield Seen(Text(name, name), repr(detokenizer.append(vocab.index(token))))
    yield Seen(Text("finish", "结束"), repr(detokenizer.finish()))


def show_bytes(token: bytes) -> str:
    """Return ASCII as it is, and the hexadecimal numbers of other bytes: `a<e5>`."""
    return "".join(chr(byte) if byte < 128 else f"<{byte:02x}>" for byte in token) or "(no bytes)"


def describe(case: Any) -> Text:
    text = b"".join(case).decode(errors="replace")
    tokens = " | ".join(show_bytes(token) for token in case)
    return Text(
        f"The text {text!r} in tokens, separated by |: {tokens}. A number in <> is one byte that is not ASCII.",
        f"文本 {text!r} 分成这些 token（以 | 隔开）：{tokens}。<> 里是一个非 ASCII 的字节。",
    )


@st.composite
def cases(draw: Any) -> tuple[bytes, ...]:
    """Return tokens: a text cut at any bytes, perhaps ended too early, perhaps with tokens of no bytes."""
    rest = draw(st.text("aé块🙂", min_size=1, max_size=5)).encode()
    rest = rest[: len(rest) - draw(st.integers(0, 3))]
    tokens = []
    while rest:
        size = draw(st.integers(0, 5))
        tokens.append(rest[:size])
        rest = rest[size:]
        if len(tokens) == 12:
            break
    return tuple(tokens)


EXERCISES = (
    Build(
        name="streaming_detokenizer",
        chapter="10_from_logits_to_text",
        title=Text("Stream whole characters", "流式输出完整的字符"),
        task=Text(
            "A token is a few bytes: `self.vocab[token_id]`. In UTF-8 a character has one to four bytes, and a\n"
            "token may end in the middle of one. Write `append`: it adds a token and returns all characters that\n"
            "are complete now and were not returned before. Bytes of an incomplete character at the end are held\n"
            "back for the next call. Write `finish` too: it returns the bytes that are left as text, with � for an\n"
            'incomplete character (`errors="replace"`). 块 is the three bytes e5 9d 97:\n\n'
            "    token bytes     'a' e5        9d        97 '.'      e5\n"
            "    append          'a'           ''        '块.'       ''         finish: '�'\n\n"
            "The bytes are valid UTF-8, except that the output may end too early.",
            "一个 token 是几个字节：`self.vocab[token_id]`。UTF-8 的一个字符有 1 到 4 个字节，token 可能在字符中间\n"
            "断开。写 `append`：加入一个 token，返回现在已经完整、之前还没有返回过的全部字符；末尾不完整的字符的字\n"
            "节先扣住，留到下一次调用。再写 `finish`：把剩下的字节作为文本返回，用\n"
            '`errors="replace"` 把不完整的字符显示为 �。例如“块”是三个字节 e5 9d 97：\n\n'
            "    token 的字节    'a' e5        9d        97 '.'      e5\n"
            "    append          'a'           ''        '块.'       ''         finish：'�'\n\n"
            "除了输出可能过早结束之外，这些字节都是合法的 UTF-8。",
        ),
        hints=(
            Text(
                "Keep the bytes that were not returned yet in `self.held`, and decode these, not single tokens.",
                "把还没有返回的字节放在 `self.held` 里；解码的是它，而不是单个 token。",
            ),
            Text(
                "`bytes.decode()` raises UnicodeDecodeError if the end is incomplete. At most three bytes at the end "
                "can "
                "be incomplete: try without the last 0, 1, 2, 3 bytes.",
                "如果末尾不完整，`bytes.decode()` 会抛出 UnicodeDecodeError。不完整的最多是末尾三个字节："
                "依次去掉最后 0、1、2、3 个字节试一试。",
            ),
            Text(
                "`for num_held in range(4)`: `end = len(self.held) - num_held`, try `self.held[:end].decode()`; if it "
                "works, `self.held = self.held[end:]`, and return the text.",
                "`for num_held in range(4)`：`end = len(self.held) - num_held`，尝试 `self.held[:end].decode()`；"
                "成功后令 `self.held = self.held[end:]`，返回这段文本。",
            ),
        ),
        answer=SOLUTION,
        holes=("Detokenizer.append", "Detokenizer.finish"),
        run=run,
        examples=(
            (b"a\xe5", b"\x9d", b"\x97.", b"\xe5"),
            (b"a", b"\xf0", b"\x9f\x99", b"\x82", b"b"),
            (b"\xe5\x9d", b"\x97\xe5", b"\x9d\x97", b""),
            (b"a", b"b"),
            (b"\xf0\x9f", b"\x99"),
            (b"aaa\xe5\x9d", b"\x97"),
        ),
        cases=cases,
        describe=describe,
        mistakes=(
            Mistake(
                Text("Half a character is shown", "显示了不完整的字符"),
                Text(
                    "A character may be spread over several tokens. If each token is decoded by itself, or all bytes "
                    'with `errors="replace"`, its first bytes are shown as � at once, and a stream cannot take them '
                    "back. Keep these bytes, and decode them together with the next token.",
                    "一个字符可能分在几个 token 里。如果逐个 token 单独解码，或者用 "
                    '`errors="replace"` 解码全部字节，'
                    "它的前几个字节会立刻显示成 �，而流式输出无法收回。"
                    "要留着这些字节，和下一个 token 一起解码。",
                ),
                (("self.held[:end].decode()", 'self.held[:end].decode(errors="replace")'),),
            ),
            Mistake(
                Text("Incomplete bytes are dropped", "丢掉了不完整的字节"),
                Text(
                    'With `errors="ignore"` the first bytes of a character are thrown away, so the character never '
                    "appears. Keep them in `self.held`.",
                    '用 `errors="ignore"`，字符的前几个字节被丢弃，这个字符就再也不会出现。应该把它们留在 '
                    "`self.held` 里。",
                ),
                (("self.held[:end].decode()", 'self.held[:end].decode(errors="ignore")'),),
            ),
            Mistake(
                Text("Whole characters are held back too", "把完整的字符也扣住了"),
                Text(
                    "A token may end with the first byte of a character. Only this byte has to wait: the whole "
                    "characters before it can be shown now.",
                    "一个 token 的末尾可能是某个字符的第一个字节。只有这个字节需要等：它前面的完整字符现在就可以显示。",
                ),
                (("range(4)", "range(1)"),),
            ),
            Mistake(
                Text("At most one byte is held back", "最多只扣住一个字节"),
                Text(
                    "A character has up to four bytes, so up to three bytes at the end can be incomplete.",
                    "一个字符最多有四个字节，所以末尾最多有三个字节不完整。",
                ),
                (("range(4)", "range(2)"),),
            ),
            Mistake(
                Text("Text is returned again", "文本被重复返回"),
                Text(
                    "`append` returns new characters only. Remove the bytes that were returned from `self.held`.",
                    "`append` 只返回新的字符。已经返回的字节要从 `self.held` 中去掉。",
                ),
                (("            self.held = self.held[end:]\n", ""),),
            ),
            Mistake(
                Text("The held bytes are lost", "扣住的字节丢失了"),
                Text(
                    "After some text is returned, the incomplete bytes behind it must stay in `self.held`: the next "
                    "token continues them.",
                    "返回一段文本之后，后面不完整的字节要留在 `self.held` 里：下一个 token 接着它们。",
                ),
                (("self.held = self.held[end:]", 'self.held = b""'),),
            ),
            Mistake(
                Text("The end is lost", "丢掉了结尾"),
                Text(
                    "If the output ends in the middle of a character, `finish` shows its bytes as �. They belong to "
                    "the "
                    "output: the tokens were counted and paid for.",
                    "如果输出在字符中间结束，`finish` 要把剩下的字节显示为 �。它们也是输出的一部分：用户看到它，"
                    "就知道输出在这里被截断了。",
                ),
                (('self.held.decode(errors="replace")', '""'),),
            ),
        ),
    ),
)
