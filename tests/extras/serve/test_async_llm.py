"""Many consumers share one engine: each gets its own tokens, those of `transformers`, whatever the others do."""

import asyncio
import gc
import random
import re
import statistics
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from nanovllm_extras import AsyncEngineArgs, RequestOutputKind, SamplingParams
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.serve import async_llm
from nanovllm_extras.serve.async_llm import AsyncLLM, AsyncLLMEngine, EngineDeadError, QueueFullError
from nanovllm_extras.serve.engine_thread import NewRequest
from tests.conftest import hf_greedy

PROMPTS = [[1 + i, 40 + 3 * i, 7, 99 - i, 5] for i in range(8)]
NUM_BLOCKS = 256


def greedy(max_tokens=16, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.fixture(scope="module")
def llm(with_tokenizer):
    with AsyncLLM(with_tokenizer, dtype="float32", num_kv_blocks=NUM_BLOCKS, block_size=4) as llm:
        yield llm
        stats = llm.get_stats()
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (NUM_BLOCKS, 0, 0)


@pytest.fixture
def new_llm(with_tokenizer):
    made = []

    def make(**options):
        made.append(AsyncLLM(with_tokenizer, dtype="float32", num_kv_blocks=NUM_BLOCKS, block_size=4, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    return [hf_greedy(tiny_checkpoint[1], prompt, 40) for prompt in PROMPTS]


class Gate:
    """The engine takes a step only when `allow` lets it; `num_steps` counts them."""

    def __init__(self, llm):
        self._llm, self._step, self._allowed = llm, llm.engine.step, threading.Semaphore(0)
        self.num_steps = 0
        llm.engine.step = self._wait_and_step

    def _wait_and_step(self):
        assert self._allowed.acquire(timeout=60)
        self.num_steps += 1
        return self._step()

    def allow(self, num_steps=1):
        for _ in range(num_steps):
            self._allowed.release()

    def open(self):
        self._llm.engine.step = self._step
        self.allow(1000)


async def tokens_of(stream):
    """Token ids of the last output, after checking that each output begins with the one before."""
    so_far = []
    async for output in stream:
        assert output.outputs[0].token_ids[: len(so_far)] == so_far
        so_far = output.outputs[0].token_ids
    assert output.finished
    return so_far


async def until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.001)


@pytest.fixture
def slow_steps(llm, monkeypatch):
    """A request takes seconds, so that a client of a busy machine leaves before its end."""
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])


def is_idle(llm):
    return llm.get_stats().num_free_blocks == NUM_BLOCKS and not llm.engine.has_unfinished_requests()


# ---- outputs


def test_each_consumer_gets_the_tokens_of_transformers(llm, expected):
    async def main():
        return await asyncio.gather(*[tokens_of(llm.generate(prompt, greedy(40))) for prompt in PROMPTS])

    assert asyncio.run(main()) == expected


def test_vllms_example_of_deltas(with_tokenizer, expected):
    """async_llm_streaming.py, with the import's name changed."""
    sizes = {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": 4, "tensor_parallel_size": 1}
    engine_args = AsyncEngineArgs(model=str(with_tokenizer), dtype="float32", enable_log_requests=False, **sizes)
    engine = AsyncLLMEngine.from_engine_args(engine_args)

    async def stream_response():
        params, token_ids = greedy(output_kind=RequestOutputKind.DELTA), []
        async for output in engine.generate(request_id="stream-1", prompt=PROMPTS[0], sampling_params=params):
            token_ids += output.outputs[0].token_ids
        return token_ids

    try:
        assert engine.engine.config == engine_args.create_engine_config()
        assert asyncio.run(stream_response()) == expected[0][:16]
    finally:
        engine.shutdown()


def test_two_event_loops_at_once(llm, expected):
    results = {}

    def consume(i):
        results[i] = asyncio.run(tokens_of(llm.generate(PROMPTS[i], greedy())))

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: expected[i][:16] for i in range(2)}


def test_without_stream_the_only_output_is_the_last(llm, expected):
    async def main():
        requests = [NewRequest(f"many-{i}", prompt, greedy(), stream=False) for i, prompt in enumerate(PROMPTS)]
        return [output async for output in llm.generate_many(requests)]

    outputs = sorted(asyncio.run(main()), key=lambda output: output.request_id)
    assert all(output.finished for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[:16] for tokens in expected]


