"""The small routes, and what is counted and logged."""

import asyncio
import logging
import re

import httpx
from prometheus_client.parser import text_string_to_metric_families

from nanovllm_extras.vllm.vllm_metrics import Histogram, make_metrics

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_health_and_version(client):
    assert (client.get("/health").status_code, client.get("/health").content) == (200, b"")
    assert client.get("/version").json()["version"]


def test_models(client, llm):
    answer = client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [one["id"] for one in answer["data"]] == ["tiny", "alias"]
    assert answer["data"][0]["max_model_len"] == llm.engine.parts.max_model_len
    assert client.get("/v1/models/alias").json() == answer["data"][1]
    assert client.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


PATHS = {  # as clients join a base URL and a route -> the route
    "/v1/models/": "/v1/models",
    "/v1//models": "/v1/models",
    "//v1/models": "/v1/models",
    "/v1//models/alias/": "/v1/models/alias/",  # the name of a model may end so
    "/v1//models/alias": "/v1/models/alias",
    "/health/": "/health",
    "//health": "/health",
    "/llm//v1/models/": "/v1/models",
    "http://tiny.example:8000/v1/models": "/v1/models",
    "https://tiny.example/v1/models/alias": "/v1/models/alias",
    "http://tiny.example": "/",
    "/": "/",
}


def test_paths_with_slashes_too_many_or_an_address(new_client):
    """They are served as the route itself, without a redirect, which would name the scheme behind a proxy."""
    app, guarded = new_client(root_path="/llm").app, new_client(api_keys=("k",)).app
    for path, route in PATHS.items():
        expected = asyncio.run(call(app, route))
        assert expected[0] == (404 if route in ("/", "/v1/models/alias/") else 200)
        assert asyncio.run(call(app, path)) == expected, path
        assert asyncio.run(call(guarded, path))[0] == (200 if "health" in path else 401)
    name = "/data//model/"
    assert new_client(model_names=(name,)).get(f"/v1/models/{name}").json()["id"] == name


