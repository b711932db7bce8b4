"""`examples/extensions/deadlines.py`: the oracle counts the service of each tenant from what the steps compute."""

import random
from itertools import combinations
from pathlib import Path

import pytest

from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.extension import import_extension
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm_testing.engine_traffic import SMALL, drive

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "deadlines.py"
FairScheduler = import_extension(EXTENSION).FairScheduler
MAX_PROMPT, MAX_TOKENS, MAX_SEQS = 12, 8, 4
BOUND = MAX_PROMPT + 2 * MAX_SEQS * MAX_TOKENS


def make_seq(name, prompt_len, tenant, deadline, max_tokens=MAX_TOKENS):
    params = SamplingParams(max_tokens=max_tokens, extra_args={"tenant": tenant, "deadline": deadline})
    return Sequence(name, [7] * prompt_len, params)


def serve(scheduler_cls, seed):
    """Serve a flood of three tenants. Returns for each step the service of each tenant, and which tenants wait."""
    rng = random.Random(seed)
    scheduler = scheduler_cls(BlockManager(64, 4, enable_prefix_caching=False), MAX_SEQS, 16, 64)
    # A floods the engine first. C is idle at the beginning and between its two floods, and cannot save up service
    arrivals = [(0, "A")] * 240 + [(0, "B")] * 200 + [(100, "C")] * 30 + [(250, "C")] * 30
    # the longest prompts and outputs of each
    lens = {"A": (MAX_PROMPT, 1), "B": (1, MAX_TOKENS), "C": (MAX_PROMPT, MAX_TOKENS)}
    seqs, history, admitted, step_number = [], [], [], 0
    while arrivals or scheduler.running or scheduler.waiting:
        while arrivals and arrivals[0][0] <= step_number:
            tenant = arrivals.pop(0)[1]
            sizes = [rng.randrange((most + 1) // 2, most + 1) for most in lens[tenant]]
            seqs.append(make_seq(str(len(seqs)), sizes[0], tenant, 1000 + rng.randrange(10**6), sizes[1]))
            scheduler.add(seqs[-1])
        step = scheduler.schedule()
        assert not step.preempted
        admitted += [seq for seq in scheduler.running if seq not in admitted]
        scheduler.update(step, [9] * len(step.samples))
        service = dict.fromkeys("ABC", 0)
        for seq in admitted:
            service[seq.sampling_params.extra_args["tenant"]] += seq.num_prompt_tokens
            service[seq.sampling_params.extra_args["tenant"]] += 2 * (len(seq.token_ids) - seq.num_prompt_tokens)
        history.append((service, {seq.sampling_params.extra_args["tenant"] for seq in scheduler.waiting}))
        step_number += 1
    return history, admitted


def largest_lead(history):
    """Return the largest difference of what two tenants receive in any interval in which both always wait."""
    lead = 0
    for one, other in combinations("ABC", 2):
        low = high = None
        for service, waiting in history:
            if not {one, other} <= waiting:
                low = high = None
                continue
            difference = service[one] - service[other]
            low = difference if low is None else min(low, difference)
            high = difference if high is None else max(high, difference)
            lead = max(lead, high - low)
    return lead


@pytest.mark.parametrize("seed", range(4))
def test_no_backlogged_tenant_gets_more_than_the_bound_ahead(seed):
    """The service of two tenants that wait differs by at most twice the bound of their counters in any interval."""
    history, _ = serve(FairScheduler, seed)
    assert largest_lead(history) <= 2 * BOUND
    assert any(waiting == set("ABC") for _, waiting in history), "the third tenant waits beside the others"
    assert largest_lead(serve(Scheduler, seed)[0]) > 2 * BOUND, "first come, first served is not fair"


def test_the_earliest_deadline_of_a_tenant_is_admitted_first():
    scheduler = FairScheduler(BlockManager(64, 4), 1, 16, 64)
    deadlines = [50.0, 10.0, 30.0, 20.0, 40.0]
    for deadline in deadlines:
        scheduler.add(make_seq(str(deadline), 5, "A", deadline, max_tokens=1))
    order = []
    while scheduler.waiting or scheduler.running:
        step = scheduler.schedule()
        order += [float(seq.request_id) for seq in step.samples]
        scheduler.update(step, [9] * len(step.samples))
    assert order == sorted(deadlines)


def test_the_latest_deadline_is_preempted():
    scheduler = FairScheduler(BlockManager(6, 4, enable_prefix_caching=False), 3, 64, 24)
    late, soon, never = [make_seq(str(i), 7, "A", deadline) for i, deadline in enumerate((900.0, 5.0, float("inf")))]
    for seq in (late, never, soon):
        scheduler.add(seq)
    preempted = []
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        preempted += step.preempted
        assert soon not in step.preempted
        scheduler.update(step, [9] * len(step.samples))
    assert preempted[:2] == [never, late]


def test_outputs_are_those_of_the_base_engine():
    """Whatever the order, and with preemption: each request has the tokens that it has in an engine by itself."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 2000) for _ in range(rng.randrange(1, 30))] for _ in range(10)]
    fields = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
    params = [
        SamplingParams(**fields, extra_args={"tenant": rng.choice("AB"), "deadline": float(rng.randrange(99))})
        for _ in prompts
    ]
    llm = LLM(TINY_QWEN3, extension=EXTENSION, **SMALL)
    found = drive(llm.engine, list(zip(prompts, params, strict=True)), rng)
    assert llm.engine.stats.num_preemptions > 0
    base = LLM(TINY_QWEN3, dtype="float32").generate(prompts, SamplingParams(**fields), use_tqdm=False)
    assert [samples[0][1] for samples in found] == [output.outputs[0].token_ids for output in base]


def test_a_deadline_that_is_not_a_number_is_refused():
    scheduler = FairScheduler(BlockManager(6, 4), 3, 64, 24)
    with pytest.raises(ValueError, match="deadline"):
        scheduler.add(make_seq("a", 3, "A", float("nan")))
    assert not scheduler.waiting
