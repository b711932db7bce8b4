"""Mend a prefix cache whose entries outlive the blocks that they name."""

from labs.learn.repair import LARGEST_BUDGET, SCHEDULER, SEQUENCE, make_repair
from labs.learn.seen import Mistake
from labs.learn.texts import Text
from labs.learn.traffic import Request, Traffic

CACHE = '''

class BlockManager:
    """Blocks, and a prefix cache: the tokens of a prompt up to a block's end -> that block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))  # in the order in which they will be taken
        self.num_owners = [0] * num_blocks
        self.block_of_hash: dict[int, int] = {}
        self.hash_of_block: dict[int, int] = {}
        self.tokens_of_block: dict[int, list[int]] = {}

    def hash_prefix(self, seq: Sequence, i: int) -> int:
        """Return a hash of all tokens up to the end of block `i`."""
        return hash(tuple(seq.token_ids[: (i + 1) * self.block_size]))

    def tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def admit(self, seq: Sequence) -> None:
        """Begin with the blocks that are found, and take blocks for the other tokens."""
        for i in range((len(seq.token_ids) - 1) // self.block_size):  # without the last token: it must be computed
            block_id = self.block_of_hash.get(self.hash_prefix(seq, i))
            if block_id is None or self.tokens_of_block[block_id] != self.tokens(seq, i):
                break
            if block_id in self.free:
                self.free.remove(block_id)
            self.num_owners[block_id] += 1
            seq.block_table.append(block_id)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size
        self.grow(seq)

    def grow(self, seq: Sequence) -> None:
        while len(seq.block_table) * self.block_size < len(seq.token_ids):
            seq.block_table.append(self.take())

    def take(self) -> int:
        block_id = self.free.pop(0)
        if block_id in self.hash_of_block:
            del self.block_of_hash[self.hash_of_block.pop(block_id)]
        self.tokens_of_block[block_id] = []  # until it is full again
        self.num_owners[block_id] = 1
        return block_id

    def register(self, seq: Sequence, num_before: int) -> None:
        """Add the blocks that a step has filled. `num_before`: the computed tokens before the step."""
        for i in range(num_before // self.block_size, seq.num_computed_tokens // self.block_size):
            key, block_id = self.hash_prefix(seq, i), seq.block_table[i]
            self.tokens_of_block[block_id] = self.tokens(seq, i)
            if key not in self.block_of_hash:
                self.block_of_hash[key] = block_id
                self.hash_of_block[block_id] = key

    def release(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            self.num_owners[block_id] -= 1
            if not self.num_owners[block_id]:
                self.free.append(block_id)
        seq.block_table = []
'''
EVICT = """\
        if block_id in self.hash_of_block:
            del self.block_of_hash[self.hash_of_block.pop(block_id)]
"""
FIELD = "        self.hash_of_block: dict[int, int] = {}\n"
NOTE = "                self.hash_of_block[block_id] = key\n"
FREE = "                self.free.append(block_id)\n"
FAULT = ((EVICT, ""), (FIELD, ""), (NOTE, ""))


def one_after_the_other(num_blocks: int, *prompts: tuple[int, ...]) -> Traffic:
    """Return requests that do not overlap and get one token, with blocks of 2."""
    requests = tuple(Request(prompt, 1, arrival=2 * i) for i, prompt in enumerate(prompts))
    return Traffic(num_blocks, 2, LARGEST_BUDGET, requests)


