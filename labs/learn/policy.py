"""Write a scheduling policy: it is run by the engine's own scheduler on fixed traces, and compared with known ones.

Nothing is drawn at random and no time is measured, so a policy has the same score on each machine. A trace is a list of
requests. The scheduler serves them with invented tokens instead of a model, because no policy depends on the tokens.

    wait     steps from a request's arrival to its first token
    score    the wait of a user is the mean of its requests' waits; the score of a trace is the mean over its users, in
             percent of that of first come, first served; the score is the mean over the traces
    starves  a request waits more than `MAX_WAIT` steps
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from labs.learn.answers import describe_error, find_line, load
from labs.learn.chinese_contracts import translate
from labs.learn.exercise import Exercise, dig_holes, make_header
from labs.learn.findings import Drawing, Report
from labs.learn.texts import Language, Text
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm_extras import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.ordered_queues import order_queues

MAX_NUM_SEQS, BUDGET, NUM_BLOCKS, BLOCK_SIZE = 4, 64, 128, 16
MAX_WAIT = 50  # steps
MAX_SCORE = 56.0


class Arrival(NamedTuple):
    """What a policy knows of a request when it arrives. The engine's sequences have some of these names, too."""

    num_prompt_tokens: int
    max_tokens: int
    arrival: int
    """How many requests have arrived before."""
    user: str
    num_earlier: int
    """How many requests of the same user have arrived before."""


class Request(NamedTuple):
    step: int
    """It arrives before this step."""
    num_prompt_tokens: int
    max_tokens: int
    user: str


Policy = Callable[[Arrival], float]


def fcfs(_: Arrival) -> float:
    """First come, first served."""
    return 0


def shortest_first(request: Arrival) -> float:
    return request.num_prompt_tokens


def sjf(request: Arrival) -> float:
    """Shortest prompt first, with aging: each later arrival must be 8 tokens shorter to go first."""
    return request.num_prompt_tokens + 8 * request.arrival


def fair_share(request: Arrival) -> float:
    """The first request of each user, then the second of each, and so on."""
    return request.num_earlier


OURS: Mapping[Text, Policy] = {
    Text("first come, first served", "先来先服务"): fcfs,
    Text("shortest prompt first", "短提示词优先"): shortest_first,
    Text("shortest first with aging", "短的优先，带老化"): sjf,
    Text("fair share of users", "用户之间公平"): fair_share,
}


def make_traces() -> dict[Text, list[Request]]:
    """Return the traces: long prompts among short ones, a user with many requests, and a mixture of both."""
    short = [Request(step, 8 + step % 5, 4, f"u{step}") for step in range(64)]
    long = [Request(step, 300 - step, 4, f"long{step}") for step in (0, 6)]
    busy = [Request(0, 24, 6, "busy") for _ in range(24)] + [Request(2 + 3 * i, 24, 6, f"u{i}") for i in range(10)]
    mixed = [
        Request(
            step,
            10 + 37 * step % 90 + (200 if step % 9 == 4 else 0),
            2 + step % 4,
            "busy" if step % 2 else f"u{step % 5}",
        )
        for step in range(40)
    ]
    return {
        Text("long prompts among short ones", "短提示词中夹着长的"): sorted(short + long, key=lambda one: one.step),
        Text("one user with many requests", "一个用户请求很多"): sorted(busy, key=lambda one: one.step),
        Text("a mixture", "混合"): mixed,
    }


def serve(policy: Policy, trace: list[Request]) -> list[int]:
    """Return the wait of each request, in steps."""
    known: dict[str, Arrival] = {}
    earlier: Counter[str] = Counter()
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(blocks, MAX_NUM_SEQS, BUDGET, 1024)
    order_queues(scheduler, lambda seq: policy(known[seq.request_id]))
    waits: dict[str, int] = {}
    step = num_arrived = 0
    while num_arrived < len(trace) or scheduler.waiting or scheduler.running:
        while num_arrived < len(trace) and trace[num_arrived].step <= step:
            one = trace[num_arrived]
            known[str(num_arrived)] = Arrival(
                one.num_prompt_tokens, one.max_tokens, num_arrived, one.user, earlier[one.user]
            )
            earlier[one.user] += 1
            params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True)
            scheduler.add(Sequence(str(num_arrived), [0] * one.num_prompt_tokens, params))
            num_arrived += 1
        step += 1
        scheduled = scheduler.schedule()
        for seq in scheduled.samples:
            waits.setdefault(seq.request_id, step - trace[int(seq.request_id)].step)
        scheduler.update(scheduled, [0] * len(scheduled.samples))
    return [waits[str(i)] for i in range(len(trace))]


