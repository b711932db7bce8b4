"""Collect the engine's options in one object, `EngineArgs`, created in code or from a command line, as in vLLM.

`EngineArgs` has the options of `Config`, and may be changed until an engine is created from it. The help of a command
line shows the docstrings of the fields of `Config`. `LLM.from_engine_args`, `LLMEngine.from_engine_args` and programs
with a command line use it.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import TypeVar, get_args

from nanovllm.llm import LLM
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.option_checks import translate_options
from nanovllm_extras.options.vllm_options import names_of_vllm
from nanovllm_extras.options.vllm_tables import RENAMED

Made = TypeVar("Made", bound=LLM | LLMEngine)

GROUPS: Mapping[str, str] = {
    "model and tokenizer": "model revision hf_overrides load_format dtype quantization tokenizer tokenizer_revision "
    "skip_tokenizer_init chat_template reasoning_parser generation_config override_generation_config seed",
    "device and kernels": "device attention_backend enforce_eager enable_cuda_graphs enable_overlap self_check",
    "KV cache": "block_size num_kv_blocks kv_cache_memory_bytes gpu_memory_utilization enable_prefix_caching "
    "kv_cache_dtype kv_offloading_size kv_transfer_config state_snapshot_interval disable_hybrid_kv_cache_manager "
    "explain_prefix_misses check_invariants",
    "scheduling": "max_model_len max_num_seqs max_num_batched_tokens long_prefill_token_threshold scheduling_policy "
    "preemption_mode swap_space_bytes speculative_config",
    "LoRA adapters": "enable_lora max_loras max_lora_rank max_cpu_loras",
    "parallelism": "tensor_parallel_size nnodes node_rank master_addr master_port",
    "parts of your own": "extension scheduler_cls block_manager_cls prefix_cache_cls runner_cls sampler_cls "
    "proposer_cls",
}
"""Title of a group in `--help` -> the options of `Config` in it."""
ONLY_IN_CODE = ("models", "extra_args")
"""Options that hold classes. An extension may name them, too."""


class EngineArgs(Config):
    """The options of an engine, which may still be changed: those of `Config`, and vLLM's at their neutral values.

    >>> args = EngineArgs(TINY_QWEN3, tensor_parallel_size=1)
    >>> args.max_num_seqs = 8
    >>> engine = LLMEngine.from_engine_args(args)
    """

    def __init__(self, model: str | Path, **options: object) -> None:
        super().__init__(model, **translate_options(options, option_names(), "engine"))

    def __setattr__(self, name: str, value: object) -> None:
        for own_name, own_value in translate_options({name: value}, option_names(), "engine").items():
            object.__setattr__(self, own_name, own_value)

    def create_engine_config(self) -> Config:
        """Check the options and return them as a `Config`, which cannot be changed. Raises the errors of `Config`."""
        return Config(**asdict(self))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option to the parser for each field, in groups. vLLM's other options are accepted, but not shown."""
        by_name = {field.name: field for field in fields(Config)}
        for title, names in GROUPS.items():
            group = parser.add_argument_group(title)
            for name in names.split():
                add_flag(group, by_name[name])
        add = partial(parser.add_argument, nargs="?", const=True, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        for name in names_of_vllm():
            if name not in RENAMED:
                add(flag(name), type=parse_literal)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Create an object from parsed arguments. Attributes that `add_cli_args` has not added are ignored."""
        known = {*option_names(), *names_of_vllm()}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


class AsyncEngineArgs(EngineArgs):
    """The options of an `AsyncLLM`."""


def from_engine_args(cls: type[Made], engine_args: EngineArgs) -> Made:
    """Create an `LLM` or an `LLMEngine`. This is a class method of both."""
    if issubclass(cls, LLMEngine):
        return cls(engine_args.create_engine_config())
    return cls(**vars(engine_args))


@cache
def option_names() -> tuple[str, ...]:
    """Return the names of the options of `Config`."""
    return tuple(field.name for field in fields(Config))


@cache
def descriptions() -> Mapping[str, str]:
    """Return the docstring of each field of `Config` as one line of plain text.

    The docstrings are read from the source files. An installation with only compiled files has none.
    """
    from docstring_parser import parse_from_object  # here, because only programs with a command line need it

    classes = [one for one in reversed(Config.__mro__) if is_dataclass(one)]  # the core's options first
    params = [param for one in classes for param in parse_from_object(one).params]
    said = {param.arg_name: param.description or "" for param in params}
    return {name: " ".join(text.split()).replace("`", "") for name, text in said.items()}


def flag(name: str) -> str:
    """Return an option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    """Add an option such as `--block-size INT`, or for a bool `--enforce-eager` and `--no-enforce-eager`.

    The option is also added with vLLM's name, if that differs.
    """
    flags = [flag(field.name), *(flag(theirs) for theirs, ours in RENAMED.items() if ours == field.name)]
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not NoneType]
    default = None if field.default is MISSING else field.default
    shown = "" if default is None else f" (default: {default})"
    text = (descriptions().get(field.name, "see docs/options.md") + shown).replace("%", "%%")
    add = partial(group.add_argument, *flags, dest=field.name, default=default, help=text)
    if bool in kinds:
        add(action=argparse.BooleanOptionalAction)
        return
    is_text = str in kinds or field.name.endswith("_cls")  # "module:Class"
    kind = str if is_text else next((kind for kind in (int, float) if kind in kinds), parse_json)
    add(type=kind, metavar="JSON" if kind is parse_json else kind.__name__.upper())


def parse_json(text: str) -> object:
    """Parse JSON. Raises ArgumentTypeError if it is invalid."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def parse_literal(text: str) -> object:
    """Parse a value as JSON, such as `1`, `true`, `null` or `{…}`. Other values are text, and `None` is None."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text
