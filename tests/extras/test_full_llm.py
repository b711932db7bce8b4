"""`LLM`, as its users meet it: prompts in every form, chat, outputs, statistics, bad input, interrupts, the end.

Oracles: `transformers` greedy `generate` for the tokens, `AutoTokenizer` for text and chat templates, arithmetic for
the statistics, and an undisturbed engine for a disturbed one. The model is random; the tokenizer is trained here, with
fewer tokens than the model's vocabulary has.
"""

import gc
import io
import json
import math
import random
import shutil
import signal
import sys
import time
import traceback
import weakref
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

import nanovllm
from nanovllm_extras import LLM, CompletionOutput, Config, EngineStats, LLMEngine, RequestOutput, SamplingParams
from tests.conftest import examples, hf_greedy

pytestmark = pytest.mark.usefixtures("little_to_search")

VOCAB_SIZE = 300  # the model's
MAX_MODEL_LEN = 512  # the model's max_position_embeddings
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["Hello there", "Paged attention keeps K and V in blocks.", "a", "naïve café ☕"]
MESSAGES = [{"role": "user", "content": "What is a block table?"}]


def save_tokenizer(folder):
    """Byte-level BPE with 12 merges and three special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=3 + 256 + 12,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(checkpoints, tmp_path_factory):
    """(folder with a tokenizer, transformers model); no end-of-sequence token but the tokenizer's."""
    folder, model = checkpoints.make(num_hidden_layers=1)
    copied = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(folder, copied)
    save_tokenizer(copied)
    return copied, model


@pytest.fixture(scope="module")
def hf_tokenizer(checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint[0])
    assert len(tokenizer) < VOCAB_SIZE
    return tokenizer


def make_llm(folder, **options):
    options = {"num_kv_blocks": 64, "block_size": 16, **options}
    return LLM(model=folder, dtype="float32", device="cpu", attention_backend="torch", **options)


@pytest.fixture(scope="module")
def llm(checkpoint):
    """One engine for all tests that leave it as it was."""
    return make_llm(checkpoint[0])


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def ids(length, seed=0):
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_at_rest(llm):
    """Nothing runs, waits or owns a block."""
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0
    assert not llm.engine.has_unfinished_requests()


def generate(llm, prompts, params=None):
    return llm.generate(prompts, params or greedy(), use_tqdm=False)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda text, token_ids: text,
        lambda text, token_ids: token_ids,
        lambda text, token_ids: {"prompt": text},
        lambda text, token_ids: {"prompt_token_ids": token_ids},
    ],
    ids=["str", "ids", "dict of str", "dict of ids"],
)
def test_every_prompt_form(llm, checkpoint, hf_tokenizer, form):
    for text in TEXTS:
        token_ids = hf_tokenizer.encode(text)
        prompt = form(text, token_ids)
        expected = hf_greedy(checkpoint[1], token_ids, 8)
        outputs = generate(llm, prompt)  # one
        outputs += generate(llm, [prompt])  # a list
        assert tokens_of(outputs) == [expected, expected]
        is_text = prompt == text or "prompt" in prompt
        for output in outputs:
            assert output.prompt_token_ids == token_ids
            assert output.prompt == (text if is_text else None)


def test_forms_may_be_mixed_and_the_order_is_kept(llm, checkpoint, hf_tokenizer):
    texts = [TEXTS[i % len(TEXTS)] * (1 + i % 3) for i in range(12)]
    prompts = []
    for i, text in enumerate(texts):
        token_ids = hf_tokenizer.encode(text)
        prompts.append([text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}][i % 4])
    # the later, the fewer tokens: the last request finishes first
    outputs = generate(llm, prompts, [greedy(24 - 2 * i) for i in range(12)])
    for i, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        token_ids = hf_tokenizer.encode(text)
        assert output.prompt_token_ids == token_ids
        assert output.outputs[0].token_ids == hf_greedy(checkpoint[1], token_ids, 24 - 2 * i)


def test_order_is_kept_when_sequences_wait_for_their_turn(checkpoint):
    prompts = [ids(1 + 5 * i % 13, seed=i) for i in range(11)]
    outputs = generate(make_llm(checkpoint[0], max_num_seqs=2), prompts)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], prompt, 8) for prompt in prompts]


def test_equal_prompts_are_separate_requests(llm):
    outputs = generate(llm, [[5, 6, 7]] * 3, [greedy(n) for n in (3, 1, 2)])
    assert [len(token_ids) for token_ids in tokens_of(outputs)] == [3, 1, 2]
    assert len({output.request_id for output in outputs}) == 3


def test_a_list_of_ids_is_one_prompt(llm):
    assert len(generate(llm, [1, 2, 3])) == 1
    assert len(generate(llm, [[1, 2], [3]])) == 2


def test_the_callers_lists_are_left_alone_and_not_shared(llm):
    prompt = [1, 2, 3]
    prompts, params = [prompt], [greedy(4)]
    (output,) = generate(llm, prompts, params)
    assert (prompts, params) == ([[1, 2, 3]], [greedy(4)])
    output.outputs[0].token_ids.clear()
    prompt.append(4)
    assert output.prompt_token_ids == [1, 2, 3]
    assert len(tokens_of(generate(llm, [[1, 2, 3]], greedy(4)))[0]) == 4


# --- sampling parameters -------------------------------------------------------------------------------------------


def test_one_sampling_params_for_all_or_one_for_each(llm):
    prompts = [[1], [2], [3]]
    assert [len(t) for t in tokens_of(generate(llm, prompts, greedy(5)))] == [5, 5, 5]
    assert [len(t) for t in tokens_of(generate(llm, prompts, [greedy(5)] * 3))] == [5, 5, 5]
    assert [len(t) for t in tokens_of(generate(llm, prompts, [greedy(4), greedy(1), greedy(9)]))] == [4, 1, 9]


