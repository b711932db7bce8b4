"""How does a prompt with its parameters become a request? Checked first, so that a bad one changes nothing.

A prompt is text, token ids, or a dict of one of the two. Called by `LLMEngine` when requests are added.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from nanovllm.engine.beam_search import BeamSearch
from nanovllm.engine.detokenizer import TokenDecoder
from nanovllm.engine.embedding import Embedding
from nanovllm.engine.limits import Limits
from nanovllm.engine.request import Request
from nanovllm.engine.structured_request import StructuredRequest
from nanovllm.execution.grammar_compiler import GrammarCompiler
from nanovllm.inputs import Prompt
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.scheduling.sequence import Sequence
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.vllm_options import is_neutral
from nanovllm.vllm_tables import REQUEST_OPTIONS

Params = SamplingParams | PoolingParams
"""What a request asks for: text, or an embedding."""


@dataclass(frozen=True)
class Intake:
    """Makes requests for one engine. Each method raises a ValueError or TypeError for what cannot be served."""

    limits: Limits
    tokenizer: Any
    decoder: TokenDecoder | None
    eos_token_ids: frozenset[int]
    default_sampling_params: SamplingParams
    grammars: GrammarCompiler
    seed: int

    def encode(self, prompt: Prompt, params: Params | None = None) -> tuple[str | None, list[int]]:
        """Text (None if there was none) and token ids of a prompt, or of the end of it that `params` keep."""
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.limits.vocab_size)
        if isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-self.limits.num_kept_tokens(params) :]
        self.limits.check_prompt_len(len(token_ids))
        return text, token_ids

    def take_params(self, params: Any) -> Any:
        """A checked copy of the parameters. A grammar in them is compiled, and kept until the request is made."""
        params = self._copy_params(params)
        if isinstance(params, SamplingParams):
            self._make_grammars(params)
        return params

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None,
        priority: int,
        stream: bool,
        num_requests_before: int,
    ) -> Request:
        """Requests without a seed get one from `num_requests_before`: it depends on the order of arrival alone."""
        params = self._copy_params(self.default_sampling_params if params is None else params)
        text, token_ids = self.encode(prompt, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int, got {priority!r}")
        if isinstance(params, PoolingParams):
            return Embedding(request_id, text, token_ids, params, priority)
        own_seed = 1 << 63 | (self.seed * 1_000_003 + num_requests_before) % 2**63
        seed = own_seed if params.seed is None else params.seed
        bad_word_ids = encode_bad_words(params.bad_words or (), self.tokenizer)
        grammars = self._make_grammars(params)
        # one sequence for each sample; the first computes the prompt, the others are its children
        seqs = [
            Sequence(request_id, token_ids, params, self.eos_token_ids, priority, seed, i, bad_word_ids, grammars[i])
            for i in range(params.n)
        ]
        seqs[0].children = seqs[1:]
        kind = Request if params.structured_outputs is None else StructuredRequest
        return kind(text, token_ids, seqs, stream, self.tokenizer, self.decoder, time.monotonic())

    def make_beam_search(self, request_id: str, prompt: Prompt, params: BeamSearchParams) -> BeamSearch:
        text, token_ids = self.encode(prompt)
        self.limits.check_beam_search_params(params)
        eos_token_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        return BeamSearch(request_id, text, token_ids, params, eos_token_ids, self.tokenizer, time.monotonic())

    def _copy_params(self, params: Any) -> Any:
        return params.clone() if isinstance(params, PoolingParams) else self.limits.take_params(params)

    def _make_grammars(self, params: SamplingParams) -> list[Any]:
        """For each sample what its output must fit, or None."""
        if params.structured_outputs is None:
            return [None] * params.n
        grammar = self.grammars.compile(StructuredOutputsParams.of(params.structured_outputs))
        return [grammar.copy() for _ in range(params.n)]


# ---- the forms of a prompt


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """Text (None if there was none) and token ids of a prompt; TypeError or ValueError if it is not one."""
    text: Any = None
    token_ids: Any = prompt
    if isinstance(prompt, Mapping):
        others = {name: value for name, value in prompt.items() if name not in ("prompt", "prompt_token_ids")}
        if unknown := [name for name, value in others.items() if not is_neutral(name, value, REQUEST_OPTIONS)]:
            raise ValueError(f"a prompt dict has the keys prompt or prompt_token_ids, got {sorted(map(str, unknown))}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids", prompt.get("prompt"))
        if "prompt_token_ids" in prompt and isinstance(token_ids, str):
            raise TypeError(f"prompt_token_ids must be a list of token ids, got {token_ids!r}")
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


def encode_bad_words(bad_words: SequenceOf[str], tokenizer: Any) -> list[list[int]]:
    """Each word as tokens, as it begins a text and as it follows a space; where these differ, both."""
    encoded: list[list[int]] = []
    for word in bad_words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids and token_ids not in encoded:
                encoded.append(token_ids)
    return encoded
