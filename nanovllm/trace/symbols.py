"""Which lines of the engine decide an event? The page shows them beside it."""

import inspect
from pathlib import Path
from typing import Any

from nanovllm.engine.engine import LLMEngine
from nanovllm.scheduling import forks, rollback
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.prefix_cache import PrefixCache
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.windows import WindowBlockManager

DECIDED_BY: dict[str, Any] = {
    "start": LLMEngine.recover,
    "add": Scheduler.add,
    "fork": forks.fork,
    "tokens": forks.resume,
    "finish": Scheduler.finish,
    "wait": Scheduler._admit_waiting,
    "idle": Scheduler._try_give_tokens,
    "admit": BlockManager.try_admit,
    "preempt": Scheduler._preempt_last,
    "schedule": Scheduler.schedule,
    "update": Scheduler.update,
    "roll_back": rollback.roll_back,
    "take": BlockManager._take,
    "share": BlockManager._share,
    "copy": BlockManager._copy_tail,
    "give_back": WindowBlockManager._give_back,
    "free": BlockManager.free,
    "register": PrefixCache.register,
    "forget": PrefixCache.forget,
    "reset": PrefixCache.reset,
}


def read_sources() -> dict[str, dict[str, Any]]:
    """For each code of an event: the symbol, its file inside the package, its first line, and its text."""
    root = Path(__file__).parents[1]
    sources = {}
    for code, function in DECIDED_BY.items():
        lines, first = inspect.getsourcelines(function)
        path = Path(inspect.getsourcefile(function) or "").relative_to(root)
        indent = len(lines[0]) - len(lines[0].lstrip())
        text = "".join(line[indent:] if line.strip() else "\n" for line in lines)
        sources[code] = {"symbol": function.__qualname__, "path": path.as_posix(), "line": first, "text": text}
    return sources
