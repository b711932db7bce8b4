"""Speculation: a step computes several tokens of a sequence that decodes, all but the first of them guessed.

A decode reads all weights for one token; reading them for four costs hardly more. So a `Proposer` guesses the next
tokens, the *drafts*. They are put behind the known tokens, and the step computes them like a chunk of a prompt, with a
row of logits for each. The row of each token draws the next one, as if the draft were known:

    position        6      7      8      9      tokens up to position 6 are known: d1 d2 d3 are drafts
    the step runs   t6     d1     d2     d3     one forward pass, four rows
    its rows draw   t7     t8     t9     t10    t7 = d1, t8 = d2, but t9 is not d3
    kept            t7     t8     t9            t10 was drawn after the wrong d3, and is dropped

**Outputs are exactly those without speculation.** If t7 is d1, the row of d1 has computed what the next step would
compute. It draws with the random number of (seed, position), as that step would. So t8 is the token that the next
step would draw, bit for bit where rows do not depend on the batch; and by the same argument t9. The first draft that
differs ends the argument, and nothing behind it is used. No rule of acceptance is needed: a guess is checked.

Who gets no drafts: sequences whose next logits depend on more than their tokens (a grammar, a beam search, functions of
the user); steps that compute prompts, or whose tokens would be more than `max_rows`; steps that are launched ahead
(`pending.py`); sequences that `patience.py` gives up on. Drafts end before a token that would end the sequence, and
where a snapshot of a recurrent state is due (`memory/slots.py`).
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.logits import BadWords, Penalties
from nanovllm_extras.sampling.thinking_budget import ThinkingBudget
from nanovllm_extras.scheduling.patience import Patience
from nanovllm_extras.scheduling.pending import Drafts, forget_unknown, place_drafts

if TYPE_CHECKING:
    from nanovllm_extras.requests.full_request import Request


FROM_TOKENS = (BadWords, Penalties, ThinkingBudget)
"""Processors that read the output, and nothing else that changes."""


class Proposer(Protocol):
    """Proposes draft tokens. Wrong drafts cost time but never change the output."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each (sequence, most drafts): tokens that may follow its known ones, possibly none."""


