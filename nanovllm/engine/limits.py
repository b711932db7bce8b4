"""What can one engine serve? A request that it never could serve is refused when it arrives, before anything changes.

These checks depend on the model and the cache; `SamplingParams` itself refuses what is wrong in any engine. Made by
`assembly.py`, called by `intake.py` and `LLM`.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import BeamSearchParams, SamplingParams


@dataclass(frozen=True)
class Limits:
    """Each check raises a TypeError or ValueError that names the field, the value and what is allowed."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_kv_blocks: int
    block_size: int
    capacity: int
    """Tokens that one sequence can have when it is alone."""
    num_eos_tokens: int
    has_tokenizer: bool

    def check_prompt_len(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise ValueError("the prompt is empty; it must have at least 1 token")
        if num_tokens > self.max_model_len - 1:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; at most {self.max_model_len - 1} are allowed "
                f"(max_model_len {self.max_model_len}, less one for the output)"
            )
        if num_tokens > self.capacity:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; the whole KV cache holds {self.capacity} "
                f"({self.num_kv_blocks} blocks of {self.block_size}): give more num_kv_blocks or kv_cache_memory_bytes"
            )

    def num_kept_tokens(self, params: SamplingParams) -> int:
        """Of a prompt that `truncate_prompt_tokens` cuts; -1 leaves room for the output, at least for one token."""
        if params.truncate_prompt_tokens != -1:
            return int(params.truncate_prompt_tokens or 0)
        return max(1, self.max_model_len - (params.max_tokens or 1))

    def take_params(self, params: Any) -> SamplingParams:
        """A copy of the parameters, checked: what the user changes later, this request does not see."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams or None, got {params!r}")
        params = params.clone()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= self.vocab_size:
                    raise ValueError(f"{name} must hold token ids from 0 to {self.vocab_size - 1}, got {token_id}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                raise ValueError(f"{name} must be at most the vocabulary's size {self.vocab_size}, got {value}")
        if (kept := params.truncate_prompt_tokens) is not None and kept > self.max_model_len - 1:
            raise ValueError(
                f"truncate_prompt_tokens must be at most {self.max_model_len - 1} (max_model_len), got {kept}"
            )
        if params.n > self.max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs {self.max_num_seqs}, got {params.n}")
        if not self.has_tokenizer and (params.stop_strings or params.bad_words or params.structured_outputs):
            raise ValueError("stop, bad_words and structured_outputs need a tokenizer, but this model has none")
        return params

    def check_beam_search_params(self, params: Any) -> None:
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be a BeamSearchParams, got {params!r}")
        # each step ranks so many continuations of a beam, so the vocabulary must have as many tokens
        candidates_per_beam = max(2, 1 + self.num_eos_tokens)
        most = min(self.max_num_seqs, self.vocab_size // candidates_per_beam)
        if params.beam_width > most:
            raise ValueError(
                f"beam_width must be at most {most} (max_num_seqs; vocab_size / {candidates_per_beam}), "
                f"got {params.beam_width}"
            )
