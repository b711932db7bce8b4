"""The first exercise: nothing to write, so that one sees how exercises work."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from labs.learn.chinese_contracts import translate
from labs.learn.exercise import NOT_WRITTEN, Build, Mistake, Seen, make_header
from labs.learn.texts import Language, Text

SOLUTION = '''
def generate(next_token, prompt, num_tokens):
    """Return the prompt and `num_tokens` new tokens. `next_token(tokens)` is the model: it returns one token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens
'''


class RemoveOneLine(Build):
    """The starter has the whole solution, and one line too many."""

    def make_starter(self, language: Language) -> str:
        line = "    tokens = list(prompt)\n"
        code = self.answer.lstrip("\n").replace(line, f"    {NOT_WRITTEN}\n{line}")
        return make_header(self, language) + translate(code, language)


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    prompt, num_tokens = case
    asked: list[list[int]] = []

    def next_token(tokens: list[int]) -> int:
        asked.append(list(tokens))
        return (3 * sum(tokens) + len(tokens)) % 10

    tokens = answer.generate(next_token, list(prompt), num_tokens)
    for i, context in enumerate(asked):
        yield Seen(Text(f"step {i + 1} asks the model about", f"第 {i + 1} 步询问模型的 token"), context)
    yield Seen(Text("result", "结果"), tokens)


EXERCISES = (
    RemoveOneLine(
        name="remove_one_line",
        chapter="01_one_token",
        title=Text("Remove one line", "删掉一行"),
        task=Text(
            "This loop is complete: it asks the model for one token at a time. Remove the line that raises\n"
            "NotImplementedError, save the file, and check it.",
            "这个循环是完整的：每次向模型要一个 token。删掉抛出 NotImplementedError 的那一行，保存文件，然后检查。",
        ),
        hints=(
            Text("Look for the line that begins with `raise`.", "找到以 `raise` 开头的那一行。"),
            Text("Delete that line; change nothing else.", "删除那一行，其他都不要动。"),
            Text("`nanovllm learn show 1` prints the finished file.", "`nanovllm learn show 1` 会打印完成后的文件。"),
        ),
        answer=SOLUTION,
        holes=("generate",),
        run=run,
        examples=(([1, 2], 3), ([5], 0), ([7], 1)),
        cases=lambda: st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 4)),
        describe=lambda case: Text(
            f"Prompt {case[0]}, {case[1]} new tokens.", f"提示词 {case[0]}，生成 {case[1]} 个 token。"
        ),
        mistakes=(
            Mistake(
                Text("The prompt is missing in the result", "结果里缺少提示词"),
                Text("The function returns the prompt and the new tokens.", "函数返回提示词和新生成的 token。"),
                (("return tokens", "return tokens[len(prompt):]"),),
            ),
            Mistake(
                Text("One token too few", "少生成一个 token"),
                Text("The loop must run `num_tokens` times.", "循环要执行 `num_tokens` 次。"),
                (("range(num_tokens)", "range(num_tokens - 1)"),),
            ),
            Mistake(
                Text("The model sees only the last token", "模型只看到最后一个 token"),
                Text("The model must see all tokens so far.", "模型必须看到目前为止的所有 token。"),
                (("append(next_token(tokens))", "append(next_token(tokens[-1:]))"),),
            ),
        ),
    ),
)
