"""How does a prompt with its parameters become a request? Checked first, so that a bad one changes nothing.

A prompt is text, token ids, or a dict of one of the two. What this engine could never serve is refused before anything
changes. Called by `LLM`, and by `LLMEngine` when requests are added.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nanovllm import sampling_params
from nanovllm.checks import checks_of
from nanovllm.prompts import Prompt, check_prompt_len, encode_prompt
from nanovllm.request import make_seed
from nanovllm.sampling_params import check_extra_args
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.options.request_params import RequestOutputKind, SamplingParams
from nanovllm_extras.options.token_limits import check_token_limits
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.requests.full_request import Completion, Ending, Request
from nanovllm_extras.requests.prompt_forms import check_keys
from nanovllm_extras.requests.prompt_truncation import truncate
from nanovllm_extras.sampling.logits_processors import Processor, PromptReader

if TYPE_CHECKING:
    from nanovllm_extras.sampling.thinking_budget import ThinkingTags
    from nanovllm_extras.structured.compiler import GrammarCompiler
    from nanovllm_extras.structured.grammar import Grammar


class OtherParams(Protocol):
    """What other kinds of request ask for, such as an embedding. They make requests of other parts."""

    def checked(self, parts: Parts) -> "OtherParams":
        """Return a copy, checked again. Raises ValueError for what this engine can never serve."""

    def make_request(self, processor: "InputProcessor", request_id: str, prompt: Prompt, priority: int) -> Request: ...


class RequestExtras(Protocol):
    """Makes what few requests ask for. `assembly.py` implements it."""

    def grammars(self) -> "GrammarCompiler":
        """Return the compiler of structured outputs."""

    def processors(self, params: SamplingParams) -> tuple[Processor, ...]:
        """Return what changes the logits of a request's rows."""

    def thinking_tags(self) -> "ThinkingTags":
        """Return the tags of the model's reasoning. Raises ValueError if it has none."""

    def prompt_logprobs(self, num_logprobs: int, decoder: TokenDecoder | None, gives_once: bool) -> PromptReader:
        """Return the reader of the log-probabilities of a prompt."""


class TakenParams(NamedTuple):
    """Parameters, copied and checked, and what is made of them. Requests may share them: sequences copy the grammar."""

    params: SamplingParams | OtherParams
    processors: tuple[Processor, ...] = ()
    grammar: "Grammar | None" = None


Params = sampling_params.SamplingParams | OtherParams | TakenParams


