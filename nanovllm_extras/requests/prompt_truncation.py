"""`truncate_prompt_tokens`: only the end of a prompt is computed. Called by `InputProcessor.encode`."""

from nanovllm.checks import check_int
from nanovllm_extras.options.request_params import SamplingParams


def check_truncation(name: str, value: object) -> None:
    check_int(name, value, -1)
    if value == 0:
        raise ValueError(f"{name} must be an integer >= 1, or -1, or None, got 0")


FIELD_CHECKS = {"truncate_prompt_tokens": check_truncation}
"""Of `SamplingParams`."""


def truncate(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the last tokens of a prompt. A value of -1 leaves room for the output, at least for one token."""
    num_kept = params.truncate_prompt_tokens
    assert num_kept is not None
    if num_kept > max_model_len - 1:
        raise ValueError(f"truncate_prompt_tokens must be at most {max_model_len - 1} (max_model_len), got {num_kept}")
    if num_kept == -1:
        num_kept = max(1, max_model_len - (params.max_tokens or 1))
    return token_ids[-num_kept:]
