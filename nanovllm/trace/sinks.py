"""Where may the lines of one recording go? To a file, to whoever watches, to both."""

from pathlib import Path

from nanovllm.trace.recorder import Sink
from nanovllm.trace.recording import TraceFile


class Sinks:
    """A `Sink` that passes all to several."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks

    @property
    def is_full(self) -> bool:
        return any(sink.is_full for sink in self.sinks)

    def begin(self, line: str) -> None:
        for sink in self.sinks:
            sink.begin(line)

    def write(self, line: str) -> None:
        for sink in self.sinks:
            sink.write(line)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def to_sink(trace: str | Path | Sink) -> Sink:
    """A path as a file; what is a sink stays one. Raises TypeError or ValueError if `trace` is no path to write."""
    return trace if isinstance(trace, Sink) else TraceFile(trace)
