"""`LLM.beam_search`, what it takes and returns; names are vLLM's."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.prompts import Prompt
from nanovllm_extras.beam_search.beam_outputs import BeamSearchOutput
from nanovllm_extras.beam_search.search import BeamSearch
from nanovllm_extras.engine.input_processor import InputProcessor
from nanovllm_extras.engine.llm_methods import CallsEngine
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.options.option_checks import takes_vllm_options, translate_options
from nanovllm_extras.requests.full_request import Request


@takes_vllm_options("beam search")
@dataclass(frozen=True)
class BeamSearchParams:
    """A bad value raises a TypeError or ValueError that names the field, the value and what is allowed."""

    beam_width: int
    """Completions that are followed at the same time, and returned."""
    max_tokens: int
    """Tokens to generate at most."""
    ignore_eos: bool = False
    """Whether to go on after the model's end-of-sequence tokens."""
    length_penalty: float = 1.0
    """Finished completions are compared by log-probability / length ** length_penalty."""

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_number("length_penalty", self.length_penalty, -100, 100)

    def checked(self, parts: Parts) -> "BeamSearchParams":
        """Return checked parameters. Raises ValueError if this engine cannot serve `beam_width` beams."""
        # each step ranks this many continuations of a beam, so the vocabulary must have as many tokens
        candidates_per_beam = max(2, 1 + len(parts.eos_token_ids))
        most = min(parts.config.max_num_seqs, parts.model_config.vocab_size // candidates_per_beam)
        if self.beam_width > most:
            raise ValueError(
                f"beam_width must be at most {most} (max_num_seqs; vocab_size / {candidates_per_beam}), "
                f"got {self.beam_width}"
            )
        return self

    def make_request(self, processor: InputProcessor, request_id: str, prompt: Prompt, priority: int) -> Request:
        text, token_ids = processor.encode(prompt)
        eos_token_ids = frozenset() if self.ignore_eos else processor.eos_token_ids
        limits = (self.beam_width, self.max_tokens, self.length_penalty)
        search = BeamSearch(*limits, eos_token_ids, processor.tokenizer)
        return search.make_request(request_id, text, token_ids, priority)


def beam_search(
    self: CallsEngine,
    prompts: Prompt | Collection[Prompt],
    params: BeamSearchParams,
    use_tqdm: bool = False,
    lora_request: Any = None,
    **vllm_options: object,
) -> list[BeamSearchOutput]:
    """Return the likeliest completions of each prompt that `params.beam_width` beams find, best first.

    A method of `LLM`. lora_request: as in `LLM.generate`
    """
    translate_options(vllm_options, ("prompts", "params", "use_tqdm", "lora_request"), "beam search")
    if params is None:
        raise TypeError("params must be a BeamSearchParams, got None")
    return self._complete(self._check(prompts, params, None, "params", BeamSearchParams, lora_request), use_tqdm)
