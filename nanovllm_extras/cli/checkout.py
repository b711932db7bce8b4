"""Say where to get a checkout, which has what an installed package does not have: exercises, labs and the book."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def describe_checkout() -> str:
    """Return a sentence that says where to get a checkout of the installed version."""
    try:
        package = distribution("nanovllm")
    except PackageNotFoundError:
        return describe_source("{}", "VERSION")
    return describe_source(package.read_text("direct_url.json") or "{}", package.version)


def describe_source(record: str, version: str) -> str:
    """Return a sentence that says where to get the checkout that a package is from.

    record: where pip installed the package from, the text of `direct_url.json` (PEP 610); `{}` for an index
    """
    source = json.loads(record)
    address = source.get("url", "")
    if "vcs_info" in source:
        commit = source["vcs_info"].get("commit_id", "")
        return f"Get a checkout: `git clone {address} nanovllm && cd nanovllm && git checkout {commit}`."
    if "dir_info" in source:
        return f"This package was installed from the checkout {unquote(urlsplit(address).path)}."
    return (
        "Get a checkout with `git clone`, from where you got this package, or unpack its source archive, "
        f"nanovllm-{version}.tar.gz, which has the exercises too."
    )
