"""Copy the programs of labs/ that `nanovllm learn` uses into the package. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROGRAMS = ("model", "on_demand", "mixed_batches", "prefix_cache", "one_file")


class BuildWithPrograms(build_py):
    """Builds the package; an editable one finds `labs/` beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "nanovllm_extras", "learn", "programs", "labs")
            self.mkpath(str(folder))
            for name in PROGRAMS:
                self.copy_file(f"labs/{name}.py", str(folder / f"{name}.py"))


setup(cmdclass={"build_py": BuildWithPrograms})
