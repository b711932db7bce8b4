"""`nanovllm chat`: what is typed, what is shown, what the model is told.

Oracles: `llm.chat` for the words of an answer, the engine's own counts for hits of the prefix cache and free blocks, a
scripted server that notes what it is asked, a real terminal (a pty) with the real command in it.

Seen to fail when broken: a turn that is forgotten, or kept twice; the system prompt sent as the user's; an answer that
goes on after Ctrl-C; a chat that ends with it; a block of code that is cut in two; text lost between two drawings; a
pipe that prints anything but the answer.
"""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from nanovllm_extras import TINY_QWEN3, SamplingParams
from nanovllm_extras.terminal import chat_command as chat
from nanovllm_extras.terminal import screen
from nanovllm_extras.terminal.answerers import AnswerError, LocalAnswerer, ServerAnswerer, read_server_stats
from nanovllm_extras.terminal.session import Session
from nanovllm_extras.vllm.engine_args import EngineArgs
from tests.extras.scripted_server import ScriptedServer, running

ROOT = Path(__file__).resolve().parents[3]
QUESTION = "What is paged attention?"
ON_DISK = '{"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/no/kv"}}'


class FakeScreen:
    """What a person types, and all that is shown. A line may be an exception."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.answers, self.notes, self.warnings, self.tables = [], [], [], []
        self.interrupt_after = None

    def ask(self):
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, type):
            raise line
        return line

    def show(self, texts):
        shown = []
        for text in texts:
            shown.append(text)
            if len(shown) == self.interrupt_after:
                raise KeyboardInterrupt
        self.answers.append(shown)

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)

    def show_table(self, rows):
        self.tables.append(dict(rows))


@pytest.fixture(scope="module")
def local():
    return LocalAnswerer(EngineArgs(TINY_QWEN3, num_kv_blocks=256, device="cpu"), {"temperature": 0, "max_tokens": 40})


@pytest.fixture
def server():
    with running(ScriptedServer()) as server:
        yield server


def talk(answerer, *lines, system="", interrupt_after=None):
    screen = FakeScreen(*lines)
    screen.interrupt_after = interrupt_after
    session = Session(answerer, screen, system)
    session.run()
    return session, screen


# ---- an engine of its own


def test_reasoning_is_no_part_of_the_next_prompt(local):
    def num_prompt_tokens(answer):
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, ("a", answer, "b"), strict=True)]
        return next(local.answer(messages)).cost.prompt_tokens

    assert num_prompt_tokens("I look.<think>Hm.</think> Four.<think>So") == num_prompt_tokens("I look. Four.")


def test_two_turns_are_what_llm_chat_says(local):
    session, screen = talk(local, QUESTION, "Why?", "/stats")
    turns = session.conversation.turns
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    assert [turns[0]["content"], turns[2]["content"]] == [QUESTION, "Why?"]
    params = SamplingParams(temperature=0, max_tokens=40)
    for i in (1, 3):
        (expected,) = local._llm.chat(turns[:i], params, use_tqdm=False)
        assert turns[i]["content"] == screen.answers[i // 2][-1] == expected.outputs[0].text
    first, second = session.conversation.costs
    assert len(screen.answers[0]) == first.output_tokens  # it grew token by token
    assert 0 < first.ttft_s < first.duration_s
    # the second prompt begins with the first and its answer; all their full blocks are hits
    assert second.cached_tokens >= (first.prompt_tokens + first.output_tokens) // 16 * 16 - 16 > 0
    assert f"{second.cached_tokens} of {second.prompt_tokens} prompt tokens from the prefix cache" in screen.notes[-1]
    (stats,) = screen.tables
    assert stats["answers"] == "2"
    assert f"{first.prompt_tokens + second.prompt_tokens:,}" in stats["tokens read"]
    assert {"engine", "KV blocks", "prefix cache"} <= set(stats)


def test_an_interrupt_ends_the_answer_and_frees_its_blocks(local):
    session, screen = talk(local, "word " * 3000, QUESTION, interrupt_after=3)
    assert "2048" in screen.warnings[0], "the chat goes on without a prompt that is too long"
    assert "interrupted" in screen.notes
    stats = local._llm.get_stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_kv_blocks)
    question, answer = session.conversation.turns
    assert question["content"] == QUESTION
    assert session.conversation.costs[0].output_tokens == 3
    assert session.conversation.costs[0].finish_reason is None
    assert answer["content"] != ""


# ---- saved conversations


def make_answerer(folder, max_tokens=40):
    extra = {"shared_storage_path": str(folder), "max_bytes": 1 << 28}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    engine_args = EngineArgs(TINY_QWEN3, num_kv_blocks=256, device="cpu", kv_transfer_config=transfer)
    return LocalAnswerer(engine_args, {"temperature": 0, "max_tokens": max_tokens})


def read_counts(note):
    """(messages, tokens in the store, tokens) of a line about a saved conversation."""
    return tuple(map(int, re.fullmatch(r"\w+ a: (\d+) messages; K and V of (\d+) of (\d+) tokens .*", note).groups()))


def test_a_conversation_goes_on_in_another_engine_without_computing_its_prompt_again(tmp_path):
    first = make_answerer(tmp_path / "kv")
    session, screen = talk(first, QUESTION, "/save a", "/load", "Why?", system="Be brief.")
    _, saved, listed, _ = screen.notes
    num_messages, num_stored, num_tokens = read_counts(saved)
    assert (num_messages, listed) == (3, "saved conversations: a")
    assert num_tokens >= num_stored >= num_tokens - 16 > 16
    second, second_screen = talk(make_answerer(tmp_path / "kv"), "/load a", "Why?")
    assert second.conversation.messages == session.conversation.messages
    assert read_counts(second_screen.notes[0]) == (num_messages, num_stored, num_tokens)
    assert second.conversation.costs[0].cached_tokens >= num_stored
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_conversations_that_cannot_be_saved_or_restored(local, server, tmp_path):
    on_disk = make_answerer(tmp_path / "kv", max_tokens=2)
    lines = ["/save a", QUESTION, "/save", "/save ../a", "/save a", "/reset", "/load b", "/load a/../a", "/load a"]
    session, screen = talk(on_disk, *lines)
    expected = ["nothing to save", "a name is missing", "1 to 100 letters", "a saved conversation, got 'b'", "1 to 100"]
    assert [text in warning for text, warning in zip(expected, screen.warnings, strict=True)] == [True] * 5
    assert len(session.conversation.turns) == 2, "/load a"
    path = tmp_path / "kv" / "conversations" / "a.json"
    path.write_text(path.read_text().replace('"role"', '"rule"'))
    assert "save it again" in talk(on_disk, "/load a")[1].warnings[0]
    on_disk.saved._slots.save("a", [1, 2, 3])
    assert "has no messages" in talk(on_disk, "/load a")[1].warnings[0]
    for line in ("/load", "/load a"):
        assert "--kv-transfer-config" in talk(local, line)[1].warnings[0]
        assert "leave out --url" in talk(ServerAnswerer(server.url, "m", None, {}), line)[1].warnings[0]


# ---- a server


def test_a_server_is_told_the_whole_conversation(server):
    server.usage, server.reasoning = {"prompt_tokens_details": {"cached_tokens": 5}}, ["Hm, ", "well."]
    answerer = ServerAnswerer(server.url + "/v1/", None, "secret", {"temperature": 0.5})
    lines = [
        "",
        "  ",
        "/rest",
        KeyboardInterrupt,
        "/help",
        "/system",
        "a",
        "/system Rhyme.",
        "b",
        "/reset",
        "/system -",
        "c",
    ]
    session, screen = talk(answerer, *lines, "/exit", "never asked", system="Be brief.")
    brief, rhyme = ({"role": "system", "content": text} for text in ("Be brief.", "Rhyme."))
    said = {"role": "assistant", "content": "<think>Hm, well.</think>One two three."}
    asked = [one.body["messages"] for one in server.served if one.path == "/v1/chat/completions"]
    a, b, c = ({"role": "user", "content": text} for text in "abc")
    assert asked == [[brief, a], [rhyme, a, {**said, "content": "One two three."}, b], [c]]
    assert server.served[-1].body["model"] == "scripted"
    assert server.served[-1].body["temperature"] == 0.5
    assert server.served[-1].headers["authorization"] == "Bearer secret"
    assert [(cost.prompt_tokens, cost.cached_tokens, cost.output_tokens) for cost in session.conversation.costs] == [
        (7, 5, 5)
    ] * 3
    assert (screen.answers[0][-1], session.conversation.turns) == (said["content"], [c, said])
    assert "unknown command /rest" in screen.warnings[0]
    assert {"/reset", "/stats", "/system"} <= set(screen.tables[0])
    assert "system prompt: Be brief." in screen.notes
    assert "system prompt: Rhyme." in screen.notes
    assert screen.lines == ["never asked"]


def test_errors_of_the_server_do_not_end_the_chat(server):
    answerer = ServerAnswerer(server.url, None, None, {})
    for name, value, message in (
        ("status", 429, r"as it was told \(HTTP 429\)"),
        ("error_after", 1, "no more"),
        ("break_after", 1, "http://127.*|closed the connection"),
    ):
        usual = getattr(server, name)
        setattr(server, name, value)
        screen = FakeScreen("a")
        Session(answerer, screen).run()
        assert re.search(message, screen.warnings[0])
        setattr(server, name, usual)
        session, screen = talk(answerer, "b")
        assert session.conversation.turns[-1]["content"] == "One two three."
    with pytest.raises(AnswerError, match="http://127.0.0.1:9/v1/models"):
        ServerAnswerer("http://127.0.0.1:9", None, None, {})


def test_stats_of_a_server(server):
    server.metrics = (
        "# HELP nanovllm:num_requests_running x\n# TYPE nanovllm:num_requests_running gauge\n"
        'nanovllm:num_requests_running{model_name="a"} 3.0\nnanovllm:num_requests_running{model_name="b"} 1.0\n'
        "nanovllm:num_requests_waiting 2.0\nnanovllm:kv_cache_usage_perc 0.125\npython_gc_objects_total 9\n"
        "nanovllm:prefix_cache_queries_total 1e3\nnanovllm:prefix_cache_hits_total 2.5e2\n"
    )
    _, screen = talk(ServerAnswerer(server.url, None, None, {}), "/stats")
    (stats,) = screen.tables
    assert stats["requests"] == "4 running, 2 waiting"
    assert stats["KV cache"] == "12.5% in use"
    assert stats["prefix cache"].startswith("25%")
    assert read_server_stats("nothing of it") == {}


# ---- lines


# ---- the screen

TEXT = """Blocks:

