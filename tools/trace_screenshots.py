"""Take pictures of the page of recordings for visual checks, in both themes, two widths and two languages.

    python tools/trace_screenshots.py pictures/

(`nanovllm view --gif docs/images/story.gif` makes the animated GIF of docs/trace.md.)

The program records the bundled model with a small pool, so that requests wait, share and copy blocks and are preempted.
It records the same requests without prefix caching, for the picture of two recordings side by side. It needs the extra
`browser`, and Chromium.
"""

import argparse
import itertools
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.trace.page import make_page

MARGIN = 10  # pixels below the last element
QUESTIONS = [
    "What is paged attention?",
    "What is a block table?",
    "What is the KV cache?",
    "What is chunked prefill?",
    "Who are you?",
    "What is paged attention?",
    "What is preemption?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Take pictures of the page of recordings.")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        recordings = [record(Path(work) / "shared.jsonl", True), record(Path(work) / "alone.jsonl", False)]
        one, two = Path(work) / "one.html", Path(work) / "two.html"
        one.write_text(make_page(recordings[:1]), encoding="utf-8")
        two.write_text(make_page(recordings), encoding="utf-8")
        args.folder.mkdir(parents=True, exist_ok=True)
        take(all_pictures(one, two, args.folder))


def all_pictures(one: Path, two: Path, folder: Path) -> list[tuple[Path, Path, int, str]]:
    """Return (page, picture, width, address) for each picture."""
    pictures = []
    for theme, width, lang in itertools.product(("light", "dark"), (1440, 390), ("en", "zh")):
        look = f"theme={theme}&lang={lang}"
        pictures.append((one, folder / f"one_{theme}_{width}_{lang}.png", width, f"#step=17&seq=3&block=4&{look}"))
        if lang == "en":
            pictures.append((one, folder / f"preempt_{theme}_{width}.png", width, f"#step=27&seq=4&{look}"))
            pictures.append((two, folder / f"two_{theme}_{width}.png", width, f"#step=34&{look}"))
    return pictures


def record(path: Path, enable_prefix_caching: bool) -> Path:
    """Record seven chats in 24 blocks of 8 tokens. One asks for two answers, and two are the same."""
    options: dict[str, Any] = {"num_kv_blocks": 24, "block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 5}
    options |= {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
    with LLM(TINY_QWEN3, trace=path, enable_prefix_caching=enable_prefix_caching, **options) as llm:
        params = [SamplingParams(temperature=0, max_tokens=40) for _ in QUESTIONS]
        params[3] = SamplingParams(temperature=0.8, n=2, seed=1, max_tokens=30)
        prompts = llm.render_chat([[{"role": "user", "content": question}] for question in QUESTIONS])
        llm.generate(prompts, params, use_tqdm=False)
        llm.generate(prompts[5:6], params[5], use_tqdm=False)
    return path


def take(pictures: list[tuple[Path, Path, int, str]], height: int | None = None, last: str = "") -> None:
    """Take each picture of the whole page, of its top `height` pixels, or down to the end of the element `last`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for html, picture, width, address in pictures:
            page = browser.new_page(viewport={"width": width, "height": height or 900})
            page.goto(html.as_uri() + address)
            page.wait_for_selector("body[data-ready]")
            if height is None:
                page.set_viewport_size({"width": width, "height": page.evaluate("document.body.scrollHeight")})
            page.wait_for_timeout(300)
            picture.parent.mkdir(parents=True, exist_ok=True)
            if last:
                end = page.evaluate("selector => document.querySelector(selector).getBoundingClientRect().bottom", last)
                page.set_viewport_size({"width": width, "height": math.ceil(end) + MARGIN})
            page.screenshot(path=picture, full_page=not height and not last)
            page.close()
            print(picture)
        browser.close()


if __name__ == "__main__":
    main()
