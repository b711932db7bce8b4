"""Ten mistakes that learners often make, for each exercise of chapters 1 to 9 with functions to write.

Each has the feedback that a learner needs. `named` is the known mistake whose explanation says the same. It is None if
the first difference of the smallest run has to suffice. Many known mistakes were added to the exercises for these
answers, so the table guards their names, and does not estimate how many unseen mistakes get one.
"""

from typing import NamedTuple

from labs.learn.seen import replace_all


class Planted(NamedTuple):
    """A wrong answer: the solution with a few words replaced."""

    feedback: str
    """What the learner should be told."""
    named: str | None
    """The name that the checker should give."""
    replace: tuple[tuple[str, str], ...]

    def apply(self, solution: str) -> str:
        return replace_all(solution, self.replace)


def plant(feedback: str, named: str | None, *replace: tuple[str, str]) -> Planted:
    return Planted(feedback, named, replace)


APPEND = "        tokens.append(token)\n        output.append(token)\n"
WHILE_OUTPUT = "while len(output) < max_tokens:"
GENERATION_LOOP = (
    plant(
        "`range(max_tokens - 1)` makes one token too few.",
        "One token too few",
        (WHILE_OUTPUT, "for _ in range(max_tokens - 1):"),
    ),
    plant(
        "`range(max_tokens + 1)` makes one token too many.",
        "One token too many",
        (WHILE_OUTPUT, "for _ in range(max_tokens + 1):"),
    ),
    plant(
        "The end token is part of the output: append it before the loop ends.",
        "The end token is dropped",
        (
            f"{APPEND}        if token in end_tokens:\n            break\n",
            f"        if token in end_tokens:\n            break\n{APPEND}",
        ),
    ),
    plant(
        "The check compares a token with the list of end tokens: it is never equal.",
        "The end token is not checked",
        ("token in end_tokens:", "token == end_tokens:"),
    ),
    plant(
        "Any of the end tokens ends the answer, not only the last one of the list.",
        "Only the last end token is checked",
        ("token in end_tokens:", "token == end_tokens[-1]:"),
    ),
    plant(
        "The model is called once more after the last token: look at the output before the call.",
        "The model is called once too often",
        (
            "        token = next_token(tokens)\n",
            "        token = following if output else next_token(tokens)\n",
        ),
        ("            break\n", "            break\n        following = next_token(tokens)\n"),
    ),
    plant(
        "The model must see the prompt in each call, not only its own output.",
        "The model does not see the prompt",
        ("next_token(tokens)\n        tokens", "next_token(output or tokens)\n        tokens"),
    ),
    plant(
        "The prompt is not part of the output, and not its first tokens either.",
        "The output contains the prompt",
        ("    output = []\n", "    output = list(prompt)\n"),
        (WHILE_OUTPUT, "while len(output) < max_tokens + len(prompt):"),
    ),
    plant(
        "Only `max_tokens` new tokens are asked for; the tokens of the prompt do not count.",
        "The prompt is counted",
        (WHILE_OUTPUT, "for _ in range(max_tokens - len(prompt)):"),
    ),
    plant(
        "The end of an answer ends the loop, not the current round of it.",
        "The end token is not checked",
        ("            break\n", "            continue\n"),
    ),
)

POSITIONS = "torch.arange(start, end)\n"
SEEN = "torch.arange(end) <= positions[:, None]"
KEYS, VALUES = "k_cache[:end].repeat_interleave(group, dim=1)", "v_cache[:end].repeat_interleave(group, dim=1)"
ATTEND_WITH_CACHE = (
    plant(
        "The mask of a square matrix starts at position 0, but the first new token has position `start`.",
        "The mask starts at position 0",
        (SEEN, "torch.ones(num_tokens, end).tril().bool()"),
    ),
    plant(
        "`tril(start - 1)` hides each token from itself.",
        "A token does not read itself",
        (SEEN, "torch.ones(num_tokens, end).tril(start - 1).bool()"),
    ),
    plant(
        "`tril(start + 1)` lets each token read the next one.",
        "A token reads the next one",
        (SEEN, "torch.ones(num_tokens, end).tril(start + 1).bool()"),
    ),
    plant(
        "The mask is inverted: `masked_fill` fills the places where the mask is True.",
        "The mask is inverted",
        ("masked_fill(~is_seen", "masked_fill(is_seen"),
    ),
    plant(
        "Scores are divided by the root of the number of heads, not of head_dim.",
        "Scores are divided by √num_heads",
        ("head_dim**0.5", "num_heads**0.5"),
    ),
    plant(
        "Rows of the cache are read that nothing was written to.",
        "The whole cache is read",
        (KEYS, "k_cache.repeat_interleave(group, dim=1)"),
        (VALUES, "v_cache.repeat_interleave(group, dim=1)"),
        (SEEN, "torch.ones(num_tokens, len(k_cache), dtype=torch.bool)"),
    ),
    plant(
        "K and V are not written to the cache: the next step reads what was there before.",
        "K and V are not kept in the cache",
        ("    k_cache[start:end] = k\n    v_cache[start:end] = v\n", ""),
        (KEYS, "torch.cat([k_cache[:start], k]).repeat_interleave(group, dim=1)"),
        (VALUES, "torch.cat([v_cache[:start], v]).repeat_interleave(group, dim=1)"),
    ),
    plant(
        "V is written to the cache of K, or K to that of V.",
        "K and V are exchanged",
        (
            "    k_cache[start:end] = k\n    v_cache[start:end] = v\n",
            "    k_cache[start:end] = v\n    v_cache[start:end] = k\n",
        ),
    ),
    plant(
        "All query heads read the first KV head.",
        "All query heads read KV head 0",
        (KEYS, "k_cache[:end, :1].repeat_interleave(num_heads, dim=1)"),
        (VALUES, "v_cache[:end, :1].repeat_interleave(num_heads, dim=1)"),
    ),
    plant(
        "The cached tokens are read, but not the new ones.",
        "Reading before writing",
        ("    k_cache[start:end] = k\n    v_cache[start:end] = v\n", ""),
        ("    return torch", "    k_cache[start:end], v_cache[start:end] = k, v\n    return torch"),
    ),
)