class Result(NamedTuple):
    """How a policy serves the traces."""

    score: float
    scores: list[float]
    """Of each trace."""
    waits: list[list[int]]
    """Of each trace, the wait of each request."""
    starving: list[list[int]]
    """Of each trace, the requests that wait too long."""

    @property
    def longest(self) -> int:
        return max(map(max, self.waits))

    @property
    def passes(self) -> bool:
        return self.score <= MAX_SCORE and not any(self.starving)


def mean_over_users(trace: list[Request], waits: list[int]) -> float:
    by_user: dict[str, list[int]] = defaultdict(list)
    for request, wait in zip(trace, waits, strict=True):
        by_user[request.user].append(wait)
    return mean(mean(each) for each in by_user.values())


def judge(policy: Policy, traces: list[list[Request]], bases: list[list[int]]) -> Result:
    """Serve all traces, and compare the waits with `bases`, those of first come, first served."""
    scores, waits, starving = [], [], []
    for trace, base in zip(traces, bases, strict=True):
        its = base if policy is fcfs else serve(policy, trace)
        scores.append(100 * mean_over_users(trace, its) / mean_over_users(trace, base))
        waits.append(its)
        starving.append([i for i, wait in enumerate(its) if wait > MAX_WAIT])
    return Result(mean(scores), scores, waits, starving)


@dataclass(frozen=True)
class WritePolicy(Exercise):
    """Write the function `my_policy`. It passes with a score of at most `MAX_SCORE` if no request starves."""

    answer: str

    @property
    def solution(self) -> str:
        return self.answer

    def make_starter(self, language: Language) -> str:
        return make_header(self, language) + translate(dig_holes(self.answer, ("my_policy",)), language)

    def check(self, file: Path, language: Language) -> Report:
        policy = getattr(load(file.read_text(encoding="utf-8"), str(file)), "my_policy", None)
        if not callable(policy):
            text = Text("The file has no function `my_policy`.", "文件里没有函数 `my_policy`。")
            return Report(False, text.show(language))
        try:
            contest = Contest(policy)
        except NotImplementedError:
            return Report(False, Text("A function is not written yet.", "还有函数没有写。").show(language))
        except Exception as error:
            where = find_line(error, str(file)).show(language)
            return Report(False, Text("Not yet right.", "还不对。").show(language), [describe_error(error), where])
        result, (mistake, why) = contest.result, contest.explain()
        headline = mistake or Text(f"Score {result.score:.1f}: passed.", f"得分 {result.score:.1f}：通过。")
        return Report(
            passed=mistake is None,
            headline=headline.show(language),
            paragraphs=[why.show(language)],
            drawings=[contest.draw(language)],
            mistake=None if mistake is None else mistake.show(language),
            numbers={"score": result.score, "longest_wait": float(result.longest)},
        )