def test_without_sampling_params_16_tokens_come(checkpoint):
    llm = make_llm(checkpoint[0])
    llm.engine.input_processor.eos_token_ids = frozenset()
    outputs = llm.generate([ids(5)], use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 16 == SamplingParams().max_tokens


def test_max_tokens_none_goes_on_to_max_model_len(checkpoint):
    (output,) = generate(make_llm(checkpoint[0], max_model_len=50), [ids(20)], greedy(None))
    assert tokens_of([output]) == [hf_greedy(checkpoint[1], ids(20), 30)]
    assert output.outputs[0].finish_reason == "length"


def test_draws_depend_on_the_seed_alone(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)

    def draw(seed):
        return tokens_of(generate(make_llm(checkpoint[0], seed=seed), [ids(4), ids(9)], params))

    assert draw(0) == draw(0) != draw(1)


def test_greedy_and_random_in_one_batch(checkpoint):
    """A neighbour that is sampled does not make a greedy request random; a sampled one is not made greedy."""
    params = [greedy(20), SamplingParams(temperature=5.0, max_tokens=20, ignore_eos=True)] * 3
    outputs = tokens_of(generate(make_llm(checkpoint[0]), [ids(6)] * 6, params))
    expected = hf_greedy(checkpoint[1], ids(6), 20)
    assert outputs[::2] == [expected] * 3
    assert expected not in outputs[1::2]
    assert outputs[1] != outputs[3] != outputs[5]


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-44, 1e-300])
def test_the_least_temperatures_are_greedy(llm, checkpoint, temperature):
    outputs = generate(llm, [ids(6)] * 3, SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True))
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], ids(6), 12)] * 3


@pytest.mark.parametrize("temperature", [1e6, pytest.param(1e38, marks=pytest.mark.slow), 1e300])
def test_the_highest_temperatures_draw_from_all_tokens(llm, temperature):
    """300 tokens, 2,000 draws: about 299.6 of them come."""
    params = SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True)
    drawn = {token_id for t in tokens_of(generate(llm, [ids(6)] * 10, params)) for token_id in t}
    assert len(drawn) > 280
    assert drawn <= set(range(VOCAB_SIZE))


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ending(checkpoint, tmp_path):
    """(folder, prompt, transformers' greedy output, index of its end token): generation_config names the end token."""
    folder, model = checkpoint
    prompt = ids(9)
    answer = hf_greedy(model, prompt, 20)
    end = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    copied = tmp_path / "ending"
    shutil.copytree(folder, copied)
    path = copied / "generation_config.json"
    generation_config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**generation_config, "eos_token_id": [299, answer[end]]}))
    return copied, prompt, answer, end


