"""An `LLM` that is used by several threads, in a forked process, or from within a step of its own.

Only one thread at a time can use it: another one is refused at once, and changes nothing. Oracle: an undisturbed LLM.
"""

import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import nanovllm
from nanovllm_extras import LLM, TINY_QWEN3, PoolingParams, SamplingParams
from nanovllm_extras.beam_search.beam_params import BeamSearchParams
from tests.extras.test_forks import what_is_raised_in_a_fork

PROMPTS = [f"Count from {i}" for i in range(3)]
MESSAGES = [{"role": "user", "content": "What is a block table?"}]
REFUSED = "one thread at a time .* AsyncLLM or the server"
KINDS = {"core": nanovllm.LLM, "extras": LLM}


def make(kind):
    return KINDS[kind](TINY_QWEN3, num_kv_blocks=64, attention_backend="torch", device="cpu")


def params(llm, max_tokens=12, **fields):
    kind = SamplingParams if isinstance(llm, LLM) else nanovllm.SamplingParams
    return kind(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm, prompts=PROMPTS, **fields):
    return answers(llm.generate(prompts, params(llm, **fields), use_tqdm=False))


CALLS = {
    "generate": generate,
    "chat": lambda llm: llm.chat(MESSAGES, params(llm), use_tqdm=False),
    "stream": lambda llm: next(llm.stream("A block", params(llm))),
    "abort": lambda llm: llm.engine.abort_request("0"),
    "add_request": lambda llm: llm.engine.add_request("one", "A block", params(llm)),
    "step": lambda llm: llm.engine.step(),
    "reset": lambda llm: llm.engine.reset(),
}
EXTRA_CALLS = {
    "beam_search": lambda llm: llm.beam_search("A block", BeamSearchParams(2, 4)),
    "embed": lambda llm: llm.embed("A block", PoolingParams(), use_tqdm=False),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "shutdown": lambda llm: llm.shutdown(),
    "leave a with-block": lambda llm: llm.__exit__(None, None, None),
}


def calls_of(kind):
    return CALLS if kind == "core" else CALLS | EXTRA_CALLS


