"""The error of a check, in words that a user of the package reads without its code."""


class Violation(AssertionError):
    """Raised if something does not hold that must hold for every part of an engine."""


class Hang(Violation):
    """Raised if a run does not end within its time."""


def require(condition: object, message: str) -> None:
    """Raise a Violation with `message` unless `condition` holds. Unlike `assert`, it also runs with `python -O`."""
    if not condition:
        raise Violation(message)