def test_long_texts_are_encoded_in_a_thread(new_llm, with_tokenizer, monkeypatch):
    monkeypatch.setattr(async_llm, "LONG", 20)
    llm = new_llm()
    encoded_in = []
    encode = llm.engine.input_processor.encode

    def noted(_, *arguments):
        encoded_in.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(type(llm.engine.input_processor), "encode", noted)
    for length in (20, 21):
        assert asyncio.run(tokens_of(llm.generate("x" * length, greedy(1))))
    consumers = [thread for thread in encoded_in if thread.name != "nanovllm-engine"]
    assert [thread is threading.main_thread() for thread in consumers] == [True, False]


# ---- consumers that leave, or are slow


@pytest.mark.usefixtures("slow_steps")
def test_breaking_out_of_the_loop_aborts(llm):
    async def main():
        async for _ in llm.generate(PROMPTS[0], greedy(200)):
            break
        gc.collect()
        await until(lambda: is_idle(llm))

    before = llm.get_stats()
    asyncio.run(main())
    after = llm.get_stats()
    assert after.num_finished == before.num_finished
    assert after.generation_tokens - before.generation_tokens < 200


@pytest.mark.usefixtures("slow_steps")
def test_abort_by_id_ends_the_stream(llm):
    async def main():
        last = None
        async for output in llm.generate(PROMPTS[0], greedy(200), request_id="x"):
            if last is None:
                await llm.abort("x")
                await llm.abort("unknown")
            last = output
        return last

    output = asyncio.run(main())
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert 1 <= len(output.outputs[0].token_ids) < 200


def test_outputs_merge_until_a_slow_consumer_reads_them(llm, expected):
    gate = Gate(llm)
    gate.allow()

    async def slow():
        num_outputs = 0
        async for output in llm.generate(PROMPTS[0], greedy(40)):
            num_outputs += 1
            if num_outputs == 1:  # all others are served meanwhile, and so is the rest of this request
                gate.open()
                others = await asyncio.gather(*[tokens_of(llm.generate(p, greedy(40))) for p in PROMPTS[1:]])
                await until(lambda: is_idle(llm))
            tokens = output.outputs[0].token_ids
        return num_outputs, tokens, others

    num_outputs, tokens, others = asyncio.run(slow())
    assert num_outputs == 2
    assert [tokens, *others] == expected


@pytest.mark.parametrize("num_read_before", [0, 2])
def test_deltas_merge_until_a_slow_consumer_reads_them(llm, num_read_before):
    """What the consumer reads adds up to the whole, for each of two samples, log-probabilities included."""
    fields = {"n": 2, "seed": 3, "logprobs": 2, "max_tokens": 30, "ignore_eos": True, "prompt_logprobs": 1}

    async def slow():
        params, outputs = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA), []
        inbox = await llm.submit([NewRequest("slow", PROMPTS[0], params)])
        while inbox.unfinished:
            if len(outputs) >= num_read_before:
                await until(lambda: "slow" not in llm._inboxes)
            outputs += await inbox.take()
        return outputs

    async def whole():
        return [output async for output in llm.generate(PROMPTS[0], SamplingParams(**fields))][-1]

    outputs, expected = asyncio.run(slow()), asyncio.run(whole())
    assert outputs[-1].finished
    assert len(outputs) < 30
    assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    for completion in expected.outputs:
        deltas = [one for output in outputs for one in output.outputs if one.index == completion.index]
        assert "".join(one.text for one in deltas) == completion.text
        assert sum([one.token_ids for one in deltas], []) == completion.token_ids
        assert [list(at) for one in deltas for at in one.logprobs] == [list(at) for at in completion.logprobs]
        assert deltas[-1].finish_reason == "length"


