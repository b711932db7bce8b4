"""Show when a stream holds text back: a token may be a part of a character, or the beginning of a stop string.

    python -m labs.demos.streaming
    python -m labs.demos.streaming "one two three" --stop "o th"

A logits processor forces the tokens, so that both cases occur. The engine streams the text as for any request.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

TEXT = "a KV 块.\nUser's.\nUser: more"
STOP = "\nUser:"


def main() -> None:
    parser = argparse.ArgumentParser(description="When a stream holds text back.")
    parser.add_argument("text", nargs="?", default=TEXT, help=f"what the model is forced to write ({TEXT!r})")
    parser.add_argument("--stop", default=STOP, help=f"the stop string ({STOP!r})")
    args = parser.parse_args()
    with LLM(TINY_QWEN3, dtype="float32", attention_backend="torch", enforce_eager=True) as llm:
        tokenizer: Any = llm.get_tokenizer()
        planned = tokenizer.encode(args.text)
        params = SamplingParams(
            temperature=0, max_tokens=len(planned), stop=args.stop, logits_processors=[force(planned)]
        )
        print("token   decoded alone   text that the stream has shown")
        for i, output in enumerate(llm.stream("Write.", params)):
            answer = output.outputs[0]
            print(f"{i:5}   {tokenizer.decode([planned[i]])!r:13}   {answer.text!r}")
        print(f"finish_reason {answer.finish_reason!r}, stop_reason {answer.stop_reason!r}")


def force(planned: list[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """Return a logits processor that allows one token at each position."""

    def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(logits, -torch.inf)  # [vocab_size]
        logits[planned[len(output_ids)]] = 0
        return logits

    return only


if __name__ == "__main__":
    main()