KV_VALUES = "2 * model.num_layers * model.num_kv_heads * model.head_dim"
STEP_TIME = (
    plant(
        "A decode step reads the cached tokens of every sequence: sum, not count, the lengths.",
        "Sequences are counted, not their tokens",
        ("num_weights + sum(seq_lens) *", "num_weights + len(seq_lens) *"),
    ),
    plant(
        "head_dim values are counted once for K and once for V, not head_dim times head_dim.",
        None,
        (KV_VALUES, f"{KV_VALUES} * model.head_dim"),
    ),
    plant(
        "head_dim is forgotten: K of one token and head has head_dim values.",
        "head_dim is forgotten",
        (KV_VALUES, "2 * model.num_layers * model.num_kv_heads"),
    ),
    plant(
        "Only the weights have a size in bytes here, the KV cache is counted in values.",
        "The KV cache is counted in values",
        (
            "(model.num_weights + sum(seq_lens) * kv_values_per_token) * model.bytes_per_value",
            "model.num_weights * model.bytes_per_value + sum(seq_lens) * kv_values_per_token",
        ),
    ),
    plant(
        "Attention has 4 FLOP for each value: multiply and add, for the scores and for the sum.",
        "Two FLOP in attention",
        ("4 * model.num_layers", "2 * model.num_layers"),
    ),
    plant(
        "A decode step computes one token of each sequence, not all of its tokens again.",
        "All tokens are computed again",
        ("2 * model.num_weights * num_tokens", "2 * model.num_weights * sum(seq_lens)"),
    ),
    plant(
        "Attention is computed in each layer.",
        "Attention in one layer",
        ("4 * model.num_layers * model.num_heads", "4 * model.num_heads"),
    ),
    plant(
        "The two times overlap: take the longer one, not their product.",
        None,
        ("max(memory, arithmetic)", "memory * arithmetic"),
    ),
    plant(
        "The bytes are divided by bytes per second, and the FLOP by FLOP per second: here they are exchanged.",
        "The machine's two speeds are exchanged",
        ("/ machine.bytes_per_s", "/ machine.flops_per_second"),
        ("/ machine.flops_per_s\n", "/ machine.bytes_per_s\n"),
        ("machine.flops_per_second", "machine.flops_per_s"),
    ),
    plant(
        "Only the memory counts here; a large batch can be limited by arithmetic.",
        "Only the memory is counted",
        ("max(memory, arithmetic)", "memory"),
    ),
)

RUNNING_LOOP = "        for seq in self.running:\n            if budget == 0:\n                break\n"
ADMIT_LOOP = "        while budget > 0 and self.waiting:\n            seq = self.waiting.popleft()\n"
UPDATE = (
    "            if seq.num_computed_tokens == seq.num_tokens:\n                seq.num_tokens += 1\n"
    "                if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:\n"
    "                    self.running.remove(seq)\n"
)
SCHEDULE = (
    plant(
        "A sequence that was admitted stays in the queue, and is admitted again.",
        "An admitted sequence stays in the queue",
        (ADMIT_LOOP, "        for seq in list(self.waiting):\n            if budget == 0:\n                break\n"),
    ),
    plant(
        "An admitted sequence never gets to `running`.",
        "An admitted sequence is lost",
        ("            self.running.append(seq)\n", ""),
    ),
    plant(
        "The computed tokens are not counted: each step computes the same tokens again.",
        "Computed tokens are not counted",
        ("            seq.num_computed_tokens += num_new_tokens\n", ""),
    ),
    plant(
        "`max_tokens` counts output tokens, not the prompt.",
        "The prompt counts as output",
        ("if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:", "if seq.num_tokens >= seq.max_tokens:"),
    ),
    plant(
        "A decode step computes one token, and a prompt as many as the budget allows.",
        "One token of each running sequence",
        (
            RUNNING_LOOP + "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)\n",
            RUNNING_LOOP + "            num_new_tokens = 1\n",
        ),
    ),
    plant(
        "The budget is shared by all sequences of a step; here each part of the step has its own.",
        "Waiting sequences get a budget of their own",
        (
            "        while budget > 0 and self.waiting:\n",
            "        budget = self.budget\n        while budget > 0 and self.waiting:\n",
        ),
    ),
    plant(
        "The budget of the scheduler is used up for ever: it must be the same in each step.",
        "The budget is never refilled",
        ("        return chunks\n", "        self.budget = budget\n        return chunks\n"),
    ),
    plant(
        "A sequence leaves before its last token is there.",
        "A sequence ends one token early",
        ("== seq.max_tokens:", "== seq.max_tokens - 1:"),
    ),
    plant(
        "A token comes when all tokens are computed, not one token before the end of the prompt.",
        None,
        ("if seq.num_computed_tokens == seq.num_tokens:", "if seq.num_computed_tokens >= seq.num_prompt_tokens - 1:"),
    ),
    plant(
        "Only finished prompts get a token; decoding sequences must get one, too.",
        "Only the prompt gives a token",
        ("if seq.num_computed_tokens == seq.num_tokens:", "if seq.num_computed_tokens == seq.num_prompt_tokens:"),
    ),
)

