"""The core stands alone: with every extra deleted, the engine gives the same answers, and it stays small.

A feature that is asked for, and whose extra is gone, is refused by the extra's name.
"""

import json

import pytest

from tests.core_alone import PACKAGE, ROOT, copy_core, core_files, run_in

MAX_LINES = 5143  # of all Python files that are left when the extras are deleted
MAX_LOADED_LINES = 5116  # of those that a plain greedy run loads; the aim is 4,500
MAX_LOADED_FILES = 47

LOADED = """
import json, sys
from nanovllm import LLM, TINY_QWEN3, SamplingParams
llm = LLM(TINY_QWEN3, attention_backend="torch", enforce_eager=True, num_kv_blocks=8)
llm.generate("What is a block table?", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "nanovllm"]
print(json.dumps(sorted(module.__file__ for module in modules)))
"""

ANSWERS = """
import json
from nanovllm import LLM, TINY_QWEN3, SamplingParams
llm = LLM(TINY_QWEN3, attention_backend="torch", enforce_eager=True, dtype="float32", block_size=4, num_kv_blocks=40,
          max_num_batched_tokens=12)
questions = ["What is a block table?", "What is paged attention?", "Who are you?"]
prompts = llm.render_chat([[{"role": "user", "content": question}] for question in questions])
greedy = SamplingParams(temperature=0, max_tokens=40)
found = {"greedy": [one.outputs[0].text for one in llm.generate(prompts, greedy, use_tqdm=False)]}
sampled = SamplingParams(n=3, temperature=0.8, top_p=0.9, top_k=40, seed=7, max_tokens=20, logprobs=2, min_tokens=5)
found["sampled"] = [
    [(sample.text, [sorted(position) for position in sample.logprobs]) for sample in output.outputs]
    for output in llm.generate(prompts, sampled, use_tqdm=False)
]
found["streamed"] = [
    (output.request_id, output.outputs[0].text)
    for output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=30, stop=["."]))
]
stats = llm.get_stats()
found["preemptions"], found["hits"] = stats.num_preemptions, stats.prefix_cache_hit_tokens
print(json.dumps(found))
"""

REFUSED = {  # what is asked for -> the extra that the error names
    "Config.from_options(TINY_QWEN3, {'pipeline_parallel_size': 1})": "extras/vllm",
    "LLM(TINY_QWEN3, tensor_parallel_size=2)": "parallel",
    "LLM(TINY_QWEN3, enable_overlap=True)": "extras/overlap.py",
    "LLM(TINY_QWEN3, speculative_config={'method': 'ngram', 'num_speculative_tokens': 5})": "extras/speculation",
    "LLM(TINY_QWEN3, scheduling_policy='sjf')": "extras/policies.py",
    "LLM(TINY_QWEN3, preemption_mode='swap', swap_space_bytes=1 << 20)": "extras/swap",
    "LLM(TINY_QWEN3, attention_backend='cpu')": "kernels",
    "LLM(TINY_QWEN3, kv_cache_dtype='fp8', attention_backend='torch')": "kernels",
    "LLM(TINY_QWEN3, kv_cache_dtype='int8', attention_backend='torch')": "kernels",
    "LLM(TINY_QWEN3, quantization='int8')": "extras/quantization",
    "LLM(TINY_QWEN3, enable_cuda_graphs=True)": "extras/cuda",
    "LLM(TINY_QWEN3, trace='run.jsonl')": "trace",
    "LLM(TINY_QWEN3, load_format='dummy')": "extras/",
    "LLM(TINY_QWEN3, hf_overrides={'architectures': ['LlamaForCausalLM']})": "",
    "llm.embed('a')": "extras/embedding",
    "llm.beam_search('a', None)": "extras/beam_search",
    "llm.get_metrics()": "extras/vllm",
    "llm.generate('a', SamplingParams(repetition_penalty=1.2))": "extras/logits.py",
    "llm.generate('a', SamplingParams(prompt_logprobs=1))": "extras/prompt_logprobs.py",
    "SamplingParams(structured_outputs={'regex': 'a+'})": "extras/structured",
    "nanovllm.EngineArgs": "extras/vllm",
    "LLM.from_engine_args(None)": "extras/vllm",
}

REPLIES = """
import json, sys
import nanovllm
from nanovllm import LLM, TINY_QWEN3, Config, SamplingParams
llm = LLM(TINY_QWEN3, num_kv_blocks=8)
replies = dict.fromkeys(sys.argv[1:], "taken")
for asked in replies:
    try:
        eval(asked)
    except (ImportError, TypeError, ValueError) as error:
        replies[asked] = f"{type(error).__name__} {error}"
print(json.dumps(replies))
"""

EXAMPLE = """
import runpy
sys.argv = ["example.py"]
runpy.run_path("example.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    return copy_core(tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def core_alone(core):
    """(answers, {what is asked for: the error, or "taken"}, what the example prints) of the core, in one process."""
    printed = run_in(core, "-c", ANSWERS + REPLIES + EXAMPLE, *REFUSED)
    answers, replies, example = printed.split("\n", 2)
    return json.loads(answers), json.loads(replies), example


@pytest.fixture(scope="module")
def whole():
    """(files that a plain run loads, answers after that) of the whole package, in one process."""
    return [json.loads(line) for line in run_in(ROOT, "-c", LOADED + ANSWERS).splitlines()[-2:]]


def num_lines(files):
    return sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)


def test_the_core_stays_small():
    lines = {str(file): num_lines([file]) for file in core_files()}
    print(json.dumps(lines, indent=1))
    assert sum(lines.values()) <= MAX_LINES


def test_a_plain_run_loads_little(whole):
    loaded = [PACKAGE / file for file in whole[0]]
    files = [file.relative_to(PACKAGE) for file in loaded]
    print("\n".join(f"{num_lines([file]):5d} {file}" for file in files))
    assert set(files) <= set(core_files()), "an extra that nobody asked for"
    assert len(files) <= MAX_LOADED_FILES
    assert num_lines(files) <= MAX_LOADED_LINES


def test_answers_are_the_same_without_any_extra(core_alone, whole):
    expected = whole[1]
    assert core_alone[0] == expected
    assert expected["preemptions"] > 0, "the pool is too large to show anything"
    assert len(expected["streamed"]) > 30


def test_the_example_answers_without_any_extra(core_alone):
    """Word for word what README shows, in bfloat16."""
    answers, table = core_alone[2].split("computed by")
    assert "Paged attention stores the KV cache in small blocks of fixed size" in answers
    assert "27 + 58 = 85." in answers
    assert "nanovllm/kernels is not there" in table, "it says why PyTorch computes"


@pytest.mark.parametrize("asked", REFUSED)
def test_what_an_extra_does_is_refused_by_its_name(core_alone, asked):
    reply = core_alone[1][asked]
    assert reply.startswith(("MissingExtra", "TypeError"))
    assert f"nanovllm/{REFUSED[asked]}" in reply
