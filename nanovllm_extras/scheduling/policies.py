"""Scheduling policies: in which order are sequences served?

A policy gives each sequence a number when it arrives. Smaller numbers go first, and earlier arrivals among equals. The
order decides which sequence is admitted, which gets the budget, and, from its other end, which is preempted. It never
changes while sequences wait. To add a policy, write a function of one line and pass it:
`LLM(model, scheduling_policy=lambda seq: -seq.num_prompt_tokens)`.
"""

from collections.abc import Mapping

from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.ordered_queues import Policy, fcfs

SJF_TOKENS_PER_ARRIVAL = 256


def priority(seq: Sequence) -> float:
    """The request's `priority`, smaller first, as in vLLM. A request waits as long as smaller numbers keep arriving."""
    return seq.priority


def sjf(seq: Sequence) -> float:
    """Shortest prompt first, with aging: each later arrival must be 256 tokens shorter to go first.

    So at most num_prompt_tokens / 256 later requests can overtake a request, and no request starves.
    """
    return seq.num_prompt_tokens + SJF_TOKENS_PER_ARRIVAL * seq.arrival


POLICIES: Mapping[str, Policy] = {"fcfs": fcfs, "priority": priority, "sjf": sjf}
