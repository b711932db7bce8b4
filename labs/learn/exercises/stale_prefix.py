"""Mend a scheduler that plans a preempted sequence before the prefix cache has been asked."""

from labs.learn.repair import LARGEST_BUDGET, SEQUENCE, make_repair
from labs.learn.seen import Mistake
from labs.learn.texts import Text
from labs.learn.traffic import Request, Traffic

ANSWER = '''

class BlockManager:
    """Blocks, and a prefix cache: all tokens up to a block's end -> that block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))  # in the order in which they will be taken
        self.num_owners = [0] * num_blocks
        self.block_of_prefix: dict[tuple[int, ...], int] = {}
        self.prefix_of_block: dict[int, tuple[int, ...]] = {}

    def try_admit(self, seq: Sequence) -> bool:
        """Begin with the blocks that are found, and take blocks for the other tokens. Return False if too few are free.

        If it fails, nothing is changed. Otherwise `num_computed_tokens` counts the tokens that were found.
        """
        size, found = self.block_size, []
        for end in range(size, len(seq.token_ids), size):  # without the last token: it must be computed
            block_id = self.block_of_prefix.get(tuple(seq.token_ids[:end]))
            if block_id is None:
                break
            found.append(block_id)
        num_new = -(-len(seq.token_ids) // size) - len(found)
        if num_new > len(self.free) - sum(block_id in self.free for block_id in found):
            return False
        for block_id in found:
            if block_id in self.free:
                self.free.remove(block_id)
            self.num_owners[block_id] += 1
        seq.block_table = found + [self.take() for _ in range(num_new)]
        seq.num_computed_tokens = len(found) * size
        return True

    def try_grow(self, seq: Sequence) -> bool:
        """Give the newest token a slot. Return False if no block is free."""
        if len(seq.token_ids) > len(seq.block_table) * self.block_size:
            if not self.free:
                return False
            seq.block_table.append(self.take())
        return True

    def take(self) -> int:
        block_id = self.free.pop(0)
        if block_id in self.prefix_of_block:
            del self.block_of_prefix[self.prefix_of_block.pop(block_id)]
        self.num_owners[block_id] = 1
        return block_id

    def register(self, seq: Sequence, num_before: int) -> None:
        """Add the blocks that a step has filled. `num_before`: the computed tokens before the step."""
        for i in range(num_before // self.block_size, seq.num_computed_tokens // self.block_size):
            prefix, block_id = tuple(seq.token_ids[: (i + 1) * self.block_size]), seq.block_table[i]
            if prefix not in self.block_of_prefix:
                self.block_of_prefix[prefix] = block_id
                self.prefix_of_block[block_id] = prefix

    def release(self, seq: Sequence) -> None:
        """Free the blocks. Those that are registered can still be found, until they are taken."""
        for block_id in reversed(seq.block_table):
            self.num_owners[block_id] -= 1
            if not self.num_owners[block_id]:
                self.free.append(block_id)
        seq.block_table = []
        seq.num_computed_tokens = 0


class Scheduler:
    def __init__(self, block_manager: BlockManager, budget: int) -> None:
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their arrival
        self.num_preemptions = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, number of new tokens): a decode for each running one, and the prompts that fit."""
        chunks, preemptions_before = [], self.num_preemptions
        for seq in list(self.running):
            if seq in self.running and self.make_room(seq):
                chunks.append((seq, 1))
        while self.waiting and self.num_preemptions == preemptions_before:
            seq = self.waiting[0]
            if not self.block_manager.try_admit(seq):
                break
            num_new_tokens = len(seq.token_ids) - seq.num_computed_tokens
            chunks.append((seq, num_new_tokens))
            self.running.append(self.waiting.popleft())
        return chunks

    def make_room(self, seq: Sequence) -> bool:
        """Preempt the newest sequences until `seq` has its block. Return False if `seq` itself was preempted."""
        while not self.block_manager.try_grow(seq):
            last = self.running.pop()
            self.block_manager.release(last)
            self.waiting.appendleft(last)
            self.num_preemptions += 1
            if last is seq:
                return False
        return True

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.block_manager.release(seq)
'''
ADMIT = "            if not self.block_manager.try_admit(seq):\n                break\n"
PLAN = "            num_new_tokens = len(seq.token_ids) - seq.num_computed_tokens\n"
RESET = "        seq.num_computed_tokens = 0\n"
PREEMPT = "            self.block_manager.release(last)\n"


def small(num_blocks: int, *requests: Request) -> Traffic:
    return Traffic(num_blocks, 2, LARGEST_BUDGET, requests)