def test_an_end_token_ends_the_request(ending):
    folder, prompt, answer, end = ending
    (output,) = generate(make_llm(folder), [prompt], greedy(20, ignore_eos=False))
    completion = output.outputs[0]
    assert completion.token_ids == answer[: end + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_an_end_token_at_max_tokens_is_a_stop(ending):
    folder, prompt, answer, end = ending
    (output,) = generate(make_llm(folder), [prompt], greedy(end + 1, ignore_eos=False))
    assert output.outputs[0].token_ids == answer[: end + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_ignore_eos(ending):
    folder, prompt, answer, _ = ending
    (output,) = generate(make_llm(folder), [prompt], greedy(20, ignore_eos=True))
    assert output.outputs[0].token_ids == answer
    assert output.outputs[0].finish_reason == "length"


def test_the_tokenizers_end_token_ends_the_request(checkpoint, hf_tokenizer, tmp_path):
    """Here transformers' own config names none: a chat model's turn still ends."""
    folder, model = checkpoint
    answer = hf_greedy(model, ids(9), 20)
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    # swap rows of the vocabulary, so that <|im_end|> is what the model says
    end = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    first = next(i for i, token_id in enumerate(answer) if token_id == answer[end])
    hf_model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    said, eos = answer[end], hf_tokenizer.eos_token_id
    assert eos not in answer
    with torch.no_grad():
        hf_model.lm_head.weight[[said, eos]] = hf_model.lm_head.weight[[eos, said]]
    hf_model.save_pretrained(copied)
    (output,) = generate(make_llm(copied), [ids(9)], greedy(20, ignore_eos=False))
    assert output.outputs[0].token_ids == [*answer[:first], eos]
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_token_ids(llm, checkpoint, ignore_eos):
    answer = hf_greedy(checkpoint[1], ids(9), 20)
    end = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    params = greedy(20, ignore_eos=ignore_eos, stop_token_ids=[298, answer[end], answer[end]])
    neighbour = greedy(20, ignore_eos=True)
    stopped, other = generate(llm, [ids(9), ids(9)], [params, neighbour])
    assert stopped.outputs[0].token_ids == answer[: end + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", answer[end])
    assert other.outputs[0].token_ids == answer
    assert (other.outputs[0].finish_reason, other.outputs[0].stop_reason) == ("length", None)


def test_a_stop_token_in_the_prompt_stops_nothing(llm, checkpoint):
    answer = hf_greedy(checkpoint[1], ids(9), 6)
    absent = next(token_id for token_id in ids(9) if token_id not in answer)
    (output,) = generate(llm, [ids(9)], greedy(6, stop_token_ids=[absent]))
    assert output.outputs[0].token_ids == answer


# --- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 8192])
def test_max_model_len_is_kept_to_the_token(checkpoint, budget):
    llm = make_llm(checkpoint[0], max_model_len=40, max_num_batched_tokens=budget, block_size=8)
    lengths = [1, 31, 32, 33, 38, 39]
    outputs = generate(llm, [ids(n) for n in lengths], greedy(1000))
    for n, output in zip(lengths, outputs, strict=True):
        assert output.outputs[0].token_ids == hf_greedy(checkpoint[1], ids(n), 40 - n)
        assert output.outputs[0].finish_reason == "length"
    assert_at_rest(llm)


def test_the_models_own_limit_holds_by_default(checkpoint):
    llm = make_llm(checkpoint[0])
    (output,) = generate(llm, [ids(MAX_MODEL_LEN - 3)], greedy(1000))
    assert output.outputs[0].token_ids == hf_greedy(checkpoint[1], ids(MAX_MODEL_LEN - 3), 3)
    with pytest.raises(ValueError, match=rf"{MAX_MODEL_LEN}\b.*{MAX_MODEL_LEN - 1}\b"):
        generate(llm, [ids(MAX_MODEL_LEN)])


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("block_size", "num_kv_blocks"), [(1, 32), (8, 4), (16, 2), (32, 1)])
def test_a_request_that_fills_the_whole_cache(checkpoint, block_size, num_kv_blocks, enable_prefix_caching):
    """It ends when all 32 slots hold a token and another one was drawn; its neighbours get their own tokens."""
    llm = make_llm(
        checkpoint[0],
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_caching=enable_prefix_caching,
    )
    prompts = [ids(5, seed=1), ids(20, seed=2), ids(12, seed=3), ids(3, seed=4), ids(32, seed=5)]
    max_tokens = [9, 1000, None, 10, 50]
    outputs = generate(llm, prompts, [greedy(n) for n in max_tokens])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        completion = output.outputs[0]
        fills = i in (1, 2, 4)
        num_tokens = 33 - len(prompt) if fills else max_tokens[i]
        assert completion.token_ids == hf_greedy(checkpoint[1], prompt, num_tokens)
        assert completion.finish_reason == "length"
        assert completion.stop_reason == ("kv_cache" if fills else None)
    assert_at_rest(llm)


def test_to_end_exactly_where_the_cache_ends_is_an_ordinary_end(checkpoint):
    llm = make_llm(checkpoint[0], block_size=8, num_kv_blocks=4)
    (output,) = generate(llm, [ids(20)], greedy(13))  # 20 + 12 tokens are stored
    assert output.outputs[0].token_ids == hf_greedy(checkpoint[1], ids(20), 13)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)


# --- outputs, metrics, statistics ----------------------------------------------------------------------------------


def test_fields_of_an_output(llm, hf_tokenizer):
    (output,) = generate(llm, [TEXTS[0]], greedy(6))
    assert isinstance(output, RequestOutput)
    assert isinstance(output.request_id, str)
    assert output.finished is True
    assert output.num_cached_tokens == 0
    assert len(output.outputs) == 1
    completion = output.outputs[0]
    assert isinstance(completion, CompletionOutput)
    assert completion.index == 0
    assert all(type(token_id) is int for token_id in completion.token_ids)
    assert completion.text == hf_tokenizer.decode(completion.token_ids, skip_special_tokens=True)


@pytest.mark.examples
def test_texts_are_the_tokenizers(llm, checkpoint, hf_tokenizer):
    """Random bytes, mostly no valid UTF-8, with ids that the tokenizer does not have: those decode to nothing."""
    whole = hf_tokenizer.encode("a")  # at the end of a prompt, so that no character is left for the output to complete
    prompts = [[*ids(6, seed=i), *whole] for i in range(examples(30))]
    outputs = generate(llm, prompts, greedy(40))
    assert any(token_id >= len(hf_tokenizer) for token_ids in tokens_of(outputs) for token_id in token_ids)
    for i, output in enumerate(outputs):
        token_ids = output.outputs[0].token_ids
        assert token_ids == hf_greedy(checkpoint[1], prompts[i], 40)
        known = [token_id for token_id in token_ids if token_id < len(hf_tokenizer)]
        assert output.outputs[0].text == hf_tokenizer.decode(known, skip_special_tokens=True)


def test_ids_beyond_the_tokenizer_are_legal_in_prompts_and_as_stops(llm, checkpoint, hf_tokenizer):
    prompt = [VOCAB_SIZE - 1, len(hf_tokenizer), 5]
    (output,) = generate(llm, [prompt], greedy(8, stop_token_ids=[VOCAB_SIZE - 1]))
    expected = hf_greedy(checkpoint[1], prompt, 8)
    assert output.outputs[0].token_ids == expected[: len(output.outputs[0].token_ids)]


def test_metrics(llm):
    before = time.monotonic()
    outputs = generate(llm, [ids(5), ids(50), ids(3)], [greedy(20), greedy(10), greedy(1)])
    after = time.monotonic()
    for output in outputs:
        metrics = output.metrics
        assert before <= metrics.arrival_time < metrics.first_token_time <= metrics.finished_time <= after
        assert metrics.ttft == metrics.first_token_time - metrics.arrival_time > 0
    for output, num_tokens in zip(outputs[:2], (20, 10), strict=True):
        metrics = output.metrics
        expected = (metrics.finished_time - metrics.first_token_time) / (num_tokens - 1)
        assert metrics.tpot == pytest.approx(expected)
        assert metrics.tpot > 0
    assert outputs[2].metrics.first_token_time == outputs[2].metrics.finished_time
    assert outputs[2].metrics.tpot is None
    assert outputs[1].metrics.finished_time < outputs[0].metrics.finished_time


def test_statistics_of_a_worked_example(checkpoint):
    """5 prompt tokens and 3 output tokens in blocks of 4: 5, 6, 7 tokens stored, 8 slots reserved each time."""
    llm = make_llm(checkpoint[0], block_size=4, num_kv_blocks=10)
    zero = llm.get_stats()
    assert isinstance(zero, EngineStats)
    assert (zero.steps, zero.kv_tokens_stored, zero.kv_slots_reserved, zero.num_free_blocks) == (0, 0, 0, 10)
    generate(llm, [[1, 2, 3, 4, 5]], greedy(3))
    stats = llm.get_stats()
    assert stats.steps == 3
    assert (stats.num_kv_blocks, stats.num_free_blocks, stats.num_running, stats.num_waiting) == (10, 10, 0, 0)
    assert stats.num_preemptions == 0
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (5, 0)
    assert (stats.kv_tokens_stored, stats.kv_slots_reserved) == (5 + 6 + 7, 3 * 8)
    assert zero.steps == 0  # a snapshot


def test_statistics_are_cumulative(checkpoint):
    llm = make_llm(checkpoint[0], block_size=4)
    seen = [llm.get_stats()]
    for _ in range(3):
        generate(llm, [ids(5), ids(11, seed=1)], greedy(3))
        seen.append(llm.get_stats())
    assert [s.steps for s in seen] == [0, 3, 6, 9]
    assert [s.prefix_cache_query_tokens for s in seen] == [0, 16, 32, 48]
    assert [s.prefix_cache_hit_tokens for s in seen] == [0, 0, 12, 24]  # 4 of 5 and 8 of 11
    assert [s.kv_tokens_stored for s in seen] == [0, 54, 108, 162]
    assert [s.kv_slots_reserved for s in seen] == [0, 3 * 20 + 4, 2 * (3 * 20 + 4), 3 * (3 * 20 + 4)]
    assert {s.num_free_blocks for s in seen} == {64}


def test_shared_blocks_count_once(checkpoint):
    """Two sequences of 9 tokens that share two full blocks of 4: 8 + 1 + 1 tokens in 4 blocks."""
    llm = make_llm(checkpoint[0], block_size=4)
    generate(llm, [ids(9)] * 2, greedy(1))
    stats = llm.get_stats()
    assert (stats.prefix_cache_hit_tokens, stats.steps) == (8, 1)
    assert (stats.kv_tokens_stored, stats.kv_slots_reserved) == (10, 16)


def test_num_cached_tokens_and_reset(checkpoint):
    llm = make_llm(checkpoint[0])
    prompt = ids(40)
    cached = []
    for reset in (False, False, True, False):
        if reset:
            llm.reset_prefix_cache()
        cached.append(generate(llm, [prompt])[0].num_cached_tokens)
    assert cached == [0, 32, 0, 32]
    assert_at_rest(llm)


def test_get_tokenizer(llm, hf_tokenizer):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode(TEXTS[1]) == hf_tokenizer.encode(TEXTS[1])
    assert tokenizer.decode([5, 6, 7]) == hf_tokenizer.decode([5, 6, 7])


@pytest.mark.parametrize("base", [nanovllm.SamplingParams, SamplingParams])
def test_subclasses_of_sampling_params(llm, base):
    class Greedy(base):
        def __init__(self, max_tokens):
            super().__init__(temperature=0, max_tokens=max_tokens)

    assert tokens_of(generate(llm, [GOOD], Greedy(4))) == tokens_of(generate(llm, [GOOD], greedy(4)))


def test_progress_bars_without_stderr(checkpoint, monkeypatch):
    """Of loading and of generating: as in a program of Windows without a console, or after `2>&-`."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            outputs = make_llm(checkpoint[0]).generate([[1], [2]], greedy(2))
        assert tokens_of(outputs) == [hf_greedy(checkpoint[1], prompt, 2) for prompt in ([1], [2])]


def test_progress_bar(llm, capfd):
    llm.generate([[1], [2]], greedy(2), use_tqdm=False)
    quiet = capfd.readouterr()
    assert quiet.out + quiet.err == ""
    llm.generate([[1], [2]], greedy(2))
    assert "2/2" in capfd.readouterr().err


# --- chat ----------------------------------------------------------------------------------------------------------


def test_chat(llm, checkpoint, hf_tokenizer):
    longer = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    expected = []
    for messages in (MESSAGES, longer):
        text = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected.append(hf_tokenizer.encode(text, add_special_tokens=False))
    assert hf_tokenizer.convert_tokens_to_ids("<|im_start|>") == expected[0][0]
    one = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    two = llm.chat([MESSAGES, longer], [greedy(3), greedy(8)], use_tqdm=False)
    assert [output.prompt_token_ids for output in one] == expected[:1]
    assert [output.prompt_token_ids for output in two] == expected
    assert tokens_of(one) == [hf_greedy(checkpoint[1], expected[0], 8)]
    assert tokens_of(two) == [hf_greedy(checkpoint[1], e, n) for e, n in zip(expected, (3, 8), strict=True)]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param("Hello", id="text"),
        pytest.param(["Hello"], id="list of text"),
        pytest.param([{"content": "no role"}], id="no role"),
        pytest.param([[{"role": "user", "content": "fine"}], "Hello"], id="one of two is text"),
        pytest.param(None, id="None"),
        pytest.param(7, id="number"),
    ],
)
def test_chat_with_bad_messages(llm, messages):
    before = llm.get_stats()
    with pytest.raises((ValueError, TypeError)):
        llm.chat(messages, greedy(), use_tqdm=False)
    assert llm.get_stats() == before


def test_chat_checks_lengths(llm):
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        llm.chat([MESSAGES, MESSAGES, MESSAGES], [greedy(), greedy()], use_tqdm=False)
    with pytest.raises(ValueError, match=str(MAX_MODEL_LEN - 1)):
        llm.chat([{"role": "user", "content": "z?" * 600}], greedy(), use_tqdm=False)
    assert_at_rest(llm)


def test_no_tokenizer(tiny_checkpoint):
    """Token ids work, texts are empty; what needs a tokenizer is refused."""
    folder, model = tiny_checkpoint
    llm = make_llm(folder)
    (output,) = generate(llm, [[1, 2, 3]])
    assert tokens_of([output]) == [hf_greedy(model, [1, 2, 3], 8)]
    with pytest.raises(ValueError, match="tokenizer"):
        generate(llm, ["Hello"])
    with pytest.raises(ValueError, match="tokenizer|chat.template"):
        llm.chat(MESSAGES, use_tqdm=False)
    assert_at_rest(llm)


def test_a_chat_template_of_several_is_chosen_by_its_name(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint[0], tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "tools {{ messages[0].content }}",
    }
    tokenizer.save_pretrained(folder)
    with LLM(folder, device="cpu") as llm:
        for name, text in (("tool_use", "tools Hi"), ("default", "plain Hi"), (None, "plain Hi"), ("{{ 5 }}", "5")):
            (prompt,) = llm.render_chat([{"role": "user", "content": "Hi"}], chat_template=name)
            assert prompt["prompt"] == text
        with pytest.raises(ValueError, match="chat_template must be a file, or a template in Jinja, got 'another'"):
            llm.render_chat([{"role": "user", "content": "Hi"}], chat_template="another")
    with LLM(folder, device="cpu", chat_template="tool_use") as llm:
        assert llm.render_chat([{"role": "user", "content": "Hi"}])[0]["prompt"] == "tools Hi"


def test_no_chat_template(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint[0], folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    llm = make_llm(folder)
    with pytest.raises(ValueError, match="chat.template"):
        llm.chat(MESSAGES, greedy(), use_tqdm=False)
    assert tokens_of(generate(llm, [[1, 2]])) == [hf_greedy(checkpoint[1], [1, 2], 8)]


# --- bad input -----------------------------------------------------------------------------------------------------

GOOD = [1, 2, 3]
BAD_PROMPTS = {
    # name: (prompt, exception, what the message must say)
    "empty list": ([], ValueError, ["empty"]),
    "empty text": ("", ValueError, ["empty"]),
    "empty dict of ids": ({"prompt_token_ids": []}, ValueError, ["empty"]),
    "empty dict of text": ({"prompt": ""}, ValueError, ["empty"]),
    "first id beyond": ([1, VOCAB_SIZE], ValueError, ["300", "299"]),
    "huge id": ([10**15], ValueError, ["1000000000000000", "299"]),
    "negative id": ([5, -1], ValueError, ["-1", "299"]),
    "id beyond in a dict": ({"prompt_token_ids": [VOCAB_SIZE + 7]}, ValueError, ["307", "299"]),
    "half a character": ("a\ud83d!", ValueError, [r"'\ud83d'", "at 1", "surrogate"]),
    "too long": ([7] * MAX_MODEL_LEN, ValueError, ["512", "511"]),
    "much too long": ([7] * 123456, ValueError, ["123456", "511"]),
    "float id": ([1.0, 2.0], TypeError, ["1.0"]),
    "bool id": ([True, 1], TypeError, ["True"]),
    "None id": ([1, None], TypeError, ["None"]),
    "text among ids": ([1, "a"], TypeError, ["'a'"]),
    "None": (None, TypeError, ["None"]),
    "number": (17, TypeError, ["int"]),
    "float": (1.5, TypeError, ["float"]),
    "bytes": (b"abc", TypeError, ["bytes"]),
    "empty dict": ({}, (ValueError, TypeError), ["prompt", "prompt_token_ids"]),
    "unknown key": ({"prompt": "a", "multi_modal": 1}, (ValueError, TypeError), ["multi_modal", "prompt_token_ids"]),
    "misspelt key": ({"prompt_ids": [1]}, (ValueError, TypeError), ["prompt_ids", "prompt_token_ids"]),
    "dict of number": ({"prompt": 5}, TypeError, ["prompt"]),
    "dict of text as ids": ({"prompt_token_ids": "abc"}, TypeError, ["prompt_token_ids"]),
    "dict of None": ({"prompt_token_ids": None}, TypeError, ["prompt_token_ids"]),
    "nested too deep": ([[1, 2]], TypeError, ["[1, 2]"]),
}


def assert_refused(llm, call, exception, says):
    """`call` raises, its message says so, nothing is queued or counted, and the engine goes on working."""
    before = llm.get_stats()
    with pytest.raises(exception) as info:
        call()
    assert not isinstance(info.value, AssertionError)
    for part in says:
        assert part in str(info.value)
    assert llm.get_stats() == before
    assert_at_rest(llm)
    assert tokens_of(generate(llm, [GOOD, GOOD], greedy(2))) == [llm.good] * 2


@pytest.fixture(scope="module")
def strict_llm(checkpoint):
    llm = make_llm(checkpoint[0])
    llm.good = hf_greedy(checkpoint[1], GOOD, 2)
    return llm


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(strict_llm, name):
    """Refused at the end of a call with good prompts too: all are checked before any is queued."""
    prompt, exception, says = BAD_PROMPTS[name]
    assert_refused(strict_llm, lambda: generate(strict_llm, [GOOD, "Hello", prompt]), exception, says)


@pytest.mark.parametrize("name", [n for n in BAD_PROMPTS if n not in ("empty list", "nested too deep")])
def test_a_bad_prompt_alone(strict_llm, name):
    prompt, exception, says = BAD_PROMPTS[name]
    assert_refused(strict_llm, lambda: generate(strict_llm, prompt), exception, says)


BAD_PARAMS = {
    "one too few": ([greedy(), greedy()], ValueError, ["3", "2"]),
    "one too many": ([greedy()] * 4, ValueError, ["3", "4"]),
    "none at all": ([], ValueError, ["3", "0"]),
    "dict": ({"temperature": 0}, TypeError, ["SamplingParams"]),
    "list with a dict": ([greedy(), greedy(), {"temperature": 0}], TypeError, ["SamplingParams"]),
    "list with None": ([greedy(), None, greedy()], TypeError, ["SamplingParams"]),
    "number": (16, TypeError, ["SamplingParams"]),
    "class": (SamplingParams, TypeError, ["SamplingParams"]),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_sampling_params(strict_llm, name):
    params, exception, says = BAD_PARAMS[name]
    call = lambda: strict_llm.generate([GOOD] * 3, params, use_tqdm=False)  # noqa: E731
    assert_refused(strict_llm, call, exception, says)


BAD_FIELDS = {
    "max_tokens 0": ({"max_tokens": 0}, ValueError, ["max_tokens", "0", "1"]),
    "max_tokens -5000": ({"max_tokens": -5000}, ValueError, ["max_tokens", "-5000", "1"]),
    "temperature -0.5": ({"temperature": -0.5}, ValueError, ["temperature", "-0.5", "0"]),
    "temperature nan": ({"temperature": math.nan}, ValueError, ["temperature", "nan"]),
    "temperature inf": ({"temperature": math.inf}, ValueError, ["temperature", "inf"]),
    "temperature -inf": ({"temperature": -math.inf}, ValueError, ["temperature", "-inf"]),
    "unknown field": ({"top_q": 0.5}, TypeError, ["top_q"]),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_fields_of_sampling_params(strict_llm, name):
    fields, exception, says = BAD_FIELDS[name]
    call = lambda: generate(strict_llm, [GOOD], SamplingParams(**fields))  # noqa: E731
    assert_refused(strict_llm, call, exception, says)


def test_unknown_arguments_of_generate(strict_llm):
    for call in (
        lambda: strict_llm.generate([GOOD], greedy(), use_tdqm=False),
        lambda: strict_llm.chat(MESSAGES, greedy(), use_tdqm=False),
    ):
        assert_refused(strict_llm, call, TypeError, ["use_tdqm"])


def test_a_prompt_longer_than_the_whole_cache(checkpoint):
    llm = make_llm(checkpoint[0], block_size=8, num_kv_blocks=4)
    llm.good = hf_greedy(checkpoint[1], GOOD, 2)
    assert_refused(llm, lambda: generate(llm, [GOOD, ids(33)]), ValueError, ["33", "32"])
    assert tokens_of(generate(llm, [ids(32)], greedy(1))) == [hf_greedy(checkpoint[1], ids(32), 1)]


def test_after_all_that_the_engine_is_as_good_as_new(strict_llm, checkpoint):
    outputs = generate(strict_llm, [ids(40), ids(300)], greedy(10))
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], ids(n), 10) for n in (40, 300)]


def break_folder(tmp_path, folder, change):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    change(broken)
    return broken


def edit_config(**fields):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(shutil.rmtree, ["broken"], id="no folder"),
        pytest.param(lambda folder: (folder / "config.json").unlink(), ["broken", "config.json"], id="no config"),
        pytest.param(
            lambda f: [p.unlink() for p in f.glob("*.safetensors*")], ["broken", "safetensors"], id="no weights"
        ),
        pytest.param(
            edit_config(architectures=["BertForMaskedLM"], model_type="llama"),
            ["BertForMaskedLM", "Qwen3ForCausalLM"],
            id="architecture",
        ),
        pytest.param(lambda folder: (folder / "config.json").write_text("{"), ["config.json"], id="no JSON"),
    ],
)
def test_bad_folders(checkpoint, tmp_path, change, says):
    folder = break_folder(tmp_path, checkpoint[0], change)
    for given in (folder, str(folder)):
        with pytest.raises(ValueError) as info:  # noqa: PT011 (the message is checked below)
            make_llm(given)
        for part in says:
            assert part in str(info.value)


@pytest.mark.parametrize(
    ("options", "exception", "says"),
    [
        pytest.param({"max_num_sequences": 4}, TypeError, ["max_num_sequences", "max_num_seqs"], id="unknown"),
        pytest.param({"dtype": "float8"}, ValueError, ["float8", "bfloat16"], id="dtype"),
        pytest.param({"dtype": torch.int8}, ValueError, ["int8", "bfloat16"], id="torch dtype"),
        pytest.param({"device": "tpu"}, ValueError, ["tpu", "cpu", "cuda"], id="device"),
        pytest.param({"device": "cuda:77"}, ValueError, ["cuda:77"], id="no such GPU"),
        pytest.param({"attention_backend": "magic"}, ValueError, ["magic", "torch"], id="backend"),
        pytest.param(
            {"attention_backend": "flash_attn", "device": "cpu"}, ValueError, ["flash_attn", "torch"], id="fa"
        ),
        pytest.param({"load_format": "pickle"}, ValueError, ["pickle", "dummy"], id="load format"),
        pytest.param({"max_model_len": 513}, ValueError, ["513", "512"], id="beyond the model"),
        pytest.param({"max_num_seqs": 0}, ValueError, ["max_num_seqs", "0", "1"], id="no sequences"),
        pytest.param({"max_num_batched_tokens": 0}, ValueError, ["max_num_batched_tokens", "0", "1"], id="no budget"),
        pytest.param({"block_size": 0}, ValueError, ["block_size", "0", "1"], id="block size"),
        pytest.param({"num_kv_blocks": -3}, ValueError, ["num_kv_blocks", "-3", "1"], id="blocks"),
        pytest.param({"num_kv_blocks": None, "kv_cache_memory_bytes": 1000}, ValueError, ["1000"], id="bytes"),
    ],
)
def test_bad_options(checkpoint, options, exception, says):
    defaults = {"num_kv_blocks": 64, "device": "cpu"}
    with pytest.raises(exception) as info:
        LLM(model=checkpoint[0], **{**defaults, **options})
    for part in says:
        assert part in str(info.value)


# --- sizes of the cache --------------------------------------------------------------------------------------------


def test_the_cache_is_sized_by_bytes(tiny_checkpoint):
    """A block of 16 tokens: K and V of 2 layers, 2 kv heads of 32, float32."""
    bytes_per_block = 2 * 2 * 16 * 2 * 32 * 4
    size = {"num_kv_blocks": None, "kv_cache_memory_bytes": 20 * bytes_per_block}
    for limits in ({}, {"max_num_seqs": 1, "max_model_len": 32}):  # what does not run may be cached
        stats = make_llm(tiny_checkpoint[0], **size, **limits).get_stats()
        assert stats.num_kv_blocks in (19, 20)  # the null block may be paid from the same purse


def test_the_cache_is_never_more_than_can_be_used(checkpoint):
    llm = make_llm(checkpoint[0], num_kv_blocks=None, max_num_seqs=3, max_model_len=100)
    assert llm.get_stats().num_kv_blocks == 3 * math.ceil(100 / 16)


# --- interrupts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(checkpoint):
    """(prompts, sampling parameters, expected tokens): chunks, decodes, prefix hits and preemptions in `scarce_llm`."""
    prompts = [ids(30), ids(30), ids(30)[:17] + ids(9, seed=1), ids(11, seed=2), ids(3, seed=3)]
    lens = [7, 5, 7, 6, 7]
    expected = [hf_greedy(checkpoint[1], prompt, n) for prompt, n in zip(prompts, lens, strict=True)]
    return prompts, [greedy(n) for n in lens], expected


def scarce_llm(checkpoint):
    llm = make_llm(checkpoint[0], block_size=4, num_kv_blocks=14, max_num_batched_tokens=16, max_num_seqs=4)
    llm.engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    return llm


def assert_works(llm, work):
    prompts, params, expected = work
    assert_at_rest(llm)
    assert tokens_of(generate(llm, prompts, params)) == expected
    assert_at_rest(llm)


def test_the_work_that_is_interrupted(checkpoint, work):
    llm = scarce_llm(checkpoint)
    assert_works(llm, work)
    stats = llm.get_stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hit_tokens > 0


class Interrupted:
    """Stands where the runner's model does: raises at the nth forward pass, before or after it computes."""

    def __init__(self, model, nth, exception, when):
        self.model, self.countdown, self.exception, self.when = model, nth, exception, when
        self.compute_logits = model.compute_logits

    def __call__(self, *inputs):
        self.countdown -= 1
        if self.countdown == 0 and self.when == "before":
            raise self.exception
        hidden = self.model(*inputs)
        if self.countdown == 0:
            raise self.exception
        return hidden


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
@pytest.mark.sparse
def test_an_exception_in_the_forward_pass(checkpoint, work, exception, when):
    prompts, params, _ = work
    llm = scarce_llm(checkpoint)
    model = llm.engine.runner.model
    num_raised = 0
    for nth in range(1, 100):
        llm.reset_prefix_cache()
        llm.engine.runner.kv_cache.tensor.fill_(50.0)
        llm.engine.runner.model = Interrupted(model, nth, exception, when)
        try:
            generate(llm, prompts, params)
            break
        except exception:
            num_raised += 1
        finally:
            llm.engine.runner.model = model
        assert_works(llm, work)
    assert num_raised > 10


class TracedInterrupt:
    """Raises KeyboardInterrupt before the nth line that runs inside the package, and records the lines."""

    def __init__(self, nth=None):
        self.nth = nth
        self.lines = []

    def __enter__(self):
        self.previous = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exception):
        sys.settrace(self.previous)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.nth:
                raise KeyboardInterrupt
        return self.trace


