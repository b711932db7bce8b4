"""`nanovllm run-batch --replicas N`: Ray's pool of engines; what dies in the middle, and the runs after it.

Oracles: the rows that readers of Parquet see, counted, and an engine offline for their texts.
"""

import contextlib
import json
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.kernels.cpu.threads import count_cores
from nanovllm_extras.serve.batch import batch_inputs as inputs
from nanovllm_extras.serve.batch import command
from nanovllm_extras.serve.batch.attempts import MAX_ENGINES, Attempt
from nanovllm_extras.serve.batch.parts import Parts
from nanovllm_extras.serve.batch.replica import ReplicaSpec
from nanovllm_extras.serve.batch.rows import Form
from tests.extras.serve.batch.runs import (
    WAIT_S,
    arguments,
    each_once,
    read,
    read_names,
    started,
    wait_for_parts,
    write_prompts,
)
from tests.extras.serve.batch.test_replica import OPTIONS, load_fatal
from tests.extras.serve.ray_server import WITH_RAY

pytestmark = [pytest.mark.slow, WITH_RAY]
NUM_ROWS = 160


@pytest.fixture(scope="module")
def ray_data():
    from nanovllm_extras.serve.batch import ray_data

    return ray_data


def descendants(pid):
    """Of a process, with their command lines."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text(encoding="utf-8").split():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [(int(child), line), *descendants(int(child))]
    return found


def wait_for_replicas(process, folder, num_replicas):
    """Return the processes of the actors as soon as `num_replicas` chunks are being computed."""
    deadline = time.monotonic() + WAIT_S
    while len(list(folder.glob("_attempts/*.json"))) < num_replicas:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = [(pid, line) for pid, line in descendants(process.pid) if "ray::" in line]
    replicas = [pid for pid, line in found if "MapWorker" in line or "Answerer" in line]
    assert replicas, found
    return replicas


@pytest.fixture(scope="module")
def address(ray_data):
    """Of a cluster that outlives the runs that use it, just large enough for an engine with all cores. Ray counts no
    usage, here and in what the tests start.
    """
    from ray.cluster_utils import Cluster

    num_cpus = count_cores(os.sched_getaffinity(0)) + ray_data.SPARE_CPUS
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, "include_dashboard": False})
        yield cluster.address
        cluster.shutdown()


def test_runs_that_are_killed_with_ray_and_without_it_until_one_succeeds(tmp_path, address, monkeypatch, capfd):
    """Of the first run, an actor is killed, which Ray replaces, and then the driver. A run without Ray goes on at once,
    beside processes that the first has left, and is killed too. The third succeeds on a cluster that was there before,
    and Ray deletes its checkpoint. The fourth has nothing to do.
    """
    write_prompts(tmp_path / "in.jsonl", NUM_ROWS)
    given = arguments(tmp_path, "--max-tokens", 40, "--max-in-flight", 2)
    with started(*given, "--replicas", 2) as process:
        os.kill(wait_for_replicas(process, tmp_path / "out", 2)[0], signal.SIGKILL)
        wait_for_parts(process, tmp_path / "out", 2)
        rest = [pid for pid, _ in descendants(process.pid)]
        os.kill(process.pid, signal.SIGKILL)
        with started(*given) as second:  # it waits for the first's writers, whose parts cannot be read before
            num_done = int(re.search(r"of which (\d+) are done", second.stdout.readline())[1])
            wait_for_parts(second, tmp_path / "out", num_done // 10 + 1)
            os.kill(second.pid, signal.SIGKILL)
    wait_until_gone(rest)
    done = read_names(tmp_path / "out")
    assert 0 < num_done < len(done) < NUM_ROWS
    monkeypatch.setattr(command, "keep_from_collector", lambda: None)
    assert command.main([*given, "--replicas", "1", "--ray-address", address]) == 0
    assert f"{NUM_ROWS} rows, of which {len(done)} are done" in capfd.readouterr().out
    assert read_names(tmp_path / "out") == each_once(NUM_ROWS)
    assert not list((tmp_path / "out").glob("_checkpoint/*.pending*"))
    monkeypatch.delattr("ray.init")
    assert command.main([*given, "--replicas", "2"]) == 0
    assert f"of which {NUM_ROWS} are done" in capfd.readouterr().out
    assert read_names(tmp_path / "out") == each_once(NUM_ROWS)

    rows = pq.read_table(tmp_path / "out").to_pylist()
    with LLM(TINY_QWEN3, device="cpu", num_kv_blocks=512) as llm:
        prompts = [f"What is a block table? {i}" for i in range(NUM_ROWS)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    expected = {f"r{i}": output.outputs[0].text for i, output in enumerate(outputs)}
    assert {row["custom_id"]: row["text"] for row in rows} == expected


def wait_until_gone(pids):
    """Nothing of a killed run is left behind."""
    deadline = time.monotonic() + WAIT_S
    while [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_engines_that_die_are_replaced_and_the_row_that_kills_them_gets_an_error(
    with_tokenizer, tmp_path, address, ray_data
):
    """Each actor whose engine is dead ends its process: on the same actor the chunk would fail for ever. The chunk's
    first attempt is over already."""
    lines = [json.dumps({"prompt": [5, 6, 7] if i == 8 else [1 + i] * 5}) for i in range(14)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    form = Form("prompt", None, body={"max_tokens": 3, "temperature": 0})
    batch = inputs.scan(inputs.find_sources([tmp_path / "in.jsonl"]), form, 5)
    with Parts.opened(tmp_path / "out") as parts:
        spec = ReplicaSpec(partial(load_fatal, with_tokenizer), OPTIONS, parts.attempts, parts.run, 5)
        Attempt(parts.attempts, parts.run, [f"in.jsonl:{i}" for i in range(6, 11)])
        ray_data.answer_with_ray(batch, parts, parts.done(), spec, ray_data.Pool(1, 0, address))
        assert (parts.attempts / f"{parts.run}.engines").stat().st_size == 3
        found = {
            name: error and error["code"]
            for path in parts.paths()
            for name, error in zip(read(path, "custom_id"), read(path, "error"), strict=True)
        }
    assert read_names(tmp_path / "out") == {f"in.jsonl:{i + 1}": 1 for i in range(14)}
    assert {name: code for name, code in found.items() if code} == {"in.jsonl:9": "engine_dead"}


def test_an_engine_too_many_ends_the_run(with_tokenizer, tmp_path, address, ray_data):
    """As if a device were lost again and again: the count is of the run, and ends Ray's restarts."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": [5, 6, 7]}), encoding="utf-8")
    batch = inputs.scan(inputs.find_sources([tmp_path / "in.jsonl"]), Form("prompt", None), 5)
    with Parts.opened(tmp_path / "out") as parts:
        spec = ReplicaSpec(partial(load_fatal, with_tokenizer), OPTIONS, parts.attempts, parts.run, 5)
        (parts.attempts / f"{parts.run}.engines").write_bytes(b"." * MAX_ENGINES)
        with pytest.raises(RuntimeError, match="engines have died"):
            ray_data.answer_with_ray(batch, parts, parts.done(), spec, ray_data.Pool(1, 0, address))


