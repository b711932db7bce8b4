"""The table of routes in docs/serving.md has each route of the server, and says which of them a front has.

Seen to fail when broken: a row that is missing, a row of a route that does not exist, and a wrong mark for the front.
"""

import re

import pytest

from tests.core_alone import ROOT

pytest.importorskip("fastapi")

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def rows():
    """The cells of each row, by the title of their column."""
    header, _, *lines = re.search(r"^\| route \|.*(?:\n\|.*)+", PAGE, re.MULTILINE)[0].splitlines()
    titles, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, *lines))
    return [dict(zip(titles, row, strict=True)) for row in cells]


def routes_of(row):
    return re.findall(r"`([A-Z]+) (/\S+?)`", row["route"])


def test_the_table_has_each_route():
    from nanovllm_extras.serve.routes.app import make_app
    from nanovllm_extras.serve.routes.ui import LiveLines
    from nanovllm_extras.serve.server_options import ServerOptions

    app = make_app(
        ServerOptions(("m",), enable_kv_slots=True, enable_tokenizer_info=True, allow_runtime_lora_updating=True),
        live=LiveLines(),
    )
    served = {(method.upper(), path) for path, one in app.openapi_schema["paths"].items() for method in one}
    (others,) = [one.kwargs["paths"] for one in app.user_middleware if "paths" in one.kwargs]
    served |= {("GET", path) for path in others if path not in app.openapi_schema["paths"]}
    told = [route for row in rows() for route in routes_of(row)]
    assert sorted(told) == sorted(served)


def test_the_table_says_what_a_front_has():
    from nanovllm_extras.serve.front import FrontOptions, make_front

    front = make_front(FrontOptions("http://a", ("http://b",)))
    passed = {(method, route.path) for route in front.routes for method in route.methods if method != "HEAD"}
    told = set()
    for row in rows():
        assert row["front"] in ("–", "✓") or row["front"].startswith("`/"), row
        told |= {(method, path) for method, path in routes_of(row) if row["front"] in ("✓", f"`{path}`")}
    assert told == passed
