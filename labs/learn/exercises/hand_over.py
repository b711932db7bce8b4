"""Chapter 14: one engine computes prompts, another decodes, and the blocks of each prompt move between them."""

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.given import slot_of
from labs.learn.simulation import VOCABULARY, mix
from labs.learn.texts import Text

KIB_PER_TOKEN = 128  # K and V of one token: Llama 3.1 8B in bfloat16
MAX_TICKS = 60

SOLUTION = '''
class HandOver:
    """Moves sequences from the engine that computes prompts to the one that decodes. Each has a pool of its own."""

    def __init__(self, prefill, decode):
        self.prefill = prefill  # the block manager of the engine that computes prompts
        self.decode = decode  # the block manager of the engine that decodes
        self.tables = {}  # sequence -> its block table in the decode engine, while its blocks are on their way
        self.running = []  # sequences that the decode engine runs

    def try_send(self, seq):
        """Reserve blocks in the decode engine. Return the copies, (source, destination), or None if they do not fit."""
        num_blocks = self.decode.num_blocks_for(seq.num_prompt_tokens + seq.max_tokens)
        if num_blocks > len(self.decode.free):
            return None
        self.tables[seq] = [self.decode.take() for _ in range(num_blocks)]
        copies = list(zip(seq.block_table, self.tables[seq]))
        return copies

    def arrive(self, seq):
        """All blocks of `seq` have been copied: free those of the prefill engine, and let the other one decode."""
        self.prefill.release(seq)
        seq.block_table = self.tables.pop(seq)
        self.running.append(seq)
'''


class Request(NamedTuple):
    prompt_len: int
    max_tokens: int


class Case(NamedTuple):
    """Two pools with blocks of the same size, and how many blocks the network moves in a tick."""

    block_size: int
    prefill_blocks: int
    decode_blocks: int
    bandwidth: int
    requests: tuple[Request, ...]


class Tick(NamedTuple):
    """What has happened in one tick."""

    notes: tuple[Text, ...]
    """Reads of wrong slots, and blocks that were free too early."""
    tokens: tuple[tuple[str, tuple[int, ...], int], ...]
    """Name, output, number of computed tokens."""
    prefill: tuple[int, ...]
    """Free blocks of each engine, in the order in which they will be taken."""
    decode: tuple[int, ...]
    network: tuple[tuple[str, int, int], ...]
    """Copies that wait: name, source, destination."""
    running: tuple[str, ...]
    num_moved: int
    """Blocks, so far."""

    def __repr__(self) -> str:
        waiting = " ".join(f"{name}:{source}→{destination}" for name, source, destination in self.network)
        return f"running=[{' '.join(self.running)}] network=[{waiting}] moved={self.num_moved}"


class Total(NamedTuple):
    """The whole run."""

    ticks: int
    num_moved: int
    block_size: int

    def __repr__(self) -> str:
        return f"ticks={self.ticks} moved={self.num_moved * self.block_size * KIB_PER_TOKEN} KiB"


