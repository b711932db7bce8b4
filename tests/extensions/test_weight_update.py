"""`examples/extensions/weight_update.py`: `transformers` has the same weights, and is the oracle of each update."""

import random
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm.config import Config
from nanovllm.extension import import_extension
from tests import cuda_stand_in
from tests.conftest import hf_greedy

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "weight_update.py"
OPTIONS = {"extension": EXTENSION, "device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 80}
rollouts = import_extension(EXTENSION)
rng = random.Random(3)
PROMPTS = [[rng.randrange(300) for _ in range(size)] for size in (9, 17, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def policies(checkpoints):
    """An engine with the weights of the first of two models of `transformers`, and both models."""
    (folder, first), (_, second) = checkpoints.make(seed=0), checkpoints.make(seed=1)
    return LLM(folder, num_kv_blocks=24, **OPTIONS), first, second


def tokens_of(llm, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def expected_of(model, prompts=PROMPTS):
    return [hf_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]


def test_an_update_is_an_engine_with_the_new_weights(policies):
    llm, first, second = policies
    places = [weight.data_ptr() for weight in llm.engine.runner.model.parameters()]
    assert tokens_of(llm) == expected_of(first)
    assert llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16
    rollouts.update_weights(llm, second.state_dict())
    after = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in after] == expected_of(second) != expected_of(first)
    assert [output.num_cached_tokens for output in after] == [0, 0, 0]
    rollouts.update_weights(llm, dict(first.named_parameters()))  # a trainer's, with gradients
    assert tokens_of(llm) == expected_of(first)
    assert [weight.data_ptr() for weight in llm.engine.runner.model.parameters()] == places  # of CUDA graphs, too
    assert not any(weight.requires_grad for weight in llm.engine.runner.model.parameters())


def test_some_tensors_may_be_updated(policies, checkpoints):
    """A row of a fused product, for example: the other weights stay."""
    llm, first, second = policies
    names = [name for name in second.state_dict() if "k_proj" in name or "up_proj" in name]
    mixed = type(first)(first.config).eval()
    mixed.load_state_dict({**first.state_dict(), **{name: second.state_dict()[name] for name in names}})
    rollouts.update_weights(llm, {name: second.state_dict()[name] for name in names})
    assert tokens_of(llm) == expected_of(mixed) != expected_of(first)


def test_sleep_frees_memory_and_wake_restores_the_text(policies):
    llm, first, second = policies
    runner = llm.engine.runner
    weights = list(runner.model.parameters())
    num_cache_bytes = runner.kv_cache.tensor.nbytes
    for offload_weights in (False, True):
        before = sum(weight.untyped_storage().nbytes() for weight in weights)
        rollouts.sleep(llm, offload_weights)
        rollouts.sleep(llm, not offload_weights)  # it sleeps already
        assert runner.kv_cache.tensor.nbytes * 25 == num_cache_bytes
        assert sum(weight.untyped_storage().nbytes() for weight in weights) == before * (not offload_weights)
        with pytest.raises(RuntimeError, match=r"the engine sleeps, and has no KV cache: call wake\(llm\) first"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        if offload_weights:
            with pytest.raises(RuntimeError, match="the weights are on the host"):
                rollouts.update_weights(llm, second.state_dict())
        else:
            rollouts.update_weights(llm, second.state_dict())
        rollouts.wake(llm)
        rollouts.wake(llm)
        assert runner.kv_cache.tensor.nbytes == num_cache_bytes
        assert tokens_of(llm) == expected_of(second)


def test_log_probs_are_those_of_the_model(policies):
    """Also of samples that were preempted, and of those that top-k has drawn."""
    llm, first, _ = policies
    params = SamplingParams(n=3, temperature=1.3, top_k=40, max_tokens=12, seed=5)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.engine.stats.num_preemptions > 0
    for output in outputs:
        found = rollouts.log_probs(llm, output)
        for one, values in zip(output.outputs, found, strict=True):
            ids = torch.tensor([output.prompt_token_ids + one.token_ids])
            with torch.no_grad():
                logits = first(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=1e-4)
    assert llm.engine.runner.log_probs == {}


def test_what_cannot_be_updated_changes_nothing(policies):
    llm, first, second = policies
    tokens_of(llm)
    good, name = second.state_dict(), "model.layers.1.self_attn.q_proj.weight"
    bad = {"model.layers.9.mlp.up_proj.weight": good[name], name: good[name][:5]}
    for tensors in ({**good, **dict([one])} for one in bad.items()):
        with pytest.raises(ValueError, match=r"tensors(\[| has )'model\.layers"):
            rollouts.update_weights(llm, tensors)
    with pytest.raises(ValueError, match=r"of a floating-point type, got \[128, 64\] of torch\.int64"):
        rollouts.update_weights(llm, {**good, name: good[name].long()})
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    for change in (lambda: rollouts.update_weights(llm, good), lambda: rollouts.sleep(llm)):
        with pytest.raises(RuntimeError, match="the engine has unfinished requests: finish or abort them first"):
            change()
    stream.close()
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected_of(first)
    assert again[1].num_cached_tokens == 16


def test_layers_that_pack_their_weights_are_not_used():
    """With the extras, `auto` on a CPU would be such a backend. Tied embeddings are one tensor with two names."""
    llm = LLM(TINY_QWEN3, num_kv_blocks=24, **{**OPTIONS, "block_size": 16})
    embedding = llm.engine.runner.model.model.embed_tokens.weight
    names = ("model.embed_tokens.weight", "lm_head.weight")
    rollouts.update_weights(llm, dict.fromkeys(names, embedding * 2))
    with pytest.raises(ValueError, match="must be equal: config.json ties them together"):
        rollouts.update_weights(llm, {names[0]: embedding, names[1]: embedding + 1})
    with pytest.raises(TypeError, match="llm must be made with extension="):
        rollouts.update_weights(LLM(TINY_QWEN3, num_kv_blocks=8, attention_backend="torch"), {})


class OnCard(rollouts.RolloutRunner, cuda_stand_in.StandInRunner):
    pass


class OnCardEngine(cuda_stand_in.StandInEngine):
    def make_runner(self, folder):
        return OnCard(self.config, folder)


class OnCardLLM(LLM):
    def make_engine(self, model, options):
        return OnCardEngine(Config(model, **options))


def test_graphs_outlive_an_update_and_are_recorded_again_after_sleep(checkpoints, monkeypatch):
    cuda_stand_in.install(monkeypatch)
    (folder, first), (_, second) = checkpoints.make(seed=0), checkpoints.make(seed=1)
    llm = OnCardLLM(folder, attention_backend="flash_attn", num_kv_blocks=24, max_num_seqs=3, **OPTIONS)
    runner = llm.engine.runner
    graphs = runner.graphs
    assert tokens_of(llm) == expected_of(first)
    rollouts.update_weights(llm, second.state_dict())
    assert tokens_of(llm) == expected_of(second)
    assert runner.graphs is graphs
    rollouts.sleep(llm, offload_weights=True)
    assert runner.graphs is None
    rollouts.wake(llm)
    assert tokens_of(llm) == expected_of(second)
    assert sum(replay.__self__.num_replays for replay, _ in runner.graphs.graphs.values()) > 0
