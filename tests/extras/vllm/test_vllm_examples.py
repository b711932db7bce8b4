"""vLLM's offline examples, with the import's name changed: each pattern that they show, as they write it.

Oracles: the same request in this engine's plainest form. What each pattern computes is tested where it is implemented.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import transformers
from tqdm import tqdm

import example
from nanovllm_extras import (
    LLM,
    TINY_QWEN3,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanovllm_extras.engine.observations import Observations
from nanovllm_extras.vllm.vllm_metrics import BOUNDS, Counter, Gauge, Histogram, make_histogram

PROMPTS = ["What is a block table?", "Paged attention", "The KV cache"]


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


@pytest.fixture(scope="module")
def llm():
    return LLM(model=str(TINY_QWEN3), max_model_len=512, max_num_seqs=16, num_kv_blocks=128, enforce_eager=True)


def lengths(outputs):
    return [len(output.outputs[0].token_ids) for output in outputs]


# --- parameters that are changed before they are used ----------------------------------------------------------------


def test_later_changes_reach_later_requests_alone(llm):
    params = greedy(3, ignore_eos=True, stop=["no such text"], logit_bias={5: -1.0})
    llm.engine.add_request("before", PROMPTS[0], params)
    params.max_tokens = 6
    params.stop.append("e")
    params.logit_bias[7] = 100.0
    params.stop = None
    llm.engine.add_request("after", PROMPTS[0], params)
    finished = {}
    while llm.engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0] for output in llm.engine.step().outputs}
    (plain,) = llm.generate(PROMPTS[0], greedy(3, ignore_eos=True, logit_bias={5: -1.0}))
    assert finished["before"].token_ids == plain.outputs[0].token_ids
    assert finished["before"].finish_reason == "length"
    assert finished["after"].token_ids == [7] * 6


def test_what_does_not_go_together_is_refused_before_anything_is_queued(llm):
    good, bad = SamplingParams(n=2), SamplingParams(n=2)
    bad.temperature = 0
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        llm.generate(PROMPTS[:2], [good, bad])
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        llm.engine.add_request("bad", PROMPTS[0], bad)
    assert not llm.engine.has_unfinished_requests()


# --- engines made of arguments ---------------------------------------------------------------------------------------

OPTIONS = {"max_model_len": 512, "max_num_seqs": 16, "num_kv_blocks": 64, "enforce_eager": True}


def test_engine_args_from_a_command_line_to_an_llm():
    """generate.py and chat.py: `LLM(**vars(args))`, with sampling parameters beside the engine's."""
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model=str(TINY_QWEN3))
    parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--max-num-seqs", "4", "--tensor-parallel-size", "1", "--max-tokens", "3"]))
    max_tokens = args.pop("max_tokens")
    llm = LLM(**args | {"trust_remote_code": False, "quantization": None, "swap_space": 0, "num_kv_blocks": 64})
    params = llm.get_default_sampling_params()
    params.max_tokens = max_tokens
    params.ignore_eos = True
    assert lengths(llm.generate(PROMPTS, params, use_tqdm=tqdm, lora_request=None, priority=1)) == [3, 3, 3]
    assert llm.get_default_sampling_params().max_tokens == 16, "the engine's own are as before"
    assert llm.llm_engine.config.max_num_seqs == 4
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest, .* got 'x'"):
        llm.generate(PROMPTS, lora_request="x")