def test_consumers_that_come_and_go_at_random(llm, expected):
    rng = random.Random(7)

    async def consumer(i):
        await asyncio.sleep(rng.random() / 20)
        stream = llm.generate(PROMPTS[i % 8], greedy(40))
        patience = rng.choice([0, 1, 5, 100])
        tokens = []
        async for output in stream:
            assert output.outputs[0].token_ids[: len(tokens)] == tokens
            tokens = output.outputs[0].token_ids
            if patience == 0:
                break
            patience -= 1
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
        await stream.aclose()
        assert tokens == expected[i % 8][: len(tokens)]
        return output.finished

    async def main():
        finished = await asyncio.gather(*[consumer(i) for i in range(30)])
        await until(lambda: is_idle(llm))
        return finished

    finished = asyncio.run(main())
    assert any(finished)
    assert not all(finished)


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": []}, ValueError, "the prompt is empty"),
        ({"prompt": [1], "sampling_params": {"max_tokens": 1}}, TypeError, "must be a SamplingParams"),
        ({"prompt": [1], "sampling_params": SamplingParams(stop_token_ids=[300])}, ValueError, "stop_token_ids"),
        ({"prompt": [1], "priority": "high"}, TypeError, "priority must be an int"),
        ({"prompt": [1], "request_id": 5}, TypeError, "request_id must be a str"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_its_consumer(llm, arguments, error, message):
    async def main():
        await asyncio.gather(
            tokens_of(llm.generate(PROMPTS[0], greedy())), asyncio.wait_for(tokens_of(llm.generate(**arguments)), 60)
        )

    with pytest.raises(error, match=message):
        asyncio.run(main())
    assert asyncio.run(tokens_of(llm.generate(PROMPTS[0], greedy())))


def test_if_one_request_is_refused_none_is_queued(llm):
    before = llm.get_stats().num_requests
    requests = [NewRequest("a", PROMPTS[0], greedy()), NewRequest("b", [], greedy())]
    twins = [NewRequest("a", PROMPTS[0], greedy()), NewRequest("a", PROMPTS[1], greedy())]
    for refused in (requests, twins):
        with pytest.raises(ValueError, match="empty|belongs to an unfinished"):
            asyncio.run(llm.submit(refused))
    assert llm.get_stats().num_requests == before


def test_a_burst_on_an_idle_engine_is_no_queue(new_llm, expected):
    """Requests that the next step can take do not wait; of the others, `max_queued_requests` are queued."""
    llm = new_llm(max_queued_requests=2, max_num_seqs=4)
    gate = Gate(llm)

    async def main():
        consumers = [asyncio.create_task(tokens_of(llm.generate(prompt, greedy(4)))) for prompt in PROMPTS[:6]]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="2 requests wait already, and at most 2 may"):
            await tokens_of(llm.generate(PROMPTS[6], greedy(4)))
        gate.open()
        outputs = await asyncio.gather(*consumers)
        return [*outputs, await tokens_of(llm.generate(PROMPTS[6], greedy(4)))]

    assert asyncio.run(main()) == [tokens[:4] for tokens in expected[:7]]
    assert llm.thread.num_queued == 0


def test_who_has_waited_through_a_step_is_queued_until_it_goes_away(new_llm):
    """Of 256 blocks, two prompts take 250: the third finds no room beside them, though its sequence could join. When
    it is aborted, the next step can take those that come.
    """
    llm = new_llm(max_queued_requests=1)
    gate = Gate(llm)

    async def main():
        consumers = [asyncio.create_task(tokens_of(llm.generate([i] * 500, greedy(4)))) for i in range(1, 4)]
        await asyncio.sleep(0.01)
        gate.allow()
        await until(lambda: gate.num_steps == 1 and llm.thread.num_queued == 1)
        with pytest.raises(QueueFullError, match="1 requests wait already, and at most 1 may"):
            await tokens_of(llm.generate(PROMPTS[0], greedy(4)))
        consumers.pop().cancel()
        await asyncio.sleep(0.01)
        gate.allow()
        await until(lambda: llm.get_stats().num_waiting == llm.thread._num_left == 0)
        consumers += [asyncio.create_task(tokens_of(llm.generate(prompt, greedy(4)))) for prompt in PROMPTS[:2]]
        await asyncio.sleep(0.01)
        gate.open()
        await asyncio.gather(*consumers)

    asyncio.run(main())


def test_max_queued_requests_is_checked(with_tokenizer):
    for value in (0, 1.5):
        with pytest.raises((ValueError, TypeError), match="max_queued_requests must be"):
            AsyncLLM(with_tokenizer, max_queued_requests=value)


# ---- failures


def fail_at_third_step(llm):
    """The error that the third forward pass from now will raise."""
    run, failure = llm.engine.runner.run, RuntimeError("the forward pass has failed")
    batches = []

    def run_or_fail(batch):
        batches.append(batch)
        if len(batches) == 3:
            raise failure
        return run(batch)

    llm.engine.runner.run = run_or_fail
    return failure


def test_a_step_that_fails_fails_its_requests_and_leaves_those_alone_that_only_wait(new_llm, expected):
    llm = new_llm(max_num_seqs=2)
    gate = Gate(llm)
    failure = fail_at_third_step(llm)

    async def main():
        consumers = [asyncio.create_task(tokens_of(llm.generate(prompt, greedy()))) for prompt in PROMPTS]
        await asyncio.sleep(0.01)
        gate.open()
        return await asyncio.wait_for(asyncio.gather(*consumers, return_exceptions=True), 60)

    assert asyncio.run(main()) == [failure] * 2 + [tokens[:16] for tokens in expected[2:]]
    assert is_idle(llm)
    assert asyncio.run(tokens_of(llm.generate(PROMPTS[0], greedy()))) == expected[0][:16]