ROW = "[first <= column <= first + position for column in range(num_columns)]"
ROWS = "        for position in range(start, start + num_new_tokens):\n"
COLUMNS = "sum(start + num_new_tokens for start, num_new_tokens in chunks)"
BLOCK_DIAGONAL_MASK = (
    plant(
        "Only the new tokens have columns: the cached ones must be read, too.",
        "Columns for new tokens only",
        (COLUMNS, "sum(num for _, num in chunks)"),
        (ROWS, "        for position in range(num_new_tokens):\n"),
        ("first += start + num_new_tokens", "first += num_new_tokens"),
    ),
    plant(
        "Only the new tokens have columns, and the mask is causal over all sequences.",
        "Sequences read each other + Columns for new tokens only",
        (COLUMNS, "sum(num for _, num in chunks)"),
        (ROWS, "        for position in range(num_new_tokens):\n"),
        ("first += start + num_new_tokens", "first += num_new_tokens"),
        ("first <= column <=", "0 <= column <="),
    ),
    plant(
        "Only the new tokens have columns, and no token is hidden within its sequence.",
        "No causal mask inside a block + Columns for new tokens only",
        (COLUMNS, "sum(num for _, num in chunks)"),
        (ROWS, "        for position in range(num_new_tokens):\n"),
        ("first += start + num_new_tokens", "first += num_new_tokens"),
        ("<= first + position for", "< first + num_new_tokens for"),
    ),
    plant(
        "A row for every token: the computed ones are not computed again.",
        "Rows for computed tokens",
        (ROWS, "        for position in range(start + num_new_tokens):\n"),
    ),
    plant(
        "A token reads the token after it.",
        "A token reads the next one",
        ("<= first + position for", "<= first + position + 1 for"),
    ),
    plant(
        "A row has as many columns as the mask: pad the row of each sequence with False.",
        "Rows of different lengths",
        (ROW, "[column <= position for column in range(start + num_new_tokens)]"),
    ),
    plant(
        "All sequences together, without a border and without an order: every token reads all.",
        "Everything is read",
        (ROW, "[True for column in range(num_columns)]"),
    ),
    plant(
        "The block begins at `first`; `start` is the number of computed tokens, not a column.",
        "The block begins in column `start`",
        ("first <= column <= first + position", "start <= column <= first + position"),
    ),
    plant(
        "Each token reads only itself.",
        "A token reads only itself",
        ("first <= column <= first + position", "column == first + position"),
    ),
    plant(
        "The columns of the sequences before are counted from their computed tokens only.",
        None,
        ("first += start + num_new_tokens", "first += start"),
    ),
)

NEEDS = "self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table)"
POP = "            seq.block_table.append(self.free.pop())\n"
GROW_TABLE = (
    plant(
        "`len % block_size == 0` holds for the token that fills a block: that is one token early.",
        "A block when `len % block_size == 0`",
        (NEEDS, "not len(seq.token_ids) % self.block_size"),
    ),
    plant(
        "`len % block_size == 1` never holds in blocks of one slot.",
        "A block when `len % block_size == 1`",
        (NEEDS, "1 == len(seq.token_ids) % self.block_size"),
    ),
    plant(
        "The free block is taken from the wrong end: `pop()` takes the last one.",
        "The first free block is taken",
        ("self.free.pop()", "self.free.pop(0)"),
    ),
    plant(
        "Rounded down, a started block does not count.",
        "A block when `len % block_size == 0`",
        (NEEDS, "len(seq.token_ids) // self.block_size > len(seq.block_table)"),
    ),
    plant(
        "`len // block_size + 1` counts one block too many for a full block.",
        "A block too early",
        (NEEDS, "len(seq.token_ids) // self.block_size + 1 > len(seq.block_table)"),
    ),
    plant(
        "The function returns nothing where it should return True.",
        "The result is missing",
        ("        return True\n", ""),
    ),
    plant(
        "A token needs a slot, not a block: a block for each token is too much.",
        "A block although there is a slot",
        (NEEDS, "len(seq.token_ids) > len(seq.block_table)"),
    ),
    plant(
        "The table gets a list in place of a block number.",
        None,
        ("seq.block_table.append(self.free.pop())", "seq.block_table.append([self.free.pop()])"),
    ),
    plant(
        "A new table has lost the old blocks: append to it.",
        "The old blocks are lost",
        ("seq.block_table.append(self.free.pop())", "seq.block_table = [self.free.pop()]"),
    ),
    plant(
        "The token is removed by the caller, not here: change nothing.",
        "The token is removed",
        ("                return False\n", "                seq.token_ids.pop()\n                return False\n"),
    ),
)

DOWN = "            self.num_owners[block_id] -= 1\n"
IF_FREE = "            if not self.num_owners[block_id]:\n                self.free[block_id] = None\n"
CLEAR = "        seq.block_table = []\n"
RELEASE_BLOCKS = (
    plant(
        "A block with two owners is free after the first one has left.",
        "A shared block becomes free",
        ("if not self.num_owners[block_id]:", "if self.num_owners[block_id] >= 0:"),
    ),
    plant(
        "The number is compared before it is counted down.",
        "The last owner does not free the block",
        (DOWN + IF_FREE, IF_FREE + DOWN),
    ),
    plant(
        "The owners are set to 0, although others have the block.",
        "All owners are removed",
        (DOWN, "            self.num_owners[block_id] = 0\n"),
    ),
    plant(
        "The first block becomes free first: sorted numbers are no order of tokens.",
        "The first block becomes free first",
        ("reversed(seq.block_table)", "sorted(seq.block_table)"),
    ),
    plant(
        "Only the last block is freed.",
        "Only the last block is released",
        ("reversed(seq.block_table)", "seq.block_table[-1:]"),
    ),
    plant(
        "The first block is forgotten.",
        None,
        ("reversed(seq.block_table)", "reversed(seq.block_table[1:])"),
    ),
    plant(
        "The table must be an empty list, to which a later step can append.",
        None,
        (CLEAR, "        seq.block_table = None\n"),
    ),
    plant(
        "The free blocks are replaced: those that were free before are lost.",
        "Blocks that were free are lost",
        ("        for block_id in reversed", "        self.free = {}\n        for block_id in reversed"),
    ),
    plant(
        "The content of a freed block stays in the prefix cache: it can be found again.",
        "The content is forgotten",
        (
            "                self.free[block_id] = None\n",
            "                self.free[block_id] = None\n"
            "                self.block_of_hash.pop(self.hash_of_block.pop(block_id, None), None)\n",
        ),
    ),
    plant(
        "A block counts as free twice: the owners are counted down two times.",
        None,
        (DOWN, "            self.num_owners[block_id] -= 2\n"),
    ),
)

