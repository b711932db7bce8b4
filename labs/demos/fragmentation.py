"""How much of the KV cache holds tokens? Three ways to give memory to sequences, with 512 slots each.

    python -m labs.demos.fragmentation                       # the tables of chapter 5
    python -m labs.demos.fragmentation --trace blocks.jsonl  # and a recording of the engine's run

`rows` is `labs/rung_4_continuous.py`, `blocks, reserved` is `labs/rung_5_paged.py`, `blocks, as needed` is nanovllm.
A slot of a sequence holds a token, will hold one later (reserved), or never will (internal fragmentation). Which of
the last two is known only when the sequence has ended, so each step is noted, and counted after the run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs import rung_4_continuous, rung_5_paged
from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm.scheduler import Step

NUM_SLOTS, MAX_MODEL_LEN, MAX_TOKENS, BLOCK_SIZE = 512, 128, 48, 4
STEP_OF_TABLES = 12
SUBJECTS = "paged attention|a block table|the KV cache|chunked prefill|preemption|continuous batching|a token|a GPU"
QUESTIONS = [f"What is {subject}?" for subject in SUBJECTS.split("|")] + ["Hi", "Thank you!"]

Note = list[tuple[Any, int, int]]
"""Of one step: (sequence, slots that hold a token, slots that it owns) for each running sequence."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare reservations with blocks, at equal memory.")
    parser.add_argument("--trace", type=Path, help="record the engine's run in this file")
    args = parser.parse_args()
    rows = rung_4_continuous.Engine(TINY_QWEN3, NUM_SLOTS, MAX_MODEL_LEN)
    blocks = rung_5_paged.Engine(TINY_QWEN3, NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE)
    prompts = [rows.model.encode(question) for question in QUESTIONS]
    num_tokens = [len(prompt) for prompt in prompts]
    print(f"{len(prompts)} requests with prompts of {min(num_tokens)} to {max(num_tokens)} tokens, {NUM_SLOTS} slots\n")
    print(f"{'':<20}steps  most running  holds a token  reserved  never used")
    report("rows", watch_rung(rows, prompts, lambda seq: MAX_MODEL_LEN))
    report("blocks, reserved", watch_rung(blocks, prompts, lambda seq: len(seq.block_table) * BLOCK_SIZE))
    notes, tables = watch_engine(prompts, args.trace)
    report("blocks, as needed", notes)
    print(f"\nblock tables after step {STEP_OF_TABLES}, blocks of {BLOCK_SIZE}")
    for question, (num_stored, table) in zip(QUESTIONS, tables, strict=True):
        print(f"{question:<29}{num_stored} tokens  {table}")


def watch_rung(engine: Any, prompts: list[list[int]], num_slots_of: Callable[[Any], int]) -> list[Note]:
    """Run a rung of the ladder, and note each step where the rung counts it."""
    notes: list[Note] = []
    engine.count = lambda running: notes.append([(s, s.num_computed_tokens, num_slots_of(s)) for s in running])
    engine.generate(prompts, MAX_TOKENS)
    return notes


def watch_engine(prompts: list[list[int]], trace: Path | None) -> tuple[list[Note], list[tuple[int, list[int]]]]:
    """The same for nanovllm; and (tokens, block table) of each sequence after one of the steps."""
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
    options |= {"block_size": BLOCK_SIZE, "num_kv_blocks": NUM_SLOTS // BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    notes: list[Note] = []
    tables: list[tuple[int, list[int]]] = []
    # without the prefix cache, as the rungs: chapter 7 adds it
    with LLM(TINY_QWEN3, enable_prefix_caching=False, trace=trace, **options) as llm:
        scheduler = llm.engine.scheduler
        schedule = scheduler.schedule

        def schedule_and_note() -> Step:
            step, running = schedule(), scheduler.running
            notes.append([(s, s.num_computed_tokens, s.block_table.length * BLOCK_SIZE) for s in running])
            if len(notes) == STEP_OF_TABLES:
                tables.extend((s.num_computed_tokens, s.block_table.view().tolist()) for s in running)
            return step

        scheduler.schedule = schedule_and_note  # type: ignore[method-assign]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return notes, tables


def report(name: str, notes: list[Note]) -> None:
    """Shares of all slots that sequences own, summed over all steps."""
    owned = [one for note in notes for one in note]
    num_slots = sum(slots for _, _, slots in owned)
    num_stored = sum(stored for _, stored, _ in owned)
    # the last token of a sequence is never computed: no slot holds it
    num_to_come = sum(min(len_of(seq) - 1, slots) - stored for seq, stored, slots in owned)
    shares = [num_stored / num_slots, num_to_come / num_slots, 1 - (num_stored + num_to_come) / num_slots]
    cells = f"{len(notes):>7}{max(map(len, notes)):>14}" + "".join(
        f"{share:>{width}.1%}" for share, width in zip(shares, (15, 10, 12), strict=True)
    )
    print(f"{name:<18}{cells}")


def len_of(seq: Any) -> int:
    """Of a sequence of the engine, or of a rung."""
    return seq.num_tokens if hasattr(seq, "num_tokens") else len(seq.token_ids)


if __name__ == "__main__":
    main()
