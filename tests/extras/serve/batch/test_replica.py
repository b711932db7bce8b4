"""Rows of a batch get the answers of the server, by the same code; and what happens to those that fail."""

import asyncio
import json

import pytest

from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.batch import attempts, replica
from nanovllm_extras.serve.batch import batch_inputs as inputs
from nanovllm_extras.serve.batch.one_machine import answer_here
from nanovllm_extras.serve.batch.parts import Parts, read_column
from nanovllm_extras.serve.batch.replica import Places, Replica, ReplicaSpec
from nanovllm_extras.serve.batch.rows import Form, Row
from nanovllm_extras.serve.server_options import ServerOptions

OPTIONS = ServerOptions(model_names=("tiny", "alias"), log_requests=False)
BODIES = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0}),
    ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 3, "n": 2, "seed": 1, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}),
    ("/v1/embeddings", {"input": "hello"}),
    ("/v1/score", {"text_1": "hello", "text_2": ["hello", "you"]}),
    ("/v1/rerank", {"query": "hello", "documents": ["you", "hello"]}),
    ("/v2/rerank", {"query": "hello", "documents": ["you", {"text": "me"}], "top_n": 1}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
    ("/v1/completions", {"prompt": "hello", "temperature": -1}),
    ("/v1/completions", {"prompt": "hello", "model": "other"}),
    ("/v1/completions", {"prompt": "x" * 100_000}),
    ("/v1/chat/completions", {"messages": "\ud800"}),
    ("/v1/chat/completions", {}),
]


def to_rows(bodies):
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    return [Row(line["custom_id"], *Form().request(line)) for line in lines]


def answer(llm, tmp_path, rows, max_in_flight=16):
    spec = ReplicaSpec(lambda: llm, OPTIONS, tmp_path, "run", max_in_flight)

    async def run():
        return await Replica(spec).answer(rows)

    return asyncio.run(run())


def without_names(body):
    """An answer without what differs each time."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "usage")}


def with_tolerance(body):
    """A vector's last bits depend on what is computed beside it."""

    def near(one):
        return {
            name: pytest.approx(value, abs=1e-5) if name in ("embedding", "score", "relevance_score") else value
            for name, value in one.items()
        }

    return {**body, **{name: [near(one) for one in body[name]] for name in ("data", "results") if name in body}}