PACKAGE = str(Path(nanovllm.__file__).parent)


@pytest.mark.parametrize("every", [17, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line(checkpoint, work, every):
    """Every second (or 17th) line of the package that `generate` runs is hit once, at one of the times it runs."""
    prompts, params, _ = work
    llm = scarce_llm(checkpoint)
    generate(llm, prompts, params)  # what happens once in a life, the texts of tokens included

    def start_anew():
        llm.reset_prefix_cache()
        llm.engine.runner.kv_cache.tensor.fill_(50.0)

    start_anew()
    with TracedInterrupt() as recorder:
        generate(llm, prompts, params)
    times = {}
    for i, line in enumerate(recorder.lines, start=1):
        times.setdefault(line, []).append(i)
    assert len(times) > 100
    rng = random.Random(0)
    missed = []
    for i, nths in enumerate(list(times.values())[::every]):
        start_anew()
        with TracedInterrupt(rng.choice(nths)) as interrupt:
            try:
                generate(llm, prompts, params)
                missed.append(interrupt.lines[-1])
            except KeyboardInterrupt as error:
                where = "".join(traceback.format_tb(error.__traceback__))
        try:
            assert_at_rest(llm)
            if i % 4 == 0:
                assert_works(llm, work)
        except AssertionError as error:
            raise AssertionError(f"interrupted at\n{where}") from error
    assert missed == []
    assert_works(llm, work)


@pytest.mark.examples
def test_a_signal_at_any_moment(checkpoint, work):
    """Ctrl-C as it comes: between any two bytecodes."""
    prompts, params, _ = work
    llm = scarce_llm(checkpoint)
    start = time.perf_counter()
    assert_works(llm, work)
    duration_s = time.perf_counter() - start
    rng = random.Random(0)

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    num_raised = 0
    try:
        for _ in range(examples(30)):
            llm.reset_prefix_cache()
            # again after a second, as one that comes in a destructor is swallowed by Python
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, duration_s), 1.0)
            try:
                while True:
                    generate(llm, prompts, params)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                num_raised += 1
            assert_works(llm, work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_raised == examples(30)


def test_statistics_survive_an_interrupt(checkpoint, work):
    prompts, params, _ = work
    llm = scarce_llm(checkpoint)
    assert_works(llm, work)
    before = llm.get_stats()
    model = llm.engine.runner.model
    llm.engine.runner.model = Interrupted(model, 3, KeyboardInterrupt, "before")
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
    llm.engine.runner.model = model
    after = llm.get_stats()
    assert after.steps >= before.steps + 2
    assert after.num_preemptions >= before.num_preemptions > 0
    assert after.prefix_cache_hit_tokens >= before.prefix_cache_hit_tokens > 0
    assert after.prefix_cache_query_tokens > before.prefix_cache_query_tokens
    assert after.kv_tokens_stored > before.kv_tokens_stored


# --- the life of an engine -----------------------------------------------------------------------------------------


def references(llm):
    engine = llm.engine
    return [weakref.ref(thing) for thing in (engine, engine.runner, engine.runner.kv_cache, engine.scheduler)]


def is_freed(refs):
    gc.collect()
    return all(ref() is None for ref in refs)


def test_an_engine_that_goes_out_of_scope_is_freed(checkpoint, work):
    llm = scarce_llm(checkpoint)
    outputs = generate(llm, *work[:2])
    refs = references(llm)
    assert not is_freed(refs)
    del llm
    assert is_freed(refs)
    assert tokens_of(outputs) == work[2]


def test_an_interrupted_engine_is_freed(checkpoint, work):
    llm = scarce_llm(checkpoint)
    llm.engine.runner.model = Interrupted(llm.engine.runner.model, 2, KeyboardInterrupt, "after")
    with pytest.raises(KeyboardInterrupt):
        generate(llm, *work[:2])
    refs = references(llm)
    del llm
    assert is_freed(refs)


def test_shutdown_is_idempotent_and_frees(checkpoint):
    llm = make_llm(checkpoint[0])
    generate(llm, [GOOD])
    refs = references(llm)
    for _ in range(3):
        llm.shutdown()
    assert is_freed(refs)
    with pytest.raises(Exception, match="(?i)shut ?down"):
        generate(llm, [GOOD])
    llm.shutdown()


@pytest.mark.parametrize("with_graphs", [False, True])
def test_memory_is_freed_at_once_without_the_garbage_collector(checkpoint, with_graphs):
    """On a GPU it is most of the memory there is, and the collector does not know how large what it has not seen is."""
    llm = make_llm(checkpoint[0])
    generate(llm, [GOOD])
    if with_graphs:
        from nanovllm_extras.execution.step_graphs import CudaGraphs

        runner = llm.engine.runner
        arguments = (runner.model, runner.kv_cache.tensor, runner.draw, [1, 2], 4)
        runner.step_graphs = CudaGraphs(*arguments, recorder=object())
        del runner, arguments
    refs = references(llm)
    gc.collect()
    gc.disable()
    try:
        llm.shutdown()
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_context_manager(checkpoint):
    with make_llm(checkpoint[0]) as llm:
        outputs = generate(llm, [GOOD])
        refs = references(llm)
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], GOOD, 8)]
    assert is_freed(refs)
    llm.shutdown()


