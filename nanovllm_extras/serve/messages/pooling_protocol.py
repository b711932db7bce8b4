"""Define the fields of requests that score pairs of texts, or return vectors of prompts or of tokens.

`/rerank` has the fields of Jina's and of Cohere's API, `/v1/embeddings` those of OpenAI's, the others those of vLLM.
https://jina.ai/reranker, https://docs.cohere.com/reference/rerank, https://docs.vllm.ai
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from nanovllm_extras.embedding.pairs import Sides
from nanovllm_extras.serve.messages.protocol import Name, Salt, StrictModel, Text, Texts, TokenIds, Whole, conflict

MAX_INPUTS = 2048  # texts, or pairs of texts, of one request: OpenAI's limit for embeddings


class TextObject(StrictModel):
    """A text as an object. Other fields of the object are ignored."""

    text: Text


def check_has_text(value: object) -> object:
    """Return `value`. Raises ValueError for an object without a text, such as an image."""
    if isinstance(value, dict) and not isinstance(value.get("text"), str):
        raise ValueError("must be a text, or an object with a text in its field text; images are not supported")
    return value


OneText: TypeAlias = Annotated[Text | TextObject, BeforeValidator(check_has_text)]
ManyTexts: TypeAlias = Annotated[list[OneText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
"""A list with one text or several texts."""


def text_in(one: str | TextObject) -> str:
    """Return a text that is given as such, or as an object."""
    return one if isinstance(one, str) else one.text


class PoolingFields(StrictModel):
    """The common fields. None means the default."""

    model: Name | None = None
    truncate_prompt_tokens: Whole | None = Field(None, ge=-1)
    """The maximum number of tokens of a prompt, whose text is cut at its end; -1 is what the context holds."""
    # nanovllm's additions
    pooling: Literal["last", "mean"] | None = None
    """How the vectors of embeddings are pooled."""
    priority: Whole | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> "PoolingFields":
        if self.truncate_prompt_tokens == 0:
            raise conflict("truncate_prompt_tokens", "truncate_prompt_tokens must be -1, or at least 1, got 0")
        return self


class PairFields(PoolingFields):
    """The common fields of requests that score pairs of texts."""

    instruction: Text | None = None
    """The task that the reranker's template states, for decoders."""
    max_tokens_per_doc: Whole | None = Field(None, ge=0)
    """The number of tokens after which a document is cut; 0 does not cut it."""
    use_activation: bool | None = None
    """False returns the difference of the two logits, of which the probability is made, for decoders."""


class RerankRequest(PairFields):
    """A request to sort documents by their relevance to a query."""

    query: OneText
    documents: ManyTexts
    top_n: Whole | None = Field(None, ge=0)
    """The number of documents to return, the most relevant first; 0 returns all."""
    return_documents: bool | None = None
    """Whether the results contain the texts of the documents: by default as in vLLM, for `/v2/rerank` as at Cohere."""
    rank_fields: Annotated[list[Name], Field(max_length=64, fail_fast=True)] | None = None
    """Accepted only with the value that has no effect."""

    @model_validator(mode="after")
    def _check_rank_fields(self) -> "RerankRequest":
        if self.rank_fields not in (None, ["text"]):
            raise conflict("rank_fields", 'rank_fields must be ["text"]: the field text of a document is read')
        return self


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names of the fields with the texts, as in vLLM. A request has one of these pairs."""


class ScoreRequest(PairFields):
    """A request for the scores of pairs: one text with one, one with each of a list, or two lists by their indices."""

    text_1: OneText | ManyTexts | None = None
    text_2: OneText | ManyTexts | None = None
    queries: OneText | ManyTexts | None = None
    documents: OneText | ManyTexts | None = None
    items: OneText | ManyTexts | None = None
    data_1: OneText | ManyTexts | None = None
    data_2: OneText | ManyTexts | None = None

    @model_validator(mode="after")
    def _check_sides(self) -> "ScoreRequest":
        given = [name for name in dict.fromkeys(sum(SIDES, ())) if getattr(self, name) is not None]
        if tuple(given) not in SIDES:
            pairs = ", ".join(" and ".join(pair) for pair in SIDES)
            missing = next((name for pair in SIDES if given[:1] == [pair[0]] for name in pair[1:]), SIDES[0][0])
            message = f"give two fields with texts ({pairs}), got {' and '.join(given) or 'none'}"
            raise conflict(given[2] if len(given) > 2 else missing, message)
        try:
            self.sides.check_counts()
        except ValueError as error:
            raise conflict(self.sides.second_name, str(error)) from error
        return self

    @property
    def sides(self) -> Sides:
        """The texts to compare."""
        first, second = next(pair for pair in SIDES if None not in (getattr(self, pair[0]), getattr(self, pair[1])))
        return Sides(first, self._texts(first), second, self._texts(second))

    def _texts(self, name: str) -> list[str]:
        given = getattr(self, name)
        return [text_in(one) for one in (given if isinstance(given, list) else [given])]


class InputFields(PoolingFields):
    """The common fields of requests for vectors."""

    input: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """One text or several texts, or the token ids of one prompt or of several prompts."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` encodes float32 numbers in little-endian order, those of a prompt's tokens one after the other."""
    normalize: bool | None = None
    """Whether vectors are normalised to the length 1, which is the default."""
    add_special_tokens: bool | None = None

    @property
    def is_normalized(self) -> bool:
        """Whether vectors are normalised."""
        return self.normalize is not False


class EmbeddingRequest(InputFields):
    """A request for the embeddings of prompts."""

    dimensions: Whole | None = Field(None, ge=1)
    """The length to which vectors are cut, for models that were trained for this (Matryoshka embeddings).

    Any model has vectors of its own length.
    """


class PoolingRequest(InputFields):
    """A request for the embeddings of prompts, or of each of their tokens."""

    task: Literal["embed", "token_embed"] | None = None
    """One vector for each prompt (the default), or one for each token."""
    use_activation: bool | None = None
    """The newer name of `normalize`."""
    # accepted only with the value that has no effect
    dimensions: None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None

    @model_validator(mode="after")
    def _check_activation(self) -> "PoolingRequest":
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise conflict("normalize", "normalize is the older name of use_activation; give one of them")
        return self

    @property
    def is_normalized(self) -> bool:
        """Whether vectors are normalised."""
        return super().is_normalized and self.use_activation is not False
