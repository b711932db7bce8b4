"""The core's `LLM`, as its users meet it: prompts in every form, chat, samples, streams, ends, bad input, interrupts.

Oracles: greedy `generate` of `transformers` in float32 for the tokens, `AutoTokenizer` for text and chat templates, and
an undisturbed engine for a disturbed one. The models are random; the tokenizer has fewer tokens than their vocabulary.
"""

import copy
import gc
import json
import math
import pickle
import shutil
import sys
import weakref

import numpy as np
import pytest
import torch
import transformers

from nanovllm import model_runner
from nanovllm.llm import LLM
from nanovllm.request import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from tests.conftest import hf_greedy
from tests.failing_runs import Failing
from tests.tiny_tokenizers import TEXTS, byte_level, copy_checkpoint

VOCAB_SIZE = 300  # the model's
MAX_MODEL_LEN = 512  # the model's max_position_embeddings
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What is a block table?"}]
TOKENIZER = byte_level()
GOOD = [1, 2, 3]


@pytest.fixture(scope="module")
def checkpoint(checkpoints, tmp_path_factory):
    """(folder with a tokenizer, transformers model); no end-of-sequence token but the tokenizer's."""
    folder, model = checkpoints.make(num_hidden_layers=1)
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    return copy_checkpoint(folder, tmp_path_factory.mktemp("llm") / "model", tokenizer), model


def make_llm(folder, **options):
    options = {"num_kv_blocks": 64, "block_size": 16, "dtype": "float32", **options}
    llm = LLM(folder, device="cpu", attention_backend="torch", **options)
    llm.engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    return llm


@pytest.fixture(scope="module")
def llm(checkpoint):
    """One engine for all tests that leave it as it was."""
    return make_llm(checkpoint[0])


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def drawn(max_tokens=20, **fields):
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def ids(length, seed=0):
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(llm, prompts, params=None):
    return llm.generate(prompts, params or greedy(), use_tqdm=False)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def summary(output):
    """All of an output that does not depend on the clock or on earlier requests."""
    return [(one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]


def assert_at_rest(llm):
    """Nothing runs, waits or owns a block."""
    engine = llm.engine
    assert not engine.has_unfinished_requests()
    assert (engine.scheduler.running, engine.scheduler.waiting) == ([], [])
    assert engine.scheduler.block_manager.num_used_blocks == 0


# ---- greedy output is that of transformers

SHAPES = {
    "mha-tied-1-layer": {"num_key_value_heads": 4, "num_hidden_layers": 1, "tie_word_embeddings": True},
    "gqa": {},
    "mqa-3-heads": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "gqa-bias-tied": {"attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3},
}
SIZES = [(8192, 8), (64, 256), (7, 1), (1, 16)]  # budget, block size


@pytest.mark.parametrize(("shape", "sizes"), list(zip(SHAPES, SIZES, strict=True)))
def test_every_shape_is_greedy_as_in_transformers(checkpoints, tmp_path, shape, sizes):
    """Norms and biases are random too; prompts are as long as blocks, and one token shorter and longer."""
    budget, block_size = sizes
    model = copy.deepcopy(checkpoints.make(**SHAPES[shape])[1])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.5 * torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "bias")):
                parameter.copy_(noise + name.endswith("weight"))
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, num_kv_blocks=3200 // block_size, block_size=block_size, max_num_batched_tokens=budget)
    prompts = [ids(n, seed=n) for n in (1, 7, 8, 9, 16, 33, 130)]
    max_tokens = [1 + 7 * i % 20 for i in range(len(prompts))]  # so that the batch shrinks while it runs
    outputs = generate(llm, prompts, [greedy(n) for n in max_tokens])
    expected = [hf_greedy(model, prompt, n) for prompt, n in zip(prompts, max_tokens, strict=True)]
    assert tokens_of(outputs) == expected
    assert_at_rest(llm)