class Run:
    """One run of two engines: P computes one prompt in a tick, D one token of each sequence that runs."""

    def __init__(self, answer: ModuleType, case: Case) -> None:
        self.case = case
        self.prefill = one_file.BlockManager(case.prefill_blocks, case.block_size)
        self.decode = one_file.BlockManager(case.decode_blocks, case.block_size)
        self.hand_over = answer.HandOver(self.prefill, self.decode)
        self.seqs: dict[str, Any] = {}
        for i, request in enumerate(case.requests):
            prompt = [10 * i + j for j in range(request.prompt_len)]
            self.seqs[chr(ord("A") + i)] = one_file.Sequence(prompt, len(prompt), request.max_tokens)
        self.names = {seq: name for name, seq in self.seqs.items()}
        self.waiting, self.ready = deque(self.seqs.values()), deque[Any]()
        self.network: deque[tuple[Any, int, int]] = deque()
        self.slots: tuple[dict[int, int], dict[int, int]] = ({}, {})  # what is kept for a token, in P and in D
        self.notes: list[Text] = []
        self.num_moved = 0

    def ticks(self) -> Iterator[Seen]:
        """Yield each tick, until all sequences are finished, or a slot is missing."""
        for number in range(1, MAX_TICKS + 1):
            self.notes = []
            self.compute_prompt()
            self.send()
            self.move()
            has_slots = all([self.compute(seq) for seq in list(self.hand_over.running)])
            yield Seen(Text(f"tick {number}", f"第 {number} 个节拍"), self.see(), self.draw())
            if not has_slots:
                return
            if all([seq.is_finished for seq in self.seqs.values()]):
                yield Seen(Text("at the end", "最后"), Total(number, self.num_moved, self.case.block_size))
                return

    def compute_prompt(self) -> None:
        """Compute the next prompt in P, and sample its first token."""
        if not self.waiting or not self.prefill.try_admit(self.waiting[0]):
            return
        seq, kept = self.waiting.popleft(), 0
        for position, token in enumerate(seq.token_ids):
            kept = mix(kept, token)
            self.slots[0][self.slot_of(seq, position)] = kept
        seq.num_computed_tokens = seq.num_prompt_tokens
        seq.token_ids.append(self.sample(seq, 0))
        self.ready.append(seq)

    def send(self) -> None:
        while self.ready:
            seq = self.ready[0]
            copies = self.hand_over.try_send(seq)
            if copies is None:
                return
            self.ready.popleft()
            self.network += [(seq, int(source), int(destination)) for source, destination in copies]
            if not copies:
                self.hand_over.arrive(seq)

    def move(self) -> None:
        """Copy the next blocks over the network. The last block of a sequence tells that it has arrived."""
        size = self.case.block_size
        for _ in range(min(self.case.bandwidth, len(self.network))):
            seq, source, destination = self.network.popleft()
            for i in range(size):
                self.slots[1][destination * size + i] = self.slots[0].get(source * size + i, -1)
            self.num_moved += 1
            if seq not in [one for one, _, _ in self.network]:
                self.hand_over.arrive(seq)
        for seq, source, _ in self.network:
            if source in self.prefill.free:
                en = f"Block {source} of {self.names[seq]} is free in P, and was not sent yet"
                self.notes.append(Text(en, f"{self.names[seq]} 的块 {source} 在 P 里已经空闲，却还没有发送"))

    def compute(self, seq: Any) -> bool:
        """Compute the tokens of `seq` that are not computed yet, in D, and sample one. False if a slot is missing."""
        for position in range(seq.num_computed_tokens, len(seq.token_ids)):
            if position // self.case.block_size >= len(seq.block_table):
                en = f"{self.names[seq]} has no slot in D for its token {position}"
                self.notes.append(Text(en, f"{self.names[seq]} 的 token {position} 在 D 里没有槽位"))
                return False
            before = self.slots[1].get(self.slot_of(seq, position - 1), -1) if position else 0
            self.slots[1][self.slot_of(seq, position)] = mix(before, seq.token_ids[position])
        seq.num_computed_tokens = len(seq.token_ids)
        seq.token_ids.append(self.sample(seq, 1))
        if len(seq.token_ids) == seq.num_prompt_tokens + seq.max_tokens:
            seq.is_finished = True
            self.hand_over.running.remove(seq)
            self.decode.release(seq)
        return True

    def slot_of(self, seq: Any, position: int) -> int:
        return slot_of(seq, position, self.case.block_size)

    def sample(self, seq: Any, engine: int) -> int:
        """Return a token that depends on all that is read, and note slots that hold something else."""
        read, right = 0, 0
        for position, token in enumerate(seq.token_ids):
            right = mix(right, token)
            slot = self.slot_of(seq, position)
            found = self.slots[engine].get(slot, -1)
            if found != right:
                what = (
                    ("is empty", "是空的")
                    if found == -1
                    else (f"is not its token {position}", f"不是它的 token {position}")
                )
                name = f"{self.names[seq]}", "PD"[engine]
                en = f"{name[0]} reads slot {slot} of {name[1]}, which {what[0]}"
                self.notes.append(Text(en, f"{name[0]} 读 {name[1]} 的 {slot} 号槽位，它{what[1]}"))
            read = mix(read, found)
        return read % VOCABULARY

    def see(self) -> Tick:
        tokens = []
        for name, seq in self.seqs.items():
            tokens.append((name, tuple(seq.token_ids[seq.num_prompt_tokens :]), seq.num_computed_tokens))
        running = tuple(self.names[seq] for seq in self.hand_over.running)
        network = tuple((self.names[seq], source, destination) for seq, source, destination in self.network)
        free = tuple(self.prefill.free), tuple(self.decode.free)
        return Tick(tuple(self.notes), tuple(tokens), *free, network, running, self.num_moved)

    def draw(self) -> str:
        lines = [f"P free   {show(self.prefill.free)}", f"D free   {show(self.decode.free)}"]
        for name, seq in self.seqs.items():
            output = show(seq.token_ids[seq.num_prompt_tokens :])
            lines.append(
                f"{name}        block_table={seq.block_table} computed={seq.num_computed_tokens} output={output}"
            )
        return "\n".join(lines)


