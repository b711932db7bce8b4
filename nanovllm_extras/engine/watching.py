"""`Observers`: an engine's statistics, and what looks on: a user's observer, a recording, the causes of prefix misses.

An engine that nothing watches has only its statistics as its observer. Otherwise `assembly.py` makes an `Observers`.

An observer only looks on. So whatever it raises, a full disk or a bug, costs the engine nothing: the error is logged
once, the observer is notified no more, and `EngineStats.num_failed_observers` counts it.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from nanovllm_extras.records.full_observer import SchedulingStats

logger = logging.getLogger(__name__)


class Observers:
    """Passes each event on to `stats`, then to each of `watchers` until that one fails, and last to `explanation`.

    `explanation` is a part of the engine (`prefix_misses.py`), so its errors are raised. It is last because it notifies
    the others of what it has found. An observer needs methods only for the events that it is to be notified of.
    """

    def __init__(self, stats: SchedulingStats, watchers: Iterable[object] = (), explanation: object = None) -> None:
        self.stats = stats
        self.watchers = list(watchers)
        self.explanation = explanation

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return the method for the event `name`. Python calls this when it finds no attribute of that name."""
        if not name.startswith("on_"):
            raise AttributeError(f"Observers has no attribute {name!r}")
        vars(self)[name] = method = partial(self._pass_on, name)  # found by the next call
        return method

    def _pass_on(self, event: str, *arguments: object) -> None:
        getattr(self.stats, event)(*arguments)
        for watcher in self.watchers:
            try:
                notify(watcher, event, arguments)
            except Exception:
                self._drop(watcher, event)
        notify(self.explanation, event, arguments)

    def _drop(self, watcher: object, event: str) -> None:
        """Notify `watcher`, whose method for `event` has just raised, no more."""
        logger.exception("%s has failed in %s, and is told no more", type(watcher).__name__, event)
        self.watchers = [one for one in self.watchers if one is not watcher]
        self.stats.count_failed_observer()

    def blocks_in_flight(self) -> set[int]:
        return self.stats.blocks_in_flight()


def notify(observer: object, event: str, arguments: tuple[object, ...]) -> None:
    """Call the method of `observer` for `event`, if it has one."""
    method = getattr(observer, event, None)
    if method is not None:
        method(*arguments)
