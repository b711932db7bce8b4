"""Drafts by looking them up: what followed the newest tokens when they occurred before?

Answers repeat their questions: a quotation, a summary, code with one change. With `shortest` 2 and `longest` 3:

    tokens     the key of a block : the key of        the newest three, "the key of", occurred before
    drafts                                 a block :  what followed them then

The longest run of newest tokens that has occurred before decides, and of its places the last. It costs about two
microseconds to find out that nothing repeats.
"""

from nanovllm_extras.records.full_sequence import Sequence

TOKEN_BYTES = 4  # of an int32 in `Sequence.token_ids`


class NGrams:
    """A `Proposer` without state, so it needs no care at preemptions, forks and prefix hits."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._look_up(seq, count) for seq, count in wanted]

    def _look_up(self, seq: Sequence, count: int) -> list[int]:
        known = seq.token_ids
        if len(known) <= self.shortest:
            return []
        text = known.tobytes()
        place = find_last(text, self.shortest)
        if place < 0:
            return []
        for length in range(min(self.longest, len(known) - 1), self.shortest, -1):
            longer = find_last(text, length)
            if longer >= 0:
                place = longer
                break
        # what follows may reach the end of the known tokens: then the text goes round, as it seems to
        following = known[place:].tolist()
        return [following[i % len(following)] for i in range(count)]


def find_last(text: bytes, length: int) -> int:
    """Return the position after the last earlier occurrence of the last `length` tokens of `text`, or -1.

    text: int32 token ids. A search in bytes is the fastest that Python has; it may stop at half a token.
    """
    pattern = text[-length * TOKEN_BYTES :]
    end = len(text) - TOKEN_BYTES  # exclusive; the place may overlap with the newest tokens
    while (at := text.rfind(pattern, 0, end)) >= 0:
        if at % TOKEN_BYTES == 0:
            return at // TOKEN_BYTES + length
        end = at + len(pattern) - 1
    return -1
