"""Chapter 10: stop strings may be spread over several tokens, and their possible beginnings are held back."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Language, Text

SOLUTION = '''
class Output:
    """The text of one output, which ends before the first stop string."""

    def __init__(self, stops):
        self.stops = stops
        self.text = ""  # of all tokens
        self.num_shown = 0  # characters that were returned
        self.stop = None  # the stop string that was found

    def show(self, end):
        """Return the text up to character `end` that was not returned before."""
        new = self.text[self.num_shown : end]
        self.num_shown = max(self.num_shown, end)
        return new

    def append(self, token_text):
        """Add the text of a token, and return what can be shown now. Set `self.stop` if a stop string is complete."""
        self.text += token_text
        found = []  # (end, start, stop string)
        for stop in self.stops:
            start = self.text.find(stop)
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return self.show(self.safe_end())
        end, start, self.stop = min(found)
        return self.show(start)

    def safe_end(self):
        """Return where the longest possible beginning of a stop string starts: the text before it can be shown."""
        for start in range(self.num_shown, len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return start
        return len(self.text)

    def finish(self):
        """Return the text that is still held back. No token follows."""
        return self.show(len(self.text))
'''


class Shown(NamedTuple):
    """What a method returned, and the stop string that was found."""

    text: Any
    stop: Any

    def __repr__(self) -> str:
        return self.show("en")

    def show(self, language: Language) -> str:
        """Return this in words: "shows 'c', found 'ab'"."""
        shows, found = ("显示 ", "，找到 ") if language == "zh" else ("shows ", ", found ")
        return f"{shows}{self.text!r}" + (f"{found}{self.stop!r}" if self.stop is not None else "")


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Append the texts of tokens until a stop string ends the output, or there are no more."""
    stops, tokens = case
    output, shown = answer.Output(list(stops)), ""
    for i, token in enumerate(tokens):
        new = output.append(token)
        shown += new if isinstance(new, str) else "?"
        value = Shown(new, output.stop)
        yield Seen(Text(f"token {token!r}", f"token {token!r}"), value, draw_text("".join(tokens[: i + 1]), shown))
        if output.stop is not None:
            return
    yield Seen(Text("finish", "结束"), Shown(output.finish(), None))


def draw_text(text: str, shown: str) -> str:
    """Return two lines: all text, and under it what the user sees."""
    return f"text    {text!r}\nshown   {shown!r}"


def describe(case: Any) -> Text:
    stops, tokens = case
    stops, tokens = ", ".join(map(repr, stops)), " | ".join(map(repr, tokens))
    return Text(
        f"Stop strings: {stops}. Texts of the tokens: {tokens}.",
        f"停止字符串：{stops}。各 token 的文本：{tokens}。",
    )


def cases() -> st.SearchStrategy[Any]:
    stop, token = st.text("ab", min_size=1, max_size=3), st.text("abc", max_size=4)
    stops = st.lists(stop, min_size=1, max_size=3, unique=True).map(tuple)
    return st.tuples(stops, st.lists(token, min_size=1, max_size=5).map(tuple))


