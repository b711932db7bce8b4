"""An installation whose sources were deleted after they were compiled, as some container images have it."""

import compileall
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, Config, SamplingParams
from nanovllm_extras.vllm.engine_args import ONLY_IN_CODE
from tests.core_alone import EXTRAS, PACKAGE

pytestmark = pytest.mark.slow  # 20 s

GENERATE = """
import sys
import nanovllm_extras
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
assert nanovllm_extras.__file__.endswith(".pyc"), nanovllm_extras.__file__
if __name__ == "__main__":
    llm = LLM(TINY_QWEN3, device="cpu", num_kv_blocks=16, tensor_parallel_size=int(sys.argv[1]))
    params = SamplingParams(temperature=0, max_tokens=12)
    print(llm.generate("What is a block table?", params, use_tqdm=False)[0].outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with both packages, without a source."""
    root = tmp_path_factory.mktemp("compiled")
    for package in (PACKAGE, EXTRAS):
        copy = root / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        assert compileall.compile_dir(copy, quiet=1, legacy=True)
        for source in copy.rglob("*.py"):
            source.unlink()
    (root / "generate.py").write_text(GENERATE)
    return root


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_work(compiled):
    """The help has no docstrings, because they are read from the sources, but all options."""
    found = set(re.findall(r"(?<!\S)--[a-z-]+", run(compiled, "-m", "nanovllm_extras", "serve", "--help")))
    names = {field.name for field in fields(Config)} - {"model", *ONLY_IN_CODE}
    options = {f"--{name.replace('_', '-')}" for name in names}
    assert {"--port"} < found
    assert options - found == set()


def test_an_engine_answers(compiled):
    """On two ranks, whose processes run a file."""
    params = SamplingParams(temperature=0, max_tokens=12)
    llm = LLM(TINY_QWEN3, device="cpu", num_kv_blocks=16)
    expected = llm.generate("What is a block table?", params, use_tqdm=False)[0].outputs[0].token_ids
    assert run(compiled, "generate.py", "2").splitlines()[-1] == str(expected)