EXERCISES = (
    make_repair(
        "stale_hash",
        "07_sharing",
        Text("Mend the fault: a hash that outlives its block", "修故障：块换了内容，哈希还在"),
        Text(
            "A cache compares the tokens of a block before it uses it, so that no entry can lead to other tokens.\n"
            "Still, a prompt is sometimes answered as if it began differently, but only when the pool is small.",
            "缓存在使用一个块之前会比较其中的 token，所以照理说不会用到别的 token。可是提示词有时得到的回答，\n"
            "就像它的开头是另一段话一样。只有块池小的时候才会发生。",
        ),
        Text(
            "The cache of nano-vllm kept such entries: https://github.com/GeeeekExplorer/nano-vllm/issues/163",
            "nano-vllm 的缓存留下过这样的条目：https://github.com/GeeeekExplorer/nano-vllm/issues/163",
        ),
        (
            Text(
                "In the trace, which block does the last request find, and who has filled it last?",
                "看记录：最后一个请求找到的是哪个块？那个块最后是谁填的？",
            ),
            Text(
                "Equal tokens are not enough: K and V of a block also depend on all tokens before it. And the entry "
                "of the old content is still there when the block is taken for other tokens.",
                "token 相同还不够：一块的 K 和 V 还取决于它前面的所有 token。"
                "而块被取去装别的 token 时，旧内容的条目还在。",
            ),
            Text(
                "Keep the hash of each registered block, and let `take` remove its entry of `block_of_hash`.",
                "为每个登记过的块记下它的哈希，由 `take` 从 `block_of_hash` 里删掉对应的条目。",
            ),
        ),
        SEQUENCE + CACHE + SCHEDULER,
        FAULT,
        Text(
            "A block is taken for other tokens, and its old entry of `block_of_hash` stays. A later prompt with the "
            "old hash finds the block. If the block's new tokens are the same as the old ones, but after another "
            "beginning, the comparison does not notice.",
            "块被取去装别的 token，`block_of_hash` 里的旧条目却还在。之后有相同哈希的提示词就会找到它。"
            "如果块里的新 token 恰好与旧的相同、只是前面的内容不同，比较 token 也发现不了。",
        ),
        one_after_the_other(4, (1, 2, 0, 0, 1), (2, 2, 2, 2, 0, 0), (1, 2, 0, 0, 1)),
        (
            one_after_the_other(8, (1, 2, 0, 0, 1), (1, 2, 0, 0, 1)),
            one_after_the_other(4, (1, 2, 0), (0, 0, 1, 1, 2, 2, 0), (1, 2, 0), (1, 2, 1)),
            Traffic(2, 2, LARGEST_BUDGET, (Request((1,), 2), Request((1, 1), 1), Request((1, 1, 0), 1))),
        ),
        (
            Mistake(
                Text("Free blocks are forgotten", "空闲的块被忘掉了"),
                Text(
                    "No answer is wrong any more, but a free block still holds its content until it is taken, and is "
                    "not found now. Remove the entry in `take`.",
                    "回答都对了，但空闲的块在被取走之前内容还在，现在却找不到了。应在 `take` 里删除条目。",
                ),
                (
                    (EVICT, ""),
                    (
                        FREE,
                        f"{FREE}                if block_id in self.hash_of_block:\n"
                        "                    del self.block_of_hash[self.hash_of_block.pop(block_id)]\n",
                    ),
                ),
            ),
            Mistake(
                Text("The old entry is in the way", "旧条目挡了路"),
                Text(
                    "The block's hash is compared now, so no content is mistaken for another. But the old entry stays, "
                    "and `register` adds no block for a hash that has an entry: this prefix is never found again. "
                    "Remove the entry in `take`.",
                    "现在会比较块的哈希，不会再认错内容。但旧条目还在，而哈希已有条目时 `register` 不会登记新的块："
                    "这个前缀再也找不到了。应在 `take` 里删除条目。",
                ),
                (
                    (EVICT, "        self.hash_of_block.pop(block_id, None)\n"),
                    (
                        "self.tokens_of_block[block_id] != self.tokens(seq, i):",
                        "self.hash_of_block.get(block_id) != self.hash_prefix(seq, i):",
                    ),
                ),
            ),
            Mistake(
                Text("The whole cache is forgotten", "整个缓存都忘掉了"),
                Text(
                    "Only the block that is taken gets other tokens. All other blocks keep their content: remove this "
                    "block's entry only.",
                    "只有被取走的块会换内容，其余的块内容都还在：只删这一块的条目。",
                ),
                ((EVICT, "        self.block_of_hash.clear()\n        self.hash_of_block.clear()\n"),),
            ),
            Mistake(
                Text("Only the newest content counts", "只看最新的内容"),
                Text(
                    "A new entry for the block does not remove the old one. If the block is full again with the same "
                    "tokens after another beginning, both entries lead to it. Remove the old entry in `take`.",
                    "为块加了新条目，旧条目并没有删掉。如果块里又填满相同的 token、只是前面的内容不同，"
                    "两个条目都指向它。"
                    "应在 `take` 里删除旧条目。",
                ),
                ((EVICT, ""), ("if key not in self.block_of_hash:", "if self.block_of_hash.get(key) != block_id:")),
            ),
        ),
    ),
)
