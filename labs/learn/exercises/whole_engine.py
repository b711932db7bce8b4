"""The last exercise: the learner's own pieces together are the engine in one file."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from labs.learn.exercise import Build, Mistake, Seen, find_functions, make_header
from labs.learn.find_bug import ENGINE, EXAMPLES_OF_ENGINE, run
from labs.learn.findings import Report
from labs.learn.simulation import Traffic, describe_traffic, traffics
from labs.learn.texts import Language, Text

MISSING = "raise NotImplementedError  # exercise "
"""What a method of the engine has until its exercise is done, with the exercise's name."""
QUESTIONS = "questions to the bundled model"


@dataclass(frozen=True)
class WholeEngine(Build):
    """The engine in one file, in which the learner's functions replace the project's."""

    def make_starter(self, language: Language) -> str:
        return make_header(self, language) + put_together(self.answer, {})

    def make_file(self, folder: Path, language: Language) -> str:
        return make_header(self, language) + put_together(self.answer, read_pieces(folder))

    def check(self, file: Path, language: Language) -> Report:
        """Name the exercises that have not been done yet. Without them no run can pass."""
        lines = file.read_text(encoding="utf-8").split("\n")
        missing = list(dict.fromkeys(line.split(MISSING)[1].strip() for line in lines if MISSING in line))
        if not missing:
            return super().check(file, language)
        headline = Text("Not done yet: {names}.", "还没有做：{names}。").format(names=", ".join(missing))
        commands = " ".join(f"`nanovllm learn start {name}`" for name in missing[:1])
        next_step = Text(
            f"Do {'this exercise' if len(missing) == 1 else 'these exercises'} first ({commands}), then "
            "`nanovllm learn reset whole_engine` puts your functions together again.",
            f"请先做{'这个练习' if len(missing) == 1 else '这些练习'}（{commands}），"
            "然后用 `nanovllm learn reset whole_engine` 重新拼装你的函数。",
        )
        return Report(False, headline.show(language), [next_step.show(language)])


def find_parts() -> dict[str, tuple[str, str]]:
    """Return method of the engine -> (exercise, function of its answer). The last exercise for a method counts."""
    from labs.learn.catalog import list_exercises

    found = {}
    for exercise in list_exercises():
        for function, method in getattr(exercise, "engine_parts", ()):
            found[method] = exercise.name, function
    return found


def read_pieces(folder: Path) -> dict[str, str]:
    """Return method -> source of the learner's function, from the files that were started."""
    pieces = {}
    for method, (name, function) in find_parts().items():
        for file in sorted(folder.glob(f"*_{name}.py")):
            if re.fullmatch(rf"\d+_{name}", file.stem):
                source = file.read_text(encoding="utf-8")
                try:
                    node = dict(find_functions(source)).get(function)
                except SyntaxError:
                    continue
                if node is not None and is_written(node):
                    pieces[method] = ast.get_source_segment(source, node, padded=True) or ""
    return {method: text for method, text in pieces.items() if text}


def is_written(function: ast.FunctionDef) -> bool:
    return not ast.unparse(function.body[-1]).startswith("raise NotImplementedError")


def put_together(engine: str, pieces: dict[str, str]) -> str:
    """Return the engine's source with the methods that exercises ask for: the learner's, or a line that says which."""
    lines = engine.split("\n")
    parts = find_parts()
    for method, node in sorted(dict(find_functions(engine)).items(), key=lambda item: -item[1].lineno):
        if method not in parts:
            continue
        name, _ = parts[method]
        body = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
        missing = " " * body.col_offset + f"{MISSING}{name}"
        if method in pieces:
            lines[node.lineno - 1 : node.end_lineno] = pieces[method].split("\n")
        else:
            lines[body.lineno - 1 : node.end_lineno] = [missing]
    return "\n".join(lines)


def run_all(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Run traffic without a network, or the bundled model."""
    if case == QUESTIONS:
        return ask(answer)
    return run(answer, case)


def ask(answer: ModuleType) -> Iterator[Seen]:
    """Let the engine answer questions with a small pool, so that it preempts, and with two answers to each."""
    engine = answer.Engine(answer.TINY_QWEN3, num_blocks=24, block_size=4, max_num_batched_tokens=16)
    questions = ["What is paged attention?", "What is a block table?"]  # 15 and 16 tokens: only one needs copies
    tokens = engine.generate([engine.model.encode(one) for one in questions], max_tokens=12, n=2)
    for i, one in enumerate(tokens):
        label = Text(f"answer {i % 2 + 1} to {questions[i // 2]}", f"对 {questions[i // 2]} 的第 {i % 2 + 1} 个回答")
        yield Seen(label, engine.model.decode(one))


def describe(case: Any) -> Text:
    if isinstance(case, Traffic):
        return describe_traffic(case)
    return Text("The bundled model answers two questions, twice each.", "自带的模型回答两个问题，每个两次。")


EXERCISES = (
    WholeEngine(
        name="whole_engine",
        chapter="09_when_memory_is_full",
        title=Text("The whole engine", "整个引擎"),
        task=Text(
            "This is the engine in one file, `labs/one_file.py`, with your own functions in it. Where you have not\n"
            "done the exercise yet, a line says which one. Make it pass all runs of the original: schedules without\n"
            "a network, and the bundled model's answers. `nanovllm learn reset whole_engine` puts your newest\n"
            "functions together again.",
            "这就是 `labs/one_file.py` 这个单文件引擎，里面是你自己写的函数。还没做的练习，会有一行写明是哪一个。\n"
            "让它通过原版的全部运行：不用网络的调度，以及自带模型的回答。`nanovllm learn reset whole_engine`\n"
            "会用你最新的函数重新拼装。",
        ),
        hints=(
            Text("Do the exercises that the file names; then run reset.", "先做文件里提到的练习，然后运行 reset。"),
            Text(
                "If a piece passes by itself and fails here, look at what it expects of the other pieces.",
                "如果某个函数单独通过、在这里失败，看看它对其他函数有什么要求。",
            ),
            Text("Replace your pieces one by one by those of `labs/one_file.py`.", "把你的函数逐个换成原版的。"),
        ),
        answer=ENGINE,
        holes=(),
        run=run_all,
        examples=(*EXAMPLES_OF_ENGINE, QUESTIONS),
        cases=lambda: traffics(max_n=2),
        describe=describe,
        mistakes=(
            Mistake(
                Text("The wrong answers are kept", "保留了错误的回答"),
                Text("Each answer begins with its own first token.", "每个回答以自己的第一个 token 开头。"),
                (
                    (
                        "zip([seq, *self.scheduler.fork(seq)], token_ids, strict=False)",
                        "zip([seq, *self.scheduler.fork(seq)], token_ids[:1] * 9, strict=False)",
                    ),
                ),
            ),
        ),
    ),
)
