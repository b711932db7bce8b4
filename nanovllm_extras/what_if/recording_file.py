"""Read and check a file with a recording, for the command and for the server of the page."""

from pathlib import Path

from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.what_if.recorded_run import RecordedRun, read_run, texts_of


def read(path: Path) -> tuple[RecordedRun, dict[str, str]]:
    """Return the run of a recording, and the texts of its tokens. ValueError names the file."""
    lines = read_recording(path)
    check_recording(path, lines)
    try:
        return read_run(lines), texts_of(lines)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
