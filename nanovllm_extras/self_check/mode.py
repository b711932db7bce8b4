"""Is a runner checked at all? Not if the user has switched the check off, or if a start before has checked the same."""

import os
from functools import partial
from typing import TYPE_CHECKING

from nanovllm.checks import check_choice
from nanovllm.layers.attention import BackendError
from nanovllm_extras.execution.device_setup import Device, Unchecked
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.self_check.comparison import has_kernels
from nanovllm_extras.self_check.stored_results import StoredResult

if TYPE_CHECKING:
    from nanovllm_extras.options.all_options import Config

FIELD_CHECKS = {"self_check": partial(check_choice, allowed=("on", "off", "strict"))}


def mode_of(config: "Config | None") -> str:
    """Return the mode of the self-check: the option `self_check`, or the variable NANOVLLM_SELF_CHECK, or `on`.

    `config` None is that of `nanovllm.LLM`, which does not have the option.
    """
    option = None if config is None else config.self_check
    mode = option or os.environ.get("NANOVLLM_SELF_CHECK") or "on"
    check_choice("NANOVLLM_SELF_CHECK", mode, ("on", "strict", "off"))
    return mode


def raise_if_strict(error: BackendError) -> None:
    """Raise an error that makes `nanovllm.LLM` take no other backend, if the mode is `strict`."""
    if mode_of(None) == "strict":
        raise RuntimeError(str(error)) from error


def begin(runner: Runner, kind: Device) -> Unchecked:
    """Return the check of a runner that has chosen its backend, or one that does nothing, if there is nothing to check.

    Raises SelfCheckError if this backend has failed on this machine before.
    """
    if mode_of(runner.config) == "off" or not (kind.draw or has_kernels(runner)):
        return Unchecked()
    stored = StoredResult(runner)
    known = stored.read()
    if known is None:
        from nanovllm_extras.self_check.state_check import begin_check  # later starts do without all these modules

        return begin_check(runner, kind, stored)
    if not known.is_right:
        raise SelfCheckError(f"{known.reason}; found on {known.date}; delete {stored.path} to check again")
    return Unchecked()
