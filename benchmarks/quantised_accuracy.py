"""Measure the accuracy of weights in 8 and 4 bits on the bundled model, compared with bfloat16 and float32.

    python -m benchmarks.quantised_accuracy [--settings int8 int4] [--text FILE] [--json out.json]

Each setting has three results: how many questions, in wordings that are not in the training data, and how many sums are
answered correctly; the error of the log-probabilities of the five likeliest tokens, compared with float32, at every
position of a text that the model was not trained on; and at how many positions the likeliest token is the same.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine
from benchmarks.fp8_accuracy import CORPUS, differences, judge, rms
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from tools.read_corpus import load_corpus, split_sums, sum_exchange

TEXT = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
WINDOW = 512  # tokens of the text that are judged together
INT4 = {"method": "int4"}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4, groups of 128": {"quantization": {**INT4, "group_size": 128}},
    "int4, groups of 64": {"quantization": {**INT4, "group_size": 64}},
    "int4, groups of 32": {"quantization": {**INT4, "group_size": 32}},
    "int8 K and V": {"kv_cache_dtype": "int8"},
    "int4, embeddings in bfloat16": {"quantization": {**INT4, "embeddings": False}},
    "int4, embeddings too": {"quantization": {**INT4, "embeddings": "int4"}},
}
HEADER = ("wordings", "sums", "rms error", "largest", "same likeliest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    exact = judge_text(LLM(TINY_QWEN3, **SETTINGS["float32"]), text, 5)
    print(f"{'':<30}" + "".join(f"{title:>16}" for title in HEADER))
    rows = []
    for name in args.settings:
        rows.append({"setting": name, **measure(LLM(TINY_QWEN3, **SETTINGS[name]), text, exact)})
        print(f"{name:<30}" + "".join(f"{rows[-1][title]:>16}" for title in HEADER), flush=True)
    if args.json:
        report = {"rows": rows, "positions": len(exact), "text": args.text.name, "machine": describe_machine("cpu")}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(llm: LLM, text: str, exact: list[dict[int, float]]) -> dict[str, Any]:
    entries = load_corpus(CORPUS)
    sums = [sum_exchange(pair, i) for i, pair in enumerate(split_sums()[1])]
    judged = judge_text(llm, text, 50)  # more than are compared, so that few are missing
    errors = differences(exact, judged)
    same = sum(likeliest(a) == likeliest(b) for a, b in zip(exact, judged, strict=True))
    return {
        "wordings": f"{num_right(llm, [(entry.unseen, entry.answer) for entry in entries])}/{len(entries)}",
        "sums": f"{num_right(llm, sums)}/{len(sums)}",
        "rms error": round(rms(errors), 4),
        "largest": round(max(map(abs, errors)), 3),
        "same likeliest": f"{same / len(exact):.1%}",
    }


def num_right(llm: LLM, exchanges: list[tuple[str, str]]) -> int:
    chats = [[{"role": "user", "content": question}] for question, _ in exchanges]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    return sum(answer == expected for answer, (_, expected) in zip(answers, exchanges, strict=True))


def judge_text(llm: LLM, text: str, num_likeliest: int) -> list[dict[int, float]]:
    """Return the log-probabilities of the likeliest tokens at every position except the first of each window."""
    token_ids = llm.get_tokenizer().encode(text, verbose=False)  # longer than the model's context: no warning
    windows = [token_ids[start : start + WINDOW] for start in range(0, len(token_ids), WINDOW)]
    return judge(llm, windows, [1] * len(windows), num_likeliest)


def likeliest(position: dict[int, float]) -> int:
    return max(position, key=position.__getitem__)


if __name__ == "__main__":
    main()
