"""The hub's cache without the hub: models laid out as its client does, and no network."""

import shutil

import pytest


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """An empty hub cache, and no network."""
    import huggingface_hub

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def put_into_cache(cache, hub_id, folder, files=None):
    """A reference to a commit, whose folder links to the contents of `files`, which are all of `folder` by default."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = cache / ("models--" + hub_id.replace("/", "--"))
    snapshot = repo / "snapshots" / commit
    for part in (repo / "refs", repo / "blobs", snapshot):
        part.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for name in files or sorted(file.name for file in folder.iterdir()):
        shutil.copy(folder / name, repo / "blobs" / name)
        (snapshot / name).symlink_to(repo / "blobs" / name)
    return snapshot
