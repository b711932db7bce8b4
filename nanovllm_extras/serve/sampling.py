"""From a request's fields to `SamplingParams`. Most have the same names."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm_extras.answer_parts.harmony import find_end_tokens
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.options.request_params import FIELD_CHECKS, SamplingParams
from nanovllm_extras.options.structured_params import StructuredOutputsParams
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from nanovllm_extras.serve.parsers.parser_registry import Parsers, is_forced

LEAST_TOP_P = 1e-6
"""Replaces 0, which OpenAI allows and the engine does not: both keep only the likeliest token."""

NO_BUDGET = "thinking_token_budget cannot be used: the reasoning of gpt-oss does not end with a tag; use max_tokens"
Form = StructuredOutputsParams | None
"""What the output must fit (`structured_outputs.py`)."""

SAME = (
    "temperature",
    "n",  # after the temperature: several samples need one above 0, and `n` is at fault
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)


def completion_params(body: CompletionRequest, engine: LLMEngine, form: Form = None) -> SamplingParams:
    """With `echo` and `logprobs` the prompt's log-probabilities are wanted too."""
    fields: dict[str, object] = {"logprobs": body.logprobs, "structured_outputs": form}
    if body.max_tokens is not None:
        fields["max_tokens"] = max(1, body.max_tokens)  # the one token of a request for 0 is not shown
    if body.echo:
        fields["prompt_logprobs"] = body.logprobs
    if body.thinking_token_budget is not None:
        fields["thinking_token_budget"] = body.thinking_token_budget
    return with_fields(engine, body, fields)


def chat_params(body: ChatCompletionRequest, engine: LLMEngine, parsers: Parsers, form: Form = None) -> SamplingParams:
    """The length is open, unless the request or the model's generation_config.json limits it. Special tokens that may
    be tags stay in the text, unless the request says otherwise.
    """
    default, max_tokens = engine.parts.default_sampling_params, body.max_completion_tokens or body.max_tokens
    if max_tokens is None and default.max_tokens != SamplingParams().max_tokens:
        max_tokens = default.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    fields: dict[str, object] = {"max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": form}
    if body.thinking_token_budget is not None and not is_forced(body):  # a forced call has no reasoning
        if parsers.is_harmony:
            raise APIError(400, NO_BUDGET, "thinking_token_budget")
        fields["thinking_token_budget"] = body.thinking_token_budget
    if parsers.is_harmony:  # the parser reads token ids, and the text without special tokens
        ends = find_end_tokens(engine.tokenizer) - engine.input_processor.eos_token_ids
        stops = {*(body.stop_token_ids or ()), *(() if body.ignore_eos else ends)}
        body = body.model_copy(update={"skip_special_tokens": True, "stop_token_ids": sorted(stops) or None})
    elif parsers.keeps_special_tokens(body):
        fields["skip_special_tokens"] = False
    return with_fields(engine, body, fields)


def check_max_tokens(body: GenerationRequest, max_model_len: int) -> None:
    """More tokens than the context holds are refused. Those that the prompt leaves no room for end with `length`."""
    for name in ("max_completion_tokens", "max_tokens"):
        wanted = getattr(body, name, None)
        if wanted is not None and wanted > max_model_len:
            context = f"this model's maximum context length is {max_model_len} tokens"
            raise APIError(400, f"{name} must be at most {max_model_len}, got {wanted}: {context}", name)


def with_fields(engine: LLMEngine, body: GenerationRequest, fields: dict[str, object]) -> SamplingParams:
    """The engine's default parameters with what the request says. APIError 400 names a field that is not allowed."""
    vocab_size, num_allowed = engine.input_processor.vocab_size, len(body.allowed_token_ids or ())
    if num_allowed > vocab_size:
        message = f"allowed_token_ids may hold {vocab_size} token ids, the vocabulary, got {num_allowed}"
        raise APIError(400, message, "allowed_token_ids")
    given = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    fields |= {**given, "seed": to_seed(body.seed)}
    if body.top_p == 0:
        fields["top_p"] = LEAST_TOP_P
    if body.logit_bias is not None:
        fields["logit_bias"] = {to_token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.vllm_xargs is not None:
        fields["extra_args"] = body.vllm_xargs
    default = engine.parts.default_sampling_params
    values = {name: getattr(default, name) for name in FIELD_CHECKS}

    def make(values: Mapping[str, Any]) -> SamplingParams:
        return engine.input_processor.check_params(SamplingParams(**values))

    try:
        return make({**values, **fields})
    except (ValueError, TypeError) as error:
        at_fault = field_at_fault(make, values, fields)
        raise APIError(400, str(error), "vllm_xargs" if at_fault == "extra_args" else at_fault) from error


def field_at_fault(
    make: Callable[[Mapping[str, object]], SamplingParams], values: dict[str, object], fields: Mapping[str, object]
) -> str | None:
    """The first of `fields` that `make` refuses, when they are put into `values` one after the other.

    None if `make` refuses `values` by themselves.
    """
    for name, value in {"": None, **fields}.items():
        if name:
            values[name] = value
        try:
            make(values)
        except (ValueError, TypeError):
            return name or None
    return None


def to_seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed, the engine's are not. None for -1, as in vLLM."""
    return None if seed in (None, -1) else seed % 2**64


def to_token_id(key: str) -> int:
    """A key of `logit_bias`, which is a string in JSON."""
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise APIError(400, f"logit_bias must have token ids for keys, got {key!r}", "logit_bias")
    return int(key)
