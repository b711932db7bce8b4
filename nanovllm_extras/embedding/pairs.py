"""Score pairs of texts: by the answer of a decoder, or by the cosine of two embeddings.

    pair ─template→ one prompt  ─logits of no and yes→ softmax     with `classifier_from_token`
    pair ─────────→ two prompts ─embeddings──────────→ cosine      otherwise

The prompts of a query begin alike, so the prefix cache holds the query's part for all of its documents. The engine
schedules these prompts as all others. `LLM.score` and the server's routes use the same `PairScoring`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nanovllm.prompts import ChatPrompt
from nanovllm_extras.embedding.pair_classifier import Classifier
from nanovllm_extras.embedding.pooling_params import PoolingParams
from nanovllm_extras.embedding.reading_params import TokenLogitsParams
from nanovllm_extras.embedding.text_cuts import cut_to_fit
from nanovllm_extras.options.chat_options import render_chat

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen's rerankers are asked if a request has no `instruction`."""
TEMPLATE = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruction}
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""The prompt that Qwen publishes for its rerankers."""
Naming: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""A function of a field's name. Its context manager adds the name to a ValueError that is raised within it."""


class Sides(NamedTuple):
    """The two lists of texts that a request compares, with the names of their fields."""

    first_name: str
    first: list[str]
    second_name: str
    second: list[str]

    def check_counts(self) -> None:
        """Raise ValueError unless the first side has one text, or as many as the second."""
        if len(self.first) not in (1, len(self.second)):
            raise ValueError(
                f"{self.second_name} must have as many texts as {self.first_name}, or {self.first_name} one text, "
                f"got {len(self.second)} and {len(self.first)}"
            )

    @property
    def named(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """The name and the texts of each side."""
        return (self.first_name, self.first), (self.second_name, self.second)


@dataclass(frozen=True)
class PairScoring:
    """The pairs of one request and how they are scored. `prompts` are what the engine computes for them."""

    sides: Sides
    classifier: Classifier | None
    """The tokens of a decoder's answers; None scores by embeddings."""
    instruction: str | None = None
    """The task that the template states, for decoders."""
    pooling: str | None = None
    """How the vectors of embeddings are pooled; None is `last`."""
    use_activation: bool = True
    """False returns the difference of a decoder's two logits instead of the probability."""
    max_tokens: int | None = None
    """The number of tokens after which a prompt is cut, at the end of its text."""
    max_tokens_per_doc: int | None = None
    """The number of tokens after which a text of the second side is cut; None or 0 does not cut it."""

    def check_fields(self, named: Naming) -> None:
        """Raise an error of `named` if a field has no meaning for the model."""
        if self.classifier is None and self.instruction is not None:
            with named("instruction"):
                raise ValueError("instruction needs hf_overrides classifier_from_token; write it into the query")
        if self.classifier is not None and self.pooling is not None:
            with named("pooling"):
                raise ValueError(
                    "pooling needs a model without classifier_from_token, whose scores are those of embeddings"
                )

    @property
    def params(self) -> PoolingParams | TokenLogitsParams:
        """The parameters of all prompts."""
        return (
            PoolingParams(self.pooling or "last")
            if self.classifier is None
            else TokenLogitsParams(self.classifier.token_ids)
        )

    def prompts(self, tokenizer: Any, named: Naming) -> Iterator[tuple[str, ChatPrompt]]:
        """Yield the field and the prompt of each text, the first side before the second; of a decoder, of each pair.

        Raises an error of `named` if a text cannot be encoded, or if cutting it does not suffice.
        """
        if self.classifier is None:
            return self._texts(tokenizer, named)
        return self._questions(tokenizer, named, self.classifier)

    def scores(self, outputs: Sequence[Any]) -> list[float]:
        """Return the scores from the outputs of the prompts, in their order."""
        if self.classifier is None:
            return cosines(outputs, len(self.sides.first))
        return judgements(outputs, self.use_activation)

    def pairs_of(self, outputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the outputs of each pair's prompts: of its two texts, or of its question to a decoder."""
        if self.classifier is not None:
            return [(output,) for output in outputs]
        num_first = len(self.sides.first)
        first, second = outputs[:num_first], outputs[num_first:]
        return list(zip(first if num_first > 1 else [*first] * len(second), second, strict=True))

    def _texts(self, tokenizer: Any, named: Naming) -> Iterator[tuple[str, ChatPrompt]]:
        for (name, texts), most in zip(self.sides.named, (None, self.max_tokens_per_doc), strict=True):
            for text in texts:
                with named(name):
                    text = cut_text(tokenizer, text, most)
                    if self.max_tokens is not None:
                        text = cut_to_fit(tokenizer, text, lambda cut: len(tokenizer.encode(cut)), self.max_tokens)
                    prompt = encode(tokenizer, text, True)
                yield name, prompt

    def _questions(self, tokenizer: Any, named: Naming, classifier: Classifier) -> Iterator[tuple[str, ChatPrompt]]:
        first, second = self.sides.first, self.sides.second
        for query, document in zip(first if len(first) > 1 else first * len(second), second, strict=True):
            with named(self.sides.second_name):
                prompt = self._question(tokenizer, classifier, query, document)
            yield self.sides.second_name, prompt

    def _question(self, tokenizer: Any, classifier: Classifier, query: str, document: str) -> ChatPrompt:
        """Return the prompt of one pair. Its document is cut if the prompt has more than `max_tokens` tokens."""

        def make(text: str) -> ChatPrompt:
            return self._write(tokenizer, classifier, query, text)

        document = cut_text(tokenizer, document, self.max_tokens_per_doc)
        prompt = make(document)
        if self.max_tokens is None or len(prompt["prompt_token_ids"]) <= self.max_tokens:
            return prompt
        return make(cut_to_fit(tokenizer, document, lambda cut: len(make(cut)["prompt_token_ids"]), self.max_tokens))

    def _write(self, tokenizer: Any, classifier: Classifier, query: str, document: str) -> ChatPrompt:
        if classifier.has_template:
            asked = [] if self.instruction is None else [{"role": "system", "content": self.instruction}]
            pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return render_chat(tokenizer, [*asked, *pair])
        text = TEMPLATE.format(instruction=self.instruction or INSTRUCTION, query=query, document=document)
        return encode(tokenizer, text, False)


def encode(tokenizer: Any, text: str, add_special_tokens: bool) -> ChatPrompt:
    """Return a text with its token ids."""
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=add_special_tokens)}


