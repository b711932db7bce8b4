"""Measure the time per frame while a user scrubs through a long recording, in headless Chromium.

    python -m benchmarks.trace_page
    python -m benchmarks.trace_page --steps 2000 --blocks 5000 --html long.html

A scheduler without a model is recorded for the given number of steps, with a pool of the given number of blocks. The
page's slider is then moved once in each frame, by one step at a time, and to distant steps. The time of a frame is the
time from one move to the next: computing, layout and painting of the step, and waiting for the compositor. A frame that
does not show its step is an error. Chromium does not wait for a screen. Needs the extra `browser`, and Chromium.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.common import describe_machine
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.trace.page import make_page
from nanovllm_extras.trace.recorder import Recorder
from nanovllm_extras.trace.recording import TraceFile

SCRUB = """async ({far, count}) => {
  const slider = document.querySelector("input[type=range]"), last = Number(slider.max);
  const shown = document.querySelector("#step");
  const nextFrame = () => new Promise((done) => requestAnimationFrame(done));
  const times = [];
  let at = Math.floor(last / 3), before = await nextFrame();
  for (let i = 0; i < count; i++) {
    at = far ? (at + 7919) % last : at + (i < count / 2 ? 1 : -1);
    slider.value = at;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await nextFrame(); // the page has computed, laid out and painted the step
    if (!shown.textContent.startsWith(`Step ${at + 1} `)) throw new Error(`shows ${shown.textContent}, not ${at + 1}`);
    times.push(performance.now() - before);
    before = performance.now();
  }
  return times.sort((a, b) => a - b);
}"""
UNLIMITED = ["--disable-frame-rate-limit", "--disable-gpu-vsync"]  # else each frame lasts 16.7 ms at least


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the page's time per frame while it is scrubbed.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=5000)
    parser.add_argument("--seqs", type=int, default=64, help="sequences that run at a time")
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--html", type=Path, help="keep the page here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "long.jsonl"
        record(trace, args.steps, args.blocks, args.seqs)
        html = args.html or Path(folder) / "long.html"
        html.write_text(make_page([trace]), encoding="utf-8")
        print(f"{trace.stat().st_size / 2**20:.1f} MiB of lines, a page of {html.stat().st_size / 2**20:.1f} MiB")
        report = scrub(html, args.frames)
    for name, value in report.items():
        print(f"{name:<24} {value}")
    if args.json:
        args.json.write_text(json.dumps({"machine": describe_machine("cpu"), **report}, indent=2) + "\n")


def record(path: Path, num_steps: int, num_blocks: int, num_seqs: int) -> None:
    """Add requests as others end. They share prefixes, and the pool is too small for all of them."""
    recorder = Recorder()
    blocks = BlockManager(num_blocks, 16, observer=recorder)
    recorder.on_start(blocks)
    budget = 4 * num_seqs
    sink = TraceFile(path, max_bytes=2**40)
    recorder.begin(sink, {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs})
    scheduler = Scheduler(blocks, num_seqs, budget, max_model_len=8192)
    num_added = 0
    for step in range(num_steps):
        while len(scheduler.running) + len(scheduler.waiting) < num_seqs + 4:
            prompt = [num_added % 5] * 64 + [(num_added * 31 + j) % 1000 for j in range(200 + num_added * 97 % 1400)]
            params = SamplingParams(temperature=0, max_tokens=50 + num_added * 53 % 400, ignore_eos=True)
            scheduler.add(Sequence(str(num_added), prompt, params))
            num_added += 1
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, [(step * 7 + row) % 1000 for row in range(len(scheduled.samples))])
        recorder.flush({"schedule_time_s": 0.0001, "run_time_s": 0.01})
    recorder.close()


def scrub(html: Path, num_frames: int) -> dict[str, str | int]:
    from playwright.sync_api import sync_playwright

    report: dict[str, str | int] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", *UNLIMITED]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(html.as_uri())
        page.wait_for_selector("body[data-ready]", timeout=120_000)
        page.wait_for_timeout(1000)
        report["ready after, s"] = round(page.evaluate("performance.now()") / 1000 - 1, 1)
        report["steps"] = page.evaluate("nanovllm.runs[0].frames.length - 1")
        report["blocks ever owned"] = page.evaluate("nanovllm.runs[0].replay.top")
        report["broken"] = page.evaluate("nanovllm.runs[0].replay.broken.length")
        for name, far in (("one step a frame", False), ("far jumps", True)):
            times = page.evaluate(SCRUB, {"far": far, "count": num_frames})
            middle, high = times[len(times) // 2], times[int(0.95 * len(times))]
            report[name] = f"median {middle:.1f} ms, 95 % below {high:.1f} ms, longest {times[-1]:.1f} ms"
        browser.close()
    return report


if __name__ == "__main__":
    main()
