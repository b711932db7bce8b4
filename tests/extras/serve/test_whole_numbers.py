"""Integers that are written as 5.0, as JavaScript and Lua do, in each integer field of each route.

The fields are those whose JSON schema has integers. The oracle is the answer to the same request with integers.
"""

import math

import pydantic
import pytest

from nanovllm_extras.serve.messages.anthropic_protocol import MessagesRequest
from nanovllm_extras.serve.messages.pooling_protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from nanovllm_extras.serve.messages.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SlotRequest,
    TokenizeRequest,
)
from nanovllm_extras.serve.messages.responses_protocol import ResponsesRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0, "max_tokens": 3}
ROUTES = {  # path: (the class of its body, fields that it needs)
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", **GREEDY}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES, "logprobs": True, **GREEDY}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "temperature": 0, "max_output_tokens": 3}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, **GREEDY}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Hi"}),
    "/rerank": (RerankRequest, {"query": "Hi", "documents": ["a", "b"]}),
    "/score": (ScoreRequest, {"text_1": "Hi", "text_2": "a"}),
    "/pooling": (PoolingRequest, {"input": "Hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [70]}),
    "/slots/{name}": (SlotRequest, {"prompt": "Hi"}),
}
VALUES = {  # integer field: values that are accepted
    **dict.fromkeys(["n", "best_of"], [1]),
    **dict.fromkeys(["prompt", "input"], [[[70], [71, 72]], [70, 71]]),
    **dict.fromkeys(["allowed_token_ids", "tokens"], [[70, 71]]),
    "stop_token_ids": [[72]],
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"], [2]),
    **dict.fromkeys(["logprobs", "top_logprobs", "priority", "top_k", "truncate_prompt_tokens"], [2]),
    **dict.fromkeys(["top_n", "max_tokens_per_doc"], [1]),
    "seed": [7],
    "thinking_token_budget": [2],
    "dimensions": [64],
    "thinking": [{"budget_tokens": 5, "type": "adaptive"}],
}


def has_integers(schema, definitions):
    """Return whether a value of a JSON schema may have an integer."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            return True
        if "$ref" in schema:
            return has_integers(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return any(has_integers(part, definitions) for part in schema.values())
    return isinstance(schema, list) and any(has_integers(part, definitions) for part in schema)


def integer_fields(model):
    schema = model.model_json_schema()
    fields = {name: one for name, one in schema["properties"].items() if name != "vllm_xargs"}  # any class
    return sorted(name for name, one in fields.items() if has_integers(one, schema.get("$defs", {})))


def cases_of(path):
    """Return pairs of an integer field of a route and a value."""
    pairs = [(name, value) for name in integer_fields(ROUTES[path][0]) for value in VALUES[name]]
    return [pair for pair in pairs if not (path.startswith("/slots") and pair[1] == [[70], [71, 72]])]  # of one prompt


def as_floats(value):
    if isinstance(value, dict):
        return {name: one if isinstance(one, str) else as_floats(one) for name, one in value.items()}
    return [as_floats(one) for one in value] if isinstance(value, list) else float(value)


def as_wrong(value, wrong):
    if isinstance(value, dict):
        return {name: one if isinstance(one, str) else wrong for name, one in value.items()}
    return [wrong] if isinstance(value, list) else wrong


def answer_to(client, path, body):
    """Return the answer without what differs between equal requests."""
    response = client.post(path, body)
    answer = response.json()
    for name in ("id", "created", "created_at", "completed_at", "usage"):
        answer.pop(name, None)
    for item in answer.get("output", []):
        item.pop("id", None)
    return response.status_code, answer


@pytest.mark.parametrize("path", ROUTES)
def test_whole_floats_are_integers_and_other_numbers_are_refused(client, path):
    model, needed = ROUTES[path]
    for name, value in cases_of(path):
        whole, floats = {**needed, name: value}, {**needed, name: as_floats(value)}
        assert repr(model.model_validate(floats)) == repr(model.model_validate(whole))  # by `==`, 5.0 is 5
        for wrong in (1.5, math.nan, math.inf, True, "1"):
            if name not in ("prompt", "input") or wrong != "1":  # a text
                with pytest.raises(pydantic.ValidationError):
                    model.model_validate({**needed, name: as_wrong(value, wrong)})
    if path != "/slots/{name}":  # this server has no store
        fields = dict(cases_of(path))
        answer_to(client, path, {**needed, **fields})  # so that both others find the same blocks in the cache
        status, answer = answer_to(client, path, {**needed, **{name: as_floats(one) for name, one in fields.items()}})
        assert (status, answer) == answer_to(client, path, {**needed, **fields})
        assert status == 200, answer
