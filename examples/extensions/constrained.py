"""Constrained decoding: the output is one of the strings that the request lists, such as the labels of a classifier.

"Efficient Guided Generation for Large Language Models" (Willard & Louf 2023, https://arxiv.org/abs/2307.09702) masks
the logits of tokens that the constraint forbids at each step. Here the constraint is a trie of the choices' tokens. The
output so far leads to a node; its children are the tokens that may come next, and the end-of-sequence tokens may come
where a choice ends:

    choices "red", "redo", "blue"        root ─ r ─ e ─ d ─ END          after "r", "e", "d" the model may
                                          │             └─ o ─ END       end, or sample "o"
                                          └─ b ─ l ─ u ─ e ─ END

The node is found from the output's tokens in each step, so nothing is kept for a request: preemption, several samples
and other requests in the same batch need no code. Temperature and top-p apply to what the mask leaves.

A choice is allowed in one tokenisation, that of the tokenizer by itself, and the end token costs one more step. The
choice is greedy token by token; the most likely whole string may be another one (`scoring.py` compares whole strings).
The masks are made on the host, so the token of a step must be known before the next one: no overlap, no speculation.
The server and `nanovllm_extras.LLM` sample in another way and refuse this file: they have grammars of their own.

    llm = LLM(model, extension="examples/extensions/constrained.py")
    nanovllm bench compare examples/extensions/constrained.py
    llm.generate(prompt, SamplingParams(extra_args={"choices": ["red", "redo", "blue"]}))
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.loader import load_tokenizer
from nanovllm.model_runner import ModelRunner
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence

MAX_TRIES = 1024  # lists of choices whose tries are kept
END = -1
Trie = dict[int, Any]  # token -> Trie


def choices_of(seq: Sequence) -> list[str] | None:
    return (seq.sampling_params.extra_args or {}).get("choices")


class ChoiceScheduler(Scheduler):
    def add(self, seq: Sequence) -> None:
        choices = choices_of(seq)
        if choices is not None:
            if not choices or not all(isinstance(one, str) and one for one in choices):
                raise ValueError(f"extra_args['choices'] must be a list of strings that are not empty, got {choices!r}")
            if not seq.stop_token_ids:
                raise ValueError("extra_args['choices'] needs a token that ends the output, but there is none: set "
                                 "ignore_eos to False, or give stop_token_ids")  # fmt: skip
        super().add(seq)


class ChoiceRunner(ModelRunner):
    def __init__(self, config: Config, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer is None:
            raise ValueError(f"constrained.py needs a tokenizer, but {folder} has none")
        self.make_trie = lru_cache(MAX_TRIES)(self.build_trie)
        super().__init__(config, folder)

    def build_trie(self, choices: tuple[str, ...]) -> Trie:
        root: Trie = {}
        for choice in choices:
            node = root
            for token in self.tokenizer.encode(choice, add_special_tokens=False):
                node = node.setdefault(token, {})
            node[END] = {}
        return root

    def allowed_tokens(self, seq: Sequence) -> list[int] | None:
        """Return the tokens that may come next, None for all."""
        choices = choices_of(seq)
        if choices is None:
            return None
        node = self.make_trie(tuple(choices))
        for token in seq.token_ids[seq.num_prompt_tokens :]:
            node = node[token]
        return [token for token in node if token != END] + (list(seq.stop_token_ids) if END in node else [])

    def make_metadata(self, step: Step, metadata: AttentionMetadata) -> AttentionMetadata:
        self.allowed = [self.allowed_tokens(seq) for seq in step.samples]  # for `sample`: a row of logits for each
        return super().make_metadata(step, metadata)

    def sample(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Sample as before, from logits whose forbidden tokens have -inf."""
        logits = self.model.compute_logits(hidden)  # [num_samples, vocab_size]
        for row, tokens in enumerate(self.allowed):
            if tokens is not None:
                indices = torch.tensor(tokens, device=logits.device)
                kept = logits[row, indices]
                logits[row] = -torch.inf
                logits[row, indices] = kept
        return self.sample_tokens(logits, **vars(batch.sampling), argmax=self.backend.argmax)


runner_cls = ChoiceRunner
scheduler_cls = ChoiceScheduler
extra_args = {"choices": list}
