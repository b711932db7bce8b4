"""`examples/extensions/constrained.py`: the oracle compares the choices' next tokens by the logits of transformers."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm_testing.engine_traffic import SMALL, drive

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "constrained.py"
EOS = 2
COLOURS = ["red", "reddish", "blue", "blue-green", "bluish green"]
CHOICES = [
    ["yes", "no"],
    COLOURS,
    ["the block table", "the block", "the scheduler", "a slot mapping", "a sequence that waits"],
    ["0", "1", "12", "123", "13"],
    None,
]


@pytest.fixture(scope="module")
def oracle():
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_QWEN3)

    def choose(prompt, choices):
        """Keep the choices that begin with the best next token, until only the end is left."""
        left = [[*tokenizer.encode(one, add_special_tokens=False), EOS] for one in choices]
        tokens = []
        while not tokens or tokens[-1] != EOS:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
            best = max({one[len(tokens)] for one in left}, key=lambda token: float(logits[token]))
            tokens.append(best)
            left = [one for one in left if one[: len(tokens)] == tokens]
        return tokens

    return choose


@pytest.fixture(scope="module")
def llm():
    return LLM(TINY_QWEN3, extension=EXTENSION, **SMALL)


def params(choices, **fields):
    extra_args = None if choices is None else {"choices": choices}
    return SamplingParams(max_tokens=24, extra_args=extra_args, **fields)


def test_outputs_are_the_greedy_choices(llm, oracle):
    """Several constraints in one batch, beside a request without one, and with preemption."""
    rng = random.Random(1)
    requests = []
    for i in range(15):
        prompt = [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 35))]
        choices = CHOICES[i % len(CHOICES)]
        requests.append((prompt, params(choices, temperature=0, ignore_eos=choices is None)))
    llm.engine.reset()
    found = drive(llm.engine, requests, rng)
    assert llm.engine.stats.num_preemptions > 0
    for (prompt, one), [(text, tokens, finish_reason)] in zip(requests, found, strict=True):
        if one.extra_args is not None:
            choices = one.extra_args["choices"]
            assert (tokens, finish_reason) == (oracle(prompt, choices), "stop")
            assert text in choices
    plain = [
        (prompt, tokens) for (prompt, one), [(_, tokens, _)] in zip(requests, found, strict=True) if not one.extra_args
    ]
    base = LLM(TINY_QWEN3, dtype="float32", attention_backend="torch")
    outputs = base.generate(
        [prompt for prompt, _ in plain], params(None, temperature=0, ignore_eos=True), use_tqdm=False
    )
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in plain]


def test_samples_are_different_choices(llm):
    (output,) = llm.generate(["What colour is it?"], params(COLOURS, n=5, temperature=5.0, seed=3), use_tqdm=False)
    texts = [sample.text for sample in output.outputs]
    assert set(texts) <= set(COLOURS)
    assert len(set(texts)) > 1


def test_the_end_may_be_a_stop_token_of_the_request(llm):
    one = params(["red"], temperature=0, ignore_eos=True, stop_token_ids=[77])
    (output,) = llm.generate(["What colour is it?"], one, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids[-1]) == ("red", 77)


@pytest.mark.parametrize(
    ("choices", "fields", "message"),
    [
        ([], {}, "list of strings that are not empty"),
        (["a", ""], {}, "list of strings that are not empty"),
        (["a", 3], {}, "list of strings that are not empty"),
        (["a"], {"ignore_eos": True}, "set ignore_eos to False"),
    ],
)
def test_choices_that_cannot_be_served_are_refused(llm, choices, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["a"], params(choices, **fields), use_tqdm=False)


def test_a_model_without_tokenizer_is_refused(tiny_checkpoint):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        LLM(tiny_checkpoint[0], extension=EXTENSION)