1. one
2. two

   still two

```python
a = 1


b = 2
```

The end, *slanted*."""


def make_console():
    return Console(file=io.StringIO(), force_terminal=True, width=60, height=12, color_system=None)


def visible(console):
    """What a terminal shows in the end: the cursor's moves and erasures are carried out."""
    lines, row = [""], 0
    for piece in re.split(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)", console.file.getvalue()):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith(("\x1b", "\r")):
            lines[row] += piece
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("text", ["<think>Hm.\n\nWell.</think>\n\n" + TEXT, "", "word " * 60])
def test_a_growing_answer_ends_as_the_whole_answer(monkeypatch, text):
    console, whole = make_console(), make_console()
    monkeypatch.setattr(screen, "REDRAW_S", 0.0)
    with screen.GrowingMarkdown(console) as growing:
        for i in range(len(text)):
            growing.update(text[: i + 1])
    whole.print(screen.render(text))
    words = [line for line in visible(console) if line]
    assert words == [line.rstrip() for line in visible(whole) if line.strip()]


def test_blocks_that_are_finished():
    for finished, rest in (
        ("", "one\n\n"),
        ("one\n\n", "t"),
        ("one\n \ntwo\n\n", "three"),
        ("", "1. a\n\n   b"),
        ("", "```\na\n\nb"),
        ("```\na\n\nb\n```\n\n", "c"),
        ("a\n\n", "```\nb\n\nc"),
        ("", "<think>a\n\nb"),
        ("<think>a\n\nb</think>\n\n", "c"),
    ):
        text = finished + rest
        assert text[: screen.finished_length(text)] == finished