def test_the_context_manager_lets_errors_through(checkpoint):
    llm = make_llm(checkpoint[0])
    refs = references(llm)
    with pytest.raises(ValueError, match="empty"), llm:
        generate(llm, [[]])
    assert is_freed(refs)


def test_two_engines_interleaved_step_by_step(checkpoint, checkpoints):
    """Different models, block sizes and budgets: each engine gives what it gives by itself."""
    other_folder, other_model = checkpoints.make(num_hidden_layers=3, num_key_value_heads=1)
    config = {"dtype": "float32", "device": "cpu", "attention_backend": "torch"}
    engines = [
        LLMEngine(Config(model=checkpoint[0], block_size=16, num_kv_blocks=40, max_num_batched_tokens=64, **config)),
        LLMEngine(Config(model=other_folder, block_size=4, num_kv_blocks=60, max_num_batched_tokens=7, **config)),
        LLMEngine(Config(model=checkpoint[0], block_size=1, num_kv_blocks=90, max_num_batched_tokens=30, **config)),
    ]
    prompts = [ids(50), ids(17, seed=1), ids(33)]
    for engine in engines:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, greedy(12))
    results = [{}, {}, {}]
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, result in zip(engines, results, strict=True):
            result.update({output.request_id: output.outputs[0].token_ids for output in engine.step().outputs})
    for result, model in zip(results, (checkpoint[1], other_model, checkpoint[1]), strict=True):
        assert result == {str(i): hf_greedy(model, prompt, 12) for i, prompt in enumerate(prompts)}


