"""A model runner of one's own (`runner_cls`), which extends the core's, in the engine with everything.

Its methods come first, and `super()` in them is the runner of this package:

    class Combined(Yours, full_runner.ModelRunner)

So a runner may override what both runners call in the same way. Of the rest, `nanovllm.LLM` has what this runner does
in another way, and a class that overrides it is refused by name.
"""

from typing import Any

from nanovllm import model_runner
from nanovllm_extras.execution.full_runner import ModelRunner

SHARED = ("find_network", "make_model", "forward", "make_metadata", "metadata_cls")
"""What a runner may override here."""


def combine(own: type[model_runner.ModelRunner]) -> type[ModelRunner]:
    """Return a runner of this package with the methods of `own`. ValueError for a method that only the core calls."""
    if issubclass(own, ModelRunner):
        return own
    core: Any = model_runner.ModelRunner
    for kind in own.__mro__[: own.__mro__.index(core)]:
        for name in vars(kind):
            if hasattr(core, name) and name not in SHARED and not name.startswith("__"):
                raise ValueError(
                    f"runner_cls {own.__name__} overrides {name}, which the engine of nanovllm_extras does otherwise: "
                    f"use nanovllm.LLM, or override only {', '.join(SHARED)}"
                )
    return type(own.__name__, (own, ModelRunner), {"__module__": own.__module__})