def show(values: Any) -> str:
    return " ".join(map(str, values)) or "–"


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Yield the ticks. Each drawing ends with the sum of the whole run."""
    whole = f"whole run   {run_to_the_end(answer, case)}"
    for seen in Run(answer, case).ticks():
        yield seen._replace(drawing=f"{seen.drawing}\n{whole}" if seen.drawing else "")


def run_to_the_end(answer: ModuleType, case: Case) -> str:
    try:
        last = list(Run(answer, case).ticks())[-1].value
    except Exception as error:  # it is observed when the ticks are compared
        return type(error).__name__
    return repr(last) if isinstance(last, Total) else "does not end"


def draw_notes(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Say what is read from a wrong slot, or is free too early."""
    if yours is None or not isinstance(yours.value, Tick):
        return []
    return [(note, "") for note in yours.value.notes[:2]]


def describe(case: Case) -> Text:
    names = [f"{chr(ord('A') + i)} {one.prompt_len}+{one.max_tokens}" for i, one in enumerate(case.requests)]
    return Text(
        f"Blocks of P (prefill): {case.prefill_blocks}, of D (decode): {case.decode_blocks}, that the network moves "
        f"in a "
        f"tick: {case.bandwidth}; block_size = {case.block_size}. In a tick, P computes one prompt, and D decodes one "
        f"token of each of its sequences. Requests (prompt + output tokens): {', '.join(names)}.",
        f"P（预填充）有 {case.prefill_blocks} 块，D（解码）有 {case.decode_blocks} 块，block_size = {case.block_size}。"
        f"每个节拍里，P 计算一个提示词，网络搬 {case.bandwidth} 块，D 为它的每个序列解码一个 token。"
        f"请求（提示词 + 输出的 token 数）：{'、'.join(names)}。",
    )


