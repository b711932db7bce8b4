"""From a request's fields to `SamplingParams`, which have the same names, but for a few."""

from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import APIError, refuse
from nanovllm.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from nanovllm.structured_outputs import StructuredOutputsParams

Form = StructuredOutputsParams | None
"""What the output must fit (`forms.py`)."""

SAME = (
    "n",
    "temperature",
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
)


def completion_params(body: CompletionRequest, default: SamplingParams, form: Form = None) -> SamplingParams:
    """With `echo` and `logprobs` the prompt's log-probabilities are wanted too."""
    fields: dict[str, Any] = {"logprobs": body.logprobs, "structured_outputs": form}
    if body.max_tokens is not None:
        fields["max_tokens"] = max(1, body.max_tokens)  # the one token of a request for 0 is not shown
    if body.echo:
        fields["prompt_logprobs"] = body.logprobs
    return with_fields(default, body, fields)


def chat_params(body: ChatCompletionRequest, default: SamplingParams, form: Form = None) -> SamplingParams:
    """The length is open, unless the request or the model's generation_config.json limits it."""
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None and default.max_tokens != SamplingParams().max_tokens:
        max_tokens = default.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    fields = {"max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": form}
    return with_fields(default, body, fields)


def check_length(body: GenerationRequest, max_model_len: int) -> None:
    """More tokens than the context holds are a mistake; more than the prompt leaves room for end with `length`."""
    for name in ("max_completion_tokens", "max_tokens"):
        wanted = getattr(body, name, None)
        if wanted is not None and wanted > max_model_len:
            raise APIError(400, f"{name} must be at most {max_model_len}, the model's context, got {wanted}", name)


def with_fields(default: SamplingParams, body: GenerationRequest, fields: dict[str, Any]) -> SamplingParams:
    """`default` with what the request says; raises APIError 400 with the name of a field that is not allowed."""
    given = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    fields |= {**given, "seed": to_seed(body.seed)}
    with refuse(type(body).model_fields):
        if body.logit_bias is not None:
            fields["logit_bias"] = {to_token_id(key): bias for key, bias in body.logit_bias.items()}
        params = default.clone()
        values = {name: getattr(params, name) for name in type(params).__slots__}
        return SamplingParams(**{**values, **fields})


def to_seed(seed: int | None) -> int | None:
    """OpenAI's seeds have a sign, those of the engine have none; -1 is none at all, as in vLLM."""
    return None if seed in (None, -1) else seed % 2**64  # type: ignore[operator]


def to_token_id(key: str) -> int:
    """A key of `logit_bias`: JSON has no other keys than strings."""
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise ValueError(f"logit_bias must have token ids for keys, got {key!r}")
    return int(key)
