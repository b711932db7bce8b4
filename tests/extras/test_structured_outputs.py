"""Structured output: whatever random weights would like to say, an output that ends with `stop` has the form demanded.

The oracles are `jsonschema` for schemas, `re` for expressions, and a search over the choices for single tokens.
"""

import json
import re
import sys
import threading

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.batch import SamplingBatch
from nanovllm_extras import LLM, SamplingParams, StructuredOutputsParams
from nanovllm_extras.structured import compiler as compiler_module
from nanovllm_extras.structured.compiler import GrammarCompiler
from nanovllm_extras.structured.grammar import GrammarRows, fill_masks
from tests.conftest import examples
from tests.tiny_tokenizers import byte_level, copy_checkpoint, metaspace, sentencepiece

PROMPT = [5, 6, 7]
END = 0  # of the tokenizer of bytes


@pytest.fixture(scope="module")
def llm(with_tokenizer):
    with LLM(with_tokenizer, attention_backend="torch", num_kv_blocks=512) as llm:
        yield llm


def run(llm, form, prompts=(PROMPT,), **params):
    params = {"max_tokens": 300, "seed": 3, **params}
    outputs = llm.generate(
        [list(p) for p in prompts], SamplingParams(structured_outputs=form, **params), use_tqdm=False
    )
    return [completion for output in outputs for completion in output.outputs]


# ---- schemas

INTEGERS = st.builds(
    lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
    st.integers(-200, 200),
    st.integers(0, 1000),
)
STRINGS = st.builds(
    lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
    st.integers(0, 3),
    st.integers(0, 4),
)
PATTERNS = st.sampled_from(["^[a-c]{2,4}$", r"^\d-\w$", "^x?y$"]).map(lambda one: {"type": "string", "pattern": one})
ENUMS = st.lists(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=4)),
    min_size=1,
    max_size=4,
    unique_by=repr,
).map(lambda values: {"enum": values})
TEXTS = st.text('ab"\\\n☃é', max_size=3)
LISTS = st.lists(st.integers(0, 9), max_size=2)
CONSTANTS = st.one_of(st.integers(-(2**53), 2**53), TEXTS, LISTS).map(lambda value: {"const": value})
SCALARS = st.one_of(
    st.just({"type": "boolean"}), st.just({"type": "null"}), INTEGERS, STRINGS, PATTERNS, ENUMS, CONSTANTS
)


def containers(inner):
    objects = st.builds(
        lambda properties, choose: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if choose.random() < 0.5],
            "additionalProperties": False,
        },
        st.dictionaries(st.text('abcé "', min_size=1, max_size=3), inner, max_size=3),
        st.randoms(use_true_random=False),
    )
    records = st.builds(
        lambda names, values: {
            "type": "object",
            "propertyNames": {"type": "string", "enum": names},
            "additionalProperties": values,
            "required": names[:1],
        },
        st.lists(st.text('abcé "', min_size=1, max_size=3), min_size=1, max_size=2), inner,
    )  # fmt: skip
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    pairs = st.builds(
        lambda a, b: {"type": "array", "prefixItems": [a, b], "items": False, "minItems": 2}, inner, inner
    )
    either = st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    return st.one_of(objects, records, arrays, pairs, either)


SCHEMAS = st.recursive(SCALARS, containers, max_leaves=6)


@pytest.mark.examples
@settings(max_examples=examples(25), deadline=None)
@given(
    schemas=st.lists(SCHEMAS, min_size=4, max_size=4), seed=st.integers(0, 2**32), temperature=st.sampled_from([0, 1])
)
def test_outputs_fit_their_schemas(llm, schemas, seed, temperature):
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=400,
            seed=seed + i,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=i % 2 == 0),
        )
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate([PROMPT] * len(schemas), params, use_tqdm=False)
    for i, (schema, output) in enumerate(zip(schemas, outputs, strict=True)):
        completion = output.outputs[0]
        if i % 2 == 0:  # without white space, these schemas have only short texts
            assert completion.finish_reason == "stop", (schema, completion)
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
        assert completion.finish_reason != "abort", completion.stop_reason


