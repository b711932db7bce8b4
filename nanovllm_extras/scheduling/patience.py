"""How many drafts is a sequence worth? As many as its last ones have earned.

A draft that is wrong costs a row of the forward pass. So a sequence begins with two drafts, gets twice as many when all
were right, and one more than were right when not all were. After a verification that keeps none, it gets none for a
while, and for longer each time; each draft that is kept makes up for one such failure:

    drafts      2    4    8    8    8    2         a text that repeats, until it goes on otherwise
    kept        2    4    8    8    1    0
    drafts      2    1    1    1    …              a text that only seems to repeat
    tokens        1    3    7    15   … up to 63   drawn without drafts in between
"""

FIRST = 2
MAX_FAILURES = 6


class Patience:
    """The patience with one sequence. `pause`: how many tokens are sampled before its first drafts, 0 or infinity."""

    def __init__(self, pause: float) -> None:
        self._most = FIRST
        self._num_failures = 0
        self._pause = pause

    @property
    def is_pausing(self) -> bool:
        """Whether the next token has no drafts."""
        return self._pause > 1

    def next_count(self) -> int:
        """Return the most drafts for the next token. Called once for each token that could have drafts."""
        if self._pause:
            self._pause -= 1
            if self._pause:
                return 0
        return self._most

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Record the result of verification."""
        self._most = max(self._most, 2 * num_drafts) if num_accepted == num_drafts else num_accepted + 1
        if num_accepted:
            self._num_failures = max(0, self._num_failures - num_accepted)
        else:
            self._num_failures = min(MAX_FAILURES, self._num_failures + 1)
            self._pause = 2**self._num_failures
