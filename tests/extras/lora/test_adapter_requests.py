"""Requests with adapters: every kind of request, the prefix cache, and adapters that come and go.

The oracle is an engine whose checkpoint is PEFT's merged model.
"""

import shutil

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, BeamSearchParams, LoRARequest, SamplingParams
from tests.extras.lora.peft_adapters import make_adapter

OPTIONS = {"dtype": "float32", "num_kv_blocks": 64, "check_invariants": True}
LORA = {**OPTIONS, "enable_lora": True, "max_loras": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "What is a block table, and who owns it? Which blocks are free, and which of them are shared?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three adapters, and the merged checkpoint of the first."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "c")):
        model = make_adapter(root / name, seed, scale=0.6)
        if name == "a":
            model.merge_and_unload().save_pretrained(root / "merged")
    for file in TINY_QWEN3.glob("*token*"):
        shutil.copy(file, root / "merged")
    return root


@pytest.fixture
def llm():
    with LLM(TINY_QWEN3, **LORA) as llm:
        yield llm


def adapter(folders, name):
    return LoRARequest(name, 1 + "abc".index(name), folders / name)


def tokens(llm, lora_request=None):
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=lora_request)
    return list(output.outputs[0].token_ids)


def answers(llm, **adapters):
    """The answers to one request of each kind."""
    n = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    (samples,) = llm.generate(PROMPT, n, use_tqdm=False, **adapters)
    (beams,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=3, max_tokens=5), **adapters)
    (embedding,) = llm.embed(PROMPT, use_tqdm=False, **adapters)
    (score,) = llm.score(PROMPT, "Blocks are shared.", use_tqdm=False, **adapters)
    (chat,) = llm.chat([{"role": "user", "content": PROMPT}], GREEDY, use_tqdm=False, **adapters)
    return {
        "samples": [one.token_ids for one in samples.outputs],
        "prompt": [{key: one.rank for key, one in row.items()} for row in samples.prompt_logprobs[1:]],
        "beams": [beam.tokens for beam in beams.sequences],
        "chat": chat.outputs[0].text,
        "stream": [output.outputs[0].text for output in llm.stream(PROMPT, GREEDY, **adapters)],
    }, [*embedding.outputs.embedding, score.outputs.score]


def test_all_kinds_of_requests_are_those_of_the_merged_model(llm, folders):
    found, numbers = answers(llm, lora_request=adapter(folders, "a"))
    with LLM(folders / "merged", **OPTIONS) as merged:
        expected, numbers_of_merged = answers(merged)
    assert found == expected
    assert numbers == pytest.approx(numbers_of_merged, abs=1e-4)
    assert found != answers(llm)[0], "the adapter changes the answers"


def test_blocks_are_shared_by_the_same_adapter_only(llm, folders, tmp_path):
    hits = []
    for name in (None, "a", "b", "a", None):
        request = None if name is None else adapter(folders, name)
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=request)
        hits.append(output.num_cached_tokens)
    num_full = (len(output.prompt_token_ids) - 1) // 16 * 16
    assert hits == [0, 0, 0, num_full, num_full] != [0] * 5
    # in a store, adapters are known by what is in their files: other names and numbers find the same blocks
    config = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": tmp_path}}
    hits = []
    for name, number, folder in (("x", 1, "a"), ("y", 2, "b"), ("z", 9, "a")):
        with LLM(TINY_QWEN3, **LORA, kv_transfer_config=config) as one:
            request = LoRARequest(name, number, folders / folder)
            (output,) = one.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=request)
            hits.append(output.num_cached_tokens)
    assert hits == [0, 0, num_full]


def test_adapters_come_and_go(folders):
    with LLM(TINY_QWEN3, **{**LORA, "max_loras": 1}, max_cpu_loras=2) as llm:
        engine = llm.engine
        expected = {name: tokens(llm, adapter(folders, name)) for name in "ab"}
        assert engine.list_loras() == {1, 2}
        stream = llm.stream(PROMPT, GREEDY, lora_request=adapter(folders, "a"))
        next(stream)
        assert engine.remove_lora(1)
        assert engine.remove_lora(1) is False
        # the number gets other files, while the first adapter still runs: it waits for the only slot
        assert tokens(llm, LoRARequest("a", 1, folders / "b")) == expected["b"]
        assert list([*stream][-1].outputs[0].token_ids) == expected["a"]
        assert tokens(llm, LoRARequest("c", 3, folders / "c")) not in expected.values()
        assert engine.list_loras() == {1, 3}, "the least recently used one is forgotten"
        with pytest.raises(ValueError, match="must be a folder"):
            engine.add_lora(LoRARequest("damaged", 9, folders))
        assert engine.list_loras() == {1, 3}, "and not for one that cannot be read"
        assert tokens(llm, adapter(folders, "b")) == expected["b"], "and read again"


def test_what_cannot_be_served_is_refused_before_anything_is_queued(llm, folders):
    expected = tokens(llm, adapter(folders, "a"))
    bad = [
        (LoRARequest("x", 7, folders), ValueError, r"must be a folder with adapter_config\.json"),
        (LoRARequest("x", 7, "a" * 5000), ValueError, "lora_path cannot be read: .*File name too long"),
        (LoRARequest("b", 1, folders / "b"), ValueError, "lora_int_id 1 belongs to the adapter 'a'"),
        (LoRARequest("a", 7, folders / "a"), ValueError, "lora_name 'a' belongs to the adapter with lora_int_id 1"),
        ("a", TypeError, "lora_request must be a LoRARequest, a list"),
        ([None, None], ValueError, "one lora_request for each prompt, got 2 for 1"),
    ]
    for request, error, message in bad:
        with pytest.raises(error, match=message):
            llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=request)
    assert llm.engine.list_loras() == {1}
    assert not llm.engine.has_unfinished_requests()
    assert tokens(llm, adapter(folders, "a")) == expected
    with LLM(TINY_QWEN3, **OPTIONS) as plain, pytest.raises(ValueError, match="needs enable_lora=True"):
        plain.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=adapter(folders, "a"))
    for values, error in ((("", 1, "x"), ValueError), (("a", 0, "x"), ValueError), (("a", 1, None), TypeError)):
        with pytest.raises(error):
            LoRARequest(*values)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_memory_is_free_when_the_last_request_of_a_removed_adapter_ends(llm, folders, is_aborted):
    engine, in_memory = llm.engine, llm.engine.runner.adapters._packed
    for name in "ab":
        engine.add_request(name, PROMPT, GREEDY, lora_request=adapter(folders, name))
    engine.step()
    assert engine.remove_lora(1)
    assert len(in_memory) == 2, "its request still runs"
    if is_aborted:
        engine.abort_request("a")
        assert len(in_memory) == 1
    while engine.has_unfinished_requests():
        engine.step()
    assert len(in_memory) == 1
    assert engine.list_loras() == {2}
