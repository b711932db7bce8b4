"""Structured outputs of tokenizers that remove or add the first space of a text.

The oracle is `tokenizer.decode` of the prompt with the whole output: what follows the prompt's own text has the form.
"""

import json
import re

import pytest
import tokenizers

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.structured.compiler import GrammarCompiler
from tests.extras.test_structured_outputs import allowed
from tests.tiny_tokenizers import PIECES, byte_level, copy_checkpoint, sentencepiece

MORE_PIECES = [*PIECES, '▁"', '"', "▁[", "[", "▁▁Hel", "Hel", "▁(", "▁1"]
KINDS = {
    "as Llama's": lambda: sentencepiece(MORE_PIECES),
    "as Gemma's": lambda: sentencepiece(MORE_PIECES, shows_first_space=True),
    "bytes": byte_level,
    "bytes, adds a space": lambda: byte_level(add_prefix_space=True),
}
FORMS = {  # and the texts that conform
    "choice": ({"choice": [" Hello", "Hello", " b", "a", "  a"]}, re.compile(" Hello|Hello| b|a|  a")),
    "choice of spaces": ({"choice": [" Hello", "  Hello"]}, re.compile(" {1,2}Hello")),
    "regex": ({"regex": " (a|b){2,3}"}, re.compile(" [ab]{2,3}")),
    "regex, space or not": ({"regex": " ?[ab]{2}| {3}a"}, re.compile(" ?[ab]{2}| {3}a")),
    "regex without space": ({"regex": "[!-~]{1,4}"}, re.compile("[!-~]{1,4}")),
    "empty": ({"regex": " {0,2}"}, re.compile(" {0,2}")),
    "json": ({"json": {"enum": [" a", "b", [" b"], 12]}}, re.compile(r'" a"|"b"|\[\s*" b"\s*\]|12')),
    "Lark": ({"grammar": 'start: (" (" start ")") | " a" | "b"'}, re.compile(r"( \()*( a|b)\)*")),
    "Lark, JSON": ({"grammar": 'start: " " x\nx: %json {"enum": [" a", 1]}'}, re.compile(' (" a"|1)')),
    "GBNF": ({"grammar": 'root ::= " a" root | " b"'}, re.compile("( a)* b")),
}


@pytest.fixture(scope="module", params=KINDS)
def llm(request, tiny_checkpoint, tmp_path_factory):
    folder = copy_checkpoint(tiny_checkpoint[0], tmp_path_factory.mktemp("spaces") / "model", KINDS[request.param]())
    with LLM(folder, attention_backend="torch", num_kv_blocks=256) as llm:
        yield llm


def prompts_of(tokenizer):
    """Prompts of special tokens, of a space, of a letter, and of both."""
    backend = tokenizer.backend_tokenizer
    special = tokenizer.bos_token_id or tokenizer.pad_token_id
    space, letter = (backend.token_to_id(piece) for piece in ("▁" if tokenizer.bos_token else "Ġ", "c"))
    return [[special], [special] * 3, [space], [special, space], [letter], [special, letter], [letter, special]]


@pytest.mark.parametrize(("name", "skip"), [(name, i % 2 == 0) for i, name in enumerate(FORMS)])
def test_the_text_has_the_form_with_its_first_space(llm, name, skip):
    form, pattern = FORMS[name]
    tokenizer = llm.get_tokenizer()
    prompts = prompts_of(tokenizer)
    params = SamplingParams(
        structured_outputs=form, max_tokens=60, temperature=3, seed=1, n=2, skip_special_tokens=skip,
    )  # fmt: skip
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        before = tokenizer.decode(prompt, skip_special_tokens=skip)
        for one in output.outputs:
            if one.finish_reason == "stop":
                whole = tokenizer.decode(prompt + one.token_ids[:-1], skip_special_tokens=skip)
                assert one.text == whole[len(before) :]
                assert pattern.fullmatch(one.text), (prompt, one)
            assert one.finish_reason in ("stop", "length")
        assert {one.finish_reason for one in output.outputs} != {"length"} or "grammar" in form


def test_each_choice_is_reached_and_streamed(llm):
    choices = FORMS["choice"][0]["choice"]
    prompt = prompts_of(llm.get_tokenizer())[0]
    params = SamplingParams(structured_outputs={"choice": choices}, max_tokens=60, temperature=20, seed=5, n=80)
    stream = [[one.text for one in output.outputs] for output in llm.stream(prompt, params)]
    assert set(stream[-1]) == set(choices)
    for texts in zip(*stream, strict=True):
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


def test_the_first_tokens_are_those_whose_text_begins_a_choice(llm):
    """By decoding each token of the vocabulary after the prompt."""
    choices = FORMS["choice"][0]["choice"]
    tokenizer = llm.get_tokenizer()
    compiler: GrammarCompiler = llm.engine.input_processor.grammars
    end = tokenizer.eos_token_id
    for prompt in prompts_of(tokenizer):
        before = len(tokenizer.decode(prompt, skip_special_tokens=True))
        texts = {i: tokenizer.decode([*prompt, i], skip_special_tokens=True)[before:] for i in range(len(tokenizer))}
        expected = {i for i, text in texts.items() if any(choice.startswith(text) for choice in choices)}
        grammar = compiler.compile({"choice": choices})
        grammar = compiler.for_prompt(grammar, llm.engine.input_processor.decoder, SamplingParams(), prompt)
        assert set(allowed(compiler, grammar, [], end)) == expected - set(tokenizer.added_tokens_decoder), prompt


def test_a_decoder_that_the_library_reads_otherwise_is_refused(tiny_checkpoint, tmp_path):
    tokenizer = sentencepiece()
    decoders = tokenizers.decoders
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    folder = copy_checkpoint(tiny_checkpoint[0], tmp_path / "model", tokenizer)
    saved = json.loads((folder / "tokenizer.json").read_text())["decoder"]["decoders"]
    assert [one["type"] for one in saved] == ["Metaspace", "ByteFallback"]
    with (
        LLM(folder, attention_backend="torch", num_kv_blocks=16) as llm,
        pytest.raises(ValueError, match="tokenizer of this model.*Metaspace"),
    ):
        llm.generate([1], SamplingParams(structured_outputs={"choice": ["a"]}), use_tqdm=False)
