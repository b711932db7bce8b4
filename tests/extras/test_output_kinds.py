"""`SamplingParams.output_kind`: what each output of a stream holds.

Oracle: cumulative outputs of the same requests; the deltas must add up to them, step by step.
"""

import pytest

from nanovllm_extras import LLM, RequestOutputKind, SamplingParams
from tests.tiny_tokenizers import byte_level, copy_checkpoint

TOKENIZER = byte_level()
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdefgh"))


@pytest.fixture(scope="module")
def llm(checkpoints, tmp_path_factory):
    folder = copy_checkpoint(
        checkpoints.make(num_hidden_layers=1)[0], tmp_path_factory.mktemp("kinds") / "model", TOKENIZER
    )
    return LLM(folder, dtype="float32", device="cpu", attention_backend="torch", num_kv_blocks=64, block_size=4)


REQUESTS = {
    "text": {"max_tokens": 8},
    "bytes": {"max_tokens": 30, "allowed_token_ids": None},
    "stop string": {"max_tokens": 40, "stop": ["ab", "hag"]},
    "three samples": {"max_tokens": 20, "n": 3, "stop_token_ids": LETTERS[:1], "logprobs": 1},
    "log-probabilities": {"max_tokens": 5, "logprobs": 2, "prompt_logprobs": 1},
    "no text": {"max_tokens": 5, "detokenize": False},
    "one token": {"max_tokens": 1},
}


def outputs_of(llm, kind, fields):
    params = SamplingParams(
        output_kind=kind, **{"seed": 3, "temperature": 2.0, "allowed_token_ids": LETTERS, "ignore_eos": True, **fields}
    )
    llm.reset_prefix_cache()
    return list(llm.stream([5, 6, 7, 8], params))


def summary(completion):
    logprobs = completion.logprobs and [list(entries) for entries in completion.logprobs]
    return completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason, logprobs


@pytest.mark.parametrize("name", REQUESTS)
def test_deltas_add_up_to_the_cumulative_outputs_and_the_last_is_the_final_one(llm, name):
    whole = outputs_of(llm, RequestOutputKind.CUMULATIVE, REQUESTS[name])
    deltas = outputs_of(llm, RequestOutputKind.DELTA, REQUESTS[name])
    assert len(deltas) == len(whole)
    texts, ids, logprobs, ends = {}, {}, {}, {}
    for i, (delta, so_far) in enumerate(zip(deltas, whole, strict=True)):
        assert delta.finished == so_far.finished
        assert delta.outputs
        for one in delta.outputs:
            texts[one.index] = texts.get(one.index, "") + one.text
            ids[one.index] = ids.get(one.index, []) + one.token_ids
            logprobs[one.index] = logprobs.get(one.index, []) + (one.logprobs or [])
            assert one.index not in ends, "nothing comes after the end of a sample"
            if one.finish_reason is not None:
                ends[one.index] = (one.finish_reason, one.stop_reason)
        for one in so_far.outputs:
            assert texts.get(one.index, "") == one.text
            assert ids.get(one.index, []) == one.token_ids
            assert [list(entries) for entries in logprobs.get(one.index, [])] == [list(e) for e in one.logprobs or []]
            assert ends.get(one.index, (None, None)) == (one.finish_reason, one.stop_reason)
        assert (delta.prompt_logprobs is not None) == (so_far.prompt_logprobs is not None and i == 0)
        assert delta.metrics.num_output_tokens == so_far.metrics.num_output_tokens
    (final,) = outputs_of(llm, RequestOutputKind.FINAL_ONLY, REQUESTS[name])
    assert final.finished
    assert [summary(one) for one in final.outputs] == [summary(one) for one in whole[-1].outputs]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_generate_gives_all_whatever_the_kind(llm, kind):
    params = SamplingParams(output_kind=kind, temperature=0, max_tokens=6, allowed_token_ids=LETTERS)
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == len(output.outputs[0].text) == 6


def test_an_aborted_stream_of_deltas_gives_its_rest(llm):
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, seed=3, max_tokens=9, allowed_token_ids=LETTERS)
    llm.engine.add_request("a", [5, 6, 7], params)
    given = [llm.engine.step().outputs[0].outputs[0] for _ in range(3)]
    assert [len(one.token_ids) for one in given] == [1, 1, 1]
    (rest,) = llm.engine.abort_request("a").outputs
    assert (rest.token_ids, rest.text, rest.finish_reason) == ([], "", "abort")
