"""The source distribution has all that its tests need."""

from tests.core_alone import ROOT


def test_every_folder_of_the_repository_is_in_the_source_distribution():
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    grafted = {name for word, *names in lines for name in names if word == "graft"}
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"nanovllm-exercises"} | {"docs"}
    assert folders - {"nanovllm", "nanovllm_extras", "nanovllm_testing"} <= grafted
    assert ["include", "*.md", "*.py"] in lines
