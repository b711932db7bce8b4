"""What does not go together: one table of pairs of features, with the reason for each.

Every feature works with every other feature, unless a row of `CONTRADICTIONS` names both. A feature is what options ask
for, such as swap, or what a model has, such as recurrent states. `Config` checks its options against each other when it
is made. `assembly.start_runner` checks them against the model when config.json has been read, before it loads weights.

A value that is wrong by itself is refused where it is read. What a kernel cannot compute on this machine is the
backend's own `why_not` (`kernels/choices.py`). `python -m tools.combinations` writes `docs/combinations.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Feature:
    """What options ask for or, if there are no `options`, what a model has."""

    name: str
    is_in: Callable[[Any, Any], bool]
    """Whether an engine has it, by its `Config` and its `NetworkConfig`, which is None until config.json is read."""
    options: tuple[str, ...] = ()
    """Without them, an engine does not have the feature."""
    instead: str = ""
    """What to take instead, if it is not a matter of options."""

    def __and__(self, other: "Feature") -> "Feature":
        """Return the feature of engines that have both."""
        name, options = f"{self.name} with {other.name}", self.options + other.options
        return Feature(name, lambda config, shape: self.is_in(config, shape) and other.is_in(config, shape), options)

    def given(self, config: Any) -> list[str]:
        """Return its options whose values are not the defaults."""
        return [name for name in self.options if getattr(config, name) != getattr(type(config), name)]

    def describe(self, config: Any) -> str:
        values = ", ".join([f"{name}={getattr(config, name)!r}" for name in self.given(config)])
        return f"{self.name} ({values})" if values else self.name

    def way_out(self, config: Any) -> str:
        """Return how to do without it, in words."""
        return f"leave out {' and '.join(self.given(config))}" if self.options else self.instead


def of_value(name: str, option: str, *values: Any) -> Feature:
    """Return the feature that one option asks for by one of these values."""
    return Feature(name, lambda config, shape: getattr(config, option) in values, (option,))


def of_drafts(name: str, is_meant: Callable[[Any], bool]) -> Feature:
    """Return the feature of a `speculative_config` for which `is_meant` returns True."""
    given: Callable[[Any], Any] = lambda config: config.speculative_config  # noqa: E731
    return Feature(
        name, lambda config, _: given(config) is not None and is_meant(given(config)), ("speculative_config",)
    )


def of_model(name: str, has: Callable[[Any], bool], instead: str = "") -> Feature:
    """Return the feature of models for whose `NetworkConfig` the function `has` returns True."""
    return Feature(name, lambda config, shape: shape is not None and has(shape), instead=instead)


def connector_of(config: Any) -> Any:
    return (config.kv_transfer_config or {}).get("kv_connector")


# ---- features of options

CACHE_OF_8_BITS = of_value("K and V in 8 bits", "kv_cache_dtype", "fp8", "int8")
INT8_CACHE = of_value("K and V in int8", "kv_cache_dtype", "int8")
QUANTIZATION = Feature("quantised weights", lambda config, _: config.quantization is not None, ("quantization",))
GGUF = of_value("a GGUF file", "load_format", "gguf")
DUMMY = of_value("random weights", "load_format", "dummy")
GRAPHS = of_value("CUDA graphs", "enable_cuda_graphs", True)
EAGER = of_value("eager execution", "enforce_eager", True)
OVERLAP = of_value("overlapping steps", "enable_overlap", True)
SWAP = Feature("swap", lambda config, _: config.preemption_mode == "swap", ("preemption_mode", "swap_space_bytes"))
NO_PREFIXES = of_value("no prefix cache", "enable_prefix_caching", False)
OFFLOADING_SIZE = Feature(
    "a tier in host memory", lambda config, _: config.kv_offloading_size is not None, ("kv_offloading_size",)
)
OFFLOADING_CONNECTOR = Feature(
    "the OffloadingConnector", lambda config, _: connector_of(config) == "OffloadingConnector", ("kv_transfer_config",)
)
OWN_TIER = Feature(
    "a `Tier` of your own",
    lambda config, _: connector_of(config) is not None and not isinstance(connector_of(config), str),
    ("kv_transfer_config",),
)
STORE = Feature("a K/V store", lambda config, _: config.has_kv_store, ("kv_offloading_size", "kv_transfer_config"))
NODES = Feature("several machines", lambda config, _: config.nnodes > 1, ("nnodes",))
RANKS = Feature(
    "several ranks",
    lambda config, _: max(config.tensor_parallel_size, config.nnodes) > 1,
    ("tensor_parallel_size", "nnodes"),
)
SPECULATION = of_drafts("speculative decoding", lambda given: True)
DRAFT_MODEL = of_drafts("a draft model", lambda given: given.get("model") is not None)
COMPUTED_DRAFTS = of_drafts(
    "drafts of a draft model or of `mtp`", lambda given: given.get("model") is not None or given["method"] == "mtp"
)
OTHER_DRAFTS = of_drafts(
    "drafts of n-grams or of your own", lambda given: given.get("model") is None and given["method"] != "mtp"
)

# ---- features of models

STATES = of_model("recurrent states", lambda shape: shape.state_shape is not None)
CONVOLUTIONS = of_model(
    "states of convolutions only", lambda shape: shape.state_shape is not None and not all(shape.state_shape.recurrent)
)
SHAPES = of_model("K and V of different shapes", lambda shape: bool(shape.kv_groups))
LATENTS = of_model("a cache of latents", lambda shape: shape.latent_rank is not None)
WINDOWS = of_model("layers that all have a window", lambda shape: shape.widest_window is not None)
EXPERTS = of_model("a mixture of experts", lambda shape: shape.num_experts > 0)
QUANTISED = of_model(
    "a checkpoint that is quantised already",
    lambda shape: shape.quantization_config is not None,
    instead="take a checkpoint in bfloat16, float16 or float32",
)


class Row(NamedTuple):
    """Two features that do not go together."""

    first: Feature
    second: Feature
    reason: str
    is_to_do: bool = False
    """Whether only the code is missing. Otherwise the features contradict each other."""
    instead: str = ""
    """What works, other than to leave one of them out."""


NEWEST = "the next drafts follow the newest token, which the host does not know while its step is in flight"
NOT_CUT = "quantised weights are not divided among ranks"
ANY_NGRAM = "take the method 'ngram'"
CONTRADICTIONS = (
    # ---- of options
    Row(OTHER_DRAFTS, OVERLAP, NEWEST),
    Row(COMPUTED_DRAFTS, OVERLAP, NEWEST, is_to_do=True),  # a device could begin with the token that it has
    Row(COMPUTED_DRAFTS, SWAP, "the K and V of what makes drafts are not swapped", is_to_do=True),
    Row(COMPUTED_DRAFTS, RANKS, "what makes drafts is computed on one rank only", is_to_do=True),
    Row(STORE, NO_PREFIXES, "a store finds blocks by their prefix"),
    Row(STORE, NODES, "the ranks of all machines would need the same tiers", is_to_do=True),
    Row(OWN_TIER, RANKS, "other ranks are processes, which cannot use the object"),
    Row(OFFLOADING_SIZE, OFFLOADING_CONNECTOR, "both are the same tier"),
    Row(GRAPHS, EAGER, "eager execution is kernel by kernel"),
    Row(GGUF, RANKS, NOT_CUT, is_to_do=True),
    # ---- of an option and any model
    Row(GRAPHS, EXPERTS, "tokens are grouped by expert on the host", is_to_do=True),
    Row(QUANTISED, RANKS, NOT_CUT, is_to_do=True),
    Row(QUANTISED, DUMMY, "random weights are plain", is_to_do=True),
    Row(
        INT8_CACHE, LATENTS, "int8 is for K and V only", is_to_do=True,
        instead="take kv_cache_dtype='fp8' and attention_backend='torch'",
    ),
    Row(
        DRAFT_MODEL, WINDOWS, "blocks behind the window are given back, and the draft model would read them",
        is_to_do=True, instead=ANY_NGRAM,
    ),
    # ---- of recurrent states
    Row(CACHE_OF_8_BITS, STATES, "the blocks beside states have the model's dtype", is_to_do=True),
    Row(GGUF, STATES, "the loader does not know such layers", is_to_do=True),
    Row(QUANTISED, STATES, "the loader does not know such layers", is_to_do=True),
    Row(NODES, STATES, "states on several machines are not tested", is_to_do=True),
    Row(RANKS, CONVOLUTIONS, "the channels of such layers are not divided", is_to_do=True),
    Row(
        DRAFT_MODEL, STATES, "the pool of states leaves no memory for a draft model", is_to_do=True, instead=ANY_NGRAM
    ),
    Row(SPECULATION, STATES & STORE, "states are stored without drafts", is_to_do=True),
    Row(RANKS, STATES & STORE, "states are stored by one rank", is_to_do=True),
    Row(SPECULATION, STATES & RANKS, "rank 0 sends no slots of drafts", is_to_do=True),
    # ---- of several shapes of K and V
    Row(CACHE_OF_8_BITS, SHAPES, "their blocks have the model's dtype", is_to_do=True),
    Row(QUANTIZATION, SHAPES, "quantised weights are not tested with such layers", is_to_do=True),
    Row(GGUF, SHAPES, "the loader does not know such layers", is_to_do=True),
    Row(QUANTISED, SHAPES, "the loader does not know such layers", is_to_do=True),
    Row(DRAFT_MODEL, SHAPES, "a draft model shares blocks of one shape only", is_to_do=True, instead=ANY_NGRAM),
)  # fmt: skip
"""The first row that holds is the one that an error names."""


def check_combinations(config: Any, shape: Any = None) -> None:
    """Raise ValueError for the first two features of an engine that do not go together.

    config: a `Config`; shape: the model's `NetworkConfig`, or None to check options against each other only
    """
    for row in CONTRADICTIONS:
        if row.first.is_in(config, shape) and row.second.is_in(config, shape):
            ways = [row.instead, row.first.way_out(config), row.second.way_out(config)]
            raise ValueError(
                f"{row.first.describe(config)} and {row.second.describe(config)} do not go together: {row.reason}; "
                f"{', or '.join([way for way in ways if way])}"
            )
