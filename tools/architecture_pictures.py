"""Draw what a request passes through, and how memory is managed, from the names and the state of the code itself.

    python -m tools.architecture_pictures           # write docs/images/request.svg and memory.svg, and the Chinese ones
    python -m tools.architecture_pictures --check   # fail if a picture differs from the code

A box names a function, and fails to be drawn if the file does not define it. The picture of memory shows the state that
a `Scheduler` and a `BlockManager` reach with three short prompts. Each picture has a background of its own, so that it
can be read on light and dark pages.
"""

import argparse
import ast
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from nanovllm.block_manager import BlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm_extras.trace.page import find_symbol
from nanovllm_extras.trace.replay import NULL_BLOCK

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
LANGUAGES = ("en", "zh")
WIDTH = 560

INK, MUTED, LINE = "#1d2733", "#5a6675", "#8894a3"
PAPER, BOX, LOOP, SIDE = "#fcfcfa", "#eaf1fb", "#f3f4ee", "#fdf0e0"
SHARED, OF_A, OF_B, CACHED, FREE = "#d9c9f2", "#bfdbf7", "#c5e8cf", "#f6e3b4", "#ffffff"

Words = tuple[str, str]  # in English, in Chinese


class Call(NamedTuple):
    """A function that a request passes through: where it is defined, what it does, and what it hands on."""

    place: str  # file and symbol
    does: Words
    passes: str = ""  # the name of what the next function gets
    side: tuple[str, ...] = ()  # other functions that it calls, as places

    @property
    def symbol(self) -> str:
        return self.place.split()[1]


