"""Write the loop that asks a model for one token after the other, until an end token or `max_tokens`."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

WORDS = ("the", "cat", "sat", "on", "a", "mat", "END", "STOP")
END_TOKENS = (6, 7)

SOLUTION = '''
def generate(next_token, prompt, end_tokens, max_tokens):
    """Return the output: the new tokens as a list, without the prompt.

    next_token(tokens): the model; it returns the token that follows the list `tokens`
    prompt, end_tokens: lists of tokens
    """
    tokens = list(prompt)
    output = []
    while len(output) < max_tokens:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in end_tokens:
            break
    return output
'''


class Case(NamedTuple):
    """A prompt, and what the model answers: `answer`, then end tokens for ever."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_tokens: int


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Observe the output, then what the model was asked about, then the caller's list."""
    asked: list[list[int]] = []

    def next_token(tokens: list[int]) -> int:
        asked.append(list(tokens))
        i = len(asked) - 1
        return case.answer[i] if i < len(case.answer) else END_TOKENS[0]

    prompt = list(case.prompt)
    output = answer.generate(next_token, prompt, list(END_TOKENS), case.max_tokens)
    yield Seen(Text("output", "输出"), list(output) if isinstance(output, tuple) else output)
    for i, tokens in enumerate(asked):
        yield Seen(Text(f"call {i + 1} of the model with", f"第 {i + 1} 次调用模型，传入"), tokens, join(tokens))
    yield Seen(Text("the caller's prompt afterwards", "调用者的提示词（之后）"), prompt, join(prompt))


def join(tokens: Any) -> str:
    """Return tokens as words. What is not in the vocabulary is shown as it is."""
    if not isinstance(tokens, list | tuple):
        return repr(tokens)
    return " ".join(WORDS[i] if isinstance(i, int) and 0 <= i < len(WORDS) else repr(i) for i in tokens) or "–"