NUM_NEW = "        num_new = self.num_blocks_for(len(seq.token_ids))\n"
TOO_FEW = "        if num_new > len(self.free):\n            return False\n"
TAKE_NEW = "        seq.block_table = [self.free.pop() for _ in range(num_new)]\n"
ADMIT_WHOLE = (
    plant(
        "`len // block_size + 1` counts one block too many for a full block.",
        "One block too many",
        (NUM_NEW, "        num_new = len(seq.token_ids) // self.block_size + 1\n"),
    ),
    plant("One block for each token.", "A block for each token", (NUM_NEW, "        num_new = len(seq.token_ids)\n")),
    plant(
        "A preempted sequence has computed nothing any more: all its tokens need blocks.",
        "Computed tokens get no blocks",
        (NUM_NEW, "        num_new = self.num_blocks_for(len(seq.token_ids) - seq.num_computed_tokens)\n"),
    ),
    plant(
        "The blocks are taken from the wrong end: `pop()` takes the last one.",
        "The first free blocks are taken",
        ("self.free.pop()", "self.free.pop(0)"),
    ),
    plant(
        "The blocks are not removed from the free ones: the next sequence gets them, too.",
        "The blocks are still free",
        ("[self.free.pop() for _ in range(num_new)]", "self.free[::-1][:num_new]"),
    ),
    plant(
        "The block table is in the wrong order.",
        "The blocks are in the order of `free`",
        ("[self.free.pop() for _ in range(num_new)]", "[self.free.pop() for _ in range(num_new)][::-1]"),
    ),
    plant(
        "No token is computed yet: K and V have to be computed first.",
        "Tokens count as computed",
        ("seq.num_computed_tokens = 0", "seq.num_computed_tokens = len(seq.token_ids)"),
    ),
    plant("The function returns nothing at the end.", "The result is missing", ("        return True\n", "")),
    plant(
        "The result is False although the sequence has its blocks.",
        None,
        ("        return True\n", "        return bool(self.free)\n"),
    ),
    plant(
        "One free block suffices for the check, but the sequence needs several.",
        "Any free block suffices",
        ("num_new > len(self.free)", "not self.free"),
    ),
)

SCORES = "scores = k @ q  # [num_used]"
ATTEND_TO_BLOCKS = (
    plant(
        "The state of the last block is not divided by l, but by the number of tokens.",
        None,
        ("return o / l, states", "return o / seq_len, states"),
    ),
    plant(
        "A state is what holds after a block, not before it.",
        None,
        ("        states.append((m, l, o))\n", ""),
        ("        scores = k @ q", "        states.append((m, l, o))\n        scores = k @ q"),
    ),
    plant(
        "Powers of e in place of powers of 2.",
        "Powers of e",
        ("weights = 2 ** (scores - m_new)", "weights = torch.exp(scores - m_new)"),
        ("2 ** (m - m_new)", "2.718281828459045 ** (m - m_new)"),
    ),
    plant(
        "The weights are relative to the old maximum.",
        None,
        ("2 ** (scores - m_new)", "2 ** (scores - max(m, -100.0))"),
    ),
    plant(
        "The maximum is not kept: m stays what it was.",
        "m is not kept",
        ("        m = m_new\n", ""),
    ),
    plant(
        "o starts again with each block.",
        "Only the last block counts in o",
        ("o = o * shrink + weights @ v", "o = weights @ v"),
    ),
    plant(
        "l starts again with each block.",
        "Only the last block counts in l",
        ("l = l * shrink + weights.sum().item()", "l = weights.sum().item()"),
    ),
    plant(
        "The mean of the values, not the weighted sum.",
        None,
        ("weights @ v", "weights.sum() * v.mean(0)"),
    ),
    plant(
        "Keys are read in place of values.",
        "Keys instead of values",
        ("v = v_cache[block_table[i], :num_used]", "v = k_cache[block_table[i], :num_used]"),
    ),
    plant(
        "Entry i of the block table is the block to read, not always the first.",
        None,
        ("k = k_cache[block_table[i],", "k = k_cache[block_table[0],"),
        ("v = v_cache[block_table[i],", "v = v_cache[block_table[0],"),
    ),
)

COUNT_UP = "        for block_id in parent.block_table:\n            self.num_owners[block_id] += 1\n"
COPY = "parent.block_table.copy()"
FORK = (
    plant("One more sequence owns the blocks: count up, not down.", None, ("+= 1", "-= 1")),
    plant(
        "Only the last block gets an owner.",
        "Only the last block gets an owner",
        ("in parent.block_table:", "in parent.block_table[-1:]:"),
    ),
    plant(
        "The last block gets no owner, but the child has it.",
        "The last block gets no owner",
        ("in parent.block_table:", "in parent.block_table[:-1]:"),
    ),
    plant(
        "The child counts all of its tokens as computed.",
        "The newest token counts as computed",
        ("= parent.num_computed_tokens", "= len(parent.token_ids)"),
    ),
    plant(
        "The child counts its block's slots as computed.",
        "Slots count as computed",
        ("= parent.num_computed_tokens", "= len(parent.block_table) * self.block_size"),
    ),
    plant(
        "The owners of the child's old table are counted.",
        "The owners are not counted",
        (COUNT_UP, "        for block_id in child.block_table:\n            self.num_owners[block_id] += 1\n"),
    ),
    plant("Only the child is a new owner; the parent is counted already.", None, ("+= 1", "+= 2")),
    plant(
        "The child's table has the same order as the parent's: the order of the tokens.",
        None,
        (COPY, "parent.block_table[::-1]"),
    ),
    plant("The child gets no table.", "The child gets no table", (f"        child.block_table = {COPY}\n", "")),
    plant(
        "The blocks that were computed are counted, rounded down.",
        "Only full blocks are shared",
        ("in parent.block_table:", "in parent.block_table[: parent.num_computed_tokens // self.block_size]:"),
        (COPY, "parent.block_table[: parent.num_computed_tokens // self.block_size]"),
    ),
)

