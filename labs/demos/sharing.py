"""Share blocks: two chats share those of a system prompt, and three samples those of a prompt, with copy-on-write.

python -m labs.demos.sharing
python -m labs.demos.sharing --trace run.jsonl && nanovllm view run.jsonl
"""

import argparse
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm_extras import LLM, TINY_QWEN3, LLMEngine, SamplingParams
from nanovllm_extras.trace.recording import read_recording

OPTIONS: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 24, "dtype": "float32", "attention_backend": "torch"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Blocks with several owners.")
    parser.add_argument("--trace", type=Path, help="record the run to this file")
    args = parser.parse_args()
    with TemporaryDirectory() as work:
        recording = args.trace or Path(work) / "run.jsonl"
        with LLM(TINY_QWEN3, trace=recording, enforce_eager=True, **OPTIONS) as llm:
            play(llm, recording)


def play(llm: LLM, recording: Path) -> None:
    engine = llm.engine
    system = {"role": "system", "content": "You are brief."}
    questions = ["What is a block table?", "Explain preemption."]
    first, second = llm.render_chat([[system, {"role": "user", "content": question}] for question in questions])
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    print("7x2 is block 7, which has two owners\n")
    print("A arrives")
    engine.add_request("A", first, greedy)
    step(engine)
    print("B arrives: the same system prompt, another question")
    engine.add_request("B", second, greedy)
    step(engine)
    while engine.has_unfinished_requests():
        engine.step()
    prefix_cache = engine.scheduler.block_manager.prefix_cache
    num_cached = sum(block in prefix_cache for block in range(1, 25))
    print(f"A and B have ended: {engine.get_stats().num_free_blocks} blocks are free, {num_cached} of them cached\n")
    print("C arrives: the prompt of A, n=3")
    engine.add_request("C", first, SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=6, ignore_eos=True))
    step(engine)
    print("The three samples store their first tokens")
    step(engine)
    names = ["A", "B", "C.0", "C.1", "C.2"]  # a recording numbers sequences from 1, in the order of their arrival
    for line in read_recording(recording)[1:]:
        for code, *about in line["events"]:
            if code == "copy":
                seq, source, destination = about
                print(f"copy-on-write: {names[seq - 1]} writes to block {destination}, a copy of block {source}")
    while engine.has_unfinished_requests():
        engine.step()


def step(engine: LLMEngine) -> None:
    """Run a step, and print the blocks that each sequence owns after it."""
    engine.step()
    owners = Counter(block for seq in engine.scheduler.running for block in seq.block_table)
    for seq in engine.scheduler.running:
        name = f"{seq.request_id}.{seq.sample_index}" if seq.request_id == "C" else seq.request_id
        blocks = [f"{block}x{owners[block]}" if owners[block] > 1 else f"{block}" for block in seq.block_table]
        found = f"{seq.num_cached_tokens:>2} of {seq.num_prompt_tokens} prompt tokens found"
        print(f"  {name:4}{found}, {seq.num_computed_tokens} stored in blocks", " ".join(blocks))
    print()


if __name__ == "__main__":
    main()
