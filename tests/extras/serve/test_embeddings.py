"""`/v1/embeddings`: the vectors are the engine's, which are those of `transformers` (`test_embedding.py`)."""

import asyncio
import base64
import dataclasses
import threading

import httpx
import numpy as np
import pytest

from nanovllm_extras import LLM, PoolingParams

PATH = "/v1/embeddings"
TEXTS = ["Paged attention", "é☃", "a" * 70]


@pytest.fixture(scope="module")
def expected(with_tokenizer):
    with LLM(with_tokenizer, dtype="float32", num_kv_blocks=100) as llm:
        return {
            pooling: [one.outputs.embedding for one in llm.embed(TEXTS, PoolingParams(pooling), use_tqdm=False)]
            for pooling in ("last", "mean")
        }


def vectors(client, **body):
    answer = client.ask(PATH, **body)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert [(one["object"], one["index"]) for one in answer["data"]] == [
        ("embedding", i) for i in range(len(answer["data"]))
    ]
    return [one["embedding"] for one in answer["data"]]


@pytest.mark.parametrize(
    ("overrides", "sizes", "refused"),
    [
        ({}, [64], [0, 1, 63, 65]),
        ({"is_matryoshka": True}, [1, 16, 64], [0, 65]),
        ({"matryoshka_dimensions": [8, 16]}, [8, 16, 64], [9, 65]),
    ],
)
def test_shorter_vectors(client, llm, expected, monkeypatch, overrides, sizes, refused):
    config = dataclasses.replace(llm.engine.config, hf_overrides=overrides)
    monkeypatch.setattr(llm.engine, "config", config)
    whole = np.array(expected["last"])  # [num_texts, hidden_size]
    for size in sizes:
        cut = whole[:, :size]
        wanted = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors(client, input=TEXTS, dimensions=size), wanted, atol=1e-5)
    # as they are; the last bits depend on which texts share a step
    as_they_are = vectors(client, input=TEXTS)
    np.testing.assert_allclose(vectors(client, input=TEXTS, dimensions=64), as_they_are, rtol=0, atol=1e-6)
    for size in refused:
        client.refuse(PATH, {"input": "a", "dimensions": size}, "dimensions")


def test_vectors_of_texts_and_of_token_ids(client, llm, expected):
    ids = [llm.engine.tokenizer.encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        np.testing.assert_allclose(vectors(client, input=given), expected["last"], atol=1e-5)
    for given in (TEXTS[0], ids[0]):
        np.testing.assert_allclose(vectors(client, input=given), expected["last"][:1], atol=1e-5)
    np.testing.assert_allclose(vectors(client, input=TEXTS, pooling="mean"), expected["mean"], atol=1e-5)
    (long,) = vectors(client, input=TEXTS[0], normalize=False)
    np.testing.assert_allclose(np.array(long) / np.linalg.norm(long), expected["last"][0], atol=1e-5)
    answer = client.ask(PATH, input=TEXTS, user="me")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, ids))


def test_base64_is_float32(client, expected):
    encoded = vectors(client, input=TEXTS, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one), dtype="<f4") for one in encoded]
    np.testing.assert_allclose(decoded, expected["last"], atol=1e-5)
    assert vectors(client, input=TEXTS[:1], encoding_format="float") == vectors(client, input=TEXTS[:1])


BAD = [
    ({"input": []}, "input", "empty"),
    ({"input": ""}, "input", "empty"),
    ({}, "input", ""),
    ({"input": 3}, "input", ""),
    ({"input": ["a", 3]}, "input", ""),
    ({"input": ["\ud800"]}, "input", ""),
    ({"input": [[1], []]}, "input", "empty"),
    ({"input": [300]}, "input", "<= 299, got 300"),
    ({"input": "a" * 600}, "input", "at most"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
    ({"input": "a", "pooling": "max"}, "pooling", ""),
    ({"input": [[1]] * 2049}, "input", "2048"),
]


def test_bad_requests_are_named(client):
    for body, param, word in BAD:
        client.refuse(PATH, body, param, word)
    assert client.post(PATH, {"input": "a", "model": "gpt"}).status_code == 404


def test_long_texts_are_cut_if_the_request_says_so(client, llm):
    client.refuse(PATH, {"input": "a" * 5000}, "input", "maximum context length")
    longest = min(llm.engine.parts.max_model_len - 1, client.server.bounds.capacity)
    ids = llm.engine.tokenizer.encode("a" * 5000)
    expected = vectors(client, input=[ids[:3], ids[:longest]])
    for path, name in ((PATH, "embedding"), ("/pooling", "data")):
        for most, wanted in zip((3, -1), expected, strict=True):
            (found,) = client.ask(path, input="a" * 5000, truncate_prompt_tokens=most)["data"]
            np.testing.assert_allclose(found[name], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": ["a", "b"]}),
        ("/pooling", {"input": "a", "task": "token_embed"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_requests_that_the_end_of_the_server_aborts_have_no_answer(client, llm, path, body):
    async def ask():
        may_go_on = threading.Event()
        llm.thread.call(may_go_on.wait)  # so no step runs before the abort
        async with httpx.AsyncClient(transport=httpx.ASGITransport(client.app), base_url="http://test") as http:
            asking = asyncio.create_task(http.post(path, json=body))
            while not client.server.num_in_progress:
                await asyncio.sleep(0.001)
            await llm.abort_all()
            may_go_on.set()
            return await asking

    response = asyncio.run(ask())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
