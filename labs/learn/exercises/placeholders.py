"""Chapter 11: overlap. A step is launched before the tokens of the step before it are known."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.simulation import VOCABULARY, mix
from labs.learn.texts import Text

END = 4

SOLUTION = '''
END = 4  # the token that ends a sequence


class Overlap:
    """Launches step n + 1, and then processes the tokens of step n. Each step computes one token of each sequence."""

    def __init__(self, seqs, block_size, register):
        self.running = list(seqs)
        self.block_size = block_size
        self.register = register  # register(seq, i) adds the full block i of `seq` to the prefix cache

    def launch(self):
        """Return the next step: a list of (sequence, position of the token that it computes). Add placeholders."""
        step = []
        for seq in self.running:
            position = seq.num_computed_tokens
            if position + 1 < seq.num_prompt_tokens + seq.max_tokens:  # no step computes the last token
                step.append((seq, position))
        for row, (seq, _) in enumerate(step):
            seq.num_computed_tokens += 1
            seq.token_ids.append(-1 - row)
        return step

    def arrive(self, step, new_tokens):
        """Process the tokens that `step` has sampled, one for each of its rows."""
        for (seq, position), token in zip(step, new_tokens):
            if seq.is_finished:  # it ended while this step was in flight
                continue
            seq.token_ids[position + 1] = token
            if (position + 1) % self.block_size == 0:
                self.register(seq, position // self.block_size)
            if token == END or position + 2 == seq.num_prompt_tokens + seq.max_tokens:
                seq.is_finished = True
                del seq.token_ids[position + 2 :]
                self.running.remove(seq)


def fill(input_ids, newest):
    """Return the inputs of a step, with each placeholder replaced by a token of the step before: `newest`, by row."""
    return [newest[-1 - token] if token < 0 else token for token in input_ids]
'''


class Tick(NamedTuple):
    """What has happened when the tokens of a step arrive."""

    inputs: tuple[int, ...]
    """Of the step, with placeholders replaced."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...]
    registered: tuple[tuple[tuple[int, ...], str], ...]
    """Tokens that the prefix cache finds, and the block with the last of them."""
    too_early: tuple[Text, ...]
    """Blocks that are found before they are filled."""
    running: str

    def __repr__(self) -> str:
        blocks = " ".join(block for _, block in self.registered)
        return f"inputs=[{' '.join(map(str, self.inputs))}] registered=[{blocks}] running=[{self.running}]"


