"""What requests change of the logits before a draw: allowed tokens, biases, bad words, the users' own functions,
penalties.

Each is a `Processor` of a sequence, and they run in vLLM's order: a class below, its tensors for a step, and what it
does to the logits. `processors_of` says which ones a request asks for; `input_processor.py` calls it.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.checks import check_int, check_list, check_number, check_strings, check_token_ids
from nanovllm_extras.options.request_params import LogitsProcessor, SamplingParams
from nanovllm_extras.options.surrogates import check_texts
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.logits_processors import ForbiddenTokens, MinTokens, Processor, ProcessorRow, forbid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def processors_of(
    params: SamplingParams, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> tuple[Processor, ...]:
    """Return the logits processors that `params` ask for. Bad words need the tokenizer, and the model's vocabulary."""
    processors: list[Processor] = [MinTokens()] if params.min_tokens else []
    if params.allowed_token_ids:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if params.bad_words:
        assert tokenizer is not None  # the engine refuses bad words without one
        processors.append(BadWords(encode_bad_words(params.bad_words, tokenizer, vocab_size)))
    if params.logits_processors:
        processors.append(UserFunctions())
    if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1):
        processors.append(Penalties())
    return tuple(processors)


# ---- allowed tokens


class AllowedTokens:
    """Allows only the tokens of `allowed_token_ids`."""

    place, reads_output = 1, False

    def __init__(self, token_ids: Collection[int]) -> None:
        self.token_ids = torch.tensor(list(token_ids))  # once: there may be as many as the vocabulary has

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "AllowedRows":
        lists = [row.processor.token_ids for row in rows]
        return AllowedRows(
            rows=torch.tensor([row for row, _, _, _ in rows]),
            entries=torch.arange(len(lists)).repeat_interleave(torch.tensor([len(ids) for ids in lists])),
            token_ids=torch.cat(lists),
        )


@dataclass(frozen=True)
class AllowedRows:
    """Restricted rows, and what they allow as pairs (entry of `rows`, token)."""

    rows: torch.Tensor  # [num_restricted] int64
    entries: torch.Tensor  # [num_allowed] int64
    token_ids: torch.Tensor  # [num_allowed] int64

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        is_forbidden = torch.ones(len(self.rows), logits.shape[1], dtype=torch.bool, device=logits.device)
        is_forbidden[self.entries, self.token_ids] = False
        logits[self.rows] = logits[self.rows].masked_fill(is_forbidden, -torch.inf)


# ---- biases


class LogitBias:
    """Single logits to which a value is added."""

    place, reads_output = 2, False

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.token_ids = torch.tensor(list(biases))  # once: a step may have 256 sequences with 1,024 biases each
        self.values = torch.tensor(list(biases.values()), dtype=torch.float32)

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "BiasRows":
        processors = [row.processor for row in rows]
        lengths = torch.tensor([len(processor.token_ids) for processor in processors])
        return BiasRows(
            rows=torch.tensor([row for row, _, _, _ in rows]).repeat_interleave(lengths),
            token_ids=torch.cat([processor.token_ids for processor in processors]),
            values=torch.cat([processor.values for processor in processors]),
        )


@dataclass(frozen=True)
class BiasRows:
    rows: torch.Tensor  # [num_biases] int64
    token_ids: torch.Tensor  # [num_biases] int64
    values: torch.Tensor  # [num_biases] float32

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        logits[self.rows, self.token_ids] += self.values


# ---- bad words


class BadWords:
    """Forbids the last token of a bad word if the output ends with all tokens before it."""

    place = 2

    def __init__(self, bad_word_ids: list[list[int]]) -> None:
        self.longest = max((len(word) - 1 for word in bad_word_ids), default=0)
        self.reads_output = self.longest > 0
        # by the token before the last one (None where there is none): few of 256 words can follow the newest token
        self.words: dict[int | None, list[tuple[list[int], int]]] = {}
        for *first, last in bad_word_ids:
            self.words.setdefault(first[-1] if first else None, []).append((first, last))

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> ForbiddenTokens | None:
        return forbid((row.row, last) for row in rows for last in row.processor.last_tokens(row.seq, row.position))

    def last_tokens(self, seq: Sequence, position: int) -> Iterator[int]:
        """Yield the last token of each bad word whose other tokens end the output before `position`."""
        end = seq.token_ids[max(seq.num_prompt_tokens, position - self.longest) : position].tolist()
        for _, last in self.words.get(None, ()):
            yield last
        for first, last in self.words.get(end[-1], ()) if end else ():
            if end[-len(first) :] == first:
                yield last


