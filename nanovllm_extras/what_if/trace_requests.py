"""The requests of a trace: when they arrived, how long prompts and answers were, and which prefixes they shared.

A trace has no texts. The tokens of a prompt are made when the request arrives: an entry of `hash_ids` gives 512 tokens
that only this entry has, so prompts share as many blocks as the service's prompts did. What no entry names is shared
with nobody.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path

from nanovllm.checks import check_int, check_number
from nanovllm_extras.bench.trace_file import HASH_BLOCK_LEN, TraceRequest, iterate_trace
from nanovllm_extras.what_if.requests import Answer, PlannedRequest

MAX_PROMPT = 10_000_000


def plan_trace(path: Path, limit: int | None = None, speed: float = 1.0) -> Iterator[PlannedRequest]:
    """Yield the requests of a trace, one by one; `speed` divides the times between them.

    Raises ValueError with the number of the request if the file is invalid, or not in the order of time.
    """
    check_number("speed", speed, low=0, open_low=True)
    check_int("num_requests", limit, minimum=1, optional=True)
    first: float | None = None
    newest = 0.0
    for i, one in enumerate(iterate_trace(path, limit), 1):
        first = one.arrival_s if first is None else first
        arrival_s = (one.arrival_s - first) / speed
        if arrival_s < newest:
            raise ValueError(f"{path}: request {i} arrives before the one of the line before; sort the file by time")
        newest = arrival_s
        if one.input_len > MAX_PROMPT:  # its tokens would be made before the engine refuses it
            raise ValueError(f"{path}: the prompt of request {i} must have at most {MAX_PROMPT} tokens, got "
                             f"{one.input_len}")  # fmt: skip
        answer = Answer(one.output_len, filler=-i)
        yield PlannedRequest(str(i), make_prompt(one, -i), [answer], arrival_s, arrival_s, one.output_len)


def make_prompt(one: TraceRequest, filler: int) -> "array[int]":
    """Return the tokens of a prompt: two for each entry of `hash_ids`, by turns, then `filler`."""
    prompt = array("i")
    for hash_id in one.hash_ids:
        prompt.extend(array("i", (hash_id & 0x7FFFFFFF, hash_id >> 31 & 0x7FFFFFFF)) * (HASH_BLOCK_LEN // 2))
    del prompt[one.input_len :]
    prompt.extend(array("i", (filler,)) * (one.input_len - len(prompt)))
    return prompt
