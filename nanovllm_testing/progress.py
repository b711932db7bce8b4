"""Does a run go on? Steps that compute nothing, although requests have not finished, are allowed for a while only."""

import time

from nanovllm_testing.violation import Violation

MAX_IDLE_STEPS = 20
NAP_S = 0.001


class Progress:
    """Counts steps that compute nothing.

    patience_s: how long they may go on, for a scheduler that waits for the clock. Otherwise the limit is a number.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self.num_idle_steps = 0  # since the last step that has computed something
        self.num_all_idle_steps = 0
        self._since = time.monotonic()

    def note(self, has_computed: bool, unfinished: str, max_idle_steps: int = MAX_IDLE_STEPS) -> None:
        """Note a step, and raise Violation if there have been too many without progress. unfinished: their names"""
        if has_computed or not unfinished:
            self.num_idle_steps, self._since = 0, time.monotonic()
            return
        self.num_idle_steps += 1
        self.num_all_idle_steps += 1
        if self.num_idle_steps <= max_idle_steps:
            return
        if time.monotonic() - self._since > self.patience_s:
            raise Violation(
                f"{self.num_idle_steps} steps in a row compute nothing, but these have not finished: {unfinished}. If "
                f"the scheduler waits for the clock, say how long: --patience SECONDS"
            )
        time.sleep(NAP_S)
