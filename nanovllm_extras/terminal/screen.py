"""Show the conversation on the terminal: `prompt_toolkit` reads lines, `rich` renders answers.

An answer is Markdown that grows. Its finished blocks are printed once, so they scroll like other text. Only the last
block is redrawn while it grows.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nanovllm_extras.terminal.chat_history import THINK_END, THINK_START

REDRAW_S = 0.05
FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
BLOCK_END = re.compile(r"\n[ \t]*\n+(?=\S)")  # a blank line, unless an indented line follows (of a list)


class Screen:
    """Reads lines, and shows answers, notes and tables."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        """Create the screen. commands: name -> description, for completion."""
        self.console = Console(highlight=False)
        completer = WordCompleter(list(commands), meta_dict=dict(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=open_history(),
            completer=completer,
            complete_while_typing=False,
            prompt_continuation="  ",
            key_bindings=make_key_bindings(),
        )

    def ask(self) -> str:
        """Read and return the next line. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        return self._session.prompt("> ")

    def show(self, texts: Iterable[str]) -> None:
        """Show an answer while it grows. Each text begins with the previous text."""
        with GrowingMarkdown(self.console) as growing:
            for text in texts:
                growing.update(text)

    def note(self, text: str) -> None:
        """Show a line in a dim style."""
        self.console.print(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        """Show a line in red."""
        self.console.print(Text(text, style="red"))

    def show_table(self, rows: Mapping[str, str]) -> None:
        """Show names and values as a table."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        for name, value in rows.items():
            table.add_row(name, Text(value))
        self.console.print(table)


class GrowingMarkdown:
    """Renders Markdown while it grows: `with GrowingMarkdown(console) as growing: growing.update(text)`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._text = ""
        self._num_printed = 0  # characters that have been printed and are not redrawn
        self._last_drawn = 0.0

    def __enter__(self) -> "GrowingMarkdown":
        self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Print the rest of the text, also if the answer was interrupted."""
        self._live.stop()
        self._print(self._text[self._num_printed :])

    def update(self, text: str) -> None:
        """Show a text that has grown. Redraws at most every `REDRAW_S` seconds."""
        self._text = text
        if (now := time.perf_counter()) - self._last_drawn < REDRAW_S:
            return
        self._last_drawn = now
        length = finished_length(text[self._num_printed :])
        if length:
            self._print(text[self._num_printed : self._num_printed + length])
            self._num_printed += length
        self._live.update(Tail(render(text[self._num_printed :])), refresh=True)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(render(text))
            self._console.print()


def finished_length(text: str) -> int:
    """Return the length of the complete blocks: up to the last blank line outside code and reasoning."""
    if text.lstrip().startswith(THINK_START) and THINK_END not in text:
        return 0
    ends = [match.end() for match in BLOCK_END.finditer(text)]
    return max((end for end in ends if len(FENCE.findall(text[:end])) % 2 == 0), default=0)


def render(text: str) -> RenderableType:
    """Return the answer as Markdown, after the reasoning (between `<think>` tags) as dim plain text."""
    if not text.lstrip().startswith(THINK_START):
        return Padding(Markdown(text), (0, 0, 0, 2))
    reasoning, _, answer = text.lstrip().removeprefix(THINK_START).partition(THINK_END)
    table = Table.grid()
    table.add_row(Padding(Text(reasoning.strip(), style="dim italic"), (0, 0, 1, 2)))
    table.add_row(Padding(Markdown(answer), (0, 0, 0, 2)))
    return table


class Tail:
    """Renders the last lines of a renderable that fit on the terminal: lines that have scrolled cannot be redrawn."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        lines = console.render_lines(self._renderable, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def make_key_bindings() -> KeyBindings:
    """Return the key bindings: Enter sends; Alt-Enter (or Escape, Enter) starts a new line."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def open_history() -> History:
    """Return the history of typed lines, in a file that only the user can read, or in memory if there is no home."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nanovllm"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except (OSError, RuntimeError):  # a read-only home folder, or none
        return InMemoryHistory()
    return FileHistory(str(path))