def test_answers_are_the_servers(llm, client, tmp_path):
    """Statuses, bodies and errors, for what is served and for what is refused."""
    found = answer(llm, tmp_path, to_rows(BODIES))
    assert list(tmp_path.glob("*.json")) == [], "nothing is being computed any more"
    for i, ((url, body), one) in enumerate(zip(BODIES, found, strict=True)):
        response = client.post(url, content=json.dumps(body), headers={"content-type": "application/json"})
        expected = response.json()
        assert one["custom_id"] == f"r{i}"
        assert one["response"]["status_code"] == response.status_code
        told = json.loads(one["response"]["body"])
        assert without_names(told) == with_tolerance(without_names(expected))
        if response.status_code == 200:
            assert one["error"] is None
            assert told["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
            assert one["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            assert one["completion_tokens"] == expected["usage"].get("completion_tokens")
        else:
            assert one["error"]["message"] == expected["error"]["message"].encode("utf-8", "backslashreplace").decode()
            assert one["error"]["code"] in (expected["error"]["code"], expected["error"]["type"])
    texts = [one.get("text") for one in found[:4]]
    bodies = [json.loads(one["response"]["body"]) for one in found[:3]]
    assert texts[:2] == [body["choices"][0]["text"] for body in bodies[:2]]
    assert texts[2:] == [bodies[2]["choices"][0]["message"]["content"], None]


def test_rows_in_flight_are_bounded_and_the_batch_stays_full(llm, tmp_path, monkeypatch):
    """Never more than 5 at once, and 5 as long as there are rows."""
    most, submit = [0], llm.submit

    async def count(requests, *others):
        inbox = await submit(requests, *others)
        most[0] = max(most[0], len(llm._inboxes))
        return inbox

    monkeypatch.setattr(llm, "submit", count)
    bodies = [("/v1/completions", {"prompt": f"p{i}", "max_tokens": 2 + i % 7}) for i in range(40)]
    found = answer(llm, tmp_path, to_rows(bodies), max_in_flight=5)
    assert [one["error"] for one in found] == [None] * 40
    assert most == [5]


def test_a_row_whose_step_fails_is_tried_again_and_the_last_time_alone(llm, tmp_path, monkeypatch):
    """Two rows fail in company and one fails always; only that one gets an error."""
    running, seen, submit = set(), [], llm.submit

    async def fail(requests, *others):
        text = requests[0].prompt["prompt"]
        running.add(text)
        seen.append((text, len(running)))
        try:
            await asyncio.sleep(0.01)
            if text == "always" or (text.startswith("shy") and len(running) > 1):
                raise MemoryError
            return await submit(requests, *others)
        finally:
            running.discard(text)

    monkeypatch.setattr(llm, "submit", fail)
    names = ["a", "shy 1", "always", "b", "shy 2", "c"]
    bodies = [("/v1/completions", {"prompt": name, "max_tokens": 2}) for name in names]
    found = answer(llm, tmp_path, to_rows(bodies))
    assert [one["error"] and one["error"]["code"] for one in found] == [None, None, "internal_error", None, None, None]
    assert [num for text, num in seen if text == "always"][2:] == [1]
    assert [text for text, _ in seen].count("always") == 3


def test_a_row_at_which_the_application_fails_stops_no_other(llm, tmp_path, monkeypatch):
    """As an exception of middleware, which no handler of errors sees."""
    make = replica.make_app

    def make_broken(*arguments):
        app = make(*arguments)

        async def broken(scope, receive, send):
            if scope["path"] == "/v1/embeddings":
                raise ZeroDivisionError
            await app(scope, receive, send)

        return broken

    monkeypatch.setattr(replica, "make_app", make_broken)
    found = answer(llm, tmp_path, to_rows([BODIES[0], BODIES[3], BODIES[2]]))
    assert [one["error"] and one["error"]["code"] for one in found] == [None, "internal_error", None]
    assert "ZeroDivisionError" in found[1]["error"]["message"]


def test_places_that_are_all_taken_wait_for_none_twice():
    async def run():
        places, log = Places(3), []

        async def work(name, all_of_them):
            async with places.taken(all_of_them):
                log.append(name)
                await asyncio.sleep(0.001)
                log.append(name)

        alone = [work(f"alone {i}", True) for i in range(3)]
        await asyncio.wait_for(asyncio.gather(*[work(f"{i}", False) for i in range(7)], *alone), 10)
        waiting = asyncio.create_task(work("never", True))
        async with places.taken(False):
            await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(work("after", True), 10)
        return log

    log = asyncio.run(run())
    for name in ("alone 0", "alone 1", "alone 2"):
        assert log.index(name) + 1 == len(log) - 1 - log[::-1].index(name), "nothing came between"
    assert log[-2:] == ["after", "after"]


# ---- engines that die


def load_fatal(folder):
    """An engine that dies in the step in which a prompt of 3 tokens is computed."""
    llm = AsyncLLM(folder, dtype="float32", num_kv_blocks=256, block_size=4)
    step = llm.engine.step

    def step_or_die():
        if any(len(request.prompt_token_ids) == 3 for request in llm.engine.requests.values()):
            raise SystemExit("the device is lost")
        return step()

    llm.engine.step = step_or_die
    return llm


def test_a_row_that_kills_the_engine_gets_an_error_and_the_others_answers(with_tokenizer, tmp_path):
    lines = [json.dumps({"prompt": [5, 6, 7] if i == 8 else [1 + i] * 5}) for i in range(14)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    form = Form("prompt", None, body={"max_tokens": 3, "temperature": 0})
    batch = inputs.scan(inputs.find_sources([tmp_path / "in.jsonl"]), form, 5)
    num_engines = [0]

    def load():
        num_engines[0] += 1
        return load_fatal(with_tokenizer)

    with Parts.opened(tmp_path / "out") as parts:
        answer_here(batch, parts, parts.done(), ReplicaSpec(load, OPTIONS, parts.attempts, parts.run, 8))
        found = [pair for path in parts.paths() for pair in zip(*columns(path), strict=True)]
    assert sorted(name for name, _ in found) == sorted(f"in.jsonl:{i + 1}" for i in range(14))
    errors = {name: error["code"] for name, error in found if error is not None}
    assert errors == {"in.jsonl:9": "engine_dead"}
    assert num_engines == [4]


def columns(path):
    return read_column(path, "custom_id"), read_column(path, "error")


def test_engines_that_always_die_end_the_run(with_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "MAX_ENGINES", 2)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": [5, 6, 7]}), encoding="utf-8")
    batch = inputs.scan(inputs.find_sources([tmp_path / "in.jsonl"]), Form("prompt", None), 5)
    with Parts.opened(tmp_path / "out") as parts:
        spec = ReplicaSpec(lambda: load_fatal(with_tokenizer), OPTIONS, parts.attempts, parts.run, 8)
        with pytest.raises(RuntimeError, match="2 engines have died"):
            answer_here(batch, parts, parts.done(), spec)