async def call(app, path):
    """Call an application without a client, which would change the path -> status, body"""
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_tokenize_and_detokenize(client, llm):
    tokenizer = llm.engine.tokenizer
    answer = client.ask("/tokenize", prompt="héllo", return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode("héllo")
    assert (answer["count"], answer["max_model_len"]) == (6, 512)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert client.ask("/detokenize", tokens=answer["tokens"]) == {"prompt": "héllo"}
    answer = client.ask("/tokenize", messages=MESSAGES)
    assert answer["tokens"] == tokenizer.encode("user:hi|assistant:")
    assert client.post("/detokenize", {"tokens": [300]}).json()["error"]["param"] == "tokens"


def metrics_of(client):
    """(name, sorted labels other than the model's) -> value"""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_metrics_count_what_was_served(client, llm):
    before = metrics_of(client)
    client.ask(COMPLETIONS, prompt="z" * 21, max_tokens=5, ignore_eos=True, temperature=0)
    client.ask(COMPLETIONS, prompt="z" * 21, max_tokens=7, ignore_eos=True, temperature=0)
    client.events(CHAT, messages=MESSAGES, max_tokens=3, ignore_eos=True, temperature=0)
    after = metrics_of(client)
    grown = {key[0].removeprefix("nanovllm:"): after[key] - before[key] for key in after if len(key) == 1}
    assert grown["prompt_tokens_total"] == 21 + 21 + 18
    assert grown["generation_tokens_total"] == 15
    assert grown["prefix_cache_hits_total"] == 20
    assert grown["prefix_cache_queries_total"] == 60
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown[f"{name}_count"] == 3
    assert grown["inter_token_latency_seconds_count"] == 4 + 6 + 2
    assert grown["request_generation_tokens_sum"] == 15
    assert grown["request_prompt_tokens_sum"] == 60
    assert 0 < grown["time_to_first_token_seconds_sum"] <= grown["e2e_request_latency_seconds_sum"]
    reason = ("nanovllm:request_success_total", "length")
    assert after[reason] - before[reason] == 3
    assert after[("nanovllm:kv_cache_usage_perc",)] == after[("nanovllm:num_requests_running",)] == 0
    assert after[("nanovllm:num_requests_waiting",)] == after[("nanovllm:num_preemptions_total",)] == 0


def test_an_embedding_is_observed_and_logged(client, caplog):
    """It has no tokens of its own, and so no time to a first token."""
    before = metrics_of(client)
    with caplog.at_level(logging.INFO, "nanovllm_extras.serve"):
        answer = client.ask("/v1/embeddings", input=["x" * 11, "w" * 3])
    after = metrics_of(client)
    grown = {key[0].removeprefix("nanovllm:"): after[key] - before[key] for key in after if len(key) == 1}
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown[f"{name}_seconds_count"] == 2
    assert (grown["request_prompt_tokens_sum"], grown["request_generation_tokens_sum"]) == (14, 0)
    assert grown["request_generation_tokens_count"] == 2
    for name in ("time_to_first_token", "inter_token_latency", "request_decode_time"):
        assert grown[f"{name}_seconds_count"] == 0
    reason = ("nanovllm:request_success_total", "stop")
    assert after[reason] - before[reason] == 2
    for i, record in enumerate(sorted(record.getMessage() for record in caplog.records)):
        assert re.fullmatch(
            rf"{answer['id']}-{i} stop: {[11, 3][i]} tokens in \(0 cached\), embedded after [\d.]+ ms", record
        )


def test_the_server_and_the_engine_observe_the_same_histograms(client, llm):
    families = text_string_to_metric_families(client.get("/metrics").text)
    served = {family.name: [sample.labels.get("le") for sample in family.samples] for family in families}
    for metric in make_metrics(llm.get_stats(), llm.engine.observed):
        if isinstance(metric, Histogram):
            assert list(metric.buckets) == [bound for bound in served.pop(metric.name) if bound]
        else:
            served.pop(metric.name, None)
    others = {name for name in served if not name.startswith(("http_", "process_", "nanovllm:stored_"))}
    assert others == {"nanovllm:engine_info"}


DASHBOARD = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count e2e_request_latency_seconds_sum
    generation_tokens_total inter_token_latency_seconds_bucket inter_token_latency_seconds_count
    inter_token_latency_seconds_sum kv_cache_usage_perc num_requests_running num_requests_waiting prompt_tokens_total
    request_decode_time_seconds_sum request_generation_tokens_bucket request_max_num_generation_tokens_sum
    request_prefill_time_seconds_sum request_prompt_tokens_bucket request_queue_time_seconds_sum request_success_total
    time_to_first_token_seconds_bucket time_to_first_token_seconds_count time_to_first_token_seconds_sum
"""
"""The metrics that vLLM's Grafana dashboard reads, without `vllm:`. The dashboard is
examples/observability/prometheus_grafana/grafana.json of vLLM's commit 4b5c627c23e6690b8987100d1cbf78e34ac14bf9."""


def read_metrics(client):
    """All samples: (name, labels) -> value."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def test_vllms_dashboard_finds_every_metric_that_it_reads(client):
    client.ask(COMPLETIONS, prompt="a", max_tokens=5, n=3, temperature=1, ignore_eos=True)
    served = read_metrics(client)
    for name, value in (("sum", 5), ("count", 1)):
        assert served[(f"nanovllm:request_max_num_generation_tokens_{name}", ("model_name", "tiny"))] == value
    assert served[("process_resident_memory_bytes",)] > 2**20
    found = {name.removeprefix("nanovllm:") for name, *labels in served if ("model_name", "tiny") in labels}
    assert set(DASHBOARD.split()) - found == set()


def test_every_request_is_counted_also_refused_ones(new_client):
    client = new_client({"Authorization": "Bearer k"}, api_keys=("k",), max_requests_per_minute=2, root_path="/llm")
    client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    client.post(f"/llm{COMPLETIONS}", {"prompt": 5.5})
    client.post(COMPLETIONS, {"prompt": "a"})
    client.post(COMPLETIONS, {"prompt": "a"}, headers={"Authorization": "Bearer no"})
    for name in ("tiny", "no/such"):
        client.get(f"/v1/models/{name}")
    for i in range(2):
        client.request("NO-SUCH", f"/no/such/{i}")
    client.request("HEAD", "/health")
    served = read_metrics(client)
    counts = {
        tuple(value for _, value in labels): number
        for (name, *labels), number in served.items()
        if name == "http_requests_total"
    }
    assert counts == {
        (COMPLETIONS, "POST", "200"): 1,
        (COMPLETIONS, "POST", "400"): 1,
        (COMPLETIONS, "POST", "429"): 1,
        (COMPLETIONS, "POST", "401"): 1,
        ("/v1/models/{name}", "GET", "200"): 1,
        ("/v1/models/{name}", "GET", "404"): 1,
        ("none", "none", "404"): 2,
        ("/health", "HEAD", "200"): 1,
    }
    labels = (("handler", COMPLETIONS), ("method", "POST"))
    assert served[("http_request_duration_seconds_count", *labels)] == 4
    assert served[("http_request_duration_seconds_bucket", *labels[:1], ("le", "+Inf"), *labels[1:])] == 4
    assert 0 < served[("http_request_duration_seconds_sum", *labels)] < 60


def test_metrics_say_what_computes(client, llm):
    families = text_string_to_metric_families(client.get("/metrics").text)
    (sample,) = next(family for family in families if family.name == "nanovllm:engine_info").samples
    assert sample.value == 1
    assert sample.labels["description"] == llm.engine.description
    assert sample.labels["tensor_parallel_size"] == "1"


def test_each_request_has_a_line_in_the_log(client, caplog):
    with caplog.at_level(logging.INFO, "nanovllm_extras.serve"):
        answer = client.ask(COMPLETIONS, prompt="y" * 13, max_tokens=5, ignore_eos=True)
        client.post(COMPLETIONS, {"prompt": []})
    served, refused = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        rf"{answer['id']}-0 length: 13 tokens in \(0 cached\), 5 out, first after [\d.]+ ms, then [\d.]+ ms each",
        served,
    )
    assert refused.startswith("POST /v1/completions 400 ")


def test_the_load_is_the_number_of_requests_in_progress(new_client):
    """Oracle: the requests that have been sent. A balancer needs no key."""
    client = new_client(api_keys=("k",))
    headers, body = {"Authorization": "Bearer k"}, {"prompt": "a", "max_tokens": 60, "ignore_eos": True}

    async def work():
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as one:

            async def load():
                return (await one.get("/load")).json()["server_load"]

            assert await load() == 0
            asking = [asyncio.ensure_future(one.post("/v1/completions", json=body, headers=headers)) for _ in range(3)]
            found = set()
            while not all(task.done() for task in asking):
                found.add(await load())
                await asyncio.sleep(0.001)
            assert max(found) == 3
            assert await load() == 0

    asyncio.run(work())


def test_the_tokenizer_is_described_if_the_operator_allows_it(client, new_client, llm):
    assert client.get("/tokenizer_info").status_code == 404
    info = new_client(enable_tokenizer_info=True).get("/tokenizer_info").json()
    tokenizer = llm.engine.tokenizer
    assert (info["tokenizer_class"], info["chat_template"]) == (type(tokenizer).__name__, tokenizer.chat_template)
    assert info["eos_token"] == str(tokenizer.eos_token)
