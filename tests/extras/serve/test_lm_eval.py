"""lm-eval scores the server: choices and texts, from data that are here.

Needs the extra `lm-eval`. The oracle is an engine of its own, offline: its log-probabilities of the same tokens.
"""

import importlib.util
import json
import math

import pytest

from nanovllm_extras import TINY_QWEN3, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs pip install -e '.[lm-eval]'"),
]

CHOICES = [" in small blocks of fixed size", " on the moon", " in a queue of cats"]
DOCS = [
    {"question": "Paged attention stores the KV cache", "choices": CHOICES, "label": 0},
    {"question": "A block table lists", "choices": [" the blocks of each sequence", " bananas"], "label": 0},
    {"question": "Continuous batching lets", "choices": [" purple", " sequences share a forward pass"], "label": 1},
]
TEXTS = [{"text": "The KV cache keeps keys and values of all tokens so far."}, {"text": "Blocks are shared."}]
TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{label}}", "target_delimiter": "",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}]},
}  # fmt: skip


@pytest.fixture
def evaluate(bundled_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def run(task, docs):
        import lm_eval
        import yaml
        from lm_eval.tasks import TaskManager

        data = tmp_path / f"{task}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
        config = {"task": task, "dataset_path": "json", "test_split": "test", **TASKS[task]}
        config["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}
        (tmp_path / f"{task}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = {"model": "tiny-qwen3", "base_url": bundled_server.url + "/v1/completions", "num_concurrent": 4}
        arguments |= {"max_retries": 1, "tokenizer": str(TINY_QWEN3), "max_length": 512}
        results = lm_eval.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=[task], bootstrap_iters=0, log_samples=True,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        )  # fmt: skip
        return results["results"][task], results["samples"][task]

    return run


def logprobs_of(offline, token_ids):
    """Of each token but the first, after those before it."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = offline.llm.generate([token_ids], params, use_tqdm=False)
    return [
        position[token_id].logprob
        for position, token_id in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    ]  # fmt: skip


def test_choices_are_the_likeliest(evaluate, offline):
    results, samples = evaluate("choices", DOCS)
    encode = offline.llm.get_tokenizer().encode
    num_right = 0
    for doc, sample in zip(DOCS, sorted(samples, key=lambda one: one["doc_id"]), strict=True):
        num_before = len(encode(doc["question"]))
        expected = [sum(logprobs_of(offline, encode(doc["question"] + c))[num_before - 1 :]) for c in doc["choices"]]
        assert [float(one[0]) for one in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-3)
        num_right += expected.index(max(expected)) == doc["label"]
    assert results["acc,none"] == pytest.approx(num_right / len(DOCS))


def test_whole_texts_have_their_perplexity(evaluate, offline):
    results, _ = evaluate("rolling", TEXTS)
    tokenizer = offline.llm.get_tokenizer()
    total = sum(  # lm-eval puts the end token before a text
        sum(logprobs_of(offline, [tokenizer.eos_token_id, *tokenizer.encode(doc["text"])])) for doc in TEXTS
    )
    num_bytes = sum(len(doc["text"].encode()) for doc in TEXTS)
    num_words = sum(len(doc["text"].split()) for doc in TEXTS)
    assert results["bits_per_byte,none"] == pytest.approx(-total / num_bytes / math.log(2), rel=1e-4)
    assert results["word_perplexity,none"] == pytest.approx(math.exp(-total / num_words), rel=1e-4)