def draw(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw both texts as columns of tokens, with an arrow below the first token that differs."""
    if right is None or yours is None or not isinstance(yours.value, list):
        return []
    rows = [list(map(str, seen.value)) for seen in (right, yours)]
    words = [[join([token]) for token in seen.value] for seen in (right, yours)]
    first = next((i for i, (a, b) in enumerate(zip(*rows, strict=False)) if a != b), min(map(len, rows)))
    length = max(map(len, rows))
    columns = [[row[i] if i < len(row) else "–" for row in (*words, *rows)] for i in range(length)]
    widths = [max(map(len, column)) for column in columns]
    lines = [f"{i:<2} " + "  ".join(c[k].ljust(w) for c, w in zip(columns, widths, strict=True)) for i, k in ROWS]
    lines.append("   " + " " * sum(width + 2 for width in widths[:first]) + "↑")
    lines = [line.rstrip() for line in lines]
    return [(Text("token by token (R: right, Y: yours)", "逐个 token 比较（R：参考答案，Y：你的）"), "\n".join(lines))]


ROWS = (("R", 0), ("", 2), ("Y", 1), ("", 3))


def describe(case: Case) -> Text:
    tail = [*case.answer, END_TOKENS[0]]
    return Text(
        f"Prompt: {list(case.prompt)} ({join(case.prompt)}). max_tokens: {case.max_tokens}. End tokens: "
        f"{list(END_TOKENS)}. The model answers {tail} ({join(tail)}), and then only end tokens.",
        f"提示词：{list(case.prompt)}（{join(case.prompt)}）。max_tokens：{case.max_tokens}。结束 token："
        f"{list(END_TOKENS)}。模型依次给出 {tail}（{join(tail)}），之后只给出结束 token。",
    )


def cases() -> st.SearchStrategy[Case]:
    tokens = st.integers(0, len(WORDS) - 1)
    return st.builds(
        Case,
        st.lists(tokens, min_size=1, max_size=4).map(tuple),
        st.lists(tokens, max_size=6).map(tuple),
        st.integers(1, 7),
    )


MISTAKES = (
    Mistake(
        Text("The end token is not checked", "没有检查结束 token"),
        Text(
            "A model gives scores for any list of tokens, also after its end token: text that nobody asked for. So the "
            "loop must stop as soon as the new token is an end token.",
            "对任何一串 token，模型都会给出得分，结束 token 之后也一样，那是没有人要的文本。"
            "所以新 token 是结束 token 时，循环必须停下。",
        ),
        (("token in end_tokens:", "token is None:"),),
    ),
    Mistake(
        Text("`max_tokens` is not checked", "没有检查 `max_tokens`"),
        Text(
            "The loop ends only at an end token. A model may never give one, and then the loop never ends.",
            "循环只在遇到结束 token 时停止。模型可能一直不给出结束 token，循环就永远不会结束。",
        ),
        (("while len(output) < max_tokens:", "while True:"),),
    ),
    Mistake(
        Text("The end token is dropped", "丢掉了结束 token"),
        Text(
            "The end token is a token of the output like the others: the caller sees from it why the answer ended. "
            "Append the token first, then check whether it is an end token.",
            "结束 token 也是输出的一部分：调用者由它知道回答为什么结束。先追加，再检查它是不是结束 token。",
        ),
        (
            ("        output.append(token)\n", ""),
            ("            break\n", "            break\n        output.append(token)\n"),
        ),
    ),
    Mistake(
        Text("Only one end token is checked", "只检查了一个结束 token"),
        Text(
            "`end_tokens` is a list: many models have several end tokens, for example one for a message and one for "
            "the whole text. Any of them ends the answer.",
            "`end_tokens` 是一个列表：许多模型有不止一个结束 token，例如一个结束一条消息，一个结束整段文本。"
            "遇到其中任何一个都要停止。",
        ),
        (("token in end_tokens:", "token == end_tokens[0]:"),),
    ),
    Mistake(
        Text("An end token in the prompt ends the answer", "提示词里的结束 token 结束了回答"),
        Text(
            "Only a new token may end the answer. A chat prompt contains end tokens itself, at the end of each "
            "message.",
            "只有新 token 才能结束回答。对话提示词本身就含有结束 token：每条消息的末尾都有一个。",
        ),
        (("token in end_tokens:", "any(one in end_tokens for one in tokens):"),),
    ),
    Mistake(
        Text("The last token of the prompt is checked", "检查了提示词的最后一个 token"),
        Text(
            "The check before the first call looks at the prompt. A prompt may end with an end token, and the model "
            "still has to answer: check only tokens that the model gave.",
            "第一次调用之前的检查看的是提示词。提示词的最后一个可以是结束 token，模型仍然要回答："
            "只检查模型给出的 token。",
        ),
        (("while len(output) < max_tokens:", "while len(output) < max_tokens and tokens[-1] not in end_tokens:"),),
    ),
    Mistake(
        Text("One token too many", "多了一个 token"),
        Text(
            "`max_tokens` is the largest length of the output. The loop may continue only while the output is shorter: "
            "`<`, not `<=`.",
            "`max_tokens` 是输出的最大长度。只有输出比它短时，循环才能继续：用 `<`，不是 `<=`。",
        ),
        (("while len(output) < max_tokens:", "while len(output) <= max_tokens:"),),
    ),
    Mistake(
        Text("One token too few", "少了一个 token"),
        Text(
            "The output may have `max_tokens` tokens. This loop stops one token earlier.",
            "输出可以有 `max_tokens` 个 token。这个循环早停了一个。",
        ),
        (("while len(output) < max_tokens:", "while len(output) < max_tokens - 1:"),),
    ),
    Mistake(
        Text("The prompt is counted", "把提示词也算进去了"),
        Text(
            "`max_tokens` limits the new tokens only. A prompt of 500 tokens does not make the answer shorter.",
            "`max_tokens` 只限制新 token 的个数。提示词有 500 个 token，回答也不应该因此变短。",
        ),
        (("while len(output) < max_tokens:", "while len(tokens) < max_tokens:"),),
    ),
    Mistake(
        Text("The output contains the prompt", "输出里含有提示词"),
        Text("Return the new tokens only, without the prompt.", "只返回新 token，不含提示词。"),
        (("return output", "return tokens"),),
    ),
    Mistake(
        Text("The model sees only the newest token", "模型只看到最新的 token"),
        Text(
            "The model maps all tokens so far to the next one. Without a KV cache it must get the whole list each "
            "time.",
            "模型由目前为止的所有 token 得到下一个。没有 KV cache 时，每次都要把整个列表交给它。",
        ),
        (("next_token(tokens)\n        tokens", "next_token(tokens[-1:])\n        tokens"),),
    ),
    Mistake(
        Text("The new token is not appended", "没有追加新 token"),
        Text(
            "The model was asked about the prompt again. Append each new token to the tokens that the model sees next.",
            "又一次只拿提示词去问模型。每个新 token 都要追加到模型下一次看到的列表里。",
        ),
        (("        tokens.append(token)\n", ""),),
    ),
    Mistake(
        Text("The caller's list has changed", "修改了调用者的列表"),
        Text(
            "`tokens = prompt` gives the caller's list a second name, and `append` changes it. Copy it: "
            "`list(prompt)`.",
            "`tokens = prompt` 只是给调用者的列表起了另一个名字，`append` 会修改它。要复制：`list(prompt)`。",
        ),
        (("tokens = list(prompt)", "tokens = prompt"),),
    ),
    Mistake(
        Text("Only the last end token is checked", "只检查了最后一个结束 token"),
        Text(
            "A model can have several end tokens. Any one of them ends the answer: `token in end_tokens`.",
            "模型可以有几个结束 token，遇到任何一个都要结束：`token in end_tokens`。",
        ),
        (("token in end_tokens:", "token == end_tokens[-1]:"),),
    ),
    Mistake(
        Text("The model is called once too often", "多调用了一次模型"),
        Text(
            "Each call is a pass over all weights. Look at the end tokens and at `max_tokens` before "
            "the next call, not after it.",
            "每次调用都要把全部权重算一遍。应在下一次调用之前检查结束 token 和 `max_tokens`，而不是之后。",
        ),
        (
            ("        token = next_token(tokens)\n", "        token = following if output else next_token(tokens)\n"),
            ("            break\n", "            break\n        following = next_token(tokens)\n"),
        ),
    ),
    Mistake(
        Text("The model does not see the prompt", "模型看不到提示词"),
        Text(
            "From the second call on, the model sees only its own output. It must see the prompt and "
            "all new tokens in each call.",
            "从第二次调用起，模型只看到自己的输出。每次调用都必须看到提示词和所有新 token。",
        ),
        (("next_token(tokens)\n        tokens", "next_token(output or tokens)\n        tokens"),),
    ),
)


EXERCISES = (
    Build(
        name="generation_loop",
        chapter="01_one_token",
        title=Text("The generation loop", "生成循环"),
        task=Text(
            "`next_token(tokens)` is the model: it returns the token that follows a list of tokens. Start with the\n"
            "prompt, ask the model for one token at a time, and append each one, so that the model sees it in the "
            "next\n"
            "call. Stop after an end token, or when there are `max_tokens` (>= 1) new tokens. Return the new tokens\n"
            "only. An end token that the model gives is part of them. Do not change the caller's `prompt`.\n"
            "\n"
            "    prompt [5, 3], end_tokens [6, 7]; the model gives 1, then 4, then 6, then 2, …\n"
            "    max_tokens = 8  ->  [1, 4, 6]        stopped after the end token 6\n"
            "    max_tokens = 2  ->  [1, 4]           stopped by max_tokens; the model was called twice",
            "`next_token(tokens)` 就是模型：给它一串 token，它返回下一个 token。从提示词开始，每次向模型要一个 "
            "token，\n"
            "并把它追加到列表里，让模型下一次看得到。遇到结束 token 之后停止，或者新 token 达到 `max_tokens`（>= "
            "1）个时停止。\n"
            "只返回新 token；模型给出的结束 token 也包括在内。不要修改调用者的 `prompt`。\n"
            "\n"
            "    提示词 [5, 3]，end_tokens [6, 7]；模型依次给出 1、4、6、2……\n"
            "    max_tokens = 8  ->  [1, 4, 6]        在结束 token 6 之后停止\n"
            "    max_tokens = 2  ->  [1, 4]           达到 max_tokens；模型只被调用两次",
        ),
        hints=(
            Text(
                "Keep two lists: `tokens` is what the model sees, `output` is what you return.",
                "用两个列表：`tokens` 是模型看到的，`output` 是要返回的。",
            ),
            Text(
                "The loop's condition is about `max_tokens`. The end token is checked inside, after the new token has "
                "been appended to both lists.",
                "循环条件管 `max_tokens`。结束 token 在循环里面检查，放在把新 token 追加到两个列表之后。",
            ),
            Text(
                "`while len(output) < max_tokens:`, and inside: ask, append twice, `if token in end_tokens: break`.",
                "`while len(output) < max_tokens:`，里面依次是：询问，追加两次，`if token in end_tokens: break`。",
            ),
        ),
        answer=SOLUTION,
        holes=("generate",),
        run=run,
        examples=(
            Case((0, 1), (2, 6, 3, 4), 5),
            Case((1, 6, 0), (2, 7, 3), 4),
            Case((1, 6), (2, 3), 4),
            Case((0,), (1, 2, 3, 4), 2),
            Case((0, 1, 2), (3, 4), 1),
            Case((4,), (5, 1), 3),
        ),
        cases=cases,
        describe=describe,
        draw=draw,
        mistakes=MISTAKES,
    ),
)
