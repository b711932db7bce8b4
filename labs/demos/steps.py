"""Print the tokens that each step computes, as the scheduler decides them with a budget of tokens.

    python -m labs.demos.steps                       # the table of chapter 4
    python -m labs.demos.steps --budget 4            # with another budget
    python -m labs.demos.steps --trace steps.jsonl   # and a recording, for `nanovllm view steps.jsonl`

Three requests run together; the third one arrives after three steps. Then each request runs by itself with a large
budget, and must get the same tokens.
"""

import argparse
from pathlib import Path

from nanovllm.scheduler import Step
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

REQUESTS = {  # name: question, max_tokens, number of the step before which it arrives
    "A": ("Hi", 6, 1),
    "B": ("What is a block table?", 4, 1),
    "C": ("Who are you?", 3, 4),
}
BUDGET = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what each step computes.")
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"most tokens of a step (default: {BUDGET})")
    parser.add_argument("--trace", type=Path, help="record the run to this file")
    args = parser.parse_args()
    if args.budget < 1:
        parser.error(f"--budget must be at least 1 token, got {args.budget}")
    print(f"step  {''.join(f'{name:<19}' for name in REQUESTS)}budget left  waiting")
    with make_llm(args.budget, args.trace) as llm:
        tokens = run(llm, {name: arrival for name, (_, _, arrival) in REQUESTS.items()}, is_printed=True)
    with make_llm(1024) as llm:
        by_itself = {name: run(llm, {name: 1})[name] for name in REQUESTS}
    print("\n+ the chunk ends at the sequence's last token: the step samples a new one")
    for name, token_ids in tokens.items():
        print(f"{name} got {len(token_ids)} tokens, the same as by itself: {token_ids == by_itself[name]}")


def make_llm(budget: int, trace: Path | None = None) -> LLM:
    return LLM(
        TINY_QWEN3,
        block_size=4,
        num_kv_blocks=32,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,  # all prompts have a common prefix, which chapter 7 uses
        dtype="float32",
        attention_backend="torch",
        enforce_eager=True,
        trace=trace,
    )


def run(llm: LLM, arrivals: dict[str, int], is_printed: bool = False) -> dict[str, list[int]]:
    """Run steps until all requests have finished, and return the output tokens of each."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    schedule, number, budget = scheduler.schedule, 0, scheduler.max_num_batched_tokens
    tokens: dict[str, list[int]] = {}

    def schedule_and_print() -> Step:
        step = schedule()
        print_step(number, step, budget - step.num_scheduled_tokens, [seq.request_id for seq in scheduler.waiting])
        return step

    if is_printed:
        scheduler.schedule = schedule_and_print  # type: ignore[method-assign]
    while len(tokens) < len(arrivals):
        number += 1
        for name in [name for name, arrival in arrivals.items() if arrival == number]:
            question, max_tokens, _ = REQUESTS[name]
            prompt = llm.render_chat([{"role": "user", "content": question}])[0]
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        for output in engine.step().outputs:
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    return {name: tokens[name] for name in arrivals}


def print_step(number: int, step: Step, budget_left: int, waiting: list[str]) -> None:
    cells = dict.fromkeys(REQUESTS, "")
    for seq, start, num_new_tokens in step.chunks:
        what = f"decode  {start}" if num_new_tokens == 1 else f"prefill {start} … {start + num_new_tokens - 1}"
        cells[seq.request_id] = f"{what} {'+' if seq in step.samples else ''}"
    row = "".join(f"{cell:<19}" for cell in cells.values())
    print(f"{number:>4}  {row}{budget_left:>11}  {' '.join(waiting)}".rstrip())


if __name__ == "__main__":
    main()
