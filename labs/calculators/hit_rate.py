"""Predict the hit rate of a prefix cache in conversations of several turns, by the size of the KV cache.

    python -m labs.calculators.hit_rate
    python -m labs.calculators.hit_rate --num-users 64 --num-turns 10 --system-len 1000 --num-kv-blocks 2000 4000 8000
    python -m labs.calculators.hit_rate --plot hit_rate.png

    hit rate = prompt tokens that were found in the cache / prompt tokens

All users share a system prompt. The prompt of each turn is the conversation so far and a new message. All tokens but
the message may be cached: by earlier turns or, in the first turn, by the system prompts of other users. Between two
turns a user thinks, and the blocks of the conversation are free. They keep their contents until they are allocated
again, in the order in which they were freed (LRU). So the conversations of users who think compete for the cache.

The real scheduler and block manager serve this workload, with invented tokens instead of a model. The unit of time is a
step of the engine. In the last row all conversations fit and nothing is evicted, which gives the highest hit rate.
"""

import argparse
import heapq
import random
from dataclasses import dataclass
from pathlib import Path

from labs.calculators.common import Panel, draw, print_table
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm_extras import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats

MAX_MESSAGE_TOKEN = 10_000
ANSWER_TOKEN = 10_001  # any token will do, because the messages make conversations different


@dataclass(frozen=True)
class Chat:
    """The workload: lengths in tokens, thinking time in steps. Message lengths and thinking times vary randomly."""

    num_users: int
    num_turns: int
    system_len: int
    message_len: int
    answer_len: int
    think_steps: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name in ("system_len", "think_steps", "seed") else 1):
                raise ValueError(f"{name} must be >= 1 (system_len and think_steps >= 0), got {value}")

    @property
    def longest(self) -> int:
        """Return the largest possible number of tokens of a conversation."""
        return self.system_len + self.num_turns * (2 * self.message_len + self.answer_len)


class Evictions(SchedulingStats):
    """Also counts evicted blocks: cached blocks that were allocated again."""

    num_evicted_blocks = 0

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        self.num_evicted_blocks += is_evicted


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefix-cache hit rate by the size of the KV cache.")
    parser.add_argument("--num-users", type=int, default=32)
    parser.add_argument("--num-turns", type=int, default=6)
    parser.add_argument("--system-len", type=int, default=256, help="tokens of the system prompt")
    parser.add_argument("--message-len", type=int, default=48, help="tokens of a message on average")
    parser.add_argument("--answer-len", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--think-steps", type=int, default=200, help="steps between two turns of a user, on average")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--num-kv-blocks", type=int, nargs="+", default=[100, 200, 300, 400, 600, 800, 1200])
    parser.add_argument("--plot", type=Path, help="draw the curve to this file (needs matplotlib)")
    args = parser.parse_args()
    lens = (args.system_len, args.message_len, args.answer_len)
    try:
        chat = Chat(args.num_users, args.num_turns, *lens, args.think_steps)
        fits_all = chat.num_users * -(-chat.longest // args.block_size)
        sizes = [*args.num_kv_blocks, fits_all]
        stats = {size: serve(chat, size, args.block_size, args.max_num_seqs) for size in sizes}
    except ValueError as error:
        parser.error(str(error))
    print(f"{chat.num_users} users, {chat.num_turns} turns each; {stats[fits_all].prefix_cache_query_tokens:,} tokens "
          f"of prompts; a conversation ends with {chat.longest:,} tokens at most\n")  # fmt: skip
    rows = [
        [f"{size:,}", f"{size * args.block_size:,}", f"{hit_rate(one):.1%}", f"{one.num_evicted_blocks:,}",
         str(one.num_preemptions)]
        for size, one in stats.items()
    ]  # fmt: skip
    print_table(["num_kv_blocks", "tokens", "hit rate", "evicted blocks", "preemptions"], rows)
    if args.plot:
        rates = [100 * hit_rate(stats[size]) for size in args.num_kv_blocks]
        levels = {"all conversations fit": 100 * hit_rate(stats[fits_all])}
        panel = Panel("num_kv_blocks", "hit rate, % of prompt tokens", args.num_kv_blocks, {"LRU": rates}, levels)
        draw(args.plot, f"{chat.num_users} users, {chat.num_turns} turns each, blocks of {args.block_size}", [panel])


def serve(chat: Chat, num_blocks: int, block_size: int, max_num_seqs: int) -> Evictions:
    """Serve all turns of all users. Raise ValueError if a conversation may be longer than the cache."""
    if block_size < 1 or max_num_seqs < 1 or num_blocks * block_size < chat.longest:
        raise ValueError(
            f"block_size and max_num_seqs must be >= 1, and num_kv_blocks * block_size >= {chat.longest}, the longest "
            f"conversation; got {block_size}, {max_num_seqs} and {num_blocks} * {block_size}"
        )
    rng, stats = random.Random(chat.seed), Evictions()
    scheduler = Scheduler(BlockManager(num_blocks, block_size, observer=stats), max_num_seqs, 2048, chat.longest + 1)
    params = SamplingParams(max_tokens=chat.answer_len, ignore_eos=True)
    system = [rng.randint(0, MAX_MESSAGE_TOKEN) for _ in range(chat.system_len)]
    conversations, turns = [system] * chat.num_users, [0] * chat.num_users
    # (step, user): the step in which each user sends the next message
    sends = [(rng.randint(0, 2 * chat.think_steps), user) for user in range(chat.num_users)]
    heapq.heapify(sends)
    step = 0
    while sends or scheduler.running or scheduler.waiting:
        if not (scheduler.running or scheduler.waiting):
            step = max(step, sends[0][0])  # all users think
        while sends and sends[0][0] <= step:
            _, user = heapq.heappop(sends)
            message = [rng.randint(0, MAX_MESSAGE_TOKEN) for _ in range(rng.randint(1, 2 * chat.message_len - 1))]
            scheduler.add(Sequence(str(user), conversations[user] + message, params))
        scheduled = scheduler.schedule()
        for _, seq in scheduler.update(scheduled, [ANSWER_TOKEN] * len(scheduled.samples)):
            if seq.finish_reason:
                user = int(seq.request_id)
                conversations[user] = seq.token_ids.tolist()
                turns[user] += 1
                if turns[user] < chat.num_turns:
                    heapq.heappush(sends, (step + rng.randint(0, 2 * chat.think_steps), user))
        step += 1
    return stats


def hit_rate(stats: SchedulingStats) -> float:
    return stats.prefix_cache_hit_tokens / stats.prefix_cache_query_tokens


if __name__ == "__main__":
    main()
