"""Mend a cache that remembers the wrong block when a block has become full."""

from labs.learn.repair import LARGEST_BUDGET, SCHEDULER, SEQUENCE, make_repair
from labs.learn.seen import Mistake
from labs.learn.texts import Text
from labs.learn.traffic import Request, Traffic

CACHE = '''

class BlockManager:
    """Blocks, and a prefix cache: all tokens up to a block's end -> that block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))  # in the order in which they will be taken
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
            if block_id in self.free:
                self.free.remove(block_id)
            self.num_owners[block_id] += 1
            seq.block_table.append(block_id)
        seq.num_computed_tokens = len(seq.block_table) * size
        for end in range(seq.num_computed_tokens + size, len(seq.token_ids), size):  # full, and followed by a token
            seq.block_table.append(self.take())
            self.remember(seq.token_ids[:end], seq.block_table[-1])
        seq.block_table.append(self.take())

    def grow(self, seq: Sequence) -> None:
        """Prepare a decode. The newest token is in `token_ids`; K and V of all others are in the cache."""
        if len(seq.token_ids) > len(seq.block_table) * self.block_size:
            self.remember(seq.token_ids[:-1], seq.block_table[-1])
            seq.block_table.append(self.take())

    def remember(self, tokens: list[int], block_id: int) -> None:
        """Add a full block: `tokens` are all tokens up to its end."""
        prefix = tuple(tokens)
        if prefix not in self.block_of_prefix:
            self.block_of_prefix[prefix] = block_id
            self.prefix_of_block[block_id] = prefix

    def take(self) -> int:
        block_id = self.free.pop(0)
        if block_id in self.prefix_of_block:
            del self.block_of_prefix[self.prefix_of_block.pop(block_id)]
        self.num_owners[block_id] = 1
        return block_id

    def release(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            self.num_owners[block_id] -= 1
            if not self.num_owners[block_id]:
                self.free.append(block_id)
        seq.block_table = []
'''
TEST = "        if len(seq.token_ids) > len(seq.block_table) * self.block_size:\n"
REMEMBER = "            self.remember(seq.token_ids[:-1], seq.block_table[-1])\n"
APPEND = "            seq.block_table.append(self.take())\n"
GROW = TEST + REMEMBER + APPEND
REMAINDER = "        if len(seq.token_ids) % self.block_size == 1:\n"


def growing(num_blocks: int, block_size: int, *requests: Request) -> Traffic:
    return Traffic(num_blocks, block_size, LARGEST_BUDGET, requests)


EXERCISES = (
    make_repair(
        "full_block",
        "07_sharing",
        Text("Mend the fault: which block is full?", "修故障：满的是哪一块？"),
        Text(
            "A cache remembers a block when it has become full, which it notices by a remainder: `len % block_size == "
            "1`. A\nrequest that continues an earlier answer gets nonsense. Requests with other beginnings are right.",
            "缓存在一个块填满时把它记下来，判断的办法是看余数：`len % block_size == 1`。接着之前的回答往下问的请求，\n"
            "得到的回答毫无意义。开头不同的请求都正确。",
        ),
        Text(
            "Readers of small engines ask what this remainder means, for example in\n"
            "https://github.com/GeeeekExplorer/nano-vllm/issues/150 and "
            "https://github.com/GeeeekExplorer/nano-vllm/issues/240",
            "读小型引擎源码的人常问这个余数的意思，例如：\n"
            "https://github.com/GeeeekExplorer/nano-vllm/issues/150 和 "
            "https://github.com/GeeeekExplorer/nano-vllm/issues/240",
        ),
        (
            Text(
                "Blocks have 4 slots, and the fifth token is in the list. Which tokens are in the cache, and which "
                "block is full?",
                "每块 4 个槽位，列表里已有第 5 个 token。哪些 token 在缓存里？哪一块是满的？",
            ),
            Text(
                "The full block is the last one of the table before the table grows. Afterwards the last one is empty.",
                "满的是块表增长之前的最后一块。增长之后，最后一块是空的。",
            ),
            Text(
                "Remember the last block first, then append the new one. `len(seq.token_ids) > len(seq.block_table) * "
                "self.block_size` says the same as the remainder, and leaves no doubt.",
                "先记下最后一块，再追加新块。`len(seq.token_ids) > len(seq.block_table) * self.block_size` "
                "与那个余数意思相同，而且一看就懂。",
            ),
        ),
        SEQUENCE + CACHE + SCHEDULER,
        ((GROW, REMAINDER + APPEND + REMEMBER),),
        Text(
            "If the number of tokens has the remainder 1, the newest token does not fit any more: the last block is "
            "full, and a new one is appended. What is remembered here is the new block, which is still empty.",
            "token 数的余数是 1 时，最新的 token 已经放不下：最后一块满了，要追加新块。这里记下的却是还空着的新块。",
        ),
        growing(2, 2, Request((1,), 3), Request((1, 1, 0), 1)),
        (
            growing(6, 2, Request((1,), 6), Request((1, 3, 3, 3, 3), 2, arrival=7)),
            growing(6, 3, Request((1, 0, 1), 5), Request((1, 0, 1, 1), 4, arrival=2)),
            growing(8, 2, Request((1, 2, 0, 1), 4), Request((1, 2, 0, 1, 1), 4, arrival=1)),
        ),
        (
            Mistake(
                Text("One token too early", "早了一个 token"),
                Text(
                    "With the remainder 0 the newest token still fits into the last block, and its K and V are "
                    "computed by this step. The table grows one token too early.",
                    "余数是 0 时，最新的 token 还放得进最后一块，它的 K 和 V 由这一步计算。块表早增长了一个 token。",
                ),
                ((TEST, "        if len(seq.token_ids) % self.block_size == 0:\n"),),
            ),
            Mistake(
                Text("A full block of an answer is never found", "回答的满块永远找不到"),
                Text(
                    "No answer is wrong any more, but each turn of a conversation computes the answers before it "
                    "again. Remember the full block, and leave the newest token, which is not in it, out of the key.",
                    "不再有错误的回答，但对话的每一轮都要把之前的回答重算一遍。"
                    "要记下那个满块；键里不要有最新的 token，它不在这一块里。",
                ),
                ((REMEMBER, REMEMBER.replace("[:-1], ", ", ")),),
            ),
            Mistake(
                Text("The block before the last", "倒数第二块"),
                Text(
                    "`[-2]` is the full block only after the new one has been appended. Here it is one too far to the "
                    "left.",
                    "只有在追加新块之后，`[-2]` 才是那个满块。在这里它偏左了一块。",
                ),
                ((REMEMBER, REMEMBER.replace("block_table[-1]", "block_table[-2 if seq.block_table[1:] else -1]")),),
            ),
        ),
    ),
)