SHARED = "is_shared = i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 1"
COPIES = "                self.copies.append((source, block_id))\n"
COPY_ON_WRITE = (
    plant(
        "Only a new block is taken: a shared block is written to.",
        "Two sequences write to one block",
        ("if is_shared or self", "if self"),
        ("            if is_shared:\n", "            if False:\n"),
    ),
    plant(
        "No block is taken when the table is full.",
        "A table that is full does not grow",
        ("if is_shared or self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):", "if is_shared:"),
    ),
    plant(
        "The new block is put before the old ones.",
        None,
        ("seq.block_table.append(block_id)", "seq.block_table.insert(0, block_id)"),
    ),
    plant(
        "The first block is replaced.",
        "The wrong block is replaced",
        ("seq.block_table.pop()", "seq.block_table.pop(0)"),
    ),
    plant(
        "A copy is noted although nothing is copied.",
        None,
        (COPIES, ""),
        (
            "            seq.block_table.append(block_id)\n",
            "            self.copies.append((seq.block_table[-1] if not is_shared else source, block_id))\n"
            "            seq.block_table.append(block_id)\n",
        ),
    ),
    plant(
        "The other owner loses the block: it becomes free.",
        "The old block becomes free",
        (COPIES, COPIES + "                self.free[source] = None\n"),
    ),
    plant(
        "The count of owners is set to one.",
        "The old block has one owner",
        ("self.num_owners[source] -= 1", "self.num_owners[source] = 1"),
    ),
    plant(
        "The new block has two owners.",
        "The new block has too many owners",
        (COPIES, COPIES + "                self.num_owners[block_id] += 1\n"),
    ),
    plant(
        "The result is False after a copy.",
        None,
        (COPIES, COPIES + "                seq.block_table.append(block_id)\n                return False\n"),
    ),
    plant(
        "The copy is made only when a block is full.",
        "Two sequences write to one block",
        (
            SHARED,
            "is_shared = not seq.num_computed_tokens % self.block_size and i < len(seq.block_table) and "
            "self.num_owners[seq.block_table[i]] > 1",
        ),
    ),
)

TOKENS = "[j * self.block_size : (j + 1) * self.block_size]"
HASHED = "repr((seq.block_hashes[-1:], tokens))"
HASH_CHAIN = (
    plant(
        "Only the first token of the block is in the hash.",
        "Only the first token of the block",
        (TOKENS, "[j * self.block_size : j * self.block_size + 1]"),
    ),
    plant(
        "The block after is hashed.",
        "The next block's tokens",
        (TOKENS, "[(j + 1) * self.block_size : (j + 2) * self.block_size]"),
    ),
    plant(
        "The number of a block is not the position of its first token.",
        "The number of a block is not a position",
        (TOKENS, "[j : j + self.block_size]"),
    ),
    plant(
        "Only the set of the tokens is hashed.",
        "The order of the tokens is lost",
        (HASHED, "repr((seq.block_hashes[-1:], sorted(set(tokens))))"),
    ),
    plant(
        "Only the sum of the tokens is hashed.",
        "Only the sum of the tokens",
        (HASHED, "repr((seq.block_hashes[-1:], sum(tokens)))"),
    ),
    plant(
        "All hashes before are left out, but the number of the sequence's tokens is in.",
        "The length is in the hash",
        (HASHED, "repr((seq.block_hashes[-1:], tokens, len(seq.token_ids)))"),
    ),
    plant(
        "The hash depends on the object, not on its tokens.",
        "The hash depends on the object",
        (HASHED, "repr((seq.block_hashes[-1:], tokens, id(seq)))"),
    ),
    plant(
        "Always the newest hash is returned.",
        "The newest hash is returned",
        ("return seq.block_hashes[i]", "return seq.block_hashes[-1]"),
    ),
    plant(
        "The hash two blocks before is in the hash, not that of the block before.",
        None,
        ("seq.block_hashes[-1:]", "seq.block_hashes[-2:-1]"),
    ),
    plant("One hash too few is made.", None, ("i + 1):", "i):")),
)

