"""`speculative_config`: what a user may set, by vLLM's names. `start_speculation.py` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanovllm.checks import check_int
from nanovllm_extras.options.option_checks import check_dict, check_optional_str

METHODS = ("ngram", "draft_model", "mtp")
DEFAULT_LOOKUP = 5  # tokens, as in vLLM
MAX_DRAFTED_ROWS = 64  # of a step with drafts, each of which is a row


@dataclass(frozen=True)
class Speculation:
    """A bad value raises a TypeError or ValueError that names the field, the value and what is allowed."""

    method: Any = None
    """`ngram`, `draft_model`, `mtp`, or an object with the method of `Proposer` (`scheduling/drafter.py`). None is
    `draft_model` if there is a `model`."""
    num_speculative_tokens: Any = None
    """Most drafts for one sequence in a step."""
    prompt_lookup_max: int | None = None
    """The longest n-gram that `ngram` looks for earlier in the sequence; None is the minimum, or 5."""
    prompt_lookup_min: int | None = None
    """The shortest n-gram that `ngram` looks for; None is the maximum, or 5."""
    model: str | Path | None = None
    """Of `draft_model`: a folder, or a hub id. It must have the vocabulary of the model that it drafts for."""
    disable_by_batch_size: int | None = None
    """No drafts while more sequences run. None measures at the start how many tokens a step verifies almost for
    nothing, and lets the tokens of a step, drafts included, be no more than that."""

    def __post_init__(self) -> None:
        if isinstance(self.method, type) and not callable(getattr(self.method, "propose", None)):
            raise TypeError(f"proposer_cls must have a method propose, got {self.method!r}")
        if self.method not in METHODS and not hasattr(self.method, "propose"):
            allowed = "'ngram', 'draft_model', 'mtp' or an object with a method propose"
            raise ValueError(f"speculative_config['method'] must be {allowed}, got {self.method!r}")
        check_int(name_of("num_speculative_tokens"), self.num_speculative_tokens, 1, maximum=64)
        for name in ("prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"):
            check_int(name_of(name), getattr(self, name), 1, optional=True)
        check_optional_str(name_of("model"), self.model, or_path=True)
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                f"speculative_config['model'] and the method 'draft_model' go together, "
                f"got {self.model!r} and {self.method!r}"
            )
        shortest, longest = self.lookup
        if shortest > longest:
            raise ValueError(
                f"speculative_config['prompt_lookup_min'] must be at most prompt_lookup_max {longest}, got {shortest}"
            )

    @property
    def lookup(self) -> tuple[int, int]:
        """Return the (fewest, most) tokens that `ngram` looks for."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        return shortest or longest or DEFAULT_LOOKUP, longest or shortest or DEFAULT_LOOKUP


def name_of(field: str) -> str:
    return f"speculative_config[{field!r}]"


def read_options(given: Mapping[str, Any]) -> Speculation:
    """Parse and check the options. Raises TypeError with the legal names for an unknown name."""
    legal = [field.name for field in fields(Speculation)]
    for name in given:
        if name not in legal:
            raise TypeError(f"speculative_config has no key {name!r}; legal are {', '.join(legal)}")
    options = dict(given)
    if options.get("method") is None and options.get("model") is not None:
        options["method"] = "draft_model"
    return Speculation(**options)


def check_speculation(name: str, value: Mapping[str, object]) -> None:
    check_dict(name, value)
    read_options(value)


FIELD_CHECKS = {"speculative_config": check_speculation}
