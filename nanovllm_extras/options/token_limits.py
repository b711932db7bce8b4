"""Check the fields of `SamplingParams` that name tokens against the model's vocabulary.

`input_processor.py` calls `check_token_limits` for parameters that have such fields.
"""

from nanovllm_extras.options.request_params import SamplingParams


def check_token_limits(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if a field has a token id, or a number of tokens, that the vocabulary does not have."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if token_id >= vocab_size:
                raise ValueError(f"{name} must hold token ids from 0 to {vocab_size - 1}, got {token_id}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            raise ValueError(f"{name} must be at most the vocabulary's size {vocab_size}, got {value}")