FIND_RANGE = "(len(seq.token_ids) - 1) // self.block_size"
SHARE_HITS = (
    "        for block_id in hits:\n            self.free.pop(block_id, None)\n"
    "            self.num_owners[block_id] += 1\n"
)
REVIVE_BLOCKS = (
    plant(
        "The prefix cache is not used.",
        "Nothing is found",
        ("            hits.append(block_id)\n", "            break\n"),
    ),
    plant(
        "Only one block is found.",
        "Only the first block is found",
        ("            hits.append(block_id)\n", "            hits.append(block_id)\n            break\n"),
    ),
    plant(
        "One block less is found than there is.",
        "One block too few is found",
        (FIND_RANGE, "len(seq.token_ids) // self.block_size - 1"),
    ),
    plant("All blocks are new as well as found.", "Found blocks get new ones, too", (" - len(hits)\n", "\n")),
    plant(
        "New blocks come before the found ones in the table.",
        "New blocks come first in the table",
        ("hits + [self.take() for _ in range(num_new)]", "[self.take() for _ in range(num_new)] + hits"),
    ),
    plant(
        "A block that is not free cannot be shared here.",
        "Only free blocks are shared",
        ("            if block_id is None:\n", "            if block_id is None or block_id not in self.free:\n"),
    ),
    plant(
        "A block that is free is not found.",
        "Free blocks are not found",
        ("            if block_id is None:\n", "            if block_id is None or block_id in self.free:\n"),
    ),
    plant(
        "One token too many counts as computed.",
        None,
        ("len(hits) * self.block_size\n", "len(hits) * self.block_size + bool(hits)\n"),
    ),
    plant(
        "The blocks are shared before the check, and stay so if there are too few.",
        "Blocks are shared before the check",
        (SHARE_HITS, ""),
        (
            "        if num_new > len(self.free) - num_free_hits:\n",
            SHARE_HITS + "        if num_new > len(self.free):\n",
        ),
    ),
    plant(
        "A request that fits exactly is refused.",
        "A request that fits exactly is refused",
        ("num_new > len(self.free)", "num_new >= len(self.free)"),
    ),
)

EVICT = "            del self.block_of_hash[self.hash_of_block.pop(block_id)]\n"
REG_RANGE = "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)"
BOTH = "self.block_of_hash[block_hash], self.hash_of_block[block_id] = block_id, block_hash"
REGISTER_BLOCKS = (
    plant("The block stays free.", "The taken block stays free", ("        del self.free[block_id]\n", "")),
    plant(
        "The owners are counted up from what they were.",
        None,
        ("self.num_owners[block_id] = 1", "self.num_owners[block_id] += 2"),
    ),
    plant(
        "Only the block with the content is forgotten, not the hash.",
        "The hash still names the block",
        (EVICT, "            self.hash_of_block.pop(block_id)\n"),
    ),
    plant(
        "All of the prefix cache is forgotten.",
        "The whole prefix cache is forgotten",
        (EVICT, "            self.hash_of_block.clear()\n            self.block_of_hash.clear()\n"),
    ),
    plant("Nothing is registered.", "Nothing is registered", (REG_RANGE, "range(0)")),
    plant(
        "Only the first block is registered.",
        "Only the first block is registered",
        (REG_RANGE, "range(num_before // self.block_size, min(1, seq.num_computed_tokens // self.block_size))"),
    ),
    plant(
        "The last full block is left out.",
        "The last full block is left out",
        (REG_RANGE, "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size - 1)"),
    ),
    plant(
        "The hash is the one of another block.",
        "The wrong block is registered",
        ("self.hash_block(seq, i), seq.block_table[i]", "self.hash_block(seq, i), seq.block_table[-1]"),
    ),
    plant(
        "Hash and block are exchanged.",
        "The two dicts are exchanged",
        (BOTH, "self.hash_of_block[block_hash], self.block_of_hash[block_id] = block_id, block_hash"),
    ),
    plant(
        "Only one of the two dicts is written.",
        "The block does not know its hash",
        (BOTH, "self.block_of_hash[block_hash] = block_id"),
    ),
)

LIMITED_RUNNING = RUNNING_LOOP + (
    "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.chunk_limit)\n"
)
LIMITED_ADMIT = ADMIT_LOOP + (
    "            self.running.append(seq)\n"
    "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.chunk_limit)\n"
)
CHUNK_LIMIT = (
    plant(
        "The larger of both is taken.",
        "The larger of budget and limit",
        (LIMITED_RUNNING, LIMITED_RUNNING.replace("budget, self.chunk_limit", "max(budget, self.chunk_limit)")),
        (LIMITED_ADMIT, LIMITED_ADMIT.replace("budget, self.chunk_limit", "max(budget, self.chunk_limit)")),
    ),
    plant(
        "The limit replaces the budget of a step.",
        "Decodes are limited too",
        ("budget, chunks = self.budget, []", "budget, chunks = min(self.budget, self.chunk_limit), []"),
    ),
    plant(
        "The limit is for the whole prompt.",
        "The limit counts the whole prompt",
        (
            LIMITED_RUNNING,
            LIMITED_RUNNING.replace("self.chunk_limit)", "max(1, self.chunk_limit - seq.num_computed_tokens))"),
        ),
    ),
    plant(
        "An admitted sequence goes to the end of `running`, also if its chunk is limited.",
        None,
        (LIMITED_ADMIT, LIMITED_ADMIT.replace("self.running.append(seq)", "self.running.insert(0, seq)")),
    ),
    plant(
        "The chunk is cut, but the budget pays for all of it.",
        "The budget pays for the whole prompt",
        (
            LIMITED_RUNNING
            + "            chunks.append((seq, num_new_tokens))\n            budget -= num_new_tokens\n",
            LIMITED_RUNNING + "            chunks.append((seq, num_new_tokens))\n"
            "            budget = max(0, budget - (seq.num_tokens - seq.num_computed_tokens))\n",
        ),
    ),
    plant(
        "The limit is one too small.",
        "The limit is one too small",
        (LIMITED_RUNNING, LIMITED_RUNNING.replace("self.chunk_limit", "max(1, self.chunk_limit - 1)")),
        (LIMITED_ADMIT, LIMITED_ADMIT.replace("self.chunk_limit", "max(1, self.chunk_limit - 1)")),
    ),
    plant(
        "Only one long prompt gets tokens in a step.",
        "One prompt in a step",
        (LIMITED_ADMIT, LIMITED_ADMIT.replace("while budget", "if budget")),
    ),
    plant(
        "The step ends where the limit was reached.",
        "Nothing is admitted after a limited chunk",
        (
            LIMITED_ADMIT + "            chunks.append((seq, num_new_tokens))\n            budget -= num_new_tokens\n",
            LIMITED_ADMIT + "            chunks.append((seq, num_new_tokens))\n            budget -= num_new_tokens\n"
            "            if num_new_tokens == self.chunk_limit:\n                break\n",
        ),
    ),
    plant(
        "Running sequences get one token.",
        "One token of each running sequence",
        (LIMITED_RUNNING, LIMITED_RUNNING.replace("self.chunk_limit", "1")),
    ),
    plant(
        "The limit is the same for each sequence, however many are running.",
        None,
        (
            LIMITED_ADMIT,
            LIMITED_ADMIT.replace("self.chunk_limit", "max(1, self.chunk_limit // max(1, len(self.running)))"),
        ),
    ),
)

