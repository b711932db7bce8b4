"""Read adapter_config.json, as PEFT writes it: which projections an adapter changes, by what rank and scale.

What would change the result in another way than x A B is refused by its name: DoRA, biases, layers that are saved
whole, initial weights that have changed the base model. Fields that only training reads are ignored.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.loader import read_json

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
VOCABULARY = ("embed_tokens", "lm_head")
"""Modules that `all-linear` does not mean."""
REFUSED = {
    "use_dora": "weight-decomposed adapters (DoRA) scale each output by a norm of the whole weight",
    "modules_to_save": "these layers were trained whole, and replace those of the base model",
    "lora_bias": "a bias would be added to each product",
    "use_qalora": "QALoRA pools the inputs before the product",
    "use_bdlora": "block-diagonal adapters are other products",
    "layer_replication": "the adapter is for a model with repeated layers",
    "target_parameters": "it changes tensors that are no linear layers, such as fused experts",
    "trainable_token_indices": "token vectors were trained, and replace those of the base model",
    "alora_invocation_tokens": "an activated adapter begins in the middle of a prompt",
    "arrow_config": "a router chooses among several adapters for each token",
    "velora_config": "it is another kind of adapter",
    "monteclora_config": "it is another kind of adapter",
    "kasa_config": "it is another kind of adapter",
}
"""Field -> why an adapter with it is refused."""
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says. Names are of modules, such as `model.layers.0.self_attn.q_proj`."""

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]
    """A regular expression, `all-linear`, or names of modules or the ends of such names."""
    is_stabilised: bool = False
    """Whether the scale is alpha / sqrt(rank), that of rank-stabilised LoRA (https://arxiv.org/abs/2312.03732)."""
    exclude_modules: str | tuple[str, ...] = ()
    ties_vocabulary: bool = False
    """Whether an adapter of the embeddings is one of the output layer, too, if these are tied."""
    layers: tuple[int, ...] | None = None
    """The numbers of the layers that it changes, if only those."""
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Names or regular expressions -> the rank of the modules whose names end so."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def targets(self, name: str) -> bool:
        """Return whether the adapter changes the linear layer `name`."""
        if matches(self.exclude_modules, name):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR:
            return name.rpartition(".")[2] not in VOCABULARY
        if not matches(self.target_modules, name):
            return False
        is_chosen_whole = isinstance(self.target_modules, str) or name in self.target_modules
        return self.layers is None or is_chosen_whole or self._layer_of(name) in self.layers

    def rank_of(self, name: str) -> int:
        return find_pattern(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Return the factor on x A B."""
        rank, alpha = self.rank_of(name), find_pattern(self.alpha_pattern, name, self.alpha)
        return float(alpha / (rank**0.5 if self.is_stabilised else rank))

    def _layer_of(self, name: str) -> int | None:
        patterns = [rf".*\.{one}\.(\d+)\." for one in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for one in patterns if (match := re.match(one, name))), None)
        return None if found is None else int(found.groups()[-1])


def matches(wanted: str | tuple[str, ...], name: str) -> bool:
    """Return whether `wanted`, a regular expression or names or the ends of names, includes `name`."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def find_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of `name`, or the default."""
    found = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), None)
    return default if found is None else patterns[found]


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. ValueError if it is damaged, or asks for something that is not served."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"lora_path must be a folder with {CONFIG_FILE}, as PEFT's save_pretrained writes it: {folder} has none"
        )
    raw = read_json(file)
    if raw.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"peft_type in {file} must be LORA, it is {raw['peft_type']!r}: only LoRA adapters are served")
    for name, reason in REFUSED.items():
        if raw.get(name):
            raise ValueError(f"{name} in {file} must not be set, it is {raw[name]!r}: {reason}")
    if raw.get("bias", "none") not in ("none", None):
        raise ValueError(
            f"bias in {file} must be 'none', it is {raw['bias']!r}: biases were trained, and replace those of the base "
            f"model"
        )
    if raw.get("init_lora_weights", True) not in PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights in {file} must not be {raw['init_lora_weights']!r}: such adapters (LoftQ, PiSSA, "
            f"OLoRA, CorDA) belong to a base model with other weights; convert them as PEFT's documentation says"
        )
    try:
        return AdapterConfig(
            rank=whole(raw["r"], "r"),
            alpha=number(raw["lora_alpha"], "lora_alpha"),
            target_modules=modules(raw["target_modules"], "target_modules"),
            is_stabilised=bool(raw.get("use_rslora")),
            ties_vocabulary=bool(raw.get("ensure_weight_tying")),
            exclude_modules=modules(raw.get("exclude_modules") or [], "exclude_modules"),
            layers=layers(raw.get("layers_to_transform")),
            layers_pattern=names(raw.get("layers_pattern")),
            rank_pattern=patterns(raw, "rank_pattern", whole),
            alpha_pattern=patterns(raw, "alpha_pattern", number),
        )
    except KeyError as error:
        raise ValueError(f"{file} has no {error.args[0]}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


# ---- fields, each of which raises ValueError for a value of another kind


def whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, it is {value!r}")
    return value


def number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number, it is {value!r}")
    return value


def regex(value: str, is_part: bool = False) -> str:
    """Return a regular expression, which sets no flags if it becomes a part of another one."""
    try:
        re.compile(f".*({value})" if is_part else value)
    except re.error as error:
        raise ValueError(f"{value!r} must be a regular expression: {error}") from error
    return value


def modules(value: object, name: str) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value if value.lower() == ALL_LINEAR else regex(value)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name} must be a text or a list of texts, it is {value!r}")
    return tuple(value)


def layers(value: object) -> tuple[int, ...] | None:
    numbers = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if numbers is None or numbers == []:
        return None
    if not isinstance(numbers, list) or not all(isinstance(one, int) for one in numbers):
        raise ValueError(f"layers_to_transform must be a whole number or a list of them, it is {value!r}")
    return tuple(numbers)


def names(value: object) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"layers_pattern must be a text or a list of texts, it is {value!r}")
    return tuple([regex(one, is_part=True) for one in found])


def patterns(raw: Mapping[str, Any], field_name: str, check: Callable[[object, str], Any]) -> dict[str, Any]:
    value = raw.get(field_name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{field_name} must be an object, it is {value!r}")
    return {regex(key, is_part=True): check(one, f"{field_name}[{key!r}]") for key, one in value.items()}
