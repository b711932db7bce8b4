"""Measure the accuracy of an fp8 KV cache on the bundled model, which has memorised its answers.

    python -m benchmarks.fp8_accuracy [--backend triton] [--dtype bfloat16] [--json out.json]

Each question of its corpus is answered greedily, with a cache in the model's dtype and with one in fp8. How many
answers are the same to the last token? Then the same answer is computed with both caches and in float32. How large is
the error of the log-probabilities of the five likeliest tokens at each position? Because the model has memorised the
answers, four of these five tokens are unlikely, and an error shows in their logits.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine
from nanovllm_extras import LLM, TINY_QWEN3, RequestOutput, SamplingParams
from tools.read_corpus import load_corpus

CORPUS = Path(__file__).resolve().parent.parent / "tools" / "corpus"
MAX_TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", help="attention backend: auto, torch or triton")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = [entry.questions[0] for entry in load_corpus(CORPUS)][: args.num_questions]
    report = measure(questions, args.backend, args.dtype)
    for name, value in report.items():
        print(f"{name:<44} {value}")
    if args.json:
        args.json.write_text(json.dumps({**report, "machine": describe_machine(report["device"])}, indent=2) + "\n")


def measure(questions: list[str], backend: str, dtype: str) -> dict[str, Any]:
    options: dict[str, Any] = {"attention_backend": backend, "dtype": dtype}
    plain, fp8 = LLM(TINY_QWEN3, **options), LLM(TINY_QWEN3, kv_cache_dtype="fp8", **options)
    chats = [[{"role": "user", "content": question}] for question in questions]
    answers = {name: answer(llm, chats) for name, llm in (("plain", plain), ("fp8", fp8))}
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in answers["plain"]]
    num_prompt_tokens = [len(output.prompt_token_ids) for output in answers["plain"]]
    exact_model = LLM(TINY_QWEN3, attention_backend="torch", dtype="float32")
    exact = judge(exact_model, texts, num_prompt_tokens, 5)
    errors = [differences(exact, judge(llm, texts, num_prompt_tokens, 50)) for llm in (plain, fp8)]
    return {
        "device": plain.engine.runner.device.type,
        "backend": fp8.engine.description.split(";")[0],
        "questions": len(questions),
        "answered the same to the last token": sum(
            a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(*answers.values(), strict=True)
        ),
        "positions compared": len(exact),
        f"rms error of log-probabilities, {dtype} cache": round(rms(errors[0]), 4),
        "rms error of log-probabilities, fp8 cache": round(rms(errors[1]), 4),
        f"largest error, {dtype} cache": round(max(map(abs, errors[0])), 3),
        "largest error, fp8 cache": round(max(map(abs, errors[1])), 3),
    }


def answer(llm: LLM, chats: list[Any]) -> list[RequestOutput]:
    return llm.chat(chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)


def judge(llm: LLM, texts: list[list[int]], num_prompt_tokens: list[int], num_likeliest: int) -> list[dict[int, float]]:
    """Return the log-probabilities of the likeliest tokens at every position, given the tokens before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=num_likeliest)
    positions = []
    for output, start in zip(llm.generate(texts, params, use_tqdm=False), num_prompt_tokens, strict=True):
        assert output.prompt_logprobs is not None
        for position in output.prompt_logprobs[start:]:
            assert position is not None
            positions.append({token_id: logprob.logprob for token_id, logprob in position.items()})
    return positions


def differences(exact: list[dict[int, float]], other: list[dict[int, float]]) -> list[float]:
    """Return the log-probabilities in `other` minus those in `exact`; `other` has more tokens, so few are missing."""
    return [
        other_position[token_id] - logprob
        for position, other_position in zip(exact, other, strict=True)
        for token_id, logprob in position.items()
        if token_id in other_position
    ]


def rms(errors: list[float]) -> float:
    return math.sqrt(sum(error * error for error in errors) / len(errors))


if __name__ == "__main__":
    main()
