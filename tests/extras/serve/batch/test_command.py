"""`nanovllm run-batch` as users run it, without Ray: options, a whole run, a run that is killed, and runs after it."""

import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.batch import command
from tests.extras.serve.batch.runs import arguments, each_once, read_names, started, wait_for_parts, write_prompts

NUM_ROWS = 40


@pytest.fixture
def main(monkeypatch):
    """The command in this process: what it loads stays for other tests' garbage collection."""
    monkeypatch.setattr(command, "keep_from_collector", lambda: None)
    return command.main


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was_stopped(main, tmp_path, capfd):
    """SIGKILL in the middle of 4 parts. Then every row once, with the texts of an engine offline; then nothing more."""
    write_prompts(tmp_path / "in.jsonl", NUM_ROWS)
    given = arguments(tmp_path, "--max-tokens", 16)
    with started(*given) as process:
        wait_for_parts(process, tmp_path / "out", 1)
        assert "_raylet" not in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"), "Ray is not imported"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = read_names(tmp_path / "out")
    assert 10 <= len(done) < NUM_ROWS
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}

    assert main(given) == 0
    assert f"{NUM_ROWS} rows, of which {len(done)} are done" in capfd.readouterr().out
    assert read_names(tmp_path / "out") == each_once(NUM_ROWS)
    assert {path: path.stat().st_mtime_ns for path in files} == files, "what was done stays as it is"

    rows = pq.read_table(tmp_path / "out").to_pylist()
    with LLM(TINY_QWEN3, device="cpu", num_kv_blocks=512) as llm:
        prompts = [f"What is a block table? {i}" for i in range(NUM_ROWS)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    expected = {f"r{i}": output.outputs[0].text for i, output in enumerate(outputs)}
    assert {row["custom_id"]: row["text"] for row in rows} == expected
    assert {row["completion_tokens"] for row in rows} == {16}

    def load(_):
        raise AssertionError("a run that has nothing to do loads no model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "load", load)
        assert main(given) == 0
    assert f"{NUM_ROWS} rows, of which {NUM_ROWS} are done" in capfd.readouterr().out
    assert read_names(tmp_path / "out") == each_once(NUM_ROWS)


def test_new_rows_of_the_input_are_answered_and_the_others_stay(main, tmp_path, capfd):
    given = arguments(tmp_path, "--max-tokens", 2)
    for num_rows in (3, 5):
        write_prompts(tmp_path / "in.jsonl", num_rows)
        assert main(given) == 0
    assert read_names(tmp_path / "out") == each_once(5)
    assert "5 rows, of which 3 are done" in capfd.readouterr().out
    assert main([*given, "--temperature", "0.5"]) == 1, "answers of two kinds are not mixed"
    assert "choose another folder" in capfd.readouterr().err


def test_bad_command_lines_are_told(main, tmp_path, capsys):
    for given, message in (
        (["--temperature", "1"], "--temperature needs --prompt-column"),
        (["--prompt-column", "p", "--body", "[]"], "--body must be a JSON object"),
        (["--prompt-column", "p", "--body", '{"stream": true}'], "--body must not set stream"),
        (["--rows-per-part", "0"], "at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
    ):
        with pytest.raises(SystemExit):
            main(["-i", str(tmp_path), "-o", str(tmp_path / "out"), *given])
        assert message in capsys.readouterr().err
    assert main(["-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_without_ray_its_extra_is_named(main, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nanovllm_extras.serve.batch.ray_data", raising=False)
    write_prompts(tmp_path / "in.jsonl", 1)
    assert main(arguments(tmp_path, "--replicas", 2)) == 1
    assert "nanovllm[ray]" in capsys.readouterr().err


def test_help_shows_options_of_rows_and_engine(main, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("--replicas", "--prompt-column", "--max-num-seqs", "--tool-call-parser"))
    assert "--port " not in printed
