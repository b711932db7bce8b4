"""What does not go together: one table of pairs of features, with the reason for each.

Every feature works with every other feature, unless a row of `CONTRADICTIONS` names both. A feature is what options ask
for, such as swap, or what a model has, such as experts. `Config` checks its options against each other when it
is made. `assembly.start_runner` checks them against the model when config.json has been read, before it loads weights.

A value that is wrong by itself is refused where it is read. What a kernel cannot compute on this machine is the
backend's own `why_not` (`execution/choices.py`). `python -m tools.combinations` writes `docs/combinations.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Feature:
    """What options ask for or, if there are no `options`, what a model has."""

    name: str
    options: tuple[str, ...] = ()
    """The default values of these options do not ask for it."""
    is_meant: Callable[[Any], object] = lambda value: True
    """Whether another value of an option, or a model's `NetworkConfig`, is or has the feature."""

    def is_in(self, config: object, shape: object) -> bool:
        """Return whether an engine has it. shape: the model's `NetworkConfig`, None until config.json is read"""
        if self.options:
            return any(self.is_meant(getattr(config, name)) for name in self.given(config))
        return shape is not None and bool(self.is_meant(shape))

    def given(self, config: object) -> list[str]:
        """Return its options whose values are not the defaults."""
        return [name for name in self.options if getattr(config, name) != getattr(type(config), name)]

    def describe(self, config: object) -> str:
        given = [(name, getattr(config, name)) for name in self.given(config)]
        values = ", ".join([f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given])
        return f"{self.name} ({values})" if values else self.name

    def way_out(self, config: object) -> str:
        """Return how to do without it, in words: nothing for what a model has."""
        return f"leave out {' and '.join(self.given(config))}" if self.options else ""


# ---- features of options

GRAPHS = Feature("CUDA graphs", ("enable_cuda_graphs",), lambda value: value)
EAGER = Feature("eager execution", ("enforce_eager",))
NO_PREFIXES = Feature("no prefix cache", ("enable_prefix_caching",))
STORE = Feature("a K/V store", ("kv_offloading_size", "kv_transfer_config"))
HOST_TIER = Feature("a tier in host memory", ("kv_offloading_size",))
CONNECTOR = Feature(
    "the OffloadingConnector", ("kv_transfer_config",), lambda given: given["kv_connector"] == "OffloadingConnector"
)
OWN_TIER = Feature(
    "a `Tier` of your own", ("kv_transfer_config",), lambda given: not isinstance(given["kv_connector"], str)
)
RANKS = Feature("several ranks", ("tensor_parallel_size", "nnodes"))

POLICY = Feature("a scheduling policy", ("scheduling_policy",))
LONG_PROMPTS = Feature("a limit for chunks of long prompts", ("long_prefill_token_threshold",))
SWAP = Feature("swap", ("preemption_mode",))
SPECULATION = Feature("speculation", ("speculative_config",))
OVERLAP = Feature("overlap", ("enable_overlap",), lambda value: value)
LORA = Feature("LoRA adapters", ("enable_lora",), lambda value: value)
SMALL_CACHE = Feature("K and V of 8 bits", ("kv_cache_dtype",))


def is_made_of_core(kind: type | None) -> bool:
    """Return whether a class of the user's own extends the core's class, not that of this package."""
    return kind is not None and not any(one.__module__.startswith("nanovllm_extras.") for one in kind.__mro__)


OWN_SCHEDULING = Feature(
    "a scheduler, block manager or prefix cache of your own",
    ("scheduler_cls", "block_manager_cls", "prefix_cache_cls"),
    is_made_of_core,
)
OWN_BACKEND = Feature(
    "an attention backend of your own",
    ("attention_backend",),
    lambda value: not isinstance(value, str) or ":" in value or "." in value,
)
OWN_RUNNER = Feature("a model runner of your own", ("runner_cls",))
OWN_MODEL = Feature("a model of your own", ("models",))

# ---- features of models

WINDOWS = Feature(
    "layers with a window", (), lambda shape: shape.widest_window or len(set(shape.attention_options)) > 1
)
STATES = Feature("recurrent states", (), lambda shape: shape.state_shape is not None)
OTHER_CACHES = Feature(
    "another cache than K and V of one shape", (), lambda shape: shape.latent_rank or shape.kv_groups
)
EXPERTS = Feature("a mixture of experts", (), lambda shape: shape.num_experts > 0)


class Row(NamedTuple):
    """Two features that do not go together."""

    first: Feature
    second: Feature
    reason: str


MADE_OF_CORE = (
    "it extends the core's class, which does not know this; extend the class of the same name in nanovllm_extras"
)
CONTRADICTIONS = (
    # ---- of options
    Row(STORE, NO_PREFIXES, "a store finds blocks by their prefix"),
    Row(OWN_TIER, RANKS, "other ranks are processes, which cannot use the object"),
    Row(HOST_TIER, CONNECTOR, "both are the same tier"),
    Row(GRAPHS, EAGER, "eager execution is kernel by kernel"),
    *[Row(OWN_SCHEDULING, other, MADE_OF_CORE) for other in (POLICY, LONG_PROMPTS, SWAP, SPECULATION, OVERLAP, STORE)],
    Row(OWN_SCHEDULING, LORA, MADE_OF_CORE),
    Row(OWN_BACKEND, SMALL_CACHE, "your backend decides what its cache holds"),
    Row(OWN_RUNNER, RANKS, "the other ranks do not get what it adds to a step"),
    Row(OWN_RUNNER, LORA, "nothing says that its metadata keep the adapter of each row"),
    Row(OWN_MODEL, RANKS, "nobody says how its weights are cut"),
    # ---- of an option and any model
    *[Row(OWN_SCHEDULING, other, MADE_OF_CORE) for other in (WINDOWS, STATES)],
    Row(OWN_BACKEND, OTHER_CACHES, "it has the layout of the core's backends"),
    *[Row(OWN_RUNNER, other, "the core's metadata has one block table and no slots") for other in (WINDOWS, STATES)],
    Row(
        GRAPHS, EXPERTS,
        "tokens are grouped by expert on the host, when the layer's router has run, and a graph cannot wait for that",
    ),
)  # fmt: skip
"""The first row that holds is the one that an error names."""


def check_combinations(config: object, shape: object = None) -> None:
    """Raise ValueError for the first two features of an engine that do not go together.

    config: a `Config`; shape: the model's `NetworkConfig`, or None to check options against each other only
    """
    for row in CONTRADICTIONS:
        if row.first.is_in(config, shape) and row.second.is_in(config, shape):
            ways = [row.first.way_out(config), row.second.way_out(config)]
            raise ValueError(
                f"{row.first.describe(config)} and {row.second.describe(config)} do not go together: {row.reason}; "
                f"{', or '.join([way for way in ways if way])}"
            )