BEFORE = (
    Call("nanovllm/engine.py LLMEngine.add_request", ("takes prompt and parameters", "收下提示词和参数"), "prompt"),
    Call("nanovllm/engine.py LLMEngine.encode", ("turns the text into token ids", "把文本变成 token id"), "Sequence"),
    Call("nanovllm/scheduler.py Scheduler.add", ("puts the sequence into the queue", "把序列放进等待队列"), "waiting"),
)  # fmt: skip
STEP = (
    Call(
        "nanovllm/scheduler.py Scheduler.schedule",
        ("distributes the budget of tokens", "把 token 预算分给各个序列"),
        "Step",
        (
            "nanovllm/block_manager.py BlockManager.try_admit",
            "nanovllm/prefix_cache.py PrefixCache.find",
            "nanovllm/block_manager.py BlockManager.try_allocate",
        ),
    ),
    Call(
        "nanovllm/batch.py build_batch",
        ("the step as tensors: slots, block tables", "把这一步变成张量：槽位、块表"),
        "Batch",
    ),
    Call(
        "nanovllm/model_runner.py ModelRunner.forward",
        ("the network, for all new tokens at once", "网络一次算完所有新 token"),
        "hidden",
        (
            "nanovllm/layers/attention.py TorchAttention.store_kv",
            "nanovllm/layers/attention.py TorchAttention.attend",
        ),
    ),
    Call(
        "nanovllm/model_runner.py ModelRunner.sample",
        ("logits, then one token for each sample", "算出 logits，再采样 token"),
        "token ids",
        ("nanovllm/sampler.py sample_tokens",),
    ),
    Call(
        "nanovllm/scheduler.py Scheduler.update",
        ("appends the tokens, ends what is done", "追加 token，结束已完成的序列"),
        "sequences",
    ),
)
AFTER = (
    Call(
        "nanovllm/request.py Request.read_tokens",
        ("whole characters, until a stop string", "拼成完整的字符，遇到停止字符串为止"),
        "text",
        ("nanovllm/detokenizer.py Detokenizer.append",),
    ),
    Call(
        "nanovllm/request.py Request.make_output",
        ("what the caller of `step()` receives", "`step()` 的调用者得到的结果"),
    ),
)
CALLS = (*BEFORE, *STEP, *AFTER)
RECORDS = {  # what is handed on -> where it is defined
    "Sequence": "nanovllm/sequence.py Sequence",
    "Step": "nanovllm/scheduler.py Step",
    "Batch": "nanovllm/batch.py Batch",
    "RequestOutput": "nanovllm/request.py RequestOutput",
}
ATTRIBUTES = {  # class -> attributes that the picture of memory names
    "nanovllm/block_manager.py BlockManager": ("_free", "_ref_counts"),
    "nanovllm/prefix_cache.py PrefixCache": ("_by_hash",),
    "nanovllm/sequence.py Sequence": ("block_table", "num_computed_tokens"),
    "nanovllm/kv_cache.py KVCache": ("tensor",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the architecture from the code's own names.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture differs from the code")
    args = parser.parse_args()
    stale = [path for path, text in pictures().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}{' is stale' if args.check else ''}")
        if not args.check:
            path.write_text(pictures()[path], encoding="utf-8")
    sys.exit(1 if args.check and stale else 0)


def pictures() -> dict[Path, str]:
    """Return the text of each picture. Raises LookupError if the code does not define a name that a picture shows."""
    check_names()
    return {
        IMAGES / f"{name}{'' if language == 'en' else '.zh'}.svg": draw(language)
        for name, draw in (("request", draw_request), ("memory", draw_memory))
        for language in LANGUAGES
    }


def check_names() -> None:
    places = [place for call in CALLS for place in (call.place, *call.side)]
    for place in (*places, *RECORDS.values()):
        find_in_code(place)
    for place, names in ATTRIBUTES.items():
        tree = ast.parse(find_in_code(place)[1])
        stored = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        stored |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if missing := set(names) - stored:
            raise LookupError(f"{place} has no {', '.join(sorted(missing))}")


def find_in_code(place: str) -> tuple[int, str]:
    """Return the first line number and the text of what `place` names."""
    return find_symbol((ROOT / place.split()[0]).read_text(encoding="utf-8"), place)


# ---- drawing


class Drawing:
    """The elements of an SVG picture. Its height grows with what is drawn."""

    def __init__(self, language: str, title: Words) -> None:
        self.language = language
        self.title = self.pick(title)
        self.parts: list[str] = []
        self.bottom = 0.0

    def pick(self, words: Words) -> str:
        return words[LANGUAGES.index(self.language)]

    def box(self, x: float, y: float, width: float, height: float, fill: str, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
        self.parts.append(f'<rect {shape} fill="{fill}" stroke="{LINE}"{dashed}/>')
        self.bottom = max(self.bottom, y + height)

    def text(self, x: float, y: float, text: str, kind: str = "word", anchor: str = "start", color: str = INK) -> None:
        place = f'x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}" fill="{color}"'
        self.parts.append(f"<text {place}>{escape(text.replace('`', ''), quote=False)}</text>")
        self.bottom = max(self.bottom, y)

    def arrow(self, points: str, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        line = f'points="{points}" fill="none" stroke="{MUTED}" stroke-width="1.5" marker-end="url(#tip)"{dashed}'
        self.parts.append(f"<polyline {line}/>")

    def svg(self) -> str:
        height = self.bottom + 18
        style = (
            ".word{font:13px system-ui,sans-serif}.head{font:600 15px system-ui,sans-serif}"
            ".code{font:600 14px ui-monospace,Menlo,Consolas,monospace}"
            ".small{font:12px ui-monospace,Menlo,Consolas,monospace}"
        )
        tip = f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
                f'height="{height:g}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
                f"{tip}</marker></defs>",
                f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" fill="{PAPER}" '
                f'stroke="{LINE}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


# ---- the life of a request

LEFT, MAIN, SIDE_X, SIDE_WIDTH = 34, 284, 344, 200
BOX_HEIGHT, GAP = 52, 34


def draw_request(language: str) -> str:
    title = ("What a request passes through, from add_request to text", "一个请求从 add_request 到文本所经过的函数")
    drawing = Drawing(language, title)
    y = 22.0
    for call in BEFORE:
        y = draw_call(drawing, call, y)
    top = y - 4
    loop_at = len(drawing.parts)
    drawing.text(LEFT - 6, top + 22, "LLMEngine.step", "code")
    drawing.text(
        LEFT + 130, top + 22, drawing.pick(("once for each forward pass", "每次前向计算一次")), "word", "start", MUTED
    )
    y = top + 36
    first = y
    for call in STEP:
        y = draw_call(drawing, call, y)
    back = LEFT - 12
    last = y - GAP - BOX_HEIGHT / 2
    drawing.arrow(
        f"{LEFT},{last:g} {back},{last:g} {back},{first + BOX_HEIGHT / 2:g} {LEFT - 1},{first + BOX_HEIGHT / 2:g}"
    )
    for call in AFTER:
        y = draw_call(drawing, call, y)
    frame = drawing.parts[loop_at:]
    del drawing.parts[loop_at:]
    drawing.box(12, top, WIDTH - 24, y - top - 22, LOOP, "5 4")
    drawing.parts += frame
    middle = LEFT + MAIN / 2
    drawing.arrow(f"{middle:g},{y - GAP:g} {middle:g},{y - 2:g}")
    drawing.text(middle, y + 14, "RequestOutput", "code", "middle")
    return drawing.svg()


def draw_call(drawing: Drawing, call: Call, y: float) -> float:
    """Draw the box of a call, the functions that it calls, and the arrow to the next box. Return where that begins."""
    find_in_code(call.place)
    drawing.box(LEFT, y, MAIN, BOX_HEIGHT, BOX)
    drawing.text(LEFT + 10, y + 21, call.symbol, "code")
    drawing.text(LEFT + 10, y + 41, drawing.pick(call.does), "word", "start", MUTED)
    if call.side:
        height = 16 + 17 * len(call.side)
        start = y + (BOX_HEIGHT - height) / 2
        drawing.box(SIDE_X, start, SIDE_WIDTH, height, SIDE)
        for i, place in enumerate(call.side):
            drawing.text(SIDE_X + 9, start + 21 + 17 * i, place.split()[1], "small")
        drawing.arrow(f"{LEFT + MAIN:g},{y + BOX_HEIGHT / 2:g} {SIDE_X - 1},{y + BOX_HEIGHT / 2:g}")
    if call.passes:
        middle = LEFT + MAIN / 2
        drawing.arrow(f"{middle:g},{y + BOX_HEIGHT:g} {middle:g},{y + BOX_HEIGHT + GAP - 1:g}")
        drawing.text(middle + 9, y + BOX_HEIGHT + 21, call.passes, "small")
    return y + BOX_HEIGHT + GAP


# ---- memory

NUM_BLOCKS, BLOCK_SIZE = 8, 4
PROMPTS = {"A": "abcdef", "B": "abcdxyz", "C": "abcdghij"}  # C has ended: its second block is free, and still cached


class Memory(NamedTuple):
    """What the picture shows: the parts of an engine without a model, after one step of each prompt."""

    blocks: BlockManager
    seqs: dict[str, Sequence]


def fill_memory() -> Memory:
    """Schedule three short prompts, and end the last one."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)
    seqs = {name: Sequence(name, [ord(one) for one in text], SamplingParams()) for name, text in PROMPTS.items()}
    for seq in seqs.values():
        scheduler.add(seq)
    scheduler.schedule()
    scheduler.finish(seqs.pop("C"), "stop")
    return Memory(blocks, seqs)


def draw_memory(language: str) -> str:
    blocks, seqs = fill_memory()
    drawing = Drawing(language, ("The pool of blocks, block tables and hashes", "块池、块表与哈希"))
    y = draw_tables(drawing, seqs, 22)
    y = draw_pool(drawing, blocks, seqs, y)
    y = draw_hashes(drawing, blocks, y)
    draw_slots(drawing, seqs["A"], y)
    return drawing.svg()


def heading(drawing: Drawing, y: float, code: str, words: Words) -> float:
    drawing.text(20, y + 14, code, "code")
    drawing.text(20, y + 33, drawing.pick(words), "word", "start", MUTED)
    return y + 46


def draw_tables(drawing: Drawing, seqs: dict[str, Sequence], y: float) -> float:
    words = ("the blocks of each sequence, in order", "按顺序列出每个序列的块")
    y = heading(drawing, y, "Sequence.block_table", words)
    for name, seq in seqs.items():
        drawing.text(20, y + 20, f"{name}   {' '.join(PROMPTS[name])}", "small")
        drawing.text(196, y + 20, f"num_computed_tokens {seq.num_computed_tokens}", "small", "start", MUTED)
        for i, block_id in enumerate(seq.block_table):
            drawing.box(400 + 46 * i, y, 40, 30, color_of(block_id, seqs))
            drawing.text(420 + 46 * i, y + 20, str(block_id), "code", "middle")
        y += 40
    return y + 14


def draw_pool(drawing: Drawing, blocks: BlockManager, seqs: dict[str, Sequence], y: float) -> float:
    words = (f"the pool: {blocks.num_blocks} blocks of {BLOCK_SIZE} slots, and the null block 0",
             f"块池：{blocks.num_blocks} 个块，每块 {BLOCK_SIZE} 个槽位，另有占位块 0")  # fmt: skip
    y = heading(drawing, y, "BlockManager", words)
    width = 58
    for block_id in range(blocks.num_blocks + 1):
        x = 20 + width * block_id
        owners = [name for name, seq in seqs.items() if block_id in seq.block_table]
        drawing.box(x, y, width - 6, 62, pool_color(block_id, blocks, seqs), "" if owners else "4 3")
        drawing.text(x + 7, y + 18, str(block_id), "code")
        drawing.text(x + 7, y + 36, content_of(block_id, blocks, seqs), "small")
        status = next(
            words
            for is_true, words in (
                (block_id == NULL_BLOCK, ("null", "占位")),
                (block_id in blocks.prefix_cache, ("cached", "有缓存")),
                (True, ("free", "空闲")),
            )
            if is_true
        )
        state = ", ".join(owners) or drawing.pick(status)
        drawing.text(x + 5, y + 54, state, "word", "start", MUTED)
    y += 84
    counts = " ".join(map(str, blocks._ref_counts[1:]))
    free = " → ".join(map(str, blocks._free))
    drawing.text(20, y, "_ref_counts", "small")
    drawing.text(114, y, counts, "small")
    drawing.text(300, y, drawing.pick(("owners of blocks 1 … 8", "1 … 8 号块的所有者数")), "word", "start", MUTED)
    drawing.text(20, y + 22, "_free", "small")
    drawing.text(114, y + 22, free, "small")
    drawing.text(300, y + 22, drawing.pick(("handed out in this order", "按这个次序分配")), "word", "start", MUTED)
    return y + 44


def draw_hashes(drawing: Drawing, blocks: BlockManager, y: float) -> float:
    words = (
        "full blocks by the hash of their tokens and of the block before",
        "由自己的 token 和前一块的哈希得到键，查找填满的块",
    )
    y = heading(drawing, y, "PrefixCache._by_hash", words)
    hashes = blocks.prefix_cache._by_hash
    for block_hash, cached in hashes.items():
        text = letters(cached.tokens)
        parent = next((one.block_hash for one in hashes.values() if one.serial == cached.parent_serial), 0)
        drawing.text(20, y + 14, f'hash_block({f"{parent:016x}"[:5] + "…" if parent else 0}, "{text}")', "small")
        drawing.arrow(f"214,{y + 10:g} 238,{y + 10:g}")
        drawing.text(246, y + 14, f"{block_hash:016x}", "small", "start", MUTED)
        drawing.arrow(f"374,{y + 10:g} 398,{y + 10:g}")
        drawing.text(406, y + 14, f"block_id {cached.block_id}", "code")
        y += 26
    return y + 14


def draw_slots(drawing: Drawing, seq: Sequence, y: float) -> None:
    words = (
        "slot = block_id × block_size + offset: where K and V of a token are",
        "槽位 = 块号 × 块大小 + 块内偏移：一个 token 的 K 和 V 的位置",
    )
    y = heading(drawing, y, "KVCache.tensor", words)
    for position in range(seq.num_tokens):
        block_id, offset = seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
        x = 20 + 87 * position
        drawing.box(x, y, 81, 48, OF_A if position >= BLOCK_SIZE else SHARED)
        drawing.text(x + 40, y + 18, f"A[{position}] {PROMPTS['A'][position]}", "small", "middle")
        slot = block_id * BLOCK_SIZE + offset
        drawing.text(x + 40, y + 38, f"{block_id}·{BLOCK_SIZE}+{offset}={slot}", "small", "middle", MUTED)


def letters(tokens: bytes) -> str:
    return "".join(map(chr, memoryview(tokens).cast("i")))


def content_of(block_id: int, blocks: BlockManager, seqs: dict[str, Sequence]) -> str:
    """Return the tokens whose K and V a block holds."""
    for name, seq in seqs.items():
        if block_id in seq.block_table:
            start = seq.block_table.index(block_id) * BLOCK_SIZE
            return PROMPTS[name][start : start + BLOCK_SIZE]
    cached = blocks.prefix_cache._by_id.get(block_id)
    return letters(cached.tokens) if cached else ""


def color_of(block_id: int, seqs: dict[str, Sequence]) -> str:
    owners = [name for name, seq in seqs.items() if block_id in seq.block_table]
    return SHARED if len(owners) > 1 else {"A": OF_A, "B": OF_B}[owners[0]]


def pool_color(block_id: int, blocks: BlockManager, seqs: dict[str, Sequence]) -> str:
    if blocks.num_owners(block_id):
        return color_of(block_id, seqs)
    return CACHED if block_id in blocks.prefix_cache else FREE


if __name__ == "__main__":
    main()
