"""Serve a load with an engine in this process: add each request when it arrives, and step until all have ended.

The load is an open loop, as in `load_generator.py`: a request does not wait for other requests, except for the earlier
turn of its conversation. All times count from the arrival, also if the engine was in a step at that moment.
"""

import gc
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm_extras.bench.compare_workloads import TimedWork
from nanovllm_extras.bench.results import Result

STALL_S = 60.0  # an engine that has requests and computes nothing for this long has lost them

Counted = Mapping[str, int]
COUNTERS = (
    "num_preemptions",
    "prefix_cache_query_tokens",
    "prefix_cache_hit_tokens",
    "kv_tokens_stored",
    "kv_slots_reserved",
)
"""The counters of an engine that a comparison needs."""


class StalledError(RuntimeError):
    """Raised if an engine has unfinished requests, but computes nothing."""


@dataclass
class ServedLoad:
    """What an engine did with a load. Times are in seconds after its start."""

    results: list[Result]
    """Of each request: when it arrived, and when its tokens came."""
    token_ids: list[list[int]]
    counters: dict[str, int] = field(default_factory=dict)


class LoadServer:
    """Serves loads with one engine, each from an empty prefix cache.

    make_params: makes the sampling parameters of a request from its index, the number of tokens and `extra_args`.
    """

    def __init__(
        self,
        engine: Any,
        make_params: Callable[[int, int, Mapping[str, object]], Any],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine = engine
        self.make_params = make_params
        self.clock = clock
        self.sleep = sleep

    def serve(self, load: Sequence[TimedWork], extra_args: Sequence[Mapping[str, object]] | None = None) -> ServedLoad:
        """Serve all requests of a load, and return their times and tokens. `extra_args` has an entry per request."""
        engine = self.engine
        engine.reset()
        if hasattr(engine, "reset_prefix_cache"):  # of the extras, which may keep K and V outside the pool
            engine.reset_prefix_cache()
        params = [
            self.make_params(i, work.output_len, extra_args[i] if extra_args else {}) for i, work in enumerate(load)
        ]
        gc.collect()
        before = read_counters(engine)
        served = self.run(load, params)
        served.counters = {name: value - before[name] for name, value in read_counters(engine).items()}
        return served

    def run(self, load: Sequence[TimedWork], params: Sequence[Any]) -> ServedLoad:
        engine, start = self.engine, self.clock()
        served = ServedLoad([Result(0.0, prompt_tokens=len(one.prompt_token_ids)) for one in load], [[] for _ in load])
        due = [(work.arrival, i) for i, work in enumerate(load) if work.after is None]
        heapq.heapify(due)
        followers: dict[int, list[int]] = {}
        for i, work in enumerate(load):
            if work.after is not None:
                followers.setdefault(work.after, []).append(i)
        last_progress, num_steps = 0.0, -1
        while due or engine.has_unfinished_requests():
            now = self.clock() - start
            while due and due[0][0] <= now:
                arrived, i = heapq.heappop(due)
                served.results[i].sent = arrived
                served.results[i].lag = now - arrived
                engine.add_request(str(i), {"prompt_token_ids": load[i].prompt_token_ids}, params[i])
            if not engine.has_unfinished_requests():
                self.sleep(due[0][0] - now)
                last_progress = self.clock() - start
                continue
            outputs = engine.step()
            now = self.clock() - start
            for output in outputs:
                i = int(output.request_id)
                served.results[i].chunk_times.append(now)
                if output.finished:
                    served.token_ids[i] = list(output.outputs[0].token_ids)
                    served.results[i].output_tokens = len(served.token_ids[i])
                    for follower in followers.get(i, ()):
                        heapq.heappush(due, (now + load[follower].arrival, follower))
            if engine.stats.steps != num_steps:
                num_steps, last_progress = engine.stats.steps, now
            elif now - last_progress > STALL_S:
                names = ", ".join(sorted(engine.requests, key=int)[:5])
                raise StalledError(
                    f"the engine has computed nothing for {STALL_S:g} s, though {len(engine.requests)} requests are "
                    f"unfinished ({names} …): does the scheduler's `schedule` return their chunks?"
                )
        return served


def read_counters(engine: Any) -> dict[str, int]:
    """Return the counters of `COUNTERS` that the engine has."""
    return {name: getattr(engine.stats, name) for name in COUNTERS if hasattr(engine.stats, name)}