@pytest.mark.parametrize("budget", [5, 8192])
def test_prefix_hits(checkpoint, budget):
    """Every full block that is known is found, but at least one token is left to compute."""
    llm, model = make_llm(checkpoint[0], block_size=8, max_num_batched_tokens=budget), checkpoint[1]
    seen = []
    for length, extra in [(15, 3), (16, 1), (17, 20), (32, 16), (48, 0), (48, 9)] * 2:
        prompt = ids(48, seed=5)[:length] + ids(extra, seed=length)
        (output,) = generate(llm, [prompt])
        assert output.outputs[0].token_ids == hf_greedy(model, prompt, 8)
        longest = max([shared_len(prompt, other) for other in seen], default=0)
        assert output.num_cached_tokens == min(longest, len(prompt) - 1) // 8 * 8
        seen.append(prompt + output.outputs[0].token_ids[:-1])  # K and V of the last token are never computed
    assert llm.engine.stats.prefix_cache_hit_tokens > 0
    turn = ids(20, seed=77)
    for num_cached_tokens in (0, 24, 32, 40):  # the next turns find the answers; a last token is never computed
        (output,) = generate(llm, [turn])
        assert output.num_cached_tokens == num_cached_tokens
        turn = [*turn, *output.outputs[0].token_ids, 7]
    assert [one.num_cached_tokens for one in generate(llm, [ids(30, seed=78)] * 3)] == [0, 24, 24], "in one step"


def shared_len(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_no_hits_without_prefix_caching(checkpoint):
    llm = make_llm(checkpoint[0], block_size=8, enable_prefix_caching=False)
    outputs = generate(llm, [ids(30)] * 2) + generate(llm, [ids(30)])
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], ids(30), 8)] * 3
    assert [output.num_cached_tokens for output in outputs] == [0] * 3


# ---- prompts and parameters


@pytest.mark.parametrize(
    "form",
    [
        lambda text, token_ids: text,
        lambda text, token_ids: token_ids,
        lambda text, token_ids: {"prompt": text},
        lambda text, token_ids: {"prompt_token_ids": token_ids},
        lambda text, token_ids: {"prompt": text, "prompt_token_ids": None},  # as tables write it
    ],
    ids=["str", "ids", "dict of str", "dict of ids", "dict of str and None"],
)
def test_every_prompt_form(llm, checkpoint, form):
    for text in TEXTS:
        token_ids = TOKENIZER.encode(text)
        prompt = form(text, token_ids)
        outputs = generate(llm, prompt) + generate(llm, [prompt])  # one, and a list
        assert tokens_of(outputs) == [hf_greedy(checkpoint[1], token_ids, 8)] * 2
        is_text = prompt == text or "prompt" in prompt
        for output in outputs:
            assert (output.prompt, output.prompt_token_ids) == (text if is_text else None, token_ids)


def test_the_order_is_kept(checkpoint):
    """Prompts of all forms wait for their turn, and the last request finishes first."""
    llm = make_llm(checkpoint[0], max_num_seqs=2)
    texts = [TEXTS[i % len(TEXTS)] * (1 + i % 3) for i in range(9)]
    encoded = [TOKENIZER.encode(text) for text in texts]
    prompts = [
        [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}][i % 4]
        for i, (text, token_ids) in enumerate(zip(texts, encoded, strict=True))
    ]
    outputs = generate(llm, prompts, [greedy(18 - 2 * i) for i in range(9)])
    assert tokens_of(outputs) == [
        hf_greedy(checkpoint[1], token_ids, 18 - 2 * i) for i, token_ids in enumerate(encoded)
    ]
    assert len({output.request_id for output in outputs}) == 9
    assert generate(llm, []) == []


def test_the_callers_lists_are_not_changed_and_not_shared(llm):
    prompt = [1, 2, 3]
    prompts, params = [prompt], [greedy(4)]
    (output,) = generate(llm, prompts, params)
    assert (prompts, params) == ([[1, 2, 3]], [greedy(4)])
    output.outputs[0].token_ids.clear()
    prompt.append(4)
    assert output.prompt_token_ids == [1, 2, 3]


# ---- samples and seeds


