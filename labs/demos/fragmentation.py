"""Compare how much of the KV cache holds tokens, in three ways to allocate 512 slots to sequences.

    python -m labs.demos.fragmentation                       # the tables of chapter 5
    python -m labs.demos.fragmentation --trace blocks.jsonl  # and a recording of the engine's run

`rows` is `labs/continuous.py`, `blocks, reserved` is `labs/paged.py`, `blocks, as needed` is nanovllm.
A slot of a sequence holds a token, will hold a token later (reserved), or will never hold one (internal fragmentation).
Whether an empty slot will be used is known only when the sequence has ended. So each step is noted, and counted after
the run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labs import continuous, paged
from nanovllm.scheduler import Step
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

NUM_SLOTS, MAX_MODEL_LEN, MAX_TOKENS, BLOCK_SIZE = 512, 128, 48, 4
STEP_OF_TABLES = 12
SUBJECTS = "paged attention|a block table|the KV cache|chunked prefill|preemption|continuous batching|a token|a GPU"
QUESTIONS = [f"What is {subject}?" for subject in SUBJECTS.split("|")] + ["Hi", "Thank you!"]

Note = list[tuple[Any, int, int]]
"""One step: (sequence, slots that hold a token, slots that the sequence owns) for each running sequence."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare reservations with blocks, at equal memory.")
    parser.add_argument("--trace", type=Path, help="record the engine's run to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are too small for more
    rows = continuous.Engine(TINY_QWEN3, NUM_SLOTS, MAX_MODEL_LEN)
    blocks = paged.Engine(TINY_QWEN3, NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE)
    prompts = [rows.model.encode(question) for question in QUESTIONS]
    num_tokens = [len(prompt) for prompt in prompts]
    print(f"{len(prompts)} requests with prompts of {min(num_tokens)} to {max(num_tokens)} tokens, {NUM_SLOTS} slots\n")
    print(f"{'':<20}steps  most running  holds a token  reserved  never used")
    report("rows", watch_program(rows, prompts, lambda seq: MAX_MODEL_LEN))
    report("blocks, reserved", watch_program(blocks, prompts, lambda seq: len(seq.block_table) * BLOCK_SIZE))
    notes, tables = watch_engine(prompts, args.trace)
    report("blocks, as needed", notes)
    print(f"\nblock tables after step {STEP_OF_TABLES}, blocks of {BLOCK_SIZE}")
    for question, (num_stored, table) in zip(QUESTIONS, tables, strict=True):
        print(f"{question:<29}{num_stored} tokens  {table}")


def watch_program(engine: Any, prompts: list[list[int]], num_slots_of: Callable[[Any], int]) -> list[Note]:
    """Run a program of the ladder. Return a note of each step, taken when the program counts that step."""
    notes: list[Note] = []
    engine.count = lambda running: notes.append([(s, s.num_computed_tokens, num_slots_of(s)) for s in running])
    engine.generate(prompts, MAX_TOKENS)
    return notes


def watch_engine(prompts: list[list[int]], trace: Path | None) -> tuple[list[Note], list[tuple[int, list[int]]]]:
    """Run nanovllm. Return a note of each step, and (tokens, block table) of each sequence after `STEP_OF_TABLES`."""
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
    options |= {"block_size": BLOCK_SIZE, "num_kv_blocks": NUM_SLOTS // BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    notes: list[Note] = []
    tables: list[tuple[int, list[int]]] = []
    # without the prefix cache, as in the two programs: chapter 7 adds it
    with LLM(TINY_QWEN3, enable_prefix_caching=False, trace=trace, **options) as llm:
        scheduler = llm.engine.scheduler
        schedule = scheduler.schedule

        def schedule_and_note() -> Step:
            step, running = schedule(), scheduler.running
            notes.append([(s, s.num_computed_tokens, len(s.block_table) * BLOCK_SIZE) for s in running])
            if len(notes) == STEP_OF_TABLES:
                tables.extend((s.num_computed_tokens, s.block_table.tolist()) for s in running)
            return step

        scheduler.schedule = schedule_and_note  # type: ignore[method-assign]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return notes, tables


def report(name: str, notes: list[Note]) -> None:
    """Print the shares of all slots that sequences own, summed over all steps."""
    owned = [one for note in notes for one in note]
    num_slots = sum(slots for _, _, slots in owned)
    num_stored = sum(stored for _, stored, _ in owned)
    # the last token of a sequence is never computed, so no slot holds it
    num_to_come = sum(min(len_of(seq) - 1, slots) - stored for seq, stored, slots in owned)
    shares = [num_stored / num_slots, num_to_come / num_slots, 1 - (num_stored + num_to_come) / num_slots]
    cells = f"{len(notes):>7}{max(map(len, notes)):>14}" + "".join(
        f"{share:>{width}.1%}" for share, width in zip(shares, (15, 10, 12), strict=True)
    )
    print(f"{name:<18}{cells}")


def len_of(seq: Any) -> int:
    """Return the number of tokens of a sequence of the engine, or of a program of the ladder."""
    return seq.num_tokens if hasattr(seq, "num_tokens") else len(seq.token_ids)


if __name__ == "__main__":
    main()
