"""Chapter 12: a router sends a request to the engine that can begin its answer first."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

TOKENS_PER_TICK = 4

SOLUTION = '''
class Router:
    """Sends each request to one of several engines. It knows what it has sent them, and what they have computed."""

    def __init__(self, num_engines, block_size):
        self.block_size = block_size
        self.load = [0] * num_engines  # tokens of prompts that each engine has still to compute
        self.prefixes = [set() for _ in range(num_engines)]  # of each engine: tuples of tokens, whole blocks

    def computed(self, engine, num_tokens):
        """Note that an engine has computed tokens."""
        self.load[engine] -= num_tokens

    def num_cached(self, engine, prompt):
        """Return how many tokens of the prompt are in the engine's prefix cache: whole blocks, never the last token."""
        num = 0
        while num + self.block_size < len(prompt) and tuple(prompt[: num + self.block_size]) in self.prefixes[engine]:
            num += self.block_size
        return num

    def route(self, prompt):
        """Return the engine for a prompt, and note what it will compute and cache."""
        to_compute = [len(prompt) - self.num_cached(engine, prompt) for engine in range(len(self.load))]
        costs = [load + num for load, num in zip(self.load, to_compute)]
        engine = costs.index(min(costs))
        self.load[engine] += to_compute[engine]
        for end in range(self.block_size, len(prompt) + 1, self.block_size):
            self.prefixes[engine].add(tuple(prompt[:end]))
        return engine
