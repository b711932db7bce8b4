"""In which order are sequences served? A number for each, smaller first; earlier arrivals first among equals.

The order decides which sequence is admitted, which gets the budget, and, from its other end, which is preempted. A
policy is a function of the sequence as it arrives, so the order never changes while sequences wait. To add one, write a
function of one line and pass it: `LLM(model, scheduling_policy=lambda seq: -seq.num_prompt_tokens)`.
"""

from collections.abc import Callable

from nanovllm.scheduling.sequence import Sequence

Policy = Callable[[Sequence], float]

SJF_TOKENS_PER_ARRIVAL = 256


def fcfs(seq: Sequence) -> float:
    """First come, first served."""
    return 0


def priority(seq: Sequence) -> float:
    """The request's `priority`, smaller first, as in vLLM. A request waits as long as smaller numbers keep coming."""
    return seq.priority


def sjf(seq: Sequence) -> float:
    """Shortest prompt first, with aging: each later arrival must be 256 tokens shorter to go first.

    So at most num_prompt_tokens / 256 later requests can overtake a request, and no request starves.
    """
    return seq.num_prompt_tokens + SJF_TOKENS_PER_ARRIVAL * seq.arrival


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "sjf": sjf}
