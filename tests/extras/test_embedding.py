"""Embeddings equal what `transformers` computes: its last hidden states, pooled here in float64."""

import numpy as np
import pytest
import torch

from nanovllm_extras import LLM, PoolingParams, SamplingParams
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.options.all_options import Config
from tests.conftest import hf_greedy

LENGTHS = [1, 2, 15, 16, 17, 40, 64, 3]
SHARED = [(11 * i) % 290 + 1 for i in range(32)]  # two blocks that all but the first three prompts begin with


def prompts_of(lengths=LENGTHS):
    return [(SHARED + [(7 * i * j) % 290 + 1 for j in range(1, 60)])[:n] for i, n in enumerate(lengths)]


def hf_embedding(model, prompt, pooling, normalize=True):
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()  # [num_tokens, hidden_size]
    embedding = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
    return embedding / np.linalg.norm(embedding) if normalize else embedding


def assert_embeddings(outputs, model, prompts, poolings, normalize=True):
    for output, prompt, pooling in zip(outputs, prompts, poolings, strict=True):
        expected = hf_embedding(model, prompt, pooling, normalize)
        assert output.prompt_token_ids == prompt
        assert output.finished
        assert output.outputs.hidden_size == len(expected)
        np.testing.assert_allclose(output.outputs.embedding, expected, rtol=1e-4, atol=2e-5)


OPTIONS = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 7, "block_size": 4},
    "one-by-one": {"max_num_batched_tokens": 1, "enable_prefix_caching": False},
    "overlap": {"max_num_batched_tokens": 16, "enable_overlap": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_embeddings_are_those_of_transformers(tiny_checkpoint, options):
    folder, model = tiny_checkpoint
    prompts = prompts_of()
    with LLM(folder, **{"attention_backend": "torch", "num_kv_blocks": 200, **options}) as llm:
        for pooling in ("last", "mean"):
            for normalize in (True, False):
                params = PoolingParams(pooling=pooling, normalize=normalize)
                outputs = llm.embed(prompts, params, use_tqdm=False)
                assert_embeddings(outputs, model, prompts, [pooling] * len(prompts), normalize)
        assert_embeddings(llm.embed(prompts[4], use_tqdm=False), model, prompts[4:5], ["last"])
        assert llm.get_stats().num_free_blocks == 200


def test_the_cpu_backend_too(tiny_checkpoint):
    folder, model = tiny_checkpoint
    with LLM(folder, num_kv_blocks=50) as llm:
        both = [PoolingParams("last"), PoolingParams("mean")]
        outputs = llm.embed(prompts_of([20, 30]), both, use_tqdm=False)
        assert_embeddings(outputs, model, prompts_of([20, 30]), ["last", "mean"])


def test_subclasses_of_pooling_params(tiny_checkpoint):
    class Mean(PoolingParams):
        def __init__(self):
            super().__init__("mean")

    folder, model = tiny_checkpoint
    with LLM(folder, num_kv_blocks=50, attention_backend="torch") as llm:
        assert_embeddings(llm.embed(prompts_of([20]), Mean(), use_tqdm=False), model, prompts_of([20]), ["mean"])
        params = Mean()
        params.pooling = "first"
        with pytest.raises(ValueError, match="pooling must be"):
            llm.embed(prompts_of([20]), params, use_tqdm=False)


def test_the_mean_takes_no_prefix_hits_and_leaves_its_blocks_to_others(tiny_checkpoint):
    folder, model = tiny_checkpoint
    prompt = prompts_of([64])[0]
    with LLM(folder, attention_backend="torch", num_kv_blocks=50, block_size=16) as llm:
        found = []
        for pooling in ("mean", "last", "mean"):
            outputs = llm.embed(prompt, PoolingParams(pooling), use_tqdm=False)
            assert_embeddings(outputs, model, [prompt], [pooling])
            found.append(outputs[0].num_cached_tokens)
        assert found == [0, 48, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 22},
        {"num_kv_blocks": 22, "enable_overlap": True},
        {"num_kv_blocks": 22, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    ],
    ids=["recompute", "overlap", "swap"],
)
def test_beside_sequences_that_decode_and_preempted_in_the_middle_of_a_prompt(tiny_checkpoint, options):
    """Generations arrive first and grow; with priorities, later ones push a half-computed prompt out."""
    folder, model = tiny_checkpoint
    engine = LLMEngine(
        Config(
            folder,
            attention_backend="torch",
            block_size=4,
            max_num_batched_tokens=5,
            scheduling_policy="priority",
            **options,
        )
    )
    prompts = prompts_of([40, 64, 50, 33])
    texts = [[5, 6, 7], [9, 10], [20, 21, 22, 23]]
    poolings = ["mean", "last", "mean", "mean"]
    for i, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True)):
        engine.add_request(f"e{i}", prompt, PoolingParams(pooling), priority=5)
    outputs, num_preempted, step = {}, 0, 0
    while engine.has_unfinished_requests():
        if step < len(texts):
            params = SamplingParams(temperature=0, max_tokens=40)
            engine.add_request(f"g{step}", texts[step], params, priority=0, stream=False)
        done = engine.step()
        num_preempted += done.num_preempted
        outputs.update({output.request_id: output for output in done.outputs})
        step += 1
    assert num_preempted > 0
    assert_embeddings([outputs[f"e{i}"] for i in range(4)], model, prompts, poolings)
    for i, text in enumerate(texts):
        assert outputs[f"g{i}"].outputs[0].token_ids == hf_greedy(model, text, 40)


