"""`/slots` and `cache_salt` over HTTP: what is saved is found by the next server, and by nobody without the salt.

Oracle: `usage.prompt_tokens_details.cached_tokens` of the same prompt, and arithmetic over blocks of four tokens.
"""

import contextlib

import pytest

from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.commands import serve_command
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.conftest import CHAT_TEMPLATE, Client

KEY = {"Authorization": "Bearer secret"}
PROMPT = "What is a block table, and what is it for?"  # a token for each character
FULL = len(PROMPT) // 4 * 4
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def serve(with_tokenizer, tmp_path):
    """Start a server whose store is in `tmp_path / "kv"`. All are shut down at the end."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            extra = {"shared_storage_path": str(tmp_path / "kv"), "max_bytes": 1 << 26}
            transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
            small = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 4, "kv_transfer_config": transfer}
            llm = stack.enter_context(AsyncLLM(with_tokenizer, **small | options))
            llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
            options = ServerOptions(model_names=("tiny",), api_keys=("secret",), enable_kv_slots=True)
            return Client(make_app(options, llm), KEY)

        yield start


def num_cached(client, **body):
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0} | body
    return client.ask("/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def slot(name, num_tokens, num_stored_tokens):
    return {"id": name, "object": "slot", "num_tokens": num_tokens, "num_stored_tokens": num_stored_tokens}


def test_a_slot_is_saved_restored_listed_and_deleted(serve):
    first = serve()
    assert first.ask("/slots/a?action=save", prompt=PROMPT) == slot("a", FULL, 0), "nothing is computed yet"
    assert num_cached(first) == 0
    assert first.ask("/slots/a?action=save", prompt=PROMPT) == slot("a", FULL, FULL)
    assert first.ask("/slots/b-2?action=save", messages=MESSAGES) == slot(
        "b-2", (len("user:|") + len(PROMPT)) // 4 * 4, 0
    )
    first.server.llm.shutdown()

    second = serve(kv_offloading_size=0.01)
    assert [one["id"] for one in second.get("/slots").json()["data"]] == ["a", "b-2"]
    assert second.ask("/slots/a?action=restore") == slot("a", FULL, FULL)
    tiers = second.server.llm.get_stats().kv_store.tiers
    assert 0 < tiers["disk"].loaded_bytes == tiers["memory"].saved_bytes, "host memory has the blocks now"
    assert num_cached(second) == FULL
    assert second.server.llm.get_stats().kv_store.tiers["disk"].loaded_bytes == tiers["disk"].loaded_bytes
    deleted = second.request("DELETE", "/slots/a").json()
    assert deleted == {"id": "a", "object": "slot.deleted", "deleted": True}
    assert [one["id"] for one in second.get("/slots").json()["data"]] == ["b-2"]
    assert second.request("DELETE", "/slots/a").status_code == 404


def test_blocks_that_are_gone_or_of_other_options_are_not_counted(serve, tmp_path):
    first = serve()
    num_cached(first, cache_salt="mine")
    assert first.ask("/slots/a?action=save", prompt=PROMPT, cache_salt="mine") == slot("a", FULL, FULL)
    assert first.ask("/slots/a?action=restore") == slot("a", FULL, 0), "without the salt"
    assert first.ask("/slots/a?action=restore", cache_salt="other") == slot("a", FULL, 0)
    assert first.ask("/slots/a?action=restore", cache_salt="mine") == slot("a", FULL, FULL)
    assert serve(block_size=8).ask("/slots/a?action=restore", cache_salt="mine")["num_stored_tokens"] == 0
    blocks = sorted((tmp_path / "kv").glob("*.kv"), key=lambda path: -path.stat().st_mtime_ns)
    assert len(blocks) == FULL // 4, "in order: the ends of prefixes were touched first"
    blocks[7].write_bytes(b"\0" * 100)
    assert first.ask("/slots/a?action=restore", cache_salt="mine") == slot("a", FULL, 28)
    *data, last = blocks[4].read_bytes()
    blocks[4].write_bytes(bytes([*data, last ^ 1]))
    assert first.ask("/slots/a?action=restore", cache_salt="mine") == slot("a", FULL, 16), "its checksum is wrong"
    blocks[0].unlink()
    assert first.ask("/slots/a?action=restore", cache_salt="mine") == slot("a", FULL, 0)


BAD = [
    ({"prompt": "a"}, "%2e%2e", "save", 400, "name"),
    ({"prompt": "a"}, "..%2fx", "save", 404, None),
    ({"prompt": "a"}, ".x", "save", 400, "name"),
    ({"prompt": "a"}, "a%20b", "save", 400, "name"),
    ({"prompt": "a"}, "a%00", "save", 400, "name"),
    ({"prompt": "a"}, "x" * 101, "save", 400, "name"),
    ({}, "a%0a", "restore", 400, "name"),
    ({}, "unknown", "restore", 404, "name"),
    ({}, "a", "save", 400, "prompt"),
    ({"prompt": "a", "messages": MESSAGES}, "a", "save", 400, "prompt"),
    ({"prompt": "a"}, "a", "restore", 400, "prompt"),
    ({"prompt": []}, "a", "save", 400, "prompt"),
    ({"prompt": [300]}, "a", "save", 400, "prompt"),
    ({"prompt": "word " * 1000}, "a", "save", 400, "prompt"),
    ({"messages": []}, "a", "save", 400, "messages"),
    ({"prompt": "a", "cache_salt": ""}, "a", "save", 400, "cache_salt"),
    ({"prompt": "a"}, "a", "erase", 400, "action"),
    ({"prompt": "a", "model": "other"}, "a", "save", 404, "model"),
]


def test_what_is_refused(serve, tmp_path):
    client = serve()
    stranger = Client(client.app)
    for method, path in [("GET", "/slots"), ("POST", "/slots/a?action=restore"), ("DELETE", "/slots/a")]:
        assert stranger.request(method, path, json={}).status_code == 401
    for body, name, action, status, param in BAD:
        client.refuse(f"/slots/{name}?action={action}", body, param, status=status)
    assert client.request("DELETE", "/slots/.x").json()["error"]["param"] == "name"
    assert not (tmp_path / "kv" / "conversations").exists()
    client.ask("/slots/a?action=save", prompt="a")
    (tmp_path / "kv" / "conversations" / "a.json").write_text("{")
    damaged = client.post("/slots/a?action=restore", {})
    assert (damaged.status_code, "Save it again" in damaged.text) == (400, True)


def test_without_a_store_in_a_folder(new_client, capsys):
    for method, path in [("GET", "/slots"), ("POST", "/slots/a?action=save"), ("DELETE", "/slots/a")]:
        assert new_client().request(method, path, json={"prompt": "a"}).status_code == 404, "off by default"
    response = new_client(enable_kv_slots=True).get("/slots")
    assert (response.status_code, response.json()["error"]["code"]) == (501, "no_kv_store")
    assert "--kv-transfer-config" in response.text
    with pytest.raises(SystemExit):
        serve_command.main(["--enable-kv-slots", "--kv-offloading-size", "1"])
    assert "SharedStorageConnector" in capsys.readouterr().err


# ---- salts


def test_requests_with_different_salts_share_no_block(client):
    details, output = "prompt_tokens_details", {"max_tokens": 1}
    for path, body, usage in (
        ("/v1/completions", {"prompt": [PROMPT, "other"], **output}, details),
        ("/v1/chat/completions", {"messages": MESSAGES, **output}, details),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}, "input_tokens_details"),
    ):
        client.server.llm.engine.reset_prefix_cache()
        salts = ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "a"}, {"cache_salt": None})
        hits = [client.ask(path, **body, **salt)["usage"][usage]["cached_tokens"] for salt in salts]
        assert hits[:3] == [0, 0, 0]
        assert hits[3] == hits[4] >= FULL - 4
        for bad in ("", 7, "x" * 1025):
            client.refuse(path, body | {"cache_salt": bad}, "cache_salt")


def test_embeddings_leave_no_block_for_other_salts(client):
    client.server.llm.engine.reset_prefix_cache()
    client.ask("/v1/embeddings", input=PROMPT, cache_salt="a")
    assert [num_cached(client), num_cached(client, cache_salt="a") > 0] == [0, True]
