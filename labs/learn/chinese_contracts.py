"""The Chinese docstrings and comments of starter files. The code is the same in both languages.

The English text is the key: when it changes, its translation is not shown any more, and a test asks for a new one.
"""

import ast
import io
import textwrap
import tokenize

from labs.learn.texts import Language

DOCSTRINGS = {
    "Return the prompt and `num_tokens` new tokens. `next_token(tokens)` is the model: it returns one token.": (
        "返回提示词和 `num_tokens` 个新 token。`next_token(tokens)` 是模型：它返回一个 token。"
    ),
    """Return the output: the new tokens as a list, without the prompt.

next_token(tokens): the model; it returns the token that follows the list `tokens`
prompt, end_tokens: lists of tokens""": """返回输出：新 token 的列表，不含提示词。

next_token(tokens)：模型；返回列表 `tokens` 之后的那个 token
prompt、end_tokens：token 的列表""",
    """Write k and v of the new tokens to the cache, and return the attention output of the new tokens.

q and the result: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]
k_cache, v_cache: [max_len, num_kv_heads, head_dim]; position i is in row i
start: how many tokens are in the cache, and so the position of the first new token""": (
        """把新 token 的 k 和 v 写入缓存，返回新 token 的注意力输出。

q 和结果：[num_tokens, num_heads, head_dim]；k、v：[num_tokens, num_kv_heads, head_dim]
k_cache、v_cache：[max_len, num_kv_heads, head_dim]；位置 i 在第 i 行
start：缓存里已有多少个 token，也就是第一个新 token 的位置"""
    ),
    """Return the bytes that a decode step reads: the weights, and the KV cache of each sequence.

seq_lens: for each sequence of the step, the number of tokens whose K and V its new token reads""": (
        """返回一个解码步读取的字节数：权重，以及每个序列的 KV cache。

seq_lens：这一步的每个序列，它的新 token 要读多少个 token 的 K 和 V"""
    ),
    "Return the FLOP of a decode step: the products with the weights, and attention.": (
        "返回一个解码步的 FLOP：与权重的乘积，以及注意力。"
    ),
    "Return a lower bound of the step's time, for a machine that reads and computes at the same time.": (
        "返回这一步用时的下界；假设机器可以同时读取和计算。"
    ),
    "Return [(sequence, number of new tokens), …] for the next step. Admitted sequences move to `running`.": (
        "返回下一步的 [(序列, 新 token 数), …]。被接纳的序列移到 `running`。"
    ),
    "Count the computed tokens, add new tokens, and remove finished sequences, after the step is computed.": (
        "一步算完之后：记下已计算的 token 数，加上新 token，移除已结束的序列。"
    ),
    "Return how many places of a padded batch hold no token. `lens`: the tokens of each row, at least one row.": (
        "返回填充后的 batch 有多少个位置没有 token。`lens`：每一行的 token 数，至少有一行。"
    ),
    """Return the wasted places of static batching, over all batches.

num_steps: for each request, in the order of arrival, the number of steps that it needs
batch_size: rows of each batch""": """返回静态批处理在所有 batch 里一共浪费的位置数。

num_steps：按到达顺序，每个请求需要的步数
batch_size：每个 batch 的行数""",
    "Return the share of all places of static batching that are used, from 0 to 1.": (
        "返回静态批处理的所有位置里用上的比例，0 到 1。"
    ),
    """Return the mask of a step as a list of rows of True and False. True: the new token reads this token.

chunks: (start, num_new_tokens) of each sequence; `start` tokens are computed already
rows: the new tokens of all sequences, one sequence after the other
columns: all tokens of the sequences, the computed and the new ones, one sequence after the other""": (
        """返回一步的掩码：由 True 和 False 组成的各行的列表。True 表示这个新 token 读那个 token。

chunks：每个序列的 (start, num_new_tokens)；前 `start` 个 token 已经计算过
行：所有序列的新 token，一个序列接一个序列
列：各序列的全部 token，包括已计算的和新的，一个序列接一个序列"""
    ),
    "Allocate a block for the newest token if it needs one. Return False if no block is free.": (
        "如果最新的 token 需要块，就分配一个。没有空闲块时返回 False。"
    ),
    "Free the blocks, the last block first: other sequences most likely need the beginning of a prompt.": (
        "释放各块，从最后一块开始：别的序列最可能需要的是提示词的开头。"
    ),
    "Allocate blocks for all tokens of `seq`, computed or not. Return False if too few are free.": (
        "为 `seq` 的全部 token 分配块，不管是否已计算。空闲块不够时返回 False。"
    ),
    """Return the output of one query [head_dim], and the list of (m, l, o) after each block.

q: [head_dim]; k_cache, v_cache: [num_blocks, block_size, head_dim]
block_table: the blocks of the sequence in their order; it may have more entries than the sequence needs
seq_len: the number of tokens to read; slots after them may hold anything, even NaN""": (
        """返回一个查询的输出 [head_dim]，以及每一块之后的 (m, l, o) 组成的列表。

q：[head_dim]；k_cache、v_cache：[num_blocks, block_size, head_dim]
block_table：序列的各块，按顺序；项数可能比这个序列需要的多
seq_len：要读的 token 数；它们后面的槽位里可能是任何内容，甚至是 NaN"""
    ),
    """Return (output, s) of attention to all tokens of the parts.

parts: a list of (output, s) for one query head; output is a list of numbers, the o / l of the part
       s = m + log2(l) is the logarithm of the part's sum of 2 ** score; a part without tokens has s = -inf, and its
       output may hold anything, even NaN""": """返回对各部分的全部 token 做注意力的 (output, s)。

parts：一个查询头的 (output, s) 的列表；output 是数的列表，即这一部分的 o / l
       s = m + log2(l) 是这一部分的 2 ** 得分 之和的对数；没有 token 的部分 s = -inf，
       它的 output 里可能是任何内容，甚至是 NaN""",
    "Let `child`, whose tokens begin with the computed tokens of `parent`, share all blocks of `parent`.": (
        "让 `child` 共享 `parent` 的全部块；`child` 的 token 以 `parent` 已计算的 token 开头。"
    ),
    """Give the newest token a block that only `seq` writes to. Return False if no block is free.

A and B have the block table [7, 2], with block_size 4. Each has a sixth token, and block 5 is free:

A  [7, 2]  ->  [7, 5]    block 2 has two owners: A writes to a copy of it, block 5 (copy-on-write)
B  [7, 2]  ->  [7, 2]    B is now the only owner of block 2: it writes without a copy""": (
        """给最新的 token 一个只有 `seq` 会写的块。没有空闲块时返回 False。

A 和 B 的块表都是 [7, 2]，block_size 是 4。各有第 6 个 token，5 号块空闲：

A  [7, 2]  ->  [7, 5]    2 号块有两个所有者：A 写到它的副本 5 号块里（写时复制）
B  [7, 2]  ->  [7, 2]    2 号块现在只属于 B：直接写，不用复制"""
    ),
    "Return a hash of full block `i` and of the hash before it, and so of all tokens up to the block's end.": (
        "返回填满的第 `i` 块与它前面那个哈希合在一起的哈希，所以它取决于到这一块末尾为止的全部 token。"
    ),
    "Return the cached blocks that `seq` begins with, without its last token: a step needs that token's logits.": (
        "返回 `seq` 开头那些在缓存里的块，不包括它的最后一个 token：需要在一步里算出那个 token 的 logits。"
    ),
    "Share the cached blocks and allocate blocks for the other tokens. Return False if too few are free.": (
        "共享缓存里的块，为其余的 token 分配块。空闲块不够时返回 False。"
    ),
    "Return the block that was freed first, and evict its content from the prefix cache.": (
        "返回最先释放的那个块，并把它的内容逐出前缀缓存。"
    ),
    "Add to the prefix cache the blocks that have become full since `seq` had `num_before` computed tokens.": (
        "`seq` 原来有 `num_before` 个已计算的 token：把从那以后填满的块加进前缀缓存。"
    ),
    """Return the largest budget with which no step takes longer than `target_us`, or None.

None: the budget would leave no token for a prompt. A step of n tokens takes fixed_us + n * token_us
microseconds. `num_decodes` sequences decode in each step.""": (
        """返回最大的预算，使每一步都不超过 `target_us`；或者返回 None。

None：这样的预算一个 token 也留不给提示词。n 个 token 的一步用时 fixed_us + n * token_us
微秒。每一步有 `num_decodes` 个序列在解码。"""
    ),
    "Return how many steps compute the prompt, if decodes get their tokens of the budget first.": (
        "返回要用多少步算完提示词；预算先分给解码。"
    ),
    "Return the microseconds from the first chunk of the prompt to its first token: the sum of its steps.": (
        "返回从提示词的第一个 chunk 到它的第一个 token 的微秒数：它的各步用时之和。"
    ),
    "Return (sequence, number of new tokens) for each sequence of the next step.": (
        "返回下一步的每个序列的 (序列, 新 token 数)。"
    ),
    "Preempt the newest sequences until `seq` has its block. Return False if `seq` itself was preempted.": (
        "抢占最新的序列，直到 `seq` 得到它的块。如果 `seq` 自己被抢占了，返回 False。"
    ),
    "Give the waiting `seq` its blocks. Return False if this step may not admit it, or too few are free.": (
        "给等待中的 `seq` 分配块。如果这一步不能接纳它，或者空闲块不够，返回 False。"
    ),
    "Move the computed tokens of `seq` to host memory. Return False, and change nothing, if they do not fit.": (
        "把 `seq` 已计算的 token 移到主机内存。放不下时返回 False，什么都不改。"
    ),
    "Move `seq` back to blocks for all of its tokens. Return False, and change nothing, if too few are free.": (
        "把 `seq` 移回来，它的全部 token 都要有块。空闲块不够时返回 False，什么都不改。"
    ),
    "Return a number for a request that arrives. Requests with smaller numbers go first.": (
        "为到达的请求返回一个数。数小的请求先服务。"
    ),
    "Return the probabilities after top-p, in the same order as before. probs, result: [vocab_size] float64": (
        "返回 top-p 之后的概率，顺序不变。probs 和结果：[vocab_size] float64"
    ),
    "Return a random number, 0 <= u < 1, that depends only on its arguments. It is one of 0/16, 1/16, ... 15/16.": (
        "返回随机数，0 <= u < 1，只取决于参数。它是 0/16、1/16、……、15/16 之一。"
    ),
    "Return a token for each row of the batch. A row is (probs, seed, position).": (
        "为 batch 的每一行返回一个 token。一行是 (probs, seed, position)。"
    ),
    "The text of one growing output.": "一个不断变长的输出的文本。",
    "Add a token, and return the characters that are complete now: perhaps none.": (
        "加上一个 token，返回现在完整的字符：可能一个也没有。"
    ),
    "Return the text of the bytes that are still held back. No token follows.": (
        "返回还扣住的那些字节的文本。后面不会再有 token。"
    ),
    "The text of one output, which ends before the first stop string.": "一个输出的文本，到第一个停止字符串之前为止。",
    "Return the text up to character `end` that was not returned before.": (
        "返回第 `end` 个字符之前、以前没有返回过的文本。"
    ),
    "Add the text of a token, and return what can be shown now. Set `self.stop` if a stop string is complete.": (
        "加上一个 token 的文本，返回现在可以显示的文本。如果有停止字符串已经完整，就设置 `self.stop`。"
    ),
    "Return where the longest possible beginning of a stop string starts: the text before it can be shown.": (
        "返回可能是停止字符串开头的最长一段从哪里开始：它之前的文本可以显示。"
    ),
    "Return the text that is still held back. No token follows.": "返回还扣住的文本。后面不会再有 token。",
    "Launches step n + 1, and then processes the tokens of step n. Each step computes one token of each sequence.": (
        "先启动第 n + 1 步，再处理第 n 步的 token。每一步为每个序列计算一个 token。"
    ),
    "Return the inputs of a step, with each placeholder replaced by a token of the step before: `newest`, by row.": (
        "返回一步的输入，其中每个占位符都换成上一步的 token：`newest`，按行排列。"
    ),
    "Return the next step: a list of (sequence, position of the token that it computes). Add placeholders.": (
        "返回下一步：(序列, 它要计算的 token 的位置) 的列表。给每个序列加一个占位符。"
    ),
    "Process the tokens that `step` has sampled, one for each of its rows.": ("处理 `step` 采样出的 token，每行一个。"),
    "Graphs of decode steps, one for each of `sizes` rows. They read their inputs from buffers at fixed addresses.": (
        "解码步的 graph，`sizes` 里的每个行数一个。它们从地址固定的缓冲区读取输入。"
    ),
    "Compute a step of decodes -> [num_decodes]. The inputs have a row for each; block_tables may be narrower.": (
        "计算一个解码步 -> [num_decodes]。每个解码在输入里占一行；block_tables 可能比缓冲区窄。"
    ),
    "Sends each request to one of several engines. It knows what it has sent them, and what they have computed.": (
        "把每个请求发给几个引擎中的一个。它知道自己发给了它们什么，以及它们计算了什么。"
    ),
    "Note that an engine has computed tokens.": "记下一个引擎计算了多少个 token。",
    "Return how many tokens of the prompt are in the engine's prefix cache: whole blocks, never the last token.": (
        "返回提示词有多少个 token 在这个引擎的前缀缓存里：只算整块，最后一个 token 从不算。"
    ),
    "Return the engine for a prompt, and note what it will compute and cache.": (
        "返回处理这个提示词的引擎，并记下它要计算什么、缓存什么。"
    ),
    "Moves sequences from the engine that computes prompts to the one that decodes. Each has a pool of its own.": (
        "把序列从计算提示词的引擎移到解码的引擎。两个引擎各有自己的块池。"
    ),
    "Reserve blocks in the decode engine. Return the copies, (source, destination), or None if they do not fit.": (
        "在解码引擎里预留块。返回要做的复制 (源, 目标)；放不下时返回 None。"
    ),
    "All blocks of `seq` have been copied: free those of the prefill engine, and let the other one decode.": (
        "`seq` 的块已全部复制：释放预填充引擎里的块，让另一个引擎解码。"
    ),
    """Append the tokens that a step with drafts has found, and give back the blocks that are not needed any more.

The step has computed K and V of all tokens of `seq` and of the drafts behind them.
sampled: one token more than drafts. sampled[i] is the model's token after drafts[:i]""": (
        """追加一个带草稿的步得到的 token，并归还不再需要的块。

这一步计算了 `seq` 的全部 token 以及后面的草稿的 K 和 V。
sampled：比 drafts 多一个 token。sampled[i] 是模型在 drafts[:i] 之后的 token"""
    ),
    "Return the first token for which the sum of the probabilities up to and including it is greater than u.": (
        "返回第一个这样的 token：到它为止（包括它）的概率之和大于 u。"
    ),
    """Return the tokens of a step with drafts.

draft_probs: of each draft, the probabilities q from which it was drawn
model_probs: the model's probabilities p at the place of each draft, and behind the last one
uniforms: random numbers in [0, 1), each to be used once, from the first on""": """返回一个带草稿的步得到的 token。

draft_probs：每个草稿是按哪些概率 q 抽出的
model_probs：模型在每个草稿的位置，以及最后一个草稿之后的概率 p
uniforms：[0, 1) 里的随机数，每个只用一次，从第一个用起""",
}