class Drafter:
    """Decides which sequences get drafts, and compares them with what is drawn.

    `max_rows` bounds the tokens of a step that has drafts, `max_seqs` its sequences, `max_drafts` those of one.
    `requests` are the engine's: their stop strings end drafts.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_drafts: int,
        max_rows: int,
        max_seqs: int,
        vocab_size: int,
        requests: "Mapping[str, Request] | None" = None,
    ) -> None:
        self.proposer = proposer
        self.max_drafts = max_drafts
        self.max_rows = max_rows
        self.max_seqs = max_seqs
        self.vocab_size = vocab_size
        self.requests = {} if requests is None else requests
        self.make_patience: Callable[[float], Patience] = Patience
        self._patience: dict[Sequence, Patience] = {}

    # ---- before a step

    def draft(self, blocks: BlockManager, running: list[Sequence], may_admit: bool) -> Drafts:
        """Put drafts after the known tokens of running sequences. may_admit: the step may admit a waiting one"""
        drafts: Drafts = {}
        wanted = self._choose(blocks, running, may_admit)
        if not wanted or not blocks.has_room_for_drafts(running, dict(wanted)):
            return drafts
        all_proposed = self.proposer.propose(wanted)
        if not any(all_proposed):
            return drafts
        for (seq, count), proposed in zip(wanted, all_proposed, strict=True):
            if allowed := self._allow(seq, proposed[:count]):
                place_drafts(seq, allowed)
                drafts[seq] = allowed
                if blocks.states is not None:
                    blocks.states.take_for_drafts(seq, len(allowed))
            num_slots = len(seq.block_table) * blocks.block_size
            if num_slots - seq.num_tokens >= blocks.block_size:  # a draft model has reserved too many
                blocks.observer.on_verify(seq, 0, 0, blocks.rewind(seq, seq.num_tokens))
        return drafts

    def rests(self, running: list[Sequence], may_admit: bool) -> bool:
        """Return whether no running sequence could get drafts in the next step."""
        if not self._has_room(running, may_admit):
            return True
        if any([seq.num_tokens - seq.num_computed_tokens > 1 for seq in running]):  # no drafts beside prompts
            return True
        return all([self._patience_with(seq).is_pausing for seq in running])

    def skip(self, running: list[Sequence], may_admit: bool) -> None:
        """Note that the next step, which is launched ahead, has no drafts."""
        if self._has_room(running, may_admit):
            for seq in running:
                self._patience_with(seq).next_count()

    def _choose(self, blocks: BlockManager, running: list[Sequence], may_admit: bool) -> list[tuple[Sequence, int]]:
        """Return the sequences that are worth drafts, and how many each may have in this step."""
        if not self._has_room(running, may_admit):
            return []
        wanted = []
        for seq in running:
            if seq.num_tokens - seq.num_computed_tokens > 1:  # a step with prompts has many tokens
                return []
            earned = self._patience_with(seq).next_count()
            if earned:
                count = min(earned, self.max_drafts, seq.max_num_tokens - seq.num_known_tokens - 1)
                if count > 0:
                    wanted.append((seq, count))
        room = self.max_rows - len(running)
        share = room // len(wanted) if wanted else room
        if share < self.max_drafts:
            wanted = [(seq, min(count, max(1, share))) for seq, count in wanted[:room]]
        return wanted if blocks.states is None else with_slots(blocks.states, running, wanted)

    def _has_room(self, running: list[Sequence], may_admit: bool) -> bool:
        """Return whether the next step could have drafts besides the running sequences."""
        return not may_admit and len(running) < self.max_rows and len(running) <= self.max_seqs

    def _patience_with(self, seq: Sequence) -> Patience:
        patience = self._patience.get(seq)
        if patience is not None:
            return patience
        if seq.children:  # they will share its blocks, and these must hold no drafts
            return self.make_patience(math.inf)
        patience = self._patience[seq] = self.make_patience(0 if can_be_guessed(seq) else math.inf)
        return patience

    def _allow(self, seq: Sequence, proposed: list[int]) -> list[int]:
        """Return the drafts before the first one that would end the sequence or is outside the vocabulary."""
        for i, token_id in enumerate(proposed):
            if token_id in seq.all_stop_token_ids or not 0 <= token_id < self.vocab_size:
                proposed = proposed[:i]
                break
        if not seq.sampling_params.stop_strings or not proposed:
            return proposed
        request = self.requests.get(seq.request_id)
        return [] if request is None else before_stop_string(request, seq, proposed)

    # ---- after a step

    def verify(self, blocks: BlockManager, seq: Sequence, drafts: list[int], drawn: list[int]) -> int:
        """Return how many drafts were right. The sequence drops all drafts; correct ones are appended as usual."""
        if seq.finish_reason is not None:  # it has failed, and owns nothing
            return 0
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == drawn[num_accepted]:
            num_accepted += 1
        forget_unknown(seq)
        seq.num_computed_tokens -= len(drafts) - num_accepted
        given_back = blocks.rewind(seq, seq.num_computed_tokens)
        self._patience[seq].note(len(drafts), num_accepted)
        blocks.observer.on_verify(seq, len(drafts), num_accepted, given_back)
        if blocks.states is not None:
            blocks.states.rewind(seq, num_accepted)
        return num_accepted

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._patience.pop(seq, None)


def with_slots(
    states: Slots, running: list[Sequence], wanted: list[tuple[Sequence, int]]
) -> list[tuple[Sequence, int]]:
    """Return at most as many drafts as there are slots for states, and none beyond a snapshot."""
    room = states.num_free_slots - sum([len(seq.children) for seq in running])  # they may start in this step
    chosen = []
    for seq, count in wanted:
        count = min(count, states.next_cut(seq) - seq.num_tokens, room)
        if count > 0:
            chosen.append((seq, count))
            room -= count
    return chosen


def can_be_guessed(seq: Sequence) -> bool:
    """Return whether the logits after a draft follow from the tokens before it.

    Penalties, bad words and a budget of reasoning read the output, which `as_if` provides. A grammar keeps a state, a
    beam search chooses otherwise, and a logits processor of the user may do both: their sequences get no drafts.
    """
    return all([not processor.reads_output or isinstance(processor, FROM_TOKENS) for processor in seq.processors])


def before_stop_string(request: "Request", seq: Sequence, drafts: list[int]) -> list[int]:
    """Return the drafts before the one that would complete a stop string, which may only be a step's last token.

    The text is grown by a copy of the request's detokenizer.
    """
    completion = request.completions[seq.sample_index]
    if len(completion.token_ids) != seq.num_output_tokens:  # a step has failed before the newest token was read
        return []
    detokenizer = completion.detokenizer.copy()
    for i, token_id in enumerate(drafts):
        detokenizer.append(token_id)
        if detokenizer.stop_string is not None:
            return drafts[:i]
    return drafts
