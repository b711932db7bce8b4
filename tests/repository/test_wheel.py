"""The wheel has the packages and what they need, and nothing that is used in a checkout only."""

import subprocess
import sys
import zipfile

import pytest

from tests.core_alone import ROOT


@pytest.mark.slow
def test_the_wheel_has_the_packages_and_no_labs(tmp_path):
    pytest.importorskip("setuptools", "77.0.3")
    copy = tmp_path / "copy"
    command = ["git", "clone", "-q", str(ROOT), str(copy)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    build = [sys.executable, "-m", "pip", "wheel", "-q", ".", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run(build, cwd=copy, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    folders = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert folders == {"nanovllm", "nanovllm_extras", "nanovllm_testing"}
    assert len(list(installed.glob("*/assets/*/model.safetensors"))) == 2, "the bundled models"
    code = "import nanovllm; from nanovllm_extras.cli.commands import main; print(nanovllm.__file__); main(['learn'])"
    environment = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(installed))
    assert "the exercises are part of a checkout" in done.stderr
