"""Bad requests: each gets OpenAI's error with the right status, and the next request is served."""

import gzip
import itertools
import json
import re
from dataclasses import replace

import pytest

from nanovllm_extras import SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM, QueueFullError
from nanovllm_extras.serve.body import SHORT_BODY
from nanovllm_extras.serve.engine_thread import EngineDeadError
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.conftest import CHAT_TEMPLATE, Client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def check_error(response, status, param=None, code=None):
    """The answer is an error in OpenAI's shape; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    assert "Traceback" not in response.text
    return error["message"]


@pytest.fixture(scope="module")
def short_llm(with_tokenizer):
    with AsyncLLM(with_tokenizer, dtype="float32", num_kv_blocks=32, block_size=4, max_model_len=64) as llm:
        llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
        yield llm


BAD_FIELDS = {  # of both kinds of requests: values that are refused
    "temperature": ["0.5", -0.1, True, [0.5]],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "presence_penalty": [3],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0],
    "n": [0, "2", 5000],
    "seed": [2**64, 1.5],
    "max_tokens": [-1, 1.5, "5"],
    "min_tokens": [-1, 17],
    "stop": [5, [""], ["a"] * 65, [1]],
    "stop_token_ids": [[300], [-1], ["a"]],
    "logit_bias": [{"a": 1}, {"300": 1}, {"5": 101}, {"5": None}, [1]],
    "ignore_eos": [1],
    "stream": ["true"],
    "stream_options": [{"include_usage": True}],
    "priority": [1.5],
    "best_of": [4],
    "use_beam_search": [True],
    "allowed_token_ids": [[]],
    "bad_words": [[""]],
    "model": [5],
}
BAD_OF_COMPLETIONS = BAD_FIELDS | {
    "prompt": [None, 5, [], [[]], "", ["a", 5], [1, "a"], [1.5], [True], [300], [-1], {"a": 1}],
    "logprobs": [21, -1, True],
    "echo": ["yes"],
    "suffix": ["end"],
    "max_tokens": [0, *BAD_FIELDS["max_tokens"]],
}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD_OF_CHATS = BAD_FIELDS | {
    "messages": [None, [], "hi", [5], [{"content": "hi"}], [{"role": "", "content": "hi"}],
                 *([{"role": "user", "content": content}] for content in (5, [IMAGE], [{"type": "text"}]))],
    "logprobs": [2],
    "top_logprobs": [3],
    "max_completion_tokens": [0],
    "chat_template_kwargs": [[]],
    "continue_final_message": ["yes"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "bad"),
    [(COMPLETIONS, {"prompt": "ab"}, BAD_OF_COMPLETIONS), (CHAT, {"messages": MESSAGES}, BAD_OF_CHATS)],
    ids=["completions", "chats"],
)
def test_a_bad_value_names_its_field_and_the_next_request_is_served(client, path, body, bad):
    for field, value in [(field, value) for field, values in bad.items() for value in values]:
        response = client.post(path, {"max_tokens": 16, **body, field: value})
        assert response.status_code == 400, (field, value)
        check_error(response, 400, param=field)
    assert client.ask(path, **body, max_tokens=1)["choices"]


def test_of_fields_that_are_fine_by_themselves_one_is_named(client, monkeypatch):
    """What the engine refuses, also where its message does not begin with the field's name."""
    make = SamplingParams.__init__

    def init(*arguments, **values):
        try:
            make(*arguments, **values)
        except ValueError as error:
            raise ValueError(f"in other words, temperature is not what is wrong: {error}") from error

    monkeypatch.setattr(SamplingParams, "__init__", init)
    for fields, param in (
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {"300": 1}, "stop_token_ids": [5]}, "logit_bias"),
        ({"stop": [""], "top_k": 5, "seed": 1}, "stop"),
    ):
        check_error(client.post(COMPLETIONS, {"max_tokens": 16, "prompt": "ab", **fields}), 400, param=param)
        check_error(client.post(CHAT, {"max_tokens": 16, "messages": MESSAGES, **fields}), 400, param=param)


def test_ends_of_the_prompt_and_kinds_of_prompts_exclude_each_other(client):
    both = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    for path in ("/tokenize", CHAT):
        check_error(client.post(path, both), 400, "continue_final_message")
    for body in ({}, {"prompt": "ab", "messages": MESSAGES}):
        message = check_error(client.post("/tokenize", body), 400, "prompt")
        assert message == "give either prompt or messages"


def test_the_message_says_where_and_what(client):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}]
    response = client.post(CHAT, {"messages": [*MESSAGES, {"role": "user", "content": parts}]})
    assert check_error(response, 400, "messages").startswith("messages.1.content.1.type: Input should be 'text'")


OVERFLOW = re.compile(r"^This model's maximum context length is (\d+) tokens\. However, the prompt is too long: ")
"""LiteLLM and coding agents look for the first sentence, LangChain for `prompt is too long`. Then they compact."""


def check_overflow(response, param, num_tokens):
    message = check_error(response, 400, param, "context_length_exceeded")
    assert OVERFLOW.match(message).groups() == (str(num_tokens),), message
    return message


def test_clients_recognise_each_overflow_of_the_context(client, llm):
    most, long = llm.engine.parts.max_model_len, "x" * 600
    longest = max(map(len, llm.engine.tokenizer.get_vocab()))
    longer, user = "x" * (most * longest + 1), {"role": "user"}
    assert "512 tokens; at most 511" in check_overflow(client.post(COMPLETIONS, {"prompt": [1] * most}), "prompt", most)
    for text in (long, longer):
        for one in (text, ["ab", text]):
            check_overflow(client.post(COMPLETIONS, {"prompt": one}), "prompt", most)
            check_overflow(client.post("/v1/embeddings", {"input": one}), "input", most)
        for content in (text, [{"type": "text", "text": text}]):
            messages = [*MESSAGES, {**user, "content": content}]
            check_overflow(client.post(CHAT, {"messages": messages}), "messages", most)
            check_overflow(client.post(CHAT, {"messages": messages, "stream": True}), "messages", most)
        check_overflow(client.post("/v1/responses", {"input": text}), "input", most)
        check_overflow(client.post("/v1/responses", {"input": "a", "instructions": text}), "input", most)
    for path, field in ((COMPLETIONS, "prompt"), ("/v1/embeddings", "input")):
        check_overflow(client.post(path, {field: [1] * most}), field, most)
        check_overflow(client.post(path, {field: [[1], [1] * most]}), field, most)
    many = [{**user, "content": ""}] * (most + 1)
    check_overflow(client.post(CHAT, {"messages": many}), "messages", most)
    check_overflow(client.post("/v1/responses", {"input": many}), "input", most)
    check_overflow(client.post("/v1/responses", {"input": many[1:], "instructions": "a"}), "input", most)
    tool = {"type": "function", "function": {"name": "f", "description": longer}}
    check_overflow(client.post(CHAT, {"messages": MESSAGES, "tools": [tool]}), "tools", most)


def test_a_small_kv_cache_is_the_context_of_its_prompts(client, llm):
    bounds = client.server.bounds
    assert bounds.capacity == llm.engine.input_processor.capacity
    client.server.bounds = replace(bounds, capacity=20)
    assert client.ask(COMPLETIONS, prompt=[1] * 20, max_tokens=1)
    check_overflow(client.post(COMPLETIONS, {"prompt": [1] * 21}), "prompt", 20)
    check_overflow(client.post(CHAT, {"messages": [{"role": "user", "content": "x" * 21}]}), "messages", 20)
    check_overflow(client.post("/v1/embeddings", {"input": [1] * 21}), "input", 20)
    short = {"prompt": [1] * 21, "truncate_prompt_tokens": 3, "max_tokens": 1}
    assert client.ask(COMPLETIONS, **short)["usage"]["prompt_tokens"] == 3


def test_a_truncation_that_is_too_long_is_no_overflow_of_the_context(client, llm):
    most = llm.engine.parts.max_model_len
    body = {"prompt": [1] * (most + 5), "truncate_prompt_tokens": most, "max_tokens": 1}
    assert "truncate_prompt_tokens" in check_error(client.post(COMPLETIONS, body), 400, "prompt")


def test_more_tokens_than_the_context_are_refused_and_more_than_there_is_room_for_are_not(short_llm):
    """As in vLLM 0.32."""
    client, most = Client(make_app(ServerOptions(("tiny",)), short_llm)), 64
    chat, completion = (CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "ab"})
    for (path, body), name in ((chat, "max_tokens"), (chat, "max_completion_tokens"), (completion, "max_tokens")):
        message = check_error(client.post(path, {**body, name: most + 1}), 400, name)
        assert f"at most {most}" in message
        assert f"this model's maximum context length is {most} tokens" in message
        answer = client.ask(path, **body, ignore_eos=True, **{name: most})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == most


def test_if_one_prompt_is_bad_none_is_served(client, llm):
    before = llm.get_stats().num_requests
    check_error(client.post(COMPLETIONS, {"prompt": [[1], [300]]}), 400, "prompt")
    assert llm.get_stats().num_requests == before
    assert client.server.num_in_progress == 0


def test_unknown_fields_are_ignored(client):
    assert client.ask(COMPLETIONS, prompt="ab", max_tokens=1, user="me", store=True, metadata={"a": "b"}, nonsense=[1])


def test_another_model_is_404(client):
    body = {"model": "gpt-4", "messages": MESSAGES, "prompt": "a", "tokens": [1]}
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        sent = {**body, "prompt": None} if path == "/tokenize" else body
        assert "'gpt-4'" in check_error(client.post(path, sent), 404, "model", "model_not_found")


def test_other_paths_and_methods(client):
    """Clients add `/chat/completions` to their `base_url`, and the user sees only the message."""
    check_error(client.get("/v2/x"), 404)
    for method, path in (("GET", CHAT), ("PUT", "/health"), ("POST", "/v1/responses/compact")):
        assert check_error(client.request(method, path), 405).startswith(f"{path} does not take {method}; ")
    assert "must be absent or null" in check_error(
        client.post("/pooling", {"input": "a", "dimensions": 2}), 400, "dimensions"
    )
    for path in ("/chat/completions", "/v1/v1/models", "/"):
        assert check_error(client.post(path, {}), 404).startswith(f"there is no {path}; ")
        assert "ends with /v1" in check_error(client.get(path), 404)


MALFORMED = {
    "nothing": b"",
    "not JSON": b"prompt=ab",
    "half": b'{"prompt": "ab"',
    "a number": b"5",
    "a list": b'["prompt"]',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "NaN": b'{"prompt": "ab", "temperature": NaN}',
    "Infinity": b'{"prompt": "ab", "temperature": Infinity}',
    "a float beyond all": b'{"prompt": "ab", "temperature": 1e999}',
    "an integer of 5,000 digits": b'{"prompt": "ab", "max_tokens": ' + b"9" * 5000 + b"}",
    "a lone surrogate for a model": b'{"prompt": "ab", "model": "\\ud800"}',
    "an encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "depth 10,000": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "depth 10,000 where nothing is known": b'{"prompt": "ab", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "a million stop strings": b'{"prompt": "ab", "stop": [' + b'"a",' * 999_999 + b'"a"]}',
    "a million biases": b'{"prompt": "ab", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(10**5)) + b"}}",
}


def test_malformed_bodies(client):
    """Short and long bodies get the same errors. Positions differ, because a long body begins with spaces."""
    for name, content in MALFORMED.items():
        errors = []
        for path, begin in ((COMPLETIONS, b""), (CHAT, b""), (COMPLETIONS, b" " * 2 * SHORT_BODY)):
            response = client.post(path, content=begin + content, headers=JSON)
            assert response.status_code == 400, name
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert len(response.content) < 2000
            errors.append(re.sub(r"\d+", "N", response.text))
        if content and len(content) <= SHORT_BODY:
            assert errors[0] == errors[2], name
    assert client.ask(COMPLETIONS, prompt="ab", max_tokens=1)["choices"]


SURROGATES = {
    "tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}],
    "chat_template_kwargs": {"x": ["\udc00"]},
    "bad_words": ["a\ud83d"],
    "stop": "\udfff",
    "metadata": {"\ud800": 1},
    "unknown": "\ud800",
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud800"]}}},
}


def test_lone_surrogates_are_refused_anywhere(client, llm, monkeypatch):
    for size in (0, 2 * SHORT_BODY):
        for field, value in SURROGATES.items():
            body = {"messages": MESSAGES, "max_tokens": 1, field: value, "y": "x" * size}
            response = client.post(CHAT, body)
            assert "half of a surrogate pair" in check_error(response, 400, field)
    for field in ("content", "role", "name"):  # also where the template does not look
        body = {"messages": [{"role": "user", "content": "hi", field: "\ud800"}]}
        response = client.post(CHAT, body)
        assert "surrogate" in check_error(response, 400, "messages")
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", "{{ messages | tojson }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    assert "half of a surrogate pair" in check_error(client.post(CHAT, {"messages": messages}), 400, "messages")


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]


def test_every_encoding_of_json_is_read_at_every_size(client):
    wanted = client.ask("/tokenize", prompt="é😀")
    for encoding, size in itertools.product(ENCODINGS, (0, 2 * SHORT_BODY)):
        content = json.dumps({"prompt": "é😀", "unknown": "é" * size}, ensure_ascii=False).encode(encoding)
        for charset in ("", "; charset=UTF-8", f'; charset="{encoding}"' if encoding != "utf-8-sig" else ""):
            headers = {"content-type": f"application/json{charset}"}
            response = client.post("/tokenize", content=content, headers=headers)
            assert (response.status_code, response.json()) == (200, wanted), (encoding, charset)
    surrogate = '{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass")
    check_error(client.post("/tokenize", content=surrogate, headers=JSON), 400)


OTHER_ENCODINGS = [
    ("é", "latin-1", "", "Latin-1"),
    ("é", "latin-1", "; charset=utf-8", "Latin-1"),
    ("é", "latin-1", "; charset=ISO-8859-1", "ISO-8859-1"),
    ("a", "ascii", '; charset="latin-1"', "latin-1"),
    ("日本", "shift_jis", "; charset=Shift_JIS", "Shift_JIS"),
    ("a", "ascii", "; charset=none-such", "none-such"),
]


def test_other_encodings_are_named(client):
    for (text, encoding, charset, named), size in itertools.product(OTHER_ENCODINGS, (0, 2 * SHORT_BODY)):
        content = json.dumps({"prompt": text * (1 + size)}, ensure_ascii=False).encode(encoding)
        response = client.post("/tokenize", content=content, headers={"content-type": f"application/json{charset}"})
        assert named in check_error(response, 400)


def test_compressed_bodies_are_415(client):
    for coding, size in itertools.product(("gzip", "GZIP", "br", "identity, deflate"), (0, 2 * SHORT_BODY)):
        content = gzip.compress(json.dumps({"prompt": "a", "unknown": "x" * size}).encode())
        response = client.post("/tokenize", content=content, headers=JSON | {"content-encoding": coding})
        assert coding in check_error(response, 415)
        assert response.headers["accept-encoding"] == "identity"
    assert client.post("/tokenize", {"prompt": "a"}, headers={"content-encoding": "identity"}).status_code == 200


def test_the_path_of_an_error_has_every_field(client):
    for body, path in (
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
        ({"tools": [{"type": "function"}]}, "tools.0.function: "),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name: "),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema: ",
        ),
    ):
        (field,) = body
        assert check_error(client.post(CHAT, {"messages": MESSAGES, **body}), 400, field).startswith(path)


def test_head_is_answered_like_get(client):
    paths = [path for path, methods in client.get("/openapi.json").json()["paths"].items() if "get" in methods]
    assert {"/health", "/ping", "/version", "/metrics", "/v1/models"} < set(paths)
    stored = client.ask("/v1/responses", input="a", max_output_tokens=1)["id"]
    paths = [path.replace("{name}", "tiny").replace("{response_id}", stored) for path in paths]
    for path in [*paths, "/openapi.json"]:
        head, get = client.request("HEAD", path), client.get(path)
        assert (head.status_code, head.headers["content-type"] if get.content else "") == (
            200,
            get.headers["content-type"] if get.content else "",
        ), path


def test_a_template_that_refuses_its_messages(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", "{{ raise_exception('Roles must alternate') }}")
    assert "Roles must alternate" in check_error(client.post(CHAT, {"messages": MESSAGES}), 400, "messages")
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    assert "no chat template" in check_error(client.post(CHAT, {"messages": MESSAGES}), 400, "messages")


# ---- failures of the server


def test_a_full_queue_is_429(client, llm, monkeypatch):
    async def refuse(*arguments):
        raise QueueFullError("8 requests wait already, and at most 8 may; try again later")

    monkeypatch.setattr(llm, "submit", refuse)
    response = client.post(COMPLETIONS, {"prompt": "ab"})
    assert "8 requests wait already" in check_error(response, 429, code="queue_full")
    assert int(response.headers["retry-after"]) >= 1


def test_a_server_that_loads_or_drains_is_503(client, llm):
    client.server.is_draining = True
    for path in (CHAT, COMPLETIONS):
        response = client.post(path, {"prompt": "ab", "messages": MESSAGES})
        check_error(response, 503, code="draining")
        assert int(response.headers["retry-after"]) >= 1
    check_error(client.get("/health"), 503, code="draining")
    client.server.llm = None
    check_error(client.get("/health"), 503, code="loading")
    check_error(client.get("/v1/models"), 503, code="loading")
    assert client.get("/metrics").status_code == client.get("/version").status_code == 200


def test_a_dead_engine_is_503(client, llm, monkeypatch):
    monkeypatch.setattr(llm.thread, "dead", EngineDeadError("the engine is dead: secret"))
    response = client.post(COMPLETIONS, {"prompt": "ab"})
    assert "secret" not in check_error(response, 503, code="engine_dead")
    check_error(client.get("/health"), 503, code="engine_dead")


def test_a_step_that_fails_is_500_and_tells_nothing(client, llm, monkeypatch):
    run, failing = llm.engine.runner.run, []

    def fail(batch):
        if failing:
            raise RuntimeError("secret of the forward pass")
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    failing.append(True)
    response = client.post(COMPLETIONS, {"prompt": "ab"})
    assert "secret" not in check_error(response, 500, code="internal_error")
    response = client.post(COMPLETIONS, {"prompt": "ab", "stream": True})
    assert response.status_code == 200
    event, done, _ = response.text.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert done == "data: [DONE]"
    assert "secret" not in response.text
    failing.clear()
    assert client.server.num_in_progress == 0
    assert client.ask(COMPLETIONS, prompt="ab")


def test_an_error_of_the_server_has_the_headers_of_other_answers(new_client, monkeypatch, caplog):
    client = new_client(allowed_origins=("https://a.example",))
    monkeypatch.setattr(client.server, "check_model", lambda name: 1 // 0)
    headers = {"x-request-id": "a", "Origin": "https://a.example"}
    response = client.post(COMPLETIONS, {"prompt": "a"}, headers=headers)
    check_error(response, 500, code="internal_error")
    assert response.headers["x-request-id"] == "a"
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_developers_message_is_the_systems_unless_the_template_knows_it(client, llm, monkeypatch):
    messages = [{"role": "developer", "content": "a"}]

    def tokens():
        return client.ask("/tokenize", messages=messages, add_special_tokens=False)["tokens"]

    template = llm.engine.tokenizer.chat_template
    assert tokens() == client.ask("/tokenize", messages=[{"role": "system", "content": "a"}])["tokens"]
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template + "{# developer #}")
    told = client.ask("/tokenize", prompt="developer:a|assistant:", add_special_tokens=False)["tokens"]
    assert tokens() == told
