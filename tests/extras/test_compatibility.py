"""Each row of the table of what does not go together is refused at the start, before weights are loaded.

What the messages recommend is tried in `test_recommendations.py`.
"""

import dataclasses
import functools

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.model_runner import ModelRunner as CoreRunner
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.scheduler import Scheduler
from nanovllm_extras import LLM, TINY_QWEN3, Config, SamplingParams
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from nanovllm_extras.options.compatibility import CONTRADICTIONS
from nanovllm_extras.options.speculation_options import read_options
from nanovllm_extras.parallel import start_ranks
from nanovllm_extras.speculation.draft_model import find_draft_model
from tests.extras.models.architectures import Checkpoints
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints

CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}


class OwnScheduler(Scheduler):
    """Extends the core's."""


class OwnBackend(TorchAttention):
    """Extends the core's."""


class OwnRunner(CoreRunner):
    """Extends the core's."""


EXAMPLES = {  # feature -> options that ask for it, or a checkpoint that has it
    "CUDA graphs": {"enable_cuda_graphs": True},
    "eager execution": {"enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "a tier in host memory": {"kv_offloading_size": 0.01},
    "the OffloadingConnector": {"kv_transfer_config": CONNECTOR},
    "a `Tier` of your own": {"kv_transfer_config": {"kv_connector": MemoryTier(1 << 20)}},
    "a K/V store": {"kv_offloading_size": 0.01},
    "LoRA adapters": {"enable_lora": True},
    "several ranks": {"tensor_parallel_size": 2},
    "a mixture of experts": "mixtral",
    "a scheduling policy": {"scheduling_policy": "sjf"},
    "a limit for chunks of long prompts": {"long_prefill_token_threshold": 8},
    "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "overlap": {"enable_overlap": True},
    "K and V of 8 bits": {"kv_cache_dtype": "int8"},
    "a scheduler, block manager or prefix cache of your own": {"scheduler_cls": OwnScheduler},
    "an attention backend of your own": {"attention_backend": OwnBackend},
    "a model runner of your own": {"runner_cls": OwnRunner},
    "a model of your own": {"models": {"OwnForCausalLM": Qwen3ForCausalLM}},
    "layers with a window": "gemma3",
    "recurrent states": "qwen3_5",
    "another cache than K and V of one shape": "deepseek_v2",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("combinations")

    @functools.cache
    def make(name):
        if name == "qwen3_5":
            return HybridCheckpoints(root).make()[0]
        return Checkpoints(root).make(name, "yarn" if name == "qwen3" else "plain")[0]

    return make


@pytest.fixture
def nothing_loads(monkeypatch):
    def fail(*_):
        raise AssertionError("weights are loaded, or a rank has started")

    monkeypatch.setattr(ModelRunner, "load_network", fail)
    monkeypatch.setattr(start_ranks, "start_all", fail)


@pytest.mark.parametrize("row", CONTRADICTIONS, ids=lambda row: f"{row.first.name}, {row.second.name}")
def test_each_row_is_refused(folder_of, nothing_loads, row):
    asked = [EXAMPLES[feature.name] for feature in row[:2]]
    options = {key: value for one in asked if isinstance(one, dict) for key, value in one.items()}
    start, model = Config, "a-model"
    if not all(
        isinstance(one, dict) and "hf_overrides" not in one for one in asked
    ):  # with the core's layers if possible
        options = {"attention_backend": "torch", "enforce_eager": "enable_cuda_graphs" not in options, **options}
        start = LLM
        model = next((folder_of(one) for one in asked if isinstance(one, str)), TINY_QWEN3)
    with pytest.raises(ValueError, match="do not go together") as error:
        start(model, device="cpu", **options)
    message = str(error.value)
    assert message.startswith(row.first.name)
    assert f" and {row.second.name}" in message
    assert f"do not go together: {row.reason}; " in message


def test_each_option_with_a_value_is_named_once():
    with pytest.raises(ValueError, match=r"ranks \(tensor_parallel_size=2, nnodes=2\) do not go together") as error:
        Config("a-model", tensor_parallel_size=2, nnodes=2, **EXAMPLES["a `Tier` of your own"])
    assert str(error.value).endswith("leave out kv_transfer_config, or leave out tensor_parallel_size and nnodes")


def test_a_draft_model_is_checked_too(folder_of):
    """With CUDA graphs, which a CPU refuses first: so they are asked for when the large model's runner has started."""
    runner = LLM(folder_of("qwen3"), device="cpu", num_kv_blocks=20, max_num_seqs=2).engine.runner
    runner.config = dataclasses.replace(runner.config, enable_cuda_graphs=True)
    options = read_options({"model": str(folder_of("mixtral")), "num_speculative_tokens": 2})
    refusal = r"^speculative_config\['model'\] .* and a mixture of experts do not go together"
    with pytest.raises(ValueError, match=refusal):
        find_draft_model(runner, options, 20)


def test_a_draft_model_of_latents_has_an_int8_cache_too(folder_of):
    """The drafts change no token."""
    options = {"device": "cpu", "kv_cache_dtype": "int8", "num_kv_blocks": 20, "skip_tokenizer_init": True}
    draft = {
        "speculative_config": {
            "model": str(folder_of("deepseek_v2")),
            "num_speculative_tokens": 2,
            "disable_by_batch_size": 4,
        }
    }
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain, drafted = LLM(folder_of("qwen3"), **options), LLM(folder_of("qwen3"), **options, **draft)
    expected, found = (llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0] for llm in (plain, drafted))
    assert found.token_ids == expected.token_ids
    assert drafted.get_stats().num_draft_tokens > 0
    assert {cache.tensor.dtype for cache in drafted.engine.runner.transfers.caches} == {torch.int8}


def test_no_row_repeats_another():
    pairs = [frozenset((row.first.name, row.second.name)) for row in CONTRADICTIONS]
    assert len(set(pairs)) == len(pairs)
