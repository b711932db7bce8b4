"""The option `quantization`: its values and checks. `config.py` calls the checks, `quantise.py` reads the option."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checks import check_choice
from nanovllm_extras.models.network_config import NetworkConfig

METHODS = {"int8": 8, "int4": 4}  # bits
STORED = ("awq", "gptq", "compressed-tensors", "fp8")  # formats of checkpoints, which vLLM accepts as values too
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """The options of quantisation. Raises TypeError or ValueError for a value that is not allowed."""

    method: Any = None
    """`int8` (a scale for each output) or `int4` (a scale for each group of inputs of each output)."""
    group_size: int = 128
    """Number of inputs that share a scale, also in a token's activations: 32, 64 or 128."""
    embeddings: Any = True
    """How to quantise the token embeddings and the output layer: `int8` or True, `int4`, or False for not at all."""

    def __post_init__(self) -> None:
        check_choice("quantization['method']", self.method, tuple(METHODS))
        check_choice("quantization['group_size']", self.group_size, GROUP_SIZES)
        if not isinstance(self.embeddings, bool) and self.embeddings not in tuple(METHODS):
            legal = ", ".join(METHODS)
            raise ValueError(f"quantization['embeddings'] must be True, False, {legal}, got {self.embeddings!r}")

    @property
    def bits(self) -> int:
        return METHODS[self.method]

    @property
    def embedding_bits(self) -> int:
        """Return the bits of embeddings, or 0 if they stay in the model's dtype."""
        return METHODS.get("int8" if self.embeddings is True else self.embeddings, 0)


def read_options(given: object) -> Quantization:
    """Parse the option: a method's name, a dict of `Quantization`'s fields, or such a dict as JSON."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"quantization must be a method, a dict or JSON, got {given!r}: {error}") from error
    if isinstance(given, str):
        check_choice("quantization", given, (*METHODS, *STORED))
        return Quantization(given)
    if not isinstance(given, Mapping):
        raise TypeError(f"quantization must be one of {', '.join(METHODS)}, a dict or None, got {given!r}")
    legal = [field.name for field in fields(Quantization)]
    for name in given:
        if name not in legal:
            raise TypeError(f"quantization has no key {name!r}; legal are {', '.join(legal)}")
    return Quantization(**given)


def check_quantization(name: str, value: object) -> None:
    if value not in STORED:
        read_options(value)


FIELD_CHECKS = {"quantization": check_quantization}


def check_stored(given: object, shape: NetworkConfig | None) -> None:
    """Raise ValueError if `given`, the value of `Config.quantization`, is a format that the checkpoint does not have.

    shape: a `NetworkConfig`, or None
    """
    stored = shape.quantization_config if shape else None
    found = stored["quant_method"] if stored else "plain weights"
    if given in STORED and given != found:
        advice = "leave out quantization" + ("" if stored else ", or take quantization='int8'")
        raise ValueError(f"quantization={given!r} needs a checkpoint in this format, config.json has {found}; {advice}")
