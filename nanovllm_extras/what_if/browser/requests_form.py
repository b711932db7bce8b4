"""Requests that are numbers of a form: lengths, an arrival, a number of samples, and a prefix that all share.

    {"prompt": 40, "answer": 8, "arrival": 0.5, "n": 1, "shared": 32}

The first 32 tokens are those of every other request that shares a prefix. The other tokens are in no other request.
"""

from array import array
from collections.abc import Mapping
from typing import Any

from nanovllm.checks import check_int, check_number
from nanovllm_extras.what_if.clock import Machine
from nanovllm_extras.what_if.options import Options
from nanovllm_extras.what_if.requests import Answer, PlannedRequest

BLOCK_SIZE, MIN_BLOCKS = 16, 64
MAX_REQUESTS = 200
MAX_TOKENS = 50_000
"""Of all requests together: more would take a telephone minutes."""
FIELDS = ("prompt", "answer", "arrival", "n", "shared")
OWN_TOKENS = 1_000_000
"""Tokens of request i begin at i * OWN_TOKENS; smaller ones are those of the shared prefix."""
MODEL = "Qwen3-0.6B on a GPU with 1 TB/s and 100 TFLOP/s"
MACHINE = Machine(bandwidth=1e12, flops=1e14, weight_bytes=1.2e9, kv_bytes_per_token=114_688, step_overhead=1e-3)
"""The clock of such requests. K and V of a token: 28 layers, 8 heads of 128 numbers, two bytes each."""


def plan_requests(rows: object) -> list[PlannedRequest]:
    """Return the requests of a form, in the order of arrival. A bad value raises an error that names its row."""
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_REQUESTS:
        raise ValueError(f"requests must be a list of 1 to {MAX_REQUESTS} requests")
    for i, row in enumerate(rows, 1):
        check_row(f"request {i}", row)
    total = sum(row["prompt"] + row["n"] * row["answer"] for row in rows)
    if total > MAX_TOKENS:
        raise ValueError(f"the requests have {total} tokens; at most {MAX_TOKENS} can be simulated here. For more, "
                         f"use nanovllm what-if --trace")  # fmt: skip
    planned = [plan(i, row) for i, row in enumerate(rows, 1)]
    return sorted(planned, key=lambda one: one.arrival_s)


def check_row(name: str, row: object) -> None:
    """Raise ValueError or TypeError, with `name`, unless the row has all fields and their values are valid."""
    if not isinstance(row, dict) or set(row) != set(FIELDS):
        raise ValueError(f"{name} must have the fields {', '.join(FIELDS)}")
    check_int(f"{name}: prompt", row["prompt"], minimum=1, maximum=MAX_TOKENS)
    check_int(f"{name}: answer", row["answer"], minimum=1, maximum=MAX_TOKENS)
    check_number(f"{name}: arrival", row["arrival"], low=0, high=3600)
    check_int(f"{name}: n", row["n"], minimum=1, maximum=16)
    check_int(f"{name}: shared", row["shared"], minimum=0, maximum=row["prompt"])


def plan(number: int, row: Mapping[str, Any]) -> PlannedRequest:
    first, num_shared = number * OWN_TOKENS, row["shared"]
    prompt = array("i", [*range(num_shared), *range(first + num_shared, first + row["prompt"])])
    answers = [
        Answer(row["answer"], array("i", range(start, start + row["answer"])))
        for start in range(first + row["prompt"], first + row["prompt"] + row["n"] * row["answer"], row["answer"])
    ]
    arrival_s = float(row["arrival"])
    return PlannedRequest(f"r{number}", prompt, answers, arrival_s, arrival_s, row["answer"])


def texts_of(requests: list[PlannedRequest]) -> dict[str, str]:
    """Return a text for each token: `s` of the shared prefix, `p` of a prompt, `a` of an answer."""
    texts: dict[str, str] = {}
    for one in requests:
        texts.update({str(i): "p" if i >= OWN_TOKENS else "s" for i in one.prompt})
        for answer in one.answers:
            texts.update(dict.fromkeys(map(str, answer.token_ids or ()), "a"))
    return texts


def options_for(requests: list[PlannedRequest]) -> Options:
    """Return the options with which such requests run first: a small pool that can hold the longest one."""
    longest = max(len(one.prompt) + len(one.answers) * one.answers[0].num_tokens for one in requests)
    num_blocks = max(MIN_BLOCKS, 2 * -(-longest // BLOCK_SIZE))
    return Options(BLOCK_SIZE, num_blocks, max_num_batched_tokens=256, max_num_seqs=16, max_model_len=2 * MAX_TOKENS)
