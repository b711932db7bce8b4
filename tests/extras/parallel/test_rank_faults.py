"""Nothing hangs, and nothing is left behind: each fault of `many_faults.py`, in a driver process of its own.

The sweep plays some of the table once, and `python -m tests.extras.parallel.many_faults 50` all of it again and again.
By default only a pass fails, of ranks that are threads: a process takes seconds to import torch.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import httpx
import pytest

from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.serve.async_llm import AsyncLLM
from tests.conftest import hf_greedy
from tests.extras.failing_request import FailingError, isolating_engine
from tests.extras.parallel import scenarios
from tests.extras.parallel.many_faults import play
from tests.extras.parallel.zygote import MARK, ROOT, Zygote, marked_processes
from tests.extras.serve.real_server import in_thread


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drivers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_TEST_MARKS", str(tmp_path_factory.mktemp("marks")))
        with Zygote(folder) as zygote:
            yield zygote


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Where all temporary files of this test go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("NANOVLLM_TEST_MARKS", str(tmp_path))
    return folder


def until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_one_engine_survives_what_it_can_and_dies_of_the_rest(tiny_checkpoint, own_folder, monkeypatch):
    """An error of a request, ^C in a step, a forked process; then its rank is killed while nothing runs."""
    folder, model = tiny_checkpoint
    truth = [hf_greedy(model, prompt, 8) for prompt in scenarios.PROMPTS]
    seen = []

    def watch(*arguments, **options):
        (private,) = own_folder.iterdir()
        seen.append(private.stat().st_mode & 0o777)
        return popen(*arguments, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", watch)
    llm = LLM(folder, **scenarios.options())
    assert (seen, list(own_folder.iterdir())) == ([0o700], [])
    assert scenarios.tokens_of(llm) == truth
    (pid,) = scenarios.worker_pids()

    def fail(output_token_ids, logits):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scenarios.tokens_of(llm, SamplingParams(temperature=0, max_tokens=8, logits_processors=[fail]))
    assert scenarios.tokens_of(llm) == truth
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        scenarios.tokens_of(llm, scenarios.LONG)
    timer.join()
    assert scenarios.tokens_of(llm) == truth
    assert scenarios.worker_pids() == [pid]
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in scenarios.children())  # and it is not a zombie either
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="make a new one: rank 1 has ended by SIGKILL"):
            scenarios.tokens_of(llm)
    llm.shutdown()
    assert "nanovllm-ranks" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_a_server_whose_rank_dies_in_a_step(with_tokenizer, own_folder, monkeypatch):
    """Running requests get an error, new ones and /health 503."""
    for name in ("NANOVLLM_TEST_FAULT", "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # so that they are as before in the end
    fault = scenarios.Fault("attention", "kill", 60)
    with AsyncLLM(with_tokenizer, **{**scenarios.options(), "skip_tokenizer_init": False}) as llm:
        with in_thread(llm) as server, contextlib.ExitStack() as stack:
            body = {"prompt": "ab", "ignore_eos": True}
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=120))
            statuses = [client.post("/v1/completions", json={**body, "max_tokens": 300}).status_code]
            assert time.monotonic() - fault.wait()["time"] < 60
            statuses.append(client.post("/v1/completions", json=body).status_code)
            statuses.append(client.get("/health").status_code)
        assert scenarios.worker_pids() == []
    assert statuses == [503, 503, 503]


TELLING = ["rank out of memory (RLIMIT_AS)", "^C twice while a call in C hangs", "driver killed in a step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TELLING)
def test_a_fault_ends_well(zygote, tiny_checkpoint, name):
    play(zygote, name, tiny_checkpoint[0])


SCRIPT = """
from nanovllm_extras import LLM, Config, SamplingParams
llm = LLM({model!r}, tensor_parallel_size=2, dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_blocks=64,
          attention_backend="torch", enforce_eager=True)
print(llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids)
"""


@pytest.mark.slow
def test_a_script_without_a_guard(tiny_checkpoint, tmp_path):
    """It comes by stdin, and ends as it would without ranks, and nobody runs it twice."""
    script = SCRIPT.format(model=str(tiny_checkpoint[0]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: tmp_path.name}
    done = subprocess.run(
        [sys.executable, "-"], input=script, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokens = [int(token) for token in re.findall(r"\d+", done.stdout)]
    assert tokens == hf_greedy(tiny_checkpoint[1], [1, 2, 3, 4], 4)
    assert marked_processes(tmp_path.name) == {}


def test_a_pass_that_fails_half_way_ends_the_engine(tiny_checkpoint, rank_threads):
    """Also one that isolates failures: the other ranks wait in a sum that rank 0 will not come to."""
    options = {**scenarios.options(), "model": tiny_checkpoint[0]}
    engine = isolating_engine(Config(**options))

    def fail(*_):
        raise FailingError

    engine.runner.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="rank 0 failed, while others computed with it: Failing"):
            engine.step()
