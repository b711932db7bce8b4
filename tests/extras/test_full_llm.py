"""What `LLM` of the extras does beyond the core's, whose suite is `tests/test_llm.py`: forms, statistics, the end.

Oracles: `transformers` greedy `generate` for the tokens, `AutoTokenizer` for text and chat templates, arithmetic for
the statistics, and an undisturbed engine for a disturbed one.
"""

import gc
import io
import random
import shutil
import sys
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch
import transformers

import nanovllm
from nanovllm_extras import LLM, EngineStats, SamplingParams
from tests import test_llm as core
from tests.conftest import hf_greedy
from tests.failing_runs import Failing
from tests.test_llm import GOOD, MESSAGES, TOKENIZER, generate, ids, tokens_of
from tests.test_llm import checkpoint as checkpoint
from tests.test_loader import edit_config
from tests.tiny_tokenizers import TEXTS

pytestmark = pytest.mark.usefixtures("little_to_search")


def make_llm(folder, **options):
    options = {"num_kv_blocks": 64, "block_size": 16, **options}
    return LLM(model=folder, dtype="float32", device="cpu", attention_backend="torch", **options)


@pytest.fixture(scope="module")
def llm(checkpoint):
    """One engine for all tests that leave it as it was."""
    return make_llm(checkpoint[0])


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def assert_at_rest(llm):
    """Nothing runs, waits or owns a block."""
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0
    assert not llm.engine.has_unfinished_requests()


# --- prompts and parameters ----------------------------------------------------------------------------------------


def test_forms_may_be_mixed_and_the_order_is_kept(llm, checkpoint):
    """The later, the fewer tokens: the last request finishes first."""
    texts = [TEXTS[i % len(TEXTS)] * (1 + i % 3) for i in range(12)]
    encoded = [TOKENIZER.encode(text) for text in texts]
    prompts = [
        [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}][i % 4]
        for i, (text, token_ids) in enumerate(zip(texts, encoded, strict=True))
    ]
    outputs = generate(llm, prompts, [greedy(24 - 2 * i) for i in range(12)])
    assert [output.prompt_token_ids for output in outputs] == encoded
    expected = [hf_greedy(checkpoint[1], token_ids, 24 - 2 * i) for i, token_ids in enumerate(encoded)]
    assert tokens_of(outputs) == expected


def test_without_sampling_params_16_tokens_come(checkpoint):
    llm = make_llm(checkpoint[0])
    llm.engine.input_processor.eos_token_ids = frozenset()
    outputs = llm.generate([ids(5)], use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 16 == SamplingParams().max_tokens


# --- outputs, metrics, statistics ----------------------------------------------------------------------------------


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

BAD_PROMPTS = {
    **core.BAD_PROMPTS,
    "unknown key": ({"prompt": "a", "multi_modal": 1}, (ValueError, TypeError), ["multi_modal", "prompt_token_ids"]),
    "misspelt key": ({"prompt_ids": [1]}, (ValueError, TypeError), ["prompt_ids", "prompt_token_ids"]),
    "dict of None": ({"prompt_token_ids": None}, TypeError, ["prompt_token_ids"]),
}
BAD_CALLS = {
    "one too few": (lambda llm: generate(llm, [GOOD] * 3, [greedy()] * 2), ValueError, ["3", "2"]),
    "dict": (lambda llm: generate(llm, [GOOD], {"temperature": 0}), TypeError, ["SamplingParams"]),
    "unknown argument": (lambda llm: llm.generate([GOOD], greedy(), use_tdqm=False), TypeError, ["use_tdqm"]),
    "of chat": (lambda llm: llm.chat(MESSAGES, greedy(), use_tdqm=False), TypeError, ["use_tdqm"]),
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


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(llm, name):
    """Refused at the end of a call with good prompts: all are checked before any is queued."""
    prompt, exception, says = BAD_PROMPTS[name]
    assert_refused(llm, lambda: generate(llm, [GOOD, "Hello", prompt]), exception, says)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(llm, name):
    call, exception, says = BAD_CALLS[name]
    assert_refused(llm, lambda: call(llm), exception, says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (shutil.rmtree, ["broken"]),
        (lambda folder: (folder / "config.json").unlink(), ["broken", "config.json"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["broken", "safetensors"]),
        (
            lambda folder: edit_config(folder, architectures=["BertForMaskedLM"], model_type="llama"),
            ["BertForMaskedLM", "Qwen3ForCausalLM"],
        ),
    ],
    ids=["no folder", "no config", "no JSON", "no weights", "architecture"],
)
def test_bad_folders(checkpoint, tmp_path, change, says):
    folder = shutil.copytree(checkpoint[0], tmp_path / "broken")
    change(folder)
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the message is checked below)
        make_llm(str(folder))
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


@pytest.mark.parametrize(("exception", "when"), [(RuntimeError, "before"), (KeyboardInterrupt, "after")])
def test_an_exception_in_the_forward_pass(checkpoint, work, exception, when):
    """Each third forward pass fails."""
    prompts, params, _ = work
    llm = scarce_llm(checkpoint)
    failing, num_raised = Failing(llm.engine, 0, exception("now"), when), 0
    for nth in range(1, 100, 3):
        llm.reset_prefix_cache()
        llm.engine.runner.kv_cache.tensor.fill_(50.0)
        failing.countdown = nth
        try:
            generate(llm, prompts, params)
            break
        except exception:
            num_raised += 1
        assert_works(llm, work)
    assert num_raised > 3


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


@pytest.mark.parametrize("every", [17, pytest.param(6, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line(checkpoint, work, every):
    """Every sixth (or 17th) line of the package that `generate` runs is hit once, at one of the times it runs."""
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


def test_statistics_survive_an_interrupt(checkpoint, work):
    prompts, params, _ = work
    llm = scarce_llm(checkpoint)
    assert_works(llm, work)
    before = llm.get_stats()
    Failing(llm.engine, 3, KeyboardInterrupt(), "before")
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
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
