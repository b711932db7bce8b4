"""Licences of vendored files are shipped with them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
def test_every_licence_is_named_in_the_metadata():
    import tomllib

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["license-files"]
    named = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert named == {ROOT / "LICENSE", *(ROOT / "nanovllm_extras").rglob("LICENSE*")}
