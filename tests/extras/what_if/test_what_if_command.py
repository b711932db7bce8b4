"""`nanovllm what-if`: side by side, tables, JSON, own schedulers, traces, and errors that say what to do."""

import json
from pathlib import Path

import pytest

from nanovllm_extras.what_if.command import main

RECORDINGS = Path(__file__).resolve().parents[3] / "docs" / "book" / "recordings"
FRAGMENTATION, PREEMPTION = str(RECORDINGS / "fragmentation.jsonl"), str(RECORDINGS / "preemption.jsonl")
MACHINE = ["--bandwidth", "1e12", "--flops", "1e14", "--weight-bytes", "1e9"]
OWN = """
from nanovllm.scheduler import Scheduler

class LastFirst(Scheduler):
    def add(self, seq):
        super().add(seq)
        self.waiting.sort(key=lambda one: -int(one.request_id))

scheduler_cls = LastFirst
"""


def json_of(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_replay_and_a_change_stand_side_by_side(capsys):
    assert main([FRAGMENTATION]) == 0
    assert "has the steps of the recording" in capsys.readouterr().out
    assert main([FRAGMENTATION, "--block-size", "32"]) == 0
    text = capsys.readouterr().out
    assert "recorded  own options  block_size 32, num_blocks 16" in text
    [steps] = [line.split() for line in text.splitlines() if line.startswith("steps")]
    assert steps[1:] == ["48", "48", "55"]


def test_several_values_make_a_table_of_all_combinations(capsys):
    found = json_of(capsys, FRAGMENTATION, "--block-size", "8,16", "--prefix-caching", "on,off")
    changes = [one["changes"] for one in found["runs"][1:]]
    assert changes == [{"block_size": size, "enable_prefix_caching": on} for size in (8, 16) for on in (True, False)]
    assert [one["options"]["num_blocks"] for one in found["runs"]] == [128, 64, 64, 32, 32]
    assert main([FRAGMENTATION, "--block-size", "4,8,16"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["recorded", "own options"]
    assert [line.partition(",")[0] for line in lines[3:]] == ["block_size 4", "block_size 8", "block_size 16"]


def test_no_times_are_shown_if_the_clock_is_wrong(capsys):
    """The clock of this recording errs by more than 20 %."""
    found = json_of(capsys, PREEMPTION, "--num-blocks", "11")
    assert found["clock"]["mean_error"] > 0.2
    names = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "time_s")
    assert all(one["figures"][name] is None for one in found["runs"] for name in names)
    assert all(found["recorded"][name] > 0 for name in names)
    found = json_of(capsys, PREEMPTION, "--num-blocks", "11", *MACHINE)
    assert all(one["figures"][name] > 0 for one in found["runs"] for name in names)


def test_a_simulated_run_without_times_gives_none_to_the_next_question(capsys, tmp_path):
    """Its steps follow the clock exactly, so a clock that is fitted to them would look perfect."""
    path = str(tmp_path / "simulated.jsonl")
    assert main([PREEMPTION, "--num-blocks", "11", "-o", path]) == 0
    for arguments in ([path], ["--trace", FRAGMENTATION, "--clock", path]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "simulated run without times" in capsys.readouterr().err
    found = json_of(capsys, path, "--num-blocks", "10", *MACHINE)
    assert found["recorded"]["time_s"] is None
    assert found["runs"][1]["figures"]["preemptions"] == 2


def test_a_scheduler_of_ones_own_decides(capsys, tmp_path):
    extension = tmp_path / "last_first.py"
    extension.write_text(OWN)
    found = json_of(capsys, FRAGMENTATION, "--max-num-seqs", "1", "--extension", str(extension), "-o",
                    str(tmp_path / "out.jsonl"))  # fmt: skip
    assert found["parts"] == {"scheduler_cls": "LastFirst"}
    events = [
        event
        for line in (tmp_path / "out.jsonl").read_text().splitlines()
        for event in json.loads(line).get("events", [])
    ]
    requests = {event[1]: event[3]["request"] for event in events if event[0] == "add"}
    assert [requests[event[1]] for event in events if event[0] == "admit"] == [str(i) for i in range(9, -1, -1)]


def test_an_error_in_a_scheduler_of_ones_own_keeps_its_traceback(tmp_path):
    extension = tmp_path / "own.py"
    extension.write_text(OWN.replace("super().add(seq)", "self.no_such_list + None"))
    with pytest.raises(AttributeError):
        main([PREEMPTION, "--extension", str(extension)])
    extension.write_text(OWN.replace("super().add(seq)", "None + 1"))
    with pytest.raises(TypeError, match="unsupported operand"):
        main([PREEMPTION, "--extension", str(extension)])


def test_a_recording_never_makes_the_program_import_anything(capsys, tmp_path):
    """Only the command line names an extension."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n" + OWN)
    header, *lines = Path(FRAGMENTATION).read_text().splitlines()
    changed = json.loads(header)
    changed["config"] |= {"extension": str(tmp_path / "own.py"), "scheduler_cls": "own:LastFirst"}
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
    json_of(capsys, str(path), "--num-blocks", "100")
    assert not (tmp_path / "imported").exists()
    json_of(capsys, str(path), "--num-blocks", "100", "--extension", str(tmp_path / "own.py"))
    assert (tmp_path / "imported").exists()


def test_a_trace_takes_a_machine_or_the_clock_of_a_recording(capsys, tmp_path):
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:{46 + i // 4}.6805900,{50 + i},{5 + i % 3}\n" for i in range(20)
    ))  # fmt: skip
    found = json_of(capsys, "--trace", str(trace), "--num-requests", "12", "--block-size", "8,16", *MACHINE)
    assert [one["figures"]["requests"] for one in found["runs"]] == [12, 12]
    found = json_of(capsys, "--trace", str(trace), "--clock", FRAGMENTATION)
    assert found["options"]["num_blocks"] == 128
    assert found["runs"][0]["figures"]["requests"] == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recording, or --trace"),
        ([FRAGMENTATION, "--trace", "x"], "give a recording, or --trace"),
        ([str(RECORDINGS / "states.jsonl")], "states.jsonl: the core's scheduler cannot make this run"),
        (["no_such_file.jsonl"], "no_such_file.jsonl cannot be read"),
        ([FRAGMENTATION, "--block-size", "0"], "block_size must be an integer >= 1, got 0"),
        ([FRAGMENTATION, "--block-size", "1000"], "larger than the pool, which has 512 tokens"),
        ([FRAGMENTATION, "--block-size", "a"], "must be integers such as 8 or 8,16,32, got 'a'"),
        ([FRAGMENTATION, "--prefix-caching", "maybe"], "must be on, off"),
        ([FRAGMENTATION, "--bandwidth", "1e9"], "needs --flops"),
        ([FRAGMENTATION, "--bandwidth", "1e-300", "--flops", "1", "--weight-bytes", "1e300"], "takes inf s"),
        ([FRAGMENTATION, "--clock", FRAGMENTATION], "cannot be combined"),
        ([FRAGMENTATION, "--speed", "2"], "are for --trace"),
        ([FRAGMENTATION, "--block-size", "8,16", "-o", "x.jsonl"], "--output writes one run"),
        ([FRAGMENTATION, "--extension", "nanovllm.observer"], "names none of its own"),
        (["--trace", "no_such_file", *MACHINE], "no_such_file cannot be used"),
        (["--trace", FRAGMENTATION], "give --clock RECORDING, or a machine by hand"),
        ([FRAGMENTATION, "--num-blocks", ",".join(map(str, range(20, 130)))], "make 110 runs"),
    ],
)
def test_errors_say_what_to_do(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
