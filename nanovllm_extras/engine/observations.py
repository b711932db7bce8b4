"""How large the values of the engine's requests were so far: times, and numbers of tokens."""

from bisect import bisect_left
from collections import defaultdict

from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.requests.lazy_outputs import RequestMetrics

LADDER = [float(f"{digits}e{power}") for power in range(-5, 6) for digits in range(10, 100)]
"""0.0001, 0.00011 … 9,900,000: all numbers of two digits. No bound of two digits lies between two of them."""


class Observations:
    """How large the values of ended requests were, in constant memory: seconds, and numbers of tokens.

    `nanovllm_extras/vllm/vllm_metrics.py` makes histograms of them. Most names are those of `RequestMetrics`.
    """

    def __init__(self) -> None:
        # of each name: how many values are at most LADDER[i], but above LADDER[i - 1]; the last, beyond them all
        self.counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(LADDER) + 1))
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.num_ended = {"stop": 0, "length": 0, "abort": 0}

    def observe_request(self, request: Request) -> None:
        """Count a request. Its output tokens are those of all samples; the request for an embedding has none."""
        gives_tokens = request.answer is None or request.answer.gives_tokens
        lengths = [seq.num_output_tokens for seq in request.seqs] if gives_tokens else []
        reason = request.seqs[0].finish_reason
        assert reason is not None
        self.observe(request.make_metrics(), len(request.prompt_token_ids), lengths, reason)

    def observe(self, times: RequestMetrics, num_prompt_tokens: int, lengths: list[int], reason: str) -> None:
        """Count a request. lengths: the numbers of tokens of its samples."""
        self.num_ended[reason] += 1
        self._add("max_output_tokens", max(lengths, default=0))
        self._add("num_prompt_tokens", num_prompt_tokens)
        self._add("num_output_tokens", sum(lengths))
        for name in ("queue_time", "prefill_time", "e2e_latency"):
            self._add(name, getattr(times, name))
        if any(lengths):
            for name in ("ttft", "decode_time", "tpot"):
                self._add(name, getattr(times, name))
            for seconds in times.inter_token_latencies:
                self._add("inter_token_latencies", seconds)

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.counts[name][bisect_left(LADDER, value)] += 1
            self.sums[name] += value