# ---- the command


def in_pipe(monkeypatch, capsys, question, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    status = chat.main(list(arguments))
    return status, *capsys.readouterr()


def test_in_a_pipe_the_answer_alone_is_printed(server, monkeypatch, capsys):
    status, out, err = in_pipe(
        monkeypatch, capsys, "one\ntwo\n", "--url", server.url, "--max-tokens", "9", "--system", "S"
    )
    assert (status, out, err) == (0, "One two three.\n", "")
    assert server.served[-1].body["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one\ntwo"},
    ]
    assert server.served[-1].body["max_tokens"] == 9


def test_in_a_pipe_errors_are_one_line(server, monkeypatch, capsys):
    for question, status, message in (("", 200, "input is empty"), ("a", 500, "as it was told")):
        server.status = status
        code, out, err = in_pipe(monkeypatch, capsys, question, "--url", server.url)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err


def test_in_a_pipe_a_conversation_goes_on(monkeypatch, capsys, local, tmp_path):
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {
        "shared_storage_path": str(tmp_path / "kv")}}  # fmt: skip
    options = ["--num-kv-blocks", "64", "--device", "cpu", "--temperature", "0", "--max-tokens", "20"]
    options += ["--kv-transfer-config", json.dumps(transfer), "--conversation", "a"]
    params = SamplingParams(temperature=0, max_tokens=20)
    messages = [{"role": "system", "content": "Be brief."}]
    for question in (QUESTION, "Why?"):
        messages.append({"role": "user", "content": question})
        (expected,) = local._llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": expected.outputs[0].text})
        status, out, err = in_pipe(monkeypatch, capsys, question, "--system", "Be brief.", *options)
        assert (status, out.rstrip("\n"), err) == (0, expected.outputs[0].text.rstrip("\n"), "")
    saved = json.loads((tmp_path / "kv" / "conversations" / "a.json").read_text())
    assert saved["messages"] == messages


