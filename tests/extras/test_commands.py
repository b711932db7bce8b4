"""`nanovllm COMMAND …`: each command is its module's, and names the extra that it lacks."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request

import pytest

from nanovllm_extras.cli import commands as entrance
from nanovllm_extras.cli.checkout import describe_source
from nanovllm_extras.machine.printing import say
from tests.core_alone import ROOT


@pytest.fixture
def commands(monkeypatch):
    """Two commands, one of which begins like the other; both note their arguments."""
    calls = []
    for name, module in (("bench", "nanovllm_bench"), ("bench serve", "nanovllm_bench_serve")):
        fake = types.ModuleType(module)
        fake.main = lambda arguments, name=name: calls.append((name, arguments))
        monkeypatch.setitem(sys.modules, module, fake)
    table = {
        "bench serve": entrance.Command("nanovllm_bench_serve", "serve", "measure a server"),
        "bench": entrance.Command("nanovllm_bench", "serve", "measure"),
    }
    monkeypatch.setattr(entrance, "COMMANDS", table)
    return calls


def test_a_command_gets_the_arguments_after_its_words(commands):
    assert entrance.run_command(["bench", "--x", "1"]) == 0
    assert entrance.run_command(["bench", "serve", "--help"]) == 0
    assert commands == [("bench", ["--x", "1"]), ("bench serve", ["--help"])]


def test_what_is_no_command_lists_those_that_are(commands, capsys):
    assert entrance.run_command(["sing"]) == 2
    assert entrance.run_command([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "unknown command 'sing'" in printed.err
    assert printed.err.count("bench serve  measure a server") == 2
    assert entrance.run_command(["--help"]) == 0
    assert "bench serve  measure a server" in capsys.readouterr().out


OPTIONAL = {
    *("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "prometheus_client", "httpx", "pyarrow", "ray"),
    *("prompt_toolkit", "rich", "aiohttp", "matplotlib", "hypothesis", "watchfiles", "playwright", "PIL"),
    *("llguidance", "gguf", "compressed_tensors", "jsonschema"),
}
"""The packages that only extras install."""
WITHOUT_EXTRAS = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(OPTIONAL)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from nanovllm_extras.cli.commands import run_command

for words in map(str.split, sys.argv[1:]):
    try:
        status = run_command(words)
    except SystemExit as end:
        status = end.code
    print("status", status, "of", *words, flush=True)
    print("status", status, "of", *words, file=sys.stderr, flush=True)
"""


def run_without_extras(lines):
    """Run command lines in a process without the optional packages; returns (status, output, errors) of each."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *lines], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = []
    outputs, errors = done.stdout, done.stderr
    for line in lines:
        output, _, outputs = outputs.partition("status ")
        error, _, errors = errors.partition("status ")
        status, _, outputs = outputs.partition(f" of {line}\n")
        errors = errors.partition("\n")[2]
        results.append((int(status), output, error))
    return results


def test_options_are_listed_without_the_packages_of_extras_and_running_names_the_command_that_installs_them():
    """After `pip install -e .` alone: one option that only this command has is in its help, and a wrong one refused."""
    options = {
        "serve": "--max-requests-per-minute",
        "front": "--prefill-timeout",
        "run-batch": "--rows-per-part",
        "chat": "--conversation",
        "bench serve": "--random-input-len",
        "bench compare": "--repeats",
        "learn": "--folder",
        "check": "--load-format",
        "test": "--examples",
        "view": "--perfetto",
        "what-if": "--bandwidth",
    }
    assert options.keys() == entrance.COMMANDS.keys()
    running = {"front": "front --prefill http://a --decode http://b", "run-batch": "run-batch -i a.jsonl -o b"}
    extras = [name for name, command in entrance.COMMANDS.items() if command.extra]
    lines = [f"{name} --help" for name in options]
    lines += [running.get(name, name) for name in extras]
    lines += [f"{running.get(name, name)} --no-such-option" for name in extras]
    results = iter(run_without_extras(["--version", *lines]))
    assert next(results) == (0, f"{entrance.describe_version()}\n", "")
    for name, option in options.items():
        status, output, error = next(results)
        assert (status, error) == (0, "")
        assert output.startswith(f"usage: nanovllm {name} ")
        assert f"{option} " in output
    for name in extras:
        status, output, error = next(results)
        assert (status, output, error.count("\n")) == (1, "", 1)
        assert error.startswith(f"nanovllm {name} needs the package ")
        extra = entrance.COMMANDS[name].extra
        assert error.endswith(f": run {sys.executable} -m pip install 'nanovllm[{extra}]'\n")
    for _ in extras:
        status, output, error = next(results)
        assert (status, output) == (2, "")
        assert "unrecognized arguments: --no-such-option" in error


def test_exercises_are_found_beside_the_package_or_in_the_current_folder(monkeypatch, tmp_path, capsys):
    """An installed package has none: a line says so. `labs` is found again in the folder of a checkout."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    monkeypatch.setattr(
        entrance, "__file__", str(tmp_path / "site-packages" / "nanovllm_extras" / "cli" / "commands.py")
    )
    monkeypatch.chdir(tmp_path)
    assert entrance.run_command(["learn", "list"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "Then run `nanovllm learn`" in printed.err
    assert str(ROOT) not in sys.path
    monkeypatch.chdir(ROOT)
    assert entrance.run_command(["learn", "list", "--folder", str(tmp_path)]) == 0
    assert "remove_one_line" in capsys.readouterr().out
    assert sys.path[0] == str(ROOT)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ('{"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}', "clone https://host/x.git"),
        ('{"url": "file:///home/me/my%20code", "dir_info": {"editable": true}}', "the checkout /home/me/my code."),
        ('{"url": "file:///tmp/nanovllm-1.0-py3-none-any.whl", "archive_info": {}}', "nanovllm-1.0.tar.gz"),
        ("{}", "nanovllm-1.0.tar.gz"),
    ],
)
def test_where_the_package_is_from_is_where_a_checkout_is(record, words):
    assert words in describe_source(record, "1.0")


