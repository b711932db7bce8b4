"""Fields of requests that have no effect are logged, each once."""

import logging

import pytest

from nanovllm_extras.serve.ignored_fields import MAX_NAME_CHARS, MAX_NAMES

MESSAGES = [{"role": "user", "content": "What?", "name": "an extra field, which the template may read"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture
def logged(caplog):
    """The names that have been logged since the last call."""
    caplog.set_level(logging.WARNING, "nanovllm_extras.serve.ignored_fields")

    def take():
        names = [record.args[1] for record in caplog.records if record.name.endswith("ignored_fields")]
        caplog.clear()
        return names

    return take


CASES = [  # (path, body, the names that are logged)
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "guided_json": {"type": "object"}}, ["guided_json"]),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "user": "me", "echo": False}, ["user", "echo"]),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "user": None, "temperature": 0}, []),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "stream": True,
                "stream_options": {"include_usage": True, "include_obfuscation": False}},
         ["stream_options.include_obfuscation"]),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "response_format": {
            "type": "json_schema", "extra": 1,
            "json_schema": {"name": "a", "strict": True, "description": "b", "schema": {"type": "object"}}}},
         ["response_format.extra", "response_format.json_schema.description"]),
        (RESPONSES, {"input": "a", "max_output_tokens": 1, "prompt_cache_key": "k", "return_token_ids": True,
                     "text": {"verbosity": "low", "format": {"type": "text"}},
                     "reasoning": {"effort": "low", "summary": "auto"}, "include": []},
         ["prompt_cache_key", "return_token_ids", "text.verbosity", "reasoning.summary"]),
        ("/v1/embeddings", {"input": "a", "user": "me"}, ["user"]),
        ("/tokenize", {"prompt": "a", "detail": 1}, ["detail"]),
        ("/detokenize", {"tokens": [1], "detail": 1}, ["detail"]),
]  # fmt: skip


def test_each_name_is_logged_once(new_client, logged):
    for path, body, names in CASES:
        client = new_client()
        for expected in (names, []):
            assert client.post(path, body).status_code == 200
            assert logged() == expected, (path, body)


def test_names_of_strangers_do_not_fill_the_log(client, logged):
    body = {"prompt": "a", "max_tokens": 1}
    client.ask(COMPLETIONS, **body, **{"a" * 10**5: 1})
    (name,) = logged()
    assert name == "a" * MAX_NAME_CHARS
    client.ask(COMPLETIONS, **body, **{f"b{i}": 1 for i in range(10**4)})
    assert len(logged()) == MAX_NAMES - 1
    client.ask(COMPLETIONS, **body, **{f"c{i}": 1 for i in range(10)})
    assert logged() == []
