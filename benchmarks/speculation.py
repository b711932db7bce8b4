"""Compare single requests with and without speculation by n-gram look-up, for answers that repeat the prompt or not.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --rounds 30 --num-speculative-tokens 5

The bundled model answers conversations of four kinds. The first two repeat text of their prompts, the other two do not:

    asked again     a question, its answer, and the same question once more
    passage         the answer as a passage of the prompt, and the question behind it
    explanation     a long explanation, of 250 tokens at most
    fact            a short answer

Both engines serve each request in turns, with an empty prefix cache, and the time includes prefill. All rounds have the
same steps. A request's time is the sum of each step's fastest round, so that other programs on the machine matter
little. The outputs must be the same tokens.
"""

import argparse
import time
from typing import Any, NamedTuple

from benchmarks.common import describe_machine
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

FACTS = (
    "How does prefix caching work?",
    "What is a block table?",
    "What is speculative decoding?",
)
EXPLANATIONS = (
    "Explain continuous batching in detail.",
    "Explain the scheduler in detail.",
    "Explain prefix caching in detail.",
)
MAX_TOKENS = 250


class Case(NamedTuple):
    kind: str
    question: str
    messages: list[dict[str, str]]


class Result(NamedTuple):
    """Return the seconds of both engines, and the statistics of the engine with drafts."""

    num_tokens: int
    plain_s: float
    speculating_s: float
    num_draft_tokens: int
    num_accepted_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Speculation by n-gram look-up against none, at one request.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--prompt-lookup-min", type=int, default=3)
    parser.add_argument("--prompt-lookup-max", type=int, default=5)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompt_lookup_min": args.prompt_lookup_min,
        "prompt_lookup_max": args.prompt_lookup_max,
    }
    plain, speculating = LLM(TINY_QWEN3), LLM(TINY_QWEN3, speculative_config=options)
    print(describe_machine("cpu"))
    print(f"{speculating.engine.description}; {speculating.engine.parts.block_size} tokens a block")
    scheduler: Any = speculating.engine.scheduler
    max_rows = scheduler.drafter.max_rows
    print(f"{options}, at most {max_rows} tokens a step")
    columns = f"{'tokens':>7} {'tokens/s':>9} {'with drafts':>12} {'ratio':>6} {'drafts':>7} {'accepted':>9}"
    print(f"{'kind':<12} {'question':<40} {columns}")
    results: dict[str, list[Result]] = {}
    for case in make_cases(plain):
        result = measure(plain, speculating, case, args.rounds)
        results.setdefault(case.kind, []).append(result)
        print(f"{case.kind:<12} {case.question:<40} {describe(result)}")
    for kind, of_kind in results.items():
        print(f"{kind:<12} {'all':<40} {describe(total(of_kind))}")


def make_cases(llm: LLM) -> list[Case]:
    """Each question with the model's own answer in its prompt, and by itself."""
    cases = []
    for question in FACTS:
        answer = answer_of(llm, [user(question)])
        again = [user(question), {"role": "assistant", "content": answer}, user(question)]
        cases.append(Case("asked again", question, again))
        cases.append(Case("passage", question, [user(f"{answer} {question}")]))
        cases.append(Case("fact", question, [user(question)]))
    cases += [Case("explanation", question, [user(question)]) for question in EXPLANATIONS]
    return sorted(cases, key=lambda case: ["asked again", "passage", "explanation", "fact"].index(case.kind))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


def answer_of(llm: LLM, messages: list[dict[str, str]]) -> str:
    return llm.chat(messages, greedy(), use_tqdm=False)[0].outputs[0].text


def measure(plain: LLM, speculating: LLM, case: Case, rounds: int) -> Result:
    """Raise AssertionError if drafts have changed a token."""
    rounds_of: tuple[list[list[float]], list[list[float]]] = ([], [])
    answers: list[list[int]] = []
    before = speculating.get_stats()
    [prompt] = plain.render_chat(case.messages)
    for _ in range(rounds):
        for llm, taken in zip((plain, speculating), rounds_of, strict=True):
            seconds, answer = serve(llm, prompt)
            taken.append(seconds)
            answers.append(answer)
    assert all(answer == answers[0] for answer in answers), "drafts change no token"
    plain_s, speculating_s = (sum(map(min, zip(*taken, strict=True))) for taken in rounds_of)
    stats = speculating.get_stats()
    num_drafts = stats.num_draft_tokens - before.num_draft_tokens
    num_accepted = stats.num_accepted_tokens - before.num_accepted_tokens
    return Result(len(answers[0]), plain_s, speculating_s, num_drafts // rounds, num_accepted // rounds)


def serve(llm: LLM, prompt: Any) -> tuple[list[float], list[int]]:
    """Seconds of each step of one request, and its tokens."""
    llm.reset_prefix_cache()
    engine, seconds = llm.engine, []
    engine.add_request("request", prompt, greedy())
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        step = engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds, list(step.outputs[0].outputs[0].token_ids)


def total(results: list[Result]) -> Result:
    tokens, plain, speculating, drafts, accepted = map(sum, zip(*results, strict=True))
    return Result(int(tokens), plain, speculating, int(drafts), int(accepted))


def describe(result: Result) -> str:
    rates = f"{result.num_tokens / result.plain_s:>9.0f} {result.num_tokens / result.speculating_s:>12.0f}"
    ratio = f"{result.plain_s / result.speculating_s:>5.2f}x"
    share = f"{result.num_accepted_tokens / result.num_draft_tokens:>8.0%}" if result.num_draft_tokens else f"{'-':>8}"
    return f"{result.num_tokens:>7} {rates} {ratio} {result.num_draft_tokens:>7} {share}"


if __name__ == "__main__":
    main()
