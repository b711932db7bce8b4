"""vLLM's offline examples, with the import's name changed: each pattern that they show, as they write it.

Oracles: the same request in this engine's plainest form. What each pattern computes is tested where it is implemented.

Seen to fail when broken: parameters that are shared with the caller instead of copied.
"""

import pytest

from nanovllm import LLM, TINY_QWEN3, SamplingParams

PROMPTS = ["What is a block table?", "Paged attention", "The KV cache"]


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


@pytest.fixture(scope="module")
def llm():
    return LLM(model=str(TINY_QWEN3), max_model_len=512, max_num_seqs=16, num_kv_blocks=128, enforce_eager=True)


def lengths(outputs):
    return [len(output.outputs[0].token_ids) for output in outputs]


# --- parameters that are changed before they are used -----------------------------------------------------------------


def test_default_sampling_params_are_changed_and_used(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens = 5
    params.ignore_eos = True
    assert lengths(llm.generate(PROMPTS, params)) == [5, 5, 5]
    assert llm.get_default_sampling_params().max_tokens == 16, "the engine's own are as before"


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


def test_a_stream_keeps_the_parameters_of_its_call(llm):
    params = greedy(3, ignore_eos=True)
    stream = llm.stream(PROMPTS, params)
    params.max_tokens = 9
    assert {len(output.outputs[0].token_ids) for output in stream if output.finished} == {3}


def test_what_does_not_go_together_is_refused_before_anything_is_queued(llm):
    good, bad = SamplingParams(n=2), SamplingParams(n=2)
    bad.temperature = 0
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        llm.generate(PROMPTS[:2], [good, bad])
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        llm.engine.add_request("bad", PROMPTS[0], bad)
    assert not llm.engine.has_unfinished_requests()