def test_a_cluster_that_is_too_small_is_told(monkeypatch, caplog, ray_data):
    """Ray says nothing while it waits."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 3.0})
    for resource, num_needed in (("CPU", 3), ("GPU", 0), ("CPU", 4), ("GPU", 1)):
        ray_data.warn_of_too_few(resource, num_needed)
    assert [record.getMessage() for record in caplog.records] == [
        "the cluster has 3 CPUs, the run needs 4, and waits for them",
        "the cluster has 0 GPUs, the run needs 1, and waits for them",
    ]


def test_a_run_waits_for_writers_of_a_killed_one_and_shuts_out_the_rest(tmp_path, ray_data):
    """As a write task of Ray that outlives its driver for a moment."""

    with Parts.opened(tmp_path) as parts:
        writing, late = ray_data.PartNames(parts), ray_data.PartNames(parts)
    name = writing.get_filename_for_task("uuid", 3)
    begun = time.monotonic()
    timer = threading.Timer(0.3, writing._held.close)
    timer.start()
    with Parts.opened(tmp_path):
        assert time.monotonic() - begun >= 0.3
        with pytest.raises(RuntimeError, match="another run"):
            late.get_filename_for_task("uuid", 4)
    timer.join()
    assert name == "part-uuid-000000000003.parquet"