def cut_text(tokenizer: Any, text: str, most: int | None) -> str:
    """Return the beginning of a document that has at most `most` tokens; None or 0 does not cut it."""
    if not most:
        return text
    return cut_to_fit(tokenizer, text, lambda cut: len(tokenizer.encode(cut, add_special_tokens=False)), most)


# ---- scores


def cosines(outputs: Sequence[Any], num_first: int) -> list[float]:
    """Return the cosines of embeddings. outputs: of the first side, which has `num_first` texts, then of the second"""
    # one by one, because the conversion of a list blocks other threads
    vectors = np.stack([np.array(output.outputs.embedding) for output in outputs])  # [num_texts, hidden_size] float64
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    first, second = vectors[:num_first], vectors[num_first:]
    products = (first * second).sum(axis=1)  # [1 or num_pairs, hidden_size] * [num_pairs, hidden_size]
    values: list[float] = products.clip(-1, 1).tolist()
    return values


def judgements(outputs: Sequence[Any], is_probability: bool) -> list[float]:
    """Return the probability of yes against no, or the difference of their logits."""
    differences = [float(output.data[1]) - float(output.data[0]) for output in outputs]
    return [sigmoid(one) for one in differences] if is_probability else differences


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)), which is the softmax over two logits whose difference is `value`."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