class Launched(NamedTuple):
    """What a launch has decided."""

    too_early: tuple[Text, ...]
    inputs: str
    """Position and token of each row: "A[3]=-1"."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...]

    def __repr__(self) -> str:
        return self.inputs or "–"


class Device:
    """Computes steps in the order of their launches. The next token depends on all inputs of its sequence so far."""

    def __init__(self, seqs: dict[str, Any]) -> None:
        self.kept = {}  # (name, position) -> what is kept for the token, in place of its K and V
        for name, seq in seqs.items():
            before = 0
            for position in range(seq.num_computed_tokens):
                before = self.kept[name, position] = mix(before, seq.token_ids[position])

    def compute(self, rows: list[tuple[str, int]], input_ids: list[int]) -> list[int]:
        tokens = []
        for (name, position), token in zip(rows, input_ids, strict=True):
            kept = self.kept[name, position] = mix(self.kept.get((name, position - 1), 0), token)
            tokens.append(kept % VOCABULARY)
        return tokens


class Run:
    """Two steps are in flight at most: the launch of step n + 1 comes before the tokens of step n."""

    def __init__(self, answer: ModuleType, case: Any) -> None:
        self.answer = answer
        self.block_size, requests = case
        self.seqs: dict[str, Any] = {}
        for i, (prompt, max_tokens) in enumerate(requests):
            seq = self.seqs[chr(ord("A") + i)] = one_file.Sequence(list(prompt), len(prompt), max_tokens)
            seq.num_computed_tokens = len(prompt) - 1  # the first step samples the first token
        self.names = {id(seq): name for name, seq in self.seqs.items()}
        self.device = Device(self.seqs)
        self.registered: dict[tuple[int, ...], str] = {}
        self.too_early: list[Text] = []
        self.overlap = answer.Overlap(list(self.seqs.values()), self.block_size, self.register)

    def register(self, seq: Any, i: int) -> None:
        """Note the block, and whether all of its tokens have been computed."""
        name, end = self.names[id(seq)], (i + 1) * self.block_size
        self.registered[tuple(seq.token_ids[:end])] = f"{name}.{i}"
        for position in range(i * self.block_size, end):
            if (name, position) not in self.device.kept:
                en = f"Block {name}.{i} is found before it is filled: token {position} is not computed"
                self.too_early.append(Text(en, f"块 {name}.{i} 还没填满就能被找到：token {position} 还没有计算"))

    def steps(self) -> Iterator[Seen]:
        """Yield each launch and each arrival."""
        newest: list[int] = []
        ahead, number = self.launch(), 1
        yield self.see_launch(number, *ahead)
        while ahead[0]:
            step, rows, input_ids = ahead
            ahead = self.launch()
            yield self.see_launch(number + 1, *ahead)
            inputs = [int(token) for token in self.answer.fill(list(input_ids), list(newest))]
            newest = self.device.compute(rows, inputs)
            self.overlap.arrive(step, list(newest))
            label = Text(f"the tokens {newest} of step {number} arrive", f"第 {number} 步的 token {newest} 到达")
            yield Seen(label, self.see_tick(inputs), self.draw())
            number += 1

    def launch(self) -> tuple[Any, list[tuple[str, int]], list[int]]:
        """Return the next step, its rows by name, and its inputs: the device gets a copy when it is launched."""
        known = {name: list(seq.token_ids) for name, seq in self.seqs.items()}
        step = self.overlap.launch()
        rows = [(self.names[id(seq)], position) for seq, position in step]
        return step, rows, [known[name][position] for name, position in rows]

    def see_launch(self, number: int, step: Any, rows: list[tuple[str, int]], input_ids: list[int]) -> Seen:
        """Return what a launch has decided. A block that is registered now is not filled yet."""
        shown = [f"{name}[{position}]={token}" for (name, position), token in zip(rows, input_ids, strict=True)]
        tokens = tuple((name, tuple(seq.token_ids)) for name, seq in self.seqs.items())
        value = Launched(tuple(self.too_early), " ".join(shown), tokens)
        self.too_early.clear()
        return Seen(Text(f"launch of step {number}", f"启动第 {number} 步"), value, self.draw())

    def see_tick(self, inputs: list[int]) -> Tick:
        tokens = tuple((name, tuple(seq.token_ids)) for name, seq in self.seqs.items())
        running = " ".join(self.names[id(seq)] for seq in self.overlap.running)
        tick = Tick(tuple(inputs), tokens, tuple(self.registered.items()), tuple(self.too_early), running)
        self.too_early.clear()
        return tick

    def draw(self) -> str:
        lines = [f"{name}   {seq.token_ids}" + "   ended" * seq.is_finished for name, seq in self.seqs.items()]
        lines += [
            f"prefix cache: {' '.join(map(str, tokens))} → block {block}" for tokens, block in self.registered.items()
        ]
        return "\n".join(lines)


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    return Run(answer, case).steps()


def draw_notes(case: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Say which block is found too early."""
    if yours is None or not isinstance(yours.value, Tick | Launched):
        return []
    return [(note, "") for note in yours.value.too_early[:1]]


def describe(case: Any) -> Text:
    block_size, requests = case
    names = [f"{chr(ord('A') + i)} {list(prompt)}, max_tokens={num}" for i, (prompt, num) in enumerate(requests)]
    return Text(
        f"block_size = {block_size}, END = {END}. Prompts: {'; '.join(names)}. All prompt tokens but the last are "
        f"computed. A[3]=-1: the input at position 3 of A is the placeholder -1.",
        f"block_size = {block_size}，END = {END}。提示词：{'；'.join(names)}。除最后一个外，提示词的 token 都已计算。"
        f"A[3]=-1 表示：A 在位置 3 的输入是占位符 -1。",
    )


def cases() -> st.SearchStrategy[Any]:
    prompt = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
    requests = st.lists(st.tuples(prompt, st.integers(1, 6)), min_size=1, max_size=3).map(tuple)
    return st.tuples(st.integers(1, 4), requests)