class Contest:
    """Runs the learner's policy on all traces, checks its numbers, and compares it with others."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.numbers: dict[Arrival, float] = {}
        self.traces = make_traces()
        self.bases = [serve(fcfs, trace) for trace in self.traces.values()]
        self.result = self.judge(self.ask)

    def judge(self, policy: Policy) -> Result:
        return judge(policy, list(self.traces.values()), self.bases)

    def ask(self, request: Arrival) -> float:
        """Return the number that the learner's policy gives, and keep it. TypeError if it is not a number."""
        number = self.policy(request)
        if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
            raise TypeError(f"my_policy must return a number, got {number!r} for {request}")
        self.numbers[request] = number
        return number

    def explain(self) -> tuple[Text | None, Text]:
        """Return the name of what is wrong, or None if the policy passes, and an explanation."""
        result = self.result
        if any(self.policy(request) != number for request, number in reversed(self.numbers.items())):
            return Text("Two runs differ", "两次运行不同"), Text(
                "Asked again, the policy gives another number for the same request. It may depend on the request only, "
                "not on random numbers, the time, or what earlier calls have left behind.",
                "对同一个请求再问一次，策略给出了不同的数。它只能取决于请求，不能取决于随机数、时间，"
                "或以前的调用留下的东西。",
            )
        if result.passes:
            return None, Text(
                f"On average, users wait {result.score:.1f} % as long as with first come, first served; no request "
                f"waits more than {result.longest} steps.",
                f"平均来说，用户的等待是先来先服务的 {result.score:.1f} %；没有请求等待超过 {result.longest} 步。",
            )
        if self.judge(lambda request: -self.policy(request)).passes:
            return Text("The order is reversed", "顺序反了"), Text(
                "Smaller numbers go first. With the sign changed, this policy passes.",
                "数小的在前。把符号反过来，这个策略就能通过。",
            )
        if any(result.starving):
            return explain_starving(result, self.traces)
        if result.waits == self.bases:
            return Text("The same as first come, first served", "和先来先服务一样"), Text(
                "The order is that of arrival in all traces: among equal numbers, the earlier arrival goes first.",
                "在所有 trace 里，顺序都和到达的顺序一样：数相同时，先到的在前。",
            )
        worst, score = max(zip(self.traces, result.scores, strict=True), key=lambda one: one[1])
        return Text("Not yet good enough", "还不够好"), Text(
            f"The score is {result.score:.1f}, and must be at most {MAX_SCORE:g}. It is highest, {score:.1f}, in the "
            f"trace “{worst.en}”.",
            f"得分是 {result.score:.1f}，应不超过 {MAX_SCORE:g}。在“{worst.zh}”这个 trace 里最高，是 {score:.1f}。",
        )

    def draw(self, language: Language) -> Drawing:
        """Return the table of all policies: their scores, and whether a request starves."""
        results = [(name, self.judge(policy)) for name, policy in OURS.items()]
        starves = Text(", starves", "，饿死").show(language)
        lines = ["score   " + " ".join(f"{i:>6}" for i in range(1, len(self.traces) + 1)) + "   wait"]
        for name, one in [*results, (Text("yours", "你的"), self.result)]:
            scores = " ".join(f"{score:6.1f}" for score in one.scores)
            note = starves if any(one.starving) else ""
            lines.append(f"{one.score:5.1f}   {scores}   {one.longest:4}   {name.show(language)}{note}")
        lines += ["", *(f"{i}: {title.show(language)}" for i, title in enumerate(self.traces, 1))]
        title = Text(
            "Score, score of each trace (first come, first served = 100), longest wait in steps",
            "得分、各 trace 的得分（先来先服务 = 100）、最长等待（步）",
        )
        return Drawing(title.show(language), lines)


def explain_starving(result: Result, traces: Mapping[Text, list[Request]]) -> tuple[Text, Text]:
    """Return a name and an explanation that shows the request with the longest wait."""
    wait, i, title = max(
        ((result.waits[k][i], i, title) for k, title in enumerate(traces) for i in result.starving[k]),
        key=lambda one: one[0],
    )
    one = traces[title][i]
    num_later = sum(
        later.step > one.step and later.step + its_wait < one.step + wait
        for later, its_wait in zip(traces[title], result.waits[list(traces).index(title)], strict=True)
    )
    return Text("A request starves", "有请求饿死了"), Text(
        f"In the trace “{title.en}”, a request of user {one.user} with {one.num_prompt_tokens} prompt tokens arrives "
        f"before step {one.step + 1} and waits {wait} steps for its first token; at most {MAX_WAIT} are allowed. "
        f"{num_later} requests that arrived later went first. The number must also depend on `arrival`, so that new "
        "requests cannot overtake it for ever.",
        f"在“{title.zh}”这个 trace 里，用户 {one.user} 的一个请求有 {one.num_prompt_tokens} 个提示词 token，在第 "
        f"{one.step + 1} 步之前到达，等了 {wait} 步才得到第一个 token；最多允许 {MAX_WAIT} 步。有 {num_later} "
        f"个后到的请求"
        "先于它。这个数还应取决于 `arrival`，新请求才不会一直插队。",
    )
