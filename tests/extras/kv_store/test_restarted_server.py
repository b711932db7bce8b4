"""A server that is killed (SIGKILL) and started again finds its prefixes in the folder of its K/V store."""

import json
import time
import urllib.request

import pytest

from tests.extras.serve.real_server import Offline, started

QUESTIONS = [
    f"{number}. You answer questions about inference engines for language models, in one sentence. Say what you know, "
    f"and nothing else. {question}"
    for number, question in enumerate(["What is a block table?", "Why does a server use continuous batching?"])
]
BLOCK_SIZE = 16


def post(server, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def answer(server, body):
    """The text of an answer, the number of prompt tokens, and how many of them were not computed."""
    with post(server, body) as response:
        value = json.load(response)
    usage = value["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return value["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.mark.slow
def test_prefixes_are_found_after_sigkill(tmp_path):
    """The server is killed when one answer is complete and saved, and another one is in the middle."""
    where = {"shared_storage_path": str(tmp_path / "store"), "max_bytes": 1 << 28}
    config = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": where}
    words = ["serve", "--device", "cpu", "--num-kv-blocks", "256", "--kv-transfer-config", json.dumps(config)]
    offline = Offline()
    expected = [offline.chat(question, max_tokens=40).outputs[0].text for question in QUESTIONS]
    bodies = [
        {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
        for question in QUESTIONS
    ]
    with started(*words) as server:
        text, num_prompt_tokens, num_cached = answer(server, bodies[0])
        assert (text, num_cached) == (expected[0], 0)
        num_blocks, deadline = (num_prompt_tokens - 1) // BLOCK_SIZE, time.monotonic() + 60
        assert num_blocks >= 2
        while len(list((tmp_path / "store").glob("*.kv"))) < num_blocks:  # saved in the background
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with post(server, bodies[1] | {"stream": True}) as response:
            assert response.readline().startswith(b"data: {")
            server.process.kill()
            server.process.wait()
    with started(*words) as server:
        assert answer(server, bodies[0]) == (expected[0], num_prompt_tokens, num_blocks * BLOCK_SIZE)
        text, _, num_cached = answer(server, bodies[1])
        assert text == expected[1]
        assert num_cached % BLOCK_SIZE == 0
        assert server.metric("external_prefix_cache_hits_total") == num_blocks * BLOCK_SIZE + num_cached