def test_prompts_with_one_seed_draw_different_numbers(llm):
    """With the same seed, one number would decide the first token of every prompt: see how many tokens come first."""
    prompts = [ids(n % 7 + 1, seed=n) for n in range(200)]

    def num_different(seed):
        params = SamplingParams(temperature=3.0, max_tokens=1, seed=seed, ignore_eos=True)
        return len({one.outputs[0].token_ids[0] for one in generate(llm, prompts, params)})

    assert num_different(42) > 0.8 * num_different(None) > 50
    again = [tokens_of(generate(llm, prompts[i], drawn(seed=42))) for i in (0, 100)]
    assert again == [[tokens] for tokens in tokens_of(generate(llm, [prompts[0], prompts[100]], drawn(seed=42)))]


def test_outputs_depend_only_on_the_seed(checkpoint):
    def draw(seed, own_seed=None):
        return tokens_of(generate(make_llm(checkpoint[0], seed=seed), [ids(4), ids(4)], drawn(seed=own_seed)))

    assert draw(0) == draw(0) != draw(1)
    first, second = draw(0)
    assert first != second, "requests without a seed get different ones"
    first, second = draw(0, own_seed=5)
    assert [first, second] == [first] * 2 == draw(1, own_seed=5)


ENGINES = {
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 900},
    "budget 7": {"max_num_batched_tokens": 7},
    "few sequences": {"max_num_seqs": 4},
    "preemption": {"num_kv_blocks": 30, "block_size": 4},
    "preemption without prefix caching": {"num_kv_blocks": 30, "block_size": 4, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def expected_samples(checkpoint):
    prompts = [ids(n, seed=n) for n in (1, 3, 16, 17, 40)]
    return prompts, [generate(make_llm(checkpoint[0]), [prompt], drawn(n=4, seed=3))[0] for prompt in prompts]


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_samples_do_not_depend_on_the_engine_or_the_batch(checkpoint, expected_samples, options):
    """Each prompt is computed once, and its blocks are shared."""
    prompts, alone = expected_samples
    llm = make_llm(checkpoint[0], **options)
    outputs = generate(llm, prompts, drawn(n=4, seed=3))
    assert [summary(output) for output in outputs] == [summary(output) for output in alone]
    for output in outputs:
        assert [one.index for one in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(one.token_ids) for one in output.outputs}) == 4
    stats = llm.engine.stats
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options and options["block_size"] == 4)
    if not stats.num_preemptions:
        assert stats.scheduled_tokens == sum(len(prompt) + 4 * 19 for prompt in prompts)
    assert_at_rest(llm)


# ---- ends


@pytest.fixture
def ending(checkpoint, tmp_path):
    """(folder, prompt, transformers' greedy output, index of its end token): generation_config names the end token."""
    folder, model = checkpoint
    prompt = [*ids(8), *TOKENIZER.encode("a")]  # it ends with a whole character
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
    params = [greedy(20, ignore_eos=False), greedy(end + 1, ignore_eos=False), greedy(20)]
    ended, at_max_tokens, ignored = (output.outputs[0] for output in generate(make_llm(folder), [prompt] * 3, params))
    for one in (ended, at_max_tokens):
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (answer[: end + 1], "stop", None)
        assert one.text == TOKENIZER.decode([token_id for token_id in answer[:end] if token_id < len(TOKENIZER)])
    assert (ignored.token_ids, ignored.finish_reason) == (answer, "length")


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_token_ids(llm, checkpoint, ignore_eos):
    answer = hf_greedy(checkpoint[1], ids(9), 20)
    end = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    in_prompt = next(token_id for token_id in ids(9) if token_id not in answer)
    params = greedy(20, ignore_eos=ignore_eos, stop_token_ids=[298, in_prompt, answer[end], answer[end]])
    stopped, other = (output.outputs[0] for output in generate(llm, [ids(9), ids(9)], [params, greedy(20)]))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (answer[: end + 1], "stop", answer[end])
    assert (other.token_ids, other.finish_reason, other.stop_reason) == (answer, "length", None)


