"""Let sequences arrive that begin with the same tokens, and observe what a prefix cache finds, keeps and forgets.

What is kept in a slot is the text up to its token. So it can be seen when a block is found that holds other text.

    Visits(num_blocks=4, block_size=2, chunk=9, steps=((Visit((0, 1, 2)),), (Visit((0, 1, 3), stays=True),)))
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.drawing import compare_fields, draw_slots
from labs.learn.exercise import Seen
from labs.learn.given import slot_of
from labs.learn.texts import Text, count


class Visit(NamedTuple):
    """A sequence that arrives. When its text is computed, it ends, or keeps its blocks if it `stays`."""

    text: tuple[int, ...]
    stays: bool = False


class Visits(NamedTuple):
    """A case. Sequences A, B, … arrive; those of one step are computed together."""

    num_blocks: int
    block_size: int
    chunk: int
    """Tokens of a sequence that a step computes, at most."""
    steps: tuple[tuple[Visit, ...], ...]
    forgotten: tuple[int, ...] = ()
    """Steps before which the cache forgets one block: of the cached blocks, the one with the smallest number."""


class Found(NamedTuple):
    """What `find` returned: the cached blocks that a sequence begins with."""

    blocks: list[int]
    wrong: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    """(block, the text up to its end, the sequence's own text up to there) if they differ."""

    def __repr__(self) -> str:
        return f"finds blocks {self.blocks}" if self.blocks else "finds nothing"


class Pool(NamedTuple):
    """What a call returned, and the state of the pool after it."""

    result: Any
    tables: dict[str, list[int]]
    num_computed_tokens: dict[str, int]
    free: list[int]
    num_owners: list[int]
    cached: list[int]
    """Blocks that the prefix cache finds."""
    hashed: list[int]
    """Blocks whose hash is remembered: the same ones."""

    def compare(self, other: "Pool") -> tuple[str, str]:
        return compare_fields(self, other)

    def __repr__(self) -> str:
        parts = [] if self.result is None else [f"{self.result}"]
        parts += [f"tables {self.tables}", f"free {self.free}", f"num_owners {self.num_owners}"]
        parts += [f"cached {self.cached}"]
        parts += [f"hash_of_block has {self.hashed}"] if self.hashed != self.cached else []
        return ", ".join([*parts, f"computed {self.num_computed_tokens}"])


class Run:
    """One run: a block manager, the sequences, and what each slot holds."""

    def __init__(self, blocks: Any, case: Visits) -> None:
        self.blocks, self.case = blocks, case
        self.seqs: dict[str, Any] = {}
        self.held: dict[int, tuple[int, ...]] = {}  # the text up to the token whose K and V are in the slot
        self.running: list[str] = []

    def observe(self) -> Iterator[Seen]:
        """Admit, compute and register the sequences of each step, and release those that do not stay."""
        for number, step in enumerate(self.case.steps, 1):
            ending = []
            if number in self.case.forgotten and self.blocks.hash_of_block:
                del self.blocks.block_of_hash[self.blocks.hash_of_block.pop(min(self.blocks.hash_of_block))]
            for visit in step:
                name = chr(ord("A") + len(self.seqs))
                self.seqs[name] = one_file.Sequence(list(visit.text), len(visit.text), 9)
                ending += [] if visit.stays else [name]
                yield self.find(name)
                yield from self.admit(name)
            befores = {name: self.compute(name) for name in self.running}
            for name, before in befores.items():
                self.blocks.register(self.seqs[name], before)
            yield self.see(Text(f"step {number} is computed: register", f"第 {number} 步算完：register"), None)
            for name in ending:
                if name in self.running:
                    yield self.release(name)

    def find(self, name: str) -> Seen:
        seq, size = self.seqs[name], self.case.block_size
        blocks = list(self.blocks.find(seq))
        wrong = []
        for i, block_id in enumerate(blocks):
            held, own = self.held.get(block_id * size + size - 1, ()), tuple(seq.token_ids[: (i + 1) * size])
            wrong += [(block_id, held, own)] if held != own else []
        text = draw_text(seq.token_ids, size)
        return Seen(
            Text(f"find({name}), {name} = {text}", f"find({name})，{name} = {text}"), Found(blocks, wrong), self.draw()
        )

    def admit(self, name: str) -> Iterator[Seen]:
        """Try to admit. If the sequence does not fit, the oldest one ends, and it is tried once more."""
        for _ in range(2):
            result = self.blocks.try_admit(self.seqs[name])
            yield self.see(Text(f"try_admit({name})", f"try_admit({name})"), result)
            if result:
                self.running.append(name)
            if result or not self.running:
                return
            yield self.release(self.running[0])

    def compute(self, name: str) -> int:
        """Compute the next tokens of a sequence. Return how many were computed before."""
        seq, size = self.seqs[name], self.case.block_size
        before = seq.num_computed_tokens
        for i in range(before, min(before + self.case.chunk, len(seq.token_ids))):
            self.held[slot_of(seq, i, size)] = tuple(seq.token_ids[: i + 1])
            seq.num_computed_tokens = i + 1
        return before

    def release(self, name: str) -> Seen:
        self.running.remove(name)
        self.blocks.release(self.seqs[name])
        return self.see(Text(f"release({name})", f"release({name})"), None)

    def see(self, label: Text, result: Any) -> Seen:
        blocks, seqs = self.blocks, {name: self.seqs[name] for name in self.seqs if self.seqs[name].block_table}
        state = Pool(
            result,
            {name: list(seq.block_table) for name, seq in seqs.items()},
            {name: seq.num_computed_tokens for name, seq in seqs.items()},
            list(blocks.free),
            list(blocks.num_owners),
            sorted(blocks.block_of_hash.values()),
            sorted(blocks.hash_of_block),
        )
        return Seen(label, state, self.draw())

    def draw(self) -> str:
        return draw_slots(self.blocks, self.seqs, self.held, has_free=True)


def draw_text(tokens: Any, size: int) -> str:
    """Return tokens with a bar between blocks: `0 1 | 2`."""
    return " | ".join(" ".join(map(str, tokens[i : i + size])) for i in range(0, len(tokens), size))


def run_visits(answer: Any, case: Visits) -> Iterator[Seen]:
    """Observe `answer.Blocks` in a case."""
    return Run(answer.Blocks(case.num_blocks, case.block_size), case).observe()


def describe_visits(case: Visits) -> Text:
    """Return the case in words."""
    en = [f"{count(case.num_blocks, 'block')} of {count(case.block_size, 'token')}."]
    zh = [f"{case.num_blocks} 个块，每块 {case.block_size} 个槽位。"]
    longest = max((len(visit.text) for step in case.steps for visit in step), default=0)
    if case.chunk < longest:
        en.append(f"A step computes at most {count(case.chunk, 'token')} of a sequence.")
        zh.append(f"每步最多算一个序列的 {case.chunk} 个 token。")
    name = ord("A")
    for number, step in enumerate(case.steps, 1):
        if number in case.forgotten:
            en.append("Then the cache forgets one block.")
            zh.append("然后缓存忘掉一个块。")
        for visit in step:
            text = draw_text(visit.text, case.block_size)
            stays = (" (keeps its blocks)", "（保留自己的块）") if visit.stays else ("", "")
            en.append(f"Step {number}: {chr(name)} = {text}{stays[0]}.")
            zh.append(f"第 {number} 步：{chr(name)} = {text}{stays[1]}。")
            name += 1
    return Text(" ".join(en), "".join(zh))


def draw_wrong_blocks(case: Visits, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Return a sentence for each block that was found and holds K and V of other text."""
    if yours is None or not isinstance(yours.value, Found):
        return []
    found = []
    size = case.block_size
    for block_id, held, own in yours.value.wrong:
        holds = (
            draw_text(held[-(len(held) % size or size) :], size),
            draw_text(held[: -(len(held) % size or size)], size),
        )
        needs = draw_text(own[-size:], size), draw_text(own[:-size], size)
        en = [f"{tokens or 'nothing'} after {before or 'nothing'}" for tokens, before in (holds, needs)]
        zh = [f"{tokens or '空'}（前面是 {before or '空'}）" for tokens, before in (holds, needs)]
        en_text = f"block {block_id} holds {en[0]}; the sequence has {en[1]}"
        found.append((Text(en_text, f"{block_id} 号块里是 {zh[0]}；序列里是 {zh[1]}"), ""))
    return found


def visits(has_chunks: bool = False) -> st.SearchStrategy[Visits]:
    """Return a strategy: texts that begin like earlier ones, small pools, some sequences that stay."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
    arrival = st.tuples(st.integers(0, 2), tokens, st.booleans(), st.booleans() if has_chunks else st.just(False))
    return st.builds(
        make_visits,
        st.integers(0, 5),
        st.sampled_from((2, 3, 1)),
        st.sampled_from((9, 3, 2)) if has_chunks else st.just(9),
        st.lists(arrival, min_size=1, max_size=5),
    )


def make_visits(spare: int, block_size: int, chunk: int, arrivals: list[Any]) -> Visits:
    """Return a case. `arrivals`: (blocks shared with the text before, more tokens, stays, together with it)."""
    steps: list[tuple[Visit, ...]] = []
    text: tuple[int, ...] = ()
    longest = 0
    for num_shared, tokens, stays, is_together in arrivals:
        text = (*text[: num_shared * block_size], *tokens)
        longest = max(longest, len(text))
        if is_together and steps:
            steps[-1] += (Visit(text, stays),)
        else:
            steps.append((Visit(text, stays),))
    return Visits(-(-longest // block_size) + spare, block_size, chunk, tuple(steps))


class Texts(NamedTuple):
    """A simple case: sequences with these texts come one after another, and the pool has a block for everything."""

    block_size: int
    texts: tuple[tuple[int, ...], ...]


def run_texts(answer: Any, case: Texts) -> Iterator[Seen]:
    """Observe only what `answer.Blocks` finds for each text."""
    size = case.block_size
    blocks = answer.Blocks(sum(len(text) // size + 1 for text in case.texts), size)
    run = Run(blocks, Visits(blocks.num_blocks, size, 99, ()))
    for name, text in zip("ABCDEFGH", case.texts, strict=False):
        run.seqs[name] = one_file.Sequence(list(text), len(text), 9)
        yield run.find(name)
        for _ in run.admit(name):
            pass
        blocks.register(run.seqs[name], run.compute(name))
        run.release(name)


def describe_texts(case: Texts) -> Text:
    names = "ABCDEFGH"
    written = ", ".join(
        f"{name} = {draw_text(text, case.block_size)}" for name, text in zip(names, case.texts, strict=False)
    )
    return Text(
        f"Blocks of {count(case.block_size, 'token')}. One after another: {written}.",
        f"每块 {case.block_size} 个 token。依次到来：{written}。",
    )


def texts() -> st.SearchStrategy[Texts]:
    """Return a strategy: few different tokens, so that texts begin alike."""
    text = st.lists(st.sampled_from((0, 1, 2, 12, 11)), min_size=1, max_size=7).map(tuple)
    return st.builds(Texts, st.sampled_from((2, 3, 1)), st.lists(text, min_size=1, max_size=3).map(tuple))


def one_by_one(num_blocks: int, block_size: int, *texts: tuple[int, ...]) -> Visits:
    """Return a case in which sequences with these texts come one after another, and end."""
    return Visits(num_blocks, block_size, 9, tuple((Visit(text),) for text in texts))