def test_a_request_that_makes_each_step_fail_fails_in_the_end(new_llm, monkeypatch):
    """Even if it never gets as far as being computed."""
    llm = new_llm()

    def fail(self):
        raise RuntimeError("nothing can be scheduled")

    monkeypatch.setattr(type(llm.engine.scheduler), "schedule", fail)
    with pytest.raises(RuntimeError, match="nothing can be scheduled"):
        asyncio.run(asyncio.wait_for(tokens_of(llm.generate(PROMPTS[0], greedy())), 60))
    monkeypatch.undo()
    assert asyncio.run(tokens_of(llm.generate(PROMPTS[0], greedy(4))))


def test_an_engine_that_cannot_recover_says_that_it_is_dead(new_llm, monkeypatch):
    llm = new_llm()

    def fail():
        raise RuntimeError("lost")

    monkeypatch.setattr(llm.engine, "step", fail)
    monkeypatch.setattr(llm.engine, "recover", fail)

    async def main():
        with pytest.raises(RuntimeError, match="lost"):
            await asyncio.wait_for(tokens_of(llm.generate(PROMPTS[0], greedy())), 60)
        await until(lambda: llm.thread.dead)
        with pytest.raises(EngineDeadError, match="the engine is dead: RuntimeError.'lost'."):
            await asyncio.wait_for(tokens_of(llm.generate(PROMPTS[0], greedy())), 60)
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await llm.call(print)

    asyncio.run(main())


def test_shutdown_fails_the_requests_in_flight(new_llm):
    llm = new_llm()
    thread, step = asyncio.run(llm.call(threading.current_thread)), llm.engine.step
    llm.engine.step = lambda: (time.sleep(0.05), step())[1]  # the request takes 20 s

    async def main():
        consumer = asyncio.create_task(tokens_of(llm.generate(PROMPTS[0], greedy(400))))
        await asyncio.sleep(0.01)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="has been shut down"):
            await asyncio.wait_for(consumer, 60)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="has been shut down; make a new one"):
            await tokens_of(llm.generate(PROMPTS[0], greedy()))

    asyncio.run(main())
    assert not thread.is_alive()


# ---- the thread


def test_calls_are_made_between_steps_in_the_engines_thread(llm):
    async def main():
        thread = await llm.call(threading.current_thread)
        with pytest.raises(ZeroDivisionError):
            await llm.call(lambda: 1 // 0)
        await llm.call(llm.engine.reset_prefix_cache)
        return thread.name

    assert asyncio.run(main()) == "nanovllm-engine"


def test_the_thread_that_steps_has_made_the_engine(new_llm, monkeypatch):
    """So CUDA graphs are recorded where they are replayed."""
    threads, start = [], ModelRunner.start
    monkeypatch.setattr(
        ModelRunner, "start", lambda runner: (threads.append(threading.current_thread()), start(runner))
    )
    llm = new_llm()
    assert threads == [asyncio.run(llm.call(threading.current_thread))]


def test_an_engine_that_cannot_be_made_leaves_no_thread_and_no_memory(new_llm, monkeypatch):
    """Without waiting for Python's collector: the next try needs the memory of the weights."""
    before, runners, start = set(threading.enumerate()), [], ModelRunner.start

    def fail(runner):
        start(runner)
        runners.append(weakref.ref(runner.model))
        raise ValueError("no memory is left")

    monkeypatch.setattr(ModelRunner, "start", fail)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no memory is left"):
            new_llm()
        assert runners[0]() is None
    finally:
        gc.enable()
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_engine_sleeps_and_wakes_at_once(llm):
    """It is not woken in between, however seldom: a request could wait for the next time."""
    asyncio.run(tokens_of(llm.generate(PROMPTS[0], greedy())))
    thread, number = (asyncio.run(llm.call(one)) for one in (threading.get_ident, threading.get_native_id))
    clock = time.pthread_getcpuclockid(thread)  # of this thread alone: other tests leave threads behind

    def has_slept_on():
        before, start = num_sleeps(number), time.clock_gettime(clock)
        time.sleep(0.3)
        return num_sleeps(number) == before and time.clock_gettime(clock) - start < 0.006

    assert any(has_slept_on() for _ in range(20))

    async def first_token_s():
        start = time.perf_counter()
        await tokens_of(llm.generate(PROMPTS[0], greedy(1)))
        return time.perf_counter() - start

    assert statistics.median(asyncio.run(first_token_s()) for _ in range(11)) < 0.15  # as if it looked every 0.3 s


def num_sleeps(thread):
    """How often a thread has gone to sleep so far."""
    text = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8")
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[1])
