"""Make the engine of one side of a comparison: the unchanged one, or one with an extension.

Both packages count what a comparison needs. The core does not count the slots of its KV cache, so its observer is
replaced here by one that does; it decides nothing.
"""

from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import nanovllm
from nanovllm import config, engine, observer, sequence
from nanovllm.scheduler import Step
from nanovllm_extras.records.full_observer import count_stored_tokens

if TYPE_CHECKING:
    from nanovllm.block_manager import BlockManager

PACKAGES = ("nanovllm", "nanovllm_extras")


@dataclass
class SlotStats(observer.Stats):
    """Counts as the core's observer, and the slots of the KV cache as the observer of the extras."""

    kv_tokens_stored: int = 0
    kv_slots_reserved: int = 0

    def on_schedule(self, step: Step, running: list[sequence.Sequence], blocks: "BlockManager") -> None:
        super().on_schedule(step, running, blocks)
        if step.chunks:  # else no step is run
            self.kv_tokens_stored += count_stored_tokens(running, blocks)
            self.kv_slots_reserved += blocks.num_used_blocks * blocks.block_size


def make_engine(package: str, model: str, options: dict[str, Any], extension: str | None, stack: ExitStack) -> Any:
    """Return the engine of a package. `stack` stops what the engine has started.

    extension: the file of the extension, or None for the unchanged engine.
    """
    if extension is not None:
        options = {**options, "extension": extension}
    if package == "nanovllm":
        made = engine.LLMEngine(config.Config(model, **options))
        made.stats = SlotStats()
        made.reset()  # makes a scheduler and a block manager with this observer
        return made
    import nanovllm_extras

    return stack.enter_context(nanovllm_extras.LLM(model, **options)).engine


def make_params(package: str, num_tokens: int, temperature: float, seed: int, extra_args: dict[str, Any]) -> Any:
    """Return the parameters of a request that generates exactly `num_tokens` tokens."""
    values: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": num_tokens, "ignore_eos": True}
    if extra_args:
        values["extra_args"] = extra_args
    if package == "nanovllm":
        return nanovllm.SamplingParams(**values)
    import nanovllm_extras

    return nanovllm_extras.SamplingParams(**values)


def core_option_names() -> set[str]:
    """Return the names of the options that the core has."""
    return {one.name for one in fields(config.Config)}