def test_stop_strings_end_each_sample_by_itself(llm):
    whole = generate(llm, "Hello", drawn(60, n=3, seed=2))[0].outputs
    stop = whole[0].text[4:6]
    assert len(stop) == 2
    one = generate(llm, "Hello", drawn(60, n=3, seed=2, stop=[stop, "never seen"]))[0]
    for completion, before in zip(one.outputs, whole, strict=True):
        found = before.text.find(stop)
        if found < 0:
            assert completion == before
            continue
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (
            before.text[:found],
            "stop",
            stop,
        )
        assert completion.token_ids == before.token_ids[: len(completion.token_ids)]
        assert stop in TOKENIZER.decode([i for i in completion.token_ids if i < len(TOKENIZER)])
    assert one.outputs[0].finish_reason == "stop"
    assert_at_rest(llm)


@pytest.mark.parametrize("budget", [1, 7, 8192])
def test_max_model_len_is_kept_to_the_token(checkpoint, budget):
    llm = make_llm(checkpoint[0], max_model_len=40, max_num_batched_tokens=budget, block_size=8)
    lengths = [1, 31, 32, 33, 38, 39]
    outputs = generate(llm, [ids(n) for n in lengths], [greedy(1000), greedy(None)] * 3)
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], ids(n), 40 - n) for n in lengths]
    assert {(one.outputs[0].finish_reason, one.outputs[0].stop_reason) for one in outputs} == {("length", None)}
    assert_at_rest(llm)


@pytest.mark.parametrize(
    ("block_size", "num_kv_blocks", "enable_prefix_caching"),
    [(1, 32, True), (8, 4, False), (8, 4, True), (32, 1, True)],
)
def test_a_request_that_fills_the_whole_cache(checkpoint, block_size, num_kv_blocks, enable_prefix_caching):
    """It ends when all 32 slots hold a token and another one was sampled; its neighbours get their own tokens."""
    sizes = {"block_size": block_size, "num_kv_blocks": num_kv_blocks}
    llm = make_llm(checkpoint[0], **sizes, enable_prefix_caching=enable_prefix_caching)
    prompts = [ids(5, seed=1), ids(20, seed=2), ids(12, seed=3), ids(20, seed=4), ids(32, seed=5)]
    max_tokens = [9, 1000, None, 13, 50]
    outputs = generate(llm, prompts, [greedy(n) for n in max_tokens])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        completion, fills = output.outputs[0], i in (1, 2, 4)
        num_tokens = 33 - len(prompt) if fills else max_tokens[i]
        assert completion.token_ids == hf_greedy(checkpoint[1], prompt, num_tokens)
        assert (completion.finish_reason, completion.stop_reason) == ("length", "kv_cache" if fills else None)
    assert_at_rest(llm)


# ---- outputs


def test_fields_of_an_output(llm):
    (output,) = generate(llm, [TEXTS[0]], greedy(6))
    assert isinstance(output, RequestOutput)
    assert isinstance(output.request_id, str)
    assert (output.finished, output.prompt, len(output.outputs)) == (True, TEXTS[0], 1)
    completion = output.outputs[0]
    assert isinstance(completion, CompletionOutput)
    assert completion.index == 0
    assert all(type(token_id) is int for token_id in completion.token_ids)
    assert completion.text == TOKENIZER.decode([i for i in completion.token_ids if i < len(TOKENIZER)])


def test_progress_bar(llm, capfd):
    generate(llm, [[1], [2]], greedy(2))
    quiet = capfd.readouterr()
    assert quiet.out + quiet.err == ""
    llm.generate([[1], [2]], greedy(2))
    assert "2/2" in capfd.readouterr().err


