"""Bodies that are as large as they may be, in each field of each request. While one is dealt with, `/health` and a
stream wait at most 100 ms longer than without it, and memory grows by at most four times the body and 64 MiB, which
come back.

Fields come from the server's own schema, so new ones are met here, too. Machines have other things to do: a wait that
is too long is measured again beside a control without a body, and the server is at fault if it never is short enough.

Seen to fail when broken: values that are not counted; prompts and messages that are not; a text that is encoded before
its length is looked at; forms of any size; a body that is parsed twice over; memory that is not given back.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic.json_schema import models_json_schema

from nanovllm_extras.serve.bounds import COSTS
from nanovllm_extras.serve.messages.pooling_protocol import MAX_INPUTS
from nanovllm_extras.serve.messages.responses_input import ITEMS
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.routes.pooling_route import MAX_NUMBERS
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.real_server import in_process

ALLOWED_MS = 100
ALLOWED_MIB = 64
ATTEMPTS = 8
PATIENCE_S = 90  # for all attempts
MIB = 2**20
LIMIT = ServerOptions(("x",)).max_request_bytes
PLACE = '"@here@"'
HIDDEN_SIZE = 256  # the bundled model's


# ---- bodies from the schema


def document():
    """The server's schema, with the items of a response's input, which the server reads one by one."""
    whole, reference = make_app(ServerOptions(("x",))).openapi(), "#/components/schemas/{model}"
    names, definitions = models_json_schema([(one, "validation") for one in ITEMS.values()], ref_template=reference)
    schemas = whole["components"]["schemas"]
    schemas |= definitions["$defs"]
    inputs = schemas["ResponsesRequest"]["properties"]["input"]["anyOf"]
    items = next(one for one in inputs if one.get("type") == "array")
    items["items"] = {"anyOf": list(names.values())}
    return whole


def bodies_of(document):
    """(path of the URL, schema of its body)"""
    for url, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content and url != "/v1/responses/input_tokens":  # it reads the fields of a response
            yield url, content["application/json"]["schema"]


def resolve(document, node):
    while "$ref" in node:
        node = document["components"]["schemas"][node["$ref"].rpartition("/")[2]]
    return node


def branches(document, node):
    """The schemas of a union that are not null."""
    node = resolve(document, node)
    parts = [one for one in node.get("anyOf", node.get("oneOf", [node])) if one.get("type") != "null"]
    return [resolve(document, one) for one in parts]


def smallest(document, node):
    """A small value that a schema allows."""
    node = branches(document, node)[0]
    if "const" in node or "enum" in node:
        return node.get("const", node.get("enum", [None])[0])
    if node.get("type") == "object":
        few = [name for name in ("max_tokens",) if name in node.get("properties", {})]  # what is legal is short
        return {name: smallest(document, node["properties"][name]) for name in [*few, *node.get("required", [])]}
    if node.get("type") == "array":
        return [smallest(document, node["items"])]
    return {"string": "a", "integer": 1, "number": 1.0, "boolean": False}.get(node.get("type"))


@dataclass(frozen=True)
class Place:
    """A field: where it is sent, its name, its schema's branches, and the body around it."""

    url: str
    name: str
    nodes: list = field(hash=False, compare=False)
    before: bytes = b""
    after: bytes = b""

    def body(self, value):
        return self.before + value + self.after


def places(document):
    for url, schema in bodies_of(document):
        yield from places_in(document, url, "", schema, lambda inner: inner, ())


def places_in(document, url, name, schema, wrap, above):
    for node in branches(document, schema):
        key = json.dumps(node, sort_keys=True)
        if key in above:  # a schema within itself
            continue
        if node.get("type") == "array":
            yield from places_in(document, url, name + "[]", node["items"], lambda one: wrap([one]), (*above, key))
        for inner, inner_schema in node.get("properties", {}).items():

            def wrap_inner(one, inner=inner, node=node):
                return wrap({**smallest(document, node), inner: one})

            path = f"{name}.{inner}".lstrip(".")
            body = json.dumps(wrap_inner(json.loads(PLACE)), separators=(",", ":"))
            before, after = body.encode().split(PLACE.encode())
            yield Place(url, path, branches(document, inner_schema), before, after)
            yield from places_in(document, url, path, inner_schema, wrap_inner, (*above, key))


