"""Access: keys, rates, sizes, origins."""

import asyncio

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_extras.serve import access
from nanovllm_extras.serve.access import RateLimit
from nanovllm_extras.serve.errors import APIError

PATH, BODY = "/v1/completions", {"prompt": "ab", "max_tokens": 1}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


REFUSED = [
    None,
    "Bearer ",
    "Bearer on",
    "Bearer onee",
    "Bearer ONE",
    "Bearer e",
    "one",
    "Basic one",
    "Bearer ö".encode("latin-1"),
]


def test_without_a_key_nobody_is_let_in(new_client):
    """Keys are compared whole; any of them lets in."""
    client = new_client(api_keys=("one", "two"))
    for authorization in REFUSED:
        headers = {} if authorization is None else {"Authorization": authorization}
        for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/x")):
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401, (authorization, path)
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for key in ("one", "two"):
        assert client.post(PATH, BODY, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("key", ["ключ", "kéy"])
def test_keys_may_have_any_letters(new_client, key):
    client = new_client({"Authorization": f"Bearer {key}".encode()}, api_keys=("one", key))
    assert client.ask(PATH, **BODY)
    if key == "kéy":  # what another encoding sends is another key
        assert new_client({"Authorization": b"Bearer k\xe9y"}, api_keys=(key,)).get("/v1/models").status_code == 401


def test_every_key_is_compared_in_constant_time(new_client, monkeypatch):
    compared = []
    compare = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: (compared.append(a), compare(a, b))[1])
    new_client(bearer("one"), api_keys=("one", "two", "three")).get("/v1/models")
    assert compared == [b"one", b"two", b"three"]


def test_each_key_has_its_own_rate(new_client):
    client = new_client(api_keys=("one", "two"), max_requests_per_minute=3)
    statuses = [client.post(PATH, BODY, headers=bearer("one")).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    response = client.post(PATH, BODY, headers=bearer("one"))
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert client.post(PATH, BODY, headers=bearer("two")).status_code == 200
    assert client.get("/v1/models", headers=bearer("one")).status_code == 200


@pytest.mark.parametrize(
    "addresses",
    [
        ["2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", "2001:db8:0:1::1"],
        ["::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.2"],
        ["unknown", "unknown", "a socket"],
    ],
)
def test_without_keys_each_network_has_its_own_rate(new_client, addresses):
    """Of IPv6, 64 bits are a network; a socket that listens to both shows IPv4 within IPv6."""
    client = new_client(max_requests_per_minute=1)

    def post(address):
        async def send():
            transport = httpx.ASGITransport(client.app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as one:
                return (await one.post(PATH, json=BODY)).status_code

        return asyncio.run(send())

    assert [post(address) for address in addresses] == [200, 429, 200]


@settings(max_examples=25, deadline=None)
@given(most=st.integers(1, 4), gaps=st.lists(st.tuples(st.floats(0, 40), st.sampled_from("ab")), max_size=40))
def test_the_rate_holds_in_every_minute(most, gaps):
    """Against the definition: a request is let in unless `most` of its caller's were in the 60 seconds before it."""
    clock = [1000.0]
    limit = RateLimit(most)
    taken = {"a": [], "b": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access.time, "monotonic", lambda: clock[0])
        patch.setattr(access, "MAX_ADDRESSES", 1)
        for gap, caller in gaps:
            clock[0] += gap
            recent = [time for time in taken[caller] if time > clock[0] - 60]
            if len(recent) < most:
                limit.check(caller)
                taken[caller].append(clock[0])
            else:
                with pytest.raises(APIError) as refused:
                    limit.check(caller)
                wait = int(refused.value.headers["Retry-After"])
                assert recent[-most] + 60 <= clock[0] + wait < recent[-most] + 61.001


def test_bodies_that_are_too_large(new_client):
    client = new_client(max_request_bytes=1000)
    assert client.post(PATH, {**BODY, "prompt": "a" * 300}).status_code == 200
    declared = client.post(PATH, {**BODY, "prompt": "a" * 1000})

    async def chunks():
        for _ in range(100):
            yield b" " * 100

    undeclared = client.post(PATH, content=chunks(), headers={"Content-Type": "application/json"})
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert "larger than 1000 bytes" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
    assert client.ask(PATH, **BODY)


def test_two_lengths_are_refused(client):
    response = client.post(PATH, content=b"{}", headers={"Content-Length": "2", "Transfer-Encoding": "chunked"})
    assert response.status_code == 400
    assert "exclude each other" in response.json()["error"]["message"]


def test_a_request_has_so_many_choices_at_most(new_client):
    client = new_client(max_choices=4)
    assert client.ask(PATH, prompt=["a", "b"], n=2, max_tokens=1, temperature=1)
    client.refuse(PATH, {"prompt": ["a", "b"], "n": 3, "max_tokens": 1, "temperature": 1}, "n")


def test_web_pages_are_let_in_only_from_allowed_origins(new_client):
    page = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}
    closed = new_client()
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers=page).headers
    assert closed.request("OPTIONS", PATH, headers=page).status_code == 405
    opened = new_client(allowed_origins=("http://page.test",), api_keys=("one",))
    assert opened.request("OPTIONS", PATH, headers=page).headers["access-control-allow-origin"] == "http://page.test"
    assert opened.post(PATH, BODY, headers=page | bearer("one")).headers["access-control-allow-origin"]
    other = {**page, "Origin": "http://other.test"}
    assert "access-control-allow-origin" not in opened.request("OPTIONS", PATH, headers=other).headers