def test_progress_bar_without_stderr(llm, monkeypatch):
    """As in a program of Windows without a console, or after `2>&-`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert tokens_of(llm.generate([[1], [2]], greedy(2))) == tokens_of(generate(llm, [[1], [2]], greedy(2)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_it_cannot_be_copied(llm, copied):
    with pytest.raises(TypeError, match="make one in each process"):
        copied(llm)


# ---- streams

REQUESTS = [
    (ids(5, 1), drawn(10, seed=1)),
    (ids(30, 2), drawn(14, seed=2, temperature=2.0)),
    (ids(9, 3), greedy(1)),
    (ids(9, 4), drawn(10, seed=4, n=3)),
    ("Hello", drawn(40, seed=5, stop=["a", "ee", "th"])),
    (ids(3, 6), drawn(40, seed=6, n=2, stop_token_ids=list(range(20)))),
]
PROMPTS, PARAMS = map(list, zip(*REQUESTS, strict=True))


def assert_grows(outputs):
    """One request's outputs are cumulative: texts and tokens are prefixes, and only the last output is finished."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in outputs:
        assert all([one.finish_reason is not None for one in output.outputs]) == output.finished
    for before, after in zip(outputs, outputs[1:], strict=False):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert old.finish_reason is None or new == old
        assert sum(len(one.token_ids) for one in after.outputs) > sum(len(one.token_ids) for one in before.outputs)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5}, {"num_kv_blocks": 16}, {"max_num_seqs": 3}], ids=str
)
def test_a_stream_grows_to_what_generate_gives(checkpoint, options):
    llm = make_llm(checkpoint[0], block_size=4, **options)
    expected = generate(llm, PROMPTS, PARAMS)
    streams = {}
    for output in llm.stream(PROMPTS, PARAMS):
        streams.setdefault(int(output.request_id), []).append(output)
    for _, outputs in sorted(streams.items()):
        assert_grows(outputs)
    assert [summary(streams[i][-1]) for i in sorted(streams)] == [summary(output) for output in expected]
    assert (llm.engine.stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert_at_rest(llm)


@pytest.mark.parametrize(("how", "num_outputs"), [("forget", 0), ("close", 1), ("throw", 4), ("forget", 15)])
@pytest.mark.usefixtures("little_to_search")
def test_closing_a_stream_early_frees_everything(checkpoint, how, num_outputs):
    llm = make_llm(checkpoint[0], block_size=4, max_num_batched_tokens=16)
    stream = llm.stream(PROMPTS, PARAMS)
    for _ in range(num_outputs):
        next(stream)
    assert (llm.engine.scheduler.block_manager.num_used_blocks > 0) == (num_outputs > 0)
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
    del stream
    gc.collect()
    assert_at_rest(llm)
    assert tokens_of(generate(llm, [GOOD])) == [hf_greedy(checkpoint[1], GOOD, 8)]


@pytest.mark.parametrize("between", ["another stream", "generate"])
def test_a_call_is_refused_while_a_stream_pauses(llm, between):
    """It would take the stream's outputs. The stream goes on, and then calls are served again."""
    expected = [generate(llm, ids(5), drawn(8, seed=1)), generate(llm, ids(9), drawn(5, seed=2))]
    stream = llm.stream(ids(5), drawn(8, seed=1))
    other = llm.stream(ids(9), drawn(5, seed=2))  # queues its request when its first output is asked for
    outputs = [next(stream)]
    num_requests = llm.engine.stats.num_requests
    with pytest.raises(RuntimeError, match="unfinished requests of another call"):
        next(other) if between == "another stream" else generate(llm, ids(9), drawn(5, seed=2))
    assert llm.engine.stats.num_requests == num_requests
    outputs += list(stream)
    assert_grows(outputs)
    assert summary(outputs[-1]) == summary(expected[0][0])
    assert_at_rest(llm)
    assert summary(generate(llm, ids(9), drawn(5, seed=2))[0]) == summary(expected[1][0])


def test_a_stream_whose_request_is_gone_says_so(llm):
    """Instead of stepping an empty engine for ever."""
    stream = llm.stream([ids(5), ids(9)], drawn(8))
    request_ids = {next(stream).request_id, next(stream).request_id}
    for request_id in request_ids:
        llm.engine.abort_request(request_id)
    with pytest.raises(RuntimeError, match="are not in the engine any more"):
        list(stream)
    assert_at_rest(llm)


# ---- chat


def test_chat(llm, checkpoint):
    longer = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint[0])
    expected = []
    for messages in (MESSAGES, longer):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected.append(tokenizer.encode(text, add_special_tokens=False))
    one = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    two = llm.chat([MESSAGES, longer], [greedy(3), greedy(8)], use_tqdm=False)
    assert [output.prompt_token_ids for output in one + two] == [expected[0], *expected]
    assert tokens_of(one) == [hf_greedy(checkpoint[1], expected[0], 8)]
    assert tokens_of(two) == [hf_greedy(checkpoint[1], e, n) for e, n in zip(expected, (3, 8), strict=True)]


