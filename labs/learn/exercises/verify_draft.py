"""Chapter 13: verify the drafts of a speculative step, keep the right ones, and take back what is wrong."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.drawing import draw_pool
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.simulation import VOCABULARY, mix
from labs.learn.texts import Text

END = 0

SOLUTION = '''
END = 0  # the token that ends a sequence


def verify(seq, drafts, sampled, blocks):
    """Append the tokens that a step with drafts has found, and give back the blocks that are not needed any more.

    The step has computed K and V of all tokens of `seq` and of the drafts behind them.
    sampled: one token more than drafts. sampled[i] is the model's token after drafts[:i]
    """
    num_right = 0
    while num_right < len(drafts) and drafts[num_right] == sampled[num_right]:
        num_right += 1
    new_tokens = sampled[: num_right + 1]
    if END in new_tokens:
        new_tokens = new_tokens[: new_tokens.index(END) + 1]
    seq.token_ids += new_tokens
    seq.num_computed_tokens = len(seq.token_ids) - 1  # not yet the newest one
    while len(seq.block_table) > blocks.num_blocks_for(seq.num_computed_tokens):
        block_id = seq.block_table.pop()
        blocks.free[block_id] = None
'''


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Let one sequence decode with drafts. `steps`: for each draft of a step, 0 if it is right, otherwise its error."""
    block_size, prompt, steps = case
    most = len(prompt) + sum(len(errors) + 1 for errors in steps)  # tokens, if all drafts are right
    blocks = one_file.BlockManager(-(-most // block_size), block_size)
    seq = one_file.Sequence(list(prompt), len(prompt), 99)
    for errors in steps:
        if seq.token_ids[-1] == END:
            return
        drafts, sampled = propose(seq.token_ids, errors)
        num_tokens = len(seq.token_ids) + len(drafts)
        while len(seq.block_table) < blocks.num_blocks_for(num_tokens):
            seq.block_table.append(blocks.take())
        seq.num_computed_tokens = num_tokens
        answer.verify(seq, list(drafts), list(sampled), blocks)
        label = Text(f"drafts {drafts}, the model samples {sampled}", f"草稿 {drafts}，模型采样出 {sampled}")
        kept = Kept(tuple(seq.token_ids), seq.num_computed_tokens, tuple(seq.block_table), tuple(blocks.free))
        yield Seen(label, kept, draw_pool(blocks, {"A": seq}))


class Kept(NamedTuple):
    """The sequence after a step, and the free blocks in their order."""

    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_table: tuple[int, ...]
    free: tuple[int, ...]

    def __repr__(self) -> str:
        fields = f"token_ids={list(self.token_ids)} num_computed_tokens={self.num_computed_tokens}"
        return f"{fields} block_table={list(self.block_table)}"


def next_token(tokens: list[int]) -> int:
    """Return the model's next token. It depends on all tokens before it."""
    kept = 0
    for token in tokens:
        kept = mix(kept, token)
    return kept % VOCABULARY


def propose(tokens: list[int], errors: Any) -> tuple[list[int], list[int]]:
    """Return drafts with these errors, and what the model samples after each prefix of them."""
    drafts: list[int] = []
    sampled = [next_token(tokens)]
    for error in errors:
        drafts.append((sampled[-1] + error) % VOCABULARY)
        sampled.append(next_token(tokens + drafts))
    return drafts, sampled


def describe(case: Any) -> Text:
    block_size, prompt, steps = case
    return Text(
        f"block_size = {block_size}, END = {END}. The prompt is {list(prompt)}. Number of steps: {len(steps)}.",
        f"block_size = {block_size}，END = {END}。提示词是 {list(prompt)}，之后是 {len(steps)} 步。",
    )


def cases() -> st.SearchStrategy[Any]:
    prompt = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
    errors = st.lists(st.sampled_from((1, 0, 0, 2)), max_size=4).map(tuple)
    return st.tuples(st.integers(1, 4), prompt, st.lists(errors, min_size=1, max_size=3).map(tuple))


EXERCISES = (
    Build(
        name="verify_draft",
        chapter="13_speculation",
        title=Text("Verify drafts", "验证草稿"),
        task=Text(
            "A step of speculative decoding has computed all tokens of `seq` and k drafts behind them. `sampled`\n"
            "has the model's own k + 1 tokens: sampled[0] after the known tokens, sampled[1] after the first\n"
            "draft, and so on. Keep the longest prefix of drafts that are equal to the model's tokens, and one\n"
            "token more: the model's own, sampled after the last draft that is right. If the kept tokens contain\n"
            "END, nothing behind it is kept.\n\n"
            "    drafts [3, 1, 4]     sampled [3, 1, 2, 2]     kept [3, 1, 2]: 4 is wrong, the model's token is 2\n"
            "    drafts [3, 1, 4]     sampled [3, 1, 4, 2]     kept [3, 1, 4, 2]: all are right, and one token more\n\n"
            "Append the kept tokens to `seq.token_ids`. Then `seq.num_computed_tokens` counts only tokens of the\n"
            "sequence whose K and V are right: all but the newest one. Last, give back the blocks at the end of\n"
            "the table that `num_computed_tokens` tokens do not need: `blocks.free[block_id] = None`, the last\n"
            "block first.",
            "投机解码的一步计算了 `seq` 的全部 token，以及后面的 k 个草稿。`sampled` 是模型自己的 k + 1 个 token：\n"
            "sampled[0] 接在已知的 token 之后，sampled[1] 接在第一个草稿之后，依此类推。保留与模型的 token 相同的\n"
            "最长一段草稿前缀，再加一个 token：模型在最后一个正确的草稿之后采样出的那个。如果留下的 token 里有\n"
            "END，它后面的都不要。\n\n"
            "    草稿 [3, 1, 4]     sampled [3, 1, 2, 2]     保留 [3, 1, 2]：4 是错的，模型的 token 是 2\n"
            "    草稿 [3, 1, 4]     sampled [3, 1, 4, 2]     保留 [3, 1, 4, 2]：全对，再加一个\n\n"
            "把留下的 token 追加到 `seq.token_ids`。之后 `seq.num_computed_tokens` 只算 K 和 V 正确的 token：\n"
            "除最新的一个之外的全部。最后，从块表末尾开始，归还存放 `num_computed_tokens` 个 token 用不到的块：\n"
            "`blocks.free[block_id] = None`。",
        ),
        names=(
            "seq.token_ids",
            "seq.num_computed_tokens",
            "seq.block_table",
            "blocks.free",
            "blocks.num_blocks_for(n)",
        ),
        hints=(
            Text(
                "Count the drafts that are right, one by one, and stop at the first wrong one. The model's tokens "
                "behind "
                "it were computed from a wrong draft.",
                "逐个数正确的草稿，遇到第一个错的就停。它后面的模型的 token 是根据错误的草稿算出来的。",
            ),
            Text(
                "With `num_right` right drafts, the kept tokens are `sampled[: num_right + 1]`: the right drafts are "
                "equal "
                "to the model's tokens.",
                "如果有 `num_right` 个草稿正确，留下的就是 `sampled[: num_right + 1]`：正确的草稿与模型的 token 相同。",
            ),
            Text(
                "`seq.num_computed_tokens = len(seq.token_ids) - 1`, then `while len(seq.block_table) > "
                "blocks.num_blocks_for(seq.num_computed_tokens):` pop a block and free it.",
                "`seq.num_computed_tokens = len(seq.token_ids) - 1`，然后 `while len(seq.block_table) > "
                "blocks.num_blocks_for(seq.num_computed_tokens):` 弹出一块并释放。",
            ),
        ),
        answer=SOLUTION,
        holes=("verify",),
        run=run,
        examples=(
            (1, (1, 2), ((1,),)),  # one draft, and it is wrong
            (2, (1, 2, 3), ((0, 1, 0), (0, 0), ())),
            (1, (3, 2), ((1, 0, 0), (0, 0, 0, 1))),
            (4, (4, 1), ((0, 0, 1, 0), (2,))),
            (2, (2, 2), ((0, 0, 0), (0, 0))),
            (1, (2, 2), ((0, 0, 0, 0),)),
            (1, (1, 1, 2), ((0, 0, 0),)),
        ),
        cases=cases,
        describe=describe,
        mistakes=(
            Mistake(
                Text("The model's own token is missing", "缺少模型自己的 token"),
                Text(
                    "The row of the last right draft has sampled the next token, also if all drafts are right. Without "
                    "it, a step whose first draft is wrong finds no token at all, and the sequence never goes on.",
                    "最后一个正确草稿所在的那一行，已经采样出了下一个 token，草稿全对时也是如此。丢掉它，"
                    "第一个草稿就错的那一步便一个 token 也得不到，序列永远不会前进。",
                ),
                (("sampled[: num_right + 1]", "sampled[:num_right]"),),
            ),
            Mistake(
                Text("The rejected draft is kept", "留下了被拒绝的草稿"),
                Text(
                    "At the first wrong draft the model's token is kept, not the draft. Otherwise the output differs "
                    "from that without speculation.",
                    "在第一个错误的草稿处，留下的是模型的 token，不是草稿。否则输出就和不投机时不同。",
                ),
                (("sampled[: num_right + 1]", "(drafts + sampled[-1:])[: num_right + 1]"),),
            ),
            Mistake(
                Text("All drafts are kept", "草稿没有验证"),
                Text(
                    "A draft is a guess. Keep it only if the model samples the same token.",
                    "草稿只是猜测。只有模型采样出同一个 token 时才能保留。",
                ),
                (("drafts[num_right] == sampled[num_right]", "True"),),
            ),
            Mistake(
                Text("Right drafts behind a wrong one are counted", "把错误草稿后面的也算上了"),
                Text(
                    "Behind the first wrong draft, the model has seen a token that is not in the text. What it samples "
                    "there says nothing, even if a draft is equal to it. Stop at the first wrong draft.",
                    "从第一个错误的草稿起，模型看到的 token 就不在文本里了。它在那里采样出什么都不算数，"
                    "即使恰好与草稿相同。"
                    "遇到第一个错误的草稿就要停。",
                ),
                (
                    (
                        "    while num_right < len(drafts) and drafts[num_right] == sampled[num_right]:\n        "
                        "num_right += 1\n",
                        "    for draft, token in zip(drafts, sampled):\n        num_right += draft == token\n",
                    ),
                ),
            ),
            Mistake(
                Text("Compared one row too late", "比较时错了一行"),
                Text(
                    "sampled[i] is the model's token *after* drafts[:i], so it is compared with drafts[i]: the row of "
                    "the last known token checks the first draft.",
                    "sampled[i] 是模型在 drafts[:i] **之后**的 token，所以要和 drafts[i] 比较：检查第一个草稿的，"
                    "是最后一个已知 "
                    "token 那一行。",
                ),
                (("drafts[num_right] == sampled[num_right]", "drafts[num_right] == sampled[num_right + 1]"),),
            ),
            Mistake(
                Text("Tokens behind the end are kept", "保留了 END 后面的 token"),
                Text(
                    "Several tokens arrive in one step, and END can be in the middle of them. The sequence ends there.",
                    "一步会得到几个 token，END 可能在它们中间。序列到那里就结束了。",
                ),
                (("    if END in new_tokens:\n        new_tokens = new_tokens[: new_tokens.index(END) + 1]\n", ""),),
            ),
            Mistake(
                Text("Wrong drafts count as computed", "把错误的草稿算作已计算"),
                Text(
                    "The slots behind the right drafts hold K and V of wrong tokens. If `num_computed_tokens` still "
                    "counts them, the next step attends to them. It must go back.",
                    "正确的草稿后面的槽位里，是错误 token 的 K 和 V。如果 `num_computed_tokens` 仍把它们算在内，"
                    "下一步就会读到它们。必须退回去。",
                ),
                (("    seq.num_computed_tokens = len(seq.token_ids) - 1  # not yet the newest one\n", ""),),
            ),
            Mistake(
                Text("The newest token counts as computed", "把最新的 token 算作已计算"),
                Text(
                    "The newest token was only sampled. Its K and V are computed by the next step, whose input it is.",
                    "最新的 token 只是采样出来了。它是下一步的输入，K 和 V 要到下一步才计算。",
                ),
                (("= len(seq.token_ids) - 1  # not", "= len(seq.token_ids)  # not"),),
            ),
            Mistake(
                Text("Blocks of wrong drafts are kept", "没有归还错误草稿的块"),
                Text(
                    "The step took blocks for all drafts. Those behind the tokens that are left hold nothing useful: "
                    "give them back, or other sequences are preempted for guesses.",
                    "这一步为所有草稿取了块。留下的 token 用不到的块里没有有用的内容：要归还，"
                    "否则别的序列会为了猜测而被抢占。",
                ),
                (("while len(seq.block_table) > blocks.num_blocks_for(seq.num_computed_tokens):", "while False:"),),
            ),
            Mistake(
                Text("A block for the newest token", "为最新的 token 留了块"),
                Text(
                    "The newest token has no K and V yet, so it needs no slot now: the next step takes a block for it "
                    "and for its drafts. Count the blocks of `num_computed_tokens` tokens, not of all.",
                    "最新的 token 还没有 K 和 V，现在不需要槽位：下一步会为它和草稿取块。"
                    "要按 `num_computed_tokens` 个 token 算块数，而不是全部 token。",
                ),
                (("blocks.num_blocks_for(seq.num_computed_tokens)", "blocks.num_blocks_for(len(seq.token_ids))"),),
            ),
            Mistake(
                Text("A block too many is given back", "多归还了一块"),
                Text(
                    "The last block may be partly filled: the number of blocks is rounded up. "
                    "`num_computed_tokens // block_size` rounds down, and loses K and V.",
                    "最后一块可能只填了一部分：块数要向上取整。`num_computed_tokens // block_size` 是向下取整，"
                    "会丢掉 K 和 V。",
                ),
                (("blocks.num_blocks_for(seq.num_computed_tokens)", "seq.num_computed_tokens // blocks.block_size"),),
            ),
        ),
    ),
)
