"""Say where to get a checkout, which has what an installed package does not have: exercises, labs and the book."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def describe_checkout() -> str:
    """Return a sentence that says where to get a checkout of the installed version.

    pip records where it installed a package from, in `direct_url.json` (PEP 610). A package from an index has none.
    """
    try:
        package = distribution("nanovllm")
    except PackageNotFoundError:
        return "Get a checkout with `git clone`, from where you got this package."
    source = json.loads(package.read_text("direct_url.json") or "{}")
    address = source.get("url", "")
    if "vcs_info" in source:
        commit = source["vcs_info"].get("commit_id", "")
        checkout = f" && cd nanovllm && git checkout {commit}" if commit else ""
        return f"Get a checkout with `git clone {address} nanovllm{checkout}`."
    if "dir_info" in source:
        return f"This package was installed from the checkout {unquote(urlsplit(address).path)}."
    archive = f"nanovllm-{package.version}.tar.gz"
    return (
        f"Get a checkout with `git clone`, from where you got this package, or unpack its source archive, {archive}, "
        "which has them too."
    )