@pytest.mark.parametrize(
    "messages",
    ["Hello", ["Hello"], [{"content": "no role"}], [[{"role": "user", "content": "fine"}], "Hello"], [], None, 7],
    ids=repr,
)
def test_chat_with_bad_messages(llm, messages):
    before = repr(llm.engine.stats)
    with pytest.raises((ValueError, TypeError)):
        llm.chat(messages, greedy(), use_tqdm=False)
    assert repr(llm.engine.stats) == before
    assert_at_rest(llm)


def test_no_tokenizer(tiny_checkpoint):
    """Token ids work, and texts are empty; what needs a tokenizer is refused."""
    folder, model = tiny_checkpoint
    llm = make_llm(folder)
    (output,) = generate(llm, [GOOD])
    assert tokens_of([output]) == [hf_greedy(model, GOOD, 8)]
    assert output.outputs[0].text == ""
    with pytest.raises(ValueError, match="tokenizer"):
        generate(llm, ["Hello"])
    with pytest.raises(ValueError, match="tokenizer|chat.template"):
        llm.chat(MESSAGES, use_tqdm=False)
    assert_at_rest(llm)


# ---- bad input

BAD_PROMPTS = {
    # name: (prompt, exception, what the message must say)
    "empty list": ([], ValueError, ["empty"]),
    "empty text": ("", ValueError, ["empty"]),
    "empty dict of ids": ({"prompt_token_ids": []}, ValueError, ["empty"]),
    "id beyond": ([1, VOCAB_SIZE], ValueError, ["300", "299"]),
    "negative id": ([5, -1], ValueError, ["-1", "299"]),
    "id beyond in a dict": ({"prompt_token_ids": [VOCAB_SIZE + 7]}, ValueError, ["307", "299"]),
    "half a character": ("a\ud83d!", ValueError, [r"'\ud83d'", "at 1", "surrogate"]),
    "too long": ([7] * MAX_MODEL_LEN, ValueError, ["512", "511"]),
    "float id": ([1.0, 2.0], TypeError, ["1.0"]),
    "bool id": ([True, 1], TypeError, ["True"]),
    "None id": ([1, None], TypeError, ["None"]),
    "text among ids": ([1, "a"], TypeError, ["'a'"]),
    "None": (None, TypeError, ["None"]),
    "number": (17, TypeError, ["int"]),
    "bytes": (b"abc", TypeError, ["bytes"]),
    "empty dict": ({}, (ValueError, TypeError), ["prompt", "prompt_token_ids"]),
    "dict of number": ({"prompt": 5}, TypeError, ["prompt"]),
    "dict of text as ids": ({"prompt_token_ids": "abc"}, TypeError, ["prompt_token_ids"]),
    "nested too deep": ([[1, 2]], TypeError, ["[1, 2]"]),
    "list of a tensor": (list(torch.tensor([1, 2])), TypeError, ["prompt_token_ids[0]", "tensor(1)"]),
    "arrays of one number": (list(map(np.array, [1, 2])), TypeError, ["prompt_token_ids[0]", "array(1)"]),
    "array of one number as ids": ({"prompt_token_ids": np.array(1)}, TypeError, ["prompt_token_ids", "ndarray"]),
}


def assert_refused(llm, call, exception, says):
    """`call` raises, its message says so, and nothing is queued or counted."""
    before = repr(llm.engine.stats)
    with pytest.raises(exception) as info:
        call()
    assert not isinstance(info.value, AssertionError)
    for part in says:
        assert part in str(info.value)
    assert repr(llm.engine.stats) == before
    assert_at_rest(llm)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(llm, name):
    """Refused by themselves, and at the end of a call with good prompts: all are checked before any is queued."""
    prompt, exception, says = BAD_PROMPTS[name]
    assert_refused(llm, lambda: generate(llm, [GOOD, "Hello", prompt]), exception, says)
    assert_refused(llm, lambda: llm.stream([GOOD, prompt], greedy()), exception, says)
    if name not in ("empty list", "nested too deep"):
        assert_refused(llm, lambda: generate(llm, prompt), exception, says)


