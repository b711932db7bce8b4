"""Mend a cache that frees a duplicate block, to which a block table still points."""

from labs.learn.repair import LARGEST_BUDGET, SCHEDULER, SEQUENCE, make_repair
from labs.learn.seen import Mistake
from labs.learn.texts import Text
from labs.learn.traffic import Request, Traffic

CACHE = '''

class BlockManager:
    """Blocks, and a prefix cache: all tokens up to a block's end -> that block. No content is kept twice."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(reversed(range(num_blocks)))  # the last one is taken next
        self.num_owners = [0] * num_blocks
        self.block_of_prefix: dict[tuple[int, ...], int] = {}
        self.prefix_of_block: dict[int, tuple[int, ...]] = {}

    def admit(self, seq: Sequence) -> None:
        """Begin with the blocks that are found, and take blocks for the other tokens."""
        size = self.block_size
        for end in range(size, len(seq.token_ids), size):  # without the last token: it must be computed
            block_id = self.block_of_prefix.get(tuple(seq.token_ids[:end]))
            if block_id is None:
                break
            self.share(block_id)
            seq.block_table.append(block_id)
        seq.num_computed_tokens = len(seq.block_table) * size
        self.grow(seq)

    def grow(self, seq: Sequence) -> None:
        while len(seq.block_table) * self.block_size < len(seq.token_ids):
            seq.block_table.append(self.take())

    def register(self, seq: Sequence, num_before: int) -> None:
        """Add the blocks that a step has filled. If another block has the same content, free the duplicate."""
        for i in range(num_before // self.block_size, seq.num_computed_tokens // self.block_size):
            prefix, block_id = tuple(seq.token_ids[: (i + 1) * self.block_size]), seq.block_table[i]
            kept = self.block_of_prefix.setdefault(prefix, block_id)
            if kept == block_id:
                self.prefix_of_block[block_id] = prefix
            else:
                self.share(kept)
                seq.block_table[i] = kept
                self.drop(block_id)

    def take(self) -> int:
        block_id = self.free.pop()
        if block_id in self.prefix_of_block:
            del self.block_of_prefix[self.prefix_of_block.pop(block_id)]
        self.num_owners[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Give a block one more owner. It may be free."""
        if block_id in self.free:
            self.free.remove(block_id)
        self.num_owners[block_id] += 1

    def drop(self, block_id: int) -> None:
        """Take one owner from a block, and free it if that was the last one."""
        self.num_owners[block_id] -= 1
        if not self.num_owners[block_id]:
            self.free.append(block_id)

    def release(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            self.drop(block_id)
        seq.block_table = []
'''
SHARE = "                self.share(kept)\n"
POINT = "                seq.block_table[i] = kept\n"
DROP = "                self.drop(block_id)\n"


def together(num_blocks: int, *requests: Request) -> Traffic:
    return Traffic(num_blocks, 2, LARGEST_BUDGET, requests)