def test_ending_one_engine_leaves_the_other_alone(checkpoint):
    first, second = make_llm(checkpoint[0]), make_llm(checkpoint[0])
    generate(first, [GOOD])
    first.shutdown()
    assert tokens_of(generate(second, [GOOD])) == [hf_greedy(checkpoint[1], GOOD, 8)]


def test_dummy_weights_need_only_the_config_and_follow_the_seed(checkpoint, tmp_path):
    shutil.copy(checkpoint[0] / "config.json", tmp_path)

    def run(seed):
        llm = make_llm(tmp_path, load_format="dummy", seed=seed)
        outputs = tokens_of(generate(llm, [ids(20), ids(7)], greedy(10)))
        return outputs, dict(llm.engine.runner.model.named_parameters())

    outputs, weights = run(0)
    again_outputs, again_weights = run(0)
    other_outputs, other_weights = run(1)
    assert outputs == again_outputs != other_outputs
    assert weights.keys() == again_weights.keys()
    assert all(torch.equal(weights[name], again_weights[name]) for name in weights)
    assert not all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert all(weight.isfinite().all() for weight in weights.values())


def test_making_an_engine_leaves_global_random_state_alone(checkpoint):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    llm = make_llm(checkpoint[0], load_format="dummy")
    generate(llm, [GOOD], SamplingParams(ignore_eos=True))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device().type == "cpu"
