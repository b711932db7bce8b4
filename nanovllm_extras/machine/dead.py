"""`EngineDeadError` is raised by calls on an engine that can no longer serve. Make a new engine instead."""


class EngineDeadError(RuntimeError):
    """The engine has been shut down, or has failed and cannot recover."""


def forked(parent: int) -> EngineDeadError:
    """Return the error for a process that was forked from the process `parent` after an engine was made there."""
    return EngineDeadError(
        f"this process was forked from process {parent} after an engine was made there, so no engine works here: "
        f"use multiprocessing.get_context('spawn'), or make the first engine after the fork"
    )
