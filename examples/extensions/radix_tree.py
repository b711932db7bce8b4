"""A radix tree as prefix cache, and a scheduler that serves the longest hits first.

The core finds a block by a hash of its tokens and of all tokens before it. Here the blocks are nodes of a tree: a path
from the root is a prefix, and each edge has the tokens of one block.

    root ── a b c d (block 7) ──┬── e f g h (block 2)         two prompts share block 7
                                └── x y z w (block 5)

RadixAttention of SGLang (Zheng et al. 2023, "SGLang: Efficient Execution of Structured Language Model Programs",
https://arxiv.org/abs/2312.07104) keeps such a tree, and so does this file. Its scheduler first admits the requests
whose prefix is in the tree already ("cache-aware scheduling" in the paper): they would lose it if others came first.

What it costs: a look-up compares the tokens of each block, O(tokens), as the hash does. The scheduler looks up every
waiting request in each step. A request without a hit may wait for ever while others with hits arrive.
What it does not do: edges are not compressed to several blocks, and a hit ends at a block, not at a token.
Blocks are still evicted in the order of the block manager: the least recently freed one first, and the last block of a
sequence before those in front of it, so leaves go before the nodes above them.

    LLM(model, extension="examples/extensions/radix_tree.py")
    nanovllm bench compare examples/extensions/radix_tree.py --workload prefixes
"""

from itertools import count

from nanovllm.observer import Observer
from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import CachedBlock, Sequence


class Node:
    """The root, which has no block, or a cached block below the one with the tokens before it."""

    def __init__(self, cached: CachedBlock | None = None, parent: "Node | None" = None) -> None:
        self.cached, self.parent = cached, parent
        self.children: dict[bytes, Node] = {}


class RadixTree(PrefixCache):
    """A tree for each `root_serial`: sequences with different ones share nothing."""

    def __init__(self, block_size: int, observer: Observer, is_enabled: bool = True) -> None:
        super().__init__(block_size, observer, is_enabled)
        self.roots: dict[int, Node] = {}
        self.nodes: dict[int, Node] = {}  # by block id
        self.serials = count(1)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.nodes

    def find(self, seq: Sequence) -> list[CachedBlock]:
        max_hits = seq.max_cached_tokens // self.block_size if self.is_enabled else 0
        return [node.cached for node in self.path(seq, max_hits) if node.cached is not None]

    def path(self, seq: Sequence, max_blocks: int) -> list[Node]:
        """Return the root, and the nodes below it whose tokens `seq` begins with."""
        nodes = [self.roots.get(seq.root_serial) or Node()]
        while len(nodes) <= max_blocks:
            child = nodes[-1].children.get(self.tokens_of(seq, len(nodes) - 1))
            if child is None:
                break
            nodes.append(child)
        return nodes

    def tokens_of(self, seq: Sequence, i: int) -> bytes:
        """Return the tokens of block `i` of `seq`."""
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def register(self, seq: Sequence, num_tokens: int) -> None:
        if not self.is_enabled:
            return
        num_blocks = num_tokens // self.block_size
        nodes = self.path(seq, num_blocks)
        for i in range(len(nodes) - 1, num_blocks):  # the tree lacks these; `seq` has their K and V in its own blocks
            parent, tokens, block_id = nodes[-1], self.tokens_of(seq, i), seq.block_table[i]
            parent_serial = parent.cached.serial if parent.cached is not None else seq.root_serial
            cached = CachedBlock(block_id, hash(tokens), next(self.serials), parent_serial, tokens)
            node = self.nodes[block_id] = parent.children[tokens] = Node(cached, parent)
            self.roots.setdefault(seq.root_serial, nodes[0])
            nodes.append(node)
            self.observer.on_register_block(seq, block_id, cached.block_hash, cached.serial)
        seq.cached_blocks = [node.cached for node in nodes if node.cached is not None]

    def forget(self, block_id: int) -> None:
        """Remove a node and all below it, which nobody could find any more."""
        node = self.nodes.get(block_id)
        if node is None or node.cached is None or node.parent is None:
            return
        del node.parent.children[node.cached.tokens]
        if not node.parent.children and node.parent.cached is None:
            del self.roots[node.cached.parent_serial]
        below = [node]
        for one in below:
            below += one.children.values()
            if one.cached is not None:
                del self.nodes[one.cached.block_id]
                self.observer.on_forget_block(one.cached.block_id)


class LongestPrefixFirst(Scheduler):
    """Admits the waiting sequences with the longest hits first."""

    def schedule(self) -> Step:
        self.waiting.sort(key=lambda seq: -len(self.block_manager.prefix_cache.find(seq)))
        return super().schedule()


prefix_cache_cls, scheduler_cls = RadixTree, LongestPrefixFirst
