"""The order in which sequences are served: each policy against a sort by hand, and the bound on overtaking.

What the scheduler makes of an order (admission, budget, victims) is shown in `test_scheduling.py`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import block_manager, scheduler
from nanovllm_extras import LLM, Config
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.ordered_queues import order_queues
from nanovllm_extras.scheduling.policies import SJF_TOKENS_PER_ARRIVAL, priority, sjf
from nanovllm_extras.scheduling.scheduler import Scheduler

REQUESTS = st.lists(st.tuples(st.integers(1, 2000), st.integers(-3, 3)), min_size=1, max_size=12)


def ranks(policy, requests):
    """Requests, (prompt tokens, priority) in order of arrival, in the order in which the scheduler has them wait."""
    queues = Scheduler(BlockManager(3000, 1), 8, 8, 4000, policy)
    for i, (num_tokens, urgency) in enumerate(requests):
        queues.add(Sequence(str(i), [0] * num_tokens, SamplingParams(), priority=urgency))
    return [int(seq.request_id) for seq in queues.waiting]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(REQUESTS)
def test_priority_is_the_smallest_number_first_and_then_arrival(requests):
    assert ranks(priority, requests) == sorted(range(len(requests)), key=lambda i: requests[i][1])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(REQUESTS)
def test_sjf_is_the_shortest_first_and_each_later_arrival_counts_256_tokens(requests):
    assert ranks(sjf, requests) == sorted(range(len(requests)), key=lambda i: requests[i][0] + 256 * i)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(REQUESTS)
def test_overtaking_under_sjf_is_bounded(requests):
    """By how much longer the overtaken prompt is, whatever comes later."""
    order = ranks(sjf, requests)
    for place, i in enumerate(order):
        num_overtaking = sum(other > i for other in order[:place])
        assert num_overtaking <= requests[i][0] / SJF_TOKENS_PER_ARRIVAL


def test_queues_that_are_ordered_later_keep_their_order():
    """Sequences run and wait already, one of them with children, and one is preempted afterwards."""
    core = scheduler.Scheduler(block_manager.BlockManager(40, 4), 4, 64, 100)
    for i in range(5):
        seq = Sequence(str(i), [0] * 5, SamplingParams(n=2, max_tokens=9))
        seq.children = [Sequence(str(i), [0] * 5, SamplingParams(n=2, max_tokens=9), sample_index=1)]
        core.add(seq)
    core.schedule()
    before = [*core.running], [*core.waiting]
    order_queues(core)
    assert ([*core.running], [*core.waiting]) == before
    assert [len(queue) for queue in before] == [4, 3]
    core.add(Sequence("late", [0], SamplingParams()))
    core.waiting.insert(0, core.running.pop())
    order = [seq.request_id for seq in [*core.running, *core.waiting]]
    assert order == ["0", "0", "1", "1", "2", "3", "4", "late"]


# ---- what requests and options make of it


def test_samples_of_a_request_stay_together_in_their_order():
    queues = Scheduler(BlockManager(3000, 1), 8, 8, 4000, sjf)
    samples = [Sequence("a", [0] * 300, SamplingParams(n=3), sample_index=i) for i in range(3)]
    samples[0].children = samples[1:]
    other = Sequence("b", [0], SamplingParams())
    queues.add(samples[0])
    queues.add(other)
    assert sorted([other, *samples[::-1]], key=lambda seq: seq.order) == [other, *samples]


@pytest.mark.parametrize("value", ["lifo", "", "FCFS"])
def test_unknown_policy_is_refused_by_name(value):
    with pytest.raises(ValueError, match=rf"scheduling_policy must be one of fcfs, priority, sjf.*'{value}'"):
        Config("model", scheduling_policy=value)


def make_llm(folder, **options):
    return LLM(folder, dtype="float32", device="cpu", block_size=4, num_kv_blocks=128, max_num_seqs=1, **options)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2]),
        ("priority", [2, 0, 1]),
        ("sjf", [1, 0, 2]),  # 300, 3 + 256, 8 + 512
        (lambda seq: seq.num_prompt_tokens, [1, 2, 0]),
    ],
)
def test_policy_decides_who_is_served_first(tiny_checkpoint, policy, order):
    """Through the engine, one request at a time; by the steps in which they finish."""
    engine = make_llm(tiny_checkpoint[0], scheduling_policy=policy).engine
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for i, (num_tokens, urgency) in enumerate([(300, 0), (3, 5), (8, -1)]):
        engine.add_request(str(i), [i + 1] * num_tokens, params, urgency)
    finished = []
    while engine.has_unfinished_requests():
        finished += [int(output.request_id) for output in engine.step().outputs if output.finished]
    assert finished == order


def test_priority_of_each_prompt_is_passed_through_generate(tiny_checkpoint):
    llm = make_llm(tiny_checkpoint[0], scheduling_policy="priority")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False, priority=[2, 0, 1])
    finished = [output.metrics.finished_time for output in outputs]
    assert sorted(range(3), key=lambda i: finished[i]) == [1, 2, 0]
