"""Run a scheduler and a block manager without a network, and observe each step.

A stand-in for K and V shows what a network would compute from wrong blocks. What is kept for a token depends on the
token and on what is kept for the token before it, as K and V of a deep layer do. The next token depends on everything
that is read through the block table. So a block that is overwritten, or shared by mistake, changes the text, and the
simulation also says which slot holds what belongs to another sequence.

    Traffic(num_blocks=3, block_size=2, budget=4, requests=(Request((1, 2, 3), max_tokens=2), Request((1, 2), 4, n=2)))
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from labs import one_file
from labs.learn.drawing import draw_pool
from labs.learn.exercise import Seen
from labs.learn.given import slot_of
from labs.learn.texts import Language, Text, count
from labs.learn.traffic import Request, Traffic, describe_traffic, traffics

__all__ = ["EXAMPLES", "Parts", "Request", "Simulation", "Step", "Traffic", "describe_traffic", "traffics"]

VOCABULARY = 5  # few tokens, so that prefixes and whole answers repeat
MAX_STEPS = 200


class Parts(NamedTuple):
    """The classes to run: those of `labs/one_file.py`, or the learner's."""

    sequence: Any = one_file.Sequence
    block_manager: Any = one_file.BlockManager
    scheduler: Any = one_file.Scheduler


class Step(NamedTuple):
    """What one step did. `chunks`: name of a sequence, number of new tokens."""

    chunks: tuple[tuple[str, int], ...]
    hits: int
    """Tokens found in the prefix cache so far."""
    preemptions: int
    """So far."""
    copies: tuple[tuple[int, int], ...]
    """Blocks that were copied: from, to."""
    wrong_slots: tuple[Text, ...]
    """What was read from a slot that does not hold K and V of this sequence."""
    new_tokens: tuple[tuple[str, int], ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    tables: tuple[tuple[str, tuple[int, ...]], ...]
    free: tuple[int, ...]
    """Free blocks in the order in which they will be taken."""
    num_owners: tuple[int, ...]
    moves: tuple[str, ...] = ()
    """Blocks that were copied to or from host memory."""
    host: str = ""
    """What is in host memory."""

    wrong_blocks: tuple[Text, ...] = ()
    """Blocks that are neither free nor owned after the step, or both."""

    def show(self, language: Language) -> str:
        """Return what the step did, on one line. The state after it is not shown here."""
        parts = [Text(" ".join(f"{name}+{num}" for name, num in self.chunks) or "no tokens", "")]
        parts[0] = Text(parts[0].en, parts[0].en if self.chunks else "没有 token")
        if self.waiting:
            parts.append(Text(f"waiting: {' '.join(self.waiting)}", f"等待：{' '.join(self.waiting)}"))
        if self.preemptions:
            parts.append(Text(f"preemptions so far: {self.preemptions}", f"累计抢占：{self.preemptions}"))
        if self.hits:
            parts.append(Text(f"hits so far: {count(self.hits, 'token')}", f"累计命中：{self.hits} 个 token"))
        if self.copies:
            copies = " ".join(f"{a}→{b}" for a, b in self.copies)
            parts.append(Text(f"copies: {copies}", f"复制：{copies}"))
        parts += [Text(f"moves: {', '.join(self.moves)}", f"搬动：{'，'.join(self.moves)}")] if self.moves else []
        parts += [Text(f"host: {self.host}", f"主机内存：{self.host}")] if self.host else []
        parts += self.wrong_slots[:2]
        return ("，" if language == "zh" else ", ").join(part.show(language) for part in parts)

    def __repr__(self) -> str:
        return self.show("en")


class Simulation:
    """One run: sequences named A, B, …; the other answers of A are A.1, A.2, …"""

    def __init__(self, parts: Parts, traffic: Traffic) -> None:
        self.traffic = traffic
        self.manager = parts.block_manager(traffic.num_blocks, traffic.block_size)
        self.scheduler = parts.scheduler(self.manager, traffic.budget)
        self.names: dict[Any, str] = {}
        self.seqs: dict[str, Any] = {}
        self.arrivals: list[tuple[int, Any]] = []
        for i, request in enumerate(traffic.requests):
            name = chr(ord("A") + i)
            seq = parts.sequence(list(request.prompt), len(request.prompt), request.max_tokens)
            for k in range(1, request.n):
                child = parts.sequence(list(request.prompt), len(request.prompt), request.max_tokens)
                seq.children.append(child)
                self.add(f"{name}.{k}", child)
            self.add(name, seq)
            self.arrivals.append((request.arrival, seq))
        self.slots: dict[int, int] = {}  # what is kept for the token in a slot
        self.wrong_slots: list[Text] = []

    def add(self, name: str, seq: Any) -> None:
        self.names[seq], self.seqs[name] = name, seq

    def run(self, has_drawings: bool = True) -> Iterator[Seen]:
        """Yield each step, until all sequences are finished or a step does nothing."""
        for number in range(MAX_STEPS):
            self.scheduler.waiting.extend(seq for arrival, seq in self.arrivals if arrival == number)
            if not (self.scheduler.waiting or self.scheduler.running):
                if all(arrival <= number for arrival, _ in self.arrivals):
                    return
                continue
            step = self.step(self.scheduler.schedule())
            yield Seen(Text(f"step {number + 1}", f"第 {number + 1} 步"), step, self.draw() if has_drawings else "")
            if not step.chunks:
                return

    def step(self, chunks: list[tuple[Any, int]]) -> Step:
        self.wrong_slots = []
        copies = tuple(getattr(self.manager, "copies", ()))
        for source, destination in copies:
            for i in range(self.traffic.block_size):
                size = self.traffic.block_size
                self.slots[destination * size + i] = self.slots.get(source * size + i, -1)
        if copies:
            self.manager.copies = []
        for seq, num_new_tokens in chunks:
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens):
                before = self.slots.get(self.slot_of(seq, position - 1), -1) if position else 0
                self.slots[self.slot_of(seq, position)] = mix(before, seq.token_ids[position])
        named = tuple((self.names[seq], num) for seq, num in chunks)
        new_tokens = self.sample(chunks)
        return self.make_step(named, copies, new_tokens)

    def sample(self, chunks: list[tuple[Any, int]]) -> list[tuple[str, int]]:
        """Append a token to each sequence with no token left to compute, and start the other answers."""
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
            if hasattr(self.manager, "register"):
                self.manager.register(seq, seq.num_computed_tokens - num_new_tokens)
        new_tokens = []
        for seq, _ in chunks:
            if seq.num_computed_tokens != len(seq.token_ids):
                continue
            token = self.read(seq)
            children = self.scheduler.fork(seq) if getattr(seq, "children", None) else []
            for i, one in enumerate((seq, *children)):
                one.token_ids.append((token + i) % VOCABULARY)
                new_tokens.append((self.names[one], one.token_ids[-1]))
                one.is_finished = len(one.token_ids) - one.num_prompt_tokens == one.max_tokens
                if one.is_finished:
                    self.scheduler.finish(one)
        return new_tokens

    def slot_of(self, seq: Any, position: int) -> int:
        return slot_of(seq, position, self.traffic.block_size)

    def read(self, seq: Any) -> int:
        """Return the next token, from what is kept in the slots of `seq`. Note the slots that hold something else."""
        read, right = 0, 0
        for position in range(len(seq.token_ids)):
            right = mix(right, seq.token_ids[position])
            slot = self.slot_of(seq, position)
            found = self.slots.get(slot, -1)
            if found != right:
                name = self.names[seq]
                en = f"{name} reads slot {slot}: not its token {position}"
                self.wrong_slots.append(Text(en, f"{name} 读了 {slot} 号槽位：不是它的第 {position} 个 token"))
            read = mix(read, found)
        return read % VOCABULARY

    def make_step(self, chunks: Any, copies: Any, new_tokens: list[tuple[str, int]]) -> Step:
        scheduler, manager = self.scheduler, self.manager
        return Step(
            chunks,
            getattr(scheduler, "num_cached_tokens", 0),
            getattr(scheduler, "num_preemptions", 0),
            copies,
            tuple(self.wrong_slots),
            tuple(new_tokens),
            tuple(self.names[seq] for seq in scheduler.running),
            tuple(self.names[seq] for seq in scheduler.waiting),
            tuple((name, tuple(seq.block_table)) for name, seq in sorted(self.seqs.items()) if seq.block_table),
            tuple(manager.free),
            tuple(getattr(manager, "num_owners", ())),
            wrong_blocks=tuple(find_wrong_blocks(manager, self.seqs)),
        )

    def draw(self) -> str:
        return draw_pool(self.manager, dict(sorted(self.seqs.items())))


