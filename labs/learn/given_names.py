"""What an answer can use of the program that it continues: the learner's file lists it below the task.

You can use:
  self.free            a dict whose keys are the free blocks; the first key is taken first
  seq.block_table      a list: the blocks of the sequence, in the order of its tokens
"""

from labs.learn.texts import Language, Text

MEANINGS = {
    "self.num_blocks": Text("the number of blocks in the pool", "池里的块数"),
    "self.block_size": Text("the number of slots of a block", "每块的槽位数"),
    "self.num_blocks_for(n)": Text("how many blocks n tokens need", "n 个 token 需要的块数"),
    "self.free": Text(
        "a dict whose keys are the free blocks; the first key is taken first", "dict，键是空闲块；第一个键最先取走"
    ),
    "self.free (list)": Text("a list of the free blocks; pop() takes the last one", "空闲块的列表；pop() 取最后一个"),
    "self.take()": Text(
        "takes a free block and gives it one owner; fails if none is free",
        "取一个空闲块，记一个所有者；没有空闲块会出错",
    ),
    "self.num_owners": Text("a list: how many sequences own each block", "列表：每个块的所有者数"),
    "self.copies": Text("a list: (source, destination) of blocks to copy", "列表：要复制的块 (源, 目标)"),
    "self.hash_block(seq, i)": Text("the hash of full block i of `seq`", "`seq` 的第 i 个满块的哈希值"),
    "self.block_of_hash": Text("a dict: hash -> cached block", "dict：哈希值 -> 缓存的块"),
    "self.hash_of_block": Text("a dict: cached block -> hash", "dict：缓存的块 -> 哈希值"),
    "self.release(seq)": Text("gives back all blocks of `seq`", "归还 `seq` 的所有块"),
    "self.block_manager": Text(
        "has try_admit(seq), try_grow(seq) and release(seq)", "有 try_admit(seq)、try_grow(seq) 和 release(seq)"
    ),
    "self.running": Text("a list of sequences, the newest one last", "序列的列表，最晚来的在最后"),
    "self.waiting": Text("a deque of sequences, the next one first", "序列的 deque，下一个在最前"),
    "self.num_preemptions": Text("preemptions so far, in all steps", "到目前为止的抢占次数"),
    "seq.token_ids": Text("a list: prompt and output", "列表：提示词和输出"),
    "seq.num_prompt_tokens": Text("the length of the prompt", "提示词的长度"),
    "seq.max_tokens": Text("how many output tokens it gets, at most", "最多输出的 token 数"),
    "seq.num_computed_tokens": Text("how many tokens have K and V in the cache", "K 和 V 已在缓存里的 token 数"),
    "seq.is_finished": Text("whether it has ended", "是否已结束"),
    "seq.block_table": Text("a list: its blocks, in the order of its tokens", "列表：它的块，按 token 的顺序"),
    "seq.block_hashes": Text("a list: hashes of its first full blocks", "列表：前几个满块的哈希值"),
}


OWNERS = {  # whose attributes have the same meaning as those of self or seq
    "parent.": "seq.",
    "child.": "seq.",
    "blocks.": "self.",
    "self.decode.": "self.",
    "self.prefill.": "self.",
}


def find_meaning(name: str) -> Text:
    """Return what a name means, also of another owner: `blocks.free`."""
    for owner, same in OWNERS.items():
        if name.startswith(owner):
            name = same + name.removeprefix(owner)
    return MEANINGS[name]


def list_names(names: tuple[str, ...], language: Language) -> list[str]:
    """Return a line for each of these names, with what it means."""
    shown = [name.removesuffix(" (list)") for name in names]
    width = max(map(len, shown))
    return [f"  {name:{width}}  {find_meaning(key).show(language)}" for name, key in zip(shown, names, strict=True)]