def test_a_fault_of_our_own_is_not_taken_for_a_missing_package(monkeypatch):
    monkeypatch.setattr(entrance, "COMMANDS", {"x": entrance.Command("nanovllm.no_such_module", "serve", "")})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        entrance.run_command(["x"])


def test_arguments_with_spaces_are_questions(capsys):
    assert entrance.run_command(["Who are you?"]) == 0
    assert "I am the tiny Qwen3 model" in capsys.readouterr().out


# ---- output that cannot be printed


def text_file(number, encoding="utf-8", errors="strict"):
    return open(number, "w", encoding=encoding, errors=errors)  # noqa: SIM115


@pytest.fixture
def closed_pipe():
    """A stream to a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with text_file(writing) as stream:
        yield stream


def test_what_cannot_be_printed_is_dropped(closed_pipe):
    for _ in range(3):
        say("a line", closed_pipe)
    with open("/dev/full", "w", encoding="utf-8") as full:
        say("x" * 100_000, full)
        say("a line", full)
    say("a line", full)  # closed
    say("a line")


@pytest.mark.parametrize("arguments", [["--help"], ["x --help"], ["bench", "serve"]])
def test_a_command_whose_output_is_not_read_ends_quietly(commands, closed_pipe, capsys, monkeypatch, arguments):
    def main(_):
        print("x" * 100_000)
        return 0

    monkeypatch.setattr(sys.modules["nanovllm_bench_serve"], "main", main)
    monkeypatch.setattr("nanovllm.__main__.ask", main)
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    assert entrance.run_command(arguments) == 1
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_told(commands, capsys, monkeypatch):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert entrance.run_command(["--help"]) == 1
        assert capsys.readouterr().err == "nanovllm: the output cannot be written: No space left on device\n"

        def help(_):
            print("usage")
            raise SystemExit(0)

        monkeypatch.setattr(sys.modules["nanovllm_bench_serve"], "main", help)
        with pytest.raises(SystemExit):
            entrance.run_command(["bench", "serve", "--help"])


@pytest.mark.parametrize("words", [[], *(name.split() for name in entrance.COMMANDS)])
def test_help_is_printed_in_any_encoding(words, monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with contextlib.suppress(SystemExit):
            entrance.run_command([*words, "--help"])
    assert "usage: nanovllm" in (tmp_path / "out").read_text(encoding="ascii")


@pytest.mark.slow
def test_a_server_outlives_its_output():
    """Of a closed pipe, with an encoding that lacks characters of the output."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.getcwd()}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm_extras", "serve", "--port", str(port), "--num-kv-blocks", "64"]
    reading, writing = os.pipe()
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment) as process:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        give_up = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                    break
            assert time.monotonic() < give_up
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
        assert process.wait(30) == 0, errors
    assert "Traceback" not in errors
    assert "Error" not in errors