EXERCISES = (
    make_repair(
        "freed_duplicate",
        "07_sharing",
        Text("Mend the fault: a duplicate that is freed", "修故障：释放了重复的块"),
        Text(
            "Two requests with the same prompt arrive together, so both compute it. The cache keeps one copy of each\n"
            "block and frees the other one, which saves memory. After that, one of the answers turns into nonsense.",
            "两个提示词相同的请求同时到达，于是都要计算。缓存给每块内容只留一份，释放另一份，这样省内存。\n"
            "可是之后，其中一个回答变得毫无意义。",
        ),
        Text(
            "The radix cache of mini-sglang freed such pages: https://github.com/sgl-project/mini-sglang/pull/142",
            "mini-sglang 的 radix 缓存释放过这样的页：https://github.com/sgl-project/mini-sglang/pull/142",
        ),
        (
            Text(
                "After the step in which a block is freed, which block table still has its number?",
                "释放一个块的那一步之后，哪个块表里还有它的编号？",
            ),
            Text(
                "The sequence must read the block that is kept. So its table must point there, before the duplicate "
                "is freed.",
                "这个序列应该去读留下的那个块。所以在释放重复的块之前，要让块表指向留下的块。",
            ),
            Text(
                "Call `self.share(kept)`, which counts the owner and takes the block out of `free`; set "
                "`seq.block_table[i] = kept`; then drop the duplicate.",
                "调用 `self.share(kept)`，它会增加所有者，并把块从 `free` 里取出；设置 `seq.block_table[i] = kept`；"
                "然后释放重复的块。",
            ),
        ),
        SEQUENCE + CACHE + SCHEDULER,
        ((SHARE, ""), (POINT, "")),
        Text(
            "The duplicate is free, but the sequence's block table still has its number. Another sequence takes the "
            "block and overwrites it, and when the first sequence ends, the block is freed a second time.",
            "重复的块已经空闲，序列的块表里却还有它的编号。别的序列取走它、覆盖它；第一个序列结束时，它又被释放一次。",
        ),
        together(8, Request((1, 2, 0), 3), Request((1, 2, 0), 3), Request((2, 2), 1, arrival=1)),
        (
            together(8, Request((1, 2, 0, 1, 1), 2), Request((1, 2, 0, 1, 1), 5), Request((1, 2, 0, 1, 2), 2)),
            together(6, Request((1, 2, 0), 1), Request((1, 2, 0), 4)),
            together(6, Request((1, 2, 0), 1), Request((1, 2, 0), 4), Request((0, 0), 1, arrival=2)),
            together(7, Request((0,), 4), Request((0,), 4), Request((0, 3), 2, arrival=4)),
            together(4, Request((0,), 2), Request((0,), 2, arrival=1)),
        ),
        (
            Mistake(
                Text("The kept block has an owner too few", "留下的块少了一个所有者"),
                Text(
                    "The table points to the kept block, but nobody has counted this owner. When the other sequence "
                    "ends, the block is freed while this one reads it. Call `share`.",
                    "块表已指向留下的块，但没有算上这个所有者。另一个序列结束时，块就被释放，而这个序列还在读。"
                    "应调用 `share`。",
                ),
                ((SHARE, ""),),
            ),
            Mistake(
                Text("The kept block may be free", "留下的块可能是空闲的"),
                Text(
                    "The owner is counted, but if the sequence that computed the block has ended, the block is in "
                    "`free` and is taken by another one. `share` takes it out of `free`.",
                    "所有者算上了，但如果计算这个块的序列已经结束，块就在 `free` 里，会被别的序列取走。"
                    "`share` 会把它从 `free` 里取出。",
                ),
                ((SHARE, "                self.num_owners[kept] += 1\n"),),
            ),
            Mistake(
                Text("The duplicate is lost", "重复的块丢了"),
                Text(
                    "The table points to the kept block. But the duplicate has lost its last table and is not freed: "
                    "the pool shrinks.",
                    "块表指向了留下的块。但重复的块已不在任何块表里，又没有释放：块池会越来越小。",
                ),
                ((DROP, ""),),
            ),
            Mistake(
                Text("Both copies stay", "两份都留着"),
                Text(
                    "That is right in itself, and many engines do it. But this cache promises that no content is kept "
                    "twice: the pool holds less than it could.",
                    "这样本身没错，许多引擎就是这样做的。但这个缓存保证同样的内容只留一份：这样做，块池能放的内容就少了。",
                ),
                ((SHARE + POINT + DROP, "                pass\n"),),
            ),
            Mistake(
                Text("The other sequence's block is freed", "释放了另一个序列的块"),
                Text(
                    "The block that is kept belongs to another sequence, which reads it. Free the duplicate, "
                    "`block_id`, and let this table point to `kept`.",
                    "留下的块属于另一个序列，它还在读。应释放重复的块 `block_id`，并让这个块表指向 `kept`。",
                ),
                ((SHARE + POINT + DROP, "                self.drop(kept)\n"),),
            ),
        ),
    ),
)