@pytest.mark.parametrize(
    ("params", "exception", "says"),
    [
        pytest.param([greedy(), greedy()], ValueError, ["3", "2"], id="one too few"),
        pytest.param([], ValueError, ["3", "0"], id="none at all"),
        pytest.param({"temperature": 0}, TypeError, ["SamplingParams"], id="dict"),
        pytest.param([greedy(), greedy(), {"temperature": 0}], TypeError, ["SamplingParams"], id="list with a dict"),
        pytest.param([greedy(), None, greedy()], TypeError, ["SamplingParams"], id="list with None"),
        pytest.param(SamplingParams, TypeError, ["SamplingParams"], id="class"),
        pytest.param([greedy(), greedy(), SamplingParams(n=257)], ValueError, ["n", "257", "256"], id="n"),
        pytest.param(greedy(stop_token_ids=[VOCAB_SIZE]), ValueError, ["300", "299"], id="stop_token_ids"),
    ],
)
def test_bad_sampling_params(llm, params, exception, says):
    assert_refused(llm, lambda: llm.generate([GOOD] * 3, params, use_tqdm=False), exception, says)


def test_a_prompt_longer_than_the_whole_cache(checkpoint):
    llm = make_llm(checkpoint[0], block_size=8, num_kv_blocks=4)
    assert_refused(llm, lambda: generate(llm, [GOOD, ids(33)]), ValueError, ["33", "32"])
    assert tokens_of(generate(llm, [ids(32)], greedy(1))) == [hf_greedy(checkpoint[1], ids(32), 1)]


@pytest.mark.parametrize(
    ("options", "exception", "says"),
    [
        pytest.param({"max_num_sequences": 4}, TypeError, ["max_num_sequences"], id="unknown"),
        pytest.param({"dtype": "float8"}, ValueError, ["float8", "bfloat16"], id="dtype"),
        pytest.param({"device": "tpu"}, ValueError, ["tpu", "cpu", "cuda"], id="device"),
        pytest.param({"device": "cuda:77"}, ValueError, ["cuda:77"], id="no such GPU"),
        pytest.param({"attention_backend": "magic"}, ValueError, ["magic", "torch"], id="backend"),
        pytest.param({"attention_backend": "flash_attn"}, ValueError, ["flash_attn", "torch"], id="flash-attn on CPU"),
        pytest.param({"max_model_len": 513}, ValueError, ["513", "512"], id="beyond the model"),
        pytest.param({"max_num_seqs": 0}, ValueError, ["max_num_seqs", "0", "1"], id="no sequences"),
        pytest.param({"num_kv_blocks": -3}, ValueError, ["num_kv_blocks", "-3", "1"], id="blocks"),
    ],
)
def test_bad_options(checkpoint, options, exception, says):
    with pytest.raises(exception) as info:
        LLM(checkpoint[0], **{"num_kv_blocks": 64, "device": "cpu", **options})
    for part in says:
        assert part in str(info.value)


def test_bad_folders(checkpoint, tmp_path):
    for name, says in (("config.json", "config.json"), ("model.safetensors", "safetensors")):
        folder = tmp_path / name.partition(".")[0]
        shutil.copytree(checkpoint[0], folder)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=says):
            make_llm(folder)
    with pytest.raises(ValueError, match="nowhere"):
        make_llm(tmp_path / "nowhere")


def test_the_cache_is_never_more_than_can_be_used(checkpoint):
    llm = make_llm(checkpoint[0], num_kv_blocks=None, max_num_seqs=3, max_model_len=100)
    assert llm.engine.runner.kv_cache.num_blocks == 3 * math.ceil(100 / 16)


