"""Chapter 7: the hash of a block, of its tokens and of everything before it."""

from labs.learn.exercise import Build, Mistake
from labs.learn.given import subclass_of
from labs.learn.prefixes import Texts, describe_texts, draw_wrong_blocks, run_texts, texts
from labs.learn.texts import Text

ANSWER = "from hashlib import sha256\n\n" + subclass_of(
    "one_file", "BlockManager", "Blocks", ("hash_block",), ("Sequence",)
)
RANGE = "range(len(seq.block_hashes), i + 1)"
SLICE = "[j * self.block_size : (j + 1) * self.block_size]"
HASHED = "repr((seq.block_hashes[-1:], tokens))"

EXERCISES = (
    Build(
        name="hash_chain",
        chapter="07_sharing",
        title=Text("A hash chain", "哈希链"),
        task=Text(
            "The prefix cache finds a full block by a hash. Return the hash of full block `i` of `seq`, which has the\n"
            "tokens i × block_size … (i + 1) × block_size - 1. Two blocks must have the same hash exactly if all "
            "tokens\n"
            "up to the end of the block are the same, because K and V depend on all of them. So hash the block's "
            "tokens\n"
            "together with the hash of the block before it. Any function will do, for example Python's\n"
            "`hash((hash_before, tuple(tokens)))`. `seq.block_hashes` is a list in which you may keep the hashes of "
            "the\n"
            "first blocks: it is empty at first. (The tokens of full blocks never change.)\n\n"
            "Example: blocks of 2; A = 0 1 | 2 3 | 4, B = 2 3 | 9. Block 0 of B has the same tokens as block 1 of A,\n"
            "and must have another hash: 2 3 comes after 0 1 in A, and after nothing in B.",
            "前缀缓存用哈希值查找填满的块。返回 `seq` 第 `i` 个满块的哈希值，它的 token 是第 i × block_size 到\n"
            "(i + 1) × block_size - 1 个。当且仅当到块末为止的所有 token 都相同时，两个块的哈希值才相同，\n"
            "因为 K 和 V 取决于前面所有的 token。所以，要把块里的 token 和前一块的哈希值一起算哈希。\n"
            "用什么函数都可以，例如 Python 的 `hash((hash_before, tuple(tokens)))`。\n"
            "`seq.block_hashes` 是一个列表，可以用来保存前几块的哈希值，开始时是空的。（满块里的 token 不会再变。）\n\n"
            "例：每块 2 个 token；A = 0 1 | 2 3 | 4，B = 2 3 | 9。B 的第 0 块和 A 的第 1 块 token 相同，"
            "哈希值却必须不同：\n"
            "在 A 里，2 3 前面是 0 1；在 B 里，前面什么都没有。",
        ),
        names=("self.block_size", "seq.token_ids", "seq.block_hashes"),
        hints=(
            Text(
                "The hash of block i needs the hash of block i - 1, and so on back to block 0, which has none before "
                "it.",
                "第 i 块的哈希值要用到第 i - 1 块的，一直到第 0 块，它前面没有块。",
            ),
            Text(
                "Write a loop over the blocks 0 … i that keeps the hash of the block before. Begin at "
                "`len(seq.block_hashes)` if you keep hashes.",
                "写一个循环，从第 0 块到第 i 块，记住前一块的哈希值。如果要保存哈希值，就从 `len(seq.block_hashes)` "
                "开始。",
            ),
            Text(
                "In the loop: `tokens = seq.token_ids[j * self.block_size : (j + 1) * self.block_size]`, then "
                "`seq.block_hashes.append(hash((*seq.block_hashes[-1:], tuple(tokens))))`.",
                "循环里：`tokens = seq.token_ids[j * self.block_size : (j + 1) * self.block_size]`，然后 "
                "`seq.block_hashes.append(hash((*seq.block_hashes[-1:], tuple(tokens))))`。",
            ),
        ),
        answer=ANSWER,
        holes=("Blocks.hash_block",),
        engine_parts=(("Blocks.hash_block", "BlockManager.hash_block"),),
        run=run_texts,
        examples=(
            Texts(2, ((0, 1, 2, 3, 4), (2, 3, 9))),
            Texts(2, ((0, 1, 9), (0, 1, 9))),
            Texts(3, ((1, 2, 3, 9), (1, 5, 3, 9))),
            Texts(2, ((0, 0, 1, 1, 9), (5, 5, 1, 1, 2, 2, 9), (0, 0, 1, 1, 2, 2, 9))),
            Texts(2, ((0, 0, 1, 1, 2, 2, 9), (0, 0, 3, 3, 4, 4, 9), (0, 0, 3, 3, 2, 2, 9))),
            Texts(2, ((0, 0, 1, 1, 9), (3, 3, 2, 2, 9), (0, 0, 2, 2, 9))),
            Texts(2, ((1, 2, 9), (2, 1, 9), (1, 3, 9))),
            Texts(2, ((1, 12, 9), (11, 2, 9))),
            Texts(2, ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 7))),
        ),
        cases=texts,
        describe=describe_texts,
        draw=draw_wrong_blocks,
        mistakes=(
            Mistake(
                Text("The block before is not in the hash", "哈希里没有前一块"),
                Text(
                    "The tokens of a block do not determine its K and V: the tokens before count, too. Another text "
                    "that begins with these tokens would get K and V that were computed after other tokens.",
                    "块里的 token 决定不了它的 K 和 V，前面的 token 也有影响。以这些 token 开头的另一段文本，"
                    "会得到在别的 token 之后算出的 K 和 V。",
                ),
                ((HASHED, "repr(tokens)"),),
            ),
            Mistake(
                Text("Only the block before, not the chain", "只看前一块，没有连成链"),
                Text(
                    "The hash covers two blocks. Take the hash of the block before, not its tokens: that hash already "
                    "depends on everything before it.",
                    "这个哈希只覆盖两块。应该用前一块的哈希值，而不是它的 token："
                    "前一块的哈希值已经取决于它前面的一切。",
                ),
                (
                    (SLICE, "[max(0, j - 1) * self.block_size : (j + 1) * self.block_size]"),
                    (HASHED, "repr((j > 0, tokens))"),
                ),
            ),
            Mistake(
                Text("The place instead of the block before", "用位置代替了前一块"),
                Text(
                    "Two texts can have the same tokens at the same place after different beginnings. The place does "
                    "not tell them apart, the hash of the block before does.",
                    "两段文本开头不同，同一位置上的 token 也可能相同。位置区分不了它们，前一块的哈希值可以。",
                ),
                ((HASHED, "repr((j, tokens))"),),
            ),
            Mistake(
                Text("The first block instead of the block before", "用第一块代替了前一块"),
                Text(
                    "`seq.block_hashes[0]` says how the text begins, but not what is between. The block before is the "
                    "last one in the list.",
                    "`seq.block_hashes[0]` 只说明文本怎样开头，中间的内容没有算进去。前一块是列表里的最后一个。",
                ),
                (("seq.block_hashes[-1:]", "seq.block_hashes[:1]"),),
            ),
            Mistake(
                Text("The order of the tokens is lost", "丢了 token 的顺序"),
                Text(
                    "A sum, a set or sorted tokens give `1 2` and `2 1` the same hash. K and V depend on the order.",
                    "求和、集合或排序之后，`1 2` 和 `2 1` 的哈希值相同。而 K 和 V 取决于顺序。",
                ),
                ((SLICE, SLICE + "\n            tokens = sorted(tokens)"),),
            ),
            Mistake(
                Text("Numbers run together", "数字连在了一起"),
                Text(
                    "Without a separator, the tokens `1 12` and `11 2` both become the text `112`. Hash the numbers, "
                    "or "
                    "put something between them.",
                    "没有分隔符时，`1 12` 和 `11 2` 都变成文本 `112`。应直接对数字算哈希，或者在数字之间加分隔符。",
                ),
                ((HASHED, 'repr((seq.block_hashes[-1:], "".join(map(str, tokens))))'),),
            ),
            Mistake(
                Text("The last token of the block is left out", "漏了块里的最后一个 token"),
                Text(
                    "The end of a slice is not included. `(j + 1) * self.block_size - 1` leaves out a token, and two "
                    "blocks that differ only there have the same hash.",
                    "切片不包括结束位置。`(j + 1) * self.block_size - 1` 会漏掉一个 token，只有这里不同的两个块，"
                    "哈希值会相同。",
                ),
                (("(j + 1) * self.block_size]", "(j + 1) * self.block_size - 1]"),),
            ),
            Mistake(
                Text("The tokens after the block are in the hash", "哈希里有块之后的 token"),
                Text(
                    "The slice has no end. What follows does not change the block's K and V, but another hash means "
                    "that the block is never found by a text that continues differently.",
                    "切片没有写结束位置。后面的 token 不影响块的 K 和 V，但哈希值变了，后文不同的文本就找不到这个块。",
                ),
                (("(j + 1) * self.block_size]", "]"),),
            ),
            Mistake(
                Text("Hashes are appended again", "哈希值被重复追加"),
                Text(
                    "`seq.block_hashes` may have the first hashes from an earlier call. Begin the loop at "
                    "`len(seq.block_hashes)`, otherwise the list gets longer and entry i belongs to another block.",
                    "`seq.block_hashes` 里可能已有前几块的哈希值。循环要从 `len(seq.block_hashes)` 开始，"
                    "否则列表会越来越长，第 i 项就属于别的块了。",
                ),
                ((RANGE, "range(i + 1)"),),
            ),
            Mistake(
                Text("Only the first token of the block", "只有块的第一个 token"),
                Text(
                    "All tokens of the block belong into the hash. Otherwise blocks with the same first "
                    "token are taken for equal.",
                    "块里的所有 token 都要进哈希，否则第一个 token 相同的块会被当成一样的。",
                ),
                (
                    (
                        "[j * self.block_size : (j + 1) * self.block_size]",
                        "[j * self.block_size : j * self.block_size + 1]",
                    ),
                ),
            ),
            Mistake(
                Text("The next block's tokens", "用了下一块的 token"),
                Text(
                    "Block j has the tokens j × block_size … (j + 1) × block_size - 1.",
                    "第 j 块的 token 是第 j × block_size 到 (j + 1) × block_size - 1 个。",
                ),
                (
                    (
                        "[j * self.block_size : (j + 1) * self.block_size]",
                        "[(j + 1) * self.block_size : (j + 2) * self.block_size]",
                    ),
                ),
            ),
            Mistake(
                Text("The number of a block is not a position", "块号不是位置"),
                Text(
                    "Block j begins with token j × block_size, not with token j.",
                    "第 j 块从第 j × block_size 个 token 开始，不是第 j 个。",
                ),
                (("[j * self.block_size : (j + 1) * self.block_size]", "[j : j + self.block_size]"),),
            ),
            Mistake(
                Text("Only the sum of the tokens", "只有 token 之和"),
                Text(
                    "Different tokens can have the same sum: 1 2 and 2 1. Hash the tokens themselves, in their order.",
                    "不同的 token 可以有相同的和：1 2 和 2 1。要对 token 本身按顺序做哈希。",
                ),
                (("repr((seq.block_hashes[-1:], tokens))", "repr((seq.block_hashes[-1:], sum(tokens)))"),),
            ),
            Mistake(
                Text("The length is in the hash", "长度进了哈希"),
                Text(
                    "A longer text that begins in the same way has the same block. Only the tokens up to the "
                    "end of the block may count.",
                    "开头相同的更长文本有同样的块。只有到块末为止的 token 才能算进去。",
                ),
                (
                    (
                        "repr((seq.block_hashes[-1:], tokens))",
                        "repr((seq.block_hashes[-1:], tokens, len(seq.token_ids)))",
                    ),
                ),
            ),
            Mistake(
                Text("The hash depends on the object", "哈希取决于对象"),
                Text(
                    "Two sequences with the same tokens must have the same hashes, or nothing is ever found. "
                    "Hash the tokens, not the sequence.",
                    "token 相同的两个序列必须有相同的哈希值，否则永远找不到。要对 token 做哈希，而不是对序列。",
                ),
                (("repr((seq.block_hashes[-1:], tokens))", "repr((seq.block_hashes[-1:], tokens, id(seq)))"),),
            ),
            Mistake(
                Text("The newest hash is returned", "返回了最新的哈希值"),
                Text(
                    "`seq.block_hashes` can have hashes of later blocks already. Return that of block `i`.",
                    "`seq.block_hashes` 里可能已经有后面各块的哈希值。要返回第 `i` 块的。",
                ),
                (("return seq.block_hashes[i]", "return seq.block_hashes[-1]"),),
            ),
        ),
    ),
)