POP_LAST = "            last = self.running.pop()\n"
PREEMPT = (
    plant(
        "The victim is not put back into the queue.",
        "The victim is lost",
        ("            self.waiting.appendleft(last)\n", ""),
    ),
    plant(
        "The victim stays in `running`.",
        "The victim stays in `running`",
        (POP_LAST, "            last = self.running[-1]\n"),
        ("            if last is seq:\n", "            if last is seq or len(self.waiting) > 8:\n"),
    ),
    plant(
        "The second victim is before the first: use the front of the queue.",
        "The victim goes to the end of the queue",
        ("self.waiting.appendleft(last)", "self.waiting.insert(1, last)"),
    ),
    plant(
        "All running sequences behind are preempted.",
        None,
        (
            "        while not self.block_manager.try_grow(seq):\n",
            "        while not self.block_manager.try_grow(seq) or (\n"
            "            self.num_preemptions and self.running[-1] is not seq and not self.block_manager.free\n"
            "        ):\n",
        ),
    ),
    plant(
        "The result is True although the sequence was preempted.",
        "A preempted sequence computes",
        ("                return False\n", "                return True\n"),
    ),
    plant(
        "The blocks of the wrong sequence are released.",
        "The wrong blocks are released",
        ("self.block_manager.release(last)", "self.block_manager.release(seq)"),
    ),
    plant(
        "The wrong sequence computes again.",
        "The wrong counter is reset",
        ("last.num_computed_tokens = 0", "seq.num_computed_tokens = 0"),
    ),
    plant(
        "A step that has preempted none admits none.",
        "The condition is inverted",
        ("return num_preempted == 0 and", "return num_preempted > 0 and"),
    ),
    plant(
        "The prompt counts as computed.",
        "The prompt counts as computed",
        (
            "last.num_computed_tokens = 0",
            "last.num_computed_tokens = min(last.num_computed_tokens, last.num_prompt_tokens)",
        ),
    ),
    plant(
        "The preemptions are counted once for the call.",
        "Preemptions are counted once for each call",
        ("            self.num_preemptions += 1\n", ""),
        (
            "        while not self.block_manager.try_grow(seq):\n",
            "        is_first = True\n        while not self.block_manager.try_grow(seq):\n"
            "            self.num_preemptions += is_first\n            is_first = False\n",
        ),
    ),
)

PADDED, WASTED = "max(lens) * len(lens) - sum(lens)", "wasted += max(batch) * batch_size - sum(batch)"
COUNT_PADDING = (
    plant("The tokens are counted, not the places without one.", None, (PADDED, "sum(lens)")),
    plant("Each row is padded, not one row of mean length.", None, (PADDED, "max(lens) - sum(lens) // len(lens)")),
    plant(
        "The longest row has places, too: all rows count.", None, (PADDED, "max(lens) * (len(lens) - 1) - sum(lens)")
    ),
    plant("Every row is padded to the sum.", None, (PADDED, "sum(lens) * (len(lens) - 1)")),
    plant(
        "The batch takes as long as its longest request, not as its last one.",
        "The last request counts as the longest",
        (WASTED, "wasted += batch[-1] * batch_size - sum(batch)"),
    ),
    plant(
        "The waste of the last batch only: add up all batches.",
        "Only the last batch is counted",
        (WASTED, "wasted = max(batch) * batch_size - sum(batch)"),
    ),
    plant(
        "A batch begins after the one before it, not one request later.",
        "Batches overlap",
        ("range(0, len(num_steps), batch_size)", "range(len(num_steps))"),
    ),
    plant(
        "All places are counted, also those that are used.",
        "Used places count as wasted",
        (WASTED, "wasted += max(batch) * batch_size"),
    ),
    plant(
        "The used places are divided by the requests, not by all places.",
        None,
        (
            "return used / (used + count_wasted_places(num_steps, batch_size))",
            "return used / (len(num_steps) * batch_size)",
        ),
    ),
    plant(
        "The share is a fraction from 0 to 1, not a whole number.",
        "The share is rounded down",
        ("return used / (used", "return used // (used"),
    ),
)

MERGED = "weight / total * value"
MERGE_PARTIALS = (
    plant(
        "The last part overwrites the others: add.",
        "Only the last part counts in the output",
        ("output[i] += ", "output[i] = "),
    ),
    plant("Each part is divided by its own weight.", None, (MERGED, "value / weight")),
    plant("The parts are added without weights.", "The parts are added without weights", (MERGED, "value")),
    plant(
        "The smallest s is subtracted: large differences overflow.",
        "The smallest s is subtracted",
        ("largest = max(", "largest = min("),
    ),
    plant(
        "The natural logarithm in place of that to base 2.",
        "The natural logarithm",
        ("math.log2(total)", "math.log(total)"),
    ),
    plant(
        "The sign of the exponent is wrong: the largest part gets the least.",
        "The exponent has the wrong sign",
        ("2 ** (s - largest) for", "2 ** (largest - s) for"),
    ),
    plant(
        "The sum is returned, not its logarithm.",
        "The sum instead of its logarithm",
        ("largest + math.log2(total)", "largest + total"),
    ),
    plant("The weights are divided by the number of parts.", None, (MERGED, "weight / len(parts) * value")),
    plant("Only the first two parts are merged.", None, ("if s > -math.inf]", "if s > -math.inf][:2]")),
    plant("The logarithm of a product is a sum: add the maximum.", None, ("largest + math", "largest * math")),
)