EXERCISES = (
    Build(
        name="placeholders",
        chapter="11_making_it_fast",
        title=Text("Placeholders of overlap", "重叠的占位符"),
        task=Text(
            "With overlap, the host launches step n + 1 before it knows the tokens of step n. Write three\n"
            "functions.\n"
            "`launch`: for each running sequence that still needs a token, the step computes the token at position\n"
            "`seq.num_computed_tokens`. Count it as computed, and append a placeholder for the token that will be\n"
            "sampled: -1 - row, where row is the sequence's place in the step. Return the list of (seq, position).\n"
            "No step computes the last token: a sequence has at most `num_prompt_tokens + max_tokens` tokens.\n"
            "`fill`: the device replaces each placeholder in its inputs by the token of that row of the step\n"
            "before.\n"
            "`arrive`: for each row, if the sequence has ended, drop the token. Otherwise it goes to position + 1.\n"
            "If block i is now full of *computed* tokens, call `self.register(seq, i)`. If the token is END or the\n"
            "last one, set `seq.is_finished`, delete the placeholders behind it, and remove the sequence from\n"
            "`self.running`.\n\n"
            "    launch 1    A [7]        -> [7, -1]          launch 2    [7, -1]     -> [7, -1, -1]\n"
            "    tokens of 1 are [5]      -> [7, 5, -1]       the inputs [-1] of step 2 become [5]",
            "有重叠时，主机还不知道第 n 步的 token，就启动第 n + 1 步。请写三个函数。\n"
            "`launch`：对每个还需要 token 的运行中的序列，这一步计算位置 `seq.num_computed_tokens` 上的 token。把\n"
            "它算作已计算，再为将要采样出的 token 追加一个占位符 -1 - row，row 是这个序列在这一步里的行号。返回\n"
            "(seq, position) 的列表。最后一个 token 不用计算：序列最多有 `num_prompt_tokens + max_tokens` 个\n"
            "token。\n"
            "`fill`：设备把输入里的每个占位符换成上一步结果里那一行的 token。\n"
            "`arrive`：逐行处理。如果序列已经结束，丢弃这个 token；否则把它放到 position + 1。如果块 i 现在填满了\n"
            "**已计算**的 token，调用 `self.register(seq, i)`。如果这个 token 是 END 或最后一个，设置\n"
            "`seq.is_finished`，删去它后面的占位符，并把序列从 `self.running` 中移除。\n\n"
            "    启动第 1 步   A [7]        -> [7, -1]          启动第 2 步   [7, -1]     -> [7, -1, -1]\n"
            "    第 1 步的 token 是 [5]    -> [7, 5, -1]       第 2 步的输入 [-1] 变成 [5]",
        ),
        names=(
            "seq.token_ids",
            "seq.num_prompt_tokens",
            "seq.max_tokens",
            "seq.num_computed_tokens",
            "seq.is_finished",
        ),
        hints=(
            Text(
                "All that `arrive` has to know is the position in the step: `seq.num_computed_tokens` already counts "
                "the step that was launched after this one.",
                "`arrive` 只需要看这一步里的 position：`seq.num_computed_tokens` 已经把后来启动的那一步也算进去了。",
            ),
            Text(
                "When the tokens of a step arrive, the token at its position is computed, and all tokens before it. So "
                "block `position // block_size` is full if `(position + 1) % block_size == 0`.",
                "一步的 token 到达时，它的 position 以及之前的 token 都已计算。所以当 `(position + 1) % block_size "
                "== 0` 时，"
                "块 `position // block_size` 已填满。",
            ),
            Text(
                "`fill`: `newest[-1 - token] if token < 0 else token`. `arrive` begins with `if seq.is_finished: "
                "continue`, and ends with `del seq.token_ids[position + 2 :]`.",
                "`fill`：`newest[-1 - token] if token < 0 else token`。`arrive` 的开头是 `if seq.is_finished: "
                "continue`，最后是 `del seq.token_ids[position + 2 :]`。",
            ),
        ),
        answer=SOLUTION,
        holes=("Overlap.launch", "Overlap.arrive", "fill"),
        run=run,
        examples=(
            (2, (((1, 2, 3), 5), ((0, 1), 6), ((2,), 3))),
            (4, (((1, 2, 3), 5), ((0, 1), 6), ((2, 2, 1), 4))),
            (1, (((1, 2), 4), ((1, 3), 6))),
            (3, (((3, 1), 1), ((3, 1), 3))),
        ),
        cases=cases,
        describe=describe,
        draw=draw_notes,
        mistakes=(
            Mistake(
                Text("The placeholder of row 0 is a token", "第 0 行的占位符成了 token"),
                Text(
                    "-row is 0 for row 0, and 0 is a token id: the device takes it as it is. With -1 - row all "
                    "placeholders are negative.",
                    "第 0 行的 -row 是 0，而 0 是一个 token id：设备会把它当作真的 token。用 -1 - row，"
                    "占位符就都是负数。",
                ),
                (
                    ("seq.token_ids.append(-1 - row)", "seq.token_ids.append(-row)"),
                    ("newest[-1 - token]", "newest[-token]"),
                ),
            ),
            Mistake(
                Text("All placeholders are the same", "所有占位符都一样"),
                Text(
                    "A placeholder says which row of the step has the token. If all are -1, each sequence gets the "
                    "token "
                    "of the first one.",
                    "占位符要说明 token 在哪一行。如果都是 -1，每个序列拿到的都是第一个序列的 token。",
                ),
                (("seq.token_ids.append(-1 - row)", "seq.token_ids.append(-1)"),),
            ),
            Mistake(
                Text("The row of the wrong step", "用了另一步的行号"),
                Text(
                    "The placeholder has the row of the step *before*. In this step the sequence may have another row, "
                    "because a sequence has left in between.",
                    "占位符里是**上一步**的行号。这一步里，这个序列可能在另一行，因为中间有序列离开了。",
                ),
                (
                    (
                        "newest[-1 - token] if token < 0 else token for token in input_ids",
                        "newest[row] if token < 0 else token for row, token in enumerate(input_ids)",
                    ),
                ),
            ),
            Mistake(
                Text("The token of an ended sequence is not dropped", "没有丢弃已结束序列的 token"),
                Text(
                    "When a step was launched, the host did not know that the sequence ends with the step before. So "
                    "the step has one row too many, and its token must be dropped.",
                    "启动一步时，主机还不知道序列在上一步已经结束。所以这一步多了一行，它的 token 必须丢弃。",
                ),
                (("                continue\n", "                pass\n"),),
            ),
            Mistake(
                Text("A dropped token is still registered", "丢弃了 token，却仍然登记了块"),
                Text(
                    "The sequence had ended before this step's tokens arrived, and has freed its blocks. They may "
                    "belong "
                    "to another sequence by now: the prefix cache must not find them under the old tokens.",
                    "这一步的 token 到达之前，序列已经结束，它的块已经释放，现在可能属于别的序列："
                    "前缀缓存不能再按原来的 token "
                    "找到它们。",
                ),
                (
                    (
                        "                continue\n",
                        "                if (position + 1) % self.block_size == 0:\n"
                        "                    self.register(seq, position // self.block_size)\n"
                        "                continue\n",
                    ),
                ),
            ),
            Mistake(
                Text("Registered at the launch", "启动时就登记了块"),
                Text(
                    "At the launch, the last token of the block is often still a placeholder, and its K and V are not "
                    "computed. Register the block when the tokens of this step arrive.",
                    "启动时，块里的最后一个 token 往往还是占位符，它的 K 和 V 也没有计算。要等这一步的 token "
                    "到达时再登记。",
                ),
                (
                    (
                        "            seq.token_ids.append(-1 - row)\n",
                        "            seq.token_ids.append(-1 - row)\n"
                        "            if seq.num_computed_tokens % self.block_size == 0:\n"
                        "                self.register(seq, seq.num_computed_tokens // self.block_size - 1)\n",
                    ),
                    ("            if (position + 1) % self.block_size == 0:\n", "            if False:\n"),
                ),
            ),
            Mistake(
                Text("A step in flight counts as computed", "把还在计算的一步算作已计算"),
                Text(
                    "`seq.num_computed_tokens` counts the step that was launched after this one. Its token is not "
                    "computed yet, so the block is found before it is filled. Count with this step's position.",
                    "`seq.num_computed_tokens` 把后来启动的那一步也算进去了，而那一步的 token 还没有计算，"
                    "所以块还没填满就能被找到。"
                    "应该用这一步的 position 来数。",
                ),
                (
                    (
                        "if (position + 1) % self.block_size == 0:\n                self.register(seq, position // "
                        "self.block_size)",
                        "if seq.num_computed_tokens % self.block_size == 0:\n"
                        "                self.register(seq, seq.num_computed_tokens // self.block_size - 1)",
                    ),
                ),
            ),
            Mistake(
                Text("The newest placeholder is filled", "填了最新的占位符"),
                Text(
                    "There are two placeholders at the end: this step's, and that of the step launched after it. The "
                    "token belongs to position + 1, not to the end.",
                    "末尾有两个占位符：一个属于这一步，一个属于后来启动的那一步。token 要放到 position + 1，"
                    "而不是末尾。",
                ),
                (("seq.token_ids[position + 1] = token", "seq.token_ids[-1] = token"),),
            ),
            Mistake(
                Text("Placeholders stay after the end", "结束后还留着占位符"),
                Text(
                    "A sequence that ends has placeholders of the step in flight behind its last token. They would be "
                    "decoded as text.",
                    "序列结束时，最后一个 token 后面还有在途那一步的占位符。留着的话，它们会被当作文本解码。",
                ),
                (("                del seq.token_ids[position + 2 :]\n", ""),),
            ),
            Mistake(
                Text("A step too many at max_tokens", "到了 max_tokens 还多启动一步"),
                Text(
                    "An END is known only when it arrives, but `max_tokens` is known in advance: do not launch a step "
                    "for a sequence whose last token is in flight.",
                    "END 要等到达时才知道，而 `max_tokens` 事先就知道：如果最后一个 token 已经在途，"
                    "就不要再为这个序列启动一步。",
                ),
                (("if position + 1 < seq.num_prompt_tokens + seq.max_tokens:", "if True:"),),
            ),
        ),
    ),
)
