"""Deadlines, and fairness between tenants: the tenant that has received least goes first, then the earliest deadline.

The virtual token counter is from "Fairness in Serving Large Language Models" (Sheng et al. 2024,
https://arxiv.org/abs/2401.00588). Each tenant has a counter of the service that it has received. A prompt token costs
1, charged when the request is admitted; an output token costs OUTPUT_WEIGHT. The next request to be admitted is one of
the tenant with the smallest counter: of these, the one with the earliest deadline. A tenant that was idle starts at the
smallest counter of those that wait, so it cannot save up service.

While two tenants both have waiting requests, their counters differ by at most

    longest prompt + OUTPUT_WEIGHT * max_num_seqs * largest max_tokens

because the tenant that is ahead gets no further request in, and only finishes those that run. If blocks run out, the
running sequence with the latest deadline is preempted. Preempted tokens are computed again without a charge; with many
preemptions the bound does not hold. A late request is still served: nothing is dropped. Each step sorts the queues.

    LLM(model, extension="examples/extensions/deadlines.py")
    nanovllm serve MODEL --extension examples/extensions/deadlines.py
    nanovllm bench compare examples/extensions/deadlines.py

`SamplingParams(extra_args={"tenant": "alice", "deadline": 2.0})`: in seconds from arrival. The default is no deadline.
"""

import math
import time
from collections import Counter

from nanovllm.scheduler import Chunk, Scheduler, Step
from nanovllm.sequence import Sequence

OUTPUT_WEIGHT = 2  # as in the paper: a decode reads all weights for one token


def tenant_of(seq: Sequence) -> str:
    return (seq.sampling_params.extra_args or {}).get("tenant", "")


class FairScheduler(Scheduler):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.service: Counter[str] = Counter()  # the virtual counter of each tenant
        self.last_admitted = ""  # the tenant whose request left the queue last
        self.due: dict[Sequence, float] = {}  # when each unfinished sequence should be done

    def add(self, seq: Sequence) -> None:
        seconds = (seq.sampling_params.extra_args or {}).get("deadline", math.inf)
        if math.isnan(seconds):
            raise ValueError("extra_args['deadline'] must be a number of seconds from arrival, got nan")
        tenant = tenant_of(seq)
        tenants = {tenant_of(one) for one in self.waiting}
        if tenant not in tenants:
            least = min([self.service[one] for one in tenants or {self.last_admitted}])
            self.service[tenant] = max(self.service[tenant], least)
        self.due |= dict.fromkeys((seq, *seq.children), time.monotonic() + seconds)
        super().add(seq)

    def schedule(self) -> Step:
        self.running[:] = self.in_order(self.running)
        return super().schedule()

    def admit_waiting(self, budget: int, chunks: list[Chunk]) -> int:
        new = [seq for seq in self.waiting if seq.num_cached_tokens is None]  # the others were preempted, and have paid
        self.waiting[:] = self.in_order(self.waiting)
        budget = super().admit_waiting(budget, chunks)
        for seq in new:
            if seq.num_cached_tokens is not None:  # admitted
                self.last_admitted = tenant_of(seq)
                self.service[self.last_admitted] += seq.num_prompt_tokens
        return budget

    def in_order(self, seqs: list[Sequence]) -> list[Sequence]:
        """Return sequences as they would be admitted: each one's prompt is charged before the next one is chosen."""
        service = self.service.copy()
        queues: dict[str, list[Sequence]] = {}
        for seq in sorted(seqs, key=self.due.__getitem__, reverse=True):
            queues.setdefault(tenant_of(seq), []).append(seq)
        order: list[Sequence] = []
        while queues:
            tenant = min(queues, key=service.__getitem__)
            order.append(queues[tenant].pop())
            if order[-1].num_cached_tokens is None:
                service[tenant] += order[-1].num_prompt_tokens
            if not queues[tenant]:
                del queues[tenant]
        return order

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, Sequence]]:
        advanced = super().update(step, new_token_ids)
        for _, seq in advanced:
            self.service[tenant_of(seq)] += OUTPUT_WEIGHT
        return advanced

    def choose_victim(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return max(reversed(candidates), key=self.due.__getitem__)  # of equal deadlines, the last one in order

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(seq, finish_reason, stop_reason)
        self.due.pop(seq, None)


scheduler_cls = FairScheduler
extra_args = {"deadline": float, "tenant": str}
