"""`nanovllm COMMAND …`: each command is its module's, and names the extra that it lacks."""

import builtins
import importlib
import sys
import types

import pytest

from nanovllm.extras import commands as entrance


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


@pytest.mark.parametrize("name", [name for name, command in entrance.COMMANDS.items() if command.extra])
def test_a_missing_package_is_named_with_its_extra(name, monkeypatch, capsys):
    """As if only the package's own dependencies were installed."""
    command = entrance.COMMANDS[name]
    import_module = builtins.__import__

    def without_extras(module, *arguments):
        if module.split(".")[0] in ("fastapi", "uvicorn", "prometheus_client", "httpx", "aiohttp"):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module.split(".")[0])
        return import_module(module, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_extras)
    rooms = (
        "nanovllm.extras.serve",
        "nanovllm.extras.terminal",
        "nanovllm.extras.bench",
        "nanovllm.extras.event_stream",
    )
    for loaded in [module for module in sys.modules if module.startswith(rooms)]:
        monkeypatch.delitem(sys.modules, loaded)
    assert entrance.run_command([*name.split(), "--help"]) == 1
    assert f"run pip install 'nanovllm[{command.extra}]'" in capsys.readouterr().err


def test_a_fault_of_our_own_is_not_taken_for_a_missing_package(monkeypatch):
    monkeypatch.setattr(entrance, "COMMANDS", {"x": entrance.Command("nanovllm.no_such_module", "serve", "")})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        entrance.run_command(["x"])


@pytest.mark.parametrize("name", [name for name, command in entrance.COMMANDS.items() if command.extra])
def test_every_command_has_its_module(name):
    module = importlib.import_module(entrance.COMMANDS[name].module)
    assert callable(module.main)


def test_arguments_with_spaces_are_questions(capsys):
    assert entrance.run_command(["Who are you?"]) == 0
    assert "I am the tiny Qwen3 model" in capsys.readouterr().out