EXERCISES = (
    make_repair(
        "stale_prefix",
        "09_when_memory_is_full",
        Text("Mend the fault: a stale prefix after a preemption", "修故障：抢占之后，前缀已过时"),
        Text(
            "Under load, the engine stops with an IndexError when a sequence that was preempted is admitted again.\n"
            "With the prefix cache off, it never happens.",
            "负载高时，被抢占的序列再次准入的那一步里，引擎以 IndexError 停下。关掉前缀缓存，就从不发生。",
        ),
        Text(
            "nano-vllm stopped like this: https://github.com/GeeeekExplorer/nano-vllm/pull/211 and\n"
            "https://github.com/GeeeekExplorer/nano-vllm/pull/233",
            "nano-vllm 曾这样停下：https://github.com/GeeeekExplorer/nano-vllm/pull/211 和\n"
            "https://github.com/GeeeekExplorer/nano-vllm/pull/233",
        ),
        (
            Text(
                "The preempted sequence has no computed tokens while it waits. How many has it after `try_admit`?",
                "被抢占的序列在等待时没有已计算的 token。`try_admit` 之后有几个？",
            ),
            Text(
                "Its own blocks are still in the prefix cache. What was counted before they were found is too much by "
                "the tokens that they hold.",
                "它自己的块还在前缀缓存里。在找到它们之前算出的数，多了这些块里的 token。",
            ),
            Text(
                "Count the new tokens after `try_admit`, which sets `num_computed_tokens`.",
                "在 `try_admit` 之后再数新 token：它会设置 `num_computed_tokens`。",
            ),
        ),
        SEQUENCE + ANSWER,
        ((ADMIT + PLAN, PLAN + ADMIT),),
        Text(
            "The number of new tokens is from before the admission, when the sequence had no computed tokens. Then "
            "`try_admit` finds blocks, so the step begins after them and reads beyond the end of the sequence.",
            "新 token 数是准入之前算的，那时序列还没有已计算的 token。接着 `try_admit` 找到了一些块，"
            "于是这一步从这些块之后开始算，读过了序列的末尾。",
        ),
        small(4, Request((1, 2, 0), 4), Request((2, 0, 1), 3)),
        (
            small(5, Request((1, 2, 0, 1), 4), Request((2, 0, 1), 4), Request((1, 2, 0, 0), 2, arrival=1)),
            small(8, Request((1, 2, 0, 1, 1), 2), Request((1, 2, 0, 1, 1), 2, arrival=3)),
            small(4, Request((1, 2), 5), Request((2, 0), 5), Request((2, 2), 1)),
        ),
        (
            Mistake(
                Text("Found tokens are computed again", "找到的 token 又算了一遍"),
                Text(
                    "The step computes all tokens, and writes to blocks that other sequences may read. It does not "
                    "fail any more, but the cache saves nothing. Count the tokens that were not found.",
                    "这一步计算了全部 token，还会写别的序列可能正在读的块。不再出错，但缓存什么也没省下。"
                    "要数的是没有找到的那些 token。",
                ),
                (
                    (
                        ADMIT + PLAN,
                        f"{ADMIT}            seq.num_computed_tokens = 0\n            num_new_tokens = "
                        "len(seq.token_ids)\n",
                    ),
                ),
            ),
            Mistake(
                Text("A preempted sequence loses its blocks' content", "被抢占的序列丢掉了块的内容"),
                Text(
                    "No block of its own is found, so it computes all of its tokens again, although their K and V are "
                    "still there. Keep them in the cache, and count after `try_admit`.",
                    "它找不到自己的块，于是要把全部 token 重算一遍，其实 K 和 V 都还在。"
                    "应留在缓存里，并在 `try_admit` 之后再数。",
                ),
                (
                    (
                        PREEMPT,
                        "            for block_id in last.block_table:\n"
                        "                if block_id in self.block_manager.prefix_of_block:\n"
                        "                    del self.block_manager.block_of_prefix["
                        "self.block_manager.prefix_of_block.pop(block_id)]\n" + PREEMPT,
                    ),
                ),
            ),
            Mistake(
                Text("The number from before the preemption", "用了抢占之前的数"),
                Text(
                    "If `release` keeps `num_computed_tokens`, the sequence seems to need one token only, whatever is "
                    "found. It then catches up one token a step. Count after `try_admit`.",
                    "如果 `release` 保留 `num_computed_tokens`，不论找到多少，序列看起来都只差一个 token，"
                    "之后就一步一个地补。"
                    "应在 `try_admit` 之后再数。",
                ),
                ((RESET, ""), (ADMIT + PLAN, PLAN + ADMIT)),
            ),
            Mistake(
                Text("The output is not counted", "没有算上输出"),
                Text(
                    "A preempted sequence has output tokens, whose K and V are lost as well. Count all tokens, not "
                    "only those of the prompt.",
                    "被抢占的序列已有输出 token，它们的 K 和 V 也丢了。要数全部 token，不只是提示词的。",
                ),
                (
                    (
                        PLAN,
                        "            num_new_tokens = max(1, seq.num_prompt_tokens - seq.num_computed_tokens)\n",
                    ),
                ),
            ),
            Mistake(
                Text("All blocks of the table count as computed", "块表里的块都算作已计算"),
                Text(
                    "The table also has new, empty blocks. Only the blocks that were found hold K and V: "
                    "`num_computed_tokens` counts them.",
                    "块表里还有空的新块。只有找到的块里有 K 和 V：`num_computed_tokens` 数的就是它们。",
                ),
                (
                    (
                        PLAN,
                        "            table = len(seq.block_table) * self.block_manager.block_size\n"
                        "            num_new_tokens = max(1, len(seq.token_ids) - table)\n",
                    ),
                ),
            ),
        ),
    ),
)
