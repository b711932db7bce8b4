"""An installed package has what its commands need."""

import subprocess
import sys

import pytest

from tests.core_alone import ROOT


@pytest.mark.slow
def test_the_built_package_has_the_programs_that_exercises_use(tmp_path):
    pytest.importorskip("setuptools")
    copy = tmp_path / "copy"
    command = ["git", "clone", "-q", str(ROOT), str(copy)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    built = tmp_path / "built"
    build = [sys.executable, "-c", f"import sys; sys.argv[1:] = ['-q', 'build_py', '-d', {str(built)!r}]; import setup"]
    subprocess.run(build, cwd=copy, check=True)
    assert len(list(built.glob("nanovllm/**/assets/*/model.safetensors"))) == 2, "the bundled models"
    code = (
        "import nanovllm; from nanovllm_extras.learn import given, catalog; "
        "print(nanovllm.__file__, given.one_file.__file__, len(catalog.list_exercises()))"
    )
    environment = {"PYTHONPATH": str(built), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    package, one_file, num = done.stdout.split()
    assert package.startswith(str(built))
    assert one_file.startswith(str(built))
    assert int(num) > 2
