"""Score pairs of texts: by the answer of a decoder, or by the cosine of two embeddings.

    pair ─template→ one prompt  ─logits of no and yes→ softmax     with `classifier_from_token`
    pair ─────────→ two prompts ─embeddings──────────→ cosine      otherwise

The prompts of a query begin alike, so the prefix cache holds the query's part for all of its documents. The engine
schedules these prompts as all others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from fastapi import Request

from nanovllm.prompts import ChatPrompt, Prompt
from nanovllm_extras.embedding.pooling_params import PoolingParams
from nanovllm_extras.embedding.reading_params import TokenLogitsParams
from nanovllm_extras.engine.input_processor import OtherParams
from nanovllm_extras.options.chat_options import render_chat
from nanovllm_extras.serve.bounds import BoundedTokenizer
from nanovllm_extras.serve.classifier import Classifier
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.pooling_protocol import PairFields, Sides
from nanovllm_extras.serve.prompts import MANY, check_lengths, encode_text, require_tokenizer
from nanovllm_extras.serve.readings import check_all_read, read_prompts, usage_of_prompts
from nanovllm_extras.serve.state import Server
from nanovllm_extras.serve.truncation import cut_to_fit, token_limit
from nanovllm_extras.serve.workers import Check

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


class Scores(NamedTuple):
    """The scores of pairs, in the order of the second texts, and the usage."""

    values: list[float]
    usage: dict[str, object]


async def score_pairs(server: Server, request: Request, body: PairFields, score_id: str, sides: Sides) -> Scores:
    """Return the score of each text of the second side: with the only text of the first one, or that of its index.

    Raises APIError if a text is invalid or too long. If cancelled, it aborts the unfinished requests.
    """
    classifier = server.classifier
    check_fields(body, classifier)
    make: Callable[[Check], list[Prompt]] = Embedded(server, body, sides).prompts
    params: OtherParams = PoolingParams(body.pooling or "last")
    if classifier is not None:
        make, params = Judged(server, body, sides, classifier).prompts, TokenLogitsParams(classifier.token_ids)
    prompts = await server.workers.run(request, make, is_long=len(sides.second) > MANY or None)
    outputs = await read_prompts(
        server, request, params, score_id, prompts, sides.second_name, body.priority, body.cache_salt, body.model
    )
    check_all_read(outputs)

    def compute(check: Check) -> list[float]:
        return cosines(outputs, sides) if classifier is None else judgements(outputs, body.use_activation is not False)

    is_short = len(outputs) <= MANY
    values = compute(lambda: None) if is_short else await server.workers.write(request.state.caller, compute)
    return Scores(values, usage_of_prompts(outputs))


def check_fields(body: PairFields, classifier: Classifier | None) -> None:
    """Raise APIError 400 if a field has no meaning for the served model."""
    if classifier is None and body.instruction is not None:
        message = "instruction needs a server with hf_overrides classifier_from_token; write it into the query"
        raise APIError(400, message, "instruction")
    if classifier is not None and body.pooling is not None:
        message = "pooling needs a server without classifier_from_token, whose scores are those of embeddings"
        raise APIError(400, message, "pooling")


def cosines(outputs: Sequence[Any], sides: Sides) -> list[float]:
    """Return the cosines of embeddings. outputs: of the first side, then of the second"""
    # one by one, because the conversion of a list blocks other threads
    vectors = np.stack([np.array(output.outputs.embedding) for output in outputs])  # [num_texts, hidden_size] float64
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    first, second = vectors[: len(sides.first)], vectors[len(sides.first) :]
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


@dataclass(frozen=True)
class Embedded:
    """The prompts of pairs that are scored by embeddings."""

    server: Server
    body: PairFields
    sides: Sides

    def prompts(self, check: Check) -> list[Prompt]:
        """Return the prompts of the first side, then those of the second."""
        tokenizer, sides = bounded_tokenizer(self.server, self.body, check), self.sides
        most = token_limit(self.body.truncate_prompt_tokens, self.server.bounds)
        prompts: list[Prompt] = []
        for name, texts, most_of_text in (
            (sides.first_name, sides.first, None),
            (sides.second_name, sides.second, self.body.max_tokens_per_doc),
        ):
            with refuse(name):
                for text in texts:
                    prompts.append(self._encode(tokenizer, cut_text(tokenizer, text, most_of_text), most))
                    check_lengths(prompts[-1:], name, self.server.bounds)
        return prompts

    def _encode(self, tokenizer: BoundedTokenizer, text: str, most: int | None) -> ChatPrompt:
        if most is not None:
            text = cut_to_fit(tokenizer, text, lambda cut: len(tokenizer.encode(cut)), most)
        return encode_text(tokenizer, text, True)


@dataclass(frozen=True)
class Judged:
    """The prompts of pairs that a decoder judges."""

    server: Server
    body: PairFields
    sides: Sides
    classifier: Classifier

    def prompts(self, check: Check) -> list[Prompt]:
        """Return the prompt of each pair."""
        tokenizer, sides = bounded_tokenizer(self.server, self.body, check), self.sides
        most = token_limit(self.body.truncate_prompt_tokens, self.server.bounds)
        with refuse("instruction"):
            tokenizer.check_text(self.body.instruction or "")
        with refuse(sides.first_name):
            for query in sides.first:
                tokenizer.check_text(query)
        queries = sides.first if len(sides.first) > 1 else sides.first * len(sides.second)
        prompts: list[Prompt] = []
        with refuse(sides.second_name):
            for query, document in zip(queries, sides.second, strict=True):
                tokenizer.check_text(document)
                document = cut_text(tokenizer, document, self.body.max_tokens_per_doc)
                prompts.append(self._prompt(tokenizer, query, document, most))
                check_lengths(prompts[-1:], sides.second_name, self.server.bounds)
        return prompts

    def _prompt(self, tokenizer: BoundedTokenizer, query: str, document: str, most: int | None) -> ChatPrompt:
        """Return the prompt of one pair. Its document is cut if the prompt has more than `most` tokens."""

        def make(text: str) -> ChatPrompt:
            return self._write(tokenizer, query, text)

        prompt = make(document)
        if most is None or len(prompt["prompt_token_ids"]) <= most:
            return prompt
        return make(cut_to_fit(tokenizer, document, lambda cut: len(make(cut)["prompt_token_ids"]), most))

    def _write(self, tokenizer: BoundedTokenizer, query: str, document: str) -> ChatPrompt:
        instruction = self.body.instruction
        if self.classifier.has_template:
            asked = [] if instruction is None else [{"role": "system", "content": instruction}]
            pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return render_chat(tokenizer, [*asked, *pair])
        text = TEMPLATE.format(instruction=instruction or INSTRUCTION, query=query, document=document)
        return encode_text(tokenizer, text, False)


def cut_text(tokenizer: BoundedTokenizer, text: str, most: int | None) -> str:
    """Return the beginning of a document that has at most `most` tokens; None or 0 does not cut it."""
    if not most:
        return text
    return cut_to_fit(tokenizer, text, lambda cut: len(tokenizer.encode(cut, add_special_tokens=False)), most)


def bounded_tokenizer(server: Server, body: PairFields, check: Check) -> BoundedTokenizer:
    """Return the tokenizer for a request, which takes longer texts if they will be cut."""
    is_cut = body.truncate_prompt_tokens is not None or bool(body.max_tokens_per_doc)
    bounds = server.bounds.of_truncated() if is_cut else server.bounds
    tokenizer = require_tokenizer(server.check_ready().engine.tokenizer)
    return BoundedTokenizer(tokenizer, bounds, check)
