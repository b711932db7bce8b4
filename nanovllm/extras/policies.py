"""Other orders of service than first come, first served: `scheduling_policy="priority"` and `"sjf"`.

`queues.py` says what a policy is. Called by `assembly.py`, which looks one up by its name.
"""

from collections.abc import Mapping

from nanovllm.queues import Policy
from nanovllm.sequence import Sequence

SJF_TOKENS_PER_ARRIVAL = 256


def priority(seq: Sequence) -> float:
    """The request's `priority`, smaller first, as in vLLM. A request waits as long as smaller numbers keep coming."""
    return seq.priority


def sjf(seq: Sequence) -> float:
    """Shortest prompt first, with aging: each later arrival must be 256 tokens shorter to go first.

    So at most num_prompt_tokens / 256 later requests can overtake a request, and no request starves.
    """
    return seq.num_prompt_tokens + SJF_TOKENS_PER_ARRIVAL * seq.arrival


POLICIES: Mapping[str, Policy] = {"priority": priority, "sjf": sjf}
