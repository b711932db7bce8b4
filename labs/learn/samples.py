"""Fork a sequence into several samples that each append their own tokens, and observe the pool after each step.

What is kept in a slot is the text up to its token. So it can be seen when a sample overwrites a slot of another sample,
or reads a slot that holds other text than its own.

    Samples(block_size=4, num_prompt_tokens=3, num_samples=3, num_spare=2, num_steps=1)
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.drawing import compare_fields, draw_slots
from labs.learn.exercise import Seen
from labs.learn.given import slot_of
from labs.learn.texts import Text, count, same_text

NO_RESULT = "no result"  # of functions that return nothing


class Samples(NamedTuple):
    """A case. C.0 has computed its prompt, and is forked into C.1, C.2, …"""

    block_size: int
    num_prompt_tokens: int
    num_samples: int
    num_spare: int
    """Blocks that the prompt does not need."""
    num_steps: int
    """In each, every sample appends a token. At the end, all samples are released."""


class Overwrite(NamedTuple):
    """`writer` has stored K and V of its own token in a slot that `owner` still reads."""

    writer: str
    slot: int
    owner: str


class State(NamedTuple):
    """What a call returned and copied, and the state after it."""

    result: Any
    tables: dict[str, list[int]]
    num_owners: list[int]
    free: list[int]
    num_computed_tokens: dict[str, int]
    copies: list[tuple[int, int]]
    """Blocks copied by this call: (source, destination)."""
    num_copies: int
    """By all calls so far."""
    overwrites: list[Overwrite]
    wrong_reads: list[tuple[str, int]]
    """(sample, slot): the slot does not hold the text of this sample."""

    def compare(self, other: "State") -> tuple[str, str]:
        return compare_fields(self, other, hidden=("num_copies", "overwrites", "wrong_reads"))  # drawn in words

    def __repr__(self) -> str:
        parts = [f"tables {self.tables}", f"num_owners {self.num_owners}", f"free {self.free}"]
        parts += [f"copies {self.copies}"] if self.copies else []
        parts += [f"computed {self.num_computed_tokens}"]
        parts[:0] = [] if self.result == NO_RESULT else [repr(self.result)]
        return ", ".join(parts)


class Run:
    """One run: a block manager, the samples, and what each slot holds."""

    def __init__(self, blocks: Any, case: Samples) -> None:
        self.blocks, self.case = blocks, case
        self.seqs: dict[str, Any] = {}
        self.held: dict[int, tuple[int, ...]] = {}  # the text up to the token whose K and V are in the slot
        self.overwrites: list[Overwrite] = []
        self.num_copies = 0

    def observe(self) -> Iterator[Seen]:
        """Fork, let the samples append tokens in their turns, and release them."""
        parent = self.add("C.0")
        self.blocks.try_admit(parent)
        while parent.num_computed_tokens < self.case.num_prompt_tokens:
            self.write("C.0")
        for i in range(1, self.case.num_samples):
            child = self.add(f"C.{i}")
            parent.token_ids.append(0)  # not computed yet
            self.blocks.fork(parent, child)
            parent.token_ids.pop()
            yield self.see(same_text(f"fork(C.0, C.{i})"), NO_RESULT, self.copy())
        for number in range(1, self.case.num_steps + 1):
            yield self.step(number)
        for name, seq in self.seqs.items():
            self.blocks.release(seq)
            yield self.see(same_text(f"release({name})"), NO_RESULT, self.copy())

    def step(self, number: int) -> Seen:
        """Let each sample append a token. Blocks are copied before K and V are written, as in an engine."""
        results: dict[str, Any] = {}
        for i, (name, seq) in enumerate(self.seqs.items()):
            seq.token_ids.append(len(seq.token_ids) + 1 + 10 * (i + 1))
            results[name] = self.blocks.try_grow(seq)
        copies = self.copy()
        for name, seq in self.seqs.items():
            if results[name]:
                self.write(name)
            else:
                seq.token_ids.pop()  # it waits
        label = Text(f"step {number}: try_grow for each sample", f"第 {number} 步：对每个样本调用 try_grow")
        return self.see(label, results, copies)

    def add(self, name: str) -> Any:
        prompt = list(range(1, self.case.num_prompt_tokens + 1))
        self.seqs[name] = one_file.Sequence(prompt, len(prompt), 9)
        return self.seqs[name]

    def slot_of(self, seq: Any, position: int) -> int:
        return slot_of(seq, position, self.case.block_size)

    def write(self, name: str) -> None:
        """Store K and V of the first token of a sample that is not computed yet."""
        seq = self.seqs[name]
        position = seq.num_computed_tokens
        slot = self.slot_of(seq, position)
        for other, its in self.seqs.items():
            if its is not seq and any(self.slot_of(its, i) == slot for i in range(its.num_computed_tokens)):
                self.overwrites.append(Overwrite(name, slot, other))
        self.held[slot] = tuple(seq.token_ids[: position + 1])
        seq.num_computed_tokens += 1

    def copy(self) -> list[tuple[int, int]]:
        """Copy the blocks that the block manager has put into `copies`."""
        size = self.case.block_size
        copies, self.blocks.copies = list(self.blocks.copies), []
        for source, destination in copies:
            for i in range(size):
                self.held[destination * size + i] = self.held.get(source * size + i, ())
        self.num_copies += len(copies)
        return copies

    def see(self, label: Text, result: Any, copies: list[tuple[int, int]]) -> Seen:
        blocks, seqs = self.blocks, self.seqs
        wrong = []
        for name, seq in seqs.items():
            for i in range(seq.num_computed_tokens if seq.block_table else 0):
                if self.held.get(self.slot_of(seq, i)) != tuple(seq.token_ids[: i + 1]):
                    wrong.append((name, self.slot_of(seq, i)))
        state = State(
            result,
            {name: list(seq.block_table) for name, seq in seqs.items()},
            list(blocks.num_owners),
            list(blocks.free),
            {name: seq.num_computed_tokens for name, seq in seqs.items()},
            copies,
            self.num_copies,
            self.overwrites,
            wrong,
        )
        self.overwrites = []
        return Seen(label, state, draw_slots(blocks, seqs, self.held, has_free=False))


def run_samples(answer: Any, case: Samples) -> Iterator[Seen]:
    """Observe `answer.Blocks` in a case."""
    num_blocks = -(-case.num_prompt_tokens // case.block_size) + case.num_spare
    return Run(answer.Blocks(num_blocks, case.block_size), case).observe()


def describe_samples(case: Samples) -> Text:
    """Return the case in words."""
    num_blocks = -(-case.num_prompt_tokens // case.block_size)
    en = (
        f"Blocks of {count(case.block_size, 'token')}. C.0 has a prompt of {count(case.num_prompt_tokens, 'token')} in "
        f"{count(num_blocks, 'block')}, and is forked into {count(case.num_samples, 'sample')}. "
        f"{count(case.num_spare, 'other block')} {'is' if case.num_spare == 1 else 'are'} free."
    )
    zh = (
        f"每块 {case.block_size} 个槽位。C.0 的提示词有 {case.num_prompt_tokens} 个 token，占 {num_blocks} 块，"
        f"分叉成 {case.num_samples} 个样本。另有 {case.num_spare} 个空闲块。"
    )
    if case.num_steps:
        en = f"{en} Then each appends {count(case.num_steps, 'token')}."
        zh = f"{zh}然后每个样本增加 {case.num_steps} 个 token。"
    return Text(en, zh)


def draw_overwrites(case: Samples, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Return sentences about what went wrong: slots that were overwritten, and the number of copies."""
    if yours is None or not isinstance(yours.value, State):
        return []
    found: list[tuple[Text, str]] = []
    for writer, slot, owner in yours.value.overwrites:
        text = Text(f"{writer} overwrote slot {slot} of {owner}", f"{writer} 覆盖了 {owner} 的 {slot} 号槽位")
        found.append((text, ""))
    overwritten = {slot for _, slot, _ in yours.value.overwrites}
    wrong = [(name, slot) for name, slot in yours.value.wrong_reads if slot not in overwritten]
    for name in dict.fromkeys(name for name, _ in wrong):
        slots = [slot for other, slot in wrong if other == name]
        what = f"slot {slots[0]} does" if len(slots) == 1 else f"slots {', '.join(map(str, slots))} do"
        text = Text(f"{what} not hold the text of {name}", f"{'、'.join(map(str, slots))} 号槽位里不是 {name} 的文本")
        found.append((text, ""))
    if right is not None and right.value.num_copies != yours.value.num_copies:
        a, b = right.value.num_copies, yours.value.num_copies
        found.append((Text(f"copies so far: {b}, not {a}", f"目前的复制次数：{b}，应为 {a}"), ""))
    return found


def samples() -> st.SearchStrategy[Samples]:
    """Return a strategy: small pools, prompts that fill their last block or do not."""
    return st.builds(
        Samples,
        st.integers(2, 4),
        st.integers(1, 6),
        st.sampled_from((2, 3, 1)),  # the first is the simplest
        st.sampled_from((2, 3, 4, 1, 0)),
        st.integers(0, 3),
    )


EXAMPLES = (
    Samples(4, 3, 3, 2, 1),  # as in chapter 7: two copies, not three
    Samples(2, 4, 2, 2, 2),  # the last block is full: nothing to copy
    Samples(4, 5, 2, 0, 1),  # no free block for the copy
    Samples(4, 2, 1, 1, 3),  # one sample only
    Samples(2, 3, 3, 5, 2),
)
"""Planted cases."""
