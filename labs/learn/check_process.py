"""Check an answer in a process of its own, so that learner's code can neither end the checker nor occupy it for ever.

On Linux the process is forked from the caller, which has imported everything; elsewhere a new interpreter is started.
A process checks one answer and ends. The report comes back as JSON.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from labs.learn.answers import EXITED, OUT_OF_MEMORY, Stopped
from labs.learn.catalog import find_exercise
from labs.learn.findings import Report
from labs.learn.limits import Printed, limit
from labs.learn.texts import Language, Text

PROCESSOR_S = 5.0  # of processor time for the learner's code: ten times what right answers need
WALL_S = 60.0  # for code that waits. Beside ten busy programs on two cores, a right answer needs up to ten seconds
END_S = 5.0  # more until the process has ended itself
START_S = 60.0  # until a new interpreter has imported everything, on a slow machine
STARTED = b"started"  # the process has imported everything, and its limits begin
ERROR_FILE = "checker_error.txt"
NOT_IN_TIME = Text("The code did not end in time and was stopped.", "代码没有按时结束，已被停止。")


def check_in_process(name: str, file: Path, language: Language) -> Report:
    """Check `file` as an answer to exercise `name`. The report says so if its code was stopped or ended the process."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    limits = PROCESSOR_S, WALL_S
    process = context.Process(target=work, args=(sender, name, str(file), language, limits), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(START_S) and receiver.recv_bytes() == STARTED and receiver.poll(WALL_S + END_S):
            return Report.from_json(json.loads(receiver.recv_bytes()))
        return stopped(NOT_IN_TIME, language)
    except (EOFError, OSError):
        process.join(1)
        return stopped(describe_end(process.exitcode), language)
    finally:
        process.kill()
        process.join()
        receiver.close()


def work(sender: Connection, name: str, file: str, language: Language, limits: tuple[float, float]) -> None:
    """Check one answer, send the report, and end this process, whatever the learner's code has started."""
    has_ended = threading.Lock()

    def end(report: Report) -> None:
        has_ended.acquire()  # never released: either the check or the time limit ends this process
        report.printed = "" if report.passed else report.printed or read_printed()
        sender.send_bytes(json.dumps(report.to_json()).encode())
        sender.close()
        os._exit(0)

    find_exercise(name)  # importing the exercises does not count as the learner's time
    sender.send_bytes(STARTED)
    limit(file, *limits, give_up=lambda why: end(stopped(why, language)))
    end(check(name, Path(file), language))


def read_printed() -> str:
    """Return what was printed in the run that was stopped, or outside of runs."""
    return sys.stdout.getvalue() if isinstance(sys.stdout, Printed) else ""


def check(name: str, file: Path, language: Language) -> Report:
    """Return the report of a check, also if the learner's code cannot be loaded or has to be stopped."""
    try:
        return find_exercise(name).check(file, language)
    except Stopped as error:
        return stopped(error.why, language)
    except (SystemExit, KeyboardInterrupt):
        return stopped(EXITED, language)
    except MemoryError:
        return stopped(OUT_OF_MEMORY, language)
    except Exception as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == str(file)]
        if not frames and not isinstance(error, SyntaxError):
            return report_failure(file, language)
        where = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno
        text = Text("The file cannot be loaded: line {line}: {error}", "无法加载文件：第 {line} 行：{error}")
        return stopped(text.format(line=where, error=f"{type(error).__name__}: {error}"), language)


def report_failure(file: Path, language: Language) -> Report:
    """Return the report of a check that has failed itself. Its traceback goes to a file, for those who mend it."""
    with suppress(OSError):
        (file.parent / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
    text = Text(
        f"The checker itself failed. Please report this, with the file {ERROR_FILE} in your folder.",
        f"检查器自身出错。请报告此问题，并附上你的文件夹里的 {ERROR_FILE}。",
    )
    return stopped(text, language)


def stopped(why: Text, language: Language) -> Report:
    return Report(False, why.show(language))


def describe_end(exit_code: int | None) -> Text:
    """Return why a process has ended without a report."""
    if exit_code is not None and exit_code < 0:
        if -exit_code in (getattr(signal, "SIGXCPU", None), getattr(signal, "SIGKILL", None)):
            return NOT_IN_TIME
        return Text(f"The code crashed the process (signal {-exit_code}).", f"代码使进程崩溃（信号 {-exit_code}）。")
    return Text("The code ended the process.", "代码结束了进程。")
