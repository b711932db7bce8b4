"""Responses that are stored: continued, read, deleted and cancelled by their own key, within the bounds of the store.

The oracles: requests that send the whole conversation, OpenAI's types, and a naive model of the store.
"""

import asyncio
import json
import random
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from test_responses import FLAT_ADD, PATH, add_up, ask, scripted, stream, without_ids
from test_structured import CALL, TEMPLATE

from nanovllm_extras.serve.response_store import ResponseStore, StoreBounds, StoredItem, StoredResponse, Turn
from tests.extras.serve.real_server import in_thread

FIELDS = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 6}


@pytest.fixture(scope="module")
def types():
    """OpenAI's types: name -> a function that returns a value of this type, or raises if a field has another type."""
    from openai import types

    names = ("Response", "ResponseStreamEvent", "ResponseItem", "response_item_list.ResponseItemList")

    def strict(name):
        kind = types.responses
        for part in name.split("."):
            kind = getattr(kind, part)
        adapter = TypeAdapter(kind)
        return lambda value: adapter.validate_json(json.dumps(value), strict=True)

    return {name.rpartition(".")[2]: strict(name) for name in names}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def refused(response):
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


# ---- conversations


@pytest.mark.parametrize("seed", range(4))
def test_a_continued_response_is_that_of_the_whole_conversation(client, llm, monkeypatch, seed):
    """Turns of random kinds, whole and streamed. The client of the oracle keeps all items itself."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    chance, items, previous = random.Random(seed), [], None
    for turn in range(5):
        new = [{"role": "user", "content": chance.choice("abc") * chance.randint(1, 3)}]
        if calls := [item for item in items if item["type"] == "function_call"]:
            new = [{"type": "function_call_output", "call_id": calls[-1]["call_id"], "output": f"{turn}"}, *new]
        given = new[0]["content"] if len(new) == 1 and chance.random() < 0.5 else new
        body = {"instructions": chance.choice([None, "S"]), "tools": [FLAT_ADD], "max_output_tokens": 200}
        text = chance.choice(["Yes", CALL, "<think>\nHm\n</think>\n\nNo"])
        one = scripted(client, text, chance.random() < 0.5, input=given, previous_response_id=previous, **body)
        whole = scripted(client, text, input=[*items, *new], store=False, **body)
        assert one["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert without_ids(one["output"]) == without_ids(whole["output"])
        assert (one["previous_response_id"], one["store"], whole["store"]) == (previous, True, False)
        items += [{"type": "message", **item} for item in new] + one["output"]
        previous = one["id"]
    listed = client.get(f"{PATH}/{previous}/input_items", params={"order": "asc", "limit": 100}).json()
    shown = [(item["type"], item.get("role")) for item in listed["data"]]
    assert shown == [(item["type"], item.get("role")) for item in items[: -len(one["output"])]]


def test_a_response_is_read_and_deleted(client, types):
    first = ask(client, **FIELDS, instructions="Be brief.", metadata={"a": "b"})
    second = stream(client, input="And?", previous_response_id=first["id"], **FIELDS)[-1]["response"]
    for one in (first, second):
        assert client.get(f"{PATH}/{one['id']}").json() == one
        assert types["Response"](one).id == one["id"]
    assert client.request("DELETE", f"{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        response = client.request(method, f"{PATH}/{first['id']}{path}")
        assert refused(response) == (404, "response_id", None)
    third = ask(client, input="So?", previous_response_id=second["id"], **FIELDS)
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"], "the turn of the first is still there"
    response = client.post(PATH, {"input": "a", "previous_response_id": first["id"]})
    assert refused(response) == (400, "previous_response_id", "previous_response_not_found")
    assert refused(client.post(f"{PATH}/{second['id']}/cancel")) == (400, "response_id", None), "it has ended"
    assert ask(client, input=None, previous_response_id=second["id"], **FIELDS)["usage"]["input_tokens"]


def test_input_items_have_pages_of_openais_types(client, types):
    history = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Dev."}]},
        {"role": "user", "content": "What?", "id": "msg_mine"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "See:"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    ]
    response = ask(client, input=history, max_output_tokens=1)
    pages, after = [], None
    while True:
        params = {"limit": 3, "order": "asc"} | ({} if after is None else {"after": after})
        page = client.get(f"{PATH}/{response['id']}/input_items", params=params).json()
        assert types["ResponseItemList"](page)
        pages += page["data"]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert [item["type"] for item in pages] == [item.get("type", "message") for item in history[:-1]]
    assert pages[1]["id"] == "msg_mine"
    assert len({item["id"] for item in pages}) == len(pages)
    for item in pages:
        assert type(types["ResponseItem"](item)).__name__.startswith("Response")
    newest = client.get(f"{PATH}/{response['id']}/input_items").json()["data"]
    assert newest == pages[::-1]
    for params, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order")):
        assert refused(client.get(f"{PATH}/{response['id']}/input_items", params=params))[:2] == (400, param)
    assert client.get(f"{PATH}/{response['id']}/input_items", params={"after": "x"}).status_code == 404


def test_every_event_has_openais_types(client, types):
    text = "<think>\nI must add.\n</think>\n\nLet me see.\n" + CALL
    for fields in ({}, {"max_output_tokens": 30}, {"store": False, "include": ["message.output_text.logprobs"]}):
        body = {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}, "tools": [FLAT_ADD], **fields}
        for event in stream(client, **body, reasoning={"effort": "low"}, truncation="auto"):
            assert types["ResponseStreamEvent"](event).type == event["type"]


def test_items_are_referenced_as_the_ai_sdk_does(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    one = scripted(client, "See:\n" + CALL, tools=[FLAT_ADD], max_output_tokens=100)
    result = {"type": "function_call_output", "call_id": one["output"][1]["call_id"], "output": "2"}
    question = {"role": "user", "content": "What?"}
    for kind in ({"type": "item_reference"}, {}):
        references = [{**kind, "id": item["id"]} for item in one["output"]]
        by_id = ask(client, input=[question, *references, result], max_output_tokens=1)
        whole = ask(client, input=[question, *one["output"], result], max_output_tokens=1)
        assert by_id["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    client.request("DELETE", f"{PATH}/{one['id']}")
    response = client.post(PATH, {"input": [question, {"type": "item_reference", "id": "msg_x"}]})
    assert refused(response) == (404, "input", None)


def test_a_key_has_no_access_to_the_responses_of_another(new_client):
    client = new_client(api_keys=("one", "two"))
    body = {"input": "Secret?", **FIELDS}
    first = client.post(PATH, body, headers=bearer("one")).json()
    item = first["output"][0]["id"]
    for key, is_owner in (("two", False), ("one", True)):
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            response = client.request(method, f"{PATH}/{first['id']}{path}", headers=bearer(key))
            assert (response.status_code == 404) == (not is_owner), (key, method, path)
        if not is_owner:
            answers = [
                client.post(PATH, body | {"previous_response_id": first["id"]}, headers=bearer(key)),
                client.post(PATH, body | {"input": [{"type": "item_reference", "id": item}]}, headers=bearer(key)),
            ]
            assert [answer.status_code for answer in answers] == [400, 404]
            assert "Secret" not in answers[0].text + answers[1].text


def test_ids_cannot_be_guessed_and_items_with_other_ids_cannot_be_referenced(client):
    """Without keys, whoever knows an id can read it. A client chooses its header and the ids of its items."""
    message = {"role": "user", "content": "Secret?", "id": "msg_1"}
    body = {"input": [message], **FIELDS}
    ids = {client.post(PATH, body, headers={"x-request-id": "same"}).json()["id"] for _ in range(3)}
    assert len(ids) == 3
    assert all("same" not in one and len(one) > 40 for one in ids)
    response = client.post(PATH, {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert refused(response) == (404, "input", None)


@pytest.mark.parametrize(
    "off", [{"max_stored_responses": 0}, {"max_stored_response_bytes": 0}, {"max_stored_response_age_s": 0}, None]
)
def test_what_is_not_stored_is_not_found(new_client, off):
    client = new_client(**(off or {}))
    answer = ask(client, **FIELDS, **({} if off else {"store": False}))
    assert answer["store"] is False
    assert client.get(f"{PATH}/{answer['id']}").status_code == 404
    assert "nanovllm:stored_responses 0.0" in client.get("/metrics").text


# ---- the prompt


def test_input_tokens_are_those_of_the_response(client, types):
    first = ask(client, **FIELDS)
    for body in ({"input": "What?"}, {"input": "And?", "previous_response_id": first["id"], "instructions": "S."}):
        counted = client.ask(PATH + "/input_tokens", **body)
        answer = ask(client, **body, max_output_tokens=1)
        assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    client.refuse(PATH + "/input_tokens", {"input": "a" * 10**5}, "input")
    client.refuse(PATH + "/input_tokens", {}, "input")


def test_tokens_that_are_written_to_the_cache_are_found_later(client):
    """Blocks have 4 tokens. What a first request has written, a second one with more text reads."""
    first = ask(client, input="cache writes: unique", max_output_tokens=1)["usage"]
    second = ask(client, input="cache writes: unique and more text", max_output_tokens=1)["usage"]
    details = first["input_tokens_details"]
    common = first["input_tokens"] - len("|assistant:")  # the second prompt goes on there
    found = second["input_tokens_details"]["cached_tokens"]
    assert found == common // 4 * 4 <= details["cached_tokens"] + details["cache_write_tokens"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == first["input_tokens"] // 4 * 4


@pytest.mark.parametrize("seed", range(3))
def test_truncation_drops_the_fewest_oldest_messages(client, llm, seed):
    """Oracle: all suffixes of the conversation, as the template writes them; a character is a token."""
    context = llm.engine.parts.max_model_len
    chance = random.Random(seed)
    turns = [("user" if i % 2 == 0 else "assistant", "x" * chance.randint(1, context // 4)) for i in range(21)]
    system = [("system", "Sys."), ("system", "Dev.")] if seed else []
    items = [{"role": role, "content": text} for role, text in (*system, *turns)]
    if system:
        items[1]["role"] = "developer"  # the template does not know it
    body = {"input": items, "max_output_tokens": chance.choice([5, context])}
    client.refuse(PATH, body, "input", "maximum context length")
    answer = ask(client, **body, truncation="auto")
    room = min(body["max_output_tokens"], context // 4)

    def length(messages):
        return len("".join(f"{role}:{text}|" for role, text in messages) + "assistant:")

    fitting = [length(system + turns[i:]) for i in range(len(turns)) if length(system + turns[i:]) + room <= context]
    assert answer["usage"]["input_tokens"] == max(fitting)
    assert answer["truncation"] == "auto"
    assert ask(client, input="short", truncation="auto", max_output_tokens=1)["usage"]["input_tokens"] == 21
    client.refuse(PATH, {"input": "a" * 10 * context, "truncation": "auto"}, "input")


def test_truncation_keeps_a_result_with_its_call(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    context = llm.engine.parts.max_model_len
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": json.dumps({"a": "x" * context})}
    items = [
        {"role": "user", "content": "What?"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "user", "content": "And?"},
    ]
    answer = ask(client, input=items, truncation="auto", max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == len("user:And?|")


# ---- responses that are being generated


def in_one_loop(client, work, key=None):
    """Run `work(send)`, whose requests share an event loop, as those of a real server do."""

    async def run():
        transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as one:
            return await work(one)

    return asyncio.run(run())


@pytest.fixture
def slow_steps(llm, monkeypatch):
    """A response takes seconds, so that it still runs when a client of a busy machine asks for it."""
    run = llm.engine.runner.run
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", lambda *given: time.sleep(0.1) or run(*given))
        yield patch


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_running_response_is_read_and_cancelled(client, types, is_stream):
    store = client.server.responses
    body = {"input": "What?", "max_output_tokens": 100, "ignore_eos": True, "stream": is_stream}

    async def work(one):
        asking = asyncio.ensure_future(one.post(PATH, json=body))
        while not store._running:
            await asyncio.sleep(0)
        (name,) = store._running
        running = (await one.get(f"{PATH}/{name}")).json()
        cancelled = (await one.post(f"{PATH}/{name}/cancel")).json()
        return running, cancelled, await asking

    running, cancelled, answer = in_one_loop(client, work)
    assert (running["status"], cancelled["status"]) == ("in_progress", "cancelled")
    for one in (running, cancelled):
        assert types["Response"](one)
    last = answer.json() if not is_stream else json.loads(answer.text.split("data: ")[-1])["response"]
    assert last == cancelled == client.get(f"{PATH}/{last['id']}").json()
    assert not store._running


@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_leaves_stores_nothing(client, llm):
    store = client.server.responses
    body = {"input": "What?", "max_output_tokens": 100, "ignore_eos": True}

    async def work(one):
        for is_stream in (False, True):
            asking = asyncio.ensure_future(one.post(PATH, json=body | {"stream": is_stream}))
            while not store._running:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait((asking,))
            assert not store._running
            assert store.num_bytes == 0

    in_one_loop(client, work)
    deadline = time.monotonic() + 60
    while llm.get_stats().num_running:  # its thread ends the sequence before the next step
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- responses in the background


@pytest.fixture(scope="module")
def server(llm):
    with in_thread(llm, model_names=("tiny",)) as made:
        yield made


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as one:
        yield one


LONG = {"input": "What?", "max_output_tokens": 60, "ignore_eos": True, "background": True, "temperature": 0}


def poll(http, response_id):
    """The states of a response until it has ended."""
    states, deadline = [], time.monotonic() + 60
    while not states or states[-1]["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        states.append(http.get(f"{PATH}/{response_id}").json())
    return states


def events_of(text):
    return [json.loads(event.split("data: ")[1]) for event in text.split("\n\n")[:-1]]


def test_a_response_in_the_background_is_polled(http, types):
    whole = http.post(PATH, json=LONG | {"background": False}).json()
    first = http.post(PATH, json=LONG).json()
    assert (first["status"], first["background"], first["output"], first["usage"]) == ("queued", True, [], None)
    states = poll(http, first["id"])
    assert {state["status"] for state in states} <= {"queued", "in_progress", "incomplete"}
    assert all(types["Response"](one) for one in (first, *states))
    text, *shown = [one["output"][0]["content"][0]["text"] for one in (whole, *states) if one["output"]]
    assert all(text.startswith(one) for one in shown)
    assert without_ids(states[-1]["output"]) == without_ids(whole["output"])
    assert states[-1]["usage"]["output_tokens"] == 60
    assert http.post(f"{PATH}/{first['id']}/cancel").json() == states[-1], "it has ended, which is no error"
    more = http.post(PATH, json=LONG | {"previous_response_id": first["id"], "background": False}).json()
    assert more["usage"]["input_tokens"] > whole["usage"]["input_tokens"]


def test_events_in_the_background_are_read_again_from_any_number_on(http, types):
    with http.stream("POST", PATH, json=LONG | {"stream": True}) as response:
        begun = next(response.iter_text())  # and the client leaves
    name = events_of(begun)[0]["response"]["id"]
    assert events_of(begun)[0]["response"]["status"] == "queued"
    running = http.get(f"{PATH}/{name}", params={"stream": True}).text
    response = poll(http, name)[-1]
    ended = http.get(f"{PATH}/{name}", params={"stream": True})
    assert ended.headers["content-type"].startswith("text/event-stream")
    assert running == ended.text
    assert running.startswith(begun)
    events = events_of(running)
    assert all(types["ResponseStreamEvent"](event) for event in events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events[:3]] == ["created", "queued", "in_progress"]
    assert add_up(events_of(running)) == response["output"] == events[-1]["response"]["output"]
    for after in (0, 4, len(events) - 1, len(events) + 9):
        params = {"stream": True, "starting_after": after}
        assert events_of(http.get(f"{PATH}/{name}", params=params).text) == events[after + 1 :]
    assert refused(http.get(f"{PATH}/{name}", params={"starting_after": 1})) == (400, "starting_after", None)


def test_a_response_in_the_background_is_cancelled_or_fails(http, llm, types, slow_steps, monkeypatch):
    for is_stream in (False, True):
        with http.stream("POST", PATH, json=LONG | {"stream": is_stream}) as response:
            text = next(response.iter_text())
        name = (events_of(text)[0]["response"] if is_stream else json.loads(text))["id"]
        cancelled = http.post(f"{PATH}/{name}/cancel").json()
        assert (cancelled["status"], cancelled["usage"]["output_tokens"] < 60) == ("cancelled", True)
        assert http.post(f"{PATH}/{name}/cancel").json() == http.get(f"{PATH}/{name}").json() == cancelled
    name = http.post(PATH, json=LONG).json()["id"]
    assert refused(http.get(f"{PATH}/{name}?stream=true")) == (400, "stream", None)
    (item,) = http.get(f"{PATH}/{name}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "What?"}]
    early = http.post(PATH, json={"input": "And?", "previous_response_id": name})
    assert "still being generated" in early.json()["error"]["message"]
    assert http.delete(f"{PATH}/{name}").json()["deleted"]
    assert http.get(f"{PATH}/{name}").status_code == http.delete(f"{PATH}/{name}").status_code == 404
    assert http.get("/load").json() == {"server_load": 0}
    slow_steps.undo()

    def fail(*given):
        raise RuntimeError("told to fail")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    failed = poll(http, http.post(PATH, json=LONG).json()["id"])[-1]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert types["Response"](failed)
    assert http.get("/load").json() == {"server_load": 0}


def test_what_the_background_refuses(new_client):
    new_client().refuse(PATH, LONG | {"store": False}, "background", "store=false")
    new_client(max_stored_responses=0).refuse(PATH, LONG, "background", "stores no responses")

    async def work(one):
        long = LONG | {"metadata": {str(i): "x" * 400 for i in range(16)}}  # such a body is read in a thread
        asked = await asyncio.gather(*[one.post(PATH, json=long) for _ in range(3)])
        return sorted([*asked, await one.post(PATH, json=LONG)], key=lambda answer: answer.status_code)

    first, *others = in_one_loop(new_client(max_stored_responses=1), work)
    assert first.status_code == 200
    assert [refused(one) for one in others] == [(429, None, "queue_full")] * 3


# ---- the store


class Naive:
    """The store by its definition: all responses that are alive, and the turns that can be reached from them."""

    def __init__(self, bounds):
        self.bounds, self.alive, self.now = bounds, [], 0.0  # (response, born), the least recently used first

    def num_bytes(self):
        turns = {}
        for response, _ in self.alive:
            turn = response.turn
            while turn is not None:
                turns[id(turn)], turn = turn, turn.parent
        return sum(response.num_bytes for response, _ in self.alive) + sum(turn.num_bytes for turn in turns.values())

    def expire(self):
        self.alive = [one for one in self.alive if one[1] > self.now - self.bounds.max_age_s]

    def put(self, response):
        self.expire()
        before, self.alive = self.alive, [(response, self.now)]
        if self.num_bytes() > self.bounds.max_bytes:  # it cannot fit, so nothing else is evicted for it
            self.alive = before
            return
        self.alive = [*before, (response, self.now)]
        while len(self.alive) > self.bounds.max_responses or self.num_bytes() > self.bounds.max_bytes:
            self.alive.pop(0)

    def get(self, owner, name):
        self.expire()
        found = next((one for one in self.alive if (one[0].owner, one[0].id) == (owner, name)), None)
        if found is not None:
            self.alive.remove(found)
            self.alive.append(found)
        return found

    def delete(self, owner, name):
        if found := self.get(owner, name):
            self.alive.remove(found)
        return found is not None


ACTIONS = st.tuples(
    st.sampled_from(["put", "put", "put", "get", "delete", "item", "wait"]),
    st.integers(0, 9),  # which earlier response
    st.integers(0, 3000),  # bytes
    st.sampled_from(["", "key 0"]),
)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=25), most=st.integers(1, 5), max_bytes=st.integers(1, 15_000))
def test_the_bounds_hold(actions, most, max_bytes):
    bounds = StoreBounds(most, max_bytes, 10.0)
    naive = Naive(bounds)
    store = ResponseStore(bounds, clock=lambda: naive.now)
    made = []
    for action, which, size, owner in actions:
        name = made[which % len(made)].id if made else "resp_x"
        if action == "put":
            previous = store.get(owner, name)
            naive.get(owner, name)
            item = StoredItem(store.new_id("msg"), b"x" * size)
            response = StoredResponse(
                store.new_id("resp"), owner, b"y" * (size // 2), Turn([item], [], previous and previous.turn)
            )
            made.append(response)
            store.put(response)
            naive.put(response)
        elif action == "item" and made:
            one = made[which % len(made)]
            found = naive.get(owner, one.id)
            assert store.item(owner, one.turn.input[0].id) == (one.turn.input[0] if found else None)
        elif action == "wait":
            naive.now += which / 2
            naive.expire()
        elif action == "delete":
            assert store.delete(owner, name) == naive.delete(owner, name)
        else:
            assert (store.get(owner, name) is not None) == (naive.get(owner, name) is not None)
        list(store.families())
        assert store.num_bytes == naive.num_bytes() <= max_bytes
        assert list(store._responses) == [response.id for response, _ in naive.alive]
        assert len(store._responses) <= most
        assert {name for name, _ in store._items.values()} == set(store._responses) == set(store._times)
