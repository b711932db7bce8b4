"""The times of a step's parts, and of the parts of the start."""

import time


class LapClock:
    """Seconds of each part: `lap(name)` ends a part. Parts of the same name add up.

    `now` is the last reading, in seconds of `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.now = time.monotonic()

    def lap(self, name: str) -> None:
        before, self.now = self.now, time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now - before

    def resume(self) -> None:
        """Restart the clock without charging the elapsed time to any part."""
        self.now = time.monotonic()