def test_llm_engine_from_engine_args():
    """llm_engine_example.py: requests come while others run, and `step()` gives a list of outputs."""
    engine_args = EngineArgs(model=str(TINY_QWEN3), **OPTIONS, disable_log_stats=True)
    assert LLM(**asdict(engine_args) | {"seed": 3}).llm_engine.config.max_num_seqs == 16
    engine = LLMEngine.from_engine_args(engine_args)
    waiting = [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    num_requests, finished = 0, {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(str(num_requests), *waiting.pop(0))
            num_requests += 1
        request_outputs: list[RequestOutput] = engine.step()
        for output in request_outputs:
            if output.finished:
                finished[output.request_id] = output
    assert {name: len(output.outputs) for name, output in finished.items()} == {"0": 1, "1": 1, "2": 2}
    assert not engine.step()


# --- prompts ---------------------------------------------------------------------------------------------------------


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_typed_prompts(llm):
    tokenizer = llm.get_tokenizer()
    texts = [TextPrompt(prompt=text) for text in PROMPTS]
    tokens = [TokensPrompt(prompt_token_ids=tokenizer.encode(text)) for text in PROMPTS]
    expected = ids_of(llm.generate(PROMPTS, greedy()))
    assert ids_of(llm.generate(texts, greedy())) == ids_of(llm.generate(tokens, greedy())) == expected
    assert ids_of(llm.generate({**texts[0], "multi_modal_data": None}, greedy())) == expected[:1]
    with pytest.raises(ValueError, match="multi_modal_data=.* text or token ids"):
        llm.generate({**texts[0], "multi_modal_data": {"image": 1}}, greedy())


def test_truncated_prompts(llm):
    ids = llm.get_tokenizer().encode("Paged attention stores the KV cache in small blocks of fixed size.")
    (output,) = llm.generate([ids], greedy(truncate_prompt_tokens=5))
    assert output.prompt_token_ids == ids[-5:]
    assert ids_of([output]) == ids_of(llm.generate([ids[-5:]], greedy()))
    long = (ids * 100)[:1000]  # more than the model's 512
    for max_tokens, kept in ((8, 504), (None, 511), (1, 511)):
        (output,) = llm.generate([long], greedy(max_tokens, truncate_prompt_tokens=-1, ignore_eos=True))
        assert output.prompt_token_ids == long[-kept:]
    with pytest.raises(ValueError, match="truncate_prompt_tokens must be at most 511"):
        llm.generate([ids], greedy(truncate_prompt_tokens=512))


# --- chat ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool['function']['name'] }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m['tool_calls'] %}{{ call['function']['arguments']['city'] }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}{{ style | default('assistant') }}:{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def templated():
    return LLM(str(TINY_QWEN3), **OPTIONS, chat_template=TEMPLATE)


def test_another_chat_template(llm, templated, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    for template in (TEMPLATE, str(file), file):
        (output,) = llm.chat(USER, greedy(2), use_tqdm=False, chat_template=template)
        assert output.prompt == "user: Hi;assistant:"
    (output,) = templated.chat(USER, greedy(2))
    assert output.prompt == "user: Hi;assistant:"
    with pytest.raises(ValueError, match="chat_template must be a file, or a template"):
        llm.chat(USER, greedy(2), chat_template="no-such-file")


def test_options_of_a_chat(templated):
    def prompt(messages, **options):
        return templated.chat(messages, greedy(1), use_tqdm=False, **options)[0].prompt

    assert prompt(USER, add_generation_prompt=False) == "user: Hi;"
    assert prompt(USER, chat_template_kwargs={"style": "poet"}) == "user: Hi;poet:"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert prompt(USER, tools=tools) == "[weather]user: Hi;assistant:"
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    answered = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sun"}]
    assert prompt(answered, tools=tools) == "[weather]user: Hi;assistant: Rome;tool: sun;assistant:"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert prompt(parts, chat_template_content_format="auto") == "user: a\nb;assistant:"


def test_a_chat_goes_on_with_the_last_message(llm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_QWEN3)
    messages = [*USER, {"role": "assistant", "content": "I am"}]
    (output,) = llm.chat(messages, greedy(2), add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert output.prompt.endswith("I am")


def test_bad_options_of_a_chat(templated):
    bad = [
        ({"continue_final_message": True}, ValueError, "needs add_generation_prompt=False"),
        ({"add_generation_prompt": 1}, TypeError, "add_generation_prompt must be True or False"),
        ({"tools": {"name": "x"}}, TypeError, "tools must be a list of dicts"),
        ({"tools": ["x"]}, TypeError, r"tools\[0\] must be a dict"),
        ({"tool": []}, TypeError, "unknown argument tool; allowed are .*tools"),
        ({"chat_template_kwargs": "x"}, TypeError, "chat_template_kwargs must be a dict"),
        ({"chat_template": "{{ 1 / 0 }}"}, ValueError, "chat template does not accept"),
        ({"chat_template": "{{ raise_exception('no system') }}"}, ValueError, "no system"),
    ]
    for options, exception, says in bad:
        with pytest.raises(exception, match=says):
            templated.chat(USER, greedy(1), **options)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(TypeError, match="must be text, got .*image_url"):
        templated.chat(image, greedy(1))


# --- other files than the checkpoint's -------------------------------------------------------------------------------


def test_another_tokenizer_or_none(tmp_path):
    transformers.AutoTokenizer.from_pretrained(TINY_QWEN3).save_pretrained(tmp_path / "tokenizer")
    llm = LLM(str(TINY_QWEN3), **OPTIONS, tokenizer=str(tmp_path / "tokenizer"))
    assert llm.get_tokenizer().name_or_path == str(tmp_path / "tokenizer")
    llm = LLM(str(TINY_QWEN3), **OPTIONS, skip_tokenizer_init=True)
    assert llm.get_tokenizer() is None
    with pytest.raises(ValueError, match="'no-such-folder-' is not a folder|holds no tokenizer|neither"):
        LLM(str(TINY_QWEN3), **OPTIONS, tokenizer=Path("no-such-folder-"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        LLM(str(TINY_QWEN3), **OPTIONS, tokenizer=tmp_path / "empty")


def test_default_parameters_from_elsewhere(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))

    def params(**options):
        return LLM(str(TINY_QWEN3), **OPTIONS, load_format="dummy", **options).get_default_sampling_params()

    assert params(generation_config="vllm") == SamplingParams()
    assert params(generation_config=tmp_path) == SamplingParams(temperature=0.25, top_k=7)
    more = {"top_p": 0.5, "max_new_tokens": 9}
    assert params(generation_config="vllm", override_generation_config=more) == SamplingParams(top_p=0.5, max_tokens=9)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics():
    """metrics.py: by kind; the counts of a histogram are cumulative."""
    llm = LLM(str(TINY_QWEN3), **OPTIONS, disable_log_stats=False)
    outputs = llm.generate(PROMPTS, greedy(5, ignore_eos=True))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert metrics["nanovllm:prompt_tokens"] == Counter("nanovllm:prompt_tokens", {}, num_prompt_tokens)
    assert metrics["nanovllm:generation_tokens"].value == 15
    assert metrics["nanovllm:num_requests_running"] == Gauge("nanovllm:num_requests_running", {}, 0.0)
    ttft = metrics["nanovllm:time_to_first_token_seconds"]
    assert isinstance(ttft, Histogram)
    assert ttft.count == ttft.buckets["+Inf"] == 3
    assert ttft.sum == pytest.approx(sum(output.metrics.ttft for output in outputs))
    for bound, count in list(ttft.buckets.items())[:-1]:
        assert count == sum(output.metrics.ttft <= float(bound) for output in outputs)
    assert metrics["nanovllm:inter_token_latency_seconds"].count == 12
    lengths = metrics["nanovllm:request_generation_tokens"]
    assert (lengths.buckets["2.0"], lengths.buckets["5.0"], lengths.sum) == (0, 3, 15)


@pytest.mark.parametrize("source", BOUNDS)
def test_buckets_count_the_values_up_to_their_bounds(source):
    """Values on the bounds, next to them, between them, below and beyond them all."""
    near = [math.nextafter(bound, to) for bound in BOUNDS[source] for to in (0, bound, math.inf)]
    values = [0.0, *near, *(1.37 * value for value in near), 1e9]
    observed = Observations()
    for value in values:
        observed._add(source, value)
    histogram = make_histogram("any", observed, source)
    for bound in BOUNDS[source]:
        assert histogram.buckets[str(float(bound))] == sum(value <= bound for value in values)
    assert histogram.count == histogram.buckets["+Inf"] == len(values)
    assert histogram.sum == pytest.approx(sum(values))


# --- the example -----------------------------------------------------------------------------------------------------


def test_the_example_answers_a_bad_argument_in_one_line(monkeypatch, capsys):
    for flags, says in (
        (["--temperature", "-1"], "temperature must be"),
        (["--model", "no/such/model"], "nanovllm_extras.LLM takes hub ids too"),
        (["--model", "no/such/model", "--extras"], "'no/such/model' is not a folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["example.py", *flags])
        with pytest.raises(SystemExit) as exit_:
            example.main()
        assert exit_.value.code == 2
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        assert says in errors.splitlines()[-1]