def test_a_json_object_is_any_object(llm):
    completions = run(llm, {"json_object": True}, [[i, 9] for i in range(1, 13)], temperature=1, max_tokens=100)
    ended = [one for one in completions if one.finish_reason == "stop"]
    assert len(ended) >= 3
    assert all(isinstance(json.loads(one.text), dict) for one in ended)
    assert {one.finish_reason for one in completions} <= {"stop", "length"}


def test_a_schema_as_text_and_without_white_space(llm):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"json": json.dumps(schema), "disable_any_whitespace": True}
    assert re.fullmatch(r'\{"a":\d\}', run(llm, form)[0].text)
    form = {"json": schema, "whitespace_pattern": "_"}
    assert re.fullmatch(r'\{_?"a"_?:_?\d_?\}', run(llm, form, temperature=0)[0].text)


def test_a_described_object_comes_to_an_end(llm):
    """Without `additionalProperties`, which would let random weights invent keys until `max_tokens`."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}}, "required": ["a"]}
    for completion in run(llm, {"json": schema, "disable_any_whitespace": True}, temperature=1, n=8, max_tokens=40):
        assert completion.finish_reason == "stop", completion
        value = json.loads(completion.text)
        jsonschema.validate(value, schema | {"additionalProperties": False})


# ---- the other forms


@pytest.mark.parametrize("pattern", [r"[a-f]{2,5}-[0-9]{1,3}", "(yes|no){1,4}!", "é{2,3}☃?", r"a\.b|\(c\)"])
def test_the_whole_output_matches_the_expression(llm, pattern):
    for completion in run(llm, {"regex": pattern}, [[i] for i in range(1, 7)], temperature=1):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text)


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'], ids=["Lark", "GBNF"])
def test_the_output_is_of_the_grammar(llm, grammar):
    for completion in run(llm, {"grammar": grammar}, [[i] for i in range(1, 7)], temperature=1):
        if completion.finish_reason == "stop":
            depth = completion.text.count("(")
            assert completion.text == "(" * depth + "x" + ")" * depth
    assert any(one.finish_reason == "stop" for one in run(llm, {"grammar": grammar}, [[i] for i in range(1, 9)]))


CHOICES = ["yes", "no", "not at all", 'say "ü☃"', "back\\slash\n", "::= or :", "no way"]


def greedy_choice(model, tokenizer, prompt, choices, stops=()):
    """By `transformers`, and by looking for each byte at every choice that begins with the bytes so far.

    A stop token may come where nothing else can, or where the text is complete.
    """
    texts = [choice.encode() for choice in choices]
    # a token is a byte: those of the texts are all that can be allowed
    byte_of = {i: b for text in choices for i, b in zip(tokenizer.encode(text), text.encode(), strict=True)}
    output, token_ids = b"", list(prompt)
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0, -1]
        allowed = [i for i, b in byte_of.items() if any(t.startswith(output + bytes([b])) for t in texts)]
        allowed = [i for i in allowed if i not in stops] or allowed
        allowed += [END, *stops] if output in texts else []
        best = max(allowed, key=lambda i: float(logits[i]))
        token_ids.append(best)
        if best == END or best in stops:
            return token_ids[len(prompt) :]
        output += bytes([byte_of[best]])


def test_each_token_is_the_likeliest_that_fits(llm, tiny_checkpoint):
    prompts = [[i, i + 40] for i in range(1, 11)]
    completions = run(llm, {"choice": CHOICES}, prompts, temperature=0)
    assert [one.token_ids for one in completions] == [
        greedy_choice(tiny_checkpoint[1], llm.get_tokenizer(), prompt, CHOICES) for prompt in prompts
    ]
    assert {one.text for one in completions} <= set(CHOICES)
    assert len({one.text for one in completions}) > 1


STOPPED = [  # an expression, all its texts, the stop tokens
    ("(ab){3}", ["ababab"], "a"),
    ("(ab){3}", ["ababab"], "b"),
    ("(ab){3}", ["ababab"], "c"),
    ("[ab]c", ["ac", "bc"], "a"),
    ("[ab]c", ["ac", "bc"], "ab"),
    ("[ab]c", ["ac", "bc"], "c"),
    ("ab?c?", ["a", "ab", "ac", "abc"], "b"),
    ("ab?c?", ["a", "ab", "ac", "abc"], "bc"),
    ("é|è", ["é", "è"], "é"),  # of two tokens
]


@pytest.mark.parametrize(("pattern", "texts", "stops"), STOPPED)
def test_a_stop_token_ends_a_text_that_needs_it_or_is_complete(llm, tiny_checkpoint, pattern, texts, stops):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(stops)
    prompts = [[i, i + 40] for i in range(1, 6)]
    for form in ({"regex": pattern}, {"choice": texts}):
        completions = run(llm, form, prompts, temperature=0, stop_token_ids=ids)
        expected = [greedy_choice(tiny_checkpoint[1], tokenizer, prompt, texts, ids) for prompt in prompts]
        assert [one.token_ids for one in completions] == expected
        for one in completions:
            last = one.token_ids[-1]
            assert (one.finish_reason, one.stop_reason) == ("stop", last if last in ids else None)


def test_a_stop_token_that_the_form_needs_counts_only_after_min_tokens(llm):
    a, b = llm.get_tokenizer().encode("ab")
    (one,) = run(llm, {"regex": "(ab){3}"}, stop_token_ids=[a], min_tokens=3)
    assert (one.token_ids, one.text, one.stop_reason) == ([a, b, a, b, a], "abab", a)


def test_all_choices_are_reached(llm):
    completions = run(llm, {"choice": CHOICES}, temperature=50, n=80)
    assert {one.text for one in completions} == set(CHOICES)


# ---- beside what else a request may ask for


def test_end_tokens_come_when_the_text_is_complete_whatever_ends_it(llm):
    tokenizer = llm.get_tokenizer()
    b = tokenizer.encode("b")[0]
    ignored = run(llm, {"choice": ["yes"]}, ignore_eos=True, max_tokens=6)[0]
    assert (ignored.text, ignored.finish_reason, ignored.token_ids[3:]) == ("yes", "length", [END] * 3)
    later = run(llm, {"choice": ["yes"]}, min_tokens=5)[0]
    assert (later.text, later.finish_reason, len(later.token_ids)) == ("yes", "stop", 6)
    longer = run(llm, {"regex": "a{1,9}"}, min_tokens=7)[0]
    assert longer.finish_reason == "stop"
    assert len(longer.text) >= 7
    own = run(llm, {"regex": "a{1,3}b?"}, [[i] for i in range(1, 9)], temperature=5, stop_token_ids=[b])
    assert all(re.fullmatch("a{1,3}", one.text) and one.finish_reason == "stop" for one in own), "b only ends"
    assert {one.stop_reason for one in own} == {None, b}
    cut = run(llm, {"regex": "a{5}"}, stop=["aaa"])[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("", "stop", "aaa")


def test_the_form_wins_over_what_leaves_no_token(llm):
    tokenizer = llm.get_tokenizer()
    q, a = tokenizer.encode("qa")
    assert run(llm, {"choice": ["ab"]}, allowed_token_ids=[q])[0].text == "ab"
    assert run(llm, {"choice": ["ab"]}, bad_words=["a"])[0].text == "ab"
    assert run(llm, {"regex": "a|b"}, bad_words=["a"], temperature=0)[0].text == "b", "a wish that can be met is met"
    assert run(llm, {"regex": "a|b"}, allowed_token_ids=[a], temperature=0)[0].text == "a"

    def only_q(output_token_ids, logits):
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([q]), 5.0)

    assert run(llm, {"choice": ["ab"]}, logits_processors=[only_q])[0].text == "ab"
    penalized = run(llm, {"regex": "[ab]{6}"}, temperature=0, repetition_penalty=1.5, logprobs=2)[0]
    assert re.fullmatch("[ab]{6}", penalized.text)
    assert len(penalized.logprobs) == 7


def test_a_grammar_without_a_next_token_ends_its_request_alone(tiny_checkpoint, tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "c": 1, "<end>": 2}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    without_b = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    good = SamplingParams(structured_outputs={"regex": "[a-c]{4}"}, max_tokens=20, temperature=0)
    bad = SamplingParams(structured_outputs={"regex": "a[bd]c"}, max_tokens=20, temperature=0)
    folder = copy_checkpoint(tiny_checkpoint[0], tmp_path / "model", without_b)
    with LLM(folder, attention_backend="torch", num_kv_blocks=64) as llm:
        completions = [output.outputs[0] for output in llm.generate([PROMPT] * 2, [good, bad], use_tqdm=False)]
        ended = llm.engine.observed.num_ended
        assert {reason: number for reason, number in ended.items() if number} == {"stop": 1, "abort": 1}
        assert llm.get_stats().num_running == 0
    assert completions[0].finish_reason == "stop"
    assert completions[1].finish_reason == "abort"
    assert "no token of the vocabulary" in completions[1].stop_reason
    assert completions[1].text.startswith("a")


# ---- beside what the engine does

MIXED = [
    {"regex": "[a-m]{10,30}"},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6}},
    None,
    {"choice": ["blue", "black", "brown"]},
    {"json_object": True},
]


def mixed_requests():
    prompts = [[(7 * i + j) % 250 + 1 for j in range(3 + 5 * i)] for i in range(10)]
    return prompts, [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=24, n=1 + 2 * (i % 2), structured_outputs=MIXED[i % 5])
        for i in range(10)
    ]


@pytest.fixture(scope="module")
def mixed_outputs(llm):
    return token_ids(llm.generate(*mixed_requests(), use_tqdm=False))


def token_ids(outputs):
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 12, "block_size": 8, "enable_overlap": True},
        {
            "num_kv_blocks": 12,
            "block_size": 8,
            "max_num_batched_tokens": 7,
            "preemption_mode": "swap",
            "swap_space_bytes": 1 << 20,
        },
    ],
    ids=["preemption-overlap", "swap, chunks"],
)
def test_the_same_outputs_however_they_are_scheduled(with_tokenizer, mixed_outputs, options):
    with LLM(with_tokenizer, **{"attention_backend": "torch", "num_kv_blocks": 512, **options}) as llm:
        assert token_ids(llm.generate(*mixed_requests(), use_tqdm=False)) == mixed_outputs
        if "block_size" in options:
            assert llm.get_stats().num_preemptions > 0


def test_a_failed_step_reads_no_token_twice(llm, mixed_outputs, monkeypatch):
    engine, calls = llm.engine, []
    run_batch = engine.runner.run

    def fail_at_times(batch):
        calls.append(batch)
        if len(calls) % 4 == 0:
            raise RuntimeError("the device is gone")
        return run_batch(batch)

    monkeypatch.setattr(engine.runner, "run", fail_at_times)
    for i, (prompt, params) in enumerate(zip(*mixed_requests(), strict=True)):
        engine.add_request(str(i), prompt, params, stream=False)
    finished = {}
    while engine.has_unfinished_requests():
        try:
            finished.update({output.request_id: output for output in engine.step().outputs})
        except RuntimeError as error:
            assert "gone" in str(error)  # noqa: PT017
    assert token_ids(finished[str(i)] for i in range(10)) == mixed_outputs


def test_requests_without_it_start_nothing(with_tokenizer):
    before = set(threading.enumerate())
    with LLM(with_tokenizer, attention_backend="torch", num_kv_blocks=16) as llm:
        batches = []
        run_batch = llm.engine.runner.run
        llm.engine.runner.run = lambda batch: (batches.append(batch), run_batch(batch))[1]
        llm.generate(PROMPT, SamplingParams(max_tokens=3, top_p=0.5), use_tqdm=False)
        assert set(threading.enumerate()) == before
        assert [type(batch.sampling) for batch in batches] == [SamplingBatch] * 3, "the core's, without processors"
        llm.generate(PROMPT, SamplingParams(max_tokens=3, structured_outputs={"regex": "a+"}), use_tqdm=False)
        assert len(set(threading.enumerate()) - before) == 1
        assert all(isinstance(batch.sampling.processors[-1], GrammarRows) for batch in batches[3:])


def test_equal_forms_are_compiled_once_and_the_oldest_are_forgotten(with_tokenizer, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 2)
    with LLM(with_tokenizer, attention_backend="torch", num_kv_blocks=16) as llm:
        compiler, made = llm.engine.input_processor.grammars, []
        make = compiler._make_matchers
        compiler._make_matchers = lambda *source: (made.append(source[1]), make(*source))[1]
        for pattern in ("a", "b", "a", "a", "c", "a", "b"):
            assert run(llm, {"regex": pattern})[0].text == pattern
        assert made == ["a", "b", "c", "b"]
        schema = {"type": "boolean"}
        run(llm, {"json": schema})
        run(llm, {"json": json.dumps(schema, indent=4)})
        assert len(made) == 5


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_tokenizers_of_several_kinds(tiny_checkpoint, tmp_path, make):
    folder = copy_checkpoint(tiny_checkpoint[0], tmp_path / "model", make())
    schema = {"type": "array", "items": {"enum": ["a é", "Hello", " b", 12]}, "maxItems": 4}
    with LLM(folder, attention_backend="torch", num_kv_blocks=64) as llm:
        for completion in run(llm, {"json": schema}, [[i] for i in range(3, 9)], temperature=1):
            assert completion.finish_reason == "stop"
            jsonschema.validate(json.loads(completion.text), schema)


def test_a_later_change_of_the_schema_reaches_later_requests_alone(llm):
    schema = {"enum": [12]}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=20)
    stream = llm.stream(PROMPT, params)
    schema["enum"].append(7)
    schema["enum"].remove(12)
    params.structured_outputs.regex = "[ab]"
    assert list(stream)[-1].outputs[0].text == "12"
    with pytest.raises(ValueError, match="exactly one of"):
        llm.generate(PROMPT, params, use_tqdm=False)
    params.structured_outputs = {"json": schema}
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text == "7"


# ---- refused, before anything changes

CHAIN = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1001)}}
DEEP = json.loads('{"items": ' * 300 + "{}" + "}" * 300)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, ["exactly one of json", "none"]),
        ({"json": {}, "regex": "a"}, ["exactly one", "'json', 'regex'"]),
        ({"json_object": False}, ["exactly one"]),
        ({"schema": {}}, ["the fields json", "schema"]),
        ({"choice": []}, ["choice", "at least 1"]),
        ({"choice": ["a", ""]}, ["choice[1]", "empty"]),
        ({"json": {}, "whitespace_pattern": "", "disable_any_whitespace": True}, ["whitespace_pattern", "None"]),
        ({"json": "{"}, ["json", "not a JSON schema"]),
        ({"json": {"minimum": float("nan")}}, ["json", "not a JSON schema"]),
        ({"json": {"const": 2**53 + 1}}, ["json", "within 2**53"]),
        ({"json": {"type": "elephant"}}, ["json cannot be compiled", "elephant"]),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, ["json cannot be compiled", "Unimplemented"]),
        ({"json": {"not": {"type": "string"}}}, ["json cannot be compiled", "Unimplemented", "not"]),
        ({"json": {"enum": []}}, ["json cannot be compiled", "Unsatisfiable"]),
        ({"json": {"$ref": "http://localhost/schema"}}, ["json cannot be compiled", "Resource"]),
        ({"json": {"$ref": "#"}}, ["json cannot be satisfied", "no token"]),
        ({"json": DEEP}, ["json cannot be compiled", "recursion limit"]),
        ({"json": CHAIN}, ["at most 1000 references"]),
        ({"json": {"enum": ["a" * (1 << 20)]}}, ["json", "at most 1048576 characters"]),
        ({"regex": "(a"}, ["regex cannot be compiled", "unclosed"]),
        ({"regex": "(?=a)b"}, ["regex cannot be compiled", "look-around"]),
        ({"regex": "[a&&b]"}, ["regex cannot be satisfied", "no token"]),
        ({"regex": "(" * 10**5}, ["regex cannot be compiled"]),
        ({"regex": "\ud800"}, ["regex cannot be compiled", "surrogates"]),
        ({"choice": ["\ud800"]}, ["choice cannot be compiled"]),
        ({"grammar": "start: one"}, ["grammar cannot be compiled", "unknown name", "one"]),
        ({"grammar": "root ::= one"}, ["grammar cannot be compiled", "one"]),
        ({"grammar": "start: " + "(" * 10**5}, ["grammar", "at most 100 brackets"]),
        ({"grammar": "\n".join(f"r{i}: r{i + 1}" for i in range(10**4))}, ["grammar", "at most 1000 rules"]),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_served_is_named(llm, form, words):
    with pytest.raises(ValueError, match=".") as error:
        llm.generate([PROMPT, PROMPT], SamplingParams(structured_outputs=form), use_tqdm=False)
    assert [word for word in ["structured_outputs", *words] if word not in str(error.value)] == []
    assert len(str(error.value)) < 5000 or "regex" in form
    assert not llm.engine.has_unfinished_requests()


BAD_TYPES = [{"json": 3}, {"regex": 3}, {"choice": "yes"}, {"choice": [1]}, {"grammar": b""}, {"json_object": "yes"}]


@pytest.mark.parametrize("form", ["json", 3, *BAD_TYPES, {"json_object": True, "disable_any_whitespace": 1}])
def test_a_bad_type_is_named(form):
    with pytest.raises(TypeError, match="structured_outputs"):
        SamplingParams(structured_outputs=form)


def test_without_the_extra_the_request_says_what_to_install(with_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(with_tokenizer, attention_backend="torch", num_kv_blocks=16) as llm:
        with pytest.raises(ValueError, match=r"needs the package llguidance .*nanovllm\[structured\]"):
            run(llm, {"regex": "a"})
        assert llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_a_model_without_tokenizer_or_end_or_with_a_strange_tokenizer(tiny_checkpoint, tmp_path):
    options = {"attention_backend": "torch", "num_kv_blocks": 16}
    with LLM(tiny_checkpoint[0], **options) as llm, pytest.raises(ValueError, match="structured_outputs need a token"):
        run(llm, {"regex": "a"})
    endless = byte_level()
    endless.eos_token = None
    with (
        LLM(copy_checkpoint(tiny_checkpoint[0], tmp_path / "endless", endless), **options) as llm,
        pytest.raises(ValueError, match="end-of-sequence"),
    ):
        run(llm, {"regex": "a"})
    with (
        LLM(copy_checkpoint(tiny_checkpoint[0], tmp_path / "metaspace", metaspace()), **options) as llm,
        pytest.raises(ValueError, match="tokenizer of this model"),
    ):
        run(llm, {"regex": "a"})


# ---- vocabularies with holes


@given(st.randoms(use_true_random=False), st.text("abé", min_size=1, max_size=6))
@settings(max_examples=examples(20), deadline=None, derandomize=True, database=None)
@pytest.mark.examples
def test_tokens_above_the_number_of_tokens_are_allowed(random, text):
    """A model exports tokens with any ids, so `len(tokenizer)` is no bound of them. Holes are never allowed."""
    pieces = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab", "ba", "<end>"]
    ids = sorted(random.sample(range(400), len(pieces)))
    random.shuffle(ids)
    end = ids[-1]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(dict(zip(pieces, ids, strict=True)), merges=[("a", "b"), ("b", "a")])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    compiler = GrammarCompiler(tokenizer, 400, frozenset([end]))
    free = compiler.compile(StructuredOutputsParams(regex="(.|\\n)*"))
    assert set(allowed(compiler, free, [], end)) <= set(ids)
    grammar, output = compiler.compile(StructuredOutputsParams(regex=text)), []
    possible = allowed(compiler, grammar, [], end)
    while end not in possible:
        assert len(output) < 20
        output.append(random.choice(possible))
        possible = allowed(compiler, grammar, output[-1:], end)
    assert (tokenizer.decode(output), possible) == (text, [end])


def allowed(compiler, grammar, new_tokens, end):
    mask = np.zeros((1, compiler._worker.num_words), dtype=np.int32)
    fill_masks(compiler._worker, [grammar], [new_tokens], [frozenset([end])], mask)
    bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
    return np.flatnonzero(bits).tolist()