@st.composite
def cases(draw: Any) -> Case:
    block_size = draw(st.integers(1, 4))
    request = st.builds(Request, st.integers(1, 7), st.integers(2, 4))
    requests = tuple(draw(st.lists(request, min_size=1, max_size=3)))
    prefill_blocks = max(-(-one.prompt_len // block_size) for one in requests) + draw(st.integers(0, 2))
    decode_blocks = max(-(-sum(one) // block_size) for one in requests) + draw(st.integers(0, 3))
    return Case(block_size, prefill_blocks, decode_blocks, draw(st.integers(1, 3)), requests)


A, B, C = Request(5, 3), Request(6, 2), Request(3, 4)
EXERCISES = (
    Build(
        name="hand_over",
        chapter="14_kv_beyond_the_pool",
        title=Text("Hand a prompt over to another engine", "把提示词交接给另一个引擎"),
        task=Text(
            "An engine P computes prompts and samples each answer's first token; an engine D decodes the rest.\n"
            "Between them the blocks of the prompt move over a network. Write two functions of `HandOver`.\n\n"
            "`try_send(seq)` is called when P has computed the prompt. Reserve blocks in D for all tokens that the\n"
            "sequence can get, prompt + `max_tokens`, so that its decodes never wait. If D has too few free\n"
            "blocks, change nothing and return None: it is called again in the next tick. Otherwise keep the new\n"
            "block table in `self.tables[seq]`, and return the copies: a list of (block in P, block in D), one for\n"
            "each block that holds tokens of the prompt, in their order.\n"
            "`arrive(seq)` is called when the network has moved all of them. Free the blocks of P, give the\n"
            "sequence its table in D, and append it to `self.running`. `seq.token_ids` already ends with the first\n"
            "output token.\n\n"
            "    block_size 4, 6 prompt tokens, max_tokens 5, table [3, 0] in P     D reserves [7, 2, 5]\n"
            "    copies [(3, 7), (0, 2)]: the second block is half full",
            "引擎 P 计算提示词，并采样出每个回答的第一个 token；引擎 D 解码其余的 token。提示词的块要通过网络从 P\n"
            "搬到 D。请写 `HandOver` 的两个函数。\n\n"
            "`try_send(seq)` 在 P 算完提示词时调用。在 D 里为这个序列可能有的全部 token（提示词 + `max_tokens`）预\n"
            "留块，使解码时永远不用等。如果 D 的空闲块不够，什么都不要改，返回 None：下一个节拍会再调用。否则把新\n"
            "的块表存入 `self.tables[seq]`，返回要复制的块：(P 的块, D 的块) 的列表，每个存有提示词 token 的块一\n"
            "项，按顺序排列。\n"
            "`arrive(seq)` 在网络把它们全部搬完时调用。释放 P 的块，把 D 的块表交给序列，再把序列追加到\n"
            "`self.running`。`seq.token_ids` 的末尾已经有第一个输出 token。\n\n"
            "    block_size 4，提示词 6 个 token，max_tokens 5，P 里的块表 [3, 0]     D 预留 [7, 2, 5]\n"
            "    复制 [(3, 7), (0, 2)]：第二块只填了一半",
        ),
        names=(
            "self.decode.num_blocks_for(n)",
            "self.decode.free",
            "self.decode.take()",
            "self.prefill.release(seq)",
            "seq.num_prompt_tokens",
            "seq.max_tokens",
            "seq.block_table",
        ),
        hints=(
            Text(
                "`self.decode.num_blocks_for(n)` rounds up, `self.decode.free` are the free blocks, and "
                "`self.decode.take()` takes one. `self.prefill.release(seq)` frees the blocks of `seq.block_table`.",
                "`self.decode.num_blocks_for(n)` 向上取整，`self.decode.free` 是空闲块，`self.decode.take()` 取一块。"
                "`self.prefill.release(seq)` 释放 `seq.block_table` 里的块。",
            ),
            Text(
                "Until all blocks have arrived, P must keep them: `arrive` frees them. Release them before you replace "
                "`seq.block_table`.",
                "所有块到达之前，P 必须保留它们：由 `arrive` 释放。要先释放，再替换 `seq.block_table`。",
            ),
            Text(
                "The copies are `list(zip(seq.block_table, self.tables[seq]))`: the table of P has only the blocks "
                "of the "
                "prompt, the last one perhaps partly filled.",
                "要复制的是 `list(zip(seq.block_table, self.tables[seq]))`：P 的块表里只有提示词的块，"
                "最后一块可能只填了一部分。",
            ),
        ),
        answer=SOLUTION,
        holes=("HandOver.try_send", "HandOver.arrive"),
        run=run,
        examples=(
            Case(4, 4, 4, 1, (A, B, C)),
            Case(2, 3, 5, 2, (A, C, B)),
            Case(1, 12, 12, 3, (A, C)),
            Case(4, 2, 2, 1, (Request(4, 4), Request(4, 2))),
            Case(2, 6, 9, 1, (C, Request(1, 2), A)),
        ),
        cases=cases,
        describe=describe,
        draw=draw_notes,
        mistakes=(
            Mistake(
                Text("The last block is forgotten", "漏掉了最后一块"),
                Text(
                    "The prompt's last block may be partly filled. It holds K and V of the newest prompt tokens; "
                    "without "
                    "it D reads empty slots. `num_computed_tokens // block_size` counts only full blocks.",
                    "提示词的最后一块可能只填了一部分，里面是提示词最后几个 token 的 K 和 V。没有它，D 读到的是空的 "
                    "slot。"
                    "`num_computed_tokens // block_size` 只数填满的块。",
                ),
                (
                    (
                        "zip(seq.block_table, self",
                        "zip(seq.block_table[: seq.num_computed_tokens // self.decode.block_size], self",
                    ),
                ),
            ),
            Mistake(
                Text("Freed before it has arrived", "还没到达就释放了"),
                Text(
                    "The network is slower than the engine: blocks wait to be sent. If P frees them at once, its next "
                    "prompt overwrites them, and D gets K and V of another sequence. Free them in `arrive`.",
                    "网络比引擎慢：块要排队等待发送。如果 P 马上释放它们，下一个提示词会把它们覆盖，D "
                    "收到的就是别的序列的 K 和 V。"
                    "要在 `arrive` 里释放。",
                ),
                (
                    ("        return copies", "        self.prefill.release(seq)\n        return copies"),
                    (
                        "        self.prefill.release(seq)\n        seq.block_table = self",
                        "        seq.block_table = self",
                    ),
                ),
            ),
            Mistake(
                Text("Never freed in P", "P 的块没有释放"),
                Text(
                    "After the blocks have arrived, P needs its copy no more. If it keeps the blocks, it can soon "
                    "compute "
                    "no prompt at all.",
                    "块到达之后，P 不再需要自己那一份。一直留着的话，P 很快就无法再计算任何提示词。",
                ),
                (("        self.prefill.release(seq)\n", ""),),
            ),
            Mistake(
                Text("The first token is computed twice", "第一个 token 算了两次"),
                Text(
                    "P has sampled the first token already, and K and V of the whole prompt have moved. D begins with "
                    "this token as its input. If D computes the prompt's last token again, the text is the same, and "
                    "the "
                    "user waits a tick longer.",
                    "P 已经采样出第一个 token，整个提示词的 K 和 V 也都搬过来了。D 应该以这个 token 为输入开始解码。"
                    "如果 D 把提示词的最后一个 token 再算一遍，文本不变，用户却要多等一个节拍。",
                ),
                (
                    (
                        "        self.running.append(seq)",
                        "        del seq.token_ids[seq.num_prompt_tokens :]\n"
                        "        seq.num_computed_tokens = seq.num_prompt_tokens - 1\n"
                        "        self.running.append(seq)",
                    ),
                ),
            ),
            Mistake(
                Text("Blocks are lost when they do not fit", "放不下时丢失了块"),
                Text(
                    "If D has too few free blocks, nothing may change. Blocks that were taken before the failure "
                    "belong "
                    "to nobody and never become free. Count first, then take.",
                    "D 的空闲块不够时，什么都不能改。失败之前取走的块不属于任何序列，也永远不会变为空闲。要先数，"
                    "再取。",
                ),
                (
                    (
                        "            return None\n",
                        "            while self.decode.free:\n                self.decode.take()\n            return "
                        "None\n",
                    ),
                ),
            ),
            Mistake(
                Text("Block ids of the other pool", "用了另一个池的块号"),
                Text(
                    "Block 0 of P and block 0 of D are different memory. The ids of P mean nothing in D, where these "
                    "blocks may belong to another sequence. Take blocks of D.",
                    "P 的 0 号块和 D 的 0 号块是两处不同的内存。P 的块号在 D 里没有意义，那些块可能属于别的序列。"
                    "要从 D 取块。",
                ),
                (
                    (
                        "[self.decode.take() for _ in range(num_blocks)]",
                        "seq.block_table + [self.decode.take() for _ in range(num_blocks - len(seq.block_table))]",
                    ),
                ),
            ),
            Mistake(
                Text("Decodes before the blocks have arrived", "块还没到达就开始解码"),
                Text(
                    "D may run the sequence only when all of its blocks are there. Before, it reads slots that are "
                    "empty "
                    "or belong to another sequence.",
                    "所有块都到了，D 才能运行这个序列。在那之前，它读到的槽位是空的，或者属于别的序列。",
                ),
                (
                    ("        self.running.append(seq)\n", ""),
                    ("        return copies", "        self.running.append(seq)\n        return copies"),
                ),
            ),
            Mistake(
                Text("Blocks are reserved only for the prompt", "只为提示词预留了块"),
                Text(
                    "The sequence grows in D. In this exercise D reserves blocks for prompt + `max_tokens` at once, so "
                    "that a decode always has a slot.",
                    "序列在 D 里会增长。这个练习里，D 一次为提示词 + `max_tokens` 预留块，使解码时总有槽位可用。",
                ),
                (("num_blocks_for(seq.num_prompt_tokens + seq.max_tokens)", "num_blocks_for(seq.num_prompt_tokens)"),),
            ),
        ),
    ),
)