def encode_bad_words(
    bad_words: Collection[str], tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> list[list[int]]:
    """Encode each word, both as the beginning of a text and after a space. Equal encodings are kept once.

    A tokenizer may have more tokens than the model. The model never writes these, so such words need no processor.
    """
    encoded: dict[tuple[int, ...], list[int]] = {}
    for word in bad_words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids and max(token_ids) < vocab_size:
                encoded.setdefault(tuple(token_ids), token_ids)
    return list(encoded.values())


# ---- the users' own functions


class UserFunctions:
    """`logits_processors`, called with the output so far."""

    place, reads_output = 3, True

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "UserFunctionRows":
        return UserFunctionRows(
            [(row, seq.output_token_ids, tuple(seq.sampling_params.logits_processors or ())) for row, seq, _, _ in rows]
        )


@dataclass(frozen=True)
class UserFunctionRows:
    rows: list[tuple[int, list[int], tuple[LogitsProcessor, ...]]]  # row, output, functions

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        for row, output_token_ids, processors in self.rows:
            for i, processor in enumerate(processors):
                given = processor(output_token_ids, logits[row])
                check_logits(f"logits_processors[{i}]", given, logits.shape[1])
                logits[row] = given


def check_logits(name: str, value: object, vocab_size: int) -> None:
    """Raise unless a function has returned one logit per token: one number would become the logit of every token."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must return the logits, a tensor of {vocab_size} numbers, got {type(value).__name__}")
    if value.shape[-1:] != (vocab_size,) or value.numel() != vocab_size:
        raise ValueError(f"{name} must return a tensor of {vocab_size} logits, got shape {list(value.shape)}")


# ---- penalties


class Penalties:
    """Tokens that prompt or output hold already become less likely."""

    place, reads_output = 4, True

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "PenaltyRows":
        seqs = [seq for _, seq, _, _ in rows]
        params = [seq.sampling_params for seq in seqs]
        return PenaltyRows(
            rows=torch.tensor([row for row, _, _, _ in rows]),
            presence=column(params, "presence_penalty", torch.float32)[:, None],
            frequency=column(params, "frequency_penalty", torch.float32)[:, None],
            # beyond these, float32 would give 0 and infinity, and then NaN
            repetition=column(params, "repetition_penalty", torch.float64).clamp(1e-30, 1e30).float()[:, None],
            prompt_ids=pad([seq.token_ids[: seq.num_prompt_tokens] for seq in seqs]),
            output_ids=pad([seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]),
        )


@dataclass(frozen=True)
class PenaltyRows:
    """Rows whose logits depend on their prompt and output."""

    rows: torch.Tensor  # [num_penalized] int64, rows of the logits
    presence: torch.Tensor  # [num_penalized, 1] float32
    frequency: torch.Tensor  # [num_penalized, 1] float32
    repetition: torch.Tensor  # [num_penalized, 1] float32
    prompt_ids: torch.Tensor  # [num_penalized, longest prompt] int64, -1 beyond its end
    output_ids: torch.Tensor  # [num_penalized, longest output] int64, -1 beyond its end

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        logits[self.rows] = apply_penalties(logits[self.rows], self)


def apply_penalties(logits: torch.Tensor, penalties: PenaltyRows) -> torch.Tensor:
    """Penalise logits: [num_penalized, vocab_size] -> as logits. Repetition comes first, as in vLLM."""
    prompt_counts = count_tokens(penalties.prompt_ids, logits.shape[1])
    output_counts = count_tokens(penalties.output_ids, logits.shape[1])  # [num_penalized, vocab_size]
    repeated = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where((prompt_counts + output_counts) > 0, repeated, logits)
    return logits - penalties.frequency * output_counts - penalties.presence * (output_counts > 0)


def count_tokens(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Count each token: [num_rows, length], padded with -1 -> [num_rows, vocab_size] float32."""
    counts = torch.zeros(len(token_ids), vocab_size + 1, dtype=torch.float32, device=token_ids.device)
    counts.scatter_add_(1, token_ids + 1, torch.ones_like(token_ids, dtype=torch.float32))
    return counts[:, 1:]  # column 0 has collected the -1s


def column(params: Iterable[object], name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return one field of all rows: [num_rows]"""
    return torch.tensor([getattr(p, name) for p in params], dtype=dtype)


def pad(rows: list["array[int]"]) -> torch.Tensor:
    """Stack arrays as rows, padded with -1: [len(rows), longest] int64"""
    padded = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)


# ---- how the fields of `SamplingParams` are checked


def check_allowed_token_ids(name: str, value: Any) -> None:
    check_token_ids(name, value)
    if len(value) == 0:
        raise ValueError(f"{name} must name at least 1 token or be None, got an empty list")


def check_logits_processors(name: str, value: object) -> None:
    for i, processor in enumerate(check_list(name, value, "callables")):
        if not callable(processor):
            raise TypeError(f"{name}[{i}] must be callable, got {processor!r}")


def check_logit_bias(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict from token id to bias or None, got {value!r}")
    for token_id, bias in value.items():
        check_int(f"{name} key", token_id, 0)
        check_number(f"{name}[{token_id}]", bias, -100, 100)


def check_words(name: str, value: object, or_one: bool = False) -> None:
    check_strings(name, value, or_one)
    check_texts(name, value)


def check_bad_words(name: str, value: object) -> None:
    check_words(name, value)
    for i, word in enumerate(check_list(name, value, "strings")):
        if not word.strip(" "):
            raise ValueError(f"{name}[{i}] must not be empty, got {word!r}")


FIELD_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "bad_words": check_bad_words,
    "stop": partial(check_words, or_one=True),
    "logit_bias": check_logit_bias,
    "allowed_token_ids": check_allowed_token_ids,
    "logits_processors": check_logits_processors,
}
