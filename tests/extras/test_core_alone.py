"""The core by itself: with every extra deleted, the engine gives the same answers, and the example runs.

`.ci/run` runs the core's own tests in the same kind of copy.
"""

import contextlib
import io
import json

import pytest

from tests.core_alone import copy_core, run_in

ANSWERS = """
import json
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
llm = LLM(TINY_QWEN3, attention_backend="torch", enforce_eager=True, dtype="float32", block_size=4, num_kv_blocks=40,
          max_num_batched_tokens=12)
questions = ["What is a block table?", "What is paged attention?", "Who are you?"]
prompts = llm.render_chat([[{"role": "user", "content": question}] for question in questions])
greedy = SamplingParams(temperature=0, max_tokens=40)
found = {"greedy": [one.outputs[0].text for one in llm.generate(prompts, greedy, use_tqdm=False)]}
sampled = SamplingParams(n=3, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7, max_tokens=20)
found["sampled"] = [
    [(sample.text, list(sample.token_ids)) for sample in output.outputs]
    for output in llm.generate(prompts, sampled, use_tqdm=False)
]
found["streamed"] = [
    (output.request_id, output.outputs[0].text)
    for output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=30, stop=["."]))
]
stats = llm.engine.stats
found["preemptions"], found["hits"] = stats.num_preemptions, stats.prefix_cache_hit_tokens
print(json.dumps(found))
"""

CORE_ONLY = ANSWERS.replace("nanovllm_extras", "nanovllm").replace("enforce_eager=True, ", "")

EXAMPLE = """
import runpy, sys
sys.argv = ["example.py"]
runpy.run_path("example.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
    """(answers, what the example prints) of a copy without extras, in one process."""
    copy = copy_core(tmp_path_factory.mktemp("core"))
    answers, example = run_in(copy, "-c", CORE_ONLY + EXAMPLE).split("\n", 1)
    return json.loads(answers), example


@pytest.fixture(scope="module")
def whole():
    """Answers with extras: of the whole package, and of the core's own classes in it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(ANSWERS + CORE_ONLY, {})
    return [json.loads(line) for line in printed.getvalue().splitlines()[-2:]]


@pytest.mark.slow
def test_answers_are_the_same_without_any_extra(core_alone, whole):
    expected = whole[0]
    assert core_alone[0] == expected
    assert whole[1] == expected
    assert expected["preemptions"] > 0, "the pool is too large to show anything"
    assert expected["hits"] > 0
    assert len(expected["streamed"]) > 30


@pytest.mark.slow
def test_the_example_answers_without_any_extra(core_alone):
    """Word for word what README shows, in bfloat16."""
    assert "Paged attention stores the KV cache in small blocks of fixed size" in core_alone[1]
    assert "27 + 58 = 85." in core_alone[1]
