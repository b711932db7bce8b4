"""What happens to a driver of two ranks, from its inside: each scenario is called in a process of its own.

A scenario prints {"seconds": …}, the time from its fault to the error that it becomes; what is expected of it is
asserted. How its process ends, and what it leaves, others look at (`many_faults.py`, `test_rank_faults.py`).
"""

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.machine.dead import EngineDeadError
from tests.extras.parallel.zygote import LIMIT_S

PLANTED = Path(__file__).with_name("planted")
PROMPTS = [[1, 2, 3, 4], [9, 8, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
OPTIONS = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 128, "block_size": 4}
BACKENDS = {"gloo": {"attention_backend": "torch", "enforce_eager": True}, "shared_memory": {}}


def options(size=2, **others):
    backend = BACKENDS[os.environ.get("NANOVLLM_TEST_RANKS", "gloo")]
    return {**OPTIONS, **backend, "tensor_parallel_size": size, **others}


def tokens_of(llm, params=GREEDY):
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]


def children():
    """Process ids of this process, the dead ones that it has not waited for included."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def worker_pids():
    return [pid for pid in children() if is_rank(pid)]


def is_rank(pid):
    try:
        return b"rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


class Fault:
    """A fault that is planted in the other ranks that start from now on."""

    def __init__(self, processor, kind, skip=0):
        self.mark = Path(tempfile.mkdtemp(prefix="mark-", dir=os.environ["NANOVLLM_TEST_MARKS"])) / "mark"
        values = {"processor": processor, "kind": kind, "skip": skip, "mark": str(self.mark)}
        self.environment = {"NANOVLLM_TEST_FAULT": json.dumps(values), "PYTHONPATH": str(PLANTED)}
        os.environ.update(self.environment)

    def remove(self):
        del os.environ["NANOVLLM_TEST_FAULT"]

    def wait(self, timeout_s=60):
        """Until a rank meets the fault; {"time": …, "pid": …}."""
        deadline = time.monotonic() + timeout_s
        while not self.mark.exists():
            assert time.monotonic() < deadline, "no rank has met the fault"
            time.sleep(0.002)
        return json.loads(self.mark.read_text())


def report(seconds, limit_s=LIMIT_S):
    print(json.dumps({"seconds": round(seconds, 4)}), flush=True)
    assert seconds < limit_s, seconds


def expect_dead(call, *reasons):
    """The time of the EngineDeadError that `call` raises; all later calls raise it too."""
    try:
        call()
    except EngineDeadError as error:
        now, said = time.monotonic(), str(error)
    else:
        raise AssertionError("no error")
    assert all(reason in said for reason in reasons), said
    assert "make a new one" in said
    return now


def expect_nothing_left(timeout_s=LIMIT_S):
    """No child, no folder, no thread but this one."""
    begin = time.monotonic()
    while found := (children(), sorted(map(str, Path(tempfile.gettempdir()).iterdir())), threads()):
        if not any(found):
            return
        assert time.monotonic() < begin + timeout_s, found
        time.sleep(0.005)


def threads():
    """Of nanovllm, or that keep the interpreter alive."""
    others = [one for one in threading.enumerate() if one is not threading.main_thread()]
    return [one.name for one in others if not one.daemon or one.name.startswith("nanovllm")]


# ---- another rank fails


def rank_killed_idle(model):
    llm = LLM(model, **options())
    truth = tokens_of(llm)
    begin = time.monotonic()
    os.kill(worker_pids()[0], signal.SIGKILL)
    while children():  # before anybody has asked
        assert time.monotonic() < begin + LIMIT_S
        time.sleep(0.005)
    report(expect_dead(lambda: tokens_of(llm), "rank 1 has ended by SIGKILL") - begin)
    expect_dead(lambda: tokens_of(llm), "rank 1 has ended by SIGKILL")
    llm.shutdown()
    expect_nothing_left()
    with LLM(model, **options()) as llm:
        assert tokens_of(llm) == truth


def rank_fails_in_step(model, processor, kind, *reasons):
    fault = Fault(processor, kind, 7)
    llm = LLM(model, **options())
    params = LONG
    if processor == "reader":
        fault_params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
        call = lambda: [tokens_of(llm, fault_params) for _ in range(10)]  # noqa: E731
    else:
        call = lambda: tokens_of(llm, params)  # noqa: E731
    dead = expect_dead(call, "rank 1", *reasons)
    report(dead - fault.wait()["time"])
    expect_dead(lambda: tokens_of(llm), "rank 1", *reasons)
    expect_nothing_left()  # without a shutdown
    llm.shutdown()
    llm.shutdown()


def rank_fails_at_start(model, processor, kind, *reasons):
    fault = Fault(processor, kind)
    dead = expect_dead(lambda: LLM(model, **options()), "rank 1", *reasons)
    report(dead - fault.wait()["time"])
    expect_nothing_left()
    fault.remove()
    with LLM(model, **options()) as llm:
        tokens_of(llm)
    expect_nothing_left()


# ---- rank 0 fails


def rank_0_fails_in_forward_pass(model, error_name):
    from nanovllm.layers.attention import Attention

    llm = LLM(model, **options())
    truth, forward, begins = tokens_of(llm), Attention.forward, []
    kind = {"RuntimeError": RuntimeError, "MemoryError": MemoryError}[error_name]

    def fail(self, *arguments):
        begins.append(time.monotonic())
        raise kind("planted")

    Attention.forward = fail
    report(expect_dead(lambda: tokens_of(llm), "rank 0 failed", error_name, "planted") - begins[0])
    Attention.forward = forward
    expect_dead(lambda: tokens_of(llm), "rank 0 failed", "planted")
    expect_nothing_left()
    llm.shutdown()
    with LLM(model, **options()) as llm:
        assert tokens_of(llm) == truth


# ---- ^C


def interrupted_in_start(model, when, num_signals):
    """Twice: the second one comes while the start is undone."""
    fault = Fault("load", "wait") if when == "load" else None
    begins = []

    def interrupt():
        if fault is not None:
            fault.wait()
            time.sleep(0.3)  # rank 0 waits, too
        else:
            while not worker_pids():
                time.sleep(0.002)
            time.sleep(0.1)
        begins.append(time.monotonic())
        for _ in range(num_signals):
            os.killpg(0, signal.SIGINT)
            time.sleep(0.01)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):  # the second one may come here
        try:
            LLM(model, **options())
        except KeyboardInterrupt:
            report(time.monotonic() - begins[0])
            thread.join()
        else:
            raise AssertionError("no interrupt")
    expect_nothing_left(4)
    if fault is not None:
        fault.remove()
    with LLM(model, **options()) as llm:
        tokens_of(llm)
    expect_nothing_left()


def interrupted_in_generate(model):
    """Again and again, at any line: the engine is as good as before."""
    with LLM(model, **options()) as llm:
        truth, pids, slowest = tokens_of(llm), worker_pids(), 0.0
        for i in range(20):
            begin = time.monotonic() + 0.01 + 0.003 * i
            timer = threading.Timer(begin - time.monotonic(), os.killpg, (0, signal.SIGINT))
            timer.start()
            try:
                tokens_of(llm, LONG)
            except KeyboardInterrupt:
                slowest = max(slowest, time.monotonic() - begin)
            else:
                raise AssertionError("no interrupt")
            timer.join()
            assert tokens_of(llm) == truth
        report(slowest)
        assert worker_pids() == pids
    expect_nothing_left()


def interrupted_twice_while_a_rank_hangs(model, ranks):
    """The first interrupt waits for the step, the second does not: not even for C code, where ranks share memory."""
    os.environ["NANOVLLM_TEST_RANKS"] = ranks
    fault = Fault("attention", "wait", 9)
    llm = LLM(model, **options())
    begins = []

    def interrupt():
        fault.wait()
        os.killpg(0, signal.SIGINT)
        time.sleep(0.3)
        begins.append(time.monotonic())
        os.killpg(0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        tokens_of(llm, LONG)
    except KeyboardInterrupt:
        report(time.monotonic() - begins[0])
    else:
        raise AssertionError("no interrupt")
    expect_dead(lambda: tokens_of(llm), "KeyboardInterrupt")
    expect_nothing_left()


# ---- the driver ends


def killed(model, when):
    """The driver kills itself."""
    if when == "load":
        fault = Fault("load", "wait")
    elif when == "step":
        fault = Fault("attention", "wait", 9)

    def die():
        if when == "import":
            while not worker_pids():
                time.sleep(0.002)
            time.sleep(0.1)
        else:
            fault.wait()
        print(json.dumps({"killed": time.monotonic()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if when in ("import", "load", "step"):
        threading.Thread(target=die, daemon=True).start()
    engines = []
    thread = threading.Thread(target=lambda: engines.append(LLM(model, **options())))
    thread.start()
    thread.join()  # what it has started stays
    llm = engines[0]
    tokens_of(llm)
    if when == "step":
        tokens_of(llm, LONG)
    if when == "forked":  # a process that holds the sockets lives on
        if os.fork() == 0:
            os.environ.clear()
            time.sleep(1)
            os._exit(0)
        time.sleep(0.1)
    print(json.dumps({"killed": time.monotonic()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def ends(model, how):
    """The script ends, or gives the engine up."""
    llm = LLM(model, **options())
    pids = worker_pids()
    assert len(pids) == 1
    truth = tokens_of(llm)
    begin = time.monotonic()
    if how == "shutdown":
        llm.shutdown()
        assert not worker_pids()
        llm.shutdown()
    elif how == "shutdown after an error":  # whose traceback holds the engine
        try:
            llm.generate([[10**6]], GREEDY, use_tqdm=False)
        except ValueError as error:
            kept = error
        llm.shutdown()
        expect_nothing_left()
        assert kept
    elif how == "del":
        del llm
        gc.collect()
        assert not worker_pids()
    elif how == "with":
        with llm:
            assert tokens_of(llm) == truth
        assert not worker_pids()
    elif how == "exit":
        report(time.monotonic() - begin)
        return
    elif how == "sys.exit in a step":

        def leave(output_token_ids, logits):
            if len(output_token_ids) > 4:
                report(time.monotonic() - begin)
                sys.exit(0)
            return logits

        llm.generate(PROMPTS, SamplingParams(max_tokens=20, logits_processors=[leave]), use_tqdm=False)
        raise AssertionError("no exit")
    report(time.monotonic() - begin)
    expect_nothing_left()


def forks(model):
    """A forked process has no engine, and its end does not end the ranks; nor does it keep them alive."""
    llm = LLM(model, **options())
    truth = tokens_of(llm)
    for leave in (lambda: sys.exit(0), lambda: os._exit(0), lambda: llm.shutdown()):
        if (child := os.fork()) == 0:
            try:
                tokens_of(llm)
            except EngineDeadError as error:
                if "forked" not in str(error):
                    os._exit(2)
                leave()
                gc.collect()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert tokens_of(llm) == truth
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    begin = time.monotonic()
    llm.shutdown()
    took = time.monotonic() - begin
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    report(took)
    expect_nothing_left()