'''


class Routed(NamedTuple):
    """Where a request went, and what the router says about the engines."""

    engine: int
    found: tuple[int, ...]
    """What `num_cached` returns for each engine, before the request is sent."""
    load: tuple[int, ...]
    """`Router.load` after the request was sent."""
    load_before: tuple[int, ...]
    found_before: tuple[int, ...]
    """The engines themselves, before the request was sent."""

    def __repr__(self) -> str:
        return f"engine {self.engine}, num_cached = {list(self.found)}, load = {list(self.load)}"


class Total(NamedTuple):
    """The whole run."""

    ticks: int
    computed: int

    def __repr__(self) -> str:
        return f"ticks={self.ticks} computed={self.computed}"


class Engines:
    """What the engines have cached and have to compute, counted by the checker itself."""

    def __init__(self, num_engines: int, block_size: int) -> None:
        self.block_size = block_size
        self.load = [0] * num_engines
        self.cached: list[set[tuple[int, ...]]] = [set() for _ in self.load]
        self.computed = 0

    def found(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many tokens of the prompt each engine finds. The last token is always computed."""
        ends = range(self.block_size, len(prompt), self.block_size)
        return tuple(max([end for end in ends if prompt[:end] in cached], default=0) for cached in self.cached)

    def admit(self, engine: int, prompt: tuple[int, ...]) -> None:
        num = len(prompt) - self.found(prompt)[engine]
        self.load[engine] += num
        self.cached[engine] |= {prompt[:end] for end in range(self.block_size, len(prompt) + 1, self.block_size)}

    def tick(self, router: Any) -> None:
        for engine, load in enumerate(self.load):
            num = min(load, TOKENS_PER_TICK)
            if num:
                self.load[engine] -= num
                self.computed += num
                router.computed(engine, num)


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Yield the choices. Each drawing is the sum of the whole run."""
    try:
        whole = repr(list(run_requests(answer, case))[-1].value)
    except Exception as error:  # it is observed when the choices are compared
        whole = type(error).__name__
    for seen in run_requests(answer, case):
        yield seen._replace(drawing=f"whole run   {whole}")


def run_requests(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Send a request at each tick, in which each engine computes a few tokens; then wait until all is done."""
    num_engines, block_size, prompts = case
    router, engines = answer.Router(num_engines, block_size), Engines(num_engines, block_size)
    ticks = 0
    for number, prompt in enumerate(prompts):
        if prompt:
            load, found = tuple(engines.load), engines.found(prompt)
            told = tuple(int(router.num_cached(i, list(prompt))) for i in range(num_engines))
            engine = int(router.route(list(prompt)))
            engines.admit(engine, prompt)
            label = Text(f"request {number}: {show(prompt)}", f"请求 {number}：{show(prompt)}")
            yield Seen(label, Routed(engine, told, tuple(router.load), load, found))
        engines.tick(router)
        ticks += 1
    while any(engines.load):
        engines.tick(router)
        ticks += 1
    yield Seen(Text("at the end", "最后"), Total(ticks, engines.computed))


def show(prompt: Any) -> str:
    return " ".join(map(str, prompt))


def draw_engines(case: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw the table that a router decides by, at the first request where something differs."""
    if right is None or not isinstance(right.value, Routed):
        return []
    prompt_len = len(right.label.en.split(": ")[1].split())
    lines = ["engine   load   found   to compute   load + to compute"]
    for engine, (load, found) in enumerate(zip(right.value.load_before, right.value.found_before, strict=True)):
        num = prompt_len - found
        mark = "  ← right" if engine == right.value.engine else ""
        if yours is not None and isinstance(yours.value, Routed) and engine == yours.value.engine:
            mark += "  ← yours"
        lines.append(f"{engine:6}   {load:4}   {found:5}   {num:10}   {load + num:17}{mark}")
    return [(Text("The engines when the request arrives", "请求到达时的各个引擎"), "\n".join(lines))]


def describe(case: Any) -> Text:
    num_engines, block_size, prompts = case
    names = " | ".join(show(prompt) or "–" for prompt in prompts)
    return Text(
        f"{num_engines} engines, block_size = {block_size}. In each tick one request arrives (– is none), and each "
        f"engine computes at most {TOKENS_PER_TICK} tokens: {names}.",
        f"{num_engines} 个引擎，block_size = {block_size}。每个节拍来一个请求（– 表示没有），每个引擎最多计算 "
        f"{TOKENS_PER_TICK} 个 token：{names}。",
    )


PROMPTS = ("0", "00", "000", "0000", "00000", "000000", "1", "01", "001", "0001", "00001", "100", "1000", "010101", "")
"""Prompts of which random cases are made: many begin alike."""


def cases() -> st.SearchStrategy[Any]:
    prompt = st.sampled_from([tuple(map(int, prompt)) for prompt in PROMPTS])
    return st.tuples(st.integers(2, 3), st.integers(1, 3), st.lists(prompt, min_size=1, max_size=7).map(tuple))


A, B, C = (0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (0, 1, 0, 1)
EXERCISES = (
    Build(
        name="prefix_router",
        chapter="12_beyond_one_engine",
        title=Text("A router that knows prefixes and load", "既看前缀又看负载的路由器"),
        task=Text(
            "Several engines have their own prefix caches. Send each prompt to the engine that can begin its\n"
            "answer first: the one with the smallest `load` + tokens of this prompt that it has to compute.\n"
            "`self.load[engine]` is the number of prompt tokens that wait there already. Of equal engines take the\n"
            "first.\n\n"
            "`num_cached`: an engine finds a prompt's longest prefix of whole blocks that is in\n"
            "`self.prefixes[engine]`. At least one token must be computed, so the last token is never found.\n"
            "`route`: choose the engine, add the tokens that it has to compute to its load, and note all prefixes\n"
            "of whole blocks of this prompt in `self.prefixes[engine]`, as tuples.\n\n"
            "    block_size 2, prompt [5, 6, 7, 8, 9]     engine 0: load 9, has (5, 6) and (5, 6, 7, 8): 9 + 1 = 10\n"
            "                                             engine 1: load 3, has nothing:                 3 + 5 = 8\n"
            "Engine 1 gets it. Its load becomes 8, and it has (5, 6) and (5, 6, 7, 8) too.",
            "几个引擎各有自己的前缀缓存。把每个提示词发给能最先开始回答的引擎：`load` 加上它要为这个提示词计算的\n"
            "token 数最小的那个。`self.load[engine]` 是那里已经在等的提示词 token 数。相等时取第一个。\n\n"
            "`num_cached`：一个引擎能找到的，是提示词在 `self.prefixes[engine]` 里的最长前缀，只算整块。至少要计算\n"
            "一个 token，所以最后一个 token 总是找不到的。\n"
            "`route`：选出引擎，把它要计算的 token 数加到它的 load 上，再把这个提示词的所有整块前缀以元组的形式记\n"
            "入 `self.prefixes[engine]`。\n\n"
            "    block_size 为 2，提示词 [5, 6, 7, 8, 9]     引擎 0：load 9，有 (5, 6) 和 (5, 6, 7, 8)：9 + 1 = 10\n"
            "                                               引擎 1：load 3，什么都没有：               3 + 5 = 8\n"
            "发给引擎 1。它的 load 变成 8，也有了 (5, 6) 和 (5, 6, 7, 8)。",
        ),
        hints=(
            Text(
                "Compute for each engine: load + len(prompt) - num_cached. Then take the smallest.",
                "对每个引擎计算 load + len(prompt) - num_cached，再取最小的。",
            ),
            Text(
                "A prefix is noted with all its tokens from the beginning: `tuple(prompt[:end])` for end = block_size, "
                "2 × block_size, … A block by itself does not say what comes before it.",
                "记录的前缀包含从头开始的全部 token：`tuple(prompt[:end])`，end = block_size、2 × block_size、……"
                "单独一个块说明不了它前面是什么。",
            ),
            Text(
                "`num_cached`: `while num + self.block_size < len(prompt) and tuple(prompt[: num + self.block_size]) "
                "in "
                "self.prefixes[engine]: num += self.block_size`. The `<` leaves the last token out.",
                "`num_cached`：`while num + self.block_size < len(prompt) and tuple(prompt[: num + self.block_size]) "
                "in "
                "self.prefixes[engine]: num += self.block_size`。`<` 把最后一个 token 排除在外。",
            ),
        ),
        answer=SOLUTION,
        holes=("Router.num_cached", "Router.route"),
        run=run,
        examples=(
            (2, 2, (A, B, (*A, 1), (*A, 0), (*A, 1, 1), (*A, 0, 1))),
            (2, 2, (A, A, A, (), A)),
            (2, 2, ((1, 0, 0, 0, 1), (), (0, 0, 0, 0, 1), (), (1, 0, 0, 0, 0))),
            (3, 1, (A, B, C, (*C, 1), (), (*B, 0))),
            (2, 3, ((0, 0, 0, 1, 1), C, (0, 0, 0, 1, 1, 1), (), (), (0, 0, 0, 1, 1, 0))),
            (2, 1, ((0, 0), (0, 1), (0, 0, 1))),
        ),
        cases=cases,
        describe=describe,
        draw=draw_engines,
        mistakes=(
            Mistake(
                Text("Load is ignored", "没有考虑负载"),
                Text(
                    "The engine with the longest prefix computes least, but if most prompts begin alike, all of them "
                    "wait "
                    "there while the other engines are idle. Add the load.",
                    "缓存前缀最长的引擎要算的最少；但如果大多数提示词开头相同，它们就都在那里排队，别的引擎却闲着。"
                    "要加上负载。",
                ),
                (("load + num for load, num", "num for load, num"),),
            ),
            Mistake(
                Text("Prefixes are ignored", "没有考虑前缀"),
                Text(
                    "The engine with the smallest load may have to compute the whole prompt, while another has nearly "
                    "all of it in its cache. Add the tokens that have to be computed.",
                    "负载最小的引擎也许要计算整个提示词，而另一个引擎的缓存里几乎全都有。要加上需要计算的 token 数。",
                ),
                (("load + num for load, num", "load for load, num"),),
            ),
            Mistake(
                Text("Tokens are counted instead of blocks", "按 token 而不是按块计算"),
                Text(
                    "An engine finds only whole blocks. A prefix that ends in the middle of a block has to be "
                    "computed.",
                    "引擎只能找到整块。在块中间结束的前缀仍然要计算。",
                ),
                (
                    (
                        "while num + self.block_size < len(prompt) and tuple(prompt[: num + self.block_size])",
                        "while num + 1 < len(prompt) and tuple(prompt[: num + 1])",
                    ),
                    ("            num += self.block_size", "            num += 1"),
                    (
                        "for end in range(self.block_size, len(prompt) + 1, self.block_size)",
                        "for end in range(1, len(prompt) + 1)",
                    ),
                ),
            ),
            Mistake(
                Text("A block is found without its beginning", "找块时不看它前面的内容"),
                Text(
                    "Equal tokens in one block do not suffice: K and V depend on all tokens before. Compare prefixes "
                    "from the first token on.",
                    "一个块里的 token 相同还不够：K 和 V 取决于前面所有的 token。要从第一个 token 开始比较前缀。",
                ),
                (
                    ("tuple(prompt[: num + self.block_size])", "tuple(prompt[num : num + self.block_size])"),
                    ("tuple(prompt[:end])", "tuple(prompt[end - self.block_size : end])"),
                ),
            ),
            Mistake(
                Text("The whole prompt is found", "把整个提示词都算作已缓存"),
                Text(
                    "If a prompt is a multiple of the block size, its last block is not used: the last token has to be "
                    "computed, because its logits choose the first token of the answer.",
                    "提示词长度是块大小的整数倍时，最后一块用不上：最后一个 token 必须计算，要用它的 logits "
                    "选出回答的第一个 token。",
                ),
                (("num + self.block_size < len(prompt)", "num + self.block_size <= len(prompt)"),),
            ),
            Mistake(
                Text("The load counts whole prompts", "负载按整个提示词计算"),
                Text(
                    "Tokens that are found in the cache are not computed, so nobody waits for them. If the load counts "
                    "them, it also never goes back to 0.",
                    "缓存里找到的 token 不用计算，也就没有人等它们。如果把它们算进负载，负载也永远回不到 0。",
                ),
                (("+= to_compute[engine]", "+= len(prompt)"),),
            ),
            Mistake(
                Text("The load is not updated", "没有更新负载"),
                Text(
                    "The router has to add what it has sent. `computed` only subtracts.",
                    "路由器要把自己发出去的加到负载上。`computed` 只会减。",
                ),
                (("        self.load[engine] += to_compute[engine]\n", ""),),
            ),
            Mistake(
                Text("The prompt is not noted", "没有记录提示词"),
                Text(
                    "After a prompt was sent to an engine, its blocks will be in that engine's cache. Without a "
                    "note, no "
                    "later prompt is ever found.",
                    "提示词发给一个引擎之后，它的块就会在那个引擎的缓存里。不记录的话，后来的提示词什么都找不到。",
                ),
                (("self.prefixes[engine].add(tuple(prompt[:end]))", "pass"),),
            ),
            Mistake(
                Text("Noted for all engines", "给所有引擎都记录了"),
                Text(
                    "Engines do not share their caches. Only the engine that gets the prompt will have its blocks.",
                    "引擎之间不共享缓存。只有收到提示词的引擎才会有它的块。",
                ),
                (
                    (
                        "self.prefixes[engine].add(tuple(prompt[:end]))",
                        "[one.add(tuple(prompt[:end])) for one in self.prefixes]",
                    ),
                ),
            ),
            Mistake(
                Text("The last of equal engines", "相等时取了最后一个"),
                Text(
                    "Of engines with the same cost, the task asks for the first.",
                    "几个引擎的代价相等时，题目要求取第一个。",
                ),
                (("costs.index(min(costs))", "len(costs) - 1 - costs[::-1].index(min(costs))"),),
            ),
        ),
    ),
)
