"""Verify draft tokens: what a pass gives, what it costs, and when speculation is slower than a plain decode.

python -m labs.demos.speculation              # drafts and passes: equal on all machines
python -m labs.demos.speculation --times      # the speed-up, predicted and measured: differs from machine to machine
python -m labs.demos.speculation --trace run.jsonl && nanovllm view run.jsonl

The table uses a proposer that knows the answers, and replaces each draft by a wrong one with probability 1 - alpha. So
the acceptance rate is an input. The number of drafts is fixed for it, which the formula requires; the engine adapts it.
"""

import argparse
import random
import time
from statistics import median
from typing import Any

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Step
from nanovllm_extras import LLM, TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence, own_chunks
from nanovllm_extras.scheduling.patience import Patience

NUM_DRAFTS, NUM_ROUNDS = 4, 2
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 1024, "block_size": 16, "enable_overlap": False}
PLAIN: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "block_size": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "disable_by_batch_size": 8}
QUESTION, ANSWER = "What is a block table?", "A block table is the list of block ids of one sequence, in order."


def main() -> None:
    parser = argparse.ArgumentParser(description="Speculative decoding: passes, acceptance, speed.")
    parser.add_argument("--times", action="store_true", help="measure the speed-up instead of counting passes")
    parser.add_argument("--trace", help="record the run with n-gram drafts to this file, and print nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are too small for more
    if args.trace:
        with LLM(TINY_QWEN3, trace=args.trace, num_kv_blocks=32, speculative_config=NGRAM, **PLAIN) as llm:
            look_up(llm.engine)
    elif args.times:
        measure_times()
    else:
        print("drafts by n-gram look-up\n\npass   drafts                                              right   new text")
        look_up(LLMEngine(Config(TINY_QWEN3, num_kv_blocks=32, speculative_config=NGRAM, **PLAIN), Passes()))
        count_passes()


# ---- n-gram look-up, pass by pass


class Passes(SchedulingStats):
    """Prints what each forward pass verifies and keeps."""

    tokenizer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.number = self.num_accepted = 0
        self.drafts: list[int] = []

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        super().on_schedule(step, running, blocks)
        [(seq, _, _), *_] = own_chunks(step.chunks)
        self.number, self.num_accepted = self.number + 1, 0
        self.drafts = seq.unknown_token_ids.tolist()

    def on_verify(self, seq: Sequence, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        super().on_verify(seq, num_drafts, num_accepted, block_ids)
        self.num_accepted = num_accepted

    def on_update(self, step: Step, new_token_ids: list[int]) -> None:
        super().on_update(step, new_token_ids)
        drafts = " ".join(repr(self.tokenizer.decode([one])) for one in self.drafts) or "-"
        right = f"{self.num_accepted} of {len(self.drafts)}" if self.drafts else "-"
        text = self.tokenizer.decode(new_token_ids)
        print(f"{self.number:>4}   {drafts:50}  {right:6}  {text!r}")


def look_up(engine: LLMEngine) -> None:
    """Ask a question again that has been asked and answered in the same chat."""
    Passes.tokenizer = engine.tokenizer
    chat = [("user", QUESTION), ("assistant", ANSWER), ("user", QUESTION)]
    messages = [{"role": role, "content": content} for role, content in chat]
    text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    engine.add_request("A", text, SamplingParams(temperature=0, max_tokens=20))
    while engine.has_unfinished_requests():
        engine.step()


# ---- a given acceptance rate


class FixedCount(Patience):
    """Always the same number of drafts, however many are rejected."""

    def next_count(self) -> int:
        return 0 if self._pause else NUM_DRAFTS

    def note(self, num_drafts: int, num_accepted: int) -> None:
        pass


class Oracle:
    """Proposes the next tokens of known answers. Each draft is wrong with probability 1 - alpha."""

    def begin(self, answers: dict[str, list[int]], alpha: float) -> None:
        self.answers, self.alpha, self.random = answers, alpha, random.Random(1)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = []
        for seq, count in wanted:
            first = seq.num_known_tokens - seq.num_prompt_tokens
            right = self.answers[seq.request_id][first : first + count]
            drafts.append([one if self.random.random() < self.alpha else (one + 1) % 2048 for one in right])
        return drafts


def expected_tokens(alpha: float, num_drafts: int) -> float:
    """Return the tokens of a pass: 1 + alpha + alpha^2 + … + alpha^num_drafts."""
    return float(sum(alpha**i for i in range(num_drafts + 1)))


def serve(engine: LLMEngine, num_seqs: int, max_tokens: int) -> tuple[dict[str, list[int]], list[float]]:
    """Complete `num_seqs` prompts. Return the tokens of each, and the processor time of each step after the prompts."""
    for i in range(num_seqs):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"{i}", [100 + 40 * i + j for j in range(8)], params)
    answers: dict[str, list[int]] = {}
    seconds = []
    while engine.has_unfinished_requests():
        start = time.process_time()  # not the time in which other programs have the core
        outputs = engine.step().outputs
        seconds.append(time.process_time() - start)
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return answers, seconds[1:]


def make_engines() -> tuple[LLMEngine, LLMEngine, Oracle]:
    """Return an engine without drafts, one whose drafts come from an oracle, and the oracle."""
    oracle = Oracle()
    config = {"method": oracle, "num_speculative_tokens": NUM_DRAFTS, "disable_by_batch_size": 64}
    plain, speculating = (Config(TINY_QWEN3, speculative_config=one, **OPTIONS) for one in (None, config))
    engines = LLMEngine(plain), LLMEngine(speculating)
    scheduler: Any = engines[1].scheduler
    scheduler.drafter.make_patience = FixedCount
    return *engines, oracle


def count_passes() -> None:
    num_seqs, max_tokens = 8, 200
    plain, speculating, oracle = make_engines()
    answers, _ = serve(plain, num_seqs, max_tokens)
    print(f"\n{NUM_DRAFTS} drafts a pass, {num_seqs} answers of {max_tokens} tokens\n")
    print("alpha   drafts accepted   tokens a pass: formula   this run   same tokens")
    for alpha in (0.9, 0.8, 0.5, 0.1):
        oracle.begin(answers, alpha)
        before = speculating.get_stats()
        outputs, _ = serve(speculating, num_seqs, max_tokens)
        after = speculating.get_stats()
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        accepted = num_accepted / (after.num_draft_tokens - before.num_draft_tokens)
        in_run = 1 + num_accepted / (after.num_drafts - before.num_drafts)
        same = "yes" if outputs == answers else "NO"
        print(f"{alpha:5}   {accepted:>15.0%}   {expected_tokens(alpha, NUM_DRAFTS):>22.2f}   {in_run:>8.2f}   {same}")


# ---- times


def measure_times() -> None:
    plain, speculating, oracle = make_engines()
    print("drafts by    sequences   alpha   rows a pass   cost of a pass   speed: formula   measured")
    for num_seqs, max_tokens in ((1, 120), (32, 20)):
        answers, _ = serve(plain, num_seqs, max_tokens)
        for alpha in (0.9, 0.5, 0.1):
            oracle.begin(answers, alpha)
            show_times("oracle", plain, speculating, num_seqs, max_tokens, oracle)
    oracle.alpha = 1.0  # the model's own drafts are all right
    own = {"model": TINY_QWEN3, "num_speculative_tokens": NUM_DRAFTS, "disable_by_batch_size": 64}
    show_times("the model", plain, LLMEngine(Config(TINY_QWEN3, speculative_config=own, **OPTIONS)), 1, 120, oracle)


def show_times(
    name: str, plain: LLMEngine, speculating: LLMEngine, num_seqs: int, max_tokens: int, oracle: Oracle
) -> None:
    """Serve without and with drafts in turns, and print a row. The best of all rounds counts for each step."""
    rounds: list[tuple[list[float], list[float]]] = []
    for _ in range(NUM_ROUNDS):
        oracle.begin(oracle.answers, oracle.alpha)  # the same drafts in each round
        rounds.append((serve(plain, num_seqs, max_tokens)[1], serve(speculating, num_seqs, max_tokens)[1]))
    seconds, with_drafts = ([min(times) for times in zip(*runs, strict=True)] for runs in zip(*rounds, strict=True))
    cost = median(with_drafts) / median(seconds)
    formula, speed = expected_tokens(oracle.alpha, NUM_DRAFTS) / cost, sum(seconds) / sum(with_drafts)
    rows = f"{num_seqs} x {1 + NUM_DRAFTS}"
    print(
        f"{name:10} {num_seqs:>11}   {oracle.alpha:>5}   {rows:>11}   {cost:>14.2f}   {formula:>14.2f}   {speed:>8.2f}"
    )


if __name__ == "__main__":
    main()
