"""`LLM.score`: the scores of pairs of texts, as `/score` returns them.

    data_1   data_2         pairs
    1 text   1 text         1
    1 text   N texts        N, each text of data_2 with the text of data_1
    N texts  N texts        N, by their indices

The arguments have the names of the route's fields, which are vLLM's.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from nanovllm.checks import check_bool, check_choice, check_int
from nanovllm_extras.embedding.embedding_outputs import ScoringOutput, ScoringRequestOutput
from nanovllm_extras.embedding.pair_classifier import find_classifier
from nanovllm_extras.embedding.pairs import PairScoring, Sides
from nanovllm_extras.embedding.pooling_params import POOLINGS
from nanovllm_extras.embedding.text_cuts import token_limit
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.engine.llm_methods import CallsEngine
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.options.option_checks import check_optional_str, translate_options
from nanovllm_extras.options.surrogates import check_texts

OPTIONS = ("instruction", "pooling", "use_activation", "truncate_prompt_tokens", "max_tokens_per_doc")


class HasEngine(CallsEngine, Protocol):
    """An `LLM` with its engine."""

    @property
    def engine(self) -> LLMEngine:
        """Return the engine."""


def score(
    self: HasEngine,
    data_1: str | Collection[str],
    data_2: str | Collection[str],
    /,
    *,
    instruction: str | None = None,
    pooling: str | None = None,
    use_activation: bool = True,
    truncate_prompt_tokens: int | None = None,
    max_tokens_per_doc: int | None = None,
    use_tqdm: bool | Callable[..., object] = True,
    lora_request: LoRARequest | None = None,
    **vllm_options: object,
) -> list[ScoringRequestOutput]:
    """Return the score of each pair, `outputs[i].outputs.score`: a decoder's answer, or the cosine of two embeddings.

    A method of `LLM`. With `hf_overrides={"classifier_from_token": ["no", "yes"]}`, a score is the probability of the
    second token against the first one.

    data_1, data_2: one text and one text, one text and a list, or two lists of the same length.
    instruction: the task that the template states, for decoders.
    pooling: `last` (the default) or `mean`, for embeddings.
    use_activation: False returns the difference of a decoder's two logits instead of the probability.
    truncate_prompt_tokens: the maximum number of tokens of a prompt, whose text is cut at its end; -1 is what the
        context holds.
    max_tokens_per_doc: the number of tokens after which a text of `data_2` is cut.
    lora_request: the adapter for all texts, as in `LLM.generate`.
    Raises TypeError or ValueError before anything is queued if a text or a value is bad.
    """
    translate_options(vllm_options, ("data_1", "data_2", "use_tqdm", "lora_request", *OPTIONS), "pooling")
    sides = Sides("data_1", texts_of("data_1", data_1), "data_2", texts_of("data_2", data_2))
    sides.check_counts()
    check_optional_str("instruction", instruction)
    check_texts("instruction", instruction)
    if pooling is not None:
        check_choice("pooling", pooling, POOLINGS)
    check_bool("use_activation", use_activation)
    check_int("truncate_prompt_tokens", truncate_prompt_tokens, -1, optional=True)
    if truncate_prompt_tokens == 0:
        raise ValueError("truncate_prompt_tokens must be -1, or at least 1, got 0")
    if not isinstance(lora_request, LoRARequest | None):
        raise TypeError(f"lora_request must be a LoRARequest, for all texts, or None, got {lora_request!r:.100}")
    check_int("max_tokens_per_doc", max_tokens_per_doc, 0, optional=True)
    engine = self.engine
    if engine.tokenizer is None:
        raise ValueError("score needs a tokenizer, but this model has none; name one by the option tokenizer of LLM")
    scoring = PairScoring(
        sides,
        find_classifier(engine),
        instruction=instruction,
        pooling=pooling,
        use_activation=use_activation,
        max_tokens=token_limit(truncate_prompt_tokens, engine.parts.max_model_len, engine.input_processor.capacity),
        max_tokens_per_doc=max_tokens_per_doc,
    )
    scoring.check_fields(named)
    prompts = [prompt for _, prompt in scoring.prompts(engine.tokenizer, named)]
    requests = self._check(prompts, scoring.params, None, "params", type(scoring.params), lora_request)
    outputs = self._complete(requests, use_tqdm)
    return [
        scoring_output(value, of_pair)
        for value, of_pair in zip(scoring.scores(outputs), scoring.pairs_of(outputs), strict=True)
    ]


def texts_of(name: str, value: object) -> list[str]:
    """Return the texts of one side as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a str or a list of str, got {value!r:.100}")
    if not texts:
        raise ValueError(f"{name} must have at least one text, got an empty list")
    check_texts(name, texts)
    return list(texts)


@contextmanager
def named(field: str) -> Iterator[None]:
    """Add a field's name to a ValueError, unless the message begins with it."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(field) else f"{field}: {message}") from error


def scoring_output(value: float, outputs: tuple[Any, ...]) -> ScoringRequestOutput:
    """Return the output of a pair from those of its prompts: of both texts, or of a decoder's question."""
    return ScoringRequestOutput(
        request_id="_".join(output.request_id for output in outputs),
        outputs=ScoringOutput(value),
        prompt_token_ids=[token_id for output in outputs for token_id in output.prompt_token_ids],
        finished=True,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )
