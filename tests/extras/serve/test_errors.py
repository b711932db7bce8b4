"""Bad requests: each gets OpenAI's error with the right status, and the next request is served."""

import gzip
import json
import re
from dataclasses import replace

import pytest

from nanovllm_extras import SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM, QueueFullError
from nanovllm_extras.serve.body import SHORT_BODY
from nanovllm_extras.serve.engine_thread import EngineDeadError
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.state import ServerOptions
from tests.extras.serve.conftest import CHAT_TEMPLATE, Client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


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


@pytest.fixture
def alive(client):
    yield
    assert client.ask(COMPLETIONS, prompt="ab", max_tokens=1)["choices"]


BAD_FIELDS = [
    ("temperature", "0.5"),
    ("temperature", -0.1),
    ("temperature", True),
    ("temperature", [0.5]),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", "2"),
    ("n", 5000),
    ("seed", 2**64),
    ("seed", 1.5),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a"] * 65),
    ("stop", [1]),
    ("stop_token_ids", [300]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"300": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": None}),
    ("logit_bias", [1]),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("priority", 1.5),
    ("best_of", 4),
    ("use_beam_search", True),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
@pytest.mark.usefixtures("alive")
def test_a_bad_value_names_its_field(client, field, value):
    for path, body in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": MESSAGES})):
        body = {"max_tokens": 16, **body, field: value}
        check_error(client.post(path, body), 400, param=field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", ["a", 5]),
        ("prompt", [1, "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [300]),
        ("prompt", [-1]),
        ("prompt", {"a": 1}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("echo", "yes"),
        ("suffix", "end"),
        ("max_tokens", 0),
    ],
)
@pytest.mark.usefixtures("alive")
def test_bad_completions(client, field, value):
    check_error(client.post(COMPLETIONS, {"prompt": "ab", field: value}), 400, param=field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [5]),
        ("messages", [{"content": "hi"}]),
        ("messages", [{"role": "", "content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("logprobs", 2),
        ("top_logprobs", 3),
        ("max_completion_tokens", 0),
        ("chat_template_kwargs", []),
        ("continue_final_message", "yes"),
    ],
)
@pytest.mark.usefixtures("alive")
def test_bad_chats(client, field, value):
    check_error(client.post(CHAT, {"messages": MESSAGES, field: value}), 400, param=field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {"300": 1}, "stop_token_ids": [5]}, "logit_bias"),
        ({"stop": [""], "top_k": 5, "seed": 1}, "stop"),
    ],
)
def test_of_fields_that_are_fine_by_themselves_one_is_named(client, monkeypatch, fields, param):
    """What the engine refuses, also where its message does not begin with the field's name."""
    make = SamplingParams.__init__

    def init(*arguments, **values):
        try:
            make(*arguments, **values)
        except ValueError as error:
            raise ValueError(f"in other words, temperature is not what is wrong: {error}") from error

    monkeypatch.setattr(SamplingParams, "__init__", init)
    for path, body in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": MESSAGES})):
        check_error(client.post(path, {"max_tokens": 16, **body, **fields}), 400, param=param)


def test_requests_to_tokenize_name_the_field_at_fault(client):
    both = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    check_error(client.post("/tokenize", both), 400, "continue_final_message")
    for body in ({}, {"prompt": "ab", "messages": MESSAGES}):
        message = check_error(client.post("/tokenize", body), 400, "prompt")
        assert message == "give either prompt or messages"


def test_the_message_says_where_and_what(client):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}]
    response = client.post(CHAT, {"messages": [*MESSAGES, {"role": "user", "content": parts}]})
    assert check_error(response, 400, "messages").startswith("messages.1.content.1.type: Input should be 'text'")


def test_both_ways_to_end_the_prompt_exclude_each_other(client):
    body = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    check_error(client.post(CHAT, body), 400, "continue_final_message")


def test_a_prompt_that_is_too_long(client, llm):
    prompt = [1] * llm.engine.parts.max_model_len
    message = check_error(client.post(COMPLETIONS, {"prompt": prompt}), 400, "prompt", "context_length_exceeded")
    assert "512 tokens; at most 511" in message
    messages = [{"role": "user", "content": "x" * 600}]
    check_error(client.post(CHAT, {"messages": messages}), 400, "messages", "context_length_exceeded")


OVERFLOW = re.compile(r"^This model's maximum context length is (\d+) tokens\. However, the prompt is too long: ")
"""LiteLLM and coding agents look for the first sentence, LangChain for `prompt is too long`. Then they compact."""


def check_overflow(response, param, num_tokens):
    message = check_error(response, 400, param, "context_length_exceeded")
    assert OVERFLOW.match(message).groups() == (str(num_tokens),), message


def test_clients_recognise_each_overflow_of_the_context(client, llm):
    most, long = llm.engine.parts.max_model_len, "x" * 600
    longest = max(map(len, llm.engine.tokenizer.get_vocab()))
    longer, user = "x" * (most * longest + 1), {"role": "user"}
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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_are_refused_and_more_than_there_is_room_for_are_not(short_llm, name):
    """As in vLLM 0.32."""
    client, most = Client(make_app(ServerOptions(("tiny",)), short_llm)), 64
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "ab"})):
        if path == COMPLETIONS and name != "max_tokens":
            continue
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


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_another_model_is_404(client, path):
    body = {"model": "gpt-4", "messages": MESSAGES, "prompt": "a", "tokens": [1]}
    body = {**body, "prompt": None} if path == "/tokenize" else body
    assert "'gpt-4'" in check_error(client.post(path, body), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v2/x", 404), ("GET", CHAT, 405), ("PUT", "/health", 405)]
)
def test_other_paths_and_methods(client, method, path, status):
    check_error(client.request(method, path), status)


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/models", "/"])
def test_a_wrong_base_url_is_told(client, path):
    """Clients add `/chat/completions` to their `base_url`, and the user sees only the message."""
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
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate in a stop": b'{"prompt": "ab", "stop": "\\udfff"}',
    "a lone surrogate for a model": b'{"prompt": "ab", "model": "\\ud800"}',
    "depth 10,000": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "depth 10,000 where nothing is known": b'{"prompt": "ab", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "a million stop strings": b'{"prompt": "ab", "stop": [' + b'"a",' * 999_999 + b'"a"]}',
    "a million biases": b'{"prompt": "ab", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(10**5)) + b"}}",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.usefixtures("alive")
def test_malformed_bodies(client, name):
    for path in (COMPLETIONS, CHAT):
        response = client.post(path, content=MALFORMED[name], headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 2000


@pytest.mark.usefixtures("alive")
def test_a_lone_surrogate_in_a_message(client):
    for field in ("content", "role", "name"):
        message = {"role": "user", "content": "hi", field: "\ud800"}
        content = json.dumps({"messages": [message], "max_tokens": 1, "temperature": 0})
        response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert "surrogate" in check_error(response, 400, "messages")  # also where the template does not look


SURROGATES = {
    "tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}],
    "chat_template_kwargs": {"x": ["\udc00"]},
    "bad_words": ["a\ud83d"],
    "stop": "\udfff",
    "metadata": {"\ud800": 1},
    "unknown": "\ud800",
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud800"]}}},
}


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("field", SURROGATES)
@pytest.mark.parametrize("size", [0, 2 * SHORT_BODY])
def test_lone_surrogates_are_refused_anywhere(client, field, size):
    content = json.dumps({"messages": MESSAGES, "max_tokens": 1, field: SURROGATES[field], "y": "x" * size})
    response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert "half of a surrogate pair" in check_error(response, 400, field)


@pytest.mark.usefixtures("alive")
def test_lone_surrogates_within_the_arguments_of_calls_are_refused(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", "{{ messages | tojson }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    message = check_error(client.post(CHAT, {"messages": messages}), 400, "messages")
    assert "half of a surrogate pair" in message


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [0, 2 * SHORT_BODY])
def test_every_encoding_of_json_is_read_at_every_size(client, encoding, size):
    content = json.dumps({"prompt": "é😀", "unknown": "é" * size}, ensure_ascii=False).encode(encoding)
    for charset in ("", "; charset=UTF-8", f'; charset="{encoding}"' if encoding != "utf-8-sig" else ""):
        response = client.post("/tokenize", content=content, headers={"content-type": f"application/json{charset}"})
        assert response.status_code == 200, response.text
        assert response.json() == client.ask("/tokenize", prompt="é😀")


@pytest.mark.parametrize("size", [0, 2 * SHORT_BODY])
@pytest.mark.parametrize(
    ("encoding", "charset", "named"),
    [
        ("latin-1", "", "Latin-1"),
        ("latin-1", "; charset=utf-8", "Latin-1"),
        ("latin-1", "; charset=ISO-8859-1", "ISO-8859-1"),
        ("ascii", '; charset="latin-1"', "latin-1"),
        ("shift_jis", "; charset=Shift_JIS", "Shift_JIS"),
        ("ascii", "; charset=none-such", "none-such"),
    ],
)
def test_other_encodings_are_named(client, size, encoding, charset, named):
    text = {"latin-1": "é", "shift_jis": "日本"}.get(encoding, "a")
    content = json.dumps({"prompt": text * (1 + size)}, ensure_ascii=False).encode(encoding)
    response = client.post("/tokenize", content=content, headers={"content-type": f"application/json{charset}"})
    assert named in check_error(response, 400)


@pytest.mark.parametrize(
    "content", [b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass")]
)
def test_encoded_surrogates_are_refused(client, content):
    check_error(client.post("/tokenize", content=content, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", "br", "identity, deflate"])
@pytest.mark.parametrize("size", [0, 2 * SHORT_BODY])
def test_compressed_bodies_are_415(client, coding, size):
    content = gzip.compress(json.dumps({"prompt": "a", "unknown": "x" * size}).encode())
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = client.post("/tokenize", content=content, headers=headers)
    assert coding in check_error(response, 415)
    assert response.headers["accept-encoding"] == "identity"
    assert client.post("/tokenize", {"prompt": "a"}, headers={"content-encoding": "identity"}).status_code == 200


def test_short_and_long_bodies_get_the_same_errors(client):
    """Whatever is wrong: the parser is the same. Positions differ, because the long body begins with spaces."""
    for name, content in MALFORMED.items():
        if content and len(content) <= SHORT_BODY:
            short, long = (
                client.post(COMPLETIONS, content=b" " * size + content, headers={"content-type": "application/json"})
                for size in (0, 2 * SHORT_BODY)
            )
            errors = [re.sub(r"\d+", "N", check_error(one, 400, one.json()["error"]["param"])) for one in (short, long)]
            assert errors[0] == errors[1], name


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: "),
        ({"tools": [{"type": "function"}]}, "tools.0.function: "),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name: "),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema: ",
        ),
    ],
)
def test_the_path_of_an_error_has_every_field(client, body, path):
    (field,) = body
    message = check_error(client.post(CHAT, {"messages": MESSAGES, **body}), 400, field)
    assert message.startswith(path)


def test_head_is_answered_like_get(client):
    paths = [path for path, methods in client.get("/openapi.json").json()["paths"].items() if "get" in methods]
    assert {"/health", "/ping", "/version", "/metrics", "/v1/models"} < set(paths)
    for path in [*(path.replace("{name}", "tiny") for path in paths), "/openapi.json"]:
        head, get = client.request("HEAD", path), client.get(path)
        assert (head.status_code, head.headers["content-type"] if get.content else "") == (
            200,
            get.headers["content-type"] if get.content else "",
        ), path


@pytest.mark.usefixtures("alive")
def test_a_template_that_refuses_its_messages(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", "{{ raise_exception('Roles must alternate') }}")
    assert "Roles must alternate" in check_error(client.post(CHAT, {"messages": MESSAGES}), 400, "messages")
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    assert "no chat template" in check_error(client.post(CHAT, {"messages": MESSAGES}), 400, "messages")


def test_a_body_that_is_not_declared_as_json(client):
    response = client.post(COMPLETIONS, content=b'{"prompt": "ab"}', headers={"content-type": "text/plain"})
    assert response.status_code in (400, 415)


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
