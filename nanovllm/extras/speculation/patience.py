"""Which sequences are worth drafts? Those whose drafts have been right.

A draft that is wrong costs a row of the forward pass. After a verification that keeps none of its drafts, a sequence
gets none for a while, and for longer each time. Each draft that is kept makes up for one such failure:

    kept       0    0    0    0    …             the sequence whose text only seems to repeat
    tokens       1    3    7    15   … up to 63  drawn without drafts before the next try
"""

MAX_FAILURES = 6


class Patience:
    """Of one sequence."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause = 0  # tokens to be drawn before the next drafts

    def wants_drafts(self) -> bool:
        """Asked once for each token that could be drafted for."""
        self._pause -= self._pause > 0
        return self._pause == 0

    def note(self, num_accepted: int) -> None:
        """The sequence's drafts have been verified."""
        if num_accepted:
            self._num_failures = max(0, self._num_failures - num_accepted)
        else:
            self._num_failures = min(MAX_FAILURES, self._num_failures + 1)
            self._pause = 2**self._num_failures
