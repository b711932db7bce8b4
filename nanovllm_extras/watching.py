"""`Watching`: the engine's statistics, and an observer of the user's beside them, which may fail.

An observer only looks on. So whatever it raises, a full disk or a bug, costs the engine nothing: the error is logged
once, the observer is told no more, and `EngineStats.num_failed_observers` counts it. Made by `LLMEngine` when it is
given an observer, such as `nanovllm_extras/trace/recorder.py`'s.
"""

import logging
from collections.abc import Callable
from typing import Any

from nanovllm_extras.full_observer import Observer, SchedulingStats

logger = logging.getLogger(__name__)


class Watching(SchedulingStats):
    """Counts as its parent does, and passes everything on to `watcher` until that fails."""

    def __init__(self, watcher: Observer) -> None:
        super().__init__()
        self.watcher: Observer | None = watcher

    def pass_on(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.watcher is None:
            return
        try:
            getattr(self.watcher, name)(*arguments)
        except Exception:
            logger.exception("%s has failed in %s, and is told no more", type(self.watcher).__name__, name)
            self.watcher = None
            self.count_failure()

    def count_failure(self) -> None:
        self.num_failed_observers += 1


def counting_and_passing_on(name: str) -> Callable[..., None]:
    """Return the method `name` of `Watching`."""
    count = getattr(SchedulingStats, name)

    def method(self: Watching, *arguments: Any) -> None:
        count(self, *arguments)
        self.pass_on(name, arguments)

    return method


for event in [name for name in dir(Observer) if name.startswith("on_")]:
    setattr(Watching, event, counting_and_passing_on(event))
