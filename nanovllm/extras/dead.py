"""`EngineDeadError`: what a call on an engine raises that cannot serve any more. Such an engine has to be made anew."""


class EngineDeadError(RuntimeError):
    """The engine has been shut down, or has failed and cannot recover."""
