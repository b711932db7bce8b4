"""Handle the typed lines of a chat: a line that begins with a slash is a command, any other line is a question."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Protocol

from nanovllm_extras.terminal.answerers import Answer, Answerer, AnswerError
from nanovllm_extras.terminal.chat_history import Conversation

COMMANDS = {
    "/reset": "clear the conversation (the system prompt stays)",
    "/system": "show the system prompt; /system TEXT sets it, /system - removes it",
    "/save": "save the conversation and where its K and V are; /save NAME",
    "/load": "continue a saved conversation: /load NAME; /load lists them",
    "/stats": "show the cost of the conversation, and the load of the engine or server",
    "/help": "show this list",
    "/exit": "exit; Ctrl-D does the same",
}


class Display(Protocol):
    """The methods of the screen that a session needs."""

    def ask(self) -> str: ...
    def show(self, texts: Iterator[str]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def show_table(self, rows: Mapping[str, str]) -> None: ...


class Session:
    """A conversation that is controlled by typed lines."""

    def __init__(self, answerer: Answerer, screen: Display, system: str = "") -> None:
        self.conversation = Conversation(system)
        self._answerer = answerer
        self._screen = screen
        self._actions: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/save": self._save,
            "/load": self._load,
            "/stats": lambda _: screen.show_table({**self.conversation.describe(), **answerer.describe()}),
            "/help": lambda _: screen.show_table(COMMANDS),
        }

    def run(self) -> None:
        """Handle lines until `/exit` or the end of the input. Ctrl-C at the prompt clears the line."""
        while True:
            try:
                line = self._screen.ask().strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line == "/exit":
                return
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """Run a command, or answer a question."""
        if not line.startswith("/"):
            self.answer(line)
            return
        command, _, rest = line.partition(" ")
        action = self._actions.get(command)
        if action is None:
            self._screen.warn(f"unknown command {command}; the commands are {', '.join(COMMANDS)}")
        else:
            action(rest.strip())

    def answer(self, question: str) -> None:
        """Show the answer while it grows. Ctrl-C stops it; the conversation keeps the part that was shown."""
        last = Answer("", None)

        def texts() -> Generator[str, None, None]:
            nonlocal last
            with contextlib.closing(self._answerer.answer(self.conversation.ask(question))) as answers:
                for last in answers:
                    yield last.text

        growing = texts()
        try:
            self._screen.show(growing)
        except KeyboardInterrupt:
            growing.close()  # this aborts the request now
            self._screen.note("interrupted")
        except AnswerError as error:
            self._screen.warn(str(error))
        self.conversation.keep(question, last.text, last.cost)
        if last.cost is not None:
            self._screen.note(str(last.cost))

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self._screen.note("the conversation is cleared")

    def _set_system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text
        self._screen.note(f"system prompt: {self.conversation.system or 'none'}")

    def _save(self, name: str) -> None:
        if not name or not self.conversation.turns:
            self._screen.warn("there is nothing to save yet" if name else "a name is missing: /save NAME")
            return
        with self._warnings():
            self._screen.note(self._answerer.saved.save(name, self.conversation.messages))

    def _load(self, name: str) -> None:
        with self._warnings():
            saved = self._answerer.saved
            if not name:
                self._screen.note(f"saved conversations: {', '.join(saved.names()) or 'none'}")
                return
            messages, line = saved.load(name)
            self.conversation.restore(messages)
            self._screen.note(line)

    @contextlib.contextmanager
    def _warnings(self) -> Iterator[None]:
        """Show errors, instead of ending the chat."""
        try:
            yield
        except (AnswerError, ValueError, OSError) as error:
            self._screen.warn(str(error))