BUDGET = "budget = (target_us - fixed_us) // token_us"
BUDGET_FROM_ITL = (
    plant("A budget is a whole number of tokens: round down.", None, (BUDGET, BUDGET.replace("//", "/"))),
    plant("The fixed time is added to the target.", "The fixed time is added", (BUDGET, BUDGET.replace("-", "+"))),
    plant(
        "The fixed time is paid once for each step, not for each token.",
        "The fixed time for each token",
        (BUDGET, "budget = target_us // (fixed_us + token_us)"),
    ),
    plant(
        "The time of the decodes is subtracted: they are part of the budget.",
        "The chunk instead of the budget",
        (BUDGET, "budget = (target_us - fixed_us - num_decodes * token_us) // token_us"),
        ("budget if budget > num_decodes else", "budget if budget > 0 else"),
    ),
    plant("The answer without room is 0 in place of None.", "0 instead of None", ("else None", "else 0")),
    plant(
        "The room is the budget with the decodes added.",
        "Decodes take no budget",
        ("room = budget - num_decodes", "room = budget + num_decodes"),
    ),
    plant(
        "A part of a step does not exist: round up.",
        "The steps are not a whole number",
        ("return -(-prompt_len // room)", "return prompt_len / room"),
    ),
    plant(
        "The decodes are counted once, not in each step.",
        "The decodes are counted once",
        ("num_steps * num_decodes", "num_decodes"),
    ),
    plant("The fixed time is forgotten.", "TTFT without the fixed time", ("num_steps * fixed_us + (", "(")),
    plant(
        "Each step computes the decodes: multiply the steps by them.",
        None,
        ("(prompt_len + num_steps * num_decodes)", "(prompt_len + num_steps + num_decodes)"),
    ),
)

HOST_CHECK = "        if num_host > len(self.host_free):\n            return False\n"
SWAP = (
    plant(
        "A sequence that fits exactly is refused.",
        "Host memory that suffices exactly is refused",
        ("num_host > len(self.host_free)", "num_host >= len(self.host_free)"),
    ),
    plant(
        "The free blocks of the device are compared.",
        "The wrong memory is checked",
        ("num_host > len(self.host_free)", "num_host > len(self.free)"),
    ),
    plant(
        "The copies are not noted.",
        "The blocks are released before they are noted",
        ("        self.swap_outs += zip(seq.block_table, host_table)\n", ""),
    ),
    plant(
        "The copies back are not noted.",
        "Nothing is copied back",
        ("        self.swap_ins += zip(host_table, seq.block_table)\n", ""),
    ),
    plant(
        "The sequence does not know its host blocks.",
        "The host table is lost",
        ("        self.host_tables[seq] = host_table\n", "        self.host_tables[seq] = []\n"),
    ),
    plant(
        "The computed tokens are forgotten when they come back.",
        "The counter is reset",
        (
            "        self.host_free += host_table\n",
            "        self.host_free += host_table\n        seq.num_computed_tokens = 0\n",
        ),
    ),
    plant(
        "Source and destination of the way back are swapped.",
        "The way back is swapped",
        ("zip(host_table, seq.block_table)", "zip(seq.block_table, host_table)"),
    ),
    plant(
        "The copies of earlier sequences are lost.",
        "Earlier copies are lost",
        (
            "        self.swap_outs += zip(seq.block_table, host_table)\n",
            "        self.swap_outs = list(zip(seq.block_table, host_table))\n",
        ),
    ),
    plant(
        "A sequence without enough blocks has lost its host table.",
        "The host table is lost when blocks are short",
        (
            "        if num_new > len(self.free):\n            return False\n",
            "        host_table = self.host_tables.pop(seq)\n"
            "        if num_new > len(self.free):\n            return False\n",
        ),
        ("        host_table = self.host_tables.pop(seq)\n        self.swap_ins", "        self.swap_ins"),
    ),
    plant(
        "The host blocks are taken although they do not suffice.",
        None,
        (HOST_CHECK, ""),
        (
            "[self.host_free.pop() for _ in range(num_host)]",
            "[self.host_free.pop() for _ in range(num_host) if self.host_free]",
        ),
        (
            "        self.swap_outs +=",
            "        if len(host_table) < num_host:\n            return False\n        self.swap_outs +=",
        ),
    ),
)

CLASSIC: dict[str, tuple[Planted, ...]] = {
    "generation_loop": GENERATION_LOOP,
    "attend_with_cache": ATTEND_WITH_CACHE,
    "step_time": STEP_TIME,
    "schedule": SCHEDULE,
    "block_diagonal_mask": BLOCK_DIAGONAL_MASK,
    "grow_table": GROW_TABLE,
    "release_blocks": RELEASE_BLOCKS,
    "admit_whole": ADMIT_WHOLE,
    "attend_to_blocks": ATTEND_TO_BLOCKS,
    "fork": FORK,
    "copy_on_write": COPY_ON_WRITE,
    "hash_chain": HASH_CHAIN,
    "revive_blocks": REVIVE_BLOCKS,
    "register_blocks": REGISTER_BLOCKS,
    "chunk_limit": CHUNK_LIMIT,
    "preempt": PREEMPT,
    "count_padding": COUNT_PADDING,
    "merge_partials": MERGE_PARTIALS,
    "budget_from_itl": BUDGET_FROM_ITL,
    "swap": SWAP,
}
