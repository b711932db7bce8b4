"""Whether a runner is checked at all: the option `self_check`, or the variable NANOVLLM_SELF_CHECK."""

import os
from typing import TYPE_CHECKING

from nanovllm.checks import check_choice
from nanovllm.extras.all_options import Config
from nanovllm.extras.runner_hooks import Unchecked

if TYPE_CHECKING:
    from nanovllm.extras.full_runner import ModelRunner


def mode_of(config: Config) -> str:
    """Return the mode of the self-check: the option `self_check`, or the variable NANOVLLM_SELF_CHECK, or `on`."""
    mode = config.self_check or os.environ.get("NANOVLLM_SELF_CHECK") or "on"
    check_choice("NANOVLLM_SELF_CHECK", mode, ("on", "strict", "off"))
    return mode


def begin(runner: "ModelRunner") -> Unchecked:
    """Return the self-check of a runner that has chosen its backend."""
    if mode_of(runner.config) == "off":
        return Unchecked()
    from nanovllm.extras.self_check.runner_check import begin

    return begin(runner)
