"""The site: the workflow that publishes it, and the folder that any static host can serve."""

import json
import re
import shlex
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from nanovllm_extras.trace.page import embed

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "pages.yml").read_text(encoding="utf-8")
SECONDS = 160


def steps_of(job):
    return yaml.safe_load(WORKFLOW)["jobs"][job]["steps"]


def commands():
    return [shlex.split(step["run"]) for step in steps_of("build") if "run" in step]


def test_the_workflow_publishes_what_it_builds():
    workflow = yaml.safe_load(WORKFLOW)
    install, build = commands()
    upload = next(
        step for step in steps_of("build") if step.get("uses", "").startswith("actions/upload-pages-artifact@")
    )
    assert build[0] == "sphinx-build"
    assert build[-1] == upload["with"]["path"]
    assert (ROOT / build[-2] / "conf.py").exists()
    extra = install[-1].removeprefix(".[").removesuffix("]")
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert workflow["jobs"]["deploy"]["needs"] == "build"
    assert steps_of("deploy")[-1]["uses"].startswith("actions/deploy-pages@")
    assert {"pages": "write", "id-token": "write"}.items() <= workflow["permissions"].items()
    assert "://" not in WORKFLOW  # GitHub and the package registry are those of the runner


class Links(HTMLParser):
    """Addresses of a page, and the ids that they can lead to."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        self.addresses += [attrs[name] for name in ("href", "src") if attrs.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the workflow's own command makes."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    command = next(command for command in commands() if command[0] == "sphinx-build")
    arguments = [one.replace("$SOURCE_URL", "https://code.example") for one in command[1:-1]]
    arguments[arguments.index("-d") + 1] = str(tmp_path_factory.mktemp("doctrees"))
    subprocess.run([sys.executable, "-m", "sphinx", *arguments, str(folder)], cwd=ROOT, check=True, timeout=SECONDS)
    return folder


@pytest.mark.slow
def test_the_site_needs_nothing_but_its_folder(site):
    """Each address leads to a file of the folder, below any path of a host; only links leave it."""
    missing = []
    pages = [page for page in site.glob("**/*.html") if "recordings" not in page.parts]
    assert len(pages) > 60
    for page in pages:
        for address in Links(page.read_text(encoding="utf-8")).addresses:
            parts = urlsplit(address)
            if not parts.scheme and parts.path and not (page.parent / unquote(parts.path)).exists():
                missing.append(f"{page.relative_to(site)}: {address}")
    assert missing == []
    assert (site / ".nojekyll").exists()  # GitHub Pages leaves out folders such as _static otherwise


@pytest.mark.slow
def test_each_recording_is_a_page_of_its_own(site):
    recordings = list((ROOT / "docs" / "book" / "recordings").glob("*.jsonl"))
    assert len(recordings) > 10
    for recording in recordings:
        page = (site / "book" / "recordings" / recording.name).with_suffix(".html").read_text(encoding="utf-8")
        assert embed(recording) in page
        assert not re.search(r'<(script|link|img)[^>]* (src|href)="(?!data:)', page)


@pytest.mark.slow
def test_links_lead_to_the_page_that_runs_the_scheduler_and_its_files_are_there(site):
    section = (site / "trace.html").read_text(encoding="utf-8")
    assert 'href="what_if.html"' in section
    assert 'href="../../what_if.html#lang=zh"' in (site / "book" / "zh" / "README.html").read_text(encoding="utf-8")
    page = (site / "what_if.html").read_text(encoding="utf-8")
    about = json.loads(unescape(re.search('data-site="([^"]*)"', page)[1]))
    assert "scheduler.py" in "".join(json.loads((site / about["files"]).read_text(encoding="utf-8")))
    assert "onmessage" in (site / about["worker"]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_sidebar_is_in_the_language_of_the_page(site):
    """A Chinese page lists the Chinese book first, and names no page of the English one; and the other way round."""
    for page in (site / "index.html", site / "index.zh.html", *site.glob("book/**/[01]*.html")):
        text = page.read_text(encoding="utf-8")
        tree = text[text.index('class="sidebar-tree"') :]
        tree = tree[: tree.index("</aside>")]
        captions = re.findall(r'class="caption-text">([^<]+)<', tree)
        is_chinese = "zh" in page.parts or page.name == "index.zh.html"
        assert len(captions) == 5
        assert all(bool(re.search("[一-鿿]", caption)) == is_chinese for caption in captions)
        titles = re.findall(r'<a class="[^"]*" href="[^"]*">(\d+\. [^<]+)</a>', tree)
        assert len(titles) == 15
        assert titles[0] == ("1. 一个 token" if is_chinese else "1. One token")