COMMENTS = {
    "write this function": "写这个函数",
    "apply self.chunk_limit below, and remove this line": "在下面用上 self.chunk_limit，并删掉这一行",
    "finds labs": "让 Python 能找到 labs",
    "query heads": "查询头数",
    "of a weight, and of a value of K or V": "一个权重的，也是 K 或 V 的一个值的",
    "read from memory": "从内存读取",
    "prompt, then also output": "起初是提示词，后来也有输出",
    "output tokens, after which the sequence is finished": "输出这么多个 token 之后，序列就结束",
    "the largest number of tokens of one step": "一步最多有多少个 token",
    "the largest number of tokens of one sequence in one step": "一个序列在一步里最多有多少个 token",
    "in the order of arrival": "按到达顺序",
    "only the end of `running` is preempted": "只从 `running` 的末尾抢占",
    "free blocks in host memory": "主机内存里的空闲块",
    "the host blocks of each sequence that is swapped out, in the order of its tokens": (
        "每个换出的序列的主机块，按它的 token 的顺序"
    ),
    "(block, host block): copied before the step computes": "(块, 主机块)：在这一步计算之前复制",
    "(host block, block): copied before the step computes": "(主机块, 块)：在这一步计算之前复制",
    "token id -> bytes": "token id -> 字节",
    "bytes that are not text yet": "还不能变成文本的字节",
    "of all tokens": "全部 token 的",
    "characters that were returned": "已返回的字符数",
    "the stop string that was found": "找到的停止字符串",
    "the token that ends a sequence": "结束序列的 token",
    "register(seq, i) adds the full block i of `seq` to the prefix cache": (
        "register(seq, i) 把 `seq` 填满的第 i 块加进前缀缓存"
    ),
    "ascending": "升序",
    "tokens of prompts that each engine has still to compute": "每个引擎还要计算多少个提示词的 token",
    "of each engine: tuples of tokens, whole blocks": "每个引擎的：token 的元组，都是整块",
    "the block manager of the engine that computes prompts": "计算提示词的引擎的块管理器",
    "the block manager of the engine that decodes": "解码的引擎的块管理器",
    "sequence -> its block table in the decode engine, while its blocks are on their way": (
        "序列 -> 它在解码引擎里的块表，在它的块还在路上时"
    ),
    "sequences that the decode engine runs": "解码引擎在运行的序列",
}


def translate(source: str, language: Language) -> str:
    """Return code with its docstrings and comments in `language`. A text without a translation stays English."""
    if language == "en":
        return source
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.removeprefix("# ")
        if token.type == tokenize.COMMENT and text in COMMENTS:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + f"# {COMMENTS[text]}"
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in sorted(documented, key=lambda node: -node.lineno):  # the last one first: line numbers stay right
        text = ast.get_docstring(node) or ""
        if text in DOCSTRINGS:
            old, new = node.body[0], DOCSTRINGS[text]
            new = f'"""{new}\n"""' if "\n" in new else f'"""{new}"""'
            lines[old.lineno - 1 : old.end_lineno] = textwrap.indent(new, " " * old.col_offset).split("\n")
    return "\n".join(lines)
