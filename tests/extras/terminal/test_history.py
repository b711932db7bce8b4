"""Typed lines are remembered where that is possible, and the chat runs where it is not."""

from prompt_toolkit.history import FileHistory, InMemoryHistory

from nanovllm_extras.terminal.screen import Path, open_history


def test_only_the_user_may_read_the_lines(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert isinstance(open_history(), FileHistory)
    assert (tmp_path / "nanovllm" / "chat_history").stat().st_mode & 0o077 == 0


def test_without_a_home_folder_lines_are_those_of_this_run(monkeypatch, tmp_path):
    def refuse():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert isinstance(open_history(), InMemoryHistory)
    (tmp_path / "nanovllm").write_text("")  # a file in the way
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert isinstance(open_history(), InMemoryHistory)
