"""What an engine has found out at its start, for the files that make its parts and its requests."""

from typing import TYPE_CHECKING

from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.request_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nanovllm_extras.kv_store.store import KVStore


class Parts:
    """What an engine has found out at its start. The config says what was asked for."""

    def __init__(
        self,
        config: Config,
        runner: ModelRunner,
        tokenizer: "PreTrainedTokenizerFast | None",
        eos_token_ids: frozenset[int],
        default_sampling_params: SamplingParams,
    ) -> None:
        self.config, self.runner = config, runner
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.default_sampling_params = default_sampling_params
        self.model_config: NetworkConfig = runner.shape
        self.max_model_len, self.max_num_batched_tokens = runner.max_model_len, runner.max_num_batched_tokens
        self.num_kv_blocks, self.block_size = runner.kv_cache.num_blocks, runner.backend.block_size
        self.enable_overlap = runner.has_overlap
        self.description = runner.description  # what computes, and why that was chosen
        self.startup_seconds = runner.clock.seconds  # how long each part of the start took, in order
        self.kv_store: KVStore | None = None  # if the options ask for one
