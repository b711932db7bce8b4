import shutil

import pytest


@pytest.fixture
def broken(tiny_checkpoint, tmp_path):
    """A copy of the tiny checkpoint to break: (folder, its tensors)."""
    from safetensors.torch import load_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint[0], folder)
    return folder, load_file(folder / "model.safetensors")