@pytest.fixture(scope="module")
def llms():
    return {kind: make(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(llms):
    return {kind: generate(llm) for kind, llm in llms.items()}


def in_another_thread(function, *arguments):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *arguments).result(timeout=60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_thread_is_refused_while_a_stream_is_paused(llms, expected, kind):
    llm = llms[kind]
    stream = llm.stream(PROMPTS[0], params(llm))
    next(stream)
    for call in calls_of(kind).values():
        with pytest.raises(RuntimeError, match=REFUSED):
            in_another_thread(call, llm)
    (*_, last) = stream
    assert answers([last]) == expected[kind][:1]
    assert in_another_thread(generate, llm) == expected[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_thread_is_refused_while_a_step_runs(llms, expected, kind):
    """Also between two steps: the second thread calls whenever the first looks whether work is left."""
    llm, refusals = llms[kind], []

    class Bar:
        def __init__(self, **_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            refuse()

    def refuse():
        for call in calls_of(kind).values():
            with pytest.raises(RuntimeError, match=REFUSED):
                in_another_thread(call, llm)
        refusals.append(kind)

    compute = llm.engine.runner.run

    def computed(batch):
        if len(refusals) < 3:
            refuse()
        return compute(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", computed)
        requests = llm._check(PROMPTS, params(llm))
        assert answers(llm._complete(requests, Bar)) == expected[kind]
    assert len(refusals) == 3 + len(PROMPTS)
    assert generate(llm) == expected[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_of_many_threads_all_are_served_right_or_refused(llms, expected, kind):
    llm, start = llms[kind], threading.Barrier(4)

    def work(_):
        start.wait()
        results = []
        for _ in range(3):
            try:
                results.append(generate(llm))
            except RuntimeError as error:
                results.append(str(error))
        return results

    with ThreadPoolExecutor(4) as executor:
        results = sum(executor.map(work, range(4)), [])
    served = [one for one in results if not isinstance(one, str)]
    assert served
    assert all(one == expected[kind] for one in served)
    assert all("AsyncLLM" in one for one in results if isinstance(one, str))
    assert generate(llm) == expected[kind]


@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_stream_that_ends_while_another_thread_computes_is_aborted_by_that_thread(llms, expected, end):
    """Its requests are gone before the next step, and the step that runs is not disturbed."""
    llm = llms["extras"]
    kept = [llm.stream(PROMPTS[1], params(llm, 500))]
    next(kept[0])
    steps = []
    compute = llm.engine.runner.run

    def close():
        if end == "close":
            kept.pop().close()
        else:
            circle = [kept.pop()]
            circle.append(circle)
            del circle
            gc.collect()

    def computed(batch):
        if not steps:
            in_another_thread(close)
        steps.append(len(llm.engine.requests))
        return compute(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", computed)
        assert generate(llm) == expected["extras"]
    assert steps[0] == 1 + len(PROMPTS)
    assert set(steps[1:]) == {len(PROMPTS)}
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


# ---- from within a step


MAY_BE_CALLED = {"abort", "add_request", "reset", "shutdown", "leave a with-block"}


def test_a_logits_processor_cannot_call_the_engine(llms, expected):
    """It is refused with a sentence that says what to do; the request that catches this gets its own tokens."""
    llm, refusals = llms["extras"], []
    refused = [call for name, call in calls_of("extras").items() if name not in MAY_BE_CALLED]

    def processor(output_token_ids, logits):
        if len(output_token_ids) in (0, 3):
            for call in refused:
                with pytest.raises(RuntimeError, match="call the engine between two steps"):
                    call(llm)
            refusals.append(len(refused))
        return logits

    assert generate(llm, PROMPTS, logits_processors=[processor]) == expected["extras"]
    assert len(refusals) == 2 * len(PROMPTS)
    assert generate(llm) == expected["extras"]


@pytest.mark.parametrize("options", [{}, {"enable_overlap": True}], ids=["plain", "overlap"])
def test_a_logits_processor_may_add_a_request(llms, expected, options):
    """It is computed from the next step on."""
    llm = LLM(TINY_QWEN3, num_kv_blocks=64, attention_backend="torch", device="cpu", **options)
    engine, done = llm.engine, {}

    def processor(output_token_ids, logits):
        if len(output_token_ids) == 3:
            engine.add_request("added", PROMPTS[1], params(llm))
        return logits

    engine.add_request("first", PROMPTS[0], params(llm, logits_processors=[processor]))
    engine.add_request("last", PROMPTS[2], params(llm))
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert answers([done["first"], done["added"], done["last"]]) == expected["extras"]


# ---- the end of an LLM

SHUT_DOWN = "this LLM has been shut down; make a new one"


def test_shutdown_within_a_step_as_by_a_signal_handler():
    llm, calls = make("extras"), []

    def processor(output_token_ids, logits):
        if len(output_token_ids) == 3:
            signal.raise_signal(signal.SIGUSR1)
        return logits

    before = signal.signal(signal.SIGUSR1, lambda *_: (llm.shutdown(), calls.append("shutdown")))
    try:
        with pytest.raises(RuntimeError, match=SHUT_DOWN):
            generate(llm, logits_processors=[processor])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(calls) == {"shutdown"}


@pytest.mark.parametrize("call", ["shutdown", "garbage"])
def test_any_thread_may_shut_down_an_llm_that_nobody_uses(expected, call):
    class Wrapper:
        def __init__(self):
            self.llm, self.itself = make("extras"), self

        def __del__(self):
            self.llm.shutdown()

    wrapper = Wrapper()
    llm = wrapper.llm
    assert generate(llm) == expected["extras"]
    if call == "garbage":
        del wrapper
        in_another_thread(gc.collect)
    else:
        in_another_thread(llm.shutdown)
        llm.shutdown()
    with pytest.raises(RuntimeError, match=SHUT_DOWN):
        generate(llm)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("end", "overlap"), [("close", True), ("collect", False), ("throw", True), ("read", False)])
def test_a_stream_that_ends_after_shutdown(end, overlap):
    """Whoever reads on gets an error. Closing the stream does nothing, and collecting it writes nothing to stderr."""
    llm = LLM(TINY_QWEN3, num_kv_blocks=64, attention_backend="torch", device="cpu", enable_overlap=overlap)
    stream = llm.stream(PROMPTS, params(llm))
    next(stream)
    llm.shutdown()
    if end == "close":
        stream.close()
    elif end == "throw":
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError)
    elif end == "read":
        with pytest.raises(RuntimeError, match=SHUT_DOWN):
            list(stream)
    del stream
    gc.collect()


# ---- a fork during a step


@pytest.mark.parametrize("who", ["another thread", "the thread of the step"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_during_a_step(llms, expected, kind, who):
    """The child is refused at once, whatever locks were held; the parent goes on."""
    llm, raised = llms[kind], []
    compute = llm.engine.runner.run

    def fork():
        raised.append(what_is_raised_in_a_fork(lambda: generate(llm), timeout_s=60))

    def computed(batch):
        if len(raised) < 2:
            in_another_thread(fork) if who == "another thread" else fork()
        return compute(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", computed)
        assert generate(llm) == expected[kind]
    assert len(raised) == 2
    for one in raised:
        assert f"this process was forked from process {os.getpid()}" in one
        assert "spawn" in one
    assert generate(llm) == expected[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_in_a_forked_process(llms, kind):
    """Its next output is refused, and closing it does nothing; in the parent it goes on."""
    llm = llms[kind]
    stream = llm.stream(PROMPTS[0], params(llm))
    first = next(stream)
    assert what_is_raised_in_a_fork(stream.close) == "nothing"
    assert "this process was forked" in what_is_raised_in_a_fork(lambda: next(stream))
    (*_, last) = stream
    assert answers([last])[0][:1] == answers([first])[0]
    assert answers([last]) == [generate(llm)[0]]
