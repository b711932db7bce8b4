"""What this process may use of the machine: memory, by the control groups of containers, CPU time, and open files.

Linux has two versions of control groups. In version 2 a folder has all limits of a group, and in version 1 each kind of
limit has its own tree of folders. A limit of a group applies to all groups inside it, too.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # a system without such limits
    resource = None  # type: ignore[assignment]

ROOT = Path("/")
NUM_FILES = 2**16


def read_text(path: Path) -> str:
    """Return the contents of a small file of the kernel, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def read_number(path: Path) -> int | None:
    """Return the number in a file, or None for `max`, a negative number, and a file that cannot be read."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def groups(kind: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's control groups, innermost first. `kind`: of version 1, as `memory`

    In a container, the path of the group may be the host's, while the folders begin with the container's own.
    """
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = (*line.split(":", 2), "", "")[:3]
        if kinds and kind not in kinds.split(","):
            continue
        for inner in (Path(path), *Path(path).parents):
            for tree in (base / kind, base / kinds) if kinds else (base, base / "unified"):
                yield tree / str(inner).lstrip("/")


def free_bytes(root: Path = ROOT) -> int | None:
    """Return the number of bytes that this process can still allocate and use, or None if that is unknown.

    Pages of files that the kernel can drop at any time count as free.
    """
    found = []
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    for folder in groups("memory", root):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = read_number(folder / limit_name), read_number(folder / usage_name)
            if limit is not None and usage is not None:
                lines = [line.split() for line in read_text(folder / "memory.stat").splitlines()]
                found.append(limit - usage + sum(int(number) for name, number in lines if name == cache_name))
    address_space = left_of_address_space(root)
    if address_space is not None:
        found.append(address_space)
    return max(0, min(found)) if found else None


def left_of_address_space(root: Path = ROOT) -> int | None:
    """Return the number of bytes that this process can still map under RLIMIT_AS (`ulimit -v`), or None."""
    if resource is None:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = read_text(root / "proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return limit - int(pages[0]) * resource.getpagesize()


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the number of CPUs whose time this process may use, for example 1.5, or None if there is no limit."""
    found = []
    for folder in groups("cpu", root):
        quota, period = (*read_text(folder / "cpu.max").split(), "", "")[:2]
        if not quota:
            quota, period = (read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found) if found else None


def allow_open_files() -> None:
    """Raise the number of files that this process may open (`ulimit -n`) to `NUM_FILES`, or as far as it may.

    Each connection is an open file, and most systems begin with 1,024. Connections beyond the limit get no answer.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_FILES if hard == resource.RLIM_INFINITY else min(NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has another limit, which may be below `hard`
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
