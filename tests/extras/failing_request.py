"""Requests beside one that fails in the middle of its answer, for tests that the others do not notice it."""

from nanovllm_extras import LLMEngine, SamplingParams
from nanovllm_extras.engine.isolation import Isolation


class FailingError(Exception):
    pass


def isolating_engine(config):
    """Return an engine in which a request that makes its step fail ends alone."""
    return LLMEngine(config, faults=Isolation())


def serve_beside_a_failing_one(engine, prompts, params):
    """Return the tokens of each prompt, from an isolating engine that also gets a request with a failing processor."""

    def fail(output_token_ids, logits):
        if len(output_token_ids) == 3:
            raise FailingError
        return logits

    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    engine.add_request("bad", [1, 2, 3], SamplingParams(temperature=0, max_tokens=9, logits_processors=[fail]))
    outputs, errors = {}, {}
    while engine.has_unfinished_requests():
        outputs |= {one.request_id: one.outputs[0].token_ids for one in engine.step().outputs}
        errors |= engine.faults.take_failures()
    assert errors.keys() == {"bad"}
    assert isinstance(errors["bad"], FailingError)
    return [outputs[str(i)] for i in range(len(prompts))]