def test_bad_options_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for options, message in (
        (["--url", "http://127.0.0.1:9", "--num-kv-blocks", "9"], "--url"),
        (["--block-size", "0"], "block_size must be"),
        (["--temperature", "-1"], "temperature must be"),
        (["no/such/folder"], "no/such/folder"),
        (["--conversation", "a"], "--kv-transfer-config"),
        (["--conversation", "a", "--url", "http://a"], "--url"),
        (["--conversation", "../a", "--kv-transfer-config", ON_DISK], "`--conversation` must be 1 to 100"),
    ):
        code, out, err = in_pipe(monkeypatch, capsys, QUESTION, *options)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err


def read_until(terminal, pattern, timeout_s=60):
    """What the terminal shows until the pattern has come."""
    text, deadline = "", time.monotonic() + timeout_s
    while not re.search(pattern, text, re.DOTALL):
        assert time.monotonic() < deadline, f"{pattern!r} did not come: {text!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError as error:  # the command has ended
                raise AssertionError(f"{pattern!r} did not come: {text!r}") from error
    return text


def test_a_person_at_a_terminal(server, tmp_path):
    """The command in a terminal: a question, Ctrl-C in mid-answer, another question, the history, the end."""
    server.texts, server.gap = [f"word{i} " for i in range(8000)], 0.005
    terminal, other_end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody here answers where the cursor is
    command = [sys.executable, "-m", "nanovllm_extras", "chat"]
    process = subprocess.Popen([*command, "--url", server.url], stdin=other_end, stdout=other_end, stderr=other_end,
                               env=environment, start_new_session=True, preexec_fn=take_terminal)  # fmt: skip
    os.close(other_end)
    try:
        read_until(terminal, r"exits[.].*>")
        os.write(terminal, b"hello\r")
        read_until(terminal, "word20")
        os.write(terminal, b"\x03")  # Ctrl-C, by way of the terminal
        read_until(terminal, r"interrupted.*>")
        deadline = time.monotonic() + 60
        while not server.served[-1].is_gone:  # its connection is closed
            assert time.monotonic() < deadline
            time.sleep(0.005)
        server.texts = ["done."]
        os.write(terminal, b"again\r")
        read_until(terminal, r"done[.].*tokens.*>")
        os.write(terminal, b"\x04")  # Ctrl-D
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)
    asked = [one.body["messages"] for one in server.served if one.path == "/v1/chat/completions"]
    assert [message["content"] for message in asked[-1][::2]] == ["hello", "again"]
    assert asked[-1][1]["content"].startswith("word0 word1 ")
    assert len(asked[-1][1]["content"].split()) < 4000
    history = (tmp_path / "nanovllm" / "chat_history").read_text()
    assert "+hello" in history
    assert "+again" in history


def take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in what it runs in the background
