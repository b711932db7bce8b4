"""Search for the shortest run that fails: try simpler variants of a case, and go on from each that still fails."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar


class Shrinkable(Protocol):
    """A case, for example `Traffic`."""

    @property
    def size(self) -> Any: ...

    def is_valid(self) -> bool: ...

    def simpler(self) -> Iterator[Any]: ...


Case = TypeVar("Case", bound=Shrinkable)


def shrink(case: Case, num_steps_until: Callable[[Case], int | None], seconds: float = 10) -> Case:
    """Return a case that fails after the fewest steps and, of those, has the least in it.

    A case that fails only now and then is returned as it is.

    num_steps_until: the number of steps after which a case fails, None if it does not fail
    seconds: limits the search, which otherwise ends when no simpler variant fails
    """
    deadline = time.monotonic() + seconds
    num_steps = num_steps_until(case)
    if num_steps is None:  # it fails only now and then, so nothing can be learned from variants
        return case
    best = num_steps, case.size
    is_shrinking = True
    while is_shrinking:
        is_shrinking = False
        for simpler in case.simpler():
            if time.monotonic() > deadline:
                return case
            if simpler == case or not simpler.is_valid():
                continue
            num_steps = num_steps_until(simpler)
            if num_steps is not None and (num_steps, simpler.size) < best:
                case, best, is_shrinking = simpler, (num_steps, simpler.size), True
                break
    return case