class InputProcessor:
    """Makes requests for one engine. A TypeError or ValueError names the field, the value and what is allowed.

    capacity: tokens that one sequence can have in the cache when no other has any; made: what few requests ask for
    """

    def __init__(self, parts: Parts, capacity: int, made: RequestExtras) -> None:
        self.parts, self._made = parts, made
        self.capacity = capacity
        self.vocab_size = parts.model_config.vocab_size
        self.tokenizer = parts.tokenizer
        self.decoder = None if parts.tokenizer is None else TokenDecoder(parts.tokenizer)
        self.eos_token_ids = parts.eos_token_ids

    def encode(self, prompt: Prompt, params: Params | None = None) -> tuple[str | None, list[int]]:
        """Return the text of a prompt, or None, and its token ids, truncated as `params` request."""
        if isinstance(prompt, Mapping) and not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            check_keys(prompt)
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        if isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None:
            token_ids = truncate(token_ids, params, self.parts.max_model_len)
        parts, options = self.parts, "num_kv_blocks or kv_cache_memory_bytes"
        check_prompt_len(len(token_ids), parts.max_model_len, self.capacity, parts.block_size, options)
        return text, token_ids

    def take_params(self, params: object) -> TakenParams:
        """Check parameters, and prepare what needs no prompt, such as a compiled grammar. None is the default."""
        taken = self.check_params(self.parts.default_sampling_params if params is None else params)
        if not isinstance(taken, SamplingParams):
            return TakenParams(taken)
        form = taken.structured_outputs
        processors = () if taken.is_plain else self._made.processors(taken)
        return TakenParams(taken, processors, None if form is None else self.grammars.compile(form))

    def check_params(self, params: Any) -> Any:
        """Return a checked copy of the parameters, so that later changes by the user do not affect the request."""
        if hasattr(params, "make_request"):
            return params.checked(self.parts)
        if not isinstance(params, sampling_params.SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams or None, got {params!r}")
        if not isinstance(params, SamplingParams):  # of nanovllm
            params = SamplingParams(
                **{name: getattr(params, name) for name in checks_of(sampling_params.SamplingParams)}
            )
        if not self.parts.model_config.has_head:
            raise ValueError("the checkpoint has no lm_head, so it cannot generate text; LLM.embed computes embeddings")
        params = params.clone()
        check_extra_args(params.extra_args, self.parts.config.extra_args)
        if not params.is_plain or params.stop_token_ids or params.prompt_logprobs is not None:
            check_token_limits(params, self.vocab_size)
        if self.tokenizer is None and (params.stop_strings or params.bad_words or params.structured_outputs):
            raise ValueError("stop, bad_words and structured_outputs need a tokenizer, but this model has none")
        if params.thinking_token_budget is not None:
            _ = self.thinking_tags  # refuses a model without them
        return params

    def make_request(
        self, request_id: str, prompt: Prompt, given: Params | None, priority: int, stream: bool, number: int
    ) -> Request:
        """Make the request that follows `number` earlier ones. Without a seed, `number` is part of it."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int, got {priority!r}")
        params, processors, grammar = given if isinstance(given, TakenParams) else self.take_params(given)
        if not isinstance(params, SamplingParams):
            return params.make_request(self, request_id, prompt, priority)
        text, token_ids = self.encode(prompt, params)
        seed = make_seed(params.seed, self.parts.config.seed, number, token_ids)
        stream = stream and params.output_kind is not RequestOutputKind.FINAL_ONLY
        gives_deltas = stream and params.output_kind is RequestOutputKind.DELTA
        readers = self._readers(params, gives_deltas)
        endings: tuple[Ending, ...] = ()
        if grammar is not None:
            assert self.decoder is not None  # `check_params` refuses a grammar without a tokenizer
            grammar = self.grammars.for_prompt(grammar, self.decoder, params, token_ids)
            endings = (self.grammars.ending,)
        # a form describes the answer from its first token: there is no reasoning
        budget = params.thinking_token_budget if grammar is None else None
        seqs: list[Sequence] = []  # one for each sample
        for i in range(params.n):
            own_processors = processors if grammar is None else (*processors, grammar.copy())
            if budget is not None:
                own_processors = (*own_processors, self.thinking_tags.budget_for(budget, token_ids))
            own_readers = readers if i == 0 else ()
            seq = Sequence(
                request_id, token_ids, params, self.eos_token_ids, seed, i, priority, own_processors, own_readers
            )
            seqs.append(seq)
        # the first computes the prompt, the others are its children. If there are more samples than sequences may run,
        # the next `max_num_seqs` are a family of their own, and so on
        most = self.parts.config.max_num_seqs
        for first in range(0, params.n, most):
            seqs[first].children = [*seqs[first + 1 : first + most]]
        completions = [Completion(seq, self.decoder, token_ids, gives_deltas) for seq in seqs]
        return Request(text, token_ids, seqs, stream, completions, endings)

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        """Return the compiler of structured outputs, made for the first request that needs it."""
        return self._made.grammars()

    @cached_property
    def thinking_tags(self) -> "ThinkingTags":
        """Return the tags of the model's reasoning. Raises ValueError if it has none."""
        return self._made.thinking_tags()

    @cached_property
    def limits_thinking(self) -> bool:
        """Return whether requests may have a `thinking_token_budget`."""
        try:
            return bool(self.thinking_tags)
        except ValueError:
            return False

    def _readers(self, params: SamplingParams, gives_deltas: bool) -> tuple[PromptReader, ...]:
        """Return the readers of the prompt's hidden states."""
        if params.prompt_logprobs is None:
            return ()
        return (self._made.prompt_logprobs(params.prompt_logprobs, self.decoder, gives_deltas),)
