"""All options of the engine: those of the core, and those that choose extras. Names that differ from vLLM's are
translated."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm import config
from nanovllm.checks import check_bool, check_choice, check_class, check_int, check_str, checked
from nanovllm.config import DTYPES
from nanovllm_extras.options.compatibility import check_combinations, is_made_of_core
from nanovllm_extras.options.option_checks import (
    check_dict,
    check_in,
    check_optional_bool,
    check_optional_str,
    translate_options,
)

BACKENDS = ("auto", "torch", "flash_attn", "triton", "cpu")
REASONING_PARSERS = ("qwen3", "deepseek_v3", "deepseek_r1", "gemma4", "openai_gptoss")  # `answer_parts/reasoning.py`
DEFAULT_DRAFTS = 4  # of a `proposer_cls`, if `speculative_config` does not say


def check_backend(name: str, value: object) -> None:
    if not isinstance(value, type) and not (isinstance(value, str) and (":" in value or "." in value)):
        check_choice(name, value, BACKENDS)


def check_policy(name: str, value: object) -> None:
    if not callable(value):
        check_choice(name, value, ("fcfs", "priority", "sjf"))


@dataclass(frozen=True)
class Config(config.Config):
    """What `LLM(...)` and `LLMEngine(Config(...))` take.

    A bad value raises a TypeError or ValueError that names the field, the value and what is allowed.
    """

    kv_cache_memory_bytes: int | None = checked(None, check_int, minimum=1, optional=True)
    """Size of the KV cache; None is 1 GiB on CPU (or half of the free memory, if it is less), and on CUDA what
    `gpu_memory_utilization` leaves."""
    attention_backend: str | type = checked("auto", check_backend)
    """`torch`, `flash_attn`, `triton` or `cpu`; `auto` is the fastest that this machine has. Or a class of your own, or
    its name as "module:Class"."""
    kv_cache_dtype: str = checked("auto", check_choice, allowed=("auto", "fp8", "int8", *DTYPES))
    """`fp8` (with `triton`, `torch`), `int8` (`cpu`, `torch`): K and V have 8 bits; `auto` is `dtype`, or its name."""
    quantization: str | Mapping[str, object] | None = checked(None, check_in, module="weights.quantization_options")
    """`int8` or `int4` keeps weights in 8 or 4 bits; also a dict, as `{"method": "int4", "group_size": 64}`."""
    scheduling_policy: str | Callable[[Any], float] = checked("fcfs", check_policy)
    """`fcfs`, `priority` or `sjf` (`scheduling/policies.py`), or a function of your own, which ranks a sequence."""
    long_prefill_token_threshold: int = checked(0, check_int, minimum=0)
    """Most tokens of one sequence in a step, so that short prompts get past a long one; 0 sets no limit."""
    preemption_mode: str = checked("recompute", check_choice, allowed=("recompute", "swap"))
    """What happens to a preempted sequence's K and V: `recompute`, or `swap` to host memory while there is room."""
    swap_space_bytes: int = checked(0, check_int, minimum=0)
    """Host memory for `preemption_mode="swap"`."""
    kv_offloading_size: float | None = checked(None, check_in, module="options.store_options")
    """Host memory in GiB for blocks that are kept after the KV cache has reused their place; None keeps none."""
    kv_transfer_config: Mapping[str, object] | None = checked(None, check_in, module="options.store_options")
    """Where else blocks are kept, for other engines and after a restart: see docs/kv_store.md."""
    state_snapshot_interval: int = checked(64, check_int, minimum=0)
    """Blocks from one snapshot of a recurrent state to the next one of the sequence, for prefix hits; 0 takes snapshots
    only at the ends of prompts and where prompts branch (`memory/slots.py`)."""
    disable_hybrid_kv_cache_manager: bool = checked(False, check_bool)
    """Whether all layers share one block table, even if some see a window and others all tokens; otherwise each group
    of them has its own, and gives back blocks behind the window (`execution/layer_groups.py`)."""
    explain_prefix_misses: bool = checked(False, check_bool)
    """Whether metrics say why prompt tokens were not in the prefix cache; it remembers evicted blocks."""
    check_invariants: bool = checked(False, check_bool)
    """Whether each step is followed by a check that queues, block tables, pools and prefix cache do not contradict each
    other; AssertionError names what does. It takes longer the more blocks there are (`invariants.py`)."""
    enable_cuda_graphs: bool | None = checked(None, check_optional_bool)
    """Whether decode steps are replayed from CUDA graphs; None replays them wherever possible."""
    enable_overlap: bool | None = checked(None, check_optional_bool)
    """Whether the next step is launched while one is in flight; None means only on CUDA, without drafts. Outputs do not
    change."""
    self_check: str | None = checked(None, check_in, module="self_check.mode")
    """Whether the first start compares the kernels with PyTorch's layers: `on` takes another way to compute if they are
    wrong, `strict` raises, `off` does not compare; None is the variable NANOVLLM_SELF_CHECK, or `on`."""
    speculative_config: Mapping[str, object] | None = checked(None, check_in, module="options.speculation_options")
    """How draft tokens are proposed, as `{"method": "ngram", "num_speculative_tokens": 5}`; None turns drafts off."""
    tensor_parallel_size: int = checked(1, check_int, minimum=1)
    """Ranks that share each forward pass: CUDA devices, or processes on a CPU."""
    nnodes: int = checked(1, check_int, minimum=1)
    """Machines that the ranks run on, as many ranks on each."""
    node_rank: int = checked(0, check_int, minimum=0)
    """Number of this machine. Machine 0 schedules and draws; on others the engine only computes, until it ends."""
    master_addr: str = checked("127.0.0.1", check_str)
    """Address of machine 0, where it waits for the others."""
    master_port: int = checked(29501, check_int, minimum=1, maximum=65535)
    """Port of machine 0."""
    load_format: str = checked("auto", check_choice, allowed=("auto", "safetensors", "gguf", "dummy"))
    """`safetensors` (the same as `auto`), `gguf`, or `dummy` for seeded random weights, which need only config.json."""
    revision: str | None = checked(None, check_optional_str)
    """Branch, tag or commit of `model` on the hub; a folder is taken as it is."""
    hf_overrides: Mapping[str, object] | None = checked(None, check_dict)
    """Fields of config.json that are to have other values."""
    tokenizer: str | Path | None = checked(None, check_optional_str, or_path=True)
    """Folder or hub id of another tokenizer than the model's own."""
    tokenizer_revision: str | None = checked(None, check_optional_str)
    """Branch, tag or commit of `tokenizer` on the hub; None is `revision`."""
    skip_tokenizer_init: bool = checked(False, check_bool)
    """Whether to go without a tokenizer: prompts and outputs are token ids, without text."""
    chat_template: str | Path | None = checked(None, check_optional_str, or_path=True)
    """Another chat template than the tokenizer's own: a file, or the template itself."""
    reasoning_parser: str = checked("qwen3", check_choice, allowed=REASONING_PARSERS)
    """Format of the model's reasoning, whose tags a `thinking_token_budget` needs: `qwen3`, `deepseek_v3`,
    `deepseek_r1`, `gemma4` or `openai_gptoss`."""
    generation_config: str | Path = checked("auto", check_str, or_path=True)
    """Where the default sampling parameters come from: `auto` is the model's generation_config.json, `vllm` are those
    of `SamplingParams`, else a folder that holds a generation_config.json."""
    override_generation_config: Mapping[str, object] | None = checked(None, check_dict)
    """Fields of generation_config.json that are to have other values."""
    enable_lora: bool = checked(False, check_bool)
    """Whether requests may have LoRA adapters (`lora/`)."""
    max_loras: int = checked(1, check_int, minimum=1)
    """The most adapters that rows of one step have; requests of others wait."""
    max_lora_rank: int = checked(16, check_int, minimum=1)
    """The largest rank that an adapter may have."""
    max_cpu_loras: int | None = checked(None, check_int, minimum=1, optional=True)
    """The most adapters in host memory, of which the least recently used ones are forgotten; None sets no limit."""
    proposer_cls: Any = checked(None, check_class)
    """A class that proposes draft tokens, a `Proposer` (`scheduling/drafter.py`), made with the model runner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.preemption_mode == "swap") != (self.swap_space_bytes > 0):
            raise ValueError(
                f"preemption_mode='swap' needs swap_space_bytes > 0, and swap_space_bytes needs that mode: "
                f"got {self.preemption_mode!r} and {self.swap_space_bytes}"
            )
        check_combinations(self)

    def take_parts(self) -> None:
        super().take_parts()
        if self.proposer_cls is not None:
            object.__setattr__(self, "speculative_config", with_own_proposer(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process imports the extension itself: the classes of a file cannot be pickled."""
        own = self.given_parts() if self.extension is not None else {}
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in own}
        return partial(type(self), **given), ()

    @property
    def has_own_scheduling(self) -> bool:
        """Return whether scheduler, block manager or prefix cache are the user's, made of the core's."""
        return any(
            is_made_of_core(kind) for kind in (self.scheduler_cls, self.block_manager_cls, self.prefix_cache_cls)
        )

    @property
    def has_own_backend(self) -> bool:
        """Return whether the attention backend is none of this package."""
        return self.attention_backend not in BACKENDS

    @property
    def has_draft_model(self) -> bool:
        """Return whether a draft model makes drafts."""
        return (self.speculative_config or {}).get("model") is not None

    @property
    def has_mtp_head(self) -> bool:
        """Return whether the model's own head for multi-token prediction makes drafts."""
        return (self.speculative_config or {}).get("method") == "mtp"

    @property
    def has_kv_store(self) -> bool:
        """Return whether blocks are kept outside of the KV cache (`kv_store/`)."""
        return self.kv_offloading_size is not None or self.kv_transfer_config is not None

    @classmethod
    def from_options(cls, model: str | Path, options: Mapping[str, Any]) -> "Config":
        """Return `Config(model, **options)`. Accepts vLLM's names too; raises TypeError for an unknown name."""
        with suppress(TypeError, ValueError):
            return cls(model, **options)
        return cls(model, **translate_options(options, [field.name for field in fields(cls)], "engine"))


def with_own_proposer(config: Config) -> Mapping[str, object]:
    """Return the `speculative_config` of a `proposer_cls`. Raises ValueError if it names another method."""
    given = dict(config.speculative_config or {})
    if given.get("method") not in (None, config.proposer_cls) or given.get("model") is not None:
        raise ValueError(
            f"proposer_cls and speculative_config[{'method' if given.get('method') else 'model'!r}] both choose who "
            f"proposes drafts: leave out one of them"
        )
    return {"num_speculative_tokens": DEFAULT_DRAFTS, **given, "method": config.proposer_cls}
