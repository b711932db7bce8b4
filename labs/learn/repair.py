"""Mend a fault: a small cache or scheduler with a fault that a public engine had, and the trace of a run that fails.

The programs are our own. They are smaller than `labs/one_file.py`, so that a file shows no solution of a later chapter:
a request is admitted only if its whole answer fits, and nothing is preempted, except in the program of chapter 9.
"""

from dataclasses import dataclass

from hypothesis import strategies as st

from labs.learn.answers import load, observe
from labs.learn.differences import colon
from labs.learn.exercise import make_header
from labs.learn.find_bug import FindBug, run
from labs.learn.seen import Mistake, Seen
from labs.learn.simulation import Step
from labs.learn.texts import Language, Text
from labs.learn.traffic import Traffic, describe_traffic, traffics

SEQUENCE = """\
from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    max_tokens: int
    is_finished: bool = False
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache
    block_table: list[int] = field(default_factory=list)
"""
SCHEDULER = '''

class Scheduler:
    def __init__(self, block_manager: BlockManager, budget: int) -> None:
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, number of new tokens): a decode for each running one, and the prompts that fit."""
        for seq in self.running:
            self.block_manager.grow(seq)
        while self.waiting and self.fits(self.waiting[0]):
            self.block_manager.admit(self.waiting[0])
            self.running.append(self.waiting.popleft())
        return [(seq, len(seq.token_ids) - seq.num_computed_tokens) for seq in self.running]

    def fits(self, seq: Sequence) -> bool:
        """Return whether the longest answers of `seq` and of all running sequences have enough blocks."""
        size = self.block_manager.block_size
        needed = sum(-(-(one.num_prompt_tokens + one.max_tokens) // size) for one in [*self.running, seq])
        return needed <= self.block_manager.num_blocks

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.block_manager.release(seq)
'''
RULES = Text(
    "The file is a small program with this fault, and the trace is one of its runs. Mend the program; a few lines\n"
    "suffice, and all of it may be changed. The check runs requests without a network and compares each step with a\n"
    "right program: the tokens that are computed, the block tables, the owners, and the order of the free blocks. A\n"
    "mended program loses no hit that it could have: switching the cache off is not a repair.",
    "这个文件是一个带有此故障的小程序，上面的记录是它的一次运行。修好它：几行就够，文件里哪里都可以改。检查时不用网络，\n"
    "运行一些请求，并把每一步与正确的程序比较：算了哪些 token、块表、块的所有者、空闲块的顺序。\n"
    "修好的程序不会少命中：关掉缓存不算修好。",
)
STILL = Text("The fault is still there", "故障还在")
LARGEST_BUDGET = 99


@dataclass(frozen=True)
class Repair(FindBug):
    """A small program with a fault, and the trace of a run that fails. The fault is `bug`."""

    failing: Traffic | None = None

    def make_starter(self, language: Language) -> str:
        source = Mistake(STILL, STILL, self.bug).apply(self.answer)
        header = make_header(self, language)
        trace = "\n".join(self.trace(source, language))
        return header.replace("{trace}", trace) + "\n" + source

    def trace(self, source: str, language: Language) -> list[str]:
        """Return the steps of the failing run, as the program with the fault makes them."""
        assert self.failing is not None
        lines = describe_traffic(self.failing).show(language).replace("  \n", "\n").split("\n")
        for seen in observe(self, load(source, f"{self.name}.py"), self.failing):
            lines += show_step(seen, language)
        return lines


def show_step(seen: Seen, language: Language) -> list[str]:
    """Return a line with what the step computes and which tokens it samples, and below it all that is wrong."""
    label = f"  {seen.label.show(language)}{colon(language)}"
    step = seen.value
    if not isinstance(step, Step):
        return [f"{label}{step}"]
    chunks = " ".join(f"{name}+{num}" for name, num in step.chunks) or "–"
    sampled = "  ".join(f"{name} → {token}" for name, token in step.new_tokens)
    names = " ".join(step.waiting)
    waiting = Text(f"waiting: {names}", f"等待：{names}").show(language) if names else ""
    wrong = [*step.wrong_slots, *step.wrong_blocks]
    return [
        f"{label}{chunks:<12}  {sampled:<14}  {waiting}".rstrip(),
        *(f"      {text.show(language)}" for text in wrong),
    ]


def make_repair(
    name: str,
    chapter: str,
    title: Text,
    symptom: Text,
    sources: Text,
    hints: tuple[Text, Text, Text],
    answer: str,
    fault: tuple[tuple[str, str], ...],
    why: Text,
    failing: Traffic,
    examples: tuple[Traffic, ...],
    mistakes: tuple[Mistake, ...],
) -> Repair:
    """Return the exercise for one fault.

    symptom: what a user of the engine sees; sources: where it was reported; fault: (old, new), what makes the fault
    why: what is wrong while the fault is there; mistakes: repairs that people try, and what is still wrong then
    """
    parts = (
        symptom,
        Text(
            "The trace of a run that fails. A → 3 means that A gets the token 3:",
            "一次出错的运行的记录。A → 3 表示 A 得到 token 3：",
        ),
        Text("{trace}", "{trace}"),
    )
    blocks = [*parts, sources, RULES]
    return Repair(
        name=name,
        chapter=chapter,
        title=title,
        task=Text("\n\n".join(one.en for one in blocks), "\n\n".join(one.zh for one in blocks)),
        hints=hints,
        answer=answer,
        holes=(),
        run=run,
        examples=(failing, *examples),
        cases=unlimited,
        describe=describe_traffic,
        mistakes=(Mistake(STILL, why, fault), *mistakes),
        bug=fault,
        failing=failing,
    )


def unlimited() -> st.SearchStrategy[Traffic]:
    """Return a strategy of traffic whose prompts all fit into a step, with blocks of at least two tokens.

    With one token in a block, the remainder of no length is 1.
    """
    return traffics().map(lambda one: one._replace(budget=LARGEST_BUDGET, block_size=max(2, one.block_size)))
