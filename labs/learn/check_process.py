"""Check an answer in a process of its own, so that learner's code can neither end the checker nor occupy it for ever.

On Linux the process is forked from the caller, which has imported everything; elsewhere a new interpreter is started.
A process checks one answer and ends. The report comes back as JSON.
"""

import json
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from labs.learn.answers import EXITED, OUT_OF_MEMORY, Stopped
from labs.learn.catalog import find_exercise
from labs.learn.findings import Report
from labs.learn.limits import Printed, limit
from labs.learn.texts import Language, Text

CODE_S = 3.0  # for the learner's code, with all cases that are tried
START_S = 20.0  # more for the process: a new interpreter imports everything on a slow machine


def check_in_process(name: str, file: Path, language: Language) -> Report:
    """Check `file` as an answer to exercise `name`. The report says so if its code was stopped or ended the process."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, name, str(file), language), daemon=True)
    process.start()
    sender.close()
    try:
        limit_s = CODE_S + 1.5 + (0 if context.get_start_method() == "fork" else START_S)
        if receiver.poll(limit_s):
            return Report.from_json(json.loads(receiver.recv_bytes()))
        return stopped(Text("The code did not end in time and was stopped.", "代码没有按时结束，已被停止。"), language)
    except (EOFError, OSError):
        process.join(1)
        return stopped(describe_end(process.exitcode), language)
    finally:
        process.kill()
        process.join()
        receiver.close()


def work(sender: Connection, name: str, file: str, language: Language) -> None:
    """Check one answer, send the report, and end this process, whatever the learner's code has started."""
    printed = limit(CODE_S, file)
    report = check(name, Path(file), language, printed)
    if not report.passed:
        report.printed = report.printed or printed.getvalue()
    sender.send_bytes(json.dumps(report.to_json()).encode())
    sender.close()
    os._exit(0)


def check(name: str, file: Path, language: Language, printed: Printed) -> Report:
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
            text = Text("The checker itself failed; please report this.", "检查器自身出错，请报告此问题。")
            return Report(False, text.show(language), [f"```\n{traceback.format_exc()}\n```"])
        where = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno
        text = Text("The file cannot be loaded: line {line}: {error}", "无法加载文件：第 {line} 行：{error}")
        return stopped(text.format(line=where, error=f"{type(error).__name__}: {error}"), language)


def stopped(why: Text, language: Language) -> Report:
    return Report(False, why.show(language))


def describe_end(exit_code: int | None) -> Text:
    """Return why a process has ended without a report."""
    if exit_code is not None and exit_code < 0:
        return Text(f"The code crashed the process (signal {-exit_code}).", f"代码使进程崩溃（信号 {-exit_code}）。")
    return Text("The code ended the process.", "代码结束了进程。")
