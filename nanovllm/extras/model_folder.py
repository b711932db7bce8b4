"""The folder of a model: on this machine, or downloaded from the hub."""

from pathlib import Path


def resolve_model(model: str | Path, with_weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of `model`. ValueError if there is none."""
    folder = resolve_folder("model", model, revision, with_weights)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {str(model)!r} holds no config.json")
    return folder


def resolve_folder(option: str, name: str | Path, revision: str | None = None, with_weights: bool = False) -> Path:
    """Return a folder on this machine, or that of a hub id after downloading its files. ValueError if it is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from nanovllm.extras.hub import download

    return download(option, name, revision, with_weights)