def repeated(item, num_bytes, ends=b"[]"):
    return ends[:1] + (item + b",") * ((num_bytes - 2) // (len(item) + 1)) + item + ends[1:]


def of_keys(num_keys):
    return b"{" + b",".join(b'"%d":1' % i for i in range(num_keys)) + b"}"


def legal_list(document, node, num_bytes):
    """Items that are allowed, as many as a body may hold values."""
    item = json.dumps(smallest(document, node["items"]), separators=(",", ":")).encode()
    cost = 1 + sum(cost * item.count(sign.encode()) for sign, cost in COSTS.items())
    return repeated(item, min(num_bytes, 500_000 // cost * (len(item) + 1)))


def copies(name, times):
    """A schema with a large definition, which is copied to be closed together with other names."""
    large = {"properties": {f"p{i}": {"enum": [f"a{i}", i]} for i in range(500)}}
    many = {f"r{i}": {"properties": {"q": True}, "$ref": "#/$defs/x"} for i in range(times)}
    return json.dumps({"type": "json_schema", name: {"$defs": {"x": large}, "properties": many}}).encode()


MESSAGE, PART = b'{"role":"u","content":""}', b'{"type":"text","text":""}'
THRICE = (
    b'{"input":"a","stream":true,"max_output_tokens":1,"tools":[{"type":"function","name":"f","parameters":{"enum":['
)
BAD_WORDS = b',"max_tokens":1,"bad_words":[' + b",".join(b'"abc def ghi %d"' % i for i in range(256)) + b"]}"
LOGPROBS = b',"n":16,"temperature":1,"max_tokens":100,"ignore_eos":true,"logprobs":true,"top_logprobs":20}'
CALL = MESSAGE[:-1] + b',"tool_calls":[{"function":{"name":"f","arguments":"['


def prompts_of(item, num_items, name=b"prompt"):
    return b'{"%s":[' % name + item + (b"," + item) * num_items + b"]}"


def messages_of(item, num_items):
    return prompts_of(item, num_items, b"messages")


def found():
    """Bodies that once held a server up, each for seconds. {what: (path, body)}"""
    parts = b'{"role":"u","content":[' + PART + (b"," + PART) * 300_000 + b"]}"
    return {
        "allowed tokens": ("completions", b'{"prompt":"a","allowed_token_ids":[' + b"7," * 5_000_000 + b"7]}"),
        "empty messages": ("chat/completions", messages_of(b"{}", 300_000)),
        "messages without text": ("chat/completions", messages_of(MESSAGE, 300_000)),
        "prompts": ("completions", prompts_of(b'"a"', 200_000)),
        "inputs": ("embeddings", prompts_of(b'"a"', 200_000, b"input")),
        "parts": ("chat/completions", messages_of(parts, 0)),
        "token ids": ("../detokenize", b'{"tokens":[' + b"5," * 5_000_000 + b"5]}"),
        "biases": ("completions", b'{"prompt":"a","logit_bias":' + of_keys(1_000_000) + b"}"),
        "empty prompts": ("completions", prompts_of(b'""', 3_000_000)),
        "choices": (
            "completions",
            b'{"prompt":"a","structured_outputs":{"choice":[' + b'"answer",' * 50_000 + b'"b"]}}',
        ),
        "blank lines": ("completions", b'{"prompt":"a","structured_outputs":{"grammar":"' + b"\\n" * 60_000 + b'"}}'),
        "a text": ("completions", b'{"prompt":"' + b"abc " * 3_900_000 + b'"}'),
        "items": ("responses", prompts_of(b"{}", 300_000, b"input")),
        "items without text": ("responses", prompts_of(b'{"role":"user","content":""}', 11_000, b"input")),
        "copied definitions": ("responses", b'{"input":"a","text":{"format":' + copies("schema", 10) + b"}}"),
        "tools that are told thrice": ("responses", THRICE + b"1," * 120_000 + b"1]}}]}"),
        "bad words of many prompts": ("completions", prompts_of(b'"a"', 200)[:-1] + BAD_WORDS),
        "log-probabilities": ("chat/completions", messages_of(MESSAGE, 0)[:-1] + LOGPROBS),
        "JSON in JSON": ("chat/completions", messages_of(CALL + b"{}," * 5_000_000 + b'1]"}}]}', 0)),
    }


def worst(document, place):
    """The values that a field's type suggests: those that are looked at the longest."""
    for node in place.nodes:
        kind = node.get("type")
        if kind == "array":
            yield "legal items", legal_list(document, node, LIMIT - 1000)
        elif kind == "object":
            yield "keys", of_keys(MIB // 20)
        elif kind == "string":
            yield "wide", b'"' + b"a" * (MIB // 4 - 4) + "😀".encode() + b'"'
        else:
            yield "digits", b"1" * (MIB // 4)


# ---- the server, and what it does meanwhile


class Attacked:
    """A server with a bystander."""

    def __init__(self, server, bystander):
        self.server = server
        self.slowest = (0.0, "")
        self.measured = {}
        """By body: the longest waits in ms, and how long its answer took, in the attempt of the shortest wait."""
        self._bystander = bystander

    def waits(self):
        """The longest waits since the last call, in ms."""
        self._bystander.stdin.write("\n")
        self._bystander.stdin.flush()
        waits = json.loads(self._bystander.stdout.readline())
        del waits["start"]  # a stream that begins queues behind the body's prompts; one that runs is computed with them
        return waits

    def post(self, url, body):
        head = (
            f"POST {url} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with self.server.connect() as connection:
            connection.settimeout(120)
            connection.sendall(head.encode() + body)
            return int(connection.recv(4096).split()[1])

    def memory(self, name):
        status = Path(f"/proc/{self.server.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(rf"{name}:\s+(\d+)", status).group(1)) / 1024

    def try_once(self, url, body):
        """(status, what is wrong, or nothing)"""
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")  # reset the peak
        before, start = self.memory("VmRSS"), time.perf_counter()
        self.waits()
        status = self.post(url, body)
        duration = time.perf_counter() - start
        waits, taken = self.waits(), self.memory("VmHWM") - before
        self.last = waits["health"], waits["stream"], 1000 * duration
        most = 4 * len(body) / MIB + ALLOWED_MIB
        if taken > most:
            return status, f"took {taken:.0f} MiB, and may take {most:.0f}"
        if max(waits.values()) <= ALLOWED_MS:
            return status, ""
        time.sleep(duration)
        control = self.waits()  # where it is late itself, it shows how far waits differ for no reason of the server's
        late = {name: wait for name, wait in waits.items() if wait > control[name] + max(ALLOWED_MS, control[name])}
        return status, "".join(
            f"{name} waited {wait:.0f} ms, {control[name]:.0f} without it; " for name, wait in late.items()
        )

    def attack(self, what, url, body):
        """What is wrong at each attempt; nothing if at one nothing is."""
        start = time.perf_counter()
        for attempt in range(ATTEMPTS):
            status, wrong = self.try_once(url, body)
            self.measured[what] = min(self.measured.get(what, self.last), self.last)
            self.slowest = max(self.slowest, (time.perf_counter() - start, what))
            if status >= 500:
                return f"{what}: {status}"
            if not wrong:
                return ""
            if attempt and time.perf_counter() - start > PATIENCE_S:  # once may be another process
                break
        return f"{what}: {wrong}"


@contextlib.contextmanager
def attacked(*options):
    with in_process("--num-kv-blocks", 2048, "--device", "cpu", "--log-level", "error", *options) as server:
        command = [sys.executable, "-S", str(Path(__file__).with_name("bystander.py")), str(server.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bystander:
            try:
                one = Attacked(server, bystander)
                one.post("/v1/completions", b'{"prompt":"a","structured_outputs":{"regex":"a"}}')  # loads the compiler
                time.sleep(0.3)
                yield one
            finally:
                bystander.kill()
        server.wait_until_idle()


def report(capsys, one, num_bodies, seconds, kept, told=()):
    with capsys.disabled():
        slowest, what = one.slowest
        for name in told:
            health, stream, answer = one.measured[name]
            print(
                f"\n{name}: /health waited {health:.0f} ms, a stream {stream:.0f}, answered after {answer:.0f}", end=""
            )
        print(f"\n{num_bodies} bodies in {seconds:.0f} s; slowest {slowest:.2f} s: {what}; {kept:.0f} MiB kept")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.slow
def test_no_field_of_any_request_holds_the_others_up(capsys):
    """First what once did, then each field. What grows after the first is kept: they have loaded all code."""
    schema, bodies, start, wrong = document(), found(), time.perf_counter(), []
    tried = [*{(place.name, str(place.nodes)): place for place in places(schema)}.values()]  # each field once
    assert len(tried) > 100, "the schema was read"
    kinds = {url: json.dumps(body) for url, body in bodies_of(schema)}  # `/rerank` has three URLs, and one kind of body
    assert {kinds[place.url] for place in tried} == set(kinds.values())
    assert {f"input[].{name}" for name in ("role", "arguments", "output", "content[].text")} < {
        place.name for place in tried
    }
    with attacked() as one:
        for what, (path, body) in bodies.items():
            wrong.append(one.attack(what, f"/v1/{path}".replace("/v1/..", ""), body))
        before = settled(one)
        for place in tried:
            for kind, value in worst(schema, place):
                wrong.append(one.attack(f"{place.url} {place.name}: {kind}", place.url, place.body(value)))
        kept = settled(one) - before
        report(capsys, one, len(wrong), time.perf_counter() - start, kept, told=bodies)
    assert "\n".join(filter(None, wrong)) == ""
    assert kept < ALLOWED_MIB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_long_prompts_hold_a_stream_up_for_a_step_and_log_probabilities_for_little_more(capsys):
    """A step is as long as the budget makes it. The bundled model computes 2,048 tokens in 150 to 400 ms."""
    prompts = [[(i * j) % 500 + 300 for j in range(1000)] for i in range(1, 7)]
    with attacked("--max-num-batched-tokens", 128) as one:
        for others in ({"echo": True, "max_tokens": 1}, {"max_tokens": 60}):
            fields = {"prompt": prompts, "ignore_eos": True, "logprobs": 20, **others}
            assert one.attack(str(others), "/v1/completions", json.dumps(fields).encode()) == ""
            report(capsys, one, 1, 0, 0, told=[str(others)])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_as_many_documents_and_numbers_as_allowed_hold_a_stream_up_for_a_step(capsys):
    """Their prompts are made, and their answers written, in pieces or in a thread."""
    documents, vectors = [f"document {i}" for i in range(MAX_INPUTS)], {"task": "token_embed"}
    many = [[(i * j) % 500 + 300 for j in range(1000)] for i in range(1, MAX_NUMBERS // HIDDEN_SIZE // 1000 + 1)]
    bodies = {
        "documents": ("/rerank", {"query": "q", "documents": documents}),
        "pairs": ("/score", {"text_1": documents, "text_2": documents[::-1]}),
        "vectors": ("/pooling", {"input": documents}),
        "vectors of tokens": ("/pooling", {"input": many, **vectors}),
        "in base64": ("/pooling", {"input": many, "encoding_format": "base64", **vectors}),
    }
    with attacked("--max-num-batched-tokens", 128) as one:
        for what, (url, fields) in bodies.items():
            body = json.dumps(fields).encode()
            assert one.post(url, body) == 200, what
            assert one.attack(what, url, body) == ""
        report(capsys, one, len(bodies), 0, 0, told=bodies)


def settled(one):
    """The server's memory when what it needs no more has been given back."""
    time.sleep(0.5)
    return one.memory("VmRSS")
