"""A request from arrival to end, and the forms in which its prompt may come.

Decides what a legal prompt is. Made by `LLMEngine.add_request`, kept by the engine until the request has finished.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from nanovllm.detokenizer import Detokenizer
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.sequence import Sequence

Prompt = str | SequenceOf[int] | Mapping[str, Any]


@dataclass
class Request:
    """What the output of a request needs besides its sequence."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    seq: Sequence
    stream: bool  # whether every step that advances it gives an output, or only its last
    detokenizer: Detokenizer
    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    def make_output(self) -> RequestOutput:
        """All that is known so far, as a snapshot."""
        seq = self.seq
        is_finished = seq.finish_reason is not None
        token_ids = seq.output_token_ids
        text = self.detokenizer.update(token_ids, is_finished)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[CompletionOutput(0, text, token_ids, seq.finish_reason, seq.stop_reason)],
            finished=is_finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
            metrics=RequestMetrics(self.arrival_time, self.first_token_time, self.finished_time, len(token_ids)),
        )


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """Text (None if there was none) and token ids of a prompt; TypeError or ValueError if it is not one."""
    text: Any = None
    token_ids: Any = prompt
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ValueError(f"a prompt dict has the keys prompt or prompt_token_ids, got {sorted(map(str, unknown))}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(token_ids, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so a prompt must be token ids, got text")
        text, token_ids = token_ids, tokenizer.encode(token_ids)
    return text, check_token_ids(token_ids, vocab_size)


def check_token_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """A list of ints in [0, vocab_size), from any sequence of integers; an error names the first bad one."""
    if isinstance(token_ids, torch.Tensor):
        token_ids = token_ids.tolist()
    if isinstance(token_ids, bytes | Mapping) or not hasattr(token_ids, "__iter__"):
        raise TypeError(
            "a prompt must be a str, a list of token ids, or a dict with prompt or prompt_token_ids, "
            f"got {type(token_ids).__name__}"
        )
    checked = []
    for i, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise TypeError(f"prompt token ids must be integers, got {token_id!r} at index {i}")
        checked.append(int(token_id))
        if not 0 <= checked[i] < vocab_size:
            raise ValueError(
                f"token id {checked[i]} at index {i} is outside the vocabulary: allowed are 0 to {vocab_size - 1}"
            )
    return checked