def find_wrong_blocks(manager: Any, seqs: dict[str, Any]) -> Iterator[Text]:
    """Yield sentences about blocks. Each is free or in block tables, and has as many owners as tables have it."""
    for i in range(manager.num_blocks):
        names = [name for name, seq in sorted(seqs.items()) if i in seq.block_table]
        owners, is_free = " ".join(names), i in manager.free
        if not names and not is_free:
            yield Text(f"Block {i} is neither free nor in a block table.", f"{i} 号块既不空闲，也不在任何块表里。")
        if names and is_free:
            yield Text(
                f"Block {i} is free and in the block table of {owners}.", f"{i} 号块空闲，却在 {owners} 的块表里。"
            )
        counted = manager.num_owners[i] if hasattr(manager, "num_owners") else len(names)
        if counted != len(names) and (names or is_free):
            tables, tables_zh = f"in {count(len(names), 'block table')}", f"在 {len(names)} 个块表里"
            if not names:
                tables, tables_zh = "in no block table", "不在任何块表里"
            en = f"Block {i} has num_owners {counted}, but is {tables}."
            yield Text(en, f"{i} 号块的 num_owners 是 {counted}，但它{tables_zh}。")


def mix(before: int, token: int) -> int:
    """Return what is kept for a token: it depends on what is kept for the token before."""
    return (before * 1_000_003 + token * 7_919 + 12_289) % 1_000_033


EXAMPLES = (
    Traffic(4, 2, 8, (Request((1, 2, 0), 5), Request((0, 1, 2, 1), 4), Request((2, 2), 3))),  # tight: preemption
    Traffic(12, 2, 4, (Request((0, 1, 2, 0, 1), 3), Request((0, 1, 2, 0, 2), 3, arrival=3))),  # a common prefix
    Traffic(8, 4, 16, (Request((0, 1, 2, 0, 1), 6), Request((0, 1, 2, 0, 1), 6, arrival=2))),  # the same prompt
    Traffic(6, 2, 3, (Request((0, 1, 2, 0, 1, 2, 1), 4), Request((1, 1), 4))),  # chunks beside decodes
    Traffic(5, 2, 8, (Request((0, 1), 3), Request((2, 1, 0, 0, 1, 1), 2), Request((0, 1, 1), 3, arrival=4))),  # reuse
)
"""Planted runs with one answer each: small pools, common prefixes, whole prompts found, chunks, revived blocks."""