EXERCISES = (
    Build(
        name="stop_strings",
        chapter="10_from_logits_to_text",
        title=Text("Stop strings", "停止字符串"),
        task=Text(
            "An output ends before the first stop string in its text, and the user must never see any part of it.\n"
            "A stop string may be spread over several tokens. Write three methods; `show(end)` is given. `append`\n"
            "adds the text of a token and returns what can be shown now. If a stop string is complete, it sets\n"
            "`self.stop` to it, and returns the text before it that was not shown yet. Otherwise text at the end\n"
            "that may be the beginning of a stop string is held back, and no other text. `safe_end` returns where\n"
            "the held-back text starts. `finish` returns what is still held back. With stops = ['User:']:\n\n"
            "    token       'a.U'    'se'    'd Us'     'er: b'\n"
            "    append      'a.'     ''      'Used '    ''           self.stop = 'User:'\n\n"
            "If several stop strings are complete, the one that ends first counts; of those that end together, the\n"
            "longest. After `self.stop` is set, nothing more is called.",
            "输出在文本里的第一个停止字符串之前结束，用户不能看到它的任何一部分。停止字符串可能跨好几个 token。\n"
            "请写三个方法；`show(end)` 已给出。`append` 加入一个 token 的文本，返回现在可以显示的文本。\n"
            "如果有停止字符串已经完整，就把它存入 `self.stop`，返回它前面还没有显示过的文本。\n"
            "否则，扣住末尾可能是停止字符串开头的文本，其余的都不要扣。`safe_end` 返回扣住的文本从哪里开始。\n"
            "`finish` 返回还扣着的文本。例如 stops = ['User:']：\n\n"
            "    token       'a.U'    'se'    'd Us'     'er: b'\n"
            "    append      'a.'     ''      'Used '    ''           self.stop = 'User:'\n\n"
            "如果有几个停止字符串都完整，取最先结束的那个；同时结束的，取最长的。\n"
            "设置 `self.stop` 之后不会再调用任何方法。",
        ),
        hints=(
            Text(
                "Look for stop strings in all text so far, not in the newest token.",
                "要在目前的全部文本里找停止字符串，而不是只在最新的 token 里找。",
            ),
            Text(
                "`safe_end`: for each start from `self.num_shown` on, does a stop string begin with "
                "`self.text[start:]`? "
                "The first such start is the answer, otherwise `len(self.text)`.",
                "`safe_end`：从 `self.num_shown` 开始，对每个 start，看有没有停止字符串以 `self.text[start:]` 开头？"
                "第一个这样的 start 就是结果；没有则是 `len(self.text)`。",
            ),
            Text(
                "`append`: with `start = self.text.find(stop)`, collect (start + len(stop), start, stop) for each stop "
                "string that is found (`start >= 0`). `min` of these is the one that counts: then `self.show(start)`.",
                "`append`：`start = self.text.find(stop)`；对每个找到的停止字符串（`start >= 0`），收集 "
                "(start + len(stop), start, stop)。其中用 `min` 取出的就是要找的那个，然后 `self.show(start)`。",
            ),
        ),
        answer=SOLUTION,
        holes=("Output.append", "Output.safe_end", "Output.finish"),
        run=run,
        examples=(
            (("User:",), ("a.U", "se", "d Us", "er: b")),
            (("aab",), ("ca", "a", "a", "b")),
            (("abab", "ba"), ("cab", "ab")),
            (("b", "ab"), ("c", "ab")),
            (("b", "a"), ("ab",)),  # the order of the list does not matter
            (("bb", "a"), ("cab", "bb")),
            (("ab", "cd"), ("xc", "d")),
            (("ab",), ("ca",)),
            (("abc",), ("ccc",)),
            (("b",), ("a", "ab")),
        ),
        cases=cases,
        describe=describe,
        mistakes=(
            Mistake(
                Text("Only the newest token is searched", "只在最新的 token 里找"),
                Text(
                    "A stop string may begin in one token and end in another. Search all text so far.",
                    "停止字符串可能从一个 token 开始，到另一个 token 才结束。要在目前的全部文本里找。",
                ),
                (
                    (
                        "start = self.text.find(stop)",
                        "start = self.text.find(stop, len(self.text) - len(token_text))",
                    ),
                ),
            ),
            Mistake(
                Text("A place in the newest token", "最新 token 里的位置"),
                Text(
                    "`show` counts characters of all text so far. A place in the newest token is another number, and a "
                    "stop string that began in an earlier token is not found there. Search `self.text`.",
                    "`show` 的位置从全部文本的开头算起，最新 token 里的位置是另一个数；"
                    "而且在它里面找不到从前面的 token 开始的停止字符串。要在 `self.text` 里找。",
                ),
                (("start = self.text.find(stop)", "start = token_text.find(stop)"),),
            ),
            Mistake(
                Text("Nothing is held back", "没有扣住任何文本"),
                Text(
                    "The user sees the beginning of the stop string before its end arrives, and a stream cannot take "
                    "text back. Hold back text that may begin a stop string.",
                    "停止字符串还没有完整，用户就看到了它的开头，而流式输出无法收回文本。"
                    "可能是停止字符串开头的文本要先扣住。",
                ),
                (("return self.show(self.safe_end())", "return self.show(len(self.text))"),),
            ),
            Mistake(
                Text("Too much is held back", "扣住的太多"),
                Text(
                    "The last characters are always held back, one fewer than the longest stop string has. The text is "
                    "right in the end, but the stream is always late. Hold back only what may begin a stop string.",
                    "末尾总是扣住固定数目的字符：最长的停止字符串的长度减一。文本最终是对的，但流式输出总是晚一些。"
                    "只应扣住可能是停止字符串开头的文本。",
                ),
                (
                    (
                        "self.show(self.safe_end())",
                        "self.show(max(self.num_shown, len(self.text) + 1 - max(map(len, self.stops))))",
                    ),
                ),
            ),
            Mistake(
                Text("The shortest possible beginning is held back", "只扣住了最短的可能开头"),
                Text(
                    "With the stop string 'aab', the text 'aa' can be its first two characters. If only the last 'a' "
                    "is "
                    "held back, the first one is shown. Look for the longest beginning: the smallest start.",
                    "停止字符串是 'aab' 时，文本 'aa' 可能是它的前两个字符。只扣住最后一个 'a'，前一个就显示出去了。"
                    "要找最长的开头，即最小的 start。",
                ),
                (
                    (
                        "range(self.num_shown, len(self.text))",
                        "reversed(range(self.num_shown, len(self.text)))",
                    ),
                ),
            ),
            Mistake(
                Text("Only the first stop string is held back", "只顾及第一个停止字符串"),
                Text(
                    "The text at the end may be the beginning of any of the stop strings.",
                    "末尾的文本可能是任何一个停止字符串的开头。",
                ),
                (("self.text[start:]) for stop in self.stops)", "self.text[start:]) for stop in self.stops[:1])"),),
            ),
            Mistake(
                Text("The first of the list ends the text", "由列表中的第一个结束文本"),
                Text(
                    "If several stop strings are in the text, the one that ends first counts. Their order in the list "
                    "does not matter.",
                    "如果文本里有几个停止字符串，取最先结束的那个，与它们在列表里的顺序无关。",
                ),
                (("self.stop = min(found)", "self.stop = found[0]"),),
            ),
            Mistake(
                Text("The one that starts first ends the text", "取了最先开始的那个"),
                Text(
                    "With 'abab' and 'ba', the text 'abab' has both, and 'ba' ends first. If the characters came one "
                    "by "
                    "one, it would be found first too. So the result does not depend on how the text is cut into "
                    "tokens.",
                    "停止字符串为 'abab' 和 'ba' 时，文本 'abab' 里两个都有，而 'ba' 先结束。如果字符一个一个地到达，"
                    "先找到的也是它。这样，结果就与文本怎样分成 token 无关。",
                ),
                (("self.stop = min(found)", "self.stop = min(found, key=lambda one: one[1])"),),
            ),
            Mistake(
                Text("The shortest of those that end together", "同时结束的取了最短的"),
                Text(
                    "With 'b' and 'ab', the text 'ab' ends both at once. The longest one counts, so that the user "
                    "sees no "
                    "part of a stop string.",
                    "停止字符串为 'b' 和 'ab' 时，文本 'ab' 使两者同时结束。要取最长的，"
                    "这样用户不会看到停止字符串的任何一部分。",
                ),
                (("self.stop = min(found)", "self.stop = min(found, key=lambda one: (one[0], -one[1]))"),),
            ),
            Mistake(
                Text("The stop string is shown", "显示了停止字符串"),
                Text(
                    "The output ends before the stop string: show the text up to its start, not up to its end.",
                    "输出在停止字符串之前结束：显示到它开始的地方，而不是结束的地方。",
                ),
                (("return self.show(start)", "return self.show(end)"),),
            ),
            Mistake(
                Text("The end is lost", "丢掉了结尾"),
                Text(
                    "If the output ends for another reason, for example `max_tokens`, the text that is held back "
                    "cannot "
                    "become a stop string any more. `finish` has to return it.",
                    "如果输出因为别的原因结束，例如 `max_tokens`，扣住的文本就不可能再变成停止字符串。`finish` "
                    "要返回它。",
                ),
                (("return self.show(len(self.text))", 'return ""'),),
            ),
        ),
    ),
)
