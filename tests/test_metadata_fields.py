"""A runner whose metadata has a number for each token (`metadata_cls`), in plain steps and in CUDA graphs."""

import random
from dataclasses import dataclass

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling_params import SamplingParams
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests
from tests import cuda_stand_in


@dataclass(frozen=True)
class StyledMetadata(AttentionMetadata):
    styles: torch.Tensor  # [num_tokens] int32


class StyledQwen3(Qwen3ForCausalLM):
    """Adds another token's embedding to the hidden states of each token with a style."""

    def forward(self, input_ids, positions, metadata, kv_cache):
        hidden = super().forward(input_ids, positions, metadata, kv_cache)
        return hidden + 40 * self.model.embed_tokens(metadata.styles * 50) * (metadata.styles > 0)[:, None]


class StyledRunner(ModelRunner):
    """Sequences of even seeds have a style from 1 to 4."""

    metadata_cls = StyledMetadata

    def make_metadata(self, step, metadata):
        styles = [(seq.seed // 2 % 4 + 1) * (seq.seed % 2 == 0) for seq, _, num in step.chunks for _ in range(num)]
        return StyledMetadata(**vars(metadata), styles=torch.tensor(styles, dtype=torch.int32))


class StandInRunner(StyledRunner, cuda_stand_in.StandInRunner):
    pass


class StandInEngine(cuda_stand_in.StandInEngine):
    runner_class = StandInRunner


OPTIONS = {**SMALL, "models": {"Qwen3ForCausalLM": StyledQwen3}}


@pytest.fixture
def traffic():
    rng = random.Random(7)
    return list(random_requests(rng, 8)), rng


def test_graphs_replay_the_fields_of_each_batch(traffic, monkeypatch):
    """The oracle is the same runner without graphs, whose layers read the fields that `make_metadata` returns."""
    cuda_stand_in.install(monkeypatch)
    engine = StandInEngine(Config(MODEL, **OPTIONS, attention_backend="flash_attn"))
    found = drive(engine, *traffic)
    eager = Config(MODEL, **OPTIONS, attention_backend="torch", runner_cls=StyledRunner)
    assert found == drive(LLMEngine(eager), *traffic)
    graphs = engine.runner.graphs
    assert sum(replay.__self__.num_replays > 0 for replay, _ in graphs.graphs.values()) >= 2
    plain = Config(MODEL, **SMALL, attention_backend="torch")
    assert found != drive(LLMEngine(plain), *traffic), "styles change what is sampled"


def test_padding_rows_have_the_number_0(monkeypatch):
    """Three decodes replay the graph of four. The fifth row belongs to the graph of five, which never runs."""
    cuda_stand_in.install(monkeypatch)
    engine = StandInEngine(Config(MODEL, **OPTIONS, attention_backend="flash_attn"))
    styles = engine.runner.graphs.token_fields["styles"]
    styles.fill_(9)
    for i in range(3):
        engine.add_request(str(i), [5 + i, 6, 7], SamplingParams(temperature=0, ignore_eos=True), stream=False)
    seeds = [seq.seed for seq in engine.scheduler.waiting]
    while engine.has_unfinished_requests():
        engine.step()
    assert styles.tolist() == [*((seed // 2 % 4 + 1) * (seed % 2 == 0) for seed in seeds), 0, 9]
