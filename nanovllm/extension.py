"""Parts of an engine that its user has written: given one by one, or as one file.

    # my_file.py
    from nanovllm.scheduler import Scheduler

    class ShortestFirst(Scheduler):
        def add(self, seq):
            super().add(seq)
            self.waiting.sort(key=lambda one: one.num_prompt_tokens)

    scheduler_cls = ShortestFirst

`LLM(model, extension="my_file.py")` is the same as `LLM(model, scheduler_cls=ShortestFirst)`. The top-level names of an
extension are options of `Config`. `Config` calls `find_parts`; `LLMEngine` makes the parts.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def find_parts(given: Mapping[str, Any], extension: str | Path | None) -> dict[str, Any]:
    """Return the parts of an engine: those that options give, and those of the extension.

    given: the options for parts, None if they are not given. A class may be given by its name, as "module:Class".
    Raises ValueError for an extension that cannot be imported, has no parts, or has one that is given, too.
    """
    found = dict(given)
    if extension is not None:
        for name, value in read_extension(extension, given).items():
            if found[name] is not None and found[name] != value:
                raise ValueError(f"{name} is given twice: by this option, and by the extension {extension}")
            found[name] = value
    for name, value in found.items():
        if isinstance(value, str) and name.endswith("_cls"):
            try:
                found[name] = load_object(value)
            except Exception as error:  # a module raises any kind
                raise ValueError(f"{name}={value!r} cannot be imported ({type(error).__name__}: {error}); "
                                 f"give 'module:Class'") from error  # fmt: skip
    return found


def read_extension(extension: str | Path, names: Collection[str]) -> dict[str, Any]:
    """Import an extension, and return those of its top-level names that are in `names`."""
    try:
        module = import_extension(extension)
    except Exception as error:  # as above
        raise ValueError(f"extension={str(extension)!r} cannot be imported ({type(error).__name__}: {error}); "
                         f"give a Python file, or the name of a module") from error  # fmt: skip
    looks_like = {name for name in vars(module) if name.endswith("_cls") or name.startswith("extra_arg")}
    found = {name: value for name, value in vars(module).items() if name in names or name in looks_like}
    unknown = [name for name in found if name not in names]
    if unknown or not found:
        fault = f"names {unknown[0]}, which this engine does not have" if unknown else "names none of its own"
        raise ValueError(f"an extension names parts of the engine ({', '.join(names)}), but {extension} {fault}")
    return found


def import_extension(extension: str | Path) -> ModuleType:
    """Import a file or a module. A file is imported once, and again when it has changed."""
    path = Path(extension)
    if path.suffix != ".py":
        return importlib.import_module(str(extension))
    path = path.resolve(strict=True)
    name = f"nanovllm_extension{re.sub(r'[^A-Za-z0-9]', '_', str(path))}_{path.stat().st_mtime_ns}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def load_object(name: str) -> Any:
    """Import "module:Class"; "module.Class" means the same."""
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
