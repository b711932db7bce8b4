"""What users type works with every architecture: `example.py --model`, `bench.py --model`; docs/models.md lists them.

The models are found as most users have them: by a hub id, in shards, in the layout of the hub's cache.
"""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import example
from benchmarks import offline
from nanovllm_extras.models.architectures import ARCHITECTURES as REGISTERED
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints
from tests.hub_cache import put_into_cache
from tests.tiny_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}:{% endfor %}"
PROMPTS = ["What is paged attention?", "Hello there"]
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("commands"))


def make(checkpoints, name, template):
    """(folder with a tokenizer, model of `transformers`, tokenizer)"""
    folder, model = checkpoints.make(name, next(iter(ARCHITECTURES[name].variants)), vocab_size=300)
    tokenizer = byte_level()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def answer(model, tokenizer, prompt, template):
    """What `transformers` answers, as the example prints it, and the number of tokens."""
    ids = tokenizer.encode(prompt + ":" if template else prompt)
    num_given = len(ids)
    while len(ids) < num_given + MAX_TOKENS and (len(ids) == num_given or ids[-1] != tokenizer.eos_token_id):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    text = tokenizer.decode(ids[num_given:], skip_special_tokens=True)
    wrapped = textwrap.fill(text.strip(), width=100, initial_indent="  ", subsequent_indent="  ")
    cut = "" if ids[-1] == tokenizer.eos_token_id else " [cut at --max-tokens]"
    return f"> {prompt}\n{wrapped}{cut}\n", len(ids) - num_given


def run_main(monkeypatch, capsys, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    capsys.readouterr()
    module.main()
    return capsys.readouterr().out


EVERY_ARCHITECTURE = [
    pytest.param(name, marks=[] if name == "deepseek_v3" else pytest.mark.slow) for name in ARCHITECTURES
]


def test_the_example_answers(checkpoints, hub_cache, monkeypatch, capsys):
    name = "deepseek_v3"
    folder, model, tokenizer = make(checkpoints, name, TEMPLATE)
    put_into_cache(hub_cache, f"org/{name}", folder)
    asked = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    printed = run_main(
        monkeypatch, capsys, example, "--model", f"org/{name}", "--extras", "--max-tokens", MAX_TOKENS, *asked
    )
    answers, lens = zip(*(answer(model, tokenizer, prompt, TEMPLATE) for prompt in PROMPTS), strict=True)
    for one in answers:
        assert one in printed
    num_given = sum(len(tokenizer.encode(prompt + ":")) for prompt in PROMPTS)
    assert f"tokens                 {num_given} in, {sum(lens)} out" in printed


@pytest.mark.thinned
@pytest.mark.parametrize("load_format", ["dummy", "safetensors"])
@pytest.mark.parametrize("name", EVERY_ARCHITECTURE)
def test_the_benchmark_measures(checkpoints, hub_cache, monkeypatch, capsys, name, load_format):
    folder, _, _ = make(checkpoints, name, TEMPLATE)
    put_into_cache(hub_cache, f"org/{name}", folder)
    work = ["--num-requests", 3, "--input-len", 4, 9, "--output-len", 2, 6, "--device", "cpu", "--num-kv-blocks", 64]
    options = ["--load-format", load_format, "--rates", 25, 1000, "--json", hub_cache / "out.json"]
    run_main(monkeypatch, capsys, offline, "--model", f"org/{name}", *work, *options)
    report = json.loads((hub_cache / "out.json").read_text())
    assert (report["model"], report["requests"]) == (name, 3)
    assert report["roofline"]["decode_bytes"] > 0


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["", "stream"])
def test_a_model_without_a_chat_template_continues_the_texts(checkpoints, monkeypatch, capsys, flags):
    folder, model, tokenizer = make(checkpoints, "llama", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    options = ["--max-tokens", MAX_TOKENS, "--prompt", PROMPTS[0], *flags]
    printed = run_main(monkeypatch, capsys, example, "--model", folder, *options)
    assert "no chat template: it continues the texts" in printed
    assert answer(model, tokenizer, PROMPTS[0], None)[0].removesuffix(" [cut at --max-tokens]\n") in printed


def test_a_model_without_a_tokenizer_is_refused_by_the_example(checkpoints, monkeypatch, capsys):
    folder, _ = checkpoints.make("llama", "plain")
    with pytest.raises(SystemExit):
        run_main(monkeypatch, capsys, example, "--model", folder)
    assert "the model's folder holds no tokenizer" in capsys.readouterr().err


# ---- the table of docs/models.md


def test_the_table_lists_every_architecture_with_the_file_that_has_its_class():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    row = r"^\| (`\w+ForCausalLM`.*?) \|.*?\| \[`\w+\.py`\]\(\.\./(nanovllm(?:_extras)?/models/\w+\.py)\).*? \|"
    rows = re.findall(row, text, re.M)
    listed = {name: file for names, file in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(listed) == set(REGISTERED)
    for name, file in listed.items():
        assert f"class {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_architecture_is_tested():
    kinds = ("ForCausalLM", "ForConditionalGeneration")
    names = ("Qwen3_5", "Qwen3_5Moe", "Gemma4")  # by test_qwen3_5.py, test_qwen3_5_moe.py and test_gemma4.py
    elsewhere = {name + kind for name in names for kind in kinds} | {"Lfm2ForCausalLM"}  # by test_lfm2.py
    assert {one.class_name for one in ARCHITECTURES.values()} | elsewhere == set(REGISTERED)