def test_a_failed_step_counts_no_token_twice(tiny_checkpoint, monkeypatch):
    folder, model = tiny_checkpoint
    engine = LLMEngine(Config(folder, attention_backend="torch", num_kv_blocks=60, max_num_batched_tokens=10))
    run_batch, calls = engine.runner.run, []

    def fail_at_times(batch):
        calls.append(batch)
        if len(calls) in (3, 7, 8):
            raise RuntimeError("the device is gone")
        return run_batch(batch)

    monkeypatch.setattr(engine.runner, "run", fail_at_times)
    prompts = prompts_of([45, 30])
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, PoolingParams("mean"))
    outputs = {}
    while engine.has_unfinished_requests():
        try:
            outputs.update({output.request_id: output for output in engine.step().outputs})
        except RuntimeError as error:
            assert "gone" in str(error)  # noqa: PT017
    assert_embeddings([outputs["0"], outputs["1"]], model, prompts, ["mean", "mean"])


def test_texts_dicts_and_progress(with_tokenizer, tiny_checkpoint, capsys):
    with LLM(with_tokenizer, attention_backend="torch", num_kv_blocks=60) as llm:
        ids = llm.get_tokenizer().encode("Paged attention")
        outputs = llm.embed(["Paged attention", {"prompt": "Paged attention"}, {"prompt_token_ids": ids}, ids])
        assert_embeddings(outputs, tiny_checkpoint[1], [ids] * 4, ["last"] * 4)
        assert llm.embed([]) == []
        assert llm.generate("Paged", use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1], SamplingParams()), TypeError, "pooling_params must be a PoolingParams"),
        (([[1], [2]], [PoolingParams()]), ValueError, "one pooling_params for each prompt, got 1 for 2"),
        (([],), None, ""),
        (([300],), ValueError, r"\[0\] must be an integer .* <= 299"),
        (([1] * 512,), ValueError, "the prompt has 512 tokens; at most 511"),
        (([1], "last"), TypeError, "pooling_params"),
    ],
)
def test_bad_calls_change_nothing(tiny_checkpoint, arguments, error, words):
    with LLM(tiny_checkpoint[0], attention_backend="torch", num_kv_blocks=60) as llm:
        if error is None:
            assert llm.embed(*arguments) == []
            return
        with pytest.raises(error, match=words):
            llm.embed(*arguments, use_tqdm=False)
        with pytest.raises(TypeError, match="sampling_params"):
            llm.generate([1], PoolingParams(), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()


def test_pooling_params_are_checked_and_copied(tiny_checkpoint):
    for fields, error in (({"pooling": "max"}, ValueError), ({"normalize": 1}, TypeError)):
        with pytest.raises(error, match=next(iter(fields))):
            PoolingParams(**fields)
    engine = LLMEngine(Config(tiny_checkpoint[0], attention_backend="torch", num_kv_blocks=60))
    params = PoolingParams("mean")
    engine.add_request("a", [1, 2, 3], params)
    params.pooling = "last"
    assert_embeddings(engine.step().outputs, tiny_checkpoint[1], [[1, 2, 3]], ["mean"])
    params.pooling = "sum"
    with pytest.raises(ValueError, match="pooling must be one of last, mean"):
        engine.add_request("b", [1], params)
    assert not engine.has_unfinished_requests()