def test_the_cache_and_its_null_block_fill_the_memory(checkpoint, monkeypatch):
    size = 2 * 16 * 2 * 32 * 4  # of a block: K and V of 16 tokens, 2 kv heads of 32, float32, in one layer
    for num_bytes, num_blocks in [(2 * size, 1), (20 * size - 1, 18), (20 * size, 19)]:
        monkeypatch.setattr(model_runner, "CPU_KV_CACHE_BYTES", num_bytes)
        kv_cache = make_llm(checkpoint[0], num_kv_blocks=None).engine.runner.kv_cache
        assert kv_cache.num_blocks == num_blocks
        assert num_bytes - size < kv_cache.tensor.nbytes <= num_bytes
    monkeypatch.setattr(model_runner, "CPU_KV_CACHE_BYTES", 2 * size - 1)
    with pytest.raises(ValueError, match=f"{2 * size - 1} bytes are left .* two blocks take {2 * size}: .* block_size"):
        make_llm(checkpoint[0], num_kv_blocks=None)


# ---- interrupts, and the end


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_fails_leaves_an_empty_engine(checkpoint, exception):
    """Each second forward pass fails."""
    llm = make_llm(checkpoint[0], block_size=4, num_kv_blocks=40, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = [ids(30), ids(30), ids(17) + ids(9, seed=1), ids(11, seed=2), ids(3, seed=3)]
    expected = [hf_greedy(checkpoint[1], prompt, 7) for prompt in prompts]
    failing = Failing(llm.engine, 0, exception("now"), "before")
    for nth in range(1, 100, 2):
        failing.countdown = nth
        try:
            assert tokens_of(generate(llm, prompts, greedy(7))) == expected
            break
        except exception:
            assert_at_rest(llm)
        if nth % 3 == 0:
            assert tokens_of(generate(llm, prompts, greedy(7))) == expected
            assert_at_rest(llm)
    assert nth > 10


def test_two_llms_are_independent(checkpoint, checkpoints):
    """Their streams are interleaved, and one of them fails."""
    other_folder, other_model = checkpoints.make(num_hidden_layers=2, num_key_value_heads=1)
    first, second, third = make_llm(checkpoint[0]), make_llm(other_folder, block_size=4), make_llm(checkpoint[0])
    streams = [llm.stream(ids(9), greedy(6)) for llm in (first, second, third)]
    last = [next(stream) for stream in streams]
    third.engine.runner.run = None
    with pytest.raises(TypeError):
        next(streams[2])
    assert_at_rest(third)
    for _ in range(5):
        last = [next(stream) for stream in streams[:2]]
    expected = [hf_greedy(model, ids(9), 6) for model in (checkpoint[1], other_model)]
    assert [output.outputs[0].token_ids for output in last] == expected
    assert all(output.finished for output in last)


@pytest.mark.usefixtures("little_to_search")
def test_an_engine_that_goes_out_of_scope_is_freed(checkpoint):
    llm = make_llm(checkpoint[0])
    outputs = generate(llm, [GOOD])
    engine = llm.engine
    refs = [weakref.ref(one) for one in (engine, engine.runner, engine.runner.kv_cache, engine.scheduler)]
    del llm, engine
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
    assert tokens_of(outputs) == [hf_greedy(checkpoint[1], GOOD, 8)]


def test_global_random_state_is_not_changed(checkpoint):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generate(make_llm(checkpoint[0]), [GOOD], drawn(5))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device().type == "cpu"


@pytest.mark.parametrize(
    ("capability", "dtype", "is_told"),
    [("AVX2", "bfloat16", True), ("AVX2", "float32", False), ("AVX512", "bfloat16", False)],
)
def test_slow_bfloat16_is_said_with_what_is_faster(checkpoint, monkeypatch, caplog, capability, dtype, is_told):
    """PyTorch's products of bfloat16 are slower than those of float32 on processors with AVX2 and without AVX-512."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    make_llm(checkpoint[0], dtype=dtype)
    assert [record.levelname for record in caplog.records if "dtype='float32'" in record.message] == [
        "WARNING"
    ] * is_told
